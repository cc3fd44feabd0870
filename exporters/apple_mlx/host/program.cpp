#include "program.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include "mlx/memory.h"
#include "mlx/version.h"

namespace ondevice {
namespace {

constexpr int kFormat = 2, kHandsOn = 3;  // 3: blocks read more than the residual stream

Instructions instructions_of(const Json& json) {
  Instructions found;
  for (const Json& item : json) {
    Instruction call;
    if (item.contains("update")) {
      call.update = item.at("update");
      found.push_back(std::move(call));
      continue;
    }
    call.function = item.at("function");
    for (const Json& input : item.at("inputs")) {
      call.inputs.emplace_back(input.at(0), Operand{input.at(1), input.at(2), input.at(3), input.at(4)});
    }
    for (const Json& output : item.at("outputs")) {
      call.outputs.emplace_back(output.at(0), output.at(1));
    }
    call.evaluate = item.at("evaluate");
    call.free = item.at("free").get<Texts>();
    found.push_back(std::move(call));
  }
  return found;
}

std::string block_file(int layer) {
  char name[64];
  std::snprintf(name, sizeof(name), "block-%05d.safetensors", layer);
  return name;
}

// A name of the instructions as the table has it: head.weight is embedding.weight where they are tied.
Operand renamed(Operand operand, const std::string& head) {
  if (!head.empty() && operand.name.rfind("head.", 0) == 0) operand.name = head + operand.name.substr(4);
  return operand;
}

}  // namespace

mx::array Operand::of(const mx::array& whole) const {
  if (axis < 0) return whole;
  mx::Shape low(whole.ndim(), 0), high = whole.shape();
  low[axis] = start;
  high[axis] = stop;
  return mx::slice(whole, low, high);
}

Functions::Functions(std::string folder, const Json& listed, std::string mlx_version)
    : folder_(std::move(folder)), mlx_version_(std::move(mlx_version)) {
  for (const auto& [name, entry] : listed.items()) {
    listed_.emplace(name, std::pair(entry.at("file").get<std::string>(), entry.at("outputs").get<Texts>()));
  }
}

Arrays Functions::call(const std::string& name, const Arrays& inputs) {
  auto listed = listed_.find(name);
  if (listed == listed_.end()) throw std::runtime_error("the program has no function '" + name + "'");
  const auto& [file, outputs] = listed->second;
  auto found = loaded_.find(name);
  if (found == loaded_.end()) {
    found = loaded_.emplace(name, mx::import_function(folder_ + "/" + file)).first;
  }
  std::vector<mx::array> made = found->second(inputs);
  Arrays named;
  for (size_t i = 0; i < made.size(); ++i) named.emplace(outputs.at(i), made[i]);
  return named;
}

Block::Block(const std::string& path, bool streamed)
    : file_(std::make_unique<TensorFile>(path)), streamed_(streamed) {
  if (streamed_) return;
  for (const std::string& name : file_->names()) held_.emplace(name, file_->read(name));
  file_.reset();
}

mx::array Block::get(const Operand& operand) {
  if (streamed_ && operand.axis == 0) return file_->read(operand.name, operand.start, operand.stop);
  auto found = held_.find(operand.name);
  if (found == held_.end()) {
    if (!streamed_) throw std::runtime_error("the weights lack '" + operand.name + "'");
    found = held_.emplace(operand.name, file_->read(operand.name)).first;
  }
  return operand.of(found->second);
}

mx::array Block::rows(const std::string& name, const std::vector<int>& numbers) {
  if (streamed_) return file_->rows(name, numbers);
  mx::array places(numbers.data(), {static_cast<int>(numbers.size())}, mx::int32);
  return mx::take(held_.at(name), places, 0);
}

void Block::drop(const std::string& name) {
  if (streamed_) held_.erase(name);
}

void Block::announce() const {
  if (streamed_) file_->announce();
}

Program::Program(const std::string& folder, bool streamed)
    : json(read_json(folder + "/program.json")) {
  if (int format = json.at("format"); format != kFormat && format != kHandsOn) {
    throw std::runtime_error(folder + ": a program of another format");
  }
  std::string written = json.at("mlx_version");
  if (written != mx::version()) {
    throw std::runtime_error(folder + " is of another version of MLX: expected " + std::string(mx::version()) +
                             ", received " + written + "; export the model again");
  }
  layers = json.at("layers");
  batch_size = json.at("batch_size");
  head = json.at("tied").get<bool>() ? "embedding" : "head";
  for (const Json& one : json.at("lora_parameters")) {
    lora_parameters.push_back({one.at("layer"), one.at("target"), one.at("A"), one.at("B")});
  }
  const Json& lists = json.at("instructions");
  embed = instructions_of(lists.at("embed"));
  final_norm = instructions_of(lists.at("final_norm"));
  final_norm_backward = instructions_of(lists.at("final_norm_backward"));
  loss = instructions_of(lists.at("loss"));
  loss_only = instructions_of(lists.at("loss_only"));
  layer_input = instructions_of(lists.value("layer_input", Json::array()));
  for (const auto& [length, bucket] : json.at("lengths").items()) {
    std::vector<Lists> lists = {{instructions_of(bucket.at("forward")), instructions_of(bucket.at("backward"))}};
    for (const Json& other : bucket.value("others", Json::array())) {
      lists.push_back({instructions_of(other.at("forward")), instructions_of(other.at("backward"))});
    }
    buckets.emplace(std::stoi(length), Bucket{bucket.at("loss_rows"), std::move(lists)});
  }
  kinds = json.value("kinds", std::vector<int>(layers, 0));
  key_layers = json.value("key_layers", std::vector<int>());
  for (int i = static_cast<int>(key_layers.size()); i < layers; ++i) key_layers.push_back(i);
  bool gpu = mx::default_device() == mx::Device::gpu;
  functions = std::make_unique<Functions>(folder + (gpu ? "/functions-gpu" : "/functions"), json.at("functions"),
                                          written);
  std::string weights = folder + "/weights/";
  for (int i = 0; i < layers; ++i) blocks.push_back(std::make_unique<Block>(weights + block_file(i), streamed));
  table = std::make_unique<Block>(weights + "table.safetensors", streamed);
  final = std::make_unique<Block>(weights + "final.safetensors", streamed);
}

bool Program::lends_keys(int layer) const { return std::count(key_layers.begin(), key_layers.end(), layer) > 1; }

Arrays run(Program& program, const Instructions& instructions, Arrays held, Block& weights, const Arrays& adapter,
           const std::string& head_name, const Update& update) {
  std::vector<std::string> pending;
  for (const Instruction& call : instructions) {
    if (!call.update.empty()) {
      auto a = held.extract(call.update + ".dA"), b = held.extract(call.update + ".dB");
      if (update) update(call.update, a.mapped(), b.mapped());
      continue;
    }
    {
      Arrays inputs;
      for (const auto& [name, operand] : call.inputs) {
        auto found = held.find(operand.name);
        if (found != held.end()) {
          inputs.emplace(name, operand.of(found->second));
        } else if (auto trained = adapter.find(operand.name); trained != adapter.end()) {
          inputs.emplace(name, operand.of(trained->second));
        } else {
          inputs.emplace(name, weights.get(renamed(operand, head_name)));
        }
      }
      Arrays made = program.functions->call(call.function, inputs);
      for (const auto& [output, name] : call.outputs) {
        held.insert_or_assign(name, made.at(output));
        pending.push_back(name);
      }
    }
    for (const std::string& name : call.free) {
      if (held.erase(name) == 0) weights.drop(renamed(Operand{name}, head_name).name);
    }
    if (!call.evaluate) continue;
    std::vector<mx::array> wanted;
    for (const std::string& name : pending) {
      if (auto found = held.find(name); found != held.end()) wanted.push_back(found->second);
    }
    mx::eval(wanted);
    pending.clear();
    mx::clear_cache();
  }
  return held;
}

}  // namespace ondevice
