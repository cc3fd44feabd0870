// Rows of a table by number: read, write, add, clear. One pass over the bytes that are named, shared by threads.
#pragma once

#include <cstdint>
#include <cstring>

namespace ondevice {

constexpr int64_t kRowsATask = 64;

template <typename Run, typename F>
void each_row(int64_t count, const Run& run, const F& f) {
  const int64_t tasks = (count + kRowsATask - 1) / kRowsATask;
  run(tasks, [&](int64_t begin, int64_t end) {
    const int64_t last = end * kRowsATask < count ? end * kRowsATask : count;
    for (int64_t i = begin * kRowsATask; i < last; ++i) f(i);
  });
}

inline float from_bfloat16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint16_t nearest_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline void add_row(uint16_t* target, const uint16_t* source, int64_t width) {
  for (int64_t j = 0; j < width; ++j)
    target[j] = nearest_bfloat16(from_bfloat16(target[j]) + from_bfloat16(source[j]));
}

inline void add_row(float* target, const float* source, int64_t width) {
  for (int64_t j = 0; j < width; ++j) target[j] += source[j];
}

}  // namespace ondevice
