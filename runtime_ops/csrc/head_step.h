// The loss of labelled positions and its gradient, in one pass over the vocabulary: like attention over the rows
// of the head, the gradient's sum softmax(x W^T) W is kept as of the largest logit so far and scaled when a larger
// one comes (Milakov and Gimelshein 2018). Logits of one chunk exist at a time.
#pragma once

#include <cmath>

#include "block_linear.h"
#include "block_math.h"

namespace ondevice {

constexpr int64_t kHeadRows = 256;   // positions that go through the head together
constexpr int64_t kHeadChunk = 256;  // vocabulary rows whose logits exist at once
constexpr int64_t kHeadParts = 4;    // of the vocabulary, that threads share; merged in order

struct HeadPart {
  std::vector<float> sums;     // [rows, depth]: exponentials times W
  std::vector<float> maximum;  // [rows]
  std::vector<float> total;    // [rows], without the label's
  std::vector<float> wanted;   // [rows], the label's logit where this part has it
};

// One part of the vocabulary, rows [low, high) of the head.
inline void head_part(const float* x, int64_t rows, const Matrix& head, bool integers, const int64_t* labels,
                      int64_t low, int64_t high, HeadPart& part) {
  const auto serial = [](int64_t tasks, const auto& f) {
    if (tasks > 0) f(0, tasks);
  };
  const int64_t depth = head.inputs;
  part.sums.assign(static_cast<size_t>(rows * depth), 0.0f);
  part.maximum.assign(static_cast<size_t>(rows), -3.0e38f);
  part.total.assign(static_cast<size_t>(rows), 0.0f);
  part.wanted.assign(static_cast<size_t>(rows), 0.0f);
  std::vector<float> logits(static_cast<size_t>(rows * kHeadChunk));
  const Added nothing{nullptr, nullptr, nullptr, nullptr, 0, 1.0f};
  const Added sums{nullptr, nullptr, nullptr, part.sums.data(), 0, 1.0f};
  Grouped rounded;
  if (integers) round_groups(x, rows, depth, nullptr, rounded, serial);
  for (int64_t first = low; first < high; first += kHeadChunk) {
    const int64_t count = high - first < kHeadChunk ? high - first : kHeadChunk;
    const Matrix some = head.rows(first, count);
    if (integers) {
      multiply_rounded(rounded, rows, some, false, nothing, logits.data(), serial);
    } else {
      block_linear(x, rows, some, false, nothing, logits.data(), serial);
    }
    for (int64_t row = 0; row < rows; ++row) {
      const size_t at = static_cast<size_t>(row);
      float* values = logits.data() + row * count;
      const int64_t label = labels[row] - first;
      if (label >= 0 && label < count) part.wanted[at] = values[label];
      Vec tops = splat(part.maximum[at]);
      float most = part.maximum[at];
      each_vector(count, [&](int64_t j, int64_t n) {
        const Vec v = load_some(values + j, n);
        if (n == kLanes) {
          tops = v > tops ? v : tops;
        } else {
          for (int64_t i = 0; i < n; ++i) most = v[i] > most ? v[i] : most;
        }
      });
      for (int i = 0; i < kLanes; ++i) most = tops[i] > most ? tops[i] : most;
      if (most > part.maximum[at]) {
        const float factor = std::exp(part.maximum[at] - most);
        part.total[at] *= factor;
        float* to = part.sums.data() + row * depth;
        each_vector(depth, [&](int64_t j, int64_t n) { store_some(to + j, load_some(to + j, n) * factor, n); });
        part.maximum[at] = most;
      }
      // Left out of the sums: what is subtracted for it keeps its digits where its probability is near 1.
      if (label >= 0 && label < count) values[label] = -3.0e38f;
      Vec chunk = Vec{};
      float rest = 0.0f;
      each_vector(count, [&](int64_t j, int64_t n) {
        const Vec e = exp_nonpositive(load_some(values + j, n) - most);
        store_some(values + j, e, n);
        if (n == kLanes) {
          chunk += e;
        } else {
          for (int64_t i = 0; i < n; ++i) rest += e[i];
        }
      });
      part.total[at] += ondevice::total(chunk) + rest;
    }
    if (integers) {
      block_linear_integers(logits.data(), rows, some, true, sums, part.sums.data(), serial);
    } else {
      block_linear(logits.data(), rows, some, true, sums, part.sums.data(), serial);
    }
  }
}

// x float32 [rows, depth], labels int64 [rows] (-1: none, costs nothing), weights float32 [rows]. out float32
// [rows, depth + 1]: each row's loss and, behind it, weight times the gradient of it. Returns the index of the
// first label that is neither -1 nor in the vocabulary, or -1.
template <typename Parallel>
int64_t head_step(const float* x, int64_t rows, const Matrix& head, bool integers, const int64_t* labels,
                  const float* weights, float* out, const Parallel& parallel) {
  const int64_t depth = head.inputs, vocabulary = head.outputs;
  std::vector<int64_t> active;
  std::memset(out, 0, sizeof(float) * static_cast<size_t>(rows * (depth + 1)));
  for (int64_t row = 0; row < rows; ++row) {
    if (labels[row] == -1) continue;
    if (labels[row] < 0 || labels[row] >= vocabulary) return row;
    active.push_back(row);
  }
  const auto all = static_cast<int64_t>(active.size());
  HeadPart parts[kHeadParts];
  std::vector<float> some, label_rows;
  std::vector<int64_t> goals;
  for (int64_t start = 0; start < all; start += kHeadRows) {
    const int64_t count = all - start < kHeadRows ? all - start : kHeadRows;
    some.resize(static_cast<size_t>(count * depth));
    goals.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = active[static_cast<size_t>(start + i)];
      std::memcpy(some.data() + i * depth, x + row * depth, sizeof(float) * static_cast<size_t>(depth));
      goals[static_cast<size_t>(i)] = labels[row];
    }
    const int64_t share = ((vocabulary + kHeadParts - 1) / kHeadParts + kHeadChunk - 1) / kHeadChunk * kHeadChunk;
    parallel(kHeadParts, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        const int64_t low = part * share < vocabulary ? part * share : vocabulary;
        const int64_t high = low + share < vocabulary ? low + share : vocabulary;
        head_part(some.data(), count, head, integers, goals.data(), low, high, parts[part]);
      }
    });
    label_rows.resize(static_cast<size_t>(depth));
    for (int64_t i = 0; i < count; ++i) {
      const size_t at = static_cast<size_t>(i);
      const int64_t row = active[static_cast<size_t>(start + i)];
      double most = -3.0e38, others = 0.0, wanted = 0.0;
      for (const HeadPart& part : parts) most = part.maximum[at] > most ? part.maximum[at] : most;
      float* to = out + row * (depth + 1);
      for (const HeadPart& part : parts) {
        const double factor = std::exp(static_cast<double>(part.maximum[at]) - most);
        others += part.total[at] * factor;
        wanted += static_cast<double>(part.wanted[at]);
        const float* sums = part.sums.data() + i * depth;
        for (int64_t j = 0; j < depth; ++j) to[1 + j] += sums[j] * static_cast<float>(factor);
      }
      // A NaN among the logits is in the sums, and so in the loss and in the gradient.
      const double all_sums = others + std::exp(wanted - most);
      to[0] = static_cast<float>(std::log(all_sums) + most - wanted);
      dequantize_row(head, goals[at], 0, depth, label_rows.data());
      const float inverse = static_cast<float>(1.0 / all_sums), missing = static_cast<float>(others / all_sums);
      for (int64_t j = 0; j < depth; ++j) {
        to[1 + j] = weights[row] * (to[1 + j] * inverse - missing * label_rows[static_cast<size_t>(j)]);
      }
    }
  }
  return -1;
}

}  // namespace ondevice
