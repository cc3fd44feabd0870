// The forms of products of integers that processors have, and a plain one; integer_product.cpp chooses.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

#include "integer_product.h"

// What lies between the two is compiled for processors that have `features`.
#define ONDEVICE_TEXT(x) #x
#if defined(__clang__)
#define ONDEVICE_TARGET(features) \
  _Pragma(ONDEVICE_TEXT(clang attribute push(__attribute__((target(features))), apply_to = function)))
#define ONDEVICE_TARGET_END _Pragma("clang attribute pop")
#else
#define ONDEVICE_TARGET(features) _Pragma("GCC push_options") _Pragma(ONDEVICE_TEXT(GCC target(features)))
#define ONDEVICE_TARGET_END _Pragma("GCC pop_options")
#endif

namespace ondevice {
namespace {

#if defined(__x86_64__)

ONDEVICE_TARGET("avx512f,avx512bw,avx512vl,avx512vnni")
namespace avx512vnni {
typedef int32_t Sums __attribute__((vector_size(64)));
constexpr int kSumLanes = 16;
// The unsigned bytes are the weights': those of 8 bits lack a sign when kLift is added. Panels lie with it added.
struct FourBits {
  typedef Sums Weights;
  typedef Sums Four;
  typedef Sums Part;
  static constexpr int kTall = 6, kWide = 2;
  static constexpr bool kLifts = false;
  static inline Weights weights(const int8_t* p) { return (Sums)_mm512_loadu_si512(p); }
  static inline Four four(const int8_t* p) {
    int32_t all;
    std::memcpy(&all, p, sizeof all);
    return (Sums)_mm512_set1_epi32(all);
  }
  static inline Part dot(Part acc, Four a, Weights w) {
    return (Sums)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)a);
  }
  static inline Sums whole(Part part) { return part; }
};
struct LiftedBits : FourBits {
  static constexpr bool kLifts = true;
};
struct EightBits : LiftedBits {
  static inline Weights weights(const int8_t* p) { return FourBits::weights(p) ^ (int32_t)0x80808080; }
};
#include "grouped_tile.h"
static inline Sums signed_at(const int8_t* p) { return FourBits::weights(p); }
typedef Sums Half;
static inline void nibbles(const uint8_t* p, Half& high, Half& low) {
  const Sums both = signed_at((const int8_t*)p);
  high = both >> 4 & 0x0F0F0F0F;
  low = both & 0x0F0F0F0F;
}
static inline Floats of_groups(const float* factors) {
  const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return (Floats)_mm512_maskz_permutexvar_ps(0xFFFF, lanes, _mm512_castps128_ps512(_mm_loadu_ps(factors)));
}
static inline Floats of_whole_groups(const float* factors) {
  return (Floats)_mm512_mask_blend_ps(0xFF00, _mm512_set1_ps(factors[0]), _mm512_set1_ps(factors[1]));
}
static inline Floats halves_at(const uint16_t* p) {
  return (Floats)_mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256((const __m256i*)p));
}
static inline float added_lanes(Floats values) {
  const auto eight = __builtin_shufflevector(values, values, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(values, values, 8, 9, 10, 11, 12, 13, 14, 15);
  const auto four =
      __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  return four[0] + four[1] + (four[2] + four[3]);
}
#include "q4_rows.h"
#include "q8_rows.h"
static bool available() { return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw"); }
}  // namespace avx512vnni
ONDEVICE_TARGET_END

#if defined(__clang__) || __GNUC__ >= 11
ONDEVICE_TARGET("avx2,f16c,avxvnni")
namespace avxvnni {
typedef int32_t Sums __attribute__((vector_size(32)));
constexpr int kSumLanes = 8;
struct FourBits {
  typedef Sums Weights;
  typedef Sums Four;
  typedef Sums Part;
  static constexpr int kTall = 3, kWide = 2;
  static constexpr bool kLifts = false;
  static inline Weights weights(const int8_t* p) { return (Sums)_mm256_loadu_si256((const __m256i*)p); }
  static inline Four four(const int8_t* p) {
    int32_t all;
    std::memcpy(&all, p, sizeof all);
    return (Sums)_mm256_set1_epi32(all);
  }
  static inline Part dot(Part acc, Four a, Weights w) {
    return (Sums)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)a);
  }
  static inline Sums whole(Part part) { return part; }
};
struct LiftedBits : FourBits {
  static constexpr bool kLifts = true;
};
struct EightBits : LiftedBits {
  static inline Weights weights(const int8_t* p) { return FourBits::weights(p) ^ (int32_t)0x80808080; }
};
#include "grouped_tile.h"
#include "q4_of_256_bits.h"
#include "q4_rows.h"
#include "q8_rows.h"
static bool available() {
  unsigned a = 7, b = 0, c = 1, d = 0;  // leaf 7, subleaf 1: GCC 12 has no name for it
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return __builtin_cpu_supports("avx2") && (a >> 4 & 1);
}
}  // namespace avxvnni
ONDEVICE_TARGET_END
#endif

// Every processor with AVX2 converts numbers of 16 bits, too.
ONDEVICE_TARGET("avx2,f16c")
namespace avx2 {
typedef int32_t Sums __attribute__((vector_size(32)));
constexpr int kSumLanes = 8;
// A group's products fit 16 bits: 16 of at most 127 times 15 in each.
struct FourBits {
  typedef __m256i Weights;
  typedef __m256i Four;
  typedef int16_t Part __attribute__((vector_size(32)));
  static constexpr int kTall = 3, kWide = 2;
  static constexpr bool kLifts = false;
  static inline Weights weights(const int8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
  static inline Four four(const int8_t* p) {
    int32_t all;
    std::memcpy(&all, p, sizeof all);
    return _mm256_set1_epi32(all);
  }
  static inline Part dot(Part acc, Four a, Weights w) { return acc + (Part)_mm256_maddubs_epi16(w, a); }
  static inline Sums whole(Part part) { return (Sums)_mm256_madd_epi16((__m256i)part, _mm256_set1_epi16(1)); }
};
// The weight's sign goes to the other factor: two products of at most 128 times 127 fit 16 bits.
struct EightBits {
  struct Weights {
    __m256i levels, sizes;
  };
  typedef __m256i Four;
  typedef Sums Part;
  static constexpr int kTall = 4, kWide = 2;
  static constexpr bool kLifts = false;
  static inline Weights weights(const int8_t* p) {
    const __m256i levels = FourBits::weights(p);
    return {levels, _mm256_abs_epi8(levels)};
  }
  static inline Four four(const int8_t* p) { return FourBits::four(p); }
  static inline Part dot(Part acc, Four a, Weights w) {
    const __m256i pairs = _mm256_maddubs_epi16(w.sizes, _mm256_sign_epi8(a, w.levels));
    return acc + (Sums)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  static inline Sums whole(Part part) { return part; }
};
typedef EightBits LiftedBits;
#include "grouped_tile.h"
#include "q4_of_256_bits.h"
#include "q4_rows.h"
#include "q8_rows.h"
static bool available() { return __builtin_cpu_supports("avx2"); }
}  // namespace avx2
ONDEVICE_TARGET_END

#elif defined(__aarch64__)

namespace neon_loads {
typedef int32x4_t Sums;
constexpr int kSumLanes = 4;
// Levels of 4 bits are signed bytes, too.
struct SignedBytes {
  typedef int8x16_t Weights;
  typedef int8x16_t Four;
  typedef int32x4_t Part;
  static constexpr int kTall = 3, kWide = 4;
  static constexpr bool kLifts = false;
  static inline Weights weights(const int8_t* p) { return vld1q_s8(p); }
  static inline Four four(const int8_t* p) {
    int32_t all;
    std::memcpy(&all, p, sizeof all);
    return vreinterpretq_s8_s32(vdupq_n_s32(all));
  }
  static inline Sums whole(Part part) { return part; }
};
typedef int8x16_t Half;
static inline int8x16_t signed_at(const int8_t* p) { return vld1q_s8(p); }
static inline void nibbles(const uint8_t* p, Half& high, Half& low) {
  const uint8x16_t both = vld1q_u8(p);
  high = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
  low = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
}
static inline float32x4_t of_groups(const float* factors) { return vdupq_n_f32(factors[0]); }
static inline float32x4_t of_whole_groups(const float* factors) { return of_groups(factors); }
static inline float32x4_t halves_at(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
static inline float added_lanes(float32x4_t values) { return vaddvq_f32(values); }
#if defined(__linux__)
static inline bool has(unsigned long kind, int bit) { return getauxval(kind) >> bit & 1; }
#endif
}  // namespace neon_loads

ONDEVICE_TARGET("arch=armv8.2-a+dotprod")
namespace neon_dot {
using namespace neon_loads;
struct FourBits : SignedBytes {
  static inline Part dot(Part acc, Four a, Weights w) { return vdotq_s32(acc, a, w); }
};
typedef FourBits EightBits, LiftedBits;
#include "grouped_tile.h"
#include "q4_rows.h"
#include "q8_rows.h"
static bool available() {
#if defined(__APPLE__)
  return true;
#elif defined(__linux__)
  return has(AT_HWCAP, 20);  // HWCAP_ASIMDDP
#else
  return false;
#endif
}
}  // namespace neon_dot
ONDEVICE_TARGET_END

ONDEVICE_TARGET("arch=armv8.2-a+dotprod+i8mm")
namespace neon_i8mm {
// One row has no other beside it: its products are those of `neon_dot`.
#include "paired_tile.h"
using neon_dot::q4_rows;
using neon_dot::q8_rows;
static bool available() {
#if defined(__APPLE__) && defined(__ARM_FEATURE_MATMUL_INT8)
  return true;
#elif defined(__linux__)
  return neon_loads::has(AT_HWCAP2, 13) && neon_dot::available();  // HWCAP2_I8MM
#else
  return false;
#endif
}
}  // namespace neon_i8mm
ONDEVICE_TARGET_END

namespace neon {
using namespace neon_loads;
struct FourBits : SignedBytes {
  static inline Part dot(Part acc, Four a, Weights w) {
    const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(w)), high = vmull_s8(vget_high_s8(a), vget_high_s8(w));
    return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
  }
};
typedef FourBits EightBits, LiftedBits;
#include "grouped_tile.h"
#include "q4_rows.h"
#include "q8_rows.h"
static bool available() { return true; }
}  // namespace neon

#endif

namespace plain {
typedef int32_t Sums __attribute__((vector_size(16)));
constexpr int kSumLanes = 4;
struct Half {
  int8_t levels[16];
};
struct FourBits {
  typedef const int8_t* Weights;
  typedef const int8_t* Four;
  typedef Sums Part;
  static constexpr int kTall = 2, kWide = 4;
  static constexpr bool kLifts = false;
  static inline Weights weights(const int8_t* p) { return p; }
  static inline Four four(const int8_t* p) { return p; }
  static inline Part dot(Part acc, Four a, Weights w) {
    for (int lane = 0; lane < 4; ++lane) {
      for (int k = 0; k < 4; ++k) acc[lane] += a[k] * w[4 * lane + k];
    }
    return acc;
  }
  static inline Part dot(Part acc, Four a, const Half& w) {  // of 16 k of one row
    for (int k = 0; k < 16; ++k) acc[k / 4] += a[k] * w.levels[k];
    return acc;
  }
  static inline Sums whole(Part part) { return part; }
};
typedef FourBits EightBits, LiftedBits;
#include "grouped_tile.h"
static inline const int8_t* signed_at(const int8_t* p) { return p; }
static inline void nibbles(const uint8_t* p, Half& high, Half& low) {
  for (int k = 0; k < 16; ++k) {
    high.levels[k] = static_cast<int8_t>(p[k] >> 4);
    low.levels[k] = static_cast<int8_t>(p[k] & 15);
  }
}
static inline Floats of_groups(const float* factors) { return Floats{} + factors[0]; }
static inline Floats halves_at(const uint16_t* p) {
  return Floats{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
static inline float added_lanes(Floats values) { return values[0] + values[1] + (values[2] + values[3]); }
#include "q4_rows.h"
// q8_rows.h in words that compilers make products of 16 bits of, added in pairs.
static void q8_rows(const int8_t* levels, int64_t stride, int64_t rows, const int8_t* q, const float* factors,
                    int64_t length, float* sums) {
  for (int64_t row = 0; row < rows; ++row) {
    const int8_t* __restrict from = levels + row * stride;
    float sum = 0.0f;
    for (int64_t k = 0; k < length; k += kQ4Group) {
      const int64_t end = k + kQ4Group < length ? k + kQ4Group : length;
      int32_t some = 0;
      for (int64_t i = k; i < end; ++i) some += static_cast<int16_t>(q[i]) * static_cast<int16_t>(from[i]);
      sum += static_cast<float>(some) * factors[k / kQ4Group];
    }
    sums[row] = sum;
  }
}
static bool available() { return true; }
}  // namespace plain

#define ONDEVICE_FORM(name, form) \
  {name, form::available, form::q8_tile, form::q4_tile, form::q4_rows, form::q8_rows, form::kLifts}

const IntegerForm kForms[] = {
#if defined(__x86_64__)
    ONDEVICE_FORM("avx512vnni", avx512vnni),
#if defined(__clang__) || __GNUC__ >= 11
    ONDEVICE_FORM("avxvnni", avxvnni),
#endif
    ONDEVICE_FORM("avx2", avx2),
#elif defined(__aarch64__)
    ONDEVICE_FORM("i8mm", neon_i8mm),
    ONDEVICE_FORM("dotprod", neon_dot),
    ONDEVICE_FORM("neon", neon),
#endif
    ONDEVICE_FORM("plain", plain),
};

}  // namespace
}  // namespace ondevice
