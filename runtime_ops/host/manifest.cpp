#include "manifest.h"

#include <algorithm>
#include <set>

#include "safetensors.h"

namespace host {

namespace {

constexpr int64_t kSchema = 2, kMostLayers = 4096;
constexpr int64_t kMostTokens = 1 << 24;
constexpr size_t kMostBytes = size_t{16} << 20;
constexpr const char* kAgain = "copy the whole folder again, or export the model again";

Failure wrong(const std::string& message, const std::string& expected = "", const std::string& received = "",
              const std::string& hint = kAgain) {
  return {Kind::kArtifact, message, expected, received, hint};
}

const Json& part(const Json& value, const std::string& key, Json::Type type) {
  const Json& found = value.at(key);
  if (found.type() != type) throw Refused("field '" + key + "' is " + found.type_name());
  return found;
}

int64_t size_of(const Json& value, const std::string& key, int64_t least = 0) {
  const int64_t size = value.integer(key);
  if (size < least || size > int64_t{1} << 40) throw Refused("field '" + key + "' is out of range");
  return size;
}

std::string name_or_nothing(const Json& value, const std::string& key) {
  const Json* found = value.find(key);
  return found == nullptr || found->is_null() ? "" : value.text(key);
}

std::vector<Port> read_ports(const Json& list) {
  std::vector<Port> ports;
  for (const Json& item : list.items()) {
    Port port{item.text("name"), name_or_nothing(item, "role"), item.text("dtype"), item.integers("shape")};
    elements(port.shape);
    ports.push_back(std::move(port));
  }
  return ports;
}

Function read_function(const Json& value) {
  Function function;
  function.inputs = read_ports(part(value, "inputs", Json::kList));
  function.outputs = read_ports(part(value, "outputs", Json::kList));
  for (const Json& op : part(value, "ops", Json::kList).items()) function.ops.push_back(op.as_text());
  function.program = name_or_nothing(value, "program");
  return function;
}

void read_state(const Json& spec, Manifest& manifest) {
  int64_t trained = 0, adapters = 0;
  for (const Json& item : part(spec, "state", Json::kList).items()) {
    StateTensor tensor{item.text("name"), name_or_nothing(item, "first"), elements(item.integers("shape")),
                       item.text("role") == "adapter"};
    if (item.text("dtype") != "float32" || item.text("kept") != "host" || tensor.size % manifest.layers != 0) {
      throw Refused("state '" + tensor.name + "' is not float32 in equal ranges that the host keeps");
    }
    if (tensor.is_adapter) trained += tensor.size;
    adapters += tensor.is_adapter;
    manifest.state.push_back(std::move(tensor));
  }
  if (trained != manifest.adapter_size || adapters != 1) throw Refused("adapter_size is not what the adapter's tensors have");
  for (const Json& item : part(spec, "counters", Json::kList).items()) {
    manifest.counters.emplace_back(item.text("name"), item.text("counts") == "updates");
  }
  for (const Json& item : part(spec, "constants", Json::kList).items()) {
    manifest.constants[item.text("name")] = item.real("train");
  }
}

void read_layout(const Json& spec, Manifest& manifest) {
  for (const Json& item : part(spec, "layout", Json::kList).items()) {
    Entry entry{item.text("linear"),     item.text("target"),     item.integer("layer"),      size_of(item, "a_offset"),
                size_of(item, "offset"), size_of(item, "rank", 1), size_of(item, "inputs", 1), size_of(item, "outputs", 1)};
    const bool fits = entry.a_offset + elements({entry.rank, entry.inputs}) <= manifest.adapter_size &&
                      entry.offset + elements({entry.rank, entry.outputs}) <= manifest.adapter_size;
    if (!fits || entry.rank != manifest.rank) throw Refused("the layout of '" + entry.linear + "' is beyond the adapter");
    manifest.layout.push_back(std::move(entry));
  }
}

void read_spec(const Json& spec, Manifest& manifest) {
  manifest.layers = size_of(spec, "layers", 1);
  manifest.vocab = size_of(spec, "vocab", 1);
  manifest.rank = size_of(spec, "rank", 1);
  manifest.alpha = spec.real("alpha");
  manifest.adapter_size = size_of(spec, "adapter_size", 1);
  manifest.weights = spec.text("weights");
  manifest.kinds = spec.integers("kinds");
  const bool kinds_fit = manifest.kinds.empty() || static_cast<int64_t>(manifest.kinds.size()) == manifest.layers;
  if (manifest.layers > kMostLayers || !kinds_fit) throw Refused("layers or kinds are out of range");
  for (const auto& [name, value] : part(spec, "methods", Json::kObject).members()) {
    manifest.functions[name] = read_function(value);
  }
  read_state(spec, manifest);
  read_layout(spec, manifest);
}

void read_fields(const Json& values, Manifest& manifest) {
  manifest.method = part(values, "method", Json::kObject);
  manifest.learning_rate = manifest.method.real("learning_rate");
  manifest.model = part(values, "model", Json::kObject);
  manifest.source = manifest.model.text("source");
  manifest.model_sha256 = manifest.model.text("sha256");
  manifest.quantize = values.text("quantize");
  manifest.runtime = values.text("runtime");
  manifest.program = values.text("program");
  manifest.lengths = values.integers("lengths_tokens");
  std::sort(manifest.lengths.begin(), manifest.lengths.end());
  if (manifest.lengths.empty() || manifest.lengths.front() < 1) throw Refused("lengths_tokens is out of range");
  manifest.batch_size = size_of(values, "batch_size", 1);
  manifest.seed = size_of(part(values, "generator", Json::kObject), "seed");
  for (const auto& [name, digest] : part(values, "files", Json::kObject).members()) manifest.files[name] = digest.as_text();
  read_spec(part(values, "program_spec", Json::kObject), manifest);
}

// Refuses an artifact of another kind by name, before the fields that only block programs have are looked for.
void check_kind(const Json& values, const fs::path& folder) {
  const std::string target = values.text("target");
  const Json& spec = part(values, "program_spec", Json::kObject);
  const std::string shape = spec.text("shape");
  const bool scaled = spec.find("loss_scale") != nullptr && !spec.at("loss_scale").is_null();
  const bool frozen = spec.find("frozen") != nullptr && !spec.at("frozen").is_null();
  if (target == "android-cpu" && shape == "blocks" && !scaled && !frozen) return;
  throw wrong(folder.string() + " is not an artifact that this host runs",
              "a block program for android-cpu (--method mesp)", "target " + target + ", shape " + shape,
              "`ondevice run` runs it");
}

// A batch is as large as the functions that take it, whatever the manifest says of its size.
void check_sizes(const Manifest& manifest) {
  for (const int64_t length : manifest.lengths) {
    const Function& embed = manifest.function("embed_" + std::to_string(manifest.batch_size) + "x" + std::to_string(length));
    const std::vector<int64_t> shape{manifest.batch_size, length};
    const bool fits = std::any_of(embed.inputs.begin(), embed.inputs.end(),
                                  [&](const Port& port) { return port.role == "ids" && port.shape == shape; });
    if (!fits || elements(shape) > kMostTokens) throw Refused("batch_size and lengths_tokens do not fit the functions");
    for (const Port& port : embed.inputs) {
      const bool is_table = port.role == "frozen" && port.shape.size() == 2;
      if (is_table && port.shape[0] < manifest.vocab) throw Refused("vocab is beyond the embedding's rows");
    }
  }
}

// A function that takes what this host does not compute is refused before the first step.
void check_roles(const Manifest& manifest) {
  static const std::set<std::string> kRoles = {
      "ids",    "labels",     "frozen",    "state",     "counter", "constant", "seed",     "learning_rate", "hidden", "gradient",
      "targets", "token_scale", "tile_first", "tile_skip", "tile_sums", "length",  "position", "keys",          "values",
      "layer_input"};
  for (const auto& [name, function] : manifest.functions) {
    for (const Port& port : function.inputs) {
      if (kRoles.count(port.role) > 0 || port.is_shared()) continue;
      throw Refused("function " + name + " takes " + quoted(port.role) + ", which this host does not compute");
    }
  }
}

std::vector<std::string> named_files(const Manifest& manifest) {
  std::vector<std::string> names{manifest.program, manifest.weights};
  for (const StateTensor& tensor : manifest.state) {
    if (!tensor.first.empty()) names.push_back(tensor.first);
  }
  for (const auto& [name, function] : manifest.functions) {
    if (!function.program.empty()) names.push_back(function.program);
  }
  return names;
}

void check_places(const Manifest& manifest) {
  for (const auto& [name, digest] : manifest.files) inside(manifest.folder, name);
  for (const std::string& name : named_files(manifest)) {
    inside(manifest.folder, name);
    if (manifest.files.count(of_layer(name, 0)) == 0) throw Refused("the manifest has no hash of " + quoted(name));
  }
}

void check_hashes(const Manifest& manifest) {
  for (const auto& [name, expected] : manifest.files) {
    const fs::path path = manifest.folder / name;
    if (!fs::is_regular_file(path)) throw wrong("artifact " + manifest.folder.string() + " lacks a file", name);
    const std::string received = sha256_file(path);
    if (received == expected) continue;
    throw wrong("artifact " + manifest.folder.string() + ": " + name + " has changed", "SHA-256 " + expected,
                "SHA-256 " + received);
  }
}

}  // namespace

std::string Port::key() const {
  static const std::set<std::string> kSeveral = {"state", "counter", "constant", "tile_sums"};
  return kSeveral.count(role) > 0 || is_shared() ? role + " " + name : role;
}

bool Port::is_shared() const { return role == "shared_keys" || role == "shared_values" || is_shared_gradient(); }

bool Port::is_shared_gradient() const { return role == "keys_gradient" || role == "values_gradient"; }

std::string of_layer(std::string name, int64_t layer) {
  constexpr const char* kMark = "{layer}";
  const size_t place = name.find(kMark);
  return place == std::string::npos ? name : name.replace(place, 7, std::to_string(layer));
}

bool Manifest::fused() const {
  return std::any_of(functions.begin(), functions.end(), [](auto& item) { return item.first.rfind("fused_", 0) == 0; });
}

const Function& Manifest::function(const std::string& name) const {
  const auto found = functions.find(name);
  if (found == functions.end()) throw wrong("the program has no function " + name);
  return found->second;
}

std::string Manifest::kind(int64_t layer) const {
  const int64_t number = kinds.empty() ? 0 : kinds[static_cast<size_t>(layer)];
  return number == 0 ? "" : "_" + std::to_string(number);
}

bool Manifest::has_layer(const std::string& function, int64_t layer) const {
  const std::string end = function.substr(function.rfind('_') + 1);
  const bool is_number = !end.empty() && end.size() < 9 && end.find_first_not_of("0123456789") == std::string::npos;
  return kinds.empty() || kinds[static_cast<size_t>(layer)] == (is_number ? std::stoll(end) : 0);
}

Manifest read_manifest(const fs::path& folder, bool check_files) {
  const fs::path path = folder / "manifest.json";
  if (!fs::is_regular_file(path)) {
    throw wrong(folder.string() + " is not an artifact", "manifest.json", "no such file", "`ondevice export` writes one");
  }
  try {
    const Json values = parse_json(read_plain(path, kMostBytes));
    // The version first: fields of another one would be reported as mistakes of this file.
    const Json* version = values.find("schema_version");
    if (version == nullptr || version->type() != Json::kInteger || version->as_integer() != kSchema) {
      throw wrong(path.string() + " is of another version", "schema_version " + std::to_string(kSchema),
                  version == nullptr ? "none" : version->dump(), "export the model again with this version of ondevice");
    }
    check_kind(values, folder);
    Manifest manifest;
    manifest.folder = folder;
    read_fields(values, manifest);
    check_places(manifest);
    check_roles(manifest);
    check_sizes(manifest);
    if (check_files) check_hashes(manifest);
    return manifest;
  } catch (const Refused& error) {
    throw wrong(path.string() + ": " + error.what());
  }
}

}  // namespace host
