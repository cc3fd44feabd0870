// The record of one AdamW step (layer_adam.h), from which the state before it comes back to the bit: 4 bytes a
// parameter with float32 moments, 5 and 3 with smaller ones, where a second state would take 12, 8 and 6.
//
// AdamW can nearly be computed backwards. What rounding lost is the difference between the old value and the one
// computed backwards, counted in floats: few of them, unless the gradient is far above its moments. Moments of 16 or 8
// bits, which were rounded stochastically, are recorded as they are. A tile with a difference that has no code, or with
// a NaN or an infinity, has its old values in an arena; if that is full, the tile takes no step.
#pragma once

#include "adam_storage.h"

#if defined(__AVX512BW__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("prefer-vector-width=512")
#endif

namespace ondevice {

// AdamArguments::action: a step, one that is recorded, one that is taken back, and the step of tiles that took none.
enum : int64_t { kStep = 0, kRecord = 1, kUndo = 2, kFinish = 3 };
// AdamArguments::flags, besides places in the arena.
constexpr int32_t kInCodes = -1, kNotDone = -2;

// What a tile's old values come back from; adam_undo.py knows the sizes.
template <typename M>
struct alignas(16) TileRecord {
  M m[kTile], v[kTile];
  int8_t p[kTile];
};

template <>
struct alignas(16) TileRecord<uint8_t> {
  uint8_t m[kTile], v[kTile];
  int8_t p[kTile];
  float m_scale, v_scale;
};

template <>
struct alignas(16) TileRecord<float> {
  int16_t m[kTile];
  int8_t v[kTile], p[kTile];
};

// Floats of a tile in the arena: p, and m and v if they are float32.
template <typename M>
constexpr int64_t kArenaFloats = (sizeof(M) == 4 ? 3 : 1) * kTile;

// Integers in the order of the floats whose bits they are, and back.
ONDEVICE_INLINE uint32_t ordered(uint32_t bits) { return bits ^ ((0u - (bits >> 31)) & 0x7FFFFFFFu); }

// The difference of an old value's bits and a guess; `lost` is not 0 if it has no code. A NaN's bits are no guess: they
// depend on how a processor adds.
template <typename Code>
ONDEVICE_INLINE Code code_of(float old, float guess, uint32_t& lost) {
  constexpr int kBits = 8 * sizeof(Code);
  const uint32_t bits = float_bits(guess), difference = ordered(float_bits(old)) - ordered(bits);
  lost |= (difference + (1u << (kBits - 1))) >> kBits | ((bits & 0x7FFFFFFFu) + 0x00800000u) >> 31;
  return static_cast<Code>(difference);
}

template <typename Code>
ONDEVICE_INLINE float from_code(Code code, float guess) {
  return bits_float(ordered(ordered(float_bits(guess)) + static_cast<uint32_t>(static_cast<int32_t>(code))));
}

// Computed backwards, with reciprocals: any guess will do that is the same both times.
struct Backwards {
  float weight1, weight2, grad_scale, size, root, eps, kept1, kept2, kept;
  explicit Backwards(const AdamArguments& a)
      : weight1(a.weight1), weight2(a.weight2), grad_scale(a.grad_scale), size(a.size), root(a.root), eps(a.eps),
        kept1(1.0f / (1.0f - a.weight1)), kept2(1.0f / a.beta2), kept(1.0f / a.decay) {}
  ONDEVICE_INLINE float mean(float x, float m) const { return (m - weight1 * x) * kept1; }
  ONDEVICE_INLINE float square(float x, float v) const { return (v - x * x * weight2) * kept2; }
  ONDEVICE_INLINE float master(float p, float change) const { return (p + change) * kept; }
  ONDEVICE_INLINE float change(float mean, float square) const { return change_of(mean, square, size, root, eps); }
};

// float32 moments: `p`, `m` and `v` before the step, of which `np`, `nm` and `nv` become those after it. Not 0 if
// something has no code. `v_bits` are those of v that count: a split master writes its ties into v's sign by itself.
__attribute__((noinline)) inline uint32_t encode_step(const AdamArguments& a, const float* __restrict g,
                                                      const float* __restrict p, const float* __restrict m,
                                                      const float* __restrict v, uint32_t v_bits,
                                                      float* __restrict np, float* __restrict nm,
                                                      float* __restrict nv, TileRecord<float>& __restrict out) {
  const Backwards back(a);
  const float beta2 = a.beta2, decay = a.decay;
  uint32_t lost = 0;
  for (int i = 0; i < kTile; ++i) {
    const float x = g[i] * back.grad_scale;
    const float mean = next_mean(m[i], x, back.weight1), square = next_square(v[i], x, beta2, back.weight2);
    const float change = back.change(mean, square), master = p[i] * decay - change;
    np[i] = master;
    nm[i] = mean;
    nv[i] = square;
    out.m[i] = code_of<int16_t>(m[i], back.mean(x, mean), lost);
    out.v[i] = code_of<int8_t>(bits_float(float_bits(v[i]) & v_bits), back.square(x, square), lost);
    out.p[i] = code_of<int8_t>(p[i], back.master(master, change), lost);
  }
  return lost;
}

__attribute__((noinline)) inline void decode_step(const AdamArguments& a, const TileRecord<float>& __restrict in,
                                                  const float* __restrict g, float* __restrict p,
                                                  float* __restrict m, float* __restrict v) {
  const Backwards back(a);
  for (int i = 0; i < kTile; ++i) {
    const float x = g[i] * back.grad_scale, mean = m[i], square = std::fabs(v[i]);
    p[i] = from_code(in.p[i], back.master(p[i], back.change(mean, square)));
    m[i] = from_code(in.m[i], back.mean(x, mean));
    v[i] = from_code(in.v[i], back.square(x, square));
  }
}

__attribute__((noinline)) inline uint32_t encode_master(const AdamArguments& a, const float* __restrict p,
                                                        const float* __restrict np, const float* __restrict changes,
                                                        int8_t* __restrict out) {
  const Backwards back(a);
  uint32_t lost = 0;
  for (int i = 0; i < kTile; ++i) out[i] = code_of<int8_t>(p[i], back.master(np[i], changes[i]), lost);
  return lost;
}

// Smaller moments: `m` and `v` before the step, from which the change is computed again.
__attribute__((noinline)) inline void decode_master(const AdamArguments& a, const int8_t* __restrict in,
                                                    const float* __restrict g, const float* __restrict m,
                                                    const float* __restrict v, float* __restrict p) {
  const Backwards back(a);
  const float beta2 = a.beta2;
  for (int i = 0; i < kTile; ++i) {
    const float x = g[i] * back.grad_scale;
    const float mean = next_mean(m[i], x, back.weight1), square = next_square(v[i], x, beta2, back.weight2);
    p[i] = from_code(in[i], back.master(p[i], back.change(mean, square)));
  }
}

// A gradient as float32: itself, or widened into `memory`.
ONDEVICE_INLINE const float* as_floats(const float* grad, float*) { return grad; }
ONDEVICE_INLINE const float* as_floats(const uint16_t* grad, float* memory) {
  widen(grad, memory);
  return memory;
}

// A tile's master as float32: itself, or merged into `memory`.
template <bool Split, typename Grad, typename M, typename V>
ONDEVICE_INLINE float* master_of(const AdamTile<Grad, M, V>& t, float* memory) {
  if constexpr (!Split) return t.master;
  merge_range(t.high, t.low, t.v, kTile, memory);
  return memory;
}

template <typename M>
ONDEVICE_INLINE void moments_of(const M* m, const M* v, float m_scale, float v_scale, float* to_m, float* to_v) {
  if constexpr (sizeof(M) == 2) {
    widen(m, to_m);
    widen(v, to_v);
  } else {
    decode_tile(m, v, m_scale, v_scale, to_m, to_v);
  }
}

// Notes where a tile's old values are, and writes them: its codes, or with `lost` its place in the arena, where p, and
// m and v if they are float32, go. False: there is no room.
template <typename M>
ONDEVICE_INLINE bool keep_tile(const AdamArguments& a, int64_t tile, const TileRecord<M>& record, uint32_t lost,
                               const float* p, const float* m, const float* v) {
  int32_t flag = kInCodes;
  if (lost != 0) {
    flag = __atomic_fetch_add(a.used, 1, __ATOMIC_RELAXED);
    if (flag >= a.room) {
      a.flags[tile] = kNotDone;
      return false;
    }
    float* arena = a.arena + flag * kArenaFloats<M>;
    std::memcpy(arena, p, sizeof(float) * kTile);
    if constexpr (sizeof(M) == 4) {
      std::memcpy(arena + kTile, m, sizeof(float) * kTile);
      std::memcpy(arena + 2 * kTile, v, sizeof(float) * kTile);
    }
  }
  a.flags[tile] = flag;
  static_cast<TileRecord<M>*>(a.codes)[tile] = record;
  return true;
}

// A recorded step of float32 moments: nothing is written before the old values are safe.
template <bool Split, typename Grad>
ONDEVICE_INLINE void record_tile(const AdamArguments& a, int64_t tile, const AdamTile<Grad, float, float>& t) {
  alignas(64) float g[kTile], merged[kTile], p[kTile], m[kTile], v[kTile];
  const float* old = master_of<Split>(t, merged);
  TileRecord<float> record;
  const uint32_t v_bits = Split ? 0x7FFFFFFFu : ~0u;
  const uint32_t lost = encode_step(a, as_floats(t.grad, g), old, t.m, t.v, v_bits, p, m, v, record);
  if (!keep_tile(a, tile, record, lost, old, t.m, t.v)) return;
  std::memcpy(t.m, m, sizeof m);
  std::memcpy(t.v, v, sizeof v);
  if constexpr (!Split) std::memcpy(t.master, p, sizeof p);
  put_master<Split>(p, t);
}

// Takes a recorded step back.
template <bool Split, typename Grad, typename M>
ONDEVICE_INLINE void undo_tile(const AdamArguments& a, int64_t tile, const AdamTile<Grad, M, M>& t) {
  const int32_t flag = a.flags[tile];
  const TileRecord<M>& record = static_cast<const TileRecord<M>*>(a.codes)[tile];
  alignas(64) float widened[kTile], merged[kTile];
  float* p = master_of<Split>(t, merged);
  if constexpr (sizeof(M) == 4) {
    if (flag == kInCodes) decode_step(a, record, as_floats(t.grad, widened), p, t.m, t.v);
  } else {
    if (flag == kInCodes) {
      alignas(64) float m[kTile], v[kTile];
      float m_scale = 0.0f, v_scale = 0.0f;
      if constexpr (sizeof(M) == 1) m_scale = record.m_scale, v_scale = record.v_scale;
      moments_of(record.m, record.v, m_scale, v_scale, m, v);
      decode_master(a, record.p, as_floats(t.grad, widened), m, v, p);
    }
    std::memcpy(t.m, record.m, sizeof record.m);
    std::memcpy(t.v, record.v, sizeof record.v);
    if constexpr (sizeof(M) == 1) {
      a.m_scale[tile] = record.m_scale;
      a.v_scale[tile] = record.v_scale;
    }
  }
  if (flag >= 0) {
    const float* arena = a.arena + flag * kArenaFloats<M>;
    std::memcpy(p, arena, sizeof(float) * kTile);
    if constexpr (sizeof(M) == 4) {
      std::memcpy(t.m, arena + kTile, sizeof(float) * kTile);
      std::memcpy(t.v, arena + 2 * kTile, sizeof(float) * kTile);
    }
  }
  put_master<Split>(p, t);
}

}  // namespace ondevice

#if defined(__AVX512BW__) && !defined(__clang__)
#pragma GCC pop_options
#endif
