// A frozen matrix W [outputs, inputs] in float32, 8 bits (a scale a row) or 4 bits (a scale and a minimum for
// each 32 inputs), read where a file is mapped: panels of 32 columns of W^T or of W, as floats.
#pragma once

#include "gemm.h"

namespace ondevice {

constexpr int64_t kColumns = 32;    // of a panel
constexpr int64_t kDepth = 256;     // rows of a panel at once: 32 KiB, and sums of as many terms
constexpr int64_t kQ4Group = 32;

struct Matrix {
  enum Kind { kFloat, kInt8, kQ4 };
  Kind kind;
  const void* data;         // float; int8; or bytes of two levels, the first in the high half
  const float* scales;      // of kInt8 [outputs]
  const uint16_t* halves;   // of kQ4, IEEE half [outputs, inputs / 32]: scales
  const uint16_t* minima;   // and minima
  int64_t outputs, inputs;

  // Of a row's levels or floats.
  int64_t row_bytes() const { return kind == kFloat ? 4 * inputs : kind == kInt8 ? inputs : inputs / 2; }

  // W's rows [first, first + count).
  Matrix rows(int64_t first, int64_t count) const {
    const int64_t groups = inputs / kQ4Group;
    return {kind,
            static_cast<const char*>(data) + first * row_bytes(),
            scales ? scales + first : nullptr,
            halves ? halves + first * groups : nullptr,
            minima ? minima + first * groups : nullptr,
            count,
            inputs};
  }
};

ONDEVICE_INLINE void floats_of(const int8_t* __restrict levels, float scale, int64_t count,
                               float* __restrict out) {
  for (int64_t j = 0; j < count; ++j) out[j] = static_cast<float>(levels[j]) * scale;
}

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef float Sixteen __attribute__((vector_size(64)));

// 32 levels of 16 bytes, the first of two in the high half, as floats.
ONDEVICE_INLINE void q4_levels(const uint8_t* bytes, float* out) {
  Bytes both;
  std::memcpy(&both, bytes, sizeof both);
  const Bytes high = both >> 4, low = both & 15;
  const Bytes first = __builtin_shufflevector(high, low, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const Bytes second =
      __builtin_shufflevector(high, low, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  const Sixteen left = __builtin_convertvector(first, Sixteen), right = __builtin_convertvector(second, Sixteen);
  std::memcpy(out, &left, sizeof left);
  std::memcpy(out + 16, &right, sizeof right);
}

// W[row, first .. first + count) as floats; of kQ4 `first` is a multiple of 32.
inline void dequantize_row(const Matrix& w, int64_t row, int64_t first, int64_t count, float* __restrict out) {
  if (w.kind == Matrix::kFloat) {
    std::memcpy(out, static_cast<const float*>(w.data) + row * w.inputs + first, sizeof(float) * count);
  } else if (w.kind == Matrix::kInt8) {
    floats_of(static_cast<const int8_t*>(w.data) + row * w.inputs + first, w.scales[row], count, out);
  } else {
    const int64_t groups = w.inputs / kQ4Group;
    const uint8_t* bytes = static_cast<const uint8_t*>(w.data) + (row * w.inputs + first) / 2;
    for (int64_t at = 0; at < count; at += kQ4Group, bytes += kQ4Group / 2, out += kQ4Group) {
      const int64_t group = row * groups + (first + at) / kQ4Group;
      const float scale = half_to_float(w.halves[group]), low = half_to_float(w.minima[group]);
      float values[kQ4Group];
      q4_levels(bytes, values);
      float* to = count - at < kQ4Group ? values : out;
      for (int j = 0; j < kQ4Group; ++j) to[j] = values[j] * scale + low;
      if (to == values) std::memcpy(out, values, sizeof(float) * static_cast<size_t>(count - at));
    }
  }
}

typedef float Four __attribute__((vector_size(16)));

// out[k][0 .. 3] = rows[0 .. 3][k], out with a row of `stride` floats.
inline void transpose_four(const float* const rows[4], int64_t count, float* __restrict out, int64_t stride) {
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) {
    Four a, b, c, d;
    std::memcpy(&a, rows[0] + k, 16);
    std::memcpy(&b, rows[1] + k, 16);
    std::memcpy(&c, rows[2] + k, 16);
    std::memcpy(&d, rows[3] + k, 16);
    const Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    const Four ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7), cd2 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    const Four columns[4] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                             __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5),
                             __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7)};
    for (int i = 0; i < 4; ++i) std::memcpy(out + (k + i) * stride, &columns[i], 16);
  }
  for (; k < count; ++k) {
    for (int i = 0; i < 4; ++i) out[k * stride + i] = rows[i][k];
  }
}

// out[k][j] = W[column + j][first + k], for x W^T; zero in columns beyond `columns`. `scratch` holds 4 * kDepth.
inline void pack_rows(const Matrix& w, int64_t column, int64_t columns, int64_t first, int64_t depth,
                      float* scratch, float* out) {
  if (columns < kColumns) std::memset(out, 0, sizeof(float) * static_cast<size_t>(depth * kColumns));
  for (int64_t j = 0; j < columns; j += 4) {
    const float* rows[4];
    const int64_t some = columns - j < 4 ? columns - j : 4;
    for (int64_t i = 0; i < some; ++i) {
      if (w.kind == Matrix::kFloat) {
        rows[i] = static_cast<const float*>(w.data) + (column + j + i) * w.inputs + first;
      } else {
        dequantize_row(w, column + j + i, first, depth, scratch + i * kDepth);
        rows[i] = scratch + i * kDepth;
      }
    }
    if (some == 4) {
      transpose_four(rows, depth, out + j, kColumns);
    } else {
      for (int64_t i = 0; i < some; ++i) {
        for (int64_t k = 0; k < depth; ++k) out[k * kColumns + j + i] = rows[i][k];
      }
    }
  }
}

// out[k][j] = W[first + k][column + j], for g W.
inline void pack_columns(const Matrix& w, int64_t column, int64_t columns, int64_t first, int64_t depth,
                         float* out) {
  if (columns < kColumns) std::memset(out, 0, sizeof(float) * static_cast<size_t>(depth * kColumns));
  for (int64_t k = 0; k < depth; ++k) dequantize_row(w, first + k, column, columns, out + k * kColumns);
}

// y[row][column .. column + columns) (+)= a[rows, depth] b[depth, kColumns]; strides in floats.
inline void multiply_columns(const float* a, int64_t row_step, int64_t depth_step, int64_t rows, int64_t depth,
                             const float* b, int64_t ldb, float* y, int64_t ldy, int64_t columns, bool add) {
  for_row_tiles(rows, [&](int64_t row, int64_t count) {
    for (int64_t part = 0; part < columns; part += kTileColumns) {
      const int64_t valid = columns - part < kTileColumns ? columns - part : kTileColumns;
      float* target = y + row * ldy + part;
      with_rows(count, [&](auto height) {
        constexpr int kRows = decltype(height)::value;
        Vec acc[kRows][kTileVectors];
        clear(acc);
        accumulate_tile<kRows, kTileVectors>(a + row * row_step, row_step, depth_step, b + part, ldb, depth, acc);
        for (int i = 0; i < kRows; ++i, target += ldy) {
          if (valid == kTileColumns) {
            for (int j = 0; j < kTileVectors; ++j) {
              float* to = target + j * kLanes;
              store(to, add ? load(to) + acc[i][j] : acc[i][j]);
            }
          } else {
            float some[kTileColumns];
            for (int j = 0; j < kTileVectors; ++j) store(some + j * kLanes, acc[i][j]);
            for (int64_t j = 0; j < valid; ++j) target[j] = (add ? target[j] : 0.0f) + some[j];
          }
        }
      });
    }
  });
}

}  // namespace ondevice
