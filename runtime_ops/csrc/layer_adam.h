// One AdamW step over flat arrays in one pass over memory ("Layer-Adam" of SlideFormer, section 3): read the
// gradient, update the float32 state, write bfloat16 parameters.
// adam_storage.h says how the state is stored.
//
// Work goes in tiles of 128 elements at multiples of 128. Whatever part of a tile is wanted, the same loops run
// over all of it, and random words depend on the element's index: bits depend neither on how the arrays are cut
// nor on the number of threads. Every sum, product, quotient and root is one IEEE operation (layer_adam.cpp is
// compiled without contraction), so they do not depend on the processor either, and triton_adam.py, which does
// the same on a GPU, gives the same ones.
#pragma once

#include <type_traits>

#include "adam_avx512.h"
#include "adam_storage.h"
#include "adam_undo.h"

#if defined(__AVX512BW__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("prefer-vector-width=512")
#endif

namespace ondevice {

constexpr int64_t kAdamChunk = 1 << 16;  // elements of a task

// The update of float32 values. Never inlined, so that every form of storage runs the same instructions; the
// same holds for the 8-bit codes. `changes` takes what is subtracted from each parameter, if it is asked for.
template <bool Changes>
__attribute__((noinline)) inline void adam_tile(const AdamArguments& a, const float* __restrict g,
                                                float* __restrict p, float* __restrict m, float* __restrict v,
                                                float* __restrict changes) {
  const float decay = a.decay, beta2 = a.beta2, weight1 = a.weight1, weight2 = a.weight2, root = a.root;
  const float eps = a.eps, size = a.size, grad_scale = a.grad_scale;
  for (int i = 0; i < kTile; ++i) {
    const float x = g[i] * grad_scale;
    const float mean = next_mean(m[i], x, weight1), square = next_square(v[i], x, beta2, weight2);
    m[i] = mean;
    v[i] = square;
    const float change = change_of(mean, square, size, root, eps);
    p[i] = p[i] * decay - change;
    if constexpr (Changes) changes[i] = change;
  }
}

template <bool Split, bool Changes = false, typename Grad, typename M, typename V>
ONDEVICE_INLINE void step_tile(const AdamArguments& a, int64_t tile, const AdamTile<Grad, M, V>& t,
                               float* changes = nullptr) {
#if defined(ONDEVICE_ADAM_AVX512)
  if constexpr (Split && sizeof(Grad) == 2 && sizeof(M) < 4) {
    return step_tile_avx512(a, tile, t, Changes ? changes : nullptr);
  }
#endif
  alignas(64) float g[kTile], p[kTile], m[kTile], v[kTile];
  alignas(64) uint32_t words[kTile];
  const float* grad = as_floats(t.grad, g);
  float* master = master_of<Split>(t, p);
  if constexpr (sizeof(M) == 4) {
    adam_tile<Changes>(a, grad, master, t.m, t.v, changes);
  } else {
    moments_of(t.m, t.v, sizeof(M) == 1 ? a.m_scale[tile] : 0.0f, sizeof(M) == 1 ? a.v_scale[tile] : 0.0f, m, v);
    adam_tile<Changes>(a, grad, master, m, v, changes);
    random_words(a.key, tile, words);
    if constexpr (sizeof(M) == 2) {
      narrow<0>(m, words, t.m);
      narrow<16>(v, words, t.v);
    } else {
      encode_tile(m, v, words, t.m, t.v, a.m_scale[tile], a.v_scale[tile]);
    }
  }
  put_master<Split>(master, t);
}

// The arrays of a state from its element `first` on.
template <typename Grad, typename M, typename V>
AdamTile<Grad, M, V> arrays_at(const AdamArguments& a, int64_t first) {
  const auto at = [&](auto* array) { return array == nullptr ? nullptr : array + first; };
  return {at(static_cast<const Grad*>(a.grad)), at(a.master), at(a.high), at(a.low), at(static_cast<M*>(a.m)),
          at(static_cast<V*>(a.v))};
}

// A copy of a tile, of which only the elements [low, high) are the state's.
template <typename Grad, typename M, typename V>
struct TileCopy {
  alignas(64) Grad grad[kTile];
  alignas(64) float master[kTile];
  alignas(64) uint16_t upper[kTile], lower[kTile];
  alignas(64) M m[kTile];
  alignas(64) V v[kTile];

  AdamTile<Grad, M, V> tile(const AdamTile<Grad, M, V>& like) {
    const auto mine = [](auto* array, auto* other) { return other == nullptr ? nullptr : array; };
    return {grad, mine(master, like.master), mine(upper, like.high), mine(lower, like.low), m, v};
  }

  void load(const AdamTile<Grad, M, V>& from, int64_t low, int64_t high) {
    if (high - low < kTile) std::memset(static_cast<void*>(this), 0, sizeof *this);
    const auto copy = [&](auto* to, const auto* array) {
      if (array != nullptr) std::memcpy(to + low, array + low, static_cast<size_t>(high - low) * sizeof *to);
    };
    copy(grad, from.grad);
    copy(master, from.master);
    copy(upper, from.high);
    copy(lower, from.low);
    copy(m, from.m);
    copy(v, from.v);
  }

  void store(const AdamTile<Grad, M, V>& to, int64_t low, int64_t high) const {
    const auto copy = [&](auto* array, const auto* from) {
      if (array != nullptr) std::memcpy(array + low, from + low, static_cast<size_t>(high - low) * sizeof *from);
    };
    copy(to.master, master);
    copy(to.high, upper);
    copy(to.low, lower);
    copy(to.m, m);
    copy(to.v, v);
  }
};

// f(tile, arrays) for the tiles with elements in [begin, end). One of which only a part is wanted goes through copies.
template <typename Grad, typename M, typename V, typename F>
ONDEVICE_INLINE void for_tiles(const AdamArguments& a, int64_t begin, int64_t end, const F& f) {
  for (int64_t tile = begin / kTile; tile * kTile < end; ++tile) {
    const int64_t first = tile * kTile, low = begin > first ? begin - first : 0;
    const int64_t high = end - first < kTile ? end - first : kTile;
    const AdamTile<Grad, M, V> there = arrays_at<Grad, M, V>(a, first);
    if (high - low == kTile) {
      f(tile, there);
      continue;
    }
    TileCopy<Grad, M, V> copy;
    copy.load(there, low, high);
    f(tile, copy.tile(there));
    copy.store(there, low, high);
  }
}

template <bool Split, typename Grad, typename M, typename V>
void step_range(const AdamArguments& a, int64_t begin, int64_t end) {
  for_tiles<Grad, M, V>(a, begin, end, [&](int64_t tile, const auto& t) { step_tile<Split>(a, tile, t); });
}

// A recorded step of smaller moments: an ordinary one, which is put back if there is no room for the old values.
template <bool Split, typename Grad, typename M>
ONDEVICE_INLINE void record_tile(const AdamArguments& a, int64_t tile, const AdamTile<Grad, M, M>& t) {
  alignas(64) float merged[kTile], merged_now[kTile], changes[kTile];
  TileCopy<Grad, M, M> old;
  old.load(t, 0, kTile);
  const float* p = master_of<Split>(old.tile(t), merged);
  TileRecord<M> record;
  std::memcpy(record.m, t.m, sizeof record.m);
  std::memcpy(record.v, t.v, sizeof record.v);
  if constexpr (sizeof(M) == 1) {
    record.m_scale = a.m_scale[tile];
    record.v_scale = a.v_scale[tile];
  }
  step_tile<Split, true>(a, tile, t, changes);
  const uint32_t lost = encode_master(a, p, master_of<Split>(t, merged_now), changes, record.p);
  if (keep_tile(a, tile, record, lost, p, nullptr, nullptr)) return;
  old.store(t, 0, kTile);
  if constexpr (sizeof(M) == 1) {
    a.m_scale[tile] = record.m_scale;
    a.v_scale[tile] = record.v_scale;
  }
}

template <bool Split, typename Grad, typename M, typename V>
void record_range(const AdamArguments& a, int64_t begin, int64_t end) {
  for_tiles<Grad, M, V>(a, begin, end, [&](int64_t tile, const auto& t) { record_tile<Split>(a, tile, t); });
}

template <bool Split, typename Grad, typename M, typename V>
void undo_range(const AdamArguments& a, int64_t begin, int64_t end) {
  for_tiles<Grad, M, V>(a, begin, end, [&](int64_t tile, const auto& t) {
    if (a.flags[tile] != kNotDone) undo_tile<Split>(a, tile, t);
  });
}

template <bool Split, typename Grad, typename M, typename V>
void finish_range(const AdamArguments& a, int64_t begin, int64_t end) {
  for_tiles<Grad, M, V>(a, begin, end, [&](int64_t tile, const auto& t) {
    if (a.flags[tile] == kNotDone) step_tile<Split>(a, tile, t);
  });
}

using AdamRange = void (*)(const AdamArguments&, int64_t, int64_t);

template <bool Split, typename Grad, typename M>
AdamRange adam_range(int64_t action) {
  if (action == kRecord) return record_range<Split, Grad, M, M>;
  if (action == kUndo) return undo_range<Split, Grad, M, M>;
  if (action == kFinish) return finish_range<Split, Grad, M, M>;
  return step_range<Split, Grad, M, M>;
}

template <bool Split, typename Grad>
AdamRange adam_range(const AdamArguments& a) {
  if (a.moments == 0) return adam_range<Split, Grad, float>(a.action);
  if (a.moments == 1) return adam_range<Split, Grad, uint16_t>(a.action);
  return adam_range<Split, Grad, uint8_t>(a.action);
}

// f(begin, count) over chunks of `count` elements.
template <typename Parallel, typename F>
void for_chunks(int64_t count, const Parallel& parallel, const F& f) {
  parallel((count + kAdamChunk - 1) / kAdamChunk, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kAdamChunk, last = end * kAdamChunk < count ? end * kAdamChunk : count;
    f(first, last - first);
  });
}

template <typename Parallel>
void layer_adam(const AdamArguments& a, const Parallel& parallel) {
  if (a.action == kRecord) *a.used = 0;
  const bool split = a.master == nullptr;
  const AdamRange f32 = split ? adam_range<true, float>(a) : adam_range<false, float>(a);
  const AdamRange b16 = split ? adam_range<true, uint16_t>(a) : adam_range<false, uint16_t>(a);
  const AdamRange step = a.grad_float32 ? f32 : b16;
  if (a.rows == nullptr) {
    return for_chunks(a.numel, parallel, [&](int64_t first, int64_t count) { step(a, first, first + count); });
  }
  const int64_t group = a.width < kAdamChunk ? kAdamChunk / a.width : 1;
  parallel((a.row_count + group - 1) / group, [&](int64_t begin, int64_t end) {
    const int64_t last = end * group < a.row_count ? end * group : a.row_count;
    for (int64_t i = begin * group, next; i < last; i = next) {
      for (next = i + 1; next < last && a.rows[next] == a.rows[next - 1] + 1;) ++next;  // a run of rows
      step(a, a.rows[i] * a.width, (a.rows[next - 1] + 1) * a.width);
    }
  });
}

// Calls f with a pointer of the type that `moments` says.
template <typename Pointer, typename F>
void with_moment(Pointer v, int64_t moments, const F& f) {
  constexpr bool kConst = std::is_const_v<std::remove_pointer_t<Pointer>>;
  if (moments == 0) return f(static_cast<std::conditional_t<kConst, const float*, float*>>(v));
  if (moments == 1) return f(static_cast<std::conditional_t<kConst, const uint16_t*, uint16_t*>>(v));
  f(static_cast<std::conditional_t<kConst, const uint8_t*, uint8_t*>>(v));
}

template <typename Parallel>
void split_master(const float* master, int64_t count, uint16_t* high, uint16_t* low, void* v, int64_t moments,
                  const Parallel& parallel) {
  with_moment(v, moments, [&](auto* typed) {
    for_chunks(count, parallel, [&](int64_t begin, int64_t size) {
      auto* ties = typed == nullptr ? nullptr : typed + begin;
      split_range(master + begin, size, high + begin, low + begin, ties);
    });
  });
}

template <typename Parallel>
void merge_master(const uint16_t* high, const uint16_t* low, const void* v, int64_t moments, int64_t count,
                  float* master, const Parallel& parallel) {
  with_moment(v, moments, [&](auto* typed) {
    for_chunks(count, parallel, [&](int64_t begin, int64_t size) {
      auto* ties = typed == nullptr ? nullptr : typed + begin;
      merge_range(high + begin, low + begin, ties, size, master + begin);
    });
  });
}

}  // namespace ondevice

#if defined(__AVX512BW__) && !defined(__clang__)
#pragma GCC pop_options
#endif
