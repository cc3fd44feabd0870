// x W^T or g W with a frozen matrix as a file has it, and with what a block adds to it: a bias, LoRA's
// product scale h B, and a sum that the result goes into. A panel of the matrix is made dense at a time, in the
// first-level cache, and multiplied with every row.
#pragma once

#include "block_math.h"
#include "integer_product.h"
#include "matrix.h"
#include "row_product.h"

namespace ondevice {

struct Added {
  const float* bias;  // [width]
  const float* h;     // [rows, rank]
  const float* b;     // [rank, width]
  const float* into;  // [rows, width]; may be y itself
  int64_t rank;
  float scale;
};

// y[row .. row + count, column ..] = into + bias; false if there is neither.
inline bool begin_panel(const Added& added, int64_t row, int64_t count, int64_t width, int64_t column, int64_t columns,
                        float* y) {
  if (!added.into && !added.bias) return false;
  for (int64_t i = row; i < row + count; ++i) {
    float* to = y + i * width + column;
    const float* from = added.into ? added.into + i * width + column : nullptr;
    if (from == to) {
    } else if (from && columns == kColumns) {
      std::memcpy(to, from, sizeof(float) * kColumns);
    } else if (from) {
      std::memcpy(to, from, sizeof(float) * static_cast<size_t>(columns));
    } else {
      std::memset(to, 0, sizeof(float) * static_cast<size_t>(columns));
    }
    if (added.bias) {
      for (int64_t j = 0; j < columns; ++j) to[j] += added.bias[column + j];
    }
  }
  return true;
}

// Columns of scale B: a panel of [rank, kColumns], or nothing without LoRA.
inline void pack_lora(const Added& added, int64_t width, int64_t column, int64_t columns, float* panel) {
  if (!added.h) return;
  if (columns < kColumns) std::memset(panel, 0, sizeof(float) * static_cast<size_t>(added.rank * kColumns));
  for (int64_t k = 0; k < added.rank; ++k) {
    const float* row = added.b + k * width + column;
    for (int64_t j = 0; j < columns; ++j) panel[k * kColumns + j] = added.scale * row[j];
  }
}

// y[row .. row + count, column ..] += h times a panel of `pack_lora`.
inline void add_lora(const Added& added, int64_t row, int64_t count, int64_t width, int64_t column, int64_t columns,
                     const float* panel, float* y) {
  if (!added.h) return;
  for (int64_t first = 0; first < added.rank; first += kDepth) {
    const int64_t depth = added.rank - first < kDepth ? added.rank - first : kDepth;
    multiply_columns(added.h + row * added.rank + first, added.rank, 1, count, depth, panel + first * kColumns,
                     kColumns, y + row * width + column, width, columns, true);
  }
}

// x W^T for one row of x: `products(begin, end)` writes those rows of W into y, each thread's beside one another.
template <typename Products, typename Parallel>
void block_linear_row(const Matrix& w, const Added& added, float* y, const Products& products,
                      const Parallel& parallel) {
  const int64_t some = (w.outputs + kRowTasks - 1) / kRowTasks, least = kRowBytes / (w.row_bytes() + 1) + 1;
  const int64_t rows = some > least ? some : least;
  parallel((w.outputs + rows - 1) / rows, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * rows, last = end * rows < w.outputs ? end * rows : w.outputs;
    static thread_local Scratch scratch;
    float* sums = scratch.get(last - first);
    products(first, last, sums);
    for (int64_t k = 0; k < (added.h ? added.rank : 0); ++k) {
      const float factor = added.scale * added.h[k];
      const float* __restrict b = added.b + k * w.outputs + first;
      for (int64_t j = 0; j < last - first; ++j) sums[j] += factor * b[j];
    }
    for (int64_t j = 0; j < last - first; ++j) {
      float sum = sums[j];
      if (added.bias) sum += added.bias[first + j];
      if (added.into) sum += added.into[first + j];
      y[first + j] = sum;
    }
  });
}

// x [rows, inputs] to y [rows, outputs], or with `transposed` [rows, outputs] to [rows, inputs].
template <typename Parallel>
void block_linear(const float* x, int64_t rows, const Matrix& w, bool transposed, const Added& added, float* y,
                  const Parallel& parallel) {
  const int64_t width = transposed ? w.inputs : w.outputs, length = transposed ? w.outputs : w.inputs;
  if (rows <= 0 || width <= 0) return;
  if (rows == 1 && !transposed) {
    static thread_local Scratch scratch;
    const RowInput input(x, w, scratch);
    const auto products = [&](int64_t begin, int64_t end, float* sums) { row_products(w, begin, end, input, sums); };
    return block_linear_row(w, added, y, products, parallel);
  }
  parallel((width + kColumns - 1) / kColumns, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* panel = scratch.get((kColumns + 4) * kDepth + added.rank * kColumns);
    float* lora = panel + (kColumns + 4) * kDepth;
    for (int64_t column = begin * kColumns; column < end * kColumns && column < width; column += kColumns) {
      const int64_t columns = width - column < kColumns ? width - column : kColumns;
      bool add = begin_panel(added, 0, rows, width, column, columns, y);
      for (int64_t first = 0; first < length; first += kDepth, add = true) {
        const int64_t depth = length - first < kDepth ? length - first : kDepth;
        if (transposed) {
          pack_columns(w, column, columns, first, depth, panel);
        } else {
          pack_rows(w, column, columns, first, depth, panel + kColumns * kDepth, panel);
        }
        multiply_columns(x + first, length, 1, rows, depth, panel, kColumns, y + column, width, columns, add);
      }
      pack_lora(added, width, column, columns, lora);
      add_lora(added, 0, rows, width, column, columns, lora, y);
    }
  });
}

// The same with products of integers, of rows that were rounded (with W's scales as factors if `transposed`).
template <typename Parallel>
void multiply_rounded(const Grouped& x, int64_t rows, const Matrix& w, bool transposed, const Added& added, float* y,
                      const Parallel& parallel) {
  const int64_t width = transposed ? w.inputs : w.outputs;
  if (rows <= 0 || width <= 0) return;
  parallel((width + kColumns - 1) / kColumns, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* lora = scratch.get(kIntegerPanel / 4 + added.rank * kColumns) + kIntegerPanel / 4;
    int8_t* bytes = reinterpret_cast<int8_t*>(lora - kIntegerPanel / 4);
    for (int64_t column = begin * kColumns; column < end * kColumns && column < width; column += kColumns) {
      const int64_t columns = width - column < kColumns ? width - column : kColumns;
      pack_lora(added, width, column, columns, lora);
      multiply_integers(
          x, rows, w, transposed, column, columns, bytes, y + column, width,
          [&](int64_t row, int64_t count) { return begin_panel(added, row, count, width, column, columns, y); },
          [&](int64_t row, int64_t count) { add_lora(added, row, count, width, column, columns, lora, y); });
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
    constexpr int64_t kFloats = kIntegerPanel / 4 + 2 * kIntegerDepth;
    float* lora = scratch.get(kFloats + added.rank * kColumns) + kFloats;
    int8_t* bytes = reinterpret_cast<int8_t*>(lora - kFloats);
    for (int64_t column = begin * kColumns; column < end * kColumns && column < w.outputs; column += kColumns) {
      const int64_t columns = w.outputs - column < kColumns ? w.outputs - column : kColumns;
      const bool add = begin_panel(added, 0, rows, w.outputs, column, columns, y);
      multiply_grouped(x, rows, w, column, columns, bytes, y + column, w.outputs, add);
      pack_lora(added, w.outputs, column, columns, lora);
      add_lora(added, 0, rows, w.outputs, column, columns, lora, y);
    }
  });
}

// A W of 4 bits is multiplied as it is for x W^T, with groups of x. For g W the sum goes over rows of W, whose groups
// have many scales: W is rounded to 8 bits with a scale a row as it is packed, and the rest is as with 8 bits.
template <typename Parallel>
void block_linear_integers(const float* x, int64_t rows, const Matrix& w, bool transposed, const Added& added,
                           float* y, const Parallel& parallel) {
  const auto serial = [](int64_t tasks, const auto& f) { f(0, tasks); };
  Grouped grouped;
  if (w.kind == Matrix::kQ4 && !transposed) {
    if (rows == 1) {
      static thread_local Grouped row;
      round_groups(x, 1, w.inputs, nullptr, row, serial);
      split_row(row, padded_groups(w));
      const Grouped* shared = &row;  // the workers' own is another
      const auto products = [&](int64_t begin, int64_t end, float* sums) {
        integer_form().q4_rows(w, begin, end, shared->levels.data(), shared->scales.data(), shared->sums.data(), sums);
      };
      return block_linear_row(w, added, y, products, parallel);
    }
    round_groups(x, rows, w.inputs, nullptr, grouped, parallel);
    multiply_groups(grouped, rows, w, added, y, parallel);
    return;
  }
  if (w.kind == Matrix::kQ4) {
    std::vector<float> scales;
    q4_row_scales(w, scales, parallel);
    Matrix scaled = w;
    scaled.scales = scales.data();
    round_groups(x, rows, w.outputs, scaled.scales, grouped, parallel);
    multiply_rounded(grouped, rows, scaled, true, added, y, parallel);
    return;
  }
  if (rows == 1 && !transposed) {
    static thread_local Grouped row;
    round_groups(x, 1, w.inputs, nullptr, row, serial);
    const Grouped* shared = &row;  // the workers' own is another
    const auto products = [&](int64_t begin, int64_t end, float* sums) {
      q8_row_products(*shared, w, begin, end, sums);
    };
    return block_linear_row(w, added, y, products, parallel);
  }
  round_groups(x, rows, transposed ? w.outputs : w.inputs, transposed ? w.scales : nullptr, grouped, parallel);
  multiply_rounded(grouped, rows, w, transposed, added, y, parallel);
}

// x W^T with LoRA's A [rank, inputs] and B [rank, outputs] where an adapter has them: `added.h` and `added.b` are set
// here.
template <typename Parallel>
void adapted_linear(const float* x, int64_t rows, const Matrix& w, const float* a, const float* b, Added added,
                    bool integers, float* y, const Parallel& parallel) {
  static thread_local Scratch scratch;
  float* h = scratch.get(rows * added.rank);
  narrow_linear(x, rows, w.inputs, a, added.rank, 1.0f, h, parallel);
  added.h = h;
  added.b = b;
  if (integers) {
    block_linear_integers(x, rows, w, false, added, y, parallel);
  } else {
    block_linear(x, rows, w, false, added, y, parallel);
  }
}

}  // namespace ondevice
