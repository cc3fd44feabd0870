// One AdamW step over flat arrays in one pass over memory ("Layer-Adam" of SlideFormer, section 3): read the
// gradient, update the float32 state, write bfloat16 parameters.
// adam_storage.h says how the state is stored.
//
// Work goes in tiles of 128 elements at multiples of 128. Whatever part of a tile is wanted, the same loops run
// over all of it, and random words depend on the element's index: bits depend neither on how the arrays are cut
// nor on the number of threads. Every sum, product, quotient and root is one IEEE operation (layer_adam.cpp is
// compiled without contraction), so they do not depend on the processor either, and triton_adam.py, which does
// the same on a GPU, gives the same ones.
#pragma once

#include <type_traits>

#include "adam_avx512.h"
#include "adam_storage.h"

#if defined(__AVX512BW__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("prefer-vector-width=512")
#endif

namespace ondevice {

constexpr int64_t kAdamChunk = 1 << 16;  // elements of a task

// The update of float32 values. Never inlined, so that every form of storage runs the same instructions; the
// same holds for the 8-bit codes.
__attribute__((noinline)) inline void adam_tile(const AdamArguments& a, const float* __restrict g,
                                                float* __restrict p, float* __restrict m, float* __restrict v) {
  const float decay = a.decay, beta2 = a.beta2, weight1 = a.weight1, weight2 = a.weight2, root = a.root;
  const float eps = a.eps, size = a.size, grad_scale = a.grad_scale;
  for (int i = 0; i < kTile; ++i) {
    const float x = g[i] * grad_scale;
    const float mean = m[i] + weight1 * (x - m[i]);
    const float square = bits_float(float_bits(v[i]) & 0x7FFFFFFFu) * beta2 + x * x * weight2;
    m[i] = mean;
    v[i] = square;
    p[i] = p[i] * decay - size * mean / (std::sqrt(square) * root + eps);
  }
}

template <bool Split, typename Grad, typename M, typename V>
ONDEVICE_INLINE void step_tile(const AdamArguments& a, int64_t tile, const AdamTile<Grad, M, V>& t) {
#if defined(ONDEVICE_ADAM_AVX512)
  if constexpr (Split && sizeof(Grad) == 2 && sizeof(M) < 4) return step_tile_avx512(a, tile, t);
#endif
  alignas(64) float g[kTile], p[kTile], m[kTile], v[kTile];
  alignas(64) uint32_t words[kTile];
  const float* grad;
  if constexpr (sizeof(Grad) == 2) {
    widen(t.grad, g);
    grad = g;
  } else {
    grad = t.grad;
  }
  float* master = Split ? p : t.master;
  if constexpr (Split) merge_range(t.high, t.low, t.v, kTile, p);
  if constexpr (sizeof(M) == 4) {
    adam_tile(a, grad, master, t.m, t.v);
  } else {
    if constexpr (sizeof(M) == 2) {
      widen(t.m, m);
      widen(t.v, v);
    } else {
      decode_tile(t.m, t.v, a.m_scale[tile], a.v_scale[tile], m, v);
    }
    adam_tile(a, grad, master, m, v);
    random_words(a.key, tile, words);
    if constexpr (sizeof(M) == 2) {
      narrow<0>(m, words, t.m);
      narrow<16>(v, words, t.v);
    } else {
      encode_tile(m, v, words, t.m, t.v, a.m_scale[tile], a.v_scale[tile]);
    }
  }
  if constexpr (Split) {
    split_range(p, kTile, t.high, t.low, t.v);
  } else if (t.high != nullptr) {
    for (int i = 0; i < kTile; ++i) {
      t.high[i] = static_cast<uint16_t>(nearest_bfloat16(quiet(float_bits(master[i]))));
    }
  }
}

// Elements [begin, end). A tile of which only a part is wanted goes through copies, and so does one whose new
// state goes elsewhere.
template <bool Split, typename Grad, typename M, typename V>
void step_range(const AdamArguments& a, int64_t begin, int64_t end) {
  const AdamTile<Grad, M, V> all{
      static_cast<const Grad*>(a.grad), a.master, a.high, a.low, static_cast<M*>(a.m), static_cast<V*>(a.v)};
  const bool moves = a.to_m != nullptr;
  AdamArguments own = a;
  if (moves) {
    own.m_scale = a.to_m_scale;
    own.v_scale = a.to_v_scale;
  }
  for (int64_t tile = begin / kTile; tile * kTile < end; ++tile) {
    const int64_t first = tile * kTile, low = begin > first ? begin - first : 0;
    const int64_t high = end - first < kTile ? end - first : kTile;
    if (high - low == kTile && !moves) {
      const AdamTile<Grad, M, V> whole{all.grad + first,
                                       Split ? nullptr : all.master + first,
                                       all.high == nullptr ? nullptr : all.high + first,
                                       Split ? all.low + first : nullptr,
                                       all.m + first,
                                       all.v + first};
      step_tile<Split>(a, tile, whole);
      continue;
    }
    alignas(64) Grad grad[kTile] = {};
    alignas(64) float master[kTile] = {};
    alignas(64) uint16_t upper[kTile] = {}, lower[kTile] = {};
    alignas(64) M m[kTile] = {};
    alignas(64) V v[kTile] = {};
    const auto copy = [&](auto* into, const auto* from) {
      std::memcpy(into, from, static_cast<size_t>(high - low) * sizeof *into);
    };
    const int64_t at = first + low;
    const auto put = [&](auto* here, auto* there, const auto* from) {
      if (!moves) return copy(here + at, from + low);
      stream_copy(there + at, from + low, static_cast<size_t>(high - low) * sizeof *there);
    };
    copy(grad + low, all.grad + at);
    copy(m + low, all.m + at);
    copy(v + low, all.v + at);
    if (!Split) copy(master + low, all.master + at);
    if (Split) copy(upper + low, all.high + at);
    if (Split) copy(lower + low, all.low + at);
    if (moves && sizeof(M) == 1) {
      own.m_scale[tile] = a.m_scale[tile];
      own.v_scale[tile] = a.v_scale[tile];
    }
    step_tile<Split>(own, tile, AdamTile<Grad, M, V>{grad, master, upper, lower, m, v});
    put(all.m, static_cast<M*>(a.to_m), m);
    put(all.v, static_cast<V*>(a.to_v), v);
    if (!Split) put(all.master, a.to_master, master);
    if (all.high != nullptr) put(all.high, a.to_high, upper);
    if (Split) put(all.low, a.to_low, lower);
  }
  if (moves) stream_end();
}

using AdamRange = void (*)(const AdamArguments&, int64_t, int64_t);

template <bool Split, typename Grad>
AdamRange adam_range(int64_t moments) {
  if (moments == 0) return step_range<Split, Grad, float, float>;
  if (moments == 1) return step_range<Split, Grad, uint16_t, uint16_t>;
  return step_range<Split, Grad, uint8_t, uint8_t>;
}

// f(begin, count) over chunks of `count` elements.
template <typename Parallel, typename F>
void for_chunks(int64_t count, const Parallel& parallel, const F& f) {
  parallel((count + kAdamChunk - 1) / kAdamChunk, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kAdamChunk, last = end * kAdamChunk < count ? end * kAdamChunk : count;
    f(first, last - first);
  });
}

template <typename Parallel>
void layer_adam(const AdamArguments& a, const Parallel& parallel) {
  const bool split = a.master == nullptr;
  const AdamRange f32 = split ? adam_range<true, float>(a.moments) : adam_range<false, float>(a.moments);
  const AdamRange b16 = split ? adam_range<true, uint16_t>(a.moments) : adam_range<false, uint16_t>(a.moments);
  const AdamRange step = a.grad_float32 ? f32 : b16;
  if (a.rows == nullptr) {
    return for_chunks(a.numel, parallel, [&](int64_t first, int64_t count) { step(a, first, first + count); });
  }
  const int64_t group = a.width < kAdamChunk ? kAdamChunk / a.width : 1;
  parallel((a.row_count + group - 1) / group, [&](int64_t begin, int64_t end) {
    const int64_t last = end * group < a.row_count ? end * group : a.row_count;
    for (int64_t i = begin * group, next; i < last; i = next) {
      for (next = i + 1; next < last && a.rows[next] == a.rows[next - 1] + 1;) ++next;  // a run of rows
      step(a, a.rows[i] * a.width, (a.rows[next - 1] + 1) * a.width);
    }
  });
}

// Calls f with a pointer of the type that `moments` says.
template <typename Pointer, typename F>
void with_moment(Pointer v, int64_t moments, const F& f) {
  constexpr bool kConst = std::is_const_v<std::remove_pointer_t<Pointer>>;
  if (moments == 0) return f(static_cast<std::conditional_t<kConst, const float*, float*>>(v));
  if (moments == 1) return f(static_cast<std::conditional_t<kConst, const uint16_t*, uint16_t*>>(v));
  f(static_cast<std::conditional_t<kConst, const uint8_t*, uint8_t*>>(v));
}

template <typename Parallel>
void split_master(const float* master, int64_t count, uint16_t* high, uint16_t* low, void* v, int64_t moments,
                  const Parallel& parallel) {
  with_moment(v, moments, [&](auto* typed) {
    for_chunks(count, parallel, [&](int64_t begin, int64_t size) {
      split_range(master + begin, size, high + begin, low + begin, typed + begin);
    });
  });
}

template <typename Parallel>
void merge_master(const uint16_t* high, const uint16_t* low, const void* v, int64_t moments, int64_t count,
                  float* master, const Parallel& parallel) {
  with_moment(v, moments, [&](auto* typed) {
    for_chunks(count, parallel, [&](int64_t begin, int64_t size) {
      merge_range(high + begin, low + begin, typed + begin, size, master + begin);
    });
  });
}

}  // namespace ondevice

#if defined(__AVX512BW__) && !defined(__clang__)
#pragma GCC pop_options
#endif
