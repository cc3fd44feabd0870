// Vectors of floats through the GCC and Clang vector extensions, and the shape of the register tile.
#pragma once

#include <cstdint>
#include <cstring>

namespace ondevice {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kTileVectors = 2, kTileRows = 14;  // 28 of 32 registers accumulate
#elif defined(__AVX__)
constexpr int kLanes = 8, kTileVectors = 2, kTileRows = 6;  // 12 of 16
#elif defined(__aarch64__)
constexpr int kLanes = 4, kTileVectors = 4, kTileRows = 6;  // 24 of 32
#else
constexpr int kLanes = 4, kTileVectors = 2, kTileRows = 6;  // 12 of 16
#endif
constexpr int kTileColumns = kLanes * kTileVectors;

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntVec __attribute__((vector_size(kLanes * sizeof(int32_t))));

#define ONDEVICE_INLINE inline __attribute__((always_inline))

ONDEVICE_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

ONDEVICE_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

ONDEVICE_INLINE Vec splat(float x) { return x - Vec{}; }

// f over all lanes, of which pairs may come in any order.
template <typename Value, typename Vector, typename F>
ONDEVICE_INLINE Value folded(Vector v, const F& f) {
  typedef Value Four __attribute__((vector_size(16)));
  Four parts[sizeof(Vector) / sizeof(Four)];
  std::memcpy(parts, &v, sizeof v);
  Four all = parts[0];
  for (size_t i = 1; i < sizeof(Vector) / sizeof(Four); ++i) all = f(all, parts[i]);
  all = f(all, __builtin_shufflevector(all, all, 2, 3, 0, 1));
  return f(all, __builtin_shufflevector(all, all, 1, 0, 3, 2))[0];
}

// e^x for x <= 0 and not far above it (relative error near 1e-7); a NaN stays a NaN, results below e^-87
// become that.
ONDEVICE_INLINE Vec exp_nonpositive(Vec x) {
  x = x < splat(-87.0f) ? splat(-87.0f) : x;
  const Vec shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const Vec n = shifted - 12582912.0f;
  const Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  IntVec bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + (127 << 23);  // the integer n sits in the low bits of `shifted`
  Vec scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

}  // namespace ondevice
