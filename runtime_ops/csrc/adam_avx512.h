// One tile of the AdamW step of layer_adam.h in AVX-512 registers, for the forms that arithmetic bounds: a split
// master, bfloat16 gradients, moments of 16 or 8 bits. The same bits as the loops there. Roots of 8-bit codes are
// approximate, because `round_code` asks for no more; those of the step itself are IEEE's.
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

ONDEVICE_INLINE __m512 squared(__m512 q) { return _mm512_mul_ps(q, q); }
ONDEVICE_INLINE __m512 fourths(__m512 q) { return squared(squared(q)); }

// q, or the next one by `round`; `whole` is q or one more.
ONDEVICE_INLINE __m512 one_less(__m512 whole, __mmask16 more) {
  return _mm512_mask_sub_ps(whole, more, whole, _mm512_set1_ps(1.0f));
}
ONDEVICE_INLINE __m512 one_more(__m512 q, __mmask16 more) {
  return _mm512_mask_add_ps(q, more, q, _mm512_set1_ps(1.0f));
}

// `mean_code` and `square_code`, with roots that are right within 2^-13.
ONDEVICE_INLINE __m512 mean_codes(__m512 x, __m512 word) {
  const __m512 rounds = _mm512_set1_ps(kRounds);
  const __m512 root = _mm512_rsqrt14_ps(_mm512_max_ps(x, _mm512_set1_ps(1e-20f)));
  const __m512 guess = _mm512_sub_ps(_mm512_fmadd_ps(x, root, rounds), rounds);
  const __m512 q = one_less(guess, _mm512_cmp_ps_mask(squared(guess), x, _CMP_GT_OQ));
  // The gap 2 q + 1 in the words' unit; exact, so it may be fused.
  const __m512 gap = _mm512_fmadd_ps(q, _mm512_set1_ps(2.0f * kUnit), _mm512_set1_ps(kUnit));
  const __m512 over = _mm512_sub_ps(x, squared(q));
  return one_more(q, _mm512_cmp_ps_mask(over, _mm512_mul_ps(word, gap), _CMP_GT_OQ));
}

ONDEVICE_INLINE __m512 square_codes(__m512 x, __m512 u) {
  const __m512 rounds = _mm512_set1_ps(kRounds);
  const __m512 root = _mm512_rsqrt14_ps(_mm512_rsqrt14_ps(x));  // 0 of 0
  const __m512 guess = _mm512_sub_ps(_mm512_add_ps(root, rounds), rounds);
  const __m512 q = one_less(guess, _mm512_cmp_ps_mask(fourths(guess), x, _CMP_GT_OQ)), below = fourths(q);
  const __m512 above = fourths(_mm512_add_ps(q, _mm512_set1_ps(1.0f)));
  const __m512 gap = _mm512_mul_ps(u, _mm512_sub_ps(above, below));
  return one_more(q, _mm512_cmp_ps_mask(_mm512_sub_ps(x, below), gap, _CMP_GT_OQ));
}

ONDEVICE_INLINE float scale_of(__m512i most) {
  const int32_t bits = _mm512_reduce_max_epi32(most);
  return bits < 0x00800000 ? 0.0f : bits_float(static_cast<uint32_t>(bits));
}

template <typename M, typename V>
ONDEVICE_INLINE void step_tile_avx512(const AdamArguments& a, int64_t tile, const AdamTile<uint16_t, M, V>& t) {
  constexpr bool kCodes = sizeof(M) == 1;
  const __m512i first = first_words(a.key, tile);
  const __m512 zero = _mm512_setzero_ps();
  __m512 m[kVectors], v[kVectors];
  __m512i m_most = _mm512_setzero_si512(), v_most = _mm512_setzero_si512();
  __m512 m_scale = zero, v_scale = zero;
  if constexpr (kCodes) {
    m_scale = _mm512_set1_ps(a.m_scale[tile]);
    v_scale = _mm512_set1_ps(a.v_scale[tile]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    const int at = 16 * i;
    __m512 mean, square;
    __mmask16 up = 0;  // ties whose half was rounded up
    if constexpr (kCodes) {
      const __m512 q = _mm512_cvtepi32_ps(
          _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(t.m + at))));
      const __m512 r = _mm512_cvtepi32_ps(
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(t.v + at))));
      mean = _mm512_mul_ps(q, _mm512_abs_ps(q));
      mean = _mm512_mul_ps(_mm512_mul_ps(mean, _mm512_set1_ps(1.0f / kMean)), m_scale);
      square = _mm512_mul_ps(_mm512_mul_ps(fourths(r), _mm512_set1_ps(1.0f / kSquare)), v_scale);
    } else {
      const __m512i stored = load_halves(reinterpret_cast<const uint16_t*>(t.v) + at);
      mean = widened(load_halves(reinterpret_cast<const uint16_t*>(t.m) + at));
      square = _mm512_abs_ps(widened(stored));
      up = _mm512_test_epi32_mask(stored, _mm512_set1_epi32(0x8000));
    }
    const __m512i low = load_halves(t.low + at);
    const __m512i middle = _mm512_set1_epi32(0x8000);
    if constexpr (!kCodes) up = _mm512_mask_cmpeq_epi32_mask(up, low, middle);
    up |= _mm512_cmpgt_epi32_mask(low, middle);
    __m512i high = load_halves(t.high + at);
    high = _mm512_mask_sub_epi32(high, up, high, _mm512_set1_epi32(1));
    const __m512 p = _mm512_castsi512_ps(_mm512_or_si512(_mm512_slli_epi32(high, 16), low));
    // adam_tile, operation by operation.
    const __m512 x = _mm512_mul_ps(widened(load_halves(t.grad + at)), _mm512_set1_ps(a.grad_scale));
    mean = _mm512_add_ps(mean, _mm512_mul_ps(_mm512_set1_ps(a.weight1), _mm512_sub_ps(x, mean)));
    square = _mm512_add_ps(_mm512_mul_ps(square, _mm512_set1_ps(a.beta2)),
                           _mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(a.weight2)));
    const __m512 root = _mm512_mul_ps(_mm512_sqrt_ps(square), _mm512_set1_ps(a.root));
    const __m512 step = _mm512_div_ps(_mm512_mul_ps(_mm512_set1_ps(a.size), mean),
                                      _mm512_add_ps(root, _mm512_set1_ps(a.eps)));
    const __m512 master = _mm512_sub_ps(_mm512_mul_ps(p, _mm512_set1_ps(a.decay)), step);
    // split_range.
    const __m512i bits = quieted(_mm512_castps_si512(master)), above = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(above, _mm512_set1_epi32(1));
    const __mmask16 tie = _mm512_mask_test_epi32_mask(
        _mm512_cmpeq_epi32_mask(_mm512_and_si512(bits, _mm512_set1_epi32(0xFFFF)), middle), odd, odd);
    store_halves(t.high + at,
                 _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16));
    if constexpr (kCodes) {
      store_halves(t.low + at, _mm512_mask_add_epi32(bits, tie, bits, _mm512_set1_epi32(1)));
      m[i] = mean;
      v[i] = square;
      m_most = _mm512_max_epi32(m_most, magnitude(mean));
      v_most = _mm512_max_epi32(v_most, magnitude(square));
    } else {
      store_halves(t.low + at, bits);
      const __m512i words = words_of(first, i);
      store_halves(reinterpret_cast<uint16_t*>(t.m) + at,
                   narrowed(mean, _mm512_and_si512(words, _mm512_set1_epi32(0xFFFF))));
      const __m512i stored = _mm512_and_si512(narrowed(square, _mm512_srli_epi32(words, 16)),
                                              _mm512_set1_epi32(0x7FFF));
      store_halves(reinterpret_cast<uint16_t*>(t.v) + at,
                   _mm512_mask_or_epi32(stored, tie, stored, middle));
    }
  }
  if constexpr (kCodes) {
    const float m_largest = scale_of(m_most), v_largest = scale_of(v_most);
    a.m_scale[tile] = m_largest;
    a.v_scale[tile] = v_largest;
    const __m512 m_inverse = _mm512_set1_ps(m_largest > 0.0f ? 1.0f / m_largest * kMean : 0.0f);
    const __m512 v_inverse = _mm512_set1_ps(v_largest > 0.0f ? 1.0f / v_largest : 0.0f);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      const int at = 16 * i;
      const __m512i words = words_of(first, i), low = _mm512_and_si512(words, _mm512_set1_epi32(0xFFFF));
      // The second operand of max is the result where the first is a NaN.
      __m512 x = _mm512_max_ps(_mm512_mul_ps(_mm512_abs_ps(m[i]), m_inverse), zero);
      __m512 code = _mm512_min_ps(mean_codes(x, _mm512_cvtepi32_ps(low)), _mm512_set1_ps(127.0f));
      const __m512i sign = _mm512_set1_epi32(static_cast<int32_t>(0x80000000u));
      const __m512i signed_code = _mm512_ternarylogic_epi32(  // with the sign of m
          _mm512_castps_si512(code), _mm512_castps_si512(m[i]), sign, 0xF8);
      const __m512i m_codes = _mm512_cvtps_epi32(_mm512_castsi512_ps(signed_code));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(t.m + at), _mm512_cvtepi32_epi8(m_codes));

      x = _mm512_max_ps(_mm512_mul_ps(_mm512_mul_ps(v[i], v_inverse), _mm512_set1_ps(kSquare)), zero);
      const __m512 u = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(words, 16)), _mm512_set1_ps(kUnit));
      code = square_codes(x, u);
      code = _mm512_mask_max_ps(code, _mm512_cmp_ps_mask(x, zero, _CMP_GT_OQ), code, _mm512_set1_ps(2.0f));
      const __m512i v_codes = _mm512_cvtps_epi32(code);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(t.v + at), _mm512_cvtusepi32_epi8(v_codes));
    }
  }
}

}  // namespace ondevice
#endif
