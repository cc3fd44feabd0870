#include "program.h"

#include <cstdio>
#include <stdexcept>

#include "mlx/memory.h"
#include "mlx/version.h"

namespace ondevice {
namespace {

constexpr int kFormat = 1;

Schedule schedule_of(const Json& json) {
  Schedule found;
  for (const Json& item : json.list) {
    Call call;
    if (item.has("update")) {
      call.update = item.at("update").text;
      found.push_back(std::move(call));
      continue;
    }
    call.function = item.at("function").text;
    for (const Json& input : item.at("inputs").list) {
      const auto& parts = input.list;
      call.inputs.emplace_back(parts.at(0).text, Ref{parts.at(1).text, parts.at(2).integer(), parts.at(3).integer(),
                                                     parts.at(4).integer()});
    }
    for (const Json& output : item.at("outputs").list) {
      call.outputs.emplace_back(output.list.at(0).text, output.list.at(1).text);
    }
    call.evaluate = item.at("evaluate").boolean;
    call.free = item.at("free").texts();
    found.push_back(std::move(call));
  }
  return found;
}

std::string block_file(int layer) {
  char name[64];
  std::snprintf(name, sizeof(name), "block-%05d.safetensors", layer);
  return name;
}

// A name of the schedule as the table has it: head.weight is embedding.weight where they are tied.
Ref renamed(Ref ref, const std::string& head) {
  if (!head.empty() && ref.name.rfind("head.", 0) == 0) ref.name = head + ref.name.substr(4);
  return ref;
}

}  // namespace

mx::array Ref::of(const mx::array& whole) const {
  if (axis < 0) return whole;
  mx::Shape low(whole.ndim(), 0), high = whole.shape();
  low[axis] = start;
  high[axis] = stop;
  return mx::slice(whole, low, high);
}

Functions::Functions(std::string folder, const Json& listed, std::string mlx_version)
    : folder_(std::move(folder)), mlx_version_(std::move(mlx_version)) {
  for (const auto& [name, entry] : listed.object) {
    listed_.emplace(name, std::pair(entry.at("file").text, entry.at("outputs").texts()));
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

mx::array Block::get(const Ref& ref) {
  if (streamed_ && ref.axis == 0) return file_->read(ref.name, ref.start, ref.stop);
  auto found = held_.find(ref.name);
  if (found == held_.end()) {
    if (!streamed_) throw std::runtime_error("the weights lack '" + ref.name + "'");
    found = held_.emplace(ref.name, file_->read(ref.name)).first;
  }
  return ref.of(found->second);
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
    : json(parse_json(read_file(folder + "/program.json"), folder + "/program.json")) {
  if (json.at("format").integer() != kFormat) throw std::runtime_error(folder + ": a program of another format");
  std::string written = json.at("mlx_version").text;
  if (written != mx::version()) {
    throw std::runtime_error(folder + " is of another version of MLX: expected " + std::string(mx::version()) +
                             ", received " + written + "; export the model again");
  }
  layers = json.at("layers").integer();
  batch_size = json.at("batch_size").integer();
  head = json.at("tied").boolean ? "embedding" : "head";
  for (const Json& pair : json.at("pairs").list) {
    pairs.push_back({pair.at("layer").integer(), pair.at("target").text, pair.at("A").text, pair.at("B").text});
  }
  const Json& schedules = json.at("schedules");
  embed = schedule_of(schedules.at("embed"));
  final_norm = schedule_of(schedules.at("final_norm"));
  final_norm_backward = schedule_of(schedules.at("final_norm_backward"));
  loss = schedule_of(schedules.at("loss"));
  loss_only = schedule_of(schedules.at("loss_only"));
  for (const auto& [length, bucket] : json.at("lengths").object) {
    buckets.emplace(std::stoi(length), Bucket{bucket.at("loss_rows").integer(), schedule_of(bucket.at("forward")),
                                              schedule_of(bucket.at("backward"))});
  }
  bool gpu = mx::default_device() == mx::Device::gpu;
  functions = std::make_unique<Functions>(folder + (gpu ? "/functions-gpu" : "/functions"), json.at("functions"),
                                          written);
  std::string weights = folder + "/weights/";
  for (int i = 0; i < layers; ++i) blocks.push_back(std::make_unique<Block>(weights + block_file(i), streamed));
  table = std::make_unique<Block>(weights + "table.safetensors", streamed);
  final = std::make_unique<Block>(weights + "final.safetensors", streamed);
}

Arrays run(Program& program, const Schedule& schedule, Arrays held, Block& weights, const Arrays& adapter,
           const std::string& head_name, const Update& update) {
  std::vector<std::string> pending;
  for (const Call& call : schedule) {
    if (!call.update.empty()) {
      auto a = held.extract(call.update + ".dA"), b = held.extract(call.update + ".dB");
      if (update) update(call.update, a.mapped(), b.mapped());
      continue;
    }
    {
      Arrays inputs;
      for (const auto& [name, ref] : call.inputs) {
        auto found = held.find(ref.name);
        if (found != held.end()) {
          inputs.emplace(name, ref.of(found->second));
        } else if (auto pair = adapter.find(ref.name); pair != adapter.end()) {
          inputs.emplace(name, ref.of(pair->second));
        } else {
          inputs.emplace(name, weights.get(renamed(ref, head_name)));
        }
      }
      Arrays made = program.functions->call(call.function, inputs);
      for (const auto& [output, name] : call.outputs) {
        held.insert_or_assign(name, made.at(output));
        pending.push_back(name);
      }
    }
    for (const std::string& name : call.free) {
      if (held.erase(name) == 0) weights.drop(renamed(Ref{name}, head_name).name);
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
