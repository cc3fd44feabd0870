#include "session.h"

#include <algorithm>
#include <cmath>

#include "values.h"

namespace host {

namespace {

constexpr int64_t kSharedProduct = int64_t{1} << 30;  // multiplications from which threads share a product
constexpr const char* kFused = "fused_";
constexpr const char* kLowerRate = "resume from the last checkpoint with a lower learning rate";

bool is_finite(const Floats& values) {
  return std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); });
}

Failure not_finite(const std::string& message, const std::string& received = "") {
  return {Kind::kTraining, message, "", received, kLowerRate};
}

const Port& port_of(const Function& function, const std::string& role) {
  for (const Port& port : function.inputs) {
    if (port.role == role) return port;
  }
  throw Failure(Kind::kArtifact, "a function of the program has no input of role " + role, "", "", "export it again");
}

}  // namespace

Session::Session(const Manifest& manifest) : manifest_(manifest), program_(manifest), fused_(manifest.fused()) {
  const fs::path path = manifest.folder / manifest.weights;
  try {
    weights_ = std::make_unique<MappedTensors>(path);
  } catch (const Refused& error) {
    throw Failure(Kind::kArtifact, path.string() + ": not a whole safetensors file", "", error.what(), "copy it again");
  }
  for (const auto& [name, function] : manifest.functions) {
    for (const Port& port : function.inputs) {
      if (port.role == "frozen") check_frozen(name, port, name);
    }
  }
  const Function& sums = manifest.function("head_sums");
  const Port& hidden = port_of(sums, "hidden");
  head_rows_ = hidden.shape.at(0);
  width_ = hidden.shape.at(1);
  tile_rows_ = sums.inputs.back().shape.at(0);
  if (head_rows_ < 1 || tile_rows_ < 1 || tile_rows_ > manifest.vocab) {
    throw Failure(Kind::kArtifact, "head_sums takes no rows", "", "", "export the model again");
  }
  first_state();
}

void Session::check_frozen(const std::string& name, const Port& port, const std::string& function) {
  const bool of_layers = port.name.find("{layer}") != std::string::npos;
  for (int64_t layer = 0; layer < (of_layers ? manifest_.layers : 1); ++layer) {
    if (of_layers && !manifest_.has_layer(function, layer)) continue;
    const Place* place = weights_->find(of_layer(port.name, layer));
    static const std::map<std::string, std::string> kNames = {
        {"F32", "float32"}, {"F16", "float16"}, {"I8", "int8"}, {"U8", "uint8"}};
    const auto dtype = place == nullptr ? kNames.end() : kNames.find(place->dtype);
    bool fits = dtype != kNames.end() && dtype->second == port.dtype && place->shape.size() == port.shape.size();
    for (size_t i = 0; fits && i < port.shape.size(); ++i) {
      fits = i == 0 ? place->shape[i] >= port.shape[i] : place->shape[i] == port.shape[i];
    }
    if (fits && place->start % 64 == 0) continue;
    throw Failure(Kind::kArtifact, (manifest_.folder / manifest_.weights).string() + " holds the weights of another model: " +
                  of_layer(port.name, layer), port.dtype + " " + shape_text(port.shape) + " at a multiple of 64 bytes",
                  place == nullptr ? "none" : place->dtype + " " + shape_text(place->shape), "copy the artifact again (" + name + ")");
  }
}

void Session::first_state() {
  for (const StateTensor& tensor : manifest_.state) {
    Floats values(static_cast<size_t>(tensor.size), 0.0f);
    if (!tensor.first.empty()) {
      try {
        const MappedTensors file(manifest_.folder / tensor.first);
        const Place* place = file.find(tensor.name);
        if (place == nullptr || place->dtype != "F32" || elements(place->shape) != tensor.size) {
          throw Refused("expected " + tensor.name + " float32 [" + std::to_string(tensor.size) + "]");
        }
        std::copy_n(reinterpret_cast<const char*>(file.data(*place)), place->end - place->start,
                    reinterpret_cast<char*>(values.data()));
      } catch (const Refused& error) {
        throw Failure(Kind::kArtifact, (manifest_.folder / tensor.first).string() + " does not fit the manifest", "",
                      error.what(), "export the model again");
      }
    }
    state_[tensor.name] = std::move(values);
  }
}

void Session::load_state(State state, int64_t updates) {
  state_ = std::move(state);
  updates_ = updates;
  partially_updated_ = false;
}

const Floats& Session::adapter() const {
  const auto found = std::find_if(manifest_.state.begin(), manifest_.state.end(), [](auto& t) { return t.is_adapter; });
  if (found == manifest_.state.end()) throw Failure(Kind::kArtifact, "the program trains no adapter");
  return state_.at(found->name);
}

// Small products gain nothing by threads, and one that waits for another by spinning costs much on a busy machine.
bool Session::shares_products() const {
  int64_t largest = 0;
  for (const auto& [name, function] : manifest_.functions) {
    if (name.rfind("block_backward", 0) != 0) continue;
    const int64_t tokens = port_of(function, "hidden").shape.at(0);
    for (const Port& port : function.inputs) {
      if (port.role == "frozen") largest = std::max(largest, tokens * elements(port.shape));
    }
  }
  return largest >= kSharedProduct;
}

// What a block reads in addition to its input; `own` keeps what is computed for it.
View Session::handed(const Port& port, const std::string& name, int64_t layer, Pass* pass, std::vector<Floats>& own) {
  if (pass != nullptr && port.role == "layer_input") {
    Outputs outputs = call("layer_input_" + pass->size, pass->read, layer);
    own.push_back(std::move(take(outputs, "layer_input", static_cast<size_t>(elements(port.shape)))));
    return view(own.back());
  }
  if (pass != nullptr && port.is_shared()) {
    if (port.is_shared_gradient()) pass->shared.try_emplace(port.key(), static_cast<size_t>(elements(port.shape)), 0.0f);
    const auto found = pass->shared.find(port.key());
    if (found != pass->shared.end()) return view(found->second);
  }
  throw Failure(Kind::kArtifact, name + " takes an input that this host does not know: " + port.key(), "", "",
                "use the version of the host that wrote the artifact");
}

Outputs Session::call(const std::string& plain, const Inputs& given, int64_t layer, int64_t first, Pass* pass) {
  const bool twice = fused_ && manifest_.functions.count(kFused + plain) > 0;
  const std::string name = twice ? kFused + plain : plain;
  const Function& function = manifest_.function(name);
  std::vector<View> inputs;
  std::vector<Floats> own;
  for (const Port& port : function.inputs) {
    if (port.role == "frozen") {
      const Place* known = weights_->find(of_layer(port.name, layer));
      if (known == nullptr) throw Failure(Kind::kArtifact, name + " has no weights for layer " + std::to_string(layer));
      const Place& place = *known;
      const bool is_tile = place.shape != port.shape;
      if (is_tile && first + port.shape.at(0) > place.shape.at(0)) {
        throw Failure(Kind::kArtifact, name + ": a tile ends behind '" + port.name + "'",
                      "vocab " + std::to_string(place.shape.at(0)), std::to_string(manifest_.vocab), "export it again");
      }
      const size_t row_bytes = bytes_of(port) / static_cast<size_t>(std::max<int64_t>(port.shape.at(0), 1));
      inputs.push_back({weights_->data(place) + (is_tile ? static_cast<size_t>(first) * row_bytes : 0), bytes_of(port)});
    } else if (port.role == "state") {
      Floats& values = state_.at(port.name);
      const size_t size = values.size() / static_cast<size_t>(manifest_.layers);
      inputs.push_back({values.data() + static_cast<size_t>(layer) * size, size * sizeof(float)});
    } else {
      const auto found = given.find(port.key());
      inputs.push_back(found == given.end() ? handed(port, name, layer, pass, own) : found->second);
    }
  }
  std::vector<Floats> results = program_.call(name, layer, inputs);
  Outputs outputs;
  for (size_t i = 0; i < results.size(); ++i) {
    const Port& port = function.outputs[i];
    Outputs& place = pass != nullptr && port.is_shared() ? pass->shared : outputs;
    place[port.key()] = std::move(results[i]);
  }
  return outputs;
}

double Session::step(const Batch& batch, int64_t step, double learning_rate) {
  std::unique_ptr<OneThread> one;
  if (!shares_products()) one = std::make_unique<OneThread>();
  const std::string size = size_of(batch);
  std::vector<Floats> inputs;
  const auto count_x = static_cast<size_t>(batch.rows * batch.tokens * width_);
  Outputs first = call("embed_" + size, {{"ids", view(batch.ids)}});
  Floats x = std::move(take(first, "hidden", count_x));
  Pass pass{size, {{"ids", view(batch.ids)}, {"hidden", view(x)}}, {}};  // x stays where it is until the step ends
  for (int64_t layer = 0; layer < manifest_.layers; ++layer) {
    inputs.push_back(std::move(x));
    Outputs next = call("block_forward_" + size + manifest_.kind(layer), {{"hidden", view(inputs.back())}}, layer, 0, &pass);
    x = std::move(take(next, "hidden", count_x));
  }
  const int64_t count = std::max<int64_t>(1, batch.trained_tokens());
  const double weight = 1.0 / static_cast<double>(count);
  Head head = fused_ ? fused_head(x, batch, weight) : this->head(x, batch, weight);
  const double loss = static_cast<double>(sum(head.losses.data(), head.losses.size())) / static_cast<double>(count);
  if (!std::isfinite(loss) || !is_finite(head.gradient)) {
    throw not_finite("step " + std::to_string(step) + ": the loss is not finite; nothing was updated", number_text(loss));
  }
  const auto rate = static_cast<float>(learning_rate);
  Inputs scalars{{"learning_rate", view(rate)}, {"seed", view(manifest_.seed)}};
  for (const auto& [name, counts_updates] : manifest_.counters) {
    scalars["counter " + name] = view(counts_updates ? updates_ : step);
  }
  std::map<std::string, float> constants;
  for (const auto& [name, value] : manifest_.constants) {
    scalars["constant " + name] = view(constants[name] = static_cast<float>(value));
  }
  partially_updated_ = true;
  Floats gradient = std::move(head.gradient);
  for (int64_t layer = manifest_.layers - 1; layer >= 0; --layer) {
    scalars["hidden"] = view(inputs.back());
    scalars["gradient"] = view(gradient);
    Outputs outputs = call("block_backward_" + size + manifest_.kind(layer), scalars, layer, 0, &pass);
    gradient = std::move(take(outputs, "gradient", count_x));
    inputs.pop_back();
    for (const StateTensor& tensor : manifest_.state) {
      const auto size_of_range = static_cast<size_t>(tensor.size / manifest_.layers);
      const Floats& range = take(outputs, "state " + tensor.name, size_of_range);
      if (tensor.is_adapter && !is_finite(range)) {
        throw not_finite("step " + std::to_string(step) + ": the gradient of layer " + std::to_string(layer) +
                         " is not finite");
      }
      std::copy(range.begin(), range.end(), state_.at(tensor.name).begin() + layer * static_cast<int64_t>(range.size()));
    }
  }
  partially_updated_ = false;
  ++updates_;
  return loss;
}

}  // namespace host
