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

// x [rows, inputs] to y [rows, outputs], or with `transposed` [rows, outputs] to [rows, inputs].
template <typename Parallel>
void block_linear(const float* x, int64_t rows, const Matrix& w, bool transposed, const Added& added, float* y,
                  const Parallel& parallel) {
  const int64_t width = transposed ? w.inputs : w.outputs, length = transposed ? w.outputs : w.inputs;
  if (rows <= 0 || width <= 0) return;
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

template <typename Parallel>
void block_linear_integers(const float* x, int64_t rows, const Matrix& w, bool transposed, const Added& added,
                           float* y, const Parallel& parallel) {
  Rounded rounded;
  round_rows(x, rows, transposed ? w.outputs : w.inputs, transposed ? w.scales : nullptr, rounded, parallel);
  multiply_rounded(rounded, rows, w, transposed, added, y, parallel);
}

}  // namespace ondevice
