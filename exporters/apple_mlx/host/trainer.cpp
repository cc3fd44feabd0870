#include "trainer.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "mlx/io.h"

namespace ondevice {
namespace {

const std::string kPrefix = "base_model.model.";

mx::array scalar(double value) { return mx::array(static_cast<float>(value), mx::float32); }

}  // namespace

Trainer::Trainer(const std::string& folder, bool streamed)
    : folder_(folder), program_(folder, streamed), adapter_(static_cast<size_t>(program_.layers)) {
  TensorFile file(folder + "/adapter/adapter_model.safetensors");
  for (const LoraParameters& one : program_.lora_parameters) {
    Arrays& layer = adapter_.at(static_cast<size_t>(one.layer));
    layer.emplace(one.target + ".A", file.read(kPrefix + one.a_name));
    layer.emplace(one.target + ".B", file.read(kPrefix + one.b_name));
  }
}

const Bucket& Trainer::bucket(const Batch& batch) const {
  auto found = program_.buckets.find(batch.length);
  if (batch.rows != program_.batch_size || found == program_.buckets.end()) {
    throw std::runtime_error("the program has no functions for " + std::to_string(batch.rows) + " rows of " +
                             std::to_string(batch.length) + " tokens");
  }
  return found->second;
}

mx::array Trainer::embed(const Batch& batch) {
  Arrays rows;
  for (const std::string& part : program_.json.at("parts").get<Texts>()) {
    rows.emplace("rows." + part, program_.table->rows("embedding." + part, batch.ids));
  }
  Arrays made = run(program_, program_.embed, std::move(rows), *program_.table, {});
  mx::array x = mx::reshape(made.at("x"), {batch.rows, batch.length, -1});
  shared_.clear();
  if (!program_.layer_input.empty()) {
    ids_ = batch.ids;
    embedded_.insert_or_assign("x", x);
  }
  return x;
}

Arrays Trainer::inputs(int layer) {
  Arrays found;
  if (!program_.layer_input.empty()) {
    Arrays given = embedded_;
    for (const std::string& part : program_.json.at("parts").get<Texts>()) {
      given.emplace("rows." + part, program_.blocks[layer]->rows("layer_rows." + part, ids_));
    }
    found = run(program_, program_.layer_input, std::move(given), *program_.blocks[layer], {});
  }
  if (int lender = program_.key_layers.at(layer); lender != layer) {
    for (const char* name : {"k", "v"}) found.insert_or_assign(name, shared_.at(lender).at(name));
  }
  return found;
}

mx::array Trainer::forward(int layer, const Bucket& bucket, const mx::array& x) {
  if (layer + 1 < program_.layers) program_.blocks[layer + 1]->announce();
  const Lists& lists = bucket.of_kind.at(program_.kinds.at(layer));
  Arrays given = inputs(layer);
  given.emplace("x", x);
  Arrays left = run(program_, lists.forward, std::move(given), *program_.blocks[layer], adapter_[layer]);
  if (program_.lends_keys(layer)) shared_[layer] = {{"k", left.at("k")}, {"v", left.at("v")}};
  return left.at("x");
}

mx::array Trainer::backward(int layer, const Bucket& bucket, Arrays given) {
  if (layer > 0) program_.blocks[layer - 1]->announce();
  given.merge(inputs(layer));
  int lender = program_.key_layers.at(layer);
  auto shared = shared_.find(lender);
  if (shared != shared_.end()) {
    for (const std::string name : {"k", "v"}) {
      auto sum = shared->second.find("g." + name);
      bool first = sum == shared->second.end();
      given.emplace("g." + name, first ? mx::zeros(shared->second.at(name).shape(), mx::float32) : sum->second);
    }
  }
  auto take = [&](const std::string& target, const mx::array& a, const mx::array& b) { update(layer, target, a, b); };
  const Lists& lists = bucket.of_kind.at(program_.kinds.at(layer));
  Arrays left = run(program_, lists.backward, std::move(given), *program_.blocks[layer], adapter_[layer], "", take);
  if (shared != shared_.end() && lender != layer) {
    for (const char* name : {"g.k", "g.v"}) shared->second.insert_or_assign(name, left.at(name));
  }
  return left.at("g");
}

double Trainer::step(const Batch& batch, double learning_rate) {
  const Bucket& shape = bucket(batch);
  const Json& optimizer = program_.json.at("optimizer");
  ++steps_;
  double rate = learning_rate;
  scalars_.clear();
  scalars_.emplace("kept", scalar(1 - learning_rate * optimizer.at("weight_decay").get<double>()));
  if (optimizer.at("name") == "adamw") {
    rate /= 1 - std::pow(optimizer.at("beta1").get<double>(), steps_);
    scalars_.emplace("root", scalar(std::sqrt(1 - std::pow(optimizer.at("beta2").get<double>(), steps_))));
    float constants[] = {optimizer.at("beta1"),
                         optimizer.at("beta2"),
                         optimizer.at("eps")};
    scalars_.emplace("constants", mx::array(constants, {3}, mx::float32));
  }
  scalars_.emplace("rate", scalar(rate));

  std::vector<mx::array> kept = {embed(batch)};
  for (int layer = 0; layer < program_.layers; ++layer) kept.push_back(forward(layer, shape, kept.back()));
  mx::array x = kept.back(), g = x;
  kept.pop_back();
  double sum = loss(x, batch, shape.loss_rows, &g);
  x = g;  // the last block's output may go
  for (int layer = program_.layers - 1; layer >= 0; --layer) {
    Arrays given = {{"x", kept.back()}, {"g", g}};
    kept.pop_back();
    x = g = scalar(0);
    g = backward(layer, shape, std::move(given));
  }
  return sum;
}

double Trainer::evaluate(const Batch& batch) {
  const Bucket& shape = bucket(batch);
  mx::array x = embed(batch);
  for (int layer = 0; layer < program_.layers; ++layer) x = forward(layer, shape, x);
  return loss(x, batch, shape.loss_rows, nullptr);
}

double Trainer::loss(const mx::array& x, const Batch& batch, int loss_rows, mx::array* gradient) {
  std::vector<int> where, wanted;
  for (int row = 0; row < batch.rows; ++row) {
    for (int token = 0; token + 1 < batch.length; ++token) {
      int place = row * batch.length + token;
      if (batch.labels[place + 1] < 0) continue;
      where.push_back(place);
      wanted.push_back(batch.labels[place + 1]);
    }
  }
  auto labelled = static_cast<int>(where.size());
  if (labelled == 0) throw std::runtime_error("no token of the batch is labelled");
  mx::array hn = run(program_, program_.final_norm, {{"x", x}}, *program_.final, {}).at("hn");
  hn = mx::reshape(hn, {batch.rows * batch.length, -1});
  mx::array ghn = gradient ? mx::zeros(hn.shape(), mx::float32) : scalar(0);
  double total = 0;
  for (int low = 0; low < labelled; low += loss_rows) {
    int count = std::min(loss_rows, labelled - low);
    std::vector<int> places(loss_rows, 0), labels(loss_rows, 0);
    std::vector<float> weights(loss_rows, 0.0F);
    for (int i = 0; i < count; ++i) {
      places[i] = where[low + i];
      labels[i] = wanted[low + i];
      weights[i] = static_cast<float>(1.0 / labelled);
    }
    mx::array place(places.data(), {loss_rows}, mx::int32);
    Arrays given = program_.functions->call("gather_rows", {{"all", hn}, {"place", place}});
    if (gradient) given.emplace("weight", mx::array(weights.data(), {loss_rows}, mx::float32));
    mx::eval(given.at("hn"));
    for (const std::string& part : program_.json.at("parts").get<Texts>()) {
      given.emplace("rows." + part, program_.table->rows(program_.head + "." + part, labels));
    }
    Arrays found = run(program_, gradient ? program_.loss : program_.loss_only, std::move(given), *program_.table, {},
                       program_.head);
    if (gradient) {
      Arrays rows = {{"ghn", ghn}, {"place", place}, {"gh", found.at("gh")}};
      ghn = program_.functions->call("scatter_rows", rows).at("ghn");
      mx::eval(ghn);
    }
    total += mx::sum(mx::slice(found.at("nll"), {0}, {count})).item<float>();
  }
  if (gradient) {
    Arrays given = {{"x", x}, {"ghn", mx::reshape(ghn, x.shape())}};
    *gradient = run(program_, program_.final_norm_backward, std::move(given), *program_.final, {}).at("g");
  }
  return total / labelled;
}

void Trainer::update(int layer, const std::string& target, const mx::array& a, const mx::array& b) {
  Arrays& held = adapter_[layer];
  std::vector<mx::array> changed;
  for (const auto& [side, gradient] : {std::pair(std::string(".A"), a), std::pair(std::string(".B"), b)}) {
    std::string name = std::to_string(layer) + "." + target + side;
    mx::array value = updated(name, held.at(target + side), gradient);
    held.insert_or_assign(target + side, value);
    changed.push_back(value);
    if (first_.count(name)) {
      changed.push_back(first_.at(name));
      changed.push_back(second_.at(name));
    }
  }
  mx::eval(changed);
}

mx::array Trainer::updated(const std::string& name, const mx::array& value, const mx::array& gradient) {
  Arrays given = {{"value", value}, {"gradient", gradient}};
  for (const auto& item : scalars_) given.insert(item);
  std::string optimizer = program_.json.at("optimizer").at("name");
  if (optimizer == "adamw") {
    if (!first_.count(name)) {
      first_.emplace(name, mx::zeros_like(value));
      second_.emplace(name, mx::zeros_like(value));
    }
    given.emplace("first", first_.at(name));
    given.emplace("second", second_.at(name));
  }
  Arrays made = program_.functions->call(optimizer, given);
  if (optimizer == "adamw") {
    first_.insert_or_assign(name, made.at("first"));
    second_.insert_or_assign(name, made.at("second"));
  }
  return made.at("value");
}

void Trainer::save_adapter(const std::string& folder) const {
  namespace fs = std::filesystem;
  std::unordered_map<std::string, mx::array> tensors;
  for (const LoraParameters& one : program_.lora_parameters) {
    const Arrays& layer = adapter_[one.layer];
    tensors.emplace(kPrefix + one.a_name, layer.at(one.target + ".A"));
    tensors.emplace(kPrefix + one.b_name, layer.at(one.target + ".B"));
  }
  // Beside its place, then renamed: a crash leaves no half adapter under the name.
  fs::path partial = folder + ".partial";
  fs::remove_all(partial);
  fs::create_directories(partial);
  mx::save_safetensors((partial / "adapter_model.safetensors").string(), tensors, {{"format", "pt"}});
  fs::copy_file(folder_ + "/adapter/adapter_config.json", partial / "adapter_config.json");
  fs::remove_all(folder);
  fs::rename(partial, folder);
}

}  // namespace ondevice
