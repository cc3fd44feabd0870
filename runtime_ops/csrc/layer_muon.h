// The host's part of a Muon step over flat arrays in one pass over memory: read the update that the accelerator has
// made, decay the float32 master and take the update from it, write bfloat16 parameters.
//
// Masters are stored as adam_storage.h says. There is no second moment, so ties of a split one round away from zero,
// as with 8-bit moments. Every product and difference is one IEEE operation, and each element is on its own: bits
// depend neither on the processor nor on how the arrays are cut.
#pragma once

#include "layer_adam.h"

#if defined(__AVX512BW__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("prefer-vector-width=512")
#endif

namespace ondevice {

ONDEVICE_INLINE float as_float(float x) { return x; }
ONDEVICE_INLINE float as_float(uint16_t x) { return bits_float(static_cast<uint32_t>(x) << 16); }

template <typename Update>
void muon_split(const Update* __restrict update, int64_t count, uint16_t* __restrict high, uint16_t* __restrict low,
                float decay, float rate) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t difference = static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(low[i])));
    const float p = bits_float((static_cast<uint32_t>(high[i]) << 16) + difference);
    const uint32_t bits = quiet(float_bits(p * decay - as_float(update[i]) * rate));
    low[i] = static_cast<uint16_t>(bits);
    high[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
  }
}

template <typename Update>
void muon_plain(const Update* __restrict update, int64_t count, float* __restrict master, uint16_t* __restrict high,
                float decay, float rate) {
  for (int64_t i = 0; i < count; ++i) master[i] = master[i] * decay - as_float(update[i]) * rate;
  if (high == nullptr) return;
  for (int64_t i = 0; i < count; ++i) {
    high[i] = static_cast<uint16_t>(nearest_bfloat16(quiet(float_bits(master[i]))));
  }
}

// `master` is null for a split one; `high` may be null for a plain one.
template <typename Update, typename Parallel>
void layer_muon(const Update* update, int64_t count, float* master, uint16_t* high, uint16_t* low, float decay,
                float rate, const Parallel& parallel) {
  for_chunks(count, parallel, [&](int64_t begin, int64_t size) {
    uint16_t* upper = high == nullptr ? nullptr : high + begin;
    if (master == nullptr) {
      muon_split(update + begin, size, upper, low + begin, decay, rate);
    } else {
      muon_plain(update + begin, size, master + begin, upper, decay, rate);
    }
  });
}

}  // namespace ondevice

#if defined(__AVX512BW__) && !defined(__clang__)
#pragma GCC pop_options
#endif
