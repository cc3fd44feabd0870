// For q4_rows.h and q8_rows.h, in vectors of 256 bits: included once for each of their forms, behind grouped_tile.h.
static inline FourBits::Weights signed_at(const int8_t* p) { return FourBits::weights(p); }
typedef FourBits::Weights Half;
static inline void nibbles(const uint8_t* p, Half& high, Half& low) {
  const __m256i both = _mm256_loadu_si256((const __m256i*)p), four_bits = _mm256_set1_epi8(15);
  high = (Half)_mm256_and_si256(_mm256_srli_epi16(both, 4), four_bits);
  low = (Half)_mm256_and_si256(both, four_bits);
}
static inline Floats of_groups(const float* factors) { return (Floats)_mm256_set_m128(_mm_set1_ps(factors[1]), _mm_set1_ps(factors[0])); }
static inline Floats of_whole_groups(const float* factors) { return (Floats)_mm256_set1_ps(factors[0]); }
static inline Floats halves_at(const uint16_t* p) {
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
static inline float added_lanes(Floats values) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)values), _mm256_extractf128_ps((__m256)values, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
