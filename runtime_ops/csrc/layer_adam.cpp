// AdamW and Muon on flat arrays as plain C functions. Compiled without contraction of a*b+c: see layer_adam.h.
#include "layer_adam.h"

#include "layer_muon.h"
#include "threads.h"

extern "C" {

// One AdamW step over flat arrays (layer_adam.h).
EXPORT void ondevice_layer_adam(const ondevice::AdamArguments* arguments, int64_t threads) {
  ondevice::layer_adam(*arguments, Threads{threads});
}

// Muon's update of masters (layer_muon.h): float32 if `wide`, else bfloat16. `master` is null for a split one.
EXPORT void ondevice_layer_muon(const void* update, int64_t wide, int64_t count, float* master, uint16_t* high,
                                uint16_t* low, float decay, float rate, int64_t threads) {
  const auto run = [&](const auto* typed) {
    ondevice::layer_muon(typed, count, master, high, low, decay, rate, Threads{threads});
  };
  wide ? run(static_cast<const float*>(update)) : run(static_cast<const uint16_t*>(update));
}

// float32 to two halves and back; v holds the ties: float32, bfloat16 or (no ties, may be null) uint8 by `moments`.
EXPORT void ondevice_layer_adam_split(const float* master, int64_t count, uint16_t* high, uint16_t* low,
                                      void* v, int64_t moments, int64_t threads) {
  ondevice::split_master(master, count, high, low, v, moments, Threads{threads});
}

EXPORT void ondevice_layer_adam_merge(const uint16_t* high, const uint16_t* low, const void* v,
                                      int64_t moments, int64_t count, float* master, int64_t threads) {
  ondevice::merge_master(high, low, v, moments, count, master, Threads{threads});
}

}  // extern "C"
