// The ops as plain C functions for ctypes; `threads` threads share the work.
#include "cross_entropy.h"
#include "generator.h"
#include "gradient_codes.h"
#include "q4_linear.h"
#include "q8_embedding.h"
#include "rows.h"
#include "threads.h"

extern "C" {

EXPORT void ondevice_normal(uint64_t seed, uint64_t step, int64_t tensor, int64_t queries, int64_t start,
                            int64_t count, float* out, int64_t threads) {
  ondevice::generate(ondevice::normal_range, seed, step, tensor, queries, start, count, out,
                     Threads{threads});
}

EXPORT void ondevice_rademacher(uint64_t seed, uint64_t step, int64_t tensor, int64_t queries, int64_t start,
                                int64_t count, float* out, int64_t threads) {
  ondevice::generate(ondevice::rademacher_range, seed, step, tensor, queries, start, count, out,
                     Threads{threads});
}

EXPORT void ondevice_q4_linear(const float* x, int64_t rows, const uint8_t* packed, const uint16_t* scales,
                               const uint16_t* mins, int64_t outputs, int64_t inputs, int64_t group, float* y,
                               int64_t threads) {
  ondevice::q4_linear(x, rows, {packed, scales, mins, outputs, inputs, group}, y, Threads{threads});
}

// This and the following return the index of the first id or label out of range, or -1.
EXPORT int64_t ondevice_q8_embedding(const int64_t* ids, int64_t count, const int8_t* weight,
                                     const float* scales, int64_t vocabulary, int64_t depth, float* out,
                                     int64_t threads) {
  return ondevice::q8_embedding(ids, count, weight, scales, vocabulary, depth, out, Threads{threads});
}

EXPORT int64_t ondevice_linear_cross_entropy(const float* hidden, int64_t rows, const float* weight,
                                             int64_t vocabulary, int64_t depth, const int64_t* labels,
                                             float* out, int64_t threads) {
  const ondevice::FloatHead head{weight, depth};
  return ondevice::linear_cross_entropy(hidden, rows, head, vocabulary, labels, out, Threads{threads});
}

EXPORT int64_t ondevice_q8_linear_cross_entropy(const float* hidden, int64_t rows, const int8_t* weight,
                                                const float* scales, int64_t vocabulary, int64_t depth,
                                                const int64_t* labels, float* out, int64_t threads) {
  const ondevice::Q8Head head{weight, scales, depth};
  return ondevice::linear_cross_entropy(hidden, rows, head, vocabulary, labels, out, Threads{threads});
}

// Rows `rows[0..count)` of a table of `width` bytes a row.
EXPORT void ondevice_gather_rows(const char* table, const int64_t* rows, int64_t count, int64_t width, char* out,
                                 int64_t threads) {
  ondevice::each_row(count, Threads{threads},
                     [&](int64_t i) { std::memcpy(out + i * width, table + rows[i] * width, width); });
}

EXPORT void ondevice_scatter_rows(char* table, const int64_t* rows, int64_t count, int64_t width, const char* source,
                                  int64_t threads) {
  ondevice::each_row(count, Threads{threads},
                     [&](int64_t i) { std::memcpy(table + rows[i] * width, source + i * width, width); });
}

EXPORT void ondevice_clear_rows(char* table, const int64_t* rows, int64_t count, int64_t width, int64_t threads) {
  ondevice::each_row(count, Threads{threads}, [&](int64_t i) { std::memset(table + rows[i] * width, 0, width); });
}

// The same with `width` elements a row: bfloat16, rounded to nearest even, or float32. No row occurs twice.
EXPORT void ondevice_add_rows(void* table, const int64_t* rows, int64_t count, int64_t width, const void* source,
                              int64_t float32, int64_t threads) {
  ondevice::each_row(count, Threads{threads}, [&](int64_t i) {
    const int64_t to = rows[i] * width, from = i * width;
    if (float32) {
      ondevice::add_row(static_cast<float*>(table) + to, static_cast<const float*>(source) + from, width);
    } else {
      ondevice::add_row(static_cast<uint16_t*>(table) + to, static_cast<const uint16_t*>(source) + from, width);
    }
  });
}

// `count` values of a coded gradient: bfloat16 or float32.
EXPORT void ondevice_decode_gradient(const uint8_t* codes, int64_t count, void* out, int64_t float32,
                                     int64_t threads) {
  if (float32) {
    ondevice::decode_gradient(codes, count, static_cast<float*>(out), Threads{threads});
  } else {
    ondevice::decode_gradient(codes, count, static_cast<uint16_t*>(out), Threads{threads});
  }
}

}  // extern "C"
