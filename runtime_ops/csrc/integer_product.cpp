// The forms of products of integers, and the panels that they multiply with; see integer_product.h.
#include "integer_product.h"

#include <cstdlib>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

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

const IntegerForm& chosen_form() {
  const char* wanted = std::getenv("ONDEVICE_INTEGERS");
  const IntegerForm* first = nullptr;
  for (const IntegerForm& form : kForms) {
    if (!form.available()) continue;
    if (wanted && std::strcmp(wanted, form.name) == 0) return form;
    if (!first) first = &form;
  }
  return *first;
}

}  // namespace

const IntegerForm* integer_forms(int* count) {
  *count = static_cast<int>(sizeof kForms / sizeof kForms[0]);
  return kForms;
}

const IntegerForm& integer_form() {
  static const IntegerForm& form = chosen_form();
  return form;
}

namespace {

typedef int8_t Signs __attribute__((vector_size(16)));
typedef int32_t SixteenInts __attribute__((vector_size(64)));

// W[row, column .. column + 32) in 8 bits with the row's scale, `w.scales[row]`.
void q4_row_in_8_bits(const Matrix& w, int64_t row, int64_t column, int8_t* out) {
  const int64_t group = row * (w.inputs / kQ4Group) + column / kQ4Group;
  const float inverse = 1.0f / w.scales[row];
  const float scale = float_of_half(w.halves[group]) * inverse;
  const float low = float_of_half(w.minima[group]) * inverse + 128.5f;  // truncation of what is positive rounds
  float values[kQ4Group];
  q4_levels(static_cast<const uint8_t*>(w.data) + (row * w.inputs + column) / 2, values);
  for (int half = 0; half < 2; ++half) {
    Sixteen level;
    std::memcpy(&level, values + 16 * half, sizeof level);
    const SixteenInts ints = __builtin_convertvector(level * scale + low, SixteenInts) - 128;
    const Signs bytes = __builtin_convertvector(ints, Signs);
    std::memcpy(out + 16 * half, &bytes, sizeof bytes);
  }
}

// 16 bytes of each of four rows as 16 columns of a quad.
void interleave_four(const int8_t* const rows[4], int8_t* out) {
  Signs r[4];
  for (int k = 0; k < 4; ++k) std::memcpy(&r[k], rows[k], sizeof r[k]);
  for (int half = 0; half < 2; ++half) {
    typedef int16_t Pairs __attribute__((vector_size(16)));
    Signs bytes[2];
    for (int k = 0; k < 2; ++k) {
      const Signs a = r[2 * k], b = r[2 * k + 1];
      bytes[k] = half ? __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
                      : __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    }
    const Pairs one = (Pairs)bytes[0], two = (Pairs)bytes[1];
    const Pairs low = __builtin_shufflevector(one, two, 0, 8, 1, 9, 2, 10, 3, 11);
    const Pairs high = __builtin_shufflevector(one, two, 4, 12, 5, 13, 6, 14, 7, 15);
    std::memcpy(out + 32 * half, &low, sizeof low);
    std::memcpy(out + 32 * half + 16, &high, sizeof high);
  }
}

// 4 `quads` times kColumns levels with kLift more in each, behind their packing, while they are near.
void lift(int8_t* levels, int64_t quads) {
  for (int64_t i = 0; i < 4 * quads * kColumns; ++i) levels[i] ^= static_cast<int8_t>(kLift);
}

}  // namespace

void pack_q4(const Matrix& w, int64_t column, int64_t columns, int64_t first, int64_t depth, int8_t* panel,
             float* scales, float* minima) {
  const int64_t groups = depth / kQ4Group, of_row = w.inputs / kQ4Group;
  if (columns < kColumns) {
    std::memset(panel, 0, static_cast<size_t>(depth * kColumns));
    std::memset(scales, 0, sizeof(float) * static_cast<size_t>(groups * kColumns));
    std::memset(minima, 0, sizeof(float) * static_cast<size_t>(groups * kColumns));
  }
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t j = 0; j < columns; ++j) {
      const int64_t at = (column + j) * of_row + first / kQ4Group + group;
      scales[group * kColumns + j] = float_of_half(w.halves[at]);
      minima[group * kColumns + j] = float_of_half(w.minima[at]);
      Bytes both;
      std::memcpy(&both, static_cast<const uint8_t*>(w.data) + at * (kQ4Group / 2), sizeof both);
      const Bytes high = both >> 4, low = both & 15;
      const Bytes one = __builtin_shufflevector(high, low, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      const Bytes two =
          __builtin_shufflevector(high, low, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      uint32_t quads[kQ4Group / 4];
      std::memcpy(quads, &one, sizeof one);
      std::memcpy(quads + 4, &two, sizeof two);
      int8_t* to = panel + group * kQ4Group * kColumns + 4 * j;
      for (int quad = 0; quad < kQ4Group / 4; ++quad) std::memcpy(to + 4 * quad * kColumns, quads + quad, 4);
    }
  }
}

void pack_integers(const Matrix& w, bool transposed, int64_t column, int64_t columns, int64_t first, int64_t depth,
                   bool lifted, int8_t* panel) {
  const int64_t quads = (depth + kQ4Group - 1) / kQ4Group * (kQ4Group / 4);
  const int8_t* levels = static_cast<const int8_t*>(w.data);
  const bool four_bits = w.kind == Matrix::kQ4;
  if (!transposed) {
    if (columns < kColumns || depth % kQ4Group) std::memset(panel, 0, static_cast<size_t>(4 * quads * kColumns));
    // Blocks of 16 quads, so that the panel's cache lines are written while they are near.
    for (int64_t low = 0; low < depth / 4; low += 16) {
      const int64_t some = low + 16 < depth / 4 ? 16 : depth / 4 - low;
      for (int64_t j = 0; j < columns; j += 4) {
        const int8_t* row = levels + (column + j) * w.inputs + first + 4 * low;
        int8_t* to = panel + 4 * (low * kColumns + j);
        if (j + 4 <= columns) {
          // The next panel's, while there is time.
          for (int64_t i = 0; i < 4; ++i) ask_for(w.address(column + kColumns + j + i, first + 4 * low), 4 * some);
          const void* const rows[4] = {row, row + w.inputs, row + 2 * w.inputs, row + 3 * w.inputs};
          transpose_words(rows, some, to, kColumns);
          continue;
        }
        for (int64_t i = 0; j + i < columns; ++i) {
          for (int64_t k = 0; k < some; ++k) std::memcpy(to + 4 * (k * kColumns + i), row + i * w.inputs + 4 * k, 4);
        }
      }
      if (lifted) lift(panel + 4 * low * kColumns, some);
    }
    for (int64_t k = depth / 4 * 4; k < depth; ++k) {
      for (int64_t j = 0; j < columns; ++j) {
        panel[4 * (k / 4 * kColumns + j) + k % 4] = levels[(column + j) * w.inputs + first + k];
      }
    }
    if (lifted && depth % 4) lift(panel + 4 * (depth / 4) * kColumns, 1);
    return;
  }
  int8_t copies[4][kColumns];
  for (int64_t quad = 0; quad < quads; ++quad) {
    const int8_t* rows[4];
    for (int64_t k = 0; k < 4; ++k) {
      const int64_t row = 4 * quad + k;
      const int8_t* from = levels + (first + row) * w.inputs + column;
      rows[k] = copies[k];
      if (row < depth && four_bits) {
        q4_row_in_8_bits(w, first + row, column, copies[k]);
      } else if (row < depth && columns == kColumns) {
        ask_for(w.address(first + row + kRowsAhead, column), kColumns);
        rows[k] = from;
      } else {
        std::memset(copies[k], 0, kColumns);
        if (row < depth) std::memcpy(copies[k], from, static_cast<size_t>(columns));
      }
    }
    for (int64_t half = 0; half < 2; ++half) {
      const int8_t* const some[4] = {rows[0] + 16 * half, rows[1] + 16 * half, rows[2] + 16 * half,
                                     rows[3] + 16 * half};
      interleave_four(some, panel + 4 * (quad * kColumns + 16 * half));
    }
    if (lifted) lift(panel + 4 * quad * kColumns, 1);
  }
}

}  // namespace ondevice
