#include "program.h"

#include <executorch/extension/data_loader/mmap_data_loader.h>
#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/extension/threadpool/threadpool_guard.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>

#include <cstdio>
#include <cstring>
#include <set>

#include "safetensors.h"

namespace host {

namespace {

using executorch::aten::ScalarType;
using executorch::aten::TensorImpl;
using executorch::extension::MallocMemoryAllocator;
using executorch::extension::MmapDataLoader;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::HierarchicalAllocator;
using executorch::runtime::MemoryManager;
using executorch::runtime::Method;
using executorch::runtime::Result;
using Bytes = executorch::runtime::Span<uint8_t>;
using RuntimeProgram = executorch::runtime::Program;

constexpr int64_t kMostPlannedBytes = int64_t{1} << 40;
constexpr const char* kAgain = "copy the artifact again, or export it again";

struct Type {
  ScalarType type;
  size_t bytes;
};

Type type_of(const Port& port) {
  static const std::map<std::string, Type> kTypes = {
      {"float32", {ScalarType::Float, 4}}, {"float16", {ScalarType::Half, 2}}, {"int64", {ScalarType::Long, 8}},
      {"int8", {ScalarType::Char, 1}},     {"uint8", {ScalarType::Byte, 1}}};
  const auto found = kTypes.find(port.dtype);
  if (found != kTypes.end()) return found->second;
  throw Failure(Kind::kArtifact, "port '" + port.name + "' is of dtype " + quoted(port.dtype),
                "float32, float16, int64, int8 or uint8", "", kAgain);
}

// A tensor over a view, for one call.
struct Given {
  Given(const Port& port, const View& view) : sizes(port.shape.begin(), port.shape.end()) {
    for (size_t i = 0; i < sizes.size(); ++i) order.push_back(static_cast<uint8_t>(i));
    strides.resize(sizes.size());
    int32_t stride = 1;
    for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i]) strides[i] = stride;
    tensor = std::make_unique<TensorImpl>(type_of(port).type, sizes.size(), sizes.data(), view.data, order.data(),
                                          strides.data());
  }

  std::vector<executorch::aten::SizesType> sizes;
  std::vector<executorch::aten::DimOrderType> order;
  std::vector<executorch::aten::StridesType> strides;
  std::unique_ptr<TensorImpl> tensor;
};

}  // namespace

size_t bytes_of(const Port& port) { return static_cast<size_t>(elements(port.shape)) * type_of(port).bytes; }

struct ProgramFile::Opened {
  MmapDataLoader loader;
  std::unique_ptr<RuntimeProgram> program;
};

struct ProgramFile::Loaded {
  std::vector<std::vector<uint8_t>> planned;
  std::vector<Bytes> spans;
  std::unique_ptr<HierarchicalAllocator> memory;
  MallocMemoryAllocator own, temporary;
  std::unique_ptr<MemoryManager> manager;
  std::unique_ptr<Method> method;
  std::vector<size_t> output_bytes;
  std::vector<bool> is_planned;
};

namespace {

// What the runtime last said of an error, which its error codes do not tell.
std::string last_message;

void take_message(et_timestamp_t, et_pal_log_level_t level, const char*, const char*, size_t, const char* message,
                  size_t length) {
  if (level == et_pal_log_level_t::kError || level == et_pal_log_level_t::kFatal) last_message.assign(message, length);
  if (level == et_pal_log_level_t::kFatal) std::fprintf(stderr, "%s\n", last_message.c_str());  // it ends the process
}

void start_runtime() {
  static const bool started = [] {
    executorch::runtime::register_pal(executorch::runtime::PalImpl::create(take_message, __FILE__));
    executorch::runtime::runtime_init();
    return true;
  }();
  (void)started;
}

Failure broken(const std::string& path, const std::string& what, Error error) {
  const std::string code = "error " + std::to_string(static_cast<int>(error));
  return {Kind::kArtifact, "the runtime cannot " + what + " of " + path, "",
          last_message.empty() ? code : code + ": " + last_message, kAgain};
}

}  // namespace

ProgramFile::ProgramFile(const fs::path& path) : path_(path.string()) {
  start_runtime();
  Result<MmapDataLoader> loader = MmapDataLoader::from(path_.c_str(), MmapDataLoader::MlockConfig::NoMlock);
  if (!loader.ok()) throw broken(path_, "read the file", loader.error());
  opened_ = std::unique_ptr<Opened>(new Opened{std::move(loader.get()), nullptr});
  Result<RuntimeProgram> program =
      RuntimeProgram::load(&opened_->loader, RuntimeProgram::Verification::InternalConsistency);
  if (!program.ok()) throw broken(path_, "load the program", program.error());
  opened_->program = std::make_unique<RuntimeProgram>(std::move(program.get()));
}

ProgramFile::~ProgramFile() { loaded_.clear(); }  // methods go before their program

ProgramFile::Loaded& ProgramFile::loaded(const std::string& name, const Function& function) {
  auto found = loaded_.find(name);
  if (found != loaded_.end()) return *found->second;
  const auto meta = opened_->program->method_meta(name.c_str());
  if (!meta.ok()) throw broken(path_, "find function " + name, meta.error());
  if (meta->num_inputs() != function.inputs.size() || meta->num_outputs() != function.outputs.size()) {
    throw Failure(Kind::kArtifact, name + " of " + path_ + " is not the manifest's function",
                  std::to_string(function.inputs.size()) + " inputs, " + std::to_string(function.outputs.size()) + " outputs",
                  std::to_string(meta->num_inputs()) + ", " + std::to_string(meta->num_outputs()), kAgain);
  }
  auto made = std::make_unique<Loaded>();
  for (size_t i = 0; i < meta->num_memory_planned_buffers(); ++i) {
    const Result<int64_t> size = meta->memory_planned_buffer_size(i);
    if (!size.ok() || *size < 0 || *size > kMostPlannedBytes) throw broken(path_, "plan " + name, size.error());
    made->planned.emplace_back(static_cast<size_t>(*size));
  }
  for (std::vector<uint8_t>& buffer : made->planned) made->spans.emplace_back(buffer.data(), buffer.size());
  made->memory = std::make_unique<HierarchicalAllocator>(
      executorch::runtime::Span<Bytes>(made->spans.data(), made->spans.size()));
  made->manager = std::make_unique<MemoryManager>(&made->own, made->memory.get(), &made->temporary);
  Result<Method> method = opened_->program->load_method(name.c_str(), made->manager.get());
  if (!method.ok()) throw broken(path_, "load function " + name, method.error());
  made->method = std::make_unique<Method>(std::move(method.get()));
  for (size_t i = 0; i < function.outputs.size(); ++i) {
    const auto info = meta->output_tensor_meta(i);
    const Port& port = function.outputs[i];
    if (!info.ok() || info->scalar_type() != ScalarType::Float || info->nbytes() != bytes_of(port)) {
      throw Failure(Kind::kArtifact, name + " of " + path_ + ": output '" + port.name + "' is not the manifest's",
                    "float32 " + shape_text(port.shape), info.ok() ? std::to_string(info->nbytes()) + " bytes" : "", kAgain);
    }
    made->output_bytes.push_back(info->nbytes());
    made->is_planned.push_back(info->is_memory_planned());
  }
  return *(loaded_[name] = std::move(made));
}

std::vector<Floats> ProgramFile::call(const std::string& name, const Function& function,
                                      const std::vector<View>& inputs) {
  Loaded& loaded = this->loaded(name, function);
  std::vector<Given> given;
  given.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Port& port = function.inputs[i];
    if (inputs[i].bytes != bytes_of(port)) {
      throw Failure(Kind::kArtifact, name + ": input '" + port.name + "' is of another size",
                    std::to_string(bytes_of(port)) + " bytes", std::to_string(inputs[i].bytes), kAgain);
    }
    given.emplace_back(port, inputs[i]);
    const Error error = loaded.method->set_input(EValue(executorch::aten::Tensor(given.back().tensor.get())), i);
    if (error != Error::Ok) throw broken(path_, "take input '" + port.name + "' of " + name, error);
  }
  std::vector<Floats> outputs;
  for (size_t i = 0; i < loaded.output_bytes.size(); ++i) {
    outputs.emplace_back(loaded.output_bytes[i] / sizeof(float));
    if (loaded.is_planned[i]) continue;
    const Error error = loaded.method->set_output_data_ptr(outputs[i].data(), loaded.output_bytes[i], i);
    if (error != Error::Ok) throw broken(path_, "give output " + std::to_string(i) + " of " + name, error);
  }
  const Error error = loaded.method->execute();
  if (error != Error::Ok) throw broken(path_, "run " + name, error);
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!loaded.is_planned[i]) continue;
    const auto& tensor = loaded.method->get_output(i).toTensor();
    std::memcpy(outputs[i].data(), tensor.const_data_ptr(), loaded.output_bytes[i]);
  }
  return outputs;
}

Program::Program(const Manifest& manifest) : manifest_(manifest), file_(manifest.folder / manifest.program) {
  std::set<std::string> known, missing;
  for (const auto& kernel : executorch::ET_RUNTIME_NAMESPACE::get_registered_kernels()) known.insert(kernel.name_);
  for (const auto& [name, function] : manifest.functions) {
    const bool runs = manifest.fused() || name.rfind("fused_", 0) != 0;
    for (const std::string& op : function.ops) {
      // A name without an overload ends with a dot in the runtime's registry, or does not.
      if (runs && known.count(op) == 0 && known.count(op + ".") == 0) missing.insert(op);
    }
  }
  if (missing.empty()) return;
  std::string names;
  for (const std::string& name : missing) names += (names.empty() ? "" : ", ") + name;
  throw Failure(Kind::kArtifact, "the runtime lacks kernels that the program needs", names, "",
                "export the model again with the version of ExecuTorch that this host was built with");
}

std::vector<Floats> Program::call(const std::string& name, int64_t layer, const std::vector<View>& inputs) {
  const Function& function = manifest_.function(name);
  if (function.program.empty()) return file_.call(name, function, inputs);
  ProgramFile file(inside(manifest_.folder, of_layer(function.program, layer)));
  return file.call(name, function, inputs);
}

struct OneThread::Guard {
  executorch::extension::threadpool::NoThreadPoolGuard guard;
};

OneThread::OneThread() : guard_(std::make_unique<Guard>()) {}
OneThread::~OneThread() = default;

}  // namespace host
