// The artifact's table of contents: what its program takes, gives and keeps, checked before anything is opened.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "files.h"
#include "json.h"

namespace host {

struct Port {
  std::string name, role, dtype;
  std::vector<int64_t> shape;

  // By which a call binds it: the role, with the name if a function has several of the role.
  std::string key() const;
  // Keys or values that one block gives to others, or the sum of their gradients so far.
  bool is_shared() const;
  bool is_shared_gradient() const;
};

struct Function {
  std::vector<Port> inputs, outputs;
  std::vector<std::string> ops;
  std::string program;  // the file, with the layer's number for {layer}; empty: the artifact's program
};

struct StateTensor {
  std::string name, first;
  int64_t size = 0;
  bool is_adapter = false;
};

struct Entry {
  std::string linear, target;
  int64_t layer = 0, a_offset = 0, offset = 0, rank = 0, inputs = 0, outputs = 0;
};

struct Manifest {
  fs::path folder;
  Json method;  // the training method's configuration
  Json model;
  std::string source, model_sha256, quantize, runtime, program, weights;
  std::vector<int64_t> lengths;  // tokens, ascending
  int64_t batch_size = 1, seed = 0, layers = 0, vocab = 0, rank = 0, adapter_size = 0;
  double alpha = 0, learning_rate = 0;
  std::vector<int64_t> kinds;
  std::map<std::string, Function> functions;
  std::vector<StateTensor> state;
  std::vector<std::pair<std::string, bool>> counters;  // name; whether it counts the optimizer's own updates
  std::map<std::string, double> constants;             // values in training
  std::vector<Entry> layout;
  std::map<std::string, std::string> files;  // SHA-256 by name

  bool fused() const;
  const Function& function(const std::string& name) const;
  // The end of the name of a function of that layer's block.
  std::string kind(int64_t layer) const;
  bool has_layer(const std::string& function, int64_t layer) const;
};

// Reads and checks `manifest.json`, and with `check_files` every file's SHA-256; Failure if the folder is not a whole
// artifact that this host runs.
Manifest read_manifest(const fs::path& folder, bool check_files = true);

std::string of_layer(std::string name, int64_t layer);

}  // namespace host
