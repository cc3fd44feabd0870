// Gradients in blocks of 32 codes of 4 bits with a bfloat16 scale: see gradient_codes.py.
#pragma once

#include <cstdint>
#include <cstring>

#include "rows.h"

namespace ondevice {

constexpr int64_t kCodesABlock = 32, kBytesABlock = 18;

inline void store(float value, float* out) { *out = value; }
inline void store(float value, uint16_t* out) { *out = nearest_bfloat16(value); }

// The first `count` values of a block.
template <typename T>
void decode_block(const uint8_t* block, int64_t count, T* out) {
  uint16_t half;
  std::memcpy(&half, block, sizeof half);
  const float scale = from_bfloat16(half);
  for (int64_t j = 0; j < count; ++j) {
    const uint8_t byte = block[2 + j % 16];
    const int code = j < 16 ? byte & 15 : byte >> 4;
    store(static_cast<float>(code - 8) * scale, out + j);
  }
}

template <typename T, typename Run>
void decode_gradient(const uint8_t* codes, int64_t count, T* out, const Run& run) {
  const int64_t blocks = (count + kCodesABlock - 1) / kCodesABlock;
  each_row(blocks, run, [&](int64_t i) {
    const int64_t first = i * kCodesABlock;
    const int64_t left = count - first < kCodesABlock ? count - first : kCodesABlock;
    decode_block(codes + i * kBytesABlock, left, out + first);
  });
}

}  // namespace ondevice
