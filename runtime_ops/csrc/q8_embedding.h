// Rows of an int8 table with one scale a row, as float32.
#pragma once

#include <cstdint>

namespace ondevice {

// out float32 [count, depth]. Returns the index of the first id outside [0, vocabulary), or -1 if all are
// right.
template <typename Parallel>
int64_t q8_embedding(const int64_t* ids, int64_t count, const int8_t* weight, const float* scales,
                     int64_t vocabulary, int64_t depth, float* out, const Parallel& parallel) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= vocabulary) return i;
  }
  constexpr int64_t kRows = 64;
  parallel((count + kRows - 1) / kRows, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kRows; i < end * kRows && i < count; ++i) {
      const int8_t* __restrict row = weight + ids[i] * depth;
      const float scale = scales[ids[i]];
      float* __restrict target = out + i * depth;
      for (int64_t k = 0; k < depth; ++k) target[k] = static_cast<float>(row[k]) * scale;
    }
  });
  return -1;
}

}  // namespace ondevice
