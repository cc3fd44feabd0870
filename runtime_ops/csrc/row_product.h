// x W^T for one row of x, as floats: W is read once, where the file is mapped, and nothing of it is packed.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "matrix.h"

namespace ondevice {

constexpr int64_t kRowTasks = 16;     // pieces of work that threads take
constexpr int64_t kRowBytes = 32768;  // of W in a piece at least: waking a thread costs microseconds
constexpr int64_t kHalves = 16;       // scales or minima that become floats together
constexpr int64_t kAhead = 2048;      // bytes: how early integers of W are asked for; memory is slower than a row's sums

// kLanes numbers as floats or integers; GCC makes a dozen instructions of its own conversion from bytes.
ONDEVICE_INLINE Vec lanes(const float* p) { return load(p); }

ONDEVICE_INLINE Vec lanes(const int8_t* p) {
#if defined(__AVX512F__)
  const IntVec ints = (IntVec)_mm512_maskz_cvtepi8_epi32(0xFFFF, _mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  const IntVec ints = (IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  const IntVec ints = __builtin_convertvector(bytes, IntVec);
#endif
  return __builtin_convertvector(ints, Vec);
}

ONDEVICE_INLINE IntVec integers(const uint8_t* p) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_maskz_cvtepu8_epi32(0xFFFF, _mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (IntVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, IntVec);
#endif
}

ONDEVICE_INLINE float added_up(Vec values) {
  float sum = 0.0f;
  for (int i = 0; i < kLanes; ++i) sum += values[i];
  return sum;
}

// The first of `count` halves as kHalves floats, zeros behind the last.
ONDEVICE_INLINE void floats_of_halves(const uint16_t* halves, int64_t count, float* __restrict out) {
  uint16_t some[kHalves] = {};
  if (count >= kHalves) {
    std::memcpy(some, halves, sizeof some);
  } else {
    for (int64_t i = 0; i < count; ++i) some[i] = halves[i];
  }
  for (int i = 0; i < kHalves; ++i) out[i] = half_to_float(some[i]);
}

// A group's even inputs and behind them its odd ones: what the high halves of its bytes, and the low ones, multiply.
template <typename Value>
inline void split_group(Value* group) {
  Value odds[kQ4Group / 2];
  for (int64_t i = 0; i < kQ4Group / 2; ++i) odds[i] = group[2 * i + 1];
  for (int64_t i = 0; i < kQ4Group / 2; ++i) group[i] = group[2 * i];
  std::memcpy(group + kQ4Group / 2, odds, sizeof odds);
}

// Groups of W's rows, up to a multiple of kHalves.
inline int64_t padded_groups(const Matrix& w) { return (w.inputs / kQ4Group + kHalves - 1) / kHalves * kHalves; }

// A row of x as `row_products` reads it: as it is, or for a W of 4 bits split by group, and each group's sum.
struct RowInput {
  const float* x;
  const float* sums;  // [padded_groups], zeros behind the last

  RowInput(const float* row, const Matrix& w, Scratch& scratch) : x(row), sums(nullptr) {
    if (w.kind != Matrix::kQ4) return;
    float* split = scratch.get(w.inputs + padded_groups(w));
    float* totals = split + w.inputs;
    std::memcpy(split, row, sizeof(float) * static_cast<size_t>(w.inputs));
    std::memset(totals, 0, sizeof(float) * static_cast<size_t>(padded_groups(w)));
    for (int64_t group = 0; group < w.inputs / kQ4Group; ++group) {
      for (int64_t k = 0; k < kQ4Group; ++k) totals[group] += split[group * kQ4Group + k];
      split_group(split + group * kQ4Group);
    }
    x = split;
    sums = totals;
  }
};

inline float q4_row_product(const Matrix& w, int64_t row, const RowInput& input) {
  const int64_t groups = w.inputs / kQ4Group;
  const uint8_t* bytes = static_cast<const uint8_t*>(w.data) + row * w.inputs / 2;
  const uint16_t *halves = w.halves + row * groups, *minima = w.minima + row * groups;
  const float* x = input.x;
  Vec acc = Vec{};
  for (int64_t first = 0; first < groups; first += kHalves) {
    const int64_t count = groups - first < kHalves ? groups - first : kHalves;
    float scales[kHalves], lows[kHalves];
    floats_of_halves(halves + first, count, scales);
    floats_of_halves(minima + first, count, lows);
    for (int64_t i = 0; i < kHalves; i += kLanes) acc += load(lows + i) * load(input.sums + first + i);
    for (int64_t group = 0; group < count; ++group, bytes += kQ4Group / 2, x += kQ4Group) {
      Vec sum = Vec{};
#pragma GCC unroll 4
      for (int64_t k = 0; k < kQ4Group / 2; k += kLanes) {
        const IntVec both = integers(bytes + k);
        sum += __builtin_convertvector(both >> 4, Vec) * load(x + k);
        sum += __builtin_convertvector(both & 15, Vec) * load(x + kQ4Group / 2 + k);
      }
      acc += sum * scales[group];
    }
  }
  return added_up(acc);
}

// Four rows of floats or of 8 bits (`Level`) at once, so that each load of x serves four.
template <typename Level>
inline void four_row_products(const Level* const rows[4], int64_t inputs, const float* __restrict x, float* sums) {
  Vec acc[4] = {};
  int64_t k = 0;
  for (; k + kLanes <= inputs; k += kLanes) {
    const Vec values = load(x + k);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) acc[i] += lanes(rows[i] + k) * values;
  }
  for (int i = 0; i < 4; ++i) sums[i] = added_up(acc[i]);
  for (; k < inputs; ++k) {
    for (int i = 0; i < 4; ++i) sums[i] += static_cast<float>(rows[i][k]) * x[k];
  }
}

template <typename Level>
inline void plain_row_products(const Matrix& w, int64_t begin, int64_t end, const float* x, float* sums) {
  const Level* levels = static_cast<const Level*>(w.data);
  for (int64_t row = begin; row < end; row += 4) {
    const Level* rows[4];
    float four[4];
    for (int64_t i = 0; i < 4; ++i) rows[i] = levels + (row + i < end ? row + i : end - 1) * w.inputs;
    four_row_products(rows, w.inputs, x, four);
    for (int64_t i = 0; i < 4 && row + i < end; ++i) sums[row - begin + i] = four[i];
  }
}

// sums[row - begin] = W[row] x for the rows [begin, end).
inline void row_products(const Matrix& w, int64_t begin, int64_t end, const RowInput& input, float* sums) {
  if (w.kind == Matrix::kQ4) {
    for (int64_t row = begin; row < end; ++row) sums[row - begin] = q4_row_product(w, row, input);
  } else if (w.kind == Matrix::kFloat) {
    plain_row_products<float>(w, begin, end, input.x, sums);
  } else {
    plain_row_products<int8_t>(w, begin, end, input.x, sums);
    for (int64_t row = begin; row < end; ++row) sums[row - begin] *= w.scales[row];
  }
}

}  // namespace ondevice
