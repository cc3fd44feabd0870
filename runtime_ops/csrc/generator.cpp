// Compile with -ffp-contract=off; -fno-math-errno -fno-trapping-math lets the loops vectorise.
#include "generator.h"

#include <cmath>
#include <cstring>

namespace ondevice {
namespace {

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15ull;
constexpr int kBlock = 256;  // words made at once

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

inline float as_float(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline int32_t as_int(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Natural logarithm of a float in (0, 1]; the polynomial is Cephes' logf (Moshier), relative error near 1e-7.
inline float log_unit(float x) {
  const int32_t shifted = as_int(x) - 0x3F3504F3;  // sqrt(1/2)
  const float exponent = static_cast<float>(shifted >> 23);
  const float f = as_float((shifted & 0x007FFFFF) + 0x3F3504F3) - 1.0f;
  const float z = f * f;
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  float y = p * f * z + exponent * -2.12194440e-4f;
  y = y - 0.5f * z;
  return (f + y) + exponent * 0.693359375f;
}

// Sine and cosine of an angle in [-pi, pi]; Cephes' sinf and cosf after reduction by multiples of pi/2.
inline void sin_cos(float a, float& sine, float& cosine) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float turns = (a * 0.636619772367581343f + kRound) - kRound;
  const int32_t quadrant = static_cast<int32_t>(turns);
  float f = a - turns * 1.5703125f;
  f = f - turns * 4.837512969970703125e-4f;
  f = f - turns * 7.549789948768648e-8f;
  const float z = f * f;
  const float s = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * f + f;
  const float c = ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z -
                  0.5f * z + 1.0f;
  const int32_t odd = -(quadrant & 1);  // all ones where sine and cosine change places
  const int32_t s_bits = as_int(s), c_bits = as_int(c);
  sine = as_float(((s_bits & ~odd) | (c_bits & odd)) ^ ((quadrant & 2) << 30));
  cosine = as_float(((c_bits & ~odd) | (s_bits & odd)) ^ (((quadrant + 1) & 2) << 30));
}

// Box-Muller of kBlock words: 2 * kBlock normals, cosine first.
void normal_block(uint64_t key, int64_t first_word, float* out) {
  uint32_t high[kBlock], low[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    const uint64_t w =
        mix(key + kGamma * (static_cast<uint64_t>(first_word) + 1u + static_cast<uint64_t>(i)));
    high[i] = static_cast<uint32_t>(w >> 32);
    low[i] = static_cast<uint32_t>(w) & 0xFFFFFFu;
  }
  float cosines[kBlock], sines[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    // Two exact halves and one rounding: the same float as a direct conversion of 32 bits.
    const float u32 = static_cast<float>(static_cast<int32_t>(high[i] >> 16)) * 65536.0f +
                      static_cast<float>(static_cast<int32_t>(high[i] & 0xFFFFu));
    const float uniform = (u32 + 0.5f) * 2.3283064365386963e-10f;  // 2^-32
    const float turn =
        (static_cast<float>(static_cast<int32_t>(low[i])) - 8388608.0f) * 5.9604644775390625e-8f;
    const float radius = std::sqrt(-2.0f * log_unit(uniform));
    float s, c;
    sin_cos(6.283185307179586f * turn, s, c);
    cosines[i] = radius * c;
    sines[i] = radius * s;
  }
  for (int i = 0; i < kBlock; ++i) {
    out[2 * i] = cosines[i];
    out[2 * i + 1] = sines[i];
  }
}

}  // namespace

uint64_t stream_key(uint64_t seed, uint64_t step, uint64_t query, uint64_t tensor) {
  uint64_t key = mix(seed + kGamma);
  key = mix(key + kGamma * (step + 1));
  key = mix(key + kGamma * (query + 1));
  return mix(key + kGamma * (tensor + 1));
}

void normal_range(uint64_t key, int64_t start, int64_t count, float* out) {
  float block[2 * kBlock];
  int64_t skip = start & 1;  // elements of the first block that lie before `start`
  for (int64_t word = start >> 1, done = 0; done < count; word += kBlock, skip = 0) {
    const int64_t size = count - done < 2 * kBlock - skip ? count - done : 2 * kBlock - skip;
    if (size == 2 * kBlock) {
      normal_block(key, word, out + done);
    } else {
      normal_block(key, word, block);
      std::memcpy(out + done, block + skip, static_cast<size_t>(size) * sizeof(float));
    }
    done += size;
  }
}

void rademacher_range(uint64_t key, int64_t start, int64_t count, float* out) {
  for (int64_t done = 0; done < count;) {
    const int64_t element = start + done, skip = element & 63;
    const uint64_t w = mix(key + kGamma * (static_cast<uint64_t>(element >> 6) + 1)) << skip;
    const int64_t size = count - done < 64 - skip ? count - done : 64 - skip;
    const uint32_t halves[2] = {static_cast<uint32_t>(w >> 32), static_cast<uint32_t>(w)};
    for (int64_t j = 0; j < size; ++j) {
      const uint32_t sign = (halves[j >> 5] << (j & 31)) & 0x80000000u;
      out[done + j] = as_float(static_cast<int32_t>(0x3F800000u | sign));
    }
    done += size;
  }
}

}  // namespace ondevice
