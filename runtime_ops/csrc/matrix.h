// A frozen matrix W [outputs, inputs] in float32, 8 bits (a scale a row) or 4 bits (a scale and a minimum for
// each 32 inputs), read where a file is mapped: panels of 32 columns of W^T or of W, as floats.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

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
  int64_t row_bytes() const { return bytes_of(inputs); }

  // Where W[row, column] lies; of kQ4 `column` is even.
  const char* address(int64_t row, int64_t column) const {
    return static_cast<const char*>(data) + row * row_bytes() + bytes_of(column);
  }
  int64_t bytes_of(int64_t columns) const { return kind == kFloat ? 4 * columns : kind == kInt8 ? columns : columns / 2; }

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

// `half_to_float` of one number, where a processor does it.
ONDEVICE_INLINE float float_of_half(uint16_t half) {
#if defined(__F16C__)
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
#else
  return half_to_float(half);
#endif
}

// GCC makes a dozen instructions of its own conversion from bytes.
ONDEVICE_INLINE void store_levels(Bytes levels, float* out) {
#if defined(__AVX512F__)
  _mm512_storeu_ps(out, _mm512_maskz_cvtepi32_ps(0xFFFF, _mm512_maskz_cvtepu8_epi32(0xFFFF, (__m128i)levels)));
#elif defined(__AVX2__)
  const __m128i low = (__m128i)levels, high = _mm_srli_si128(low, 8);
  _mm256_storeu_ps(out, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(low)));
  _mm256_storeu_ps(out + 8, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(high)));
#else
  const Sixteen values = __builtin_convertvector(levels, Sixteen);
  std::memcpy(out, &values, sizeof values);
#endif
}

// 32 levels of 16 bytes, the first of two in the high half, as floats.
ONDEVICE_INLINE void q4_levels(const uint8_t* bytes, float* out) {
  Bytes both;
  std::memcpy(&both, bytes, sizeof both);
  const Bytes high = both >> 4, low = both & 15;
  const Bytes first = __builtin_shufflevector(high, low, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const Bytes second =
      __builtin_shufflevector(high, low, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  store_levels(first, out);
  store_levels(second, out + 16);
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
      const float scale = float_of_half(w.halves[group]), low = float_of_half(w.minima[group]);
      float values[kQ4Group];
      q4_levels(bytes, values);
      float* to = count - at < kQ4Group ? values : out;
      for (int j = 0; j < kQ4Group; ++j) to[j] = values[j] * scale + low;
      if (to == values) std::memcpy(out, values, sizeof(float) * static_cast<size_t>(count - at));
    }
  }
}

typedef float Four __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));

// Words of four bytes: out[k][0 .. 3] = rows[0 .. 3][k], out with a row of `stride` words. None need be aligned. `Flipped`
// changes bits of each.
template <uint32_t Flipped = 0>
inline void transpose_words(const void* const rows[4], int64_t count, void* out, int64_t stride) {
  const char* from[4];
  for (int i = 0; i < 4; ++i) from[i] = static_cast<const char*>(rows[i]);
  char* to = static_cast<char*>(out);
  const int64_t whole = count / 4 * 4;
  for (int64_t k = 0; k < whole; k += 4) {
    Four words[4];
    for (int i = 0; i < 4; ++i) {
      Bits bits;
      std::memcpy(&bits, from[i] + 4 * k, 16);
      words[i] = (Four)(bits ^ Flipped);
    }
    const Four a = words[0], b = words[1], c = words[2], d = words[3];
    const Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    const Four ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7), cd2 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    const Four columns[4] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                             __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5),
                             __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7)};
    for (int i = 0; i < 4; ++i) std::memcpy(to + 4 * (k + i) * stride, &columns[i], 16);
  }
  for (int64_t k = whole; k < count; ++k) {
    for (int i = 0; i < 4; ++i) {
      uint32_t word;
      std::memcpy(&word, from[i] + 4 * k, 4);
      word ^= Flipped;
      std::memcpy(to + 4 * (k * stride + i), &word, 4);
    }
  }
}

inline void transpose_four(const float* const rows[4], int64_t count, float* __restrict out, int64_t stride) {
  const void* const words[4] = {rows[0], rows[1], rows[2], rows[3]};
  transpose_words(words, count, out, stride);
}

// Ask for bytes of W before they are read: processors do not guess lines that lie apart. What lies behind W does no
// harm.
ONDEVICE_INLINE void ask_for(const char* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

constexpr int64_t kRowsAhead = 16;  // of W: how early a panel of its columns is asked for

// out[k][j] = W[column + j][first + k], for x W^T; zero in columns beyond `columns`. `scratch` holds 4 * kDepth.
inline void pack_rows(const Matrix& w, int64_t column, int64_t columns, int64_t first, int64_t depth,
                      float* scratch, float* out) {
  if (columns < kColumns) std::memset(out, 0, sizeof(float) * static_cast<size_t>(depth * kColumns));
  for (int64_t j = 0; j < columns; j += 4) {
    const float* rows[4];
    const int64_t some = columns - j < 4 ? columns - j : 4;
    for (int64_t i = 0; i < some; ++i) {
      ask_for(w.address(column + kColumns + j + i, first), w.bytes_of(depth));
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
  for (int64_t k = 0; k < depth; ++k, out += kColumns) {
    ask_for(w.address(first + k + kRowsAhead, column), w.bytes_of(columns));
    if (w.kind == Matrix::kFloat && columns == kColumns) {
      std::memcpy(out, static_cast<const float*>(w.data) + (first + k) * w.inputs + column, sizeof(float) * kColumns);
    } else {
      dequantize_row(w, first + k, column, columns, out);
    }
  }
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
