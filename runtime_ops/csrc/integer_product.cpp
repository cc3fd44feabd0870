// The forms of `integer_tile`, and the panels that they multiply with; see integer_product.h.
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
typedef Sums Packed;
typedef Sums Activation;
constexpr int kSumLanes = 16, kTall = 12, kWide = 2;
static inline Packed unpack(const int8_t* p) { return (Sums)_mm512_loadu_si512(p); }
static inline Activation spread(int32_t four) { return (Sums)_mm512_set1_epi32(four); }
static inline Sums dot(Sums acc, Activation a, Packed w) {
  return (Sums)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)w);
}
#include "integer_tile.h"
static bool available() { return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw"); }
}  // namespace avx512vnni
ONDEVICE_TARGET_END

#if defined(__clang__) || __GNUC__ >= 11
ONDEVICE_TARGET("avx2,avxvnni")
namespace avxvnni {
typedef int32_t Sums __attribute__((vector_size(32)));
typedef Sums Packed;
typedef Sums Activation;
constexpr int kSumLanes = 8, kTall = 3, kWide = 4;
static inline Packed unpack(const int8_t* p) { return (Sums)_mm256_loadu_si256((const __m256i*)p); }
static inline Activation spread(int32_t four) { return (Sums)_mm256_set1_epi32(four); }
static inline Sums dot(Sums acc, Activation a, Packed w) {
  return (Sums)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)w);
}
#include "integer_tile.h"
static bool available() {
  unsigned a = 7, b = 0, c = 1, d = 0;  // leaf 7, subleaf 1: GCC 12 has no name for it
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return __builtin_cpu_supports("avx2") && (a >> 4 & 1);
}
}  // namespace avxvnni
ONDEVICE_TARGET_END
#endif

ONDEVICE_TARGET("avx2")
namespace avx2 {
// Even and odd bytes by 16 bits: products of unsigned and signed bytes, added in pairs, do not fit 16.
typedef int32_t Sums __attribute__((vector_size(32)));
struct Packed {
  __m256i even, odd;
};
typedef Packed Activation;
constexpr int kSumLanes = 8, kTall = 4, kWide = 2;
static inline Packed unpack(const int8_t* p) {
  const __m256i all = _mm256_loadu_si256((const __m256i*)p);
  return {_mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), _mm256_srai_epi16(all, 8)};
}
static inline Activation spread(int32_t four) {
  const uint32_t bits = (uint32_t)four;
  return {_mm256_set1_epi32((int32_t)(bits & 0x00FF00FFu)), _mm256_set1_epi32((int32_t)(bits >> 8 & 0x00FF00FFu))};
}
static inline Sums dot(Sums acc, Activation a, Packed w) {
  const __m256i pairs = _mm256_add_epi32(_mm256_madd_epi16(a.even, w.even), _mm256_madd_epi16(a.odd, w.odd));
  return (Sums)_mm256_add_epi32((__m256i)acc, pairs);
}
#include "integer_tile.h"
static bool available() { return __builtin_cpu_supports("avx2"); }
}  // namespace avx2
ONDEVICE_TARGET_END

#elif defined(__aarch64__)

namespace neon_loads {
// Signed bytes: the activations' are those less 128, and 128 times a column's sum is missing.
typedef int32x4_t Sums;
typedef int8x16_t Packed;
typedef int8x16_t Activation;
constexpr int kSumLanes = 4, kTall = 4, kWide = 4;
static inline Packed unpack(const int8_t* p) { return vld1q_s8(p); }
static inline Activation spread(int32_t four) {
  return vreinterpretq_s8_s32(vdupq_n_s32((int32_t)((uint32_t)four ^ 0x80808080u)));
}
}  // namespace neon_loads

ONDEVICE_TARGET("arch=armv8.2-a+dotprod")
namespace neon_dot {
using namespace neon_loads;
static inline Sums dot(Sums acc, Activation a, Packed w) { return vdotq_s32(acc, a, w); }
#include "integer_tile.h"
static bool available() {
#if defined(__APPLE__)
  return true;
#elif defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#else
  return false;
#endif
}
}  // namespace neon_dot
ONDEVICE_TARGET_END

namespace neon {
using namespace neon_loads;
static inline Sums dot(Sums acc, Activation a, Packed w) {
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(w)), high = vmull_s8(vget_high_s8(a), vget_high_s8(w));
  return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}
#include "integer_tile.h"
static bool available() { return true; }
}  // namespace neon

#endif

namespace plain {
typedef int32_t Sums __attribute__((vector_size(16)));
typedef const int8_t* Packed;
typedef uint32_t Activation;
constexpr int kSumLanes = 4, kTall = 2, kWide = 4;
static inline Packed unpack(const int8_t* p) { return p; }
static inline Activation spread(int32_t four) { return static_cast<uint32_t>(four); }
static inline Sums dot(Sums acc, Activation a, Packed w) {
  for (int lane = 0; lane < 4; ++lane) {
    for (int k = 0; k < 4; ++k) acc[lane] += static_cast<int32_t>(a >> 8 * k & 255u) * w[4 * lane + k];
  }
  return acc;
}
#include "integer_tile.h"
static bool available() { return true; }
}  // namespace plain

const IntegerForm kForms[] = {
#if defined(__x86_64__)
    {"avx512vnni", avx512vnni::available, avx512vnni::tile, 0},
#if defined(__clang__) || __GNUC__ >= 11
    {"avxvnni", avxvnni::available, avxvnni::tile, 0},
#endif
    {"avx2", avx2::available, avx2::tile, 0},
#elif defined(__aarch64__)
    {"dotprod", neon_dot::available, neon_dot::tile, 128},
    {"neon", neon::available, neon::tile, 128},
#endif
    {"plain", plain::available, plain::tile, 0},
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

void pack_integers(const Matrix& w, bool transposed, int64_t column, int64_t columns, int64_t first, int64_t depth,
                   int8_t* panel, int32_t* totals) {
  const int64_t quads = (depth + 3) / 4;
  const int8_t* levels = static_cast<const int8_t*>(w.data);
  std::memset(totals, 0, sizeof(int32_t) * static_cast<size_t>(kColumns));
  if (!transposed) {
    if (columns < kColumns || depth % 4) std::memset(panel, 0, static_cast<size_t>(4 * quads * kColumns));
    for (int64_t j = 0; j < columns; ++j) {
      const int8_t* __restrict row = levels + (column + j) * w.inputs + first;
      int32_t total = 0;
      for (int64_t k = 0; k < depth; ++k) total += row[k];
      totals[j] = total;
    }
    // Blocks of 16 quads, so that the panel's cache lines are written while they are near.
    for (int64_t low = 0; low < depth / 4; low += 16) {
      const int64_t high = low + 16 < depth / 4 ? low + 16 : depth / 4;
      for (int64_t j = 0; j < columns; ++j) {
        const int8_t* row = levels + (column + j) * w.inputs + first;
        for (int64_t quad = low; quad < high; ++quad) {
          std::memcpy(panel + 4 * (quad * kColumns + j), row + 4 * quad, 4);
        }
      }
    }
    for (int64_t k = depth / 4 * 4; k < depth; ++k) {
      for (int64_t j = 0; j < columns; ++j) {
        panel[4 * (k / 4 * kColumns + j) + k % 4] = levels[(column + j) * w.inputs + first + k];
      }
    }
    return;
  }
  int8_t rows[4][kColumns];
  for (int64_t quad = 0; quad < quads; ++quad) {
    for (int64_t k = 0; k < 4; ++k) {
      const int64_t row = 4 * quad + k;
      if (row < depth && columns == kColumns) {
        std::memcpy(rows[k], levels + (first + row) * w.inputs + column, kColumns);
      } else {
        std::memset(rows[k], 0, kColumns);
        if (row < depth) std::memcpy(rows[k], levels + (first + row) * w.inputs + column, static_cast<size_t>(columns));
      }
    }
    uint32_t* __restrict out = reinterpret_cast<uint32_t*>(panel + 4 * quad * kColumns);
    for (int64_t j = 0; j < kColumns; ++j) {
      totals[j] += rows[0][j] + rows[1][j] + rows[2][j] + rows[3][j];
      out[j] = static_cast<uint32_t>(static_cast<uint8_t>(rows[0][j])) |
               static_cast<uint32_t>(static_cast<uint8_t>(rows[1][j])) << 8 |
               static_cast<uint32_t>(static_cast<uint8_t>(rows[2][j])) << 16 |
               static_cast<uint32_t>(static_cast<uint8_t>(rows[3][j])) << 24;
    }
  }
}

}  // namespace ondevice
