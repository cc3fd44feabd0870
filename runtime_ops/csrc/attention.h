// Causal attention with grouped heads, forward and backward, a block of queries at a time against the keys that it
// sees: scores of [kQueries, tokens], never of all queries. Nothing of the forward pass is kept.
#pragma once

#include "block_math.h"
#include "matrix.h"

namespace ondevice {

constexpr int64_t kQueries = 64;

struct Heads {
  int64_t rows, tokens, heads, kv_heads, width;
  float scale;
  int64_t window;  // tokens that a query sees, itself included; 0: all before it
};

// out[k][token] = x[token][k] for a head of [tokens, stride] floats: [width, padded] with zeros behind `tokens`.
inline void pack_head(const float* x, int64_t tokens, int64_t stride, int64_t width, int64_t padded, float* out) {
  for (int64_t k = 0; k < width; ++k) {
    std::memset(out + k * padded + tokens / 4 * 4, 0, sizeof(float) * static_cast<size_t>(padded - tokens / 4 * 4));
  }
  for (int64_t token = 0; token + 4 <= tokens; token += 4) {
    const float* four[4];
    for (int64_t i = 0; i < 4; ++i) four[i] = x + (token + i) * stride;
    transpose_four(four, width, out + token, padded);
  }
  for (int64_t token = tokens / 4 * 4; token < tokens; ++token) {
    for (int64_t k = 0; k < width; ++k) out[k * padded + token] = x[token * stride + k];
  }
}

// Columns [low, high) of y [rows, ldy] (+)= a b, in panels.
inline void multiply_wide(const float* a, int64_t row_step, int64_t depth_step, int64_t rows, int64_t depth,
                          const float* b, int64_t ldb, float* y, int64_t ldy, int64_t low, int64_t high, bool add) {
  for (int64_t column = low; column < high; column += kColumns) {
    const int64_t columns = high - column < kColumns ? high - column : kColumns;
    // The last columns are read kTileColumns at a time: where fewer are left they are done one by one.
    const int64_t whole = columns / kTileColumns * kTileColumns;
    if (whole) {
      multiply_columns(a, row_step, depth_step, rows, depth, b + column, ldb, y + column, ldy, whole, add);
    }
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t j = column + whole; j < column + columns; ++j) {
        float sum = add ? y[row * ldy + j] : 0.0f;
        for (int64_t k = 0; k < depth; ++k) sum += a[row * row_step + k * depth_step] * b[k * ldb + j];
        y[row * ldy + j] = sum;
      }
    }
  }
}

// Probabilities of queries [first, first + count) in p [count, padded], of keys from `low` on (a multiple of
// kTileColumns); q is one head's first query. Keys that a query does not see have 0.
inline void probabilities(const Heads& h, const float* q, const float* keys, int64_t padded, int64_t first,
                          int64_t count, int64_t low, float* p) {
  const int64_t last = first + count, high = (last + kTileColumns - 1) / kTileColumns * kTileColumns;
  multiply_wide(q + first * h.heads * h.width, h.heads * h.width, 1, count, h.width, keys, padded, p, padded, low,
                high, false);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t query = first + i, end = query + 1;
    const int64_t start = h.window && end - h.window > low ? end - h.window : low;
    float* row = p + i * padded;
    for (int64_t j = low; j < start; ++j) row[j] = 0.0f;
    for (int64_t j = end; j < high; ++j) row[j] = 0.0f;
    float* seen = row + start;
    float most = seen[0];
    for (int64_t j = 1; j < end - start; ++j) most = seen[j] > most ? seen[j] : most;
    const float shift = most * h.scale;
    Vec sums = Vec{};
    float rest = 0.0f;
    each_vector(end - start, [&](int64_t at, int64_t some) {
      // Scores are scaled here; a negative scale would need the least score.
      const Vec e = exp_nonpositive(load_some(seen + at, some) * h.scale - shift);
      store_some(seen + at, e, some);
      if (some == kLanes) {
        sums += e;
      } else {
        for (int64_t j = 0; j < some; ++j) rest += e[j];
      }
    });
    const float inverse = 1.0f / (total(sums) + rest);
    each_vector(end - start, [&](int64_t at, int64_t some) {
      store_some(seen + at, load_some(seen + at, some) * inverse, some);
    });
  }
}

// The first key, rounded down, that any query from `first` on sees.
inline int64_t first_key(const Heads& h, int64_t first) {
  const int64_t low = h.window && first + 1 > h.window ? first + 1 - h.window : 0;
  return low / kTileColumns * kTileColumns;
}

// q [rows, tokens, heads, width], k and v [rows, tokens, kv_heads, width] to o, as q.
template <typename Parallel>
void attend(const float* q, const float* k, const float* v, const Heads& h, float* o, const Parallel& parallel) {
  const int64_t padded = (h.tokens + kColumns - 1) / kColumns * kColumns, group = h.heads / h.kv_heads;
  const int64_t q_row = h.heads * h.width, k_row = h.kv_heads * h.width;
  parallel(h.rows * h.kv_heads, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* keys = scratch.get(padded * (h.width + kQueries));
    float* p = keys + padded * h.width;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / h.kv_heads, kv = task % h.kv_heads;
      const float* values = v + row * h.tokens * k_row + kv * h.width;
      pack_head(k + row * h.tokens * k_row + kv * h.width, h.tokens, k_row, h.width, padded, keys);
      for (int64_t head = kv * group; head < (kv + 1) * group; ++head) {
        const int64_t at = row * h.tokens * q_row + head * h.width;
        for (int64_t first = 0; first < h.tokens; first += kQueries) {
          const int64_t count = h.tokens - first < kQueries ? h.tokens - first : kQueries;
          const int64_t low = first_key(h, first);
          probabilities(h, q + at, keys, padded, first, count, low, p);
          multiply_wide(p + low, padded, 1, count, first + count - low, values + low * k_row, k_row,
                        o + at + first * q_row, q_row, 0, h.width, false);
        }
      }
    }
  });
}

// Scores of one query as probabilities, in place: of `old` keys in a cache and of `young` ones behind them.
inline void share_two(float* old, int64_t old_count, float* young, int64_t young_count, float scale) {
  float most = young[0];
  for (int64_t j = 0; j < old_count; ++j) most = old[j] > most ? old[j] : most;
  for (int64_t j = 1; j < young_count; ++j) most = young[j] > most ? young[j] : most;
  const float shift = most * scale;
  float sum = 0.0f;
  const auto exponentials = [&](float* scores, int64_t count) {
    Vec sums = Vec{};
    each_vector(count, [&](int64_t at, int64_t some) {
      const Vec e = exp_nonpositive(load_some(scores + at, some) * scale - shift);
      store_some(scores + at, e, some);
      if (some == kLanes) {
        sums += e;
      } else {
        for (int64_t j = 0; j < some; ++j) sum += e[j];
      }
    });
    sum += total(sums);
  };
  exponentials(old, old_count);
  exponentials(young, young_count);
  const float inverse = 1.0f / sum;
  for (int64_t j = 0; j < old_count; ++j) old[j] *= inverse;
  for (int64_t j = 0; j < young_count; ++j) young[j] *= inverse;
}

// scores[i][0 .. start) = q[i] keys for heads of one token: the cache's keys [width, context] are read once, a row of
// them after another. What is computed behind `start` fills a vector, and is not used.
inline void cached_scores(const float* q, int64_t q_step, int64_t count, int64_t width, const float* keys,
                          int64_t context, int64_t start, float* scores, int64_t wide) {
  constexpr int64_t kKeyRows = 4;  // so that a score is loaded and stored once for so many
  const int64_t filled = (start + kLanes - 1) / kLanes * kLanes, end = filled < context ? filled : context;
  for (int64_t k = 0; k < width; k += kKeyRows) {
    const int64_t some = width - k < kKeyRows ? width - k : kKeyRows;
    const float* rows = keys + k * context;
    for (int64_t i = 0; i < count; ++i) {
      const float* factors = q + i * q_step + k;
      float* to = scores + i * wide;
      each_vector(end, [&](int64_t at, int64_t lanes) {
        Vec sum = k ? load_some(to + at, lanes) : Vec{};
        if (some == kKeyRows) {
#pragma GCC unroll 4
          for (int64_t j = 0; j < kKeyRows; ++j) {
            if (i == 0) __builtin_prefetch(rows + (kKeyRows + j) * context + at);
            sum += load_some(rows + j * context + at, lanes) * factors[j];
          }
        } else {
          for (int64_t j = 0; j < some; ++j) sum += load_some(rows + j * context + at, lanes) * factors[j];
        }
        store_some(to + at, sum, lanes);
      });
    }
  }
}

// New tokens behind `start` in a cache: q [tokens, heads, width], k and v [tokens, kv_heads, width], keys [kv_heads,
// width, context] and values [kv_heads, context, width] to o, as q. What lies behind `start` in the cache does not matter.
template <typename Parallel>
void attend_cached(const float* q, const float* k, const float* v, const float* keys, const float* values,
                   const Heads& h, int64_t context, int64_t start, float* o, const Parallel& parallel) {
  const int64_t padded = (h.tokens + kColumns - 1) / kColumns * kColumns, group = h.heads / h.kv_heads;
  const int64_t q_row = h.heads * h.width, k_row = h.kv_heads * h.width;
  const int64_t wide = (start + kColumns - 1) / kColumns * kColumns + padded;
  // One token's heads that share keys are rows of one product: the cache is read once for all of them.
  const bool together = h.tokens == 1 && group <= kQueries;
  const int64_t heads_at_once = together ? group : 1, step = together ? h.width : q_row;
  parallel(h.kv_heads, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* news = scratch.get(padded * h.width + wide * kQueries);
    float *old = news + padded * h.width, *young = old + wide - padded;
    for (int64_t kv = begin; kv < end; ++kv) {
      const float *some_keys = keys + kv * h.width * context, *some_values = values + kv * context * h.width;
      pack_head(k + kv * h.width, h.tokens, k_row, h.width, padded, news);
      for (int64_t head = kv * group; head < (kv + 1) * group; head += heads_at_once) {
        for (int64_t first = 0; first < h.tokens; first += kQueries) {
          const int64_t left = h.tokens - first < kQueries ? h.tokens - first : kQueries, last = first + left;
          const int64_t count = together ? group : left;
          const float* some_q = q + first * q_row + head * h.width;
          float* to = o + first * q_row + head * h.width;
          if (together) {
            cached_scores(some_q, step, count, h.width, some_keys, context, start, old, wide);
          } else {
            multiply_wide(some_q, step, 1, count, h.width, some_keys, context, old, wide, 0, start, false);
          }
          multiply_wide(some_q, step, 1, count, h.width, news, padded, young, wide, 0, padded, false);
          for (int64_t i = 0; i < count; ++i) {
            float* row = young + i * wide;
            const int64_t seen = together ? 1 : first + i + 1;
            share_two(old + i * wide, start, row, seen, h.scale);
            for (int64_t j = seen; j < last; ++j) row[j] = 0.0f;
          }
          multiply_wide(old, wide, 1, count, start, some_values, h.width, to, step, 0, h.width, false);
          multiply_wide(young, wide, 1, count, last, v + kv * h.width, k_row, to, step, 0, h.width, true);
        }
      }
    }
  });
}

// Gradients of q, k and v from that of o; gk and gv are written whole.
template <typename Parallel>
void attend_backward(const float* g, const float* q, const float* k, const float* v, const Heads& h, float* gq,
                     float* gk, float* gv, const Parallel& parallel) {
  const int64_t padded = (h.tokens + kColumns - 1) / kColumns * kColumns, group = h.heads / h.kv_heads;
  const int64_t q_row = h.heads * h.width, k_row = h.kv_heads * h.width;
  parallel(h.rows * h.kv_heads, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* keys = scratch.get(2 * padded * (h.width + kQueries));
    float *values = keys + padded * h.width, *p = values + padded * h.width, *gs = p + padded * kQueries;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / h.kv_heads, kv = task % h.kv_heads;
      const int64_t k_at = row * h.tokens * k_row + kv * h.width;
      pack_head(k + k_at, h.tokens, k_row, h.width, padded, keys);
      pack_head(v + k_at, h.tokens, k_row, h.width, padded, values);
      for (int64_t token = 0; token < h.tokens; ++token) {
        std::memset(gk + k_at + token * k_row, 0, sizeof(float) * static_cast<size_t>(h.width));
        std::memset(gv + k_at + token * k_row, 0, sizeof(float) * static_cast<size_t>(h.width));
      }
      for (int64_t head = kv * group; head < (kv + 1) * group; ++head) {
        const int64_t at = row * h.tokens * q_row + head * h.width;
        for (int64_t first = 0; first < h.tokens; first += kQueries) {
          const int64_t count = h.tokens - first < kQueries ? h.tokens - first : kQueries;
          const int64_t low = first_key(h, first), seen = first + count - low;
          const int64_t high = (first + count + kTileColumns - 1) / kTileColumns * kTileColumns;
          const float *some_q = q + at + first * q_row, *some_g = g + at + first * q_row;
          probabilities(h, q + at, keys, padded, first, count, low, p);
          // dV += P^T dO; dP = dO V^T; dS = P (dP - rowsum(P dP)) scale; dQ = dS K; dK += dS^T Q.
          multiply_wide(p + low, 1, padded, seen, count, some_g, q_row, gv + k_at + low * k_row, k_row, 0, h.width,
                        true);
          multiply_wide(some_g, q_row, 1, count, h.width, values, padded, gs, padded, low, high, false);
          for (int64_t i = 0; i < count; ++i) {
            float *ps = p + i * padded + low, *row_gs = gs + i * padded + low;
            Vec dots = Vec{};
            each_vector(high - low, [&](int64_t j, int64_t n) { dots += load_some(ps + j, n) * load_some(row_gs + j, n); });
            const float mean = total(dots);
            each_vector(high - low, [&](int64_t j, int64_t n) {
              store_some(row_gs + j, load_some(ps + j, n) * (load_some(row_gs + j, n) - mean) * h.scale, n);
            });
          }
          multiply_wide(gs + low, padded, 1, count, seen, k + k_at + low * k_row, k_row, gq + at + first * q_row, q_row,
                        0, h.width, false);
          multiply_wide(gs + low, 1, padded, seen, count, some_q, q_row, gk + k_at + low * k_row, k_row, 0, h.width,
                        true);
        }
      }
    }
  });
}

}  // namespace ondevice
