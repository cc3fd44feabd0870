// x W^T or g W with a frozen matrix as a file has it, and with what a block adds to it: a bias, LoRA's
// product scale h B, and a sum that the result goes into. A panel of the matrix is made dense at a time, in the
// first-level cache, and multiplied with every row.
#pragma once

#include "integer_product.h"
#include "matrix.h"

namespace ondevice {

struct Added {
  const float* bias;  // [width]
  const float* h;     // [rows, rank]
  const float* b;     // [rank, width]
  const float* into;  // [rows, width]; may be y itself
  int64_t rank;
  float scale;
};

// y[:, column ..] = into + bias; false if there is neither.
inline bool begin_panel(const Added& added, int64_t rows, int64_t width, int64_t column, int64_t columns, float* y) {
  if (!added.into && !added.bias) return false;
  for (int64_t row = 0; row < rows; ++row) {
    float* to = y + row * width + column;
    if (added.into == y) {
    } else if (added.into) {
      std::memcpy(to, added.into + row * width + column, sizeof(float) * static_cast<size_t>(columns));
    } else {
      std::memset(to, 0, sizeof(float) * static_cast<size_t>(columns));
    }
    if (added.bias) {
      for (int64_t j = 0; j < columns; ++j) to[j] += added.bias[column + j];
    }
  }
  return true;
}

// y[:, column ..] += scale h B; `panel` holds kDepth * kColumns.
inline void add_lora(const Added& added, int64_t rows, int64_t width, int64_t column, int64_t columns, float* panel,
                     float* y) {
  for (int64_t first = 0; first < added.rank; first += kDepth) {
    const int64_t depth = added.rank - first < kDepth ? added.rank - first : kDepth;
    std::memset(panel, 0, sizeof(float) * static_cast<size_t>(depth * kColumns));
    for (int64_t k = 0; k < depth; ++k) {
      const float* row = added.b + (first + k) * width + column;
      for (int64_t j = 0; j < columns; ++j) panel[k * kColumns + j] = added.scale * row[j];
    }
    multiply_columns(added.h + first, added.rank, 1, rows, depth, panel, kColumns, y + column, width, columns, true);
  }
}

// The product of one row of W with x, as floats. `sums` are those of x's groups of 32, for a W of 4 bits.
inline float row_product(const Matrix& w, int64_t row, const float* __restrict x, const float* __restrict sums) {
  if (w.kind == Matrix::kQ4) {
    const int64_t groups = w.inputs / kQ4Group;
    const uint8_t* bytes = static_cast<const uint8_t*>(w.data) + row * w.inputs / 2;
    Sixteen acc = Sixteen{};
    float low = 0.0f;
    for (int64_t group = 0; group < groups; ++group, bytes += kQ4Group / 2) {
      float levels[kQ4Group];
      q4_levels(bytes, levels);
      Sixteen left, right, first, second;
      std::memcpy(&left, levels, sizeof left);
      std::memcpy(&right, levels + 16, sizeof right);
      std::memcpy(&first, x + group * kQ4Group, sizeof first);
      std::memcpy(&second, x + group * kQ4Group + 16, sizeof second);
      acc += (left * first + right * second) * half_to_float(w.halves[row * groups + group]);
      low += sums[group] * half_to_float(w.minima[row * groups + group]);
    }
    for (int i = 0; i < 16; ++i) low += acc[i];
    return low;
  }
  Vec acc[4] = {};
  const float* __restrict floats = static_cast<const float*>(w.data) + (w.kind == Matrix::kFloat ? row * w.inputs : 0);
  const int8_t* __restrict bytes = static_cast<const int8_t*>(w.data) + (w.kind == Matrix::kInt8 ? row * w.inputs : 0);
  const auto value = [&](int64_t k) {
    if (w.kind == Matrix::kFloat) return load(floats + k);
    SignedVec levels;
    std::memcpy(&levels, bytes + k, sizeof levels);
    return __builtin_convertvector(__builtin_convertvector(levels, IntVec), Vec);
  };
  int64_t k = 0;
  for (; k + 4 * kLanes <= w.inputs; k += 4 * kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) acc[i] += value(k + i * kLanes) * load(x + k + i * kLanes);
  }
  for (; k + kLanes <= w.inputs; k += kLanes) acc[0] += value(k) * load(x + k);
  float sum = 0.0f;
  for (; k < w.inputs; ++k) sum += (w.kind == Matrix::kFloat ? floats[k] : static_cast<float>(bytes[k])) * x[k];
  acc[0] += acc[1] + acc[2] + acc[3];
  for (int i = 0; i < kLanes; ++i) sum += acc[0][i];
  return w.kind == Matrix::kInt8 ? sum * w.scales[row] : sum;
}

// x W^T for one row of x: nothing is packed, W is read once.
template <typename Parallel>
void block_linear_row(const float* x, const Matrix& w, const Added& added, float* y, const Parallel& parallel) {
  std::vector<float> sums;
  if (w.kind == Matrix::kQ4) {
    for (int64_t at = 0; at < w.inputs; at += kQ4Group) {
      float sum = 0.0f;
      for (int64_t k = at; k < at + kQ4Group; ++k) sum += x[k];
      sums.push_back(sum);
    }
  }
  parallel((w.outputs + kColumns - 1) / kColumns, [&](int64_t begin, int64_t end) {
    const int64_t last = end * kColumns < w.outputs ? end * kColumns : w.outputs;
    for (int64_t row = begin * kColumns; row < last; ++row) {
      float sum = row_product(w, row, x, sums.data());
      if (added.bias) sum += added.bias[row];
      if (added.into) sum += added.into[row];
      float narrow = 0.0f;
      for (int64_t k = 0; k < (added.h ? added.rank : 0); ++k) narrow += added.h[k] * added.b[k * w.outputs + row];
      y[row] = sum + added.scale * narrow;
    }
  });
}

// x [rows, inputs] to y [rows, outputs], or with `transposed` [rows, outputs] to [rows, inputs].
template <typename Parallel>
void block_linear(const float* x, int64_t rows, const Matrix& w, bool transposed, const Added& added, float* y,
                  const Parallel& parallel) {
  const int64_t width = transposed ? w.inputs : w.outputs, length = transposed ? w.outputs : w.inputs;
  if (rows <= 0 || width <= 0) return;
  if (rows == 1 && !transposed) return block_linear_row(x, w, added, y, parallel);
  parallel((width + kColumns - 1) / kColumns, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* panel = scratch.get((kColumns + 4) * kDepth);
    for (int64_t column = begin * kColumns; column < end * kColumns && column < width; column += kColumns) {
      const int64_t columns = width - column < kColumns ? width - column : kColumns;
      bool add = begin_panel(added, rows, width, column, columns, y);
      for (int64_t first = 0; first < length; first += kDepth, add = true) {
        const int64_t depth = length - first < kDepth ? length - first : kDepth;
        if (transposed) {
          pack_columns(w, column, columns, first, depth, panel);
        } else {
          pack_rows(w, column, columns, first, depth, panel + kColumns * kDepth, panel);
        }
        multiply_columns(x + first, length, 1, rows, depth, panel, kColumns, y + column, width, columns, add);
      }
      if (added.h) add_lora(added, rows, width, column, columns, panel, y);
    }
  });
}

// The same with products of integers, of rows that were rounded (with W's scales as factors if `transposed`).
template <typename Parallel>
void multiply_rounded(const Rounded& x, int64_t rows, const Matrix& w, bool transposed, const Added& added, float* y,
                      const Parallel& parallel) {
  const int64_t width = transposed ? w.inputs : w.outputs;
  if (rows <= 0 || width <= 0) return;
  parallel((width + kColumns - 1) / kColumns, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* panel = scratch.get(kColumns * kDepth + kIntegerPanel / 4);
    int8_t* bytes = reinterpret_cast<int8_t*>(panel + kColumns * kDepth);
    for (int64_t column = begin * kColumns; column < end * kColumns && column < width; column += kColumns) {
      const int64_t columns = width - column < kColumns ? width - column : kColumns;
      const bool add = begin_panel(added, rows, width, column, columns, y);
      multiply_integers(x, rows, w, transposed, column, columns, bytes, y + column, width, add);
      if (added.h) add_lora(added, rows, width, column, columns, panel, y);
    }
  });
}

// x W^T with a W of 4 bits and rows that were rounded in groups.
template <typename Parallel>
void multiply_groups(const Grouped& x, int64_t rows, const Matrix& w, const Added& added, float* y,
                     const Parallel& parallel) {
  if (rows <= 0 || w.outputs <= 0) return;
  parallel((w.outputs + kColumns - 1) / kColumns, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* panel = scratch.get(kColumns * kDepth + kIntegerPanel / 4 + 2 * kIntegerDepth);
    int8_t* bytes = reinterpret_cast<int8_t*>(panel + kColumns * kDepth);
    for (int64_t column = begin * kColumns; column < end * kColumns && column < w.outputs; column += kColumns) {
      const int64_t columns = w.outputs - column < kColumns ? w.outputs - column : kColumns;
      const bool add = begin_panel(added, rows, w.outputs, column, columns, y);
      multiply_grouped(x, rows, w, column, columns, bytes, y + column, w.outputs, add);
      if (added.h) add_lora(added, rows, w.outputs, column, columns, panel, y);
    }
  });
}

// A W of 4 bits is multiplied as it is for x W^T, with groups of x. For g W the sum goes over rows of W, whose groups
// have many scales: W is rounded to 8 bits with a scale a row as it is packed, and the rest is as with 8 bits.
template <typename Parallel>
void block_linear_integers(const float* x, int64_t rows, const Matrix& w, bool transposed, const Added& added,
                           float* y, const Parallel& parallel) {
  if (w.kind == Matrix::kQ4 && !transposed) {
    Grouped grouped;
    round_groups(x, rows, w.inputs, grouped, parallel);
    multiply_groups(grouped, rows, w, added, y, parallel);
    return;
  }
  Rounded rounded;
  if (w.kind == Matrix::kQ4) {
    std::vector<float> scales;
    q4_row_scales(w, scales, parallel);
    Matrix scaled = w;
    scaled.scales = scales.data();
    round_rows(x, rows, w.outputs, scaled.scales, rounded, parallel);
    multiply_rounded(rounded, rows, scaled, true, added, y, parallel);
    return;
  }
  round_rows(x, rows, transposed ? w.outputs : w.inputs, transposed ? w.scales : nullptr, rounded, parallel);
  multiply_rounded(rounded, rows, w, transposed, added, y, parallel);
}

}  // namespace ondevice
