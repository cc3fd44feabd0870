// Negative log likelihood of labels under softmax(hidden W^T) without ever storing logits.
//
// The vocabulary is cut into chunks of fixed size. Each chunk keeps a running maximum and sum of exponentials
// for every row (online softmax, Milakov and Gimelshein 2018), and the chunks are merged in order at the end
// in double precision: results do not depend on the number of threads. Rows whose label is kIgnore cost
// nothing.
#pragma once

#include <cmath>
#include <vector>

#include "gemm.h"

namespace ondevice {

constexpr int64_t kIgnore = -100;
constexpr int64_t kChunk = 2048;      // vocabulary rows of one task
constexpr int64_t kSuperBlock = 256;  // hidden rows that are multiplied with one pass over the weights

// Rows of the head as floats: in place for float32, converted tile by tile for int8 (the scale is applied
// later).
struct FloatHead {
  const float* weight;
  int64_t depth;
  const float* rows(int64_t first, int64_t, Scratch&) const { return weight + first * depth; }
  float scale(int64_t) const { return 1.0f; }
};

struct Q8Head {
  const int8_t* weight;
  const float* scales;
  int64_t depth;
  const float* rows(int64_t first, int64_t count, Scratch& scratch) const {
    float* __restrict out = scratch.get(kTileRows * depth);
    const int8_t* __restrict in = weight + first * depth;
    for (int64_t i = 0; i < count * depth; ++i) out[i] = static_cast<float>(in[i]);
    return out;
  }
  float scale(int64_t row) const { return scales[row]; }
};

// The online softmax of one chunk; lanes are hidden rows.
struct SoftmaxState {
  float* maximum;  // [padded rows]
  float* sum;      // [padded rows]
};

template <int Rows, int Vectors, typename Head>
ONDEVICE_INLINE void update_tile(const Head& head, const float* weights, int64_t first, const float* hidden,
                                 const int64_t* labels, SoftmaxState state, float* target) {
  Vec acc[Rows][Vectors];
  multiply_tile<Rows, Vectors>(weights, head.depth, hidden, kTileColumns, head.depth, acc);
  for (int i = 0; i < Rows; ++i) {
    for (int j = 0; j < Vectors; ++j) acc[i][j] *= head.scale(first + i);
  }
  for (int j = 0; j < Vectors; ++j) {
    const Vec before = load(state.maximum + j * kLanes);
    Vec maximum = before, sum = Vec{};
    for (int i = 0; i < Rows; ++i) maximum = acc[i][j] > maximum ? acc[i][j] : maximum;
    for (int i = 0; i < Rows; ++i) sum += exp_nonpositive(acc[i][j] - maximum);
    store(state.sum + j * kLanes, load(state.sum + j * kLanes) * exp_nonpositive(before - maximum) + sum);
    store(state.maximum + j * kLanes, maximum);
  }
  bool hit = false;
  for (int lane = 0; lane < Vectors * kLanes; ++lane) {
    hit |= static_cast<uint64_t>(labels[lane] - first) < static_cast<uint64_t>(Rows);
  }
  if (!hit) return;
  float tile[Rows][Vectors * kLanes];  // a copy, so that the accumulators stay in registers
  for (int i = 0; i < Rows; ++i) {
    for (int j = 0; j < Vectors; ++j) store(tile[i] + j * kLanes, acc[i][j]);
  }
  for (int lane = 0; lane < Vectors * kLanes; ++lane) {
    const uint64_t offset = static_cast<uint64_t>(labels[lane] - first);
    if (offset < static_cast<uint64_t>(Rows)) target[lane] = tile[offset][lane];
  }
}

// hidden float32 [rows, depth], labels int64 [rows], out float32 [rows]. Returns the index of the first label
// that is neither kIgnore nor in [0, vocabulary), or -1 if all are right.
template <typename Head, typename Parallel>
int64_t linear_cross_entropy(const float* hidden, int64_t rows, const Head& head, int64_t vocabulary,
                             const int64_t* labels, float* out, const Parallel& parallel) {
  std::vector<int64_t> active;
  for (int64_t row = 0; row < rows; ++row) {
    out[row] = 0.0f;
    if (labels[row] == kIgnore) continue;
    if (labels[row] < 0 || labels[row] >= vocabulary) return row;
    active.push_back(row);
  }
  if (active.empty()) return -1;
  const int64_t count = static_cast<int64_t>(active.size()), depth = head.depth;
  const int64_t blocks = (count + kTileColumns - 1) / kTileColumns, padded = blocks * kTileColumns;
  const int64_t chunks = (vocabulary + kChunk - 1) / kChunk;

  // Hidden states as [block][depth][lane], zero in lanes beyond the last row.
  Scratch packed_scratch;
  float* packed = packed_scratch.get(padded * depth);
  std::vector<int64_t> packed_labels(static_cast<size_t>(padded), kIgnore);
  parallel(blocks, [&](int64_t begin, int64_t end) {
    for (int64_t lane = begin * kTileColumns; lane < end * kTileColumns; ++lane) {
      float* column = packed + (lane / kTileColumns) * depth * kTileColumns + lane % kTileColumns;
      const float* source = lane < count ? hidden + active[static_cast<size_t>(lane)] * depth : nullptr;
      if (source) packed_labels[static_cast<size_t>(lane)] = labels[active[static_cast<size_t>(lane)]];
      for (int64_t k = 0; k < depth; ++k) column[k * kTileColumns] = source ? source[k] : 0.0f;
    }
  });

  std::vector<float> maxima(static_cast<size_t>(chunks * padded), -3.0e38f);
  std::vector<float> sums(static_cast<size_t>(chunks * padded), 0.0f);
  std::vector<float> targets(static_cast<size_t>(padded), 0.0f);
  const int64_t block_rows = kSuperBlock / kTileColumns, supers = (blocks + block_rows - 1) / block_rows;
  parallel(chunks * supers, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t chunk = task / supers, super = task % supers, base = chunk * kChunk;
      const int64_t size = vocabulary - base < kChunk ? vocabulary - base : kChunk;
      const int64_t last = (super + 1) * block_rows < blocks ? (super + 1) * block_rows : blocks;
      for_row_tiles(size, [&](int64_t low, int64_t height) {
        const int64_t first = base + low;
        const float* weights = head.rows(first, height, scratch);
        for (int64_t block = super * block_rows; block < last; ++block) {
          const int64_t lane = block * kTileColumns, offset = chunk * padded + lane;
          const SoftmaxState state{maxima.data() + offset, sums.data() + offset};
          const float* states = packed + lane * depth;
          const int64_t* goal = packed_labels.data() + lane;
          with_rows(height, [&](auto h) {
            constexpr int kRows = decltype(h)::value;
            if (count - lane <= kLanes) {
              update_tile<kRows, 1>(head, weights, first, states, goal, state, targets.data() + lane);
            } else {
              update_tile<kRows, kTileVectors>(head, weights, first, states, goal, state,
                                               targets.data() + lane);
            }
          });
        }
      });
    }
  });

  for (int64_t lane = 0; lane < count; ++lane) {
    double maximum = -3.0e38, sum = 0.0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      // Not std::fmax: GCC 12 for ARM crashes where it vectorises one of floats in doubles.
      const double value = maxima[static_cast<size_t>(chunk * padded + lane)];
      maximum = value > maximum ? value : maximum;
    }
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const size_t at = static_cast<size_t>(chunk * padded + lane);
      sum += sums[at] * std::exp(static_cast<double>(maxima[at]) - maximum);
    }
    out[active[static_cast<size_t>(lane)]] =
        static_cast<float>(std::log(sum) + maximum - static_cast<double>(targets[static_cast<size_t>(lane)]));
  }
  return -1;
}

}  // namespace ondevice
