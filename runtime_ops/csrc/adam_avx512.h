// One tile of the AdamW step of layer_adam.h in AVX-512 registers, for the forms that arithmetic bounds: a split
// master, bfloat16 gradients, moments of 16 or 8 bits. The same bits as the loops there.
#pragma once

#include "adam_storage.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define ONDEVICE_ADAM_AVX512

#include <immintrin.h>

namespace ondevice {

constexpr int kVectors = kTile / 16;

ONDEVICE_INLINE __m512i load_halves(const uint16_t* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

ONDEVICE_INLINE void store_halves(uint16_t* p, __m512i x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
}

ONDEVICE_INLINE __m512 widened(__m512i halves) { return _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16)); }

ONDEVICE_INLINE __m512i magnitude(__m512 x) {
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
}

ONDEVICE_INLINE __m512i quieted(__m512i bits) {
  const __m512 x = _mm512_castsi512_ps(bits);
  const __m512i sign = _mm512_set1_epi32(static_cast<int32_t>(0x80000000u));
  return _mm512_mask_ternarylogic_epi32(bits, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), sign,
                                        _mm512_set1_epi32(0x7FC00000), 0xEA);  // bits & sign | quiet
}

// `random_words`: those of the first vector before they are stepped, and of vector `i`.
ONDEVICE_INLINE __m512i first_words(uint64_t key, int64_t tile) {
  const uint64_t mixed = mix64(key + static_cast<uint64_t>(tile) * 0x9E3779B97F4A7C15ull);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i steps = _mm512_mullo_epi32(lane, _mm512_set1_epi32(static_cast<int32_t>(0x9E3779B9u)));
  __m512i h = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int32_t>(mixed)), steps);
  h = _mm512_mullo_epi32(_mm512_xor_si512(h, _mm512_srli_epi32(h, 16)), _mm512_set1_epi32(0x21F0AAAD));
  h = _mm512_add_epi32(h, _mm512_set1_epi32(static_cast<int32_t>(mixed >> 32)));
  h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 15));
  h = _mm512_mullo_epi32(h, _mm512_set1_epi32(static_cast<int32_t>(0xD35A2D97u)));
  return _mm512_xor_si512(h, _mm512_srli_epi32(h, 15));
}

ONDEVICE_INLINE __m512i words_of(__m512i first, int i) {
  const __m512i h = _mm512_mullo_epi32(first, _mm512_set1_epi32(static_cast<int32_t>(kWordSteps.factor[i])));
  const __m512i stepped = _mm512_add_epi32(h, _mm512_set1_epi32(static_cast<int32_t>(kWordSteps.increment[i])));
  return _mm512_xor_si512(stepped, _mm512_srli_epi32(stepped, 15));
}

ONDEVICE_INLINE __m512i narrowed(__m512 x, __m512i random) {
  const __m512i bits = _mm512_castps_si512(x);
  const __mmask16 finite = _mm512_cmplt_epi32_mask(magnitude(x), _mm512_set1_epi32(0x7F800000));
  return _mm512_srli_epi32(_mm512_mask_add_epi32(quieted(bits), finite, bits, random), 16);
}

// The operations of `adam_tile`; gives the change.
ONDEVICE_INLINE __m512 step_vector(const AdamArguments& a, __m512 grad, __m512& p, __m512& mean, __m512& square) {
  const __m512 x = _mm512_mul_ps(grad, _mm512_set1_ps(a.grad_scale));
  mean = _mm512_add_ps(mean, _mm512_mul_ps(_mm512_set1_ps(a.weight1), _mm512_sub_ps(x, mean)));
  square = _mm512_add_ps(_mm512_mul_ps(square, _mm512_set1_ps(a.beta2)),
                         _mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(a.weight2)));
  const __m512 root = _mm512_mul_ps(_mm512_sqrt_ps(square), _mm512_set1_ps(a.root));
  const __m512 step = _mm512_div_ps(_mm512_mul_ps(_mm512_set1_ps(a.size), mean),
                                    _mm512_add_ps(root, _mm512_set1_ps(a.eps)));
  p = _mm512_sub_ps(_mm512_mul_ps(p, _mm512_set1_ps(a.decay)), step);
  return step;
}

// Moments of 16 bits. Here and below `changes` takes what is subtracted from each parameter, unless it is null.
ONDEVICE_INLINE void step_tile_avx512(const AdamArguments& a, int64_t tile,
                                      const AdamTile<uint16_t, uint16_t, uint16_t>& t, float* changes) {
  const __m512i first = first_words(a.key, tile), middle = _mm512_set1_epi32(0x8000);
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    const int at = 16 * i;
    const __m512i was = load_halves(t.v + at), low = load_halves(t.low + at);
    __m512 mean = widened(load_halves(t.m + at)), square = _mm512_abs_ps(widened(was));
    __mmask16 up = _mm512_test_epi32_mask(was, middle);  // ties whose half was rounded up
    up = _mm512_mask_cmpeq_epi32_mask(up, low, middle) | _mm512_cmpgt_epi32_mask(low, middle);
    __m512i high = load_halves(t.high + at);
    high = _mm512_mask_sub_epi32(high, up, high, _mm512_set1_epi32(1));
    __m512 p = _mm512_castsi512_ps(_mm512_or_si512(_mm512_slli_epi32(high, 16), low));
    const __m512 change = step_vector(a, widened(load_halves(t.grad + at)), p, mean, square);
    if (changes != nullptr) _mm512_store_ps(changes + at, change);
    // split_range.
    const __m512i bits = quieted(_mm512_castps_si512(p)), above = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(above, _mm512_set1_epi32(1));
    const __mmask16 tie = _mm512_mask_test_epi32_mask(
        _mm512_cmpeq_epi32_mask(_mm512_and_si512(bits, _mm512_set1_epi32(0xFFFF)), middle), odd, odd);
    store_halves(t.high + at,
                 _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16));
    store_halves(t.low + at, bits);
    const __m512i words = words_of(first, i);
    store_halves(t.m + at, narrowed(mean, _mm512_and_si512(words, _mm512_set1_epi32(0xFFFF))));
    const __m512i stored = _mm512_and_si512(narrowed(square, _mm512_srli_epi32(words, 16)),
                                            _mm512_set1_epi32(0x7FFF));
    store_halves(t.v + at, _mm512_mask_or_epi32(stored, tie, stored, middle));
  }
}

// Bits of `yes` where `mask` has ones, else those of `no`.
ONDEVICE_INLINE __m512i chosen(int32_t mask, __m512i yes, __m512i no) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi32(mask), yes, no, 0xCA);
}

ONDEVICE_INLINE __m512i masked_or(__m512i x, int32_t mask, __m512i other) {  // x & mask | other
  return _mm512_ternarylogic_epi32(x, _mm512_set1_epi32(mask), other, 0xEA);
}

ONDEVICE_INLINE __m512i load_bytes(const uint8_t* p) {  // 32, as numbers of 16 bits
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

ONDEVICE_INLINE void store_bytes(uint8_t* p, __m512i even, __m512i odd) {
  const __m512i both = chosen(0xFFFF, even, odd);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi16_epi8(both));
}

// Ends a tile with a NaN or an infinity among its moments, by the loops; `m` and `v` are in turns.
__attribute__((noinline)) inline void finish_tile(const AdamArguments& a, int64_t tile,
                                                  const AdamTile<uint16_t, uint8_t, uint8_t>& t, const float* m,
                                                  const float* v) {
  float p[kTile], mean[kTile], square[kTile];
  uint32_t words[kTile];
  merge_range(t.high, t.low, t.v, kTile, p);
  split_range(p, kTile, t.high, t.low, t.v);
  for (int i = 0; i < kTile; ++i) {
    const int at = i / 32 * 32 + i % 2 * 16 + i % 32 / 2;
    mean[i] = m[at];
    square[i] = v[at];
  }
  random_words(a.key, tile, words);
  encode_tile(mean, square, words, t.m, t.v, a.m_scale[tile], a.v_scale[tile]);
}

// Moments in codes of 8 bits. Numbers of 8 and 16 bits stay as they lie: a vector has the even ones of 32 elements, or
// the odd ones, which a shift brings where they are wanted: in order they would take permutations, and of those a
// processor has one unit.
ONDEVICE_INLINE void step_tile_avx512(const AdamArguments& a, int64_t tile,
                                      const AdamTile<uint16_t, uint8_t, uint8_t>& t, float* changes) {
  constexpr int32_t kUpper = static_cast<int32_t>(0xFFFF0000u), kSign = static_cast<int32_t>(0x80000000u);
  const __m512 m_unit = _mm512_set1_ps(a.m_scale[tile] * (1.0f / kMeanMost));
  const __m512 v_unit = _mm512_set1_ps(a.v_scale[tile] * (1.0f / kSquareMost));
  const __m512 m_least = _mm512_set1_ps(kMeanLeast), v_least = _mm512_set1_ps(kSquareLeast);
  const __m512i m_bits = _mm512_set1_epi32(kMeanBits), v_bits = _mm512_set1_epi32(kSquareBits);
  alignas(64) float m[kTile], v[kTile];  // even ones and odd ones in turns
  __m512i m_most = _mm512_setzero_si512(), v_most = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int at = 0; at < kTile; at += 32) {
    const __m512i grad = _mm512_loadu_si512(t.grad + at), high = _mm512_loadu_si512(t.high + at);
    const __m512i low = _mm512_loadu_si512(t.low + at), cm = load_bytes(t.m + at), cv = load_bytes(t.v + at);
    __m512i bits[2];
    __m512 change[2];
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      const auto half = [&](__m512i x) {
        return odd ? _mm512_and_si512(x, _mm512_set1_epi32(kUpper)) : _mm512_slli_epi32(x, 16);
      };
      const __m512i difference = _mm512_srai_epi32(odd ? low : _mm512_slli_epi32(low, 16), 16);
      __m512 p = _mm512_castsi512_ps(_mm512_add_epi32(half(high), difference));
      const __m512i code = masked_or(_mm512_slli_epi32(cm, odd ? 3 : 19), 0x03F80000, m_bits);
      const __m512 size = _mm512_mul_ps(_mm512_sub_ps(_mm512_castsi512_ps(code), m_least), m_unit);
      __m512 mean = _mm512_castsi512_ps(
          masked_or(_mm512_slli_epi32(cm, odd ? 8 : 24), kSign, _mm512_castps_si512(size)));
      const __m512i above = masked_or(_mm512_slli_epi32(cv, odd ? 3 : 19), 0x07F80000, v_bits);
      __m512 square = _mm512_mul_ps(_mm512_sub_ps(_mm512_castsi512_ps(above), v_least), v_unit);
      change[odd] = step_vector(a, _mm512_castsi512_ps(half(grad)), p, mean, square);
      bits[odd] = _mm512_castps_si512(p);
      m_most = _mm512_max_epu32(m_most, magnitude(mean));
      v_most = _mm512_max_epu32(v_most, _mm512_castps_si512(square));
      _mm512_store_ps(m + at + 16 * odd, mean);
      _mm512_store_ps(v + at + 16 * odd, square);
    }
    if (changes != nullptr) {
      const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
      _mm512_store_ps(changes + at, _mm512_permutex2var_ps(change[0], first, change[1]));
      _mm512_store_ps(changes + at + 16, _mm512_permutex2var_ps(change[0], second, change[1]));
    }
    const __m512i middle = _mm512_set1_epi32(0x8000);
    _mm512_storeu_si512(t.high + at, chosen(0xFFFF, _mm512_srli_epi32(_mm512_add_epi32(bits[0], middle), 16),
                                            _mm512_add_epi32(bits[1], middle)));
    _mm512_storeu_si512(t.low + at, chosen(0xFFFF, bits[0], _mm512_slli_epi32(bits[1], 16)));
  }
  const uint32_t m_top = _mm512_reduce_max_epu32(m_most), v_top = _mm512_reduce_max_epu32(v_most);
  if (m_top >= 0x7F800000u || v_top >= 0x7F800000u) return finish_tile(a, tile, t, m, v);
  const float m_scale = m_top < 0x00800000u ? 0.0f : bits_float(m_top);
  const float v_scale = v_top < 0x00800000u ? 0.0f : bits_float(v_top);
  a.m_scale[tile] = m_scale;
  a.v_scale[tile] = v_scale;
  const __m512 m_inverse = _mm512_set1_ps(m_scale > 0.0f ? kMeanMost / m_scale : 0.0f);
  const __m512 v_inverse = _mm512_set1_ps(v_scale > 0.0f ? kSquareMost / v_scale : 0.0f);
  const __m512 floor = _mm512_set1_ps(v_scale > 0.0f ? kSquareFloor : kSquareLeast);
  const __m512i first = first_words(a.key, tile);
#pragma GCC unroll 4
  for (int at = 0; at < kTile; at += 32) {
    __m512i words = words_of(first, at / 32), m_codes[2], v_codes[2];
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      if (odd) words = _mm512_rol_epi32(words, 16);
      const __m512 mean = _mm512_load_ps(m + at + 16 * odd), square = _mm512_load_ps(v + at + 16 * odd);
      const __m512 x = _mm512_add_ps(_mm512_mul_ps(_mm512_abs_ps(mean), m_inverse), m_least);
      const __m512 y = _mm512_max_ps(_mm512_add_ps(_mm512_mul_ps(square, v_inverse), v_least), floor);
      const __m512i below = _mm512_and_si512(words, _mm512_set1_epi32(0x7FFFF));
      const __m512i code = _mm512_add_epi32(_mm512_castps_si512(x), below);
      const __m512i sign = _mm512_srli_epi32(_mm512_castps_si512(mean), odd ? 8 : 24);
      m_codes[odd] = chosen(odd ? 0x007F0000 : 0x7F, _mm512_srli_epi32(code, odd ? 3 : 19), sign);
      v_codes[odd] = _mm512_srli_epi32(
          _mm512_add_epi32(_mm512_castps_si512(y), _mm512_srli_epi32(words, 13)), odd ? 3 : 19);
    }
    store_bytes(t.m + at, m_codes[0], m_codes[1]);
    store_bytes(t.v + at, v_codes[0], v_codes[1]);
  }
}

}  // namespace ondevice
#endif
