// The head of a session's step: the loss of each row, and its gradient, in one pass or tile by tile.
#include <algorithm>
#include <cmath>

#include "session.h"
#include "values.h"

namespace host {

namespace {

constexpr float kLowest = -1e30f;  // the largest logit before the first tile

}  // namespace

Session::Head Session::fused_head(const Floats& x, const Batch& batch, double weight) {
  std::vector<int64_t> targets = batch.targets();
  std::replace(targets.begin(), targets.end(), kIgnore, int64_t{-1});
  const Floats ones(targets.size(), 1.0f);
  const Inputs given{{"hidden", view(x)}, {"targets", view(targets)}, {"token_scale", view(ones)}};
  Outputs outputs = call("fused_head_" + size_of(batch), given);
  Head head;
  const Floats& losses = take(outputs, "losses", targets.size());
  const auto tokens = static_cast<size_t>(batch.tokens);
  for (size_t row = 0; row < static_cast<size_t>(batch.rows); ++row) {
    head.losses.push_back(sum(losses.data() + row * tokens, tokens));
  }
  head.gradient = std::move(take(outputs, "gradient", x.size()));
  for (float& value : head.gradient) value *= static_cast<float>(weight);
  return head;
}

void Session::tile(const std::string& name, std::map<std::string, Floats>& values, const Inputs& given, int64_t first,
                   int64_t start) {
  const int64_t skip = start - first;
  Inputs all = given;
  all["tile_first"] = view(first);
  all["tile_skip"] = view(skip);
  for (const auto& [key, value] : values) all[key] = view(value);
  for (auto& [key, value] : call(name, all, 0, first)) values[key] = std::move(value);
}

// Only positions with a label go through the head, `head_rows_` at a time; the last are filled up with weight 0.
Session::Head Session::head(const Floats& x, const Batch& batch, double weight) {
  const std::vector<int64_t> targets = batch.targets();
  std::vector<size_t> places;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i] != kIgnore) places.push_back(i);
  }
  const auto rows = static_cast<size_t>(head_rows_), width = static_cast<size_t>(width_);
  Head head{Floats(static_cast<size_t>(batch.rows), 0.0f), Floats(x.size(), 0.0f)};
  for (size_t begin = 0; begin < places.size(); begin += rows) {
    const size_t taken = std::min(rows, places.size() - begin);
    Floats hidden(rows * width, 0.0f), scale(rows, 0.0f);
    std::vector<int64_t> wanted(rows, -1);
    for (size_t i = 0; i < taken; ++i) {
      std::copy_n(x.begin() + static_cast<int64_t>(places[begin + i] * width), width, hidden.begin() + static_cast<int64_t>(i * width));
      wanted[i] = targets[places[begin + i]];
      scale[i] = static_cast<float>(weight);
    }
    const Inputs given{{"hidden", view(hidden)}, {"targets", view(wanted)}, {"token_scale", view(scale)}};
    std::map<std::string, Floats> sums{{"tile_sums maximum", Floats(rows, kLowest)},
                                       {"tile_sums total", Floats(rows, 0.0f)},
                                       {"tile_sums wanted", Floats(rows, 0.0f)}};
    const auto for_tiles = [&](const std::string& name, std::map<std::string, Floats>& values) {
      for (int64_t start = 0; start < manifest_.vocab; start += tile_rows_) {
        tile(name, values, given, std::min(start, manifest_.vocab - tile_rows_), start);
      }
    };
    for_tiles("head_sums", sums);
    const Floats& maximum = take(sums, "tile_sums maximum", rows);
    const Floats& total = take(sums, "tile_sums total", rows);
    const Floats& own = take(sums, "tile_sums wanted", rows);
    for (size_t i = 0; i < taken; ++i) {
      // In float64, so that every host rounds it alike.
      const auto logarithm = static_cast<float>(std::log(static_cast<double>(total[i])));
      head.losses[places[begin + i] / static_cast<size_t>(batch.tokens)] += maximum[i] + logarithm - own[i];
    }
    sums["gradient"] = Floats(rows * width, 0.0f);
    for_tiles("head_gradient", sums);
    take(sums, "gradient", rows * width);
    for (size_t i = 0; i < taken; ++i) {
      std::copy_n(sums["gradient"].begin() + static_cast<int64_t>(i * width), width,
                  head.gradient.begin() + static_cast<int64_t>(places[begin + i] * width));
    }
  }
  return head;
}

}  // namespace host
