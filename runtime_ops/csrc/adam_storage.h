// How one AdamW step over flat arrays (layer_adam.h) stores its float32 values.
//
// The float32 master is one array (`plain`), or two arrays of 16 bits (`split`): `high` is the bfloat16 nearest
// to it (ties to even), `low` the lower half of its bits. `high` exceeds the upper half by one where `low` is
// above 0x8000, and at an exact tie where the sign bit of the second moment says so (the moment is never
// negative, so the bit is free). An 8-bit moment has no such bit: there a tie that rounds up grows by one unit
// in the last place. Moments are float32, bfloat16, or 8-bit codes with a float32 scale for each tile.
#pragma once

#include <cmath>

#include "simd.h"

// GCC prefers 32-byte vectors on most AVX-512 processors; here the wide ones take 12% less time.
#if defined(__AVX512BW__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("prefer-vector-width=512")
#endif

namespace ondevice {

constexpr int kTile = 128;  // elements that share a scale in 8-bit moments

ONDEVICE_INLINE uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

ONDEVICE_INLINE float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// A NaN's sign with the usual quiet payload, so that it is a NaN as a bfloat16 too; any other bits unchanged.
ONDEVICE_INLINE uint32_t quiet(uint32_t bits) {
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? (bits & 0x80000000u) | 0x7FC00000u : bits;
}

ONDEVICE_INLINE uint32_t nearest_bfloat16(uint32_t bits) { return (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16; }

// Where the bit of a tie that was rounded up is kept: a moment's sign, or nowhere.
ONDEVICE_INLINE uint32_t tie_of(float v) { return float_bits(v) >> 31; }
ONDEVICE_INLINE uint32_t tie_of(uint16_t v) { return v >> 15; }
ONDEVICE_INLINE uint32_t tie_of(uint8_t) { return 0; }
ONDEVICE_INLINE float with_tie(float v, uint32_t tie) {
  return bits_float((float_bits(v) & 0x7FFFFFFFu) | tie << 31);
}
ONDEVICE_INLINE uint16_t with_tie(uint16_t v, uint32_t tie) {
  return static_cast<uint16_t>((v & 0x7FFFu) | tie << 15);
}
ONDEVICE_INLINE uint8_t with_tie(uint8_t v, uint32_t) { return v; }

template <typename V>
ONDEVICE_INLINE void merge_range(const uint16_t* __restrict high, const uint16_t* __restrict low,
                                 const V* __restrict v, int64_t count, float* __restrict master) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t h = high[i], l = low[i];
    const uint32_t up = (l > 0x8000u ? 1u : 0u) | ((l == 0x8000u ? 1u : 0u) & tie_of(v[i]));
    master[i] = bits_float((h - up) << 16 | l);
  }
}

template <typename V>
ONDEVICE_INLINE void split_range(const float* __restrict master, int64_t count, uint16_t* __restrict high,
                                 uint16_t* __restrict low, V* __restrict v) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = quiet(float_bits(master[i]));
    const uint32_t tie = ((bits & 0xFFFFu) == 0x8000u ? 1u : 0u) & (bits >> 16);
    high[i] = static_cast<uint16_t>(nearest_bfloat16(bits));
    low[i] = static_cast<uint16_t>(bits + (sizeof(V) == 1 ? tie : 0));
    v[i] = with_tie(v[i], tie);
  }
}

ONDEVICE_INLINE uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;  // the SplitMix64 finaliser, as in generator.cpp
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// A random word for each element of a tile: its lower half rounds m, its upper half v.
ONDEVICE_INLINE void random_words(uint64_t key, int64_t tile, uint32_t* __restrict words) {
  const uint64_t mixed = mix64(key + static_cast<uint64_t>(tile) * 0x9E3779B97F4A7C15ull);
  const uint32_t first = static_cast<uint32_t>(mixed), second = static_cast<uint32_t>(mixed >> 32);
  for (uint32_t i = 0; i < kTile; ++i) {
    uint32_t h = first + i * 0x9E3779B9u;
    h = (h ^ (h >> 16)) * 0x21F0AAADu + second;  // a 32-bit finaliser of Wellons, keyed twice
    h = (h ^ (h >> 15)) * 0xD35A2D97u;
    words[i] = h ^ (h >> 15);
  }
}

ONDEVICE_INLINE void widen(const uint16_t* __restrict in, float* __restrict out) {
  for (int i = 0; i < kTile; ++i) out[i] = bits_float(static_cast<uint32_t>(in[i]) << 16);
}

// bfloat16 by stochastic rounding: adds 16 random bits (from bit `shift` of the word) below the kept ones.
template <int Shift>
ONDEVICE_INLINE void narrow(const float* __restrict in, const uint32_t* __restrict words,
                            uint16_t* __restrict out) {
  for (int i = 0; i < kTile; ++i) {
    const uint32_t bits = float_bits(in[i]), random = words[i] >> Shift & 0xFFFFu;
    const bool finite = (bits & 0x7FFFFFFFu) < 0x7F800000u;
    out[i] = static_cast<uint16_t>((finite ? bits + random : quiet(bits)) >> 16);
  }
}

// Largest magnitude of a tile; a NaN counts as the largest. Below the normal range: 0.
ONDEVICE_INLINE float tile_scale(const float* __restrict x) {
  int32_t most = 0;
  for (int i = 0; i < kTile; ++i) {
    const int32_t bits = static_cast<int32_t>(float_bits(x[i]) & 0x7FFFFFFFu);
    most = bits > most ? bits : most;
  }
  return most < 0x00800000 ? 0.0f : bits_float(static_cast<uint32_t>(most));
}

constexpr float kMean = 127.0f * 127.0f, kSquare = 255.0f * 255.0f * 255.0f * 255.0f;

// 8-bit codes: m = scale * sign * (q / 127)^2, v = scale * (q / 255)^4.
__attribute__((noinline)) inline void decode_tile(const int8_t* __restrict cm,
                                                  const uint8_t* __restrict cv, float m_scale, float v_scale,
                                                  float* __restrict m, float* __restrict v) {
  for (int i = 0; i < kTile; ++i) {
    const float q = static_cast<float>(cm[i]), r = static_cast<float>(cv[i]);
    m[i] = q * std::fabs(q) * (1.0f / kMean) * m_scale;
    v[i] = (r * r) * (r * r) * (1.0f / kSquare) * v_scale;
  }
}

// Both by stochastic rounding between the two codes around the value, unbiased in the value; but a v above
// zero never gets a code below 2, whose root is as small a part of the tile's largest as the smallest m: the
// quotient of an m that rounded up stays near its largest in the tile.
__attribute__((noinline)) inline void encode_tile(const float* __restrict m, const float* __restrict v,
                                                  const uint32_t* __restrict words, int8_t* __restrict cm,
                                                  uint8_t* __restrict cv, float& m_scale, float& v_scale) {
  m_scale = tile_scale(m);
  v_scale = tile_scale(v);
  const float m_inverse = m_scale > 0.0f ? 1.0f / m_scale : 0.0f;
  const float v_inverse = v_scale > 0.0f ? 1.0f / v_scale : 0.0f;
  constexpr float kUnit = 1.0f / 65536.0f;
  for (int i = 0; i < kTile; ++i) {
    const float x = std::fabs(m[i]) * m_inverse * kMean;
    const int32_t q = static_cast<int32_t>(std::sqrt(x));
    const float below = static_cast<float>(q), u = static_cast<float>(words[i] & 0xFFFFu) * kUnit;
    int32_t code = q + (x - below * below > u * (2.0f * below + 1.0f) ? 1 : 0);
    code = code < 127 ? code : 127;
    cm[i] = static_cast<int8_t>(m[i] < 0.0f ? -code : code);
  }
  for (int i = 0; i < kTile; ++i) {
    const float x = v[i] * v_inverse * kSquare;
    const int32_t q = static_cast<int32_t>(std::sqrt(std::sqrt(x)));
    const float below = static_cast<float>(q), square = below * below;
    const float u = static_cast<float>(words[i] >> 16) * kUnit;
    const float gap = 4.0f * square * below + 6.0f * square + 4.0f * below + 1.0f;
    int32_t code = q + (x - square * square > u * gap ? 1 : 0);
    code = code < 255 ? code : 255;
    cv[i] = static_cast<uint8_t>(code < 2 && x > 0.0f ? 2 : code);
  }
}

}  // namespace ondevice

#if defined(__AVX512BW__) && !defined(__clang__)
#pragma GCC pop_options
#endif
