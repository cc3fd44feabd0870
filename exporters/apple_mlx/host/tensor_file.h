// Tensors of a safetensors file, read straight into MLX's memory when they are asked for, whole or some rows of them.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "mlx/mlx.h"

namespace ondevice {

namespace mx = mlx::core;

class TensorFile {
 public:
  // Opens the file and checks that it is whole; throws std::runtime_error that names it.
  explicit TensorFile(const std::string& path);
  ~TensorFile();
  TensorFile(const TensorFile&) = delete;
  TensorFile& operator=(const TensorFile&) = delete;

  std::vector<std::string> names() const;
  mx::Shape shape(const std::string& name) const;
  // A tensor, or its rows `low` to `high` (-1 is all).
  mx::array read(const std::string& name, int low = 0, int high = -1) const;
  // The rows of these numbers.
  mx::array rows(const std::string& name, const std::vector<int>& numbers) const;
  // The file is needed soon: the system reads it beside the computation into its own cache.
  void announce() const;

 private:
  struct Entry {
    mx::Dtype type;
    mx::Shape shape;
    size_t start;
    size_t row_bytes;
  };

  const Entry& entry(const std::string& name) const;
  void fill(char* into, size_t count, size_t offset, const std::string& name) const;

  std::string path_;
  int file_ = -1;
  std::map<std::string, Entry> entries_;
};

}  // namespace ondevice
