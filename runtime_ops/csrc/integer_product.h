// Products of rows that are rounded to 8 bits as they come with a matrix that lies in 8 bits: sums of integers,
// exact, so that every processor has the same.
//
// A row x is u in 0..255 with x near scale (u - zero). A panel holds four consecutive k of 32 columns as
// [k / 4][column][4]. `integer_tile` multiplies; the form of it is chosen when the program runs.
#pragma once

#include <memory>
#include <vector>

#include "matrix.h"

namespace ondevice {

constexpr int64_t kIntegerDepth = 2048;                          // of a panel at most
constexpr int64_t kIntegerPanel = kIntegerDepth * kColumns;      // bytes
constexpr int64_t kIntegerRows = 12;                             // of a tile at most

typedef uint8_t LevelVec __attribute__((vector_size(kLanes)));

struct Rounded {
  std::vector<uint8_t> levels;  // [rows, stride], zeros behind a row's end
  std::vector<float> scales;    // [rows]
  std::vector<int32_t> zeros;   // [rows]
  int64_t stride = 0;
};

// sums[i][j] = sum over k of u[i * stride + k] w[k / 4][j][k % 4] for 32 columns; `quads` is depth / 4. Its
// result may lack `offset` times the column's sum: of the form that takes signed bytes.
using IntegerTile = void (*)(const uint8_t* u, int64_t stride, int64_t rows, const int8_t* panel, int64_t quads,
                             int32_t* sums);

struct IntegerForm {
  const char* name;
  bool (*available)();
  IntegerTile tile;
  int32_t offset;
};

// All forms that were compiled, the fastest first; the last is always available.
const IntegerForm* integer_forms(int* count);
// The first that this processor has, or the one that ONDEVICE_INTEGERS names.
const IntegerForm& integer_form();

// Round rows of x, multiplied by `factors` [length] if given.
template <typename Parallel>
void round_rows(const float* x, int64_t rows, int64_t length, const float* factors, Rounded& out,
                const Parallel& parallel) {
  out.stride = (length + 3) / 4 * 4;
  out.levels.resize(static_cast<size_t>(rows * out.stride));
  out.scales.resize(static_cast<size_t>(rows));
  out.zeros.resize(static_cast<size_t>(rows));
  parallel(rows, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* __restrict scaled = scratch.get(length);
    for (int64_t row = begin; row < end; ++row) {
      const float* __restrict values = x + row * length;
      if (factors) {
        for (int64_t k = 0; k < length; ++k) scaled[k] = values[k] * factors[k];
        values = scaled;
      }
      Vec lows = Vec{}, highs = Vec{}, none = Vec{};  // `none` stays 0 but for values that are not finite
      int64_t k = 0;
      for (; k + kLanes <= length; k += kLanes) {
        const Vec v = load(values + k);
        lows = v < lows ? v : lows;
        highs = v > highs ? v : highs;
        none += v * 0.0f;
      }
      float low = 0.0f, high = 0.0f, not_finite = 0.0f;
      for (int i = 0; i < kLanes; ++i) {
        not_finite += none[i];
        low = lows[i] < low ? lows[i] : low;
        high = highs[i] > high ? highs[i] : high;
      }
      for (; k < length; ++k) {
        low = values[k] < low ? values[k] : low;
        high = values[k] > high ? values[k] : high;
        not_finite += values[k] * 0.0f;
      }
      uint8_t* __restrict levels = out.levels.data() + row * out.stride;
      if (!(not_finite == 0.0f)) {  // the products are not finite either, and whoever looks sees it
        std::memset(levels, 0, static_cast<size_t>(out.stride));
        out.scales[static_cast<size_t>(row)] = not_finite;
        out.zeros[static_cast<size_t>(row)] = 0;
        continue;
      }
      const float scale = high > low ? (high - low) / 255.0f : 1.0f, inverse = 1.0f / scale;
      const float zero = static_cast<float>(static_cast<int32_t>(-low * inverse + 0.5f));
      out.scales[static_cast<size_t>(row)] = scale;
      out.zeros[static_cast<size_t>(row)] = static_cast<int32_t>(zero);
      // Not negative but by rounding: truncation of a half more rounds.
      for (k = 0; k + kLanes <= length; k += kLanes) {
        Vec level = load(values + k) * inverse + (zero + 0.5f);
        level = level > Vec{} ? level : Vec{};
        level = level < splat(255.0f) ? level : splat(255.0f);
        const LevelVec bytes = __builtin_convertvector(__builtin_convertvector(level, IntVec), LevelVec);
        std::memcpy(levels + k, &bytes, sizeof bytes);
      }
      for (; k < length; ++k) {
        float level = values[k] * inverse + (zero + 0.5f);
        level = level < 0.0f ? 0.0f : level > 255.0f ? 255.0f : level;
        levels[k] = static_cast<uint8_t>(static_cast<int32_t>(level));
      }
      for (; k < out.stride; ++k) levels[k] = 0;
    }
  });
}

// Panel [depth / 4][32][4] of W^T's or W's columns, and each column's sum.
void pack_integers(const Matrix& w, bool transposed, int64_t column, int64_t columns, int64_t first, int64_t depth,
                   int8_t* panel, int32_t* totals);

// y[:, column ..] (+)= rounded W^T or, with `transposed`, rounded W; `panel` holds kIntegerPanel bytes.
inline void multiply_integers(const Rounded& x, int64_t rows, const Matrix& w, bool transposed, int64_t column,
                              int64_t columns, int8_t* panel, float* y, int64_t ldy, bool add) {
  const IntegerForm& form = integer_form();
  const int64_t length = transposed ? w.outputs : w.inputs;
  alignas(64) int32_t sums[kIntegerRows * kColumns], totals[kColumns];
  for (int64_t first = 0; first < length; first += kIntegerDepth, add = true) {
    const int64_t depth = length - first < kIntegerDepth ? length - first : kIntegerDepth;
    pack_integers(w, transposed, column, columns, first, depth, panel, totals);
    for (int64_t row = 0; row < rows; row += kIntegerRows) {
      const int64_t count = rows - row < kIntegerRows ? rows - row : kIntegerRows;
      form.tile(x.levels.data() + row * x.stride + first, x.stride, count, panel, (depth + 3) / 4, sums);
      for (int64_t i = 0; i < count; ++i) {
        const float scale = x.scales[static_cast<size_t>(row + i)];
        const int32_t zero = x.zeros[static_cast<size_t>(row + i)] - form.offset;
        float* __restrict to = y + (row + i) * ldy;
        const int32_t* __restrict from = sums + i * kColumns;
        float values[kColumns];
        for (int64_t j = 0; j < kColumns; ++j) {
          values[j] = scale * static_cast<float>(from[j] - zero * totals[j]);
        }
        if (!transposed) {
          for (int64_t j = 0; j < columns; ++j) values[j] *= w.scales[column + j];
        }
        for (int64_t j = 0; j < columns; ++j) to[j] = (add ? to[j] : 0.0f) + values[j];
      }
    }
  }
}

}  // namespace ondevice
