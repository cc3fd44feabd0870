// y = x W^T with W in 4 bits (a scale and a minimum for each group of inputs) and float32 activations.
//
// W is stored in panels of 32 outputs: byte [panel][input][j], j in 0..15, holds output 32 panel + j in its
// low nibble and output 32 panel + 16 + j in its high nibble. A panel is dequantised once into a buffer that
// fits the second-level cache and then multiplied with a block of rows.
#pragma once

#include "gemm.h"

namespace ondevice {

constexpr int64_t kPanel = 32;
constexpr int64_t kTasks = 6;  // pieces of work to aim at, so that threads end together
static_assert(kPanel % kTileColumns == 0, "a panel holds whole tiles");

struct Q4Weight {
  const uint8_t* packed;   // [ceil(outputs / 32) * 32, inputs / 2], see above
  const uint16_t* scales;  // IEEE half [outputs, inputs / group]
  const uint16_t* mins;    // IEEE half [outputs, inputs / group]
  int64_t outputs, inputs, group;
};

// Scales or minima of a panel as float32 [groups, kPanel], zero in columns beyond the last output.
inline void convert_panel(const uint16_t* halves, int64_t columns, int64_t groups, float* __restrict row,
                          float* __restrict out) {
  for (int64_t j = 0; j < kPanel; ++j) {
    for (int64_t g = 0; g < groups; ++g) row[g] = j < columns ? half_to_float(halves[j * groups + g]) : 0.0f;
    for (int64_t g = 0; g < groups; ++g) out[g * kPanel + j] = row[g];
  }
}

// A panel's weights as float32 [inputs, kPanel]; `scratch` is float32 [groups * (2 * kPanel + 1)].
inline void dequantize_panel(const Q4Weight& w, int64_t panel, float* __restrict scratch,
                             float* __restrict out) {
  const int64_t first = panel * kPanel, groups = w.inputs / w.group;
  const int64_t columns = w.outputs - first < kPanel ? w.outputs - first : kPanel;
  const uint8_t* __restrict bytes = w.packed + panel * w.inputs * (kPanel / 2);
  float* __restrict scale = scratch;
  float* __restrict minimum = scratch + groups * kPanel;
  convert_panel(w.scales + first * groups, columns, groups, scratch + 2 * groups * kPanel, scale);
  convert_panel(w.mins + first * groups, columns, groups, scratch + 2 * groups * kPanel, minimum);
  for (int64_t g = 0; g < groups; ++g, scale += kPanel, minimum += kPanel) {
    for (int64_t k = 0; k < w.group; ++k, bytes += kPanel / 2, out += kPanel) {
      for (int j = 0; j < kPanel / 2; ++j) {
        out[j] = static_cast<float>(bytes[j] & 15) * scale[j] + minimum[j];
      }
      for (int j = 0; j < kPanel / 2; ++j) {
        out[kPanel / 2 + j] =
            static_cast<float>(bytes[j] >> 4) * scale[kPanel / 2 + j] + minimum[kPanel / 2 + j];
      }
    }
  }
}

// Columns [first, first + kPanel) of y for `rows` rows; `weights` is float32 [depth, kPanel].
inline void multiply_panel(const float* x, int64_t rows, int64_t depth, const float* weights, float* y,
                           int64_t outputs, int64_t first) {
  const int64_t columns = outputs - first < kPanel ? outputs - first : kPanel;
  for_row_tiles(rows, [&](int64_t row, int64_t count) {
    for (int64_t part = 0; part < columns; part += kTileColumns) {
      const int64_t valid = columns - part < kTileColumns ? columns - part : kTileColumns;
      with_rows(count, [&](auto height) {
        constexpr int kRows = decltype(height)::value;
        Vec acc[kRows][kTileVectors];
        multiply_tile<kRows, kTileVectors>(x + row * depth, depth, weights + part, kPanel, depth, acc);
        for (int i = 0; i < kRows; ++i) {
          float* target = y + (row + i) * outputs + first + part;
          if (valid == kTileColumns) {
            for (int j = 0; j < kTileVectors; ++j) store(target + j * kLanes, acc[i][j]);
          } else {
            std::memcpy(target, acc[i], static_cast<size_t>(valid) * sizeof(float));
          }
        }
      });
    }
  });
}

// x float32 [rows, inputs], y float32 [rows, outputs].
template <typename Parallel>
void q4_linear(const float* x, int64_t rows, const Q4Weight& w, float* y, const Parallel& parallel) {
  if (rows <= 0 || w.outputs <= 0) return;
  const int64_t panels = (w.outputs + kPanel - 1) / kPanel;
  int64_t row_parts = 1;  // cut the rows too where there are few panels; each part dequantises for itself
  while (panels * row_parts < kTasks && rows / (row_parts + 1) >= 4 * kTileRows) ++row_parts;
  const int64_t height = (rows + row_parts - 1) / row_parts;
  parallel(panels * row_parts, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* weights = scratch.get(w.inputs * kPanel + w.inputs / w.group * (2 * kPanel + 1));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t panel = task / row_parts, row = (task % row_parts) * height;
      const int64_t count = rows - row < height ? rows - row : height;
      if (count <= 0) continue;
      dequantize_panel(w, panel, weights + w.inputs * kPanel, weights);
      multiply_panel(x + row * w.inputs, count, w.inputs, weights, y + row * w.outputs, w.outputs,
                     panel * kPanel);
    }
  });
}

}  // namespace ondevice
