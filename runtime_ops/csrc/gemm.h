// The register-blocked inner kernel that every op here uses, and helpers.
#pragma once

#include <memory>
#include <new>

#include "simd.h"

namespace ondevice {

// acc[i][:] += sum over k of a[i * row_step + k * depth_step] * b[k * ldb + :], in the order of k whatever the
// tile's size: results do not depend on how rows are blocked or on the number of threads.
template <int Rows, int Vectors>
ONDEVICE_INLINE void accumulate_tile(const float* __restrict a, int64_t row_step, int64_t depth_step,
                                     const float* __restrict b, int64_t ldb, int64_t depth,
                                     Vec (&acc)[Rows][Vectors]) {
  for (int64_t k = 0; k < depth; ++k) {
    Vec column[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) column[j] = load(b + k * ldb + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      const Vec value = splat(a[i * row_step + k * depth_step]);
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) acc[i][j] += value * column[j];
    }
  }
}

template <int Rows, int Vectors>
ONDEVICE_INLINE void clear(Vec (&acc)[Rows][Vectors]) {
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) acc[i][j] = Vec{};
  }
}

// acc[i][:] = sum over k of a[i * lda + k] * b[k * ldb + :]
template <int Rows, int Vectors>
ONDEVICE_INLINE void multiply_tile(const float* __restrict a, int64_t lda, const float* __restrict b,
                                   int64_t ldb, int64_t depth, Vec (&acc)[Rows][Vectors]) {
  clear(acc);
  accumulate_tile(a, lda, 1, b, ldb, depth, acc);
}

// Calls f with a compile-time number of rows, 1 .. kTileRows.
template <int Rows = kTileRows, typename F>
ONDEVICE_INLINE void with_rows(int64_t rows, const F& f) {
  if constexpr (Rows == 1) {
    f(std::integral_constant<int, 1>{});
  } else if (rows == Rows) {
    f(std::integral_constant<int, Rows>{});
  } else {
    with_rows<Rows - 1>(rows, f);
  }
}

// Splits `rows` into tiles of nearly equal height and calls f(first, count) for each.
template <typename F>
void for_row_tiles(int64_t rows, const F& f) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t t = 0, first = 0; t < tiles; ++t) {
    const int64_t count = (rows - first) / (tiles - t) + ((rows - first) % (tiles - t) != 0);
    f(first, count);
    first += count;
  }
}

// A buffer of floats aligned to a cache line that grows and is reused by its thread.
class Scratch {
 public:
  float* get(int64_t floats) {
    if (floats > size_) {
      data_.reset(
          static_cast<float*>(::operator new[](static_cast<size_t>(floats) * sizeof(float), kAlignment)));
      size_ = floats;
    }
    return data_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Delete {
    void operator()(float* p) const { ::operator delete[](p, kAlignment); }
  };
  std::unique_ptr<float, Delete> data_;
  int64_t size_ = 0;
};

// IEEE half to float for finite values, without branches so that it vectorises.
ONDEVICE_INLINE float half_to_float(uint16_t half) {
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7FFFu) << 13;
  float value;
  std::memcpy(&value, &magnitude, sizeof value);
  value *=
      5.192296858534828e33f;  // 2^112: the difference of the exponents' biases; subnormals come out right
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits |= static_cast<uint32_t>(half & 0x8000u) << 16;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace ondevice
