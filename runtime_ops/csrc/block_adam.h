// AdamW over a range of the adapter in one pass: new values and moments.
#pragma once

#include <cmath>

#include "block_math.h"

namespace ondevice {

struct Adam {
  float rate, beta1, beta2, eps, decay;
  float number;  // of this update, from 1
};

// out [3, count]: values, first and second moments after the update.
template <typename Parallel>
void block_adam(const float* value, const float* gradient, const float* first, const float* second, int64_t count,
                const Adam& adam, float* out, const Parallel& parallel) {
  const float one = 1.0f - std::pow(adam.beta1, adam.number), two = 1.0f - std::pow(adam.beta2, adam.number);
  const float rate = adam.rate / one, kept = 1.0f - adam.rate * adam.decay;
  each_element(count, parallel, [&](int64_t at, int64_t some) {
    const Vec g = load_some(gradient + at, some);
    const Vec m = load_some(first + at, some) * adam.beta1 + g * (1.0f - adam.beta1);
    const Vec v = load_some(second + at, some) * adam.beta2 + g * g * (1.0f - adam.beta2);
    Vec root = v / two;
    for (int i = 0; i < kLanes; ++i) root[i] = std::sqrt(root[i]);
    store_some(out + at, load_some(value + at, some) * kept - rate * m / (root + adam.eps), some);
    store_some(out + count + at, m, some);
    store_some(out + 2 * count + at, v, some);
  });
}

}  // namespace ondevice
