// What the steps of a session share: views of values, outputs of a known size, sums as numpy takes them.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "session.h"

namespace host {

template <typename T>
View view(const std::vector<T>& values) {
  return {const_cast<T*>(values.data()), values.size() * sizeof(T)};
}

inline View view(const int64_t& value) { return {const_cast<int64_t*>(&value), sizeof value}; }
inline View view(const float& value) { return {const_cast<float*>(&value), sizeof value}; }

// An output of a function, of that many elements: what follows indexes it.
inline Floats& take(Outputs& outputs, const std::string& key, size_t size) {
  const auto found = outputs.find(key);
  if (found != outputs.end() && found->second.size() == size) return found->second;
  throw Failure(Kind::kArtifact, "a function of the program gives no " + key + " of that size", std::to_string(size),
                found == outputs.end() ? "none" : std::to_string(found->second.size()), "export the model again");
}

inline std::string size_of(const Batch& batch) { return std::to_string(batch.rows) + "x" + std::to_string(batch.tokens); }

// The sum as numpy takes it: in eight lanes from eight elements on, in halves from 129 on.
inline float sum(const float* values, size_t count) {
  if (count < 8) return std::accumulate(values, values + count, -0.0f);
  if (count > 128) {
    const size_t half = count / 2 - count / 2 % 8;
    return sum(values, half) + sum(values + half, count - half);
  }
  float lanes[8];
  std::copy(values, values + 8, lanes);
  size_t i = 8;
  for (; i < count - count % 8; i += 8) {
    for (size_t lane = 0; lane < 8; ++lane) lanes[lane] += values[i + lane];
  }
  float total = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
  for (; i < count; ++i) total += values[i];
  return total;
}

}  // namespace host
