// The random generator (see generator.py for its definition).
//
// Words and signs are bit-identical to the numpy reference. Normals use float polynomials made of single
// IEEE operations only, so they are the same bits on every processor, provided that generator.cpp is compiled
// without contraction of a*b+c (-ffp-contract=off), and within 1e-6 of the reference.
#pragma once

#include <cstdint>

namespace ondevice {

// Key of the stream (seed, step, query, tensor).
uint64_t stream_key(uint64_t seed, uint64_t step, uint64_t query, uint64_t tensor);

// Elements start .. start + count - 1 of the stream with this key.
void normal_range(uint64_t key, int64_t start, int64_t count, float* out);
void rademacher_range(uint64_t key, int64_t start, int64_t count, float* out);

using RangeFunction = void (*)(uint64_t, int64_t, int64_t, float*);

// Fills float32 [queries, count]. `parallel(tasks, f)` must call f(begin, end) over disjoint ranges of tasks.
template <typename Parallel>
void generate(RangeFunction range, uint64_t seed, uint64_t step, int64_t tensor, int64_t queries,
              int64_t start, int64_t count, float* out, const Parallel& parallel) {
  if (queries <= 0 || count <= 0) return;
  constexpr int64_t kChunk = 1 << 15;
  const int64_t chunks = (count + kChunk - 1) / kChunk;
  parallel(queries * chunks, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t query = task / chunks, low = (task % chunks) * kChunk;
      const int64_t size = count - low < kChunk ? count - low : kChunk;
      range(stream_key(seed, step, static_cast<uint64_t>(query), static_cast<uint64_t>(tensor)), start + low,
            size, out + query * count + low);
    }
  });
}

}  // namespace ondevice
