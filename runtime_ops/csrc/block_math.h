// What a block computes between its products, forward and backward: RMS norm, rotation, the gated activation, and
// the narrow products of LoRA. One pass over memory each; rows are shared by threads.
#pragma once

#include <cmath>

#include "matrix.h"

namespace ondevice {

constexpr int64_t kRowsOfMath = 16;  // of a task

template <typename Parallel, typename F>
void each_math_row(int64_t rows, const Parallel& parallel, const F& f) {
  parallel((rows + kRowsOfMath - 1) / kRowsOfMath, [&](int64_t begin, int64_t end) {
    const int64_t last = end * kRowsOfMath < rows ? end * kRowsOfMath : rows;
    for (int64_t row = begin * kRowsOfMath; row < last; ++row) f(row);
  });
}

// f(vector or scalar of each of `count` places); `f` is generic.
template <typename F>
ONDEVICE_INLINE void each_vector(int64_t count, const F& f) {
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) f(at, kLanes);
  if (at < count) f(at, count - at);
}

ONDEVICE_INLINE Vec load_some(const float* p, int64_t count) {
  if (count == kLanes) return load(p);
  Vec v = Vec{};
  std::memcpy(&v, p, sizeof(float) * static_cast<size_t>(count));
  return v;
}

ONDEVICE_INLINE void store_some(float* p, Vec v, int64_t count) {
  if (count == kLanes) return store(p, v);
  std::memcpy(p, &v, sizeof(float) * static_cast<size_t>(count));
}

ONDEVICE_INLINE float total(Vec v) {
  float sum = 0.0f;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// `total` of each, lane after lane as there, but of all eight at once.
ONDEVICE_INLINE void totals_of_eight(const Vec (&sums)[8], float (&out)[8]) {
  float lanes[kLanes][8];
  for (int64_t half = 0; half < 8; half += 4) {
    const void* const rows[4] = {&sums[half], &sums[half + 1], &sums[half + 2], &sums[half + 3]};
    transpose_words(rows, kLanes, lanes[0] + half, 8);
  }
  for (int i = 0; i < 8; ++i) out[i] = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 8; ++i) out[i] += lanes[lane][i];
  }
}

ONDEVICE_INLINE float inverse_rms(const float* x, int64_t width, float eps) {
  Vec squares = Vec{};
  each_vector(width, [&](int64_t at, int64_t count) {
    const Vec v = load_some(x + at, count);
    squares += v * v;
  });
  return 1.0f / std::sqrt(total(squares) / static_cast<float>(width) + eps);
}

// y = x r w with r = 1 / rms(x).
template <typename Parallel>
void rms_norm(const float* x, int64_t rows, int64_t width, const float* weight, float eps, float* y,
              const Parallel& parallel) {
  each_math_row(rows, parallel, [&](int64_t row) {
    const float* from = x + row * width;
    const float r = inverse_rms(from, width, eps);
    each_vector(width, [&](int64_t at, int64_t count) {
      store_some(y + row * width + at, load_some(from + at, count) * r * load_some(weight + at, count), count);
    });
  });
}

// out = g + r (gn w - x r^2 mean(gn w x)): the gradient of x from that of its norm, added to g.
template <typename Parallel>
void rms_norm_backward(const float* x, int64_t rows, int64_t width, const float* weight, float eps, const float* gn,
                       const float* g, float* out, const Parallel& parallel) {
  each_math_row(rows, parallel, [&](int64_t row) {
    const int64_t start = row * width;
    const float r = inverse_rms(x + start, width, eps);
    Vec dots = Vec{};
    each_vector(width, [&](int64_t at, int64_t count) {
      dots += load_some(gn + start + at, count) * load_some(weight + at, count) * load_some(x + start + at, count);
    });
    const float along = total(dots) / static_cast<float>(width) * r * r;
    each_vector(width, [&](int64_t at, int64_t count) {
      const Vec gw = load_some(gn + start + at, count) * load_some(weight + at, count);
      const Vec change = (gw - load_some(x + start + at, count) * along) * r;
      store_some(out + start + at, load_some(g + start + at, count) + change, count);
    });
  });
}

// Rotate heads [rows, tokens, heads, width] by cos and sin [tokens, half]; `sign` -1 rotates back. What lies
// behind 2 half stays.
template <typename Parallel>
void rotate(const float* x, int64_t rows, int64_t tokens, int64_t heads, int64_t width, const float* cos,
            const float* sin, int64_t half, float sign, float* y, const Parallel& parallel) {
  each_math_row(rows * tokens, parallel, [&](int64_t row) {
    const float *c = cos + row % tokens * half, *s = sin + row % tokens * half;
    for (int64_t head = 0; head < heads; ++head) {
      const float* from = x + (row * heads + head) * width;
      float* to = y + (row * heads + head) * width;
      each_vector(half, [&](int64_t at, int64_t count) {
        const Vec first = load_some(from + at, count), second = load_some(from + half + at, count);
        const Vec cosine = load_some(c + at, count), sine = load_some(s + at, count) * sign;
        store_some(to + at, first * cosine - second * sine, count);
        store_some(to + half + at, second * cosine + first * sine, count);
      });
      std::memcpy(to + 2 * half, from + 2 * half, sizeof(float) * static_cast<size_t>(width - 2 * half));
    }
  });
}

ONDEVICE_INLINE Vec sigmoid(Vec x) {
  const Vec e = exp_nonpositive(x < Vec{} ? x : -x);
  return (x < Vec{} ? e : splat(1.0f)) / (e + 1.0f);
}

constexpr int64_t kPiece = 4096;  // elements of a task

template <typename Parallel, typename F>
void each_element(int64_t count, const Parallel& parallel, const F& f) {
  parallel((count + kPiece - 1) / kPiece, [&](int64_t begin, int64_t end) {
    const int64_t low = begin * kPiece, high = end * kPiece < count ? end * kPiece : count;
    each_vector(high - low, [&](int64_t at, int64_t some) { f(low + at, some); });
  });
}

// silu(gate) up
template <typename Parallel>
void swiglu(const float* gate, const float* up, int64_t count, float* out, const Parallel& parallel) {
  each_element(count, parallel, [&](int64_t at, int64_t some) {
    const Vec x = load_some(gate + at, some);
    store_some(out + at, x * sigmoid(x) * load_some(up + at, some), some);
  });
}

// g up silu'(gate): the gradient of the gate.
template <typename Parallel>
void swiglu_gate(const float* gate, const float* up, const float* g, int64_t count, float* out,
                 const Parallel& parallel) {
  each_element(count, parallel, [&](int64_t at, int64_t some) {
    const Vec x = load_some(gate + at, some), s = sigmoid(x);
    store_some(out + at, load_some(g + at, some) * load_some(up + at, some) * (s + x * s * (1.0f - s)), some);
  });
}

constexpr int kNarrowRows = kTileRows * kTileVectors >= 24 ? 2 : 1;  // whose sums with 8 of A stay in registers

// y[i][0 .. some) = scale x[i] A^T for Rows rows of x and at most 8 of A.
template <int Rows>
ONDEVICE_INLINE void narrow_rows(const float* x, int64_t width, const float* a, int64_t some, float scale, float* y,
                                 int64_t rank) {
  Vec sums[Rows][8] = {};
  each_vector(width, [&](int64_t at, int64_t count) {
    Vec v[Rows];
    for (int i = 0; i < Rows; ++i) v[i] = load_some(x + i * width + at, count);
    if (some == 8) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        const Vec one = load_some(a + j * width + at, count);
#pragma GCC unroll 2
        for (int i = 0; i < Rows; ++i) sums[i][j] += v[i] * one;
      }
    } else {
      for (int64_t j = 0; j < some; ++j) {
        const Vec one = load_some(a + j * width + at, count);
        for (int i = 0; i < Rows; ++i) sums[i][j] += v[i] * one;
      }
    }
  });
  for (int i = 0; i < Rows; ++i) {
    float totals[8];
    totals_of_eight(sums[i], totals);
    for (int64_t j = 0; j < some; ++j) y[i * rank + j] = scale * totals[j];
  }
}

// x A^T [rows, rank] with A [rank, width].
template <typename Parallel>
void narrow_linear(const float* x, int64_t rows, int64_t width, const float* a, int64_t rank, float scale, float* y,
                   const Parallel& parallel) {
  parallel((rows + kRowsOfMath - 1) / kRowsOfMath, [&](int64_t begin, int64_t end) {
    const int64_t last = end * kRowsOfMath < rows ? end * kRowsOfMath : rows;
    for (int64_t first = 0; first < rank; first += 8) {
      const int64_t some = rank - first < 8 ? rank - first : 8;
      const float* part = a + first * width;
      int64_t row = begin * kRowsOfMath;
      for (; row + kNarrowRows <= last; row += kNarrowRows) {
        narrow_rows<kNarrowRows>(x + row * width, width, part, some, scale, y + row * rank + first, rank);
      }
      for (; row < last; ++row) narrow_rows<1>(x + row * width, width, part, some, scale, y + row * rank + first, rank);
    }
  });
}

// left^T right, scaled: [rank, width] from [rows, rank] and [rows, width].
template <typename Parallel>
void narrow_gradient(const float* left, const float* right, int64_t rows, int64_t rank, int64_t width, float scale,
                     float* out, const Parallel& parallel) {
  parallel((width + kLanes - 1) / kLanes, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * kLanes; at < end * kLanes && at < width; at += kLanes) {
      const int64_t count = width - at < kLanes ? width - at : kLanes;
      for (int64_t first = 0; first < rank; first += 8) {
        Vec sums[8] = {};
        const int64_t some = rank - first < 8 ? rank - first : 8;
        for (int64_t row = 0; row < rows; ++row) {
          const Vec v = load_some(right + row * width + at, count);
          const float* factors = left + row * rank + first;
          if (some == 8) {
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) sums[i] += v * factors[i];
          } else {
            for (int64_t i = 0; i < some; ++i) sums[i] += v * factors[i];
          }
        }
        for (int64_t i = 0; i < some; ++i) store_some(out + (first + i) * width + at, sums[i] * scale, count);
      }
    }
  });
}

}  // namespace ondevice
