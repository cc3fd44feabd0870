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

// Mirrored by _Arguments in layer_adam.py.
struct AdamArguments {
  const void* grad;          // bfloat16 or float32 [n], by grad_float32
  float* master;             // [n], or null: split
  uint16_t* high;            // [n] bfloat16; null only where there is a master
  uint16_t* low;             // [n], or null: plain
  void *m, *v;               // [n] float32, bfloat16, or int8 and uint8, as moments is 0, 1 or 2
  float *m_scale, *v_scale;  // [ceil(n / 128)] for 8-bit moments, else null
  const int64_t* rows;       // [row_count], or null: all elements
  int64_t numel, row_count, width, grad_float32, moments;
  uint64_t key;                   // of the random words: mixes the seed and the step
  float decay;                    // 1 - learning rate * weight decay
  float beta2, weight1, weight2;  // weight = 1 - beta
  float root;                     // 1 / sqrt(1 - beta2^step)
  float eps, size;                // size = learning rate / (1 - beta1^step)
  float grad_scale;
};

// The arrays of one tile, whole.
template <typename Grad, typename M, typename V>
struct AdamTile {
  const Grad* grad;
  float* master;
  uint16_t *high, *low;
  M* m;
  V* v;
};

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

// A random word for each element of a tile, `lane + 16 i`: its lower half rounds m, its upper half v. The first 16
// are hashed from the key, the others are steps of a linear generator from each, mixed.
constexpr int kWordLanes = 16;
constexpr uint32_t kWordFactor = 0x915F77F5u, kWordIncrement = 0x6C078965u;

struct WordSteps {
  uint32_t factor[kTile / kWordLanes], increment[kTile / kWordLanes];
};

constexpr WordSteps word_steps() {
  WordSteps steps{};
  for (int i = 0; i < kTile / kWordLanes; ++i) {
    steps.factor[i] = i == 0 ? 1u : steps.factor[i - 1] * kWordFactor;
    steps.increment[i] = i == 0 ? 0u : steps.increment[i - 1] * kWordFactor + kWordIncrement;
  }
  return steps;
}

constexpr WordSteps kWordSteps = word_steps();

ONDEVICE_INLINE void random_words(uint64_t key, int64_t tile, uint32_t* __restrict words) {
  const uint64_t mixed = mix64(key + static_cast<uint64_t>(tile) * 0x9E3779B97F4A7C15ull);
  const uint32_t first = static_cast<uint32_t>(mixed), second = static_cast<uint32_t>(mixed >> 32);
  uint32_t start[kWordLanes];
  for (uint32_t lane = 0; lane < kWordLanes; ++lane) {
    uint32_t h = first + lane * 0x9E3779B9u;
    h = (h ^ (h >> 16)) * 0x21F0AAADu + second;  // a 32-bit finaliser of Wellons, keyed twice
    h = (h ^ (h >> 15)) * 0xD35A2D97u;
    start[lane] = h ^ (h >> 15);
  }
  for (int i = 0; i < kTile / kWordLanes; ++i) {
    for (int lane = 0; lane < kWordLanes; ++lane) {
      const uint32_t h = start[lane] * kWordSteps.factor[i] + kWordSteps.increment[i];
      words[kWordLanes * i + lane] = h ^ (h >> 15);
    }
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
constexpr float kUnit = 1.0f / 65536.0f, kRounds = 12582912.0f;  // 1.5 * 2^23

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

// Codes of x >= 0 (0 for a NaN) by stochastic rounding between the two around it: the largest q whose value is at
// most x, or the next one. `guess` is the nearest whole number to an approximate root, so it is q or one more, however
// the root was found.
ONDEVICE_INLINE float mean_code(float x, float guess, float word) {
  const float q = guess - (guess * guess > x ? 1.0f : 0.0f);
  return q + (x - q * q > word * (q * (2.0f * kUnit) + kUnit) ? 1.0f : 0.0f);
}

ONDEVICE_INLINE float fourth(float q) { return (q * q) * (q * q); }

ONDEVICE_INLINE float square_code(float x, float guess, float u) {
  const float q = guess - (fourth(guess) > x ? 1.0f : 0.0f), below = fourth(q);
  return q + (x - below > u * (fourth(q + 1.0f) - below) ? 1.0f : 0.0f);
}

// The nearest whole number of 0 <= x < 2^22.
ONDEVICE_INLINE float whole(float x) { return x + kRounds - kRounds; }

// Both by stochastic rounding, unbiased in the value; but a v above zero never gets a code below 2, whose root
// is as small a part of the tile's largest as the smallest m: the quotient of an m that rounded up stays near
// its largest in the tile.
__attribute__((noinline)) inline void encode_tile(const float* __restrict m, const float* __restrict v,
                                                  const uint32_t* __restrict words, int8_t* __restrict cm,
                                                  uint8_t* __restrict cv, float& m_scale, float& v_scale) {
  m_scale = tile_scale(m);
  v_scale = tile_scale(v);
  const float m_inverse = m_scale > 0.0f ? 1.0f / m_scale * kMean : 0.0f;
  const float v_inverse = v_scale > 0.0f ? 1.0f / v_scale : 0.0f;
  for (int i = 0; i < kTile; ++i) {
    const float size = std::fabs(m[i]) * m_inverse, x = size > 0.0f ? size : 0.0f;
    const float code = mean_code(x, whole(std::sqrt(x)), static_cast<float>(static_cast<int32_t>(words[i] & 0xFFFFu)));
    const int32_t most = static_cast<int32_t>(code < 127.0f ? code : 127.0f);
    cm[i] = static_cast<int8_t>(m[i] < 0.0f ? -most : most);
  }
  for (int i = 0; i < kTile; ++i) {
    const float size = v[i] * v_inverse * kSquare, x = size > 0.0f ? size : 0.0f;
    const float u = static_cast<float>(static_cast<int32_t>(words[i] >> 16)) * kUnit;
    const float code = square_code(x, whole(std::sqrt(std::sqrt(x))), u);
    const float most = code < 255.0f ? code : 255.0f, least = x > 0.0f ? 2.0f : 0.0f;
    cv[i] = static_cast<uint8_t>(static_cast<int32_t>(most < least ? least : most));
  }
}

}  // namespace ondevice

#if defined(__AVX512BW__) && !defined(__clang__)
#pragma GCC pop_options
#endif
