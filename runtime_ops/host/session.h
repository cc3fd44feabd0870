// A training session over functions of one block: the host walks the layers, and hands in weights where the file is
// mapped. `exporters/executorch/blocks.py` is the same walk in Python; develop/block-programs.md describes it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "manifest.h"
#include "program.h"
#include "rows.h"
#include "safetensors.h"

namespace host {

using State = std::map<std::string, Floats>;
using Inputs = std::map<std::string, View>;
using Outputs = std::map<std::string, Floats>;

// A way through the layers and back: what a layer's own input is made of, and what blocks hand to each other.
struct Pass {
  std::string size;
  Inputs read;
  Outputs shared;
};

class Session {
 public:
  // Failure if the weights' file is damaged or of another model.
  explicit Session(const Manifest& manifest);

  // One training step; its loss, nats a label token. Failure if a number is not finite.
  double step(const Batch& batch, int64_t step, double learning_rate);

  const State& state() const { return state_; }
  int64_t updates() const { return updates_; }
  bool is_whole() const { return !partially_updated_; }
  void load_state(State state, int64_t updates);
  const Floats& adapter() const;

 private:
  struct Head {
    Floats losses;    // of each row, summed
    Floats gradient;  // [N, D], of the mean
  };

  Outputs call(const std::string& name, const Inputs& given, int64_t layer = 0, int64_t first = 0,
               Pass* pass = nullptr);
  View handed(const Port& port, const std::string& name, int64_t layer, Pass* pass, std::vector<Floats>& own);
  Head head(const Floats& x, const Batch& batch, double weight);
  Head fused_head(const Floats& x, const Batch& batch, double weight);
  void tile(const std::string& name, std::map<std::string, Floats>& values, const Inputs& given, int64_t first,
            int64_t start);
  void check_frozen(const std::string& name, const Port& port, const std::string& function);
  void first_state();
  bool shares_products() const;

  const Manifest& manifest_;
  Program program_;
  std::unique_ptr<MappedTensors> weights_;
  State state_;
  int64_t updates_ = 0;
  bool partially_updated_ = false, fused_ = false;
  int64_t head_rows_ = 0, width_ = 0, tile_rows_ = 0;
};

}  // namespace host
