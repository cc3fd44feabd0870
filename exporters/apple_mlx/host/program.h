// A program of `ondevice export --target apple-mlx`: functions, instructions, weights. No formula and no layer is here.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "json.h"
#include "mlx/export.h"
#include "tensor_file.h"

namespace ondevice {

using Arrays = std::unordered_map<std::string, mx::array>;

// A range of an array along an axis; axis -1 is all of it.
struct Operand {
  std::string name;
  int axis = -1, start = 0, stop = 0;
  mx::array of(const mx::array& whole) const;
};

// One function, or (where `update` is not empty) the update of one layer's A and B.
struct Instruction {
  std::string function, update;
  std::vector<std::pair<std::string, Operand>> inputs;
  std::vector<std::pair<std::string, std::string>> outputs;
  bool evaluate = true;
  std::vector<std::string> free;
};

using Instructions = std::vector<Instruction>;

// The instructions of one kind of block.
struct Lists {
  Instructions forward, backward;
};

struct Bucket {
  int loss_rows;
  std::vector<Lists> of_kind;
};

// The stages: `.mlxfn` files that are loaded when they are first called.
class Functions {
 public:
  Functions(std::string folder, const Json& listed, std::string mlx_version);
  Arrays call(const std::string& name, const Arrays& inputs);

 private:
  std::string folder_, mlx_version_;
  std::unordered_map<std::string, std::pair<std::string, std::vector<std::string>>> listed_;
  std::unordered_map<std::string, mx::ImportedFunction> loaded_;
};

// One block's frozen arrays, or the tables': in memory, or in a file.
class Block {
 public:
  Block(const std::string& path, bool streamed);
  mx::array get(const Operand& operand);
  mx::array rows(const std::string& name, const std::vector<int>& numbers);
  void drop(const std::string& name);
  void announce() const;

 private:
  std::unique_ptr<TensorFile> file_;
  bool streamed_;
  Arrays held_;
};

struct LoraParameters {
  int layer;
  std::string target, a_name, b_name;
};

struct Program {
  explicit Program(const std::string& folder, bool streamed);

  Json json;
  std::vector<LoraParameters> lora_parameters;
  std::unordered_map<int, Bucket> buckets;
  Instructions embed, final_norm, final_norm_backward, loss, loss_only;
  Instructions layer_input;  // empty if no layer reads embeddings of its own
  std::unique_ptr<Functions> functions;
  std::vector<std::unique_ptr<Block>> blocks;
  std::unique_ptr<Block> table, final;
  std::string head;  // the table's name of the output head
  int layers, batch_size;
  std::vector<int> kinds;       // of each layer, the kind of its block
  std::vector<int> key_layers;  // of each layer, the one whose keys and values it attends to

  bool lends_keys(int layer) const;
};

using Update = std::function<void(const std::string& target, const mx::array& a, const mx::array& b)>;

// Runs instructions: calls, evaluates where it says so, drops what is dead, gives back freed memory.
Arrays run(Program& program, const Instructions& instructions, Arrays held, Block& weights, const Arrays& adapter,
           const std::string& head_name = "", const Update& update = nullptr);

}  // namespace ondevice
