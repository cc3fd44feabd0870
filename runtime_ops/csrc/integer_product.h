// Products of rows that are rounded to 8 bits as they come with a matrix that lies in 8 or 4 bits: sums of 32 integers,
// exact, times the scale that these 32 of the row share.
//
// A panel holds four consecutive k of 32 columns as [k / 4][column][4]. Tiles multiply; the form of them is chosen when
// the program runs.
#pragma once

#include <memory>
#include <vector>

#include "matrix.h"
#include "row_product.h"

namespace ondevice {

constexpr int64_t kIntegerDepth = 2048;                          // of a panel at most
constexpr int64_t kIntegerPanel = kIntegerDepth * kColumns;      // bytes
constexpr int64_t kIntegerRows = 12;                             // of a tile at most
constexpr int32_t kLift = 128;                                   // makes a signed byte an unsigned one

// A group's levels as bytes; GCC makes a dozen instructions of its own conversion.
ONDEVICE_INLINE void store_bytes(const IntVec (&ints)[kQ4Group / kLanes], int8_t* out) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i low = _mm256_packs_epi32((__m256i)ints[0], (__m256i)ints[1]);
  const __m256i high = _mm256_packs_epi32((__m256i)ints[2], (__m256i)ints[3]);
  const __m256i quads = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing interleaves the two halves
  _mm256_storeu_si256((__m256i*)out, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), quads));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  for (int i = 0; i < kQ4Group / kLanes; ++i) {
    const Bytes bytes = __builtin_convertvector(ints[i], Bytes);
    std::memcpy(out + i * kLanes, &bytes, sizeof bytes);
  }
#endif
}

// Rows in groups of 32 that each have a scale: activations have outliers, and what shares a scale with one is lost.
struct Grouped {
  std::vector<int8_t> levels;   // [rows, stride], in -127..127, zeros behind a row's end
  std::vector<float> scales;    // [rows, groups]
  std::vector<int32_t> lifts;   // [rows, groups]: what `kLift` more in each weight adds to a group's products, negated
  std::vector<float> sums;      // [rows, groups]: of a group's levels, scaled
  int64_t groups = 0, stride = 0;
};

// What a tile reads of them, from some row and group on.
struct GroupedRows {
  const int8_t* levels;
  const float* scales;
  const int32_t* lifts;
  int64_t groups, stride;

  GroupedRows(const Grouped& x, int64_t row, int64_t group)
      : levels(x.levels.data() + row * x.stride + group * kQ4Group),
        scales(x.scales.data() + row * x.groups + group),
        lifts(x.lifts.data() + row * x.groups + group),
        groups(x.groups),
        stride(x.stride) {}
};

// sums[i][j] = sum over groups g of scale[i][g] times the sum over the group's 32 k of level[i][k] w[k / 4][j][k % 4], for
// 32 columns. The panel is one that `pack_integers` lifted if the form has `lifts`.
using Q8Tile = void (*)(const GroupedRows& x, int64_t rows, const int8_t* panel, int64_t groups, float* sums);

// The same with scales[g][j] as another factor, and w in 0..15.
using Q4Tile = void (*)(const GroupedRows& x, int64_t rows, const int8_t* panel, const float* scales, int64_t groups,
                        float* sums);

// sums[row - begin] = W[row] x for rows of a W of 4 bits and one row of x as `split_row` leaves it.
using Q4Rows = void (*)(const Matrix& w, int64_t begin, int64_t end, const int8_t* q, const float* factors,
                        const float* x_sums, float* sums);

// sums[row] = sum over k of levels[row * stride + k] q[k] factors[k / 32].
using Q8Rows = void (*)(const int8_t* levels, int64_t stride, int64_t rows, const int8_t* q, const float* factors,
                        int64_t length, float* sums);

struct IntegerForm {
  const char* name;
  bool (*available)();
  Q8Tile q8_tile;
  Q4Tile q4_tile;
  Q4Rows q4_rows;
  Q8Rows q8_rows;
  bool lifts;
};

// All forms that were compiled, the fastest first; the last is always available.
const IntegerForm* integer_forms(int* count);
// The first that this processor has, or the one that ONDEVICE_INTEGERS names.
const IntegerForm& integer_form();

// Round rows of x, multiplied by `factors` [length] if given.
template <typename Parallel>
void round_groups(const float* x, int64_t rows, int64_t length, const float* factors, Grouped& out,
                  const Parallel& parallel) {
  const int64_t groups = (length + kQ4Group - 1) / kQ4Group;
  out.groups = groups;
  out.stride = groups * kQ4Group;
  out.levels.resize(static_cast<size_t>(rows * out.stride));
  out.scales.resize(static_cast<size_t>(rows * groups));
  out.lifts.resize(static_cast<size_t>(rows * groups));
  out.sums.resize(static_cast<size_t>(rows * groups));
  parallel(rows, [&](int64_t begin, int64_t end) {
    alignas(64) float some[kQ4Group];
    for (int64_t at = begin * groups; at < end * groups; ++at) {
      const int64_t first = at % groups * kQ4Group, count = length - first < kQ4Group ? length - first : kQ4Group;
      const float* values = x + at / groups * length + first;
      if (count < kQ4Group) {
        std::memset(some, 0, sizeof some);
        for (int64_t k = 0; k < count; ++k) some[k] = factors ? values[k] * factors[first + k] : values[k];
        values = some;
      } else if (factors) {
        for (int64_t k = 0; k < kQ4Group; ++k) some[k] = values[k] * factors[first + k];
        values = some;
      }
      Vec most = Vec{}, none = Vec{};  // `none` stays 0 but for values that are not finite
      for (int64_t k = 0; k < kQ4Group; k += kLanes) {
        const Vec v = load(values + k), size = v < Vec{} ? -v : v;
        most = size > most ? size : most;
        none += v * 0.0f;
      }
      const float largest = folded<float>(most, [](auto a, auto b) { return a > b ? a : b; });
      const float not_finite = folded<float>(none, [](auto a, auto b) { return a + b; });
      int8_t* levels = out.levels.data() + at * kQ4Group;
      const float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
      if (!(not_finite == 0.0f)) {  // the products are not finite either, and whoever looks sees it
        std::memset(levels, 0, kQ4Group);
        out.lifts[static_cast<size_t>(at)] = 0;
        out.scales[static_cast<size_t>(at)] = out.sums[static_cast<size_t>(at)] = not_finite;
        continue;
      }
      IntVec total = IntVec{}, ints[kQ4Group / kLanes];
      for (int64_t k = 0; k < kQ4Group; k += kLanes) {  // truncation of what is positive rounds
        Vec level = load(values + k) * inverse + 128.5f;
        level = level > splat(255.5f) ? splat(255.5f) : level;
        ints[k / kLanes] = __builtin_convertvector(level, IntVec) - 128;
        total += ints[k / kLanes];
      }
      store_bytes(ints, levels);
      const int32_t sum = folded<int32_t>(total, [](auto a, auto b) { return a + b; });
      out.scales[static_cast<size_t>(at)] = scale;
      out.lifts[static_cast<size_t>(at)] = -kLift * sum;
      out.sums[static_cast<size_t>(at)] = scale * static_cast<float>(sum);
    }
  });
}

// One row as `q4_rows` reads it: the even levels of all groups and then the odd ones, each up to a multiple of kHalves
// groups, as scales and sums are; zeros behind the last.
inline void split_row(Grouped& row, int64_t padded) {
  const size_t groups = row.scales.size(), all = static_cast<size_t>(padded), half = kQ4Group / 2;
  static thread_local std::vector<int8_t> split;
  split.assign(2 * half * all, 0);
  for (size_t at = 0; at < groups * half; ++at) {
    split[at] = row.levels[2 * at];
    split[half * all + at] = row.levels[2 * at + 1];
  }
  row.levels.swap(split);
  row.scales.resize(all, 0.0f);
  row.sums.resize(all, 0.0f);
}

// Levels [depth / 4][32][4] of W^T's columns, and scales and minima [depth / 32][32]; `first` and `depth` are
// multiples of 32.
void pack_q4(const Matrix& w, int64_t column, int64_t columns, int64_t first, int64_t depth, int8_t* panel,
             float* scales, float* minima);

// y[:, column ..] (+)= grouped W^T for a W of 4 bits; `panel` holds kIntegerPanel bytes, and behind them as many floats
// as two rows of kIntegerDepth.
inline void multiply_grouped(const Grouped& x, int64_t rows, const Matrix& w, int64_t column, int64_t columns,
                             int8_t* panel, float* y, int64_t ldy, bool add) {
  const IntegerForm& form = integer_form();
  float* scales = reinterpret_cast<float*>(panel + kIntegerPanel);
  float* minima = scales + kIntegerDepth;
  alignas(64) float sums[kIntegerRows * kColumns];
  for (int64_t first = 0; first < w.inputs; first += kIntegerDepth, add = true) {
    const int64_t depth = w.inputs - first < kIntegerDepth ? w.inputs - first : kIntegerDepth;
    const int64_t group = first / kQ4Group, groups = depth / kQ4Group;
    pack_q4(w, column, columns, first, depth, panel, scales, minima);
    multiply_columns(x.sums.data() + group, x.groups, 1, rows, groups, minima, kColumns, y, ldy, columns, add);
    for (int64_t row = 0; row < rows; row += kIntegerRows) {
      const int64_t count = rows - row < kIntegerRows ? rows - row : kIntegerRows;
      form.q4_tile(GroupedRows(x, row, group), count, panel, scales, groups, sums);
      for (int64_t i = 0; i < count; ++i) {
        float* __restrict to = y + (row + i) * ldy;
        for (int64_t j = 0; j < columns; ++j) to[j] += sums[i * kColumns + j];
      }
    }
  }
}

// The scale of each row of a W of 4 bits in 8 bits, [outputs].
template <typename Parallel>
void q4_row_scales(const Matrix& w, std::vector<float>& scales, const Parallel& parallel) {
  const int64_t groups = w.inputs / kQ4Group;
  scales.resize(static_cast<size_t>(w.outputs));
  parallel(w.outputs, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float most = 0.0f;
      for (int64_t at = row * groups; at < (row + 1) * groups; ++at) {
        const float low = half_to_float(w.minima[at]), high = low + 15.0f * half_to_float(w.halves[at]);
        const float size = (low < 0.0f ? -low : low) > (high < 0.0f ? -high : high) ? (low < 0.0f ? -low : low)
                                                                                   : (high < 0.0f ? -high : high);
        most = size > most ? size : most;
      }
      scales[static_cast<size_t>(row)] = most > 0.0f ? most / 127.0f : 1.0f;
    }
  });
}

// Panel [depth / 4][32][4] of W^T's or W's columns; of a W of 4 bits, which has `scales` of its rows in 8 bits, only
// W's. `lifted`: with kLift more in each level.
void pack_integers(const Matrix& w, bool transposed, int64_t column, int64_t columns, int64_t first, int64_t depth,
                   bool lifted, int8_t* panel);

// y[:, column ..] = what `begin` leaves there + rounded W^T or, with `transposed`, rounded W; `panel` holds
// kIntegerPanel bytes. begin(row, count) and end(row, count) are called before and behind the sums of so many rows of
// y, while these are in the nearest cache; begin says whether it wrote them.
template <typename Begin, typename End>
void multiply_integers(const Grouped& x, int64_t rows, const Matrix& w, bool transposed, int64_t column,
                       int64_t columns, int8_t* panel, float* y, int64_t ldy, const Begin& begin, const End& end) {
  const IntegerForm& form = integer_form();
  const int64_t length = transposed ? w.outputs : w.inputs;
  alignas(64) float sums[kIntegerRows * kColumns], factors[kColumns];
  for (int64_t j = 0; j < kColumns; ++j) factors[j] = transposed || j >= columns ? 1.0f : w.scales[column + j];
  for (int64_t first = 0; first < length; first += kIntegerDepth) {
    const int64_t depth = length - first < kIntegerDepth ? length - first : kIntegerDepth;
    pack_integers(w, transposed, column, columns, first, depth, form.lifts, panel);
    for (int64_t row = 0; row < rows; row += kIntegerRows) {
      const int64_t count = rows - row < kIntegerRows ? rows - row : kIntegerRows;
      const bool add = first > 0 || begin(row, count);
      form.q8_tile(GroupedRows(x, row, first / kQ4Group), count, panel, (depth + kQ4Group - 1) / kQ4Group, sums);
      for (int64_t i = 0; i < count; ++i) {
        float* __restrict to = y + (row + i) * ldy;
        const float* __restrict from = sums + i * kColumns;
        if (columns < kColumns) {
          for (int64_t j = 0; j < columns; ++j) to[j] = (add ? to[j] : 0.0f) + from[j] * factors[j];
        } else if (add) {
          for (int64_t j = 0; j < kColumns; ++j) to[j] += from[j] * factors[j];
        } else {
          for (int64_t j = 0; j < kColumns; ++j) to[j] = from[j] * factors[j];
        }
      }
      if (first + depth == length) end(row, count);
    }
  }
}

// sums[row - begin] = W[row] x for the rows [begin, end) of a W of 8 bits and one row of x, as `multiply_integers`
// computes it, but without panels.
inline void q8_row_products(const Grouped& x, const Matrix& w, int64_t begin, int64_t end, float* sums) {
  const int8_t* levels = static_cast<const int8_t*>(w.data) + begin * w.inputs;
  integer_form().q8_rows(levels, w.inputs, end - begin, x.levels.data(), x.scales.data(), w.inputs, sums);
  for (int64_t row = begin; row < end; ++row) sums[row - begin] *= w.scales[row];
}

}  // namespace ondevice
