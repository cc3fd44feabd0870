#include "adapter.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "safetensors.h"
#include "sha256.h"

namespace host {

namespace {

constexpr const char* kPrefix = "base_model.model.";

// Names to the tensors A [rank, inputs] and B [outputs, rank] of every linear layer.
std::map<std::string, std::pair<std::vector<int64_t>, Floats>> tensors_of(const Manifest& manifest, const Floats& flat) {
  std::map<std::string, std::pair<std::vector<int64_t>, Floats>> tensors;
  for (const Entry& entry : manifest.layout) {
    const auto a = flat.begin() + entry.a_offset;
    const float* b = flat.data() + entry.offset;
    Floats turned(static_cast<size_t>(entry.outputs * entry.rank));
    for (int64_t row = 0; row < entry.outputs; ++row) {
      for (int64_t r = 0; r < entry.rank; ++r) {
        turned[static_cast<size_t>(row * entry.rank + r)] = b[r * entry.outputs + row];
      }
    }
    tensors[entry.linear + ".lora_A.weight"] = {{entry.rank, entry.inputs}, Floats(a, a + entry.rank * entry.inputs)};
    tensors[entry.linear + ".lora_B.weight"] = {{entry.outputs, entry.rank}, std::move(turned)};
  }
  return tensors;
}

// PEFT's `target_modules` and `layers_to_transform`, which name exactly the adapter's linear layers.
void add_modules(const Manifest& manifest, Json& config) {
  std::set<std::string> linears, targets;
  std::set<int64_t> layers;
  bool in_tower = false;
  for (const Entry& entry : manifest.layout) {
    linears.insert(entry.linear);
    targets.insert(entry.linear.substr(entry.linear.rfind('.') + 1));
    layers.insert(entry.layer);
    // A block whose list lies deeper than in a model that only reads text: its names may be another tower's, too.
    const size_t first = entry.linear.find('.'), second = entry.linear.find('.', first + 1);
    for (const char* list : {".layers.", ".blocks.", ".h."}) {
      in_tower |= second != std::string::npos && entry.linear.compare(second, std::string(list).size(), list) == 0;
    }
  }
  const bool all_named = in_tower || layers.count(-1) > 0 || linears.size() != layers.size() * targets.size();
  Json modules = Json::list(), chosen = Json::list();
  for (const std::string& name : all_named ? linears : targets) modules.add(name);
  bool gapless = !layers.empty() && *layers.begin() == 0 && *layers.rbegin() + 1 == static_cast<int64_t>(layers.size());
  for (const int64_t layer : layers) chosen.add(layer);
  config.set("target_modules", modules);
  config.set("layers_to_transform", all_named || gapless ? Json() : chosen);
}

Json config_of(const Manifest& manifest) {
  const bool whole = manifest.alpha == std::floor(manifest.alpha) && std::fabs(manifest.alpha) < 1e15;
  Json config = Json::object({{"auto_mapping", Json()},
                              {"base_model_name_or_path", manifest.source},
                              {"bias", "none"},
                              {"fan_in_fan_out", false},
                              {"inference_mode", true},
                              {"init_lora_weights", true},
                              {"layers_pattern", Json()},
                              {"lora_alpha", whole ? Json(static_cast<int64_t>(manifest.alpha)) : Json(manifest.alpha)},
                              {"lora_dropout", 0.0},
                              {"modules_to_save", Json()},
                              {"peft_type", "LORA"},
                              {"r", manifest.rank},
                              {"revision", Json()},
                              {"task_type", "CAUSAL_LM"},
                              {"use_dora", false},
                              {"use_rslora", false}});
  add_modules(manifest, config);
  return config;
}

}  // namespace

void save_adapter(const Manifest& manifest, const Floats& flat, const fs::path& folder) {
  const auto tensors = tensors_of(manifest, flat);
  Sha256 digest;
  std::map<std::string, Stored> stored;
  for (const auto& [name, tensor] : tensors) {
    const auto& [shape, values] = tensor;
    if (!std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); })) {
      throw Failure(Kind::kTraining, "the adapter's tensor '" + name + "' is not finite", "finite values", "inf or nan",
                    "resume from the last checkpoint with a lower learning rate");
    }
    digest.update(name + " (" + std::to_string(shape[0]) + ", " + std::to_string(shape[1]) + ")\n");
    digest.update(values.data(), values.size() * sizeof(float));
    stored[kPrefix + name] = {"F32", shape, values.data(), values.size() * sizeof(float)};
  }
  const Json metadata = Json::object({{"format", "pt"}, {"ondevice.tensors_sha256", digest.hex()}});
  AtomicFolder written(folder, "adapter_config.json");
  write_file(written.path() / "adapter_model.safetensors", adapter_file(stored, metadata));
  write_file(written.path() / "adapter_config.json", config_of(manifest).dump(2, false, true, true) + "\n");
  written.commit();
}

}  // namespace host
