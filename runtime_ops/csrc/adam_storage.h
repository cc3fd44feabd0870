// How one AdamW step over flat arrays (layer_adam.h) stores its float32 values.
//
// The float32 master is one array (`plain`), or two arrays of 16 bits (`split`): `high` is the bfloat16 nearest
// to it (ties to even), `low` the lower half of its bits. `high` exceeds the upper half by one where `low` is
// above 0x8000, and at an exact tie where the sign bit of the second moment says so (the moment is never
// negative, so the bit is free). An 8-bit moment has no such bit: there ties round away from zero, so that `low`
// is the difference, a number of 16 bits with a sign. Moments are float32, bfloat16, or floating-point codes of 8
// bits with a float32 scale for each tile.
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
  void *m, *v;               // [n] float32, bfloat16, or codes, as moments is 0, 1 or 2
  float *m_scale, *v_scale;  // [ceil(n / 128)] for 8-bit moments, else null
  const int64_t* rows;       // [row_count], or null: all elements
  int64_t numel, row_count, width, grad_float32, moments;
  uint64_t key;                   // of the random words: mixes the seed and the step
  float decay;                    // 1 - learning rate * weight decay
  float beta2, weight1, weight2;  // weight = 1 - beta
  float root;                     // 1 / sqrt(1 - beta2^step)
  float eps, size;                // size = learning rate / (1 - beta1^step)
  float grad_scale;
  // The record of the step (adam_undo.h), or null; `action` says what happens with it.
  void* codes;     // [tiles] TileRecord
  int32_t* flags;  // [tiles]: a place in the arena, kInCodes or kNotDone
  float* arena;    // [room] tiles of float32 values
  int32_t* used;   // places of the arena that were asked for
  int64_t room, action;
};

// What one element's step computes: the same expressions wherever it is made or taken back.
ONDEVICE_INLINE float next_mean(float m, float x, float weight1) { return m + weight1 * (x - m); }

ONDEVICE_INLINE float next_square(float v, float x, float beta2, float weight2) {
  return std::fabs(v) * beta2 + x * x * weight2;
}

ONDEVICE_INLINE float change_of(float mean, float square, float size, float root, float eps) {
  return size * mean / (std::sqrt(square) * root + eps);
}

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

// Where the bit of a tie that was rounded up is kept: a moment's sign.
ONDEVICE_INLINE uint32_t tie_of(float v) { return float_bits(v) >> 31; }
ONDEVICE_INLINE uint32_t tie_of(uint16_t v) { return v >> 15; }
ONDEVICE_INLINE float with_tie(float v, uint32_t tie) {
  return bits_float((float_bits(v) & 0x7FFFFFFFu) | tie << 31);
}
ONDEVICE_INLINE uint16_t with_tie(uint16_t v, uint32_t tie) {
  return static_cast<uint16_t>((v & 0x7FFFu) | tie << 15);
}

template <typename V>
ONDEVICE_INLINE void merge_range(const uint16_t* __restrict high, const uint16_t* __restrict low,
                                 const V* __restrict v, int64_t count, float* __restrict master) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t h = high[i], l = low[i];
    if constexpr (sizeof(V) == 1) {
      master[i] = bits_float((h << 16) + static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(l))));
    } else {
      const uint32_t up = (l > 0x8000u ? 1u : 0u) | ((l == 0x8000u ? 1u : 0u) & tie_of(v[i]));
      master[i] = bits_float((h - up) << 16 | l);
    }
  }
}

template <typename V>
ONDEVICE_INLINE void split_range(const float* __restrict master, int64_t count, uint16_t* __restrict high,
                                 uint16_t* __restrict low, V* __restrict v) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = quiet(float_bits(master[i]));
    low[i] = static_cast<uint16_t>(bits);
    if constexpr (sizeof(V) == 1) {
      high[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    } else {
      high[i] = static_cast<uint16_t>(nearest_bfloat16(bits));
      v[i] = with_tie(v[i], (bits >> 16) & ((bits & 0xFFFFu) == 0x8000u ? 1u : 0u));
    }
  }
}

// A tile's new master: its halves, or the bfloat16 copy of a plain one.
template <bool Split, typename Grad, typename M, typename V>
ONDEVICE_INLINE void put_master(const float* master, const AdamTile<Grad, M, V>& t) {
  if constexpr (Split) {
    split_range(master, kTile, t.high, t.low, t.v);
  } else if (t.high != nullptr) {
    for (int i = 0; i < kTile; ++i) {
      t.high[i] = static_cast<uint16_t>(nearest_bfloat16(quiet(float_bits(master[i]))));
    }
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

// Of codes, elements 2 i and 2 i + 1 share a word: for the second its halves change places.
ONDEVICE_INLINE uint32_t shared_word(const uint32_t* words, int i) {
  const uint32_t word = words[i / 2];
  return i % 2 == 0 ? word : word << 16 | word >> 16;
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

// A code is a floating-point number of 4 bits of mantissa below those of an exponent: 3 for m, besides its sign, and 4
// for v. It is bits 19 and up of a float32 between `Least`, whose code is 0, and 1.9375; what it stands for is
// (that - Least) * scale / Most. Codes are linear near 0 and have steps of 3 to 6% above.
constexpr uint32_t kMeanBits = 120u << 23, kSquareBits = 112u << 23;
constexpr float kMeanLeast = 1.0f / 128, kSquareLeast = 1.0f / 32768;
// Below 1.9375 - Least by more than products round.
constexpr float kMeanMost = 1.92968f, kSquareMost = 1.93746f;
constexpr float kSquareFloor = kSquareLeast * 1.0625f;  // code 1

__attribute__((noinline)) inline void decode_tile(const uint8_t* __restrict cm, const uint8_t* __restrict cv,
                                                  float m_scale, float v_scale, float* __restrict m,
                                                  float* __restrict v) {
  const float m_unit = m_scale * (1.0f / kMeanMost), v_unit = v_scale * (1.0f / kSquareMost);
  for (int i = 0; i < kTile; ++i) {
    const uint32_t code = cm[i];
    const float size = (bits_float(kMeanBits | (code & 0x7Fu) << 19) - kMeanLeast) * m_unit;
    m[i] = bits_float(float_bits(size) | (code & 0x80u) << 24);
    v[i] = (bits_float(kSquareBits | static_cast<uint32_t>(cv[i]) << 19) - kSquareLeast) * v_unit;
  }
}

// Both by stochastic rounding, unbiased in the value; but in a tile that is not all zeros no v gets a code below 1,
// whose root is four times as large a part of the tile's largest as the smallest m: the quotient of an m that rounded
// up stays near its largest in the tile.
__attribute__((noinline)) inline void encode_tile(const float* __restrict m, const float* __restrict v,
                                                  const uint32_t* __restrict words, uint8_t* __restrict cm,
                                                  uint8_t* __restrict cv, float& m_scale, float& v_scale) {
  m_scale = tile_scale(m);
  v_scale = tile_scale(v);
  const float m_inverse = m_scale > 0.0f ? kMeanMost / m_scale : 0.0f;
  const float v_inverse = v_scale > 0.0f ? kSquareMost / v_scale : 0.0f;
  const float floor = v_scale > 0.0f ? kSquareFloor : kSquareLeast;
  for (int i = 0; i < kTile; ++i) {
    const uint32_t word = shared_word(words, i);
    const float x = std::fabs(m[i]) * m_inverse + kMeanLeast, y = v[i] * v_inverse + kSquareLeast;
    // A NaN becomes the least: its tile's scale is one, too.
    const uint32_t mean = float_bits(x > kMeanLeast ? x : kMeanLeast) + (word & 0x7FFFFu);
    const uint32_t square = float_bits(y > floor ? y : floor) + (word >> 13);
    cm[i] = static_cast<uint8_t>((mean >> 19 & 0x7Fu) | (float_bits(m[i]) >> 24 & 0x80u));
    cv[i] = static_cast<uint8_t>(square >> 19);
  }
}

}  // namespace ondevice

#if defined(__AVX512BW__) && !defined(__clang__)
#pragma GCC pop_options
#endif
