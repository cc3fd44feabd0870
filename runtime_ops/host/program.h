// The functions of an artifact in the ExecuTorch runtime: given tensors by port, they give tensors by port.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "manifest.h"

namespace host {

using Floats = std::vector<float>;

// A tensor that a call reads, in somebody else's memory.
struct View {
  void* data = nullptr;
  size_t bytes = 0;
};

// One program file and those of its functions that were called, loaded.
class ProgramFile {
 public:
  // Failure if the runtime cannot load it.
  explicit ProgramFile(const fs::path& path);
  ~ProgramFile();

  // Runs a function; gives its outputs, float32, in their order. Failure if it does not fit the manifest.
  std::vector<Floats> call(const std::string& name, const Function& function, const std::vector<View>& inputs);

 private:
  struct Loaded;
  Loaded& loaded(const std::string& name, const Function& function);

  std::string path_;
  struct Opened;
  std::unique_ptr<Opened> opened_;
  std::map<std::string, std::unique_ptr<Loaded>> loaded_;
};

// Calls an artifact's functions. One that every layer has its own of is closed after the call, because its weights were
// packed into memory when it was loaded.
class Program {
 public:
  // Failure if the runtime lacks kernels that the functions need; it names them.
  explicit Program(const Manifest& manifest);
  std::vector<Floats> call(const std::string& name, int64_t layer, const std::vector<View>& inputs);

 private:
  const Manifest& manifest_;
  ProgramFile file_;
};

// Lets kernels compute in the calling thread while it lives.
class OneThread {
 public:
  OneThread();
  ~OneThread();

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
};

size_t bytes_of(const Port& port);

}  // namespace host
