// Safetensors: files that are mapped or read, their headers checked, and files written as `ondevice` writes them.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "files.h"
#include "json.h"

namespace host {

struct Place {
  std::string dtype;  // F32, I8, ...
  std::vector<int64_t> shape;
  size_t start = 0, end = 0;  // bytes of the file
};

// The number of elements; Refused if 62 bits do not hold it.
int64_t elements(const std::vector<int64_t>& shape);
std::string shape_text(const std::vector<int64_t>& shape);

// The tensors of a mapped file: their memory is the file's, and the system may drop and read it again.
class MappedTensors {
 public:
  // Refused if it is not a whole safetensors file.
  explicit MappedTensors(const fs::path& path);
  ~MappedTensors();
  MappedTensors(const MappedTensors&) = delete;
  MappedTensors& operator=(const MappedTensors&) = delete;

  const Place* find(const std::string& name) const;
  const std::map<std::string, Place>& places() const { return places_; }
  char* data(const Place& place) const { return map_ + place.start; }

 private:
  char* map_ = nullptr;
  size_t size_ = 0;
  std::map<std::string, Place> places_;
};

struct Stored {
  std::string dtype;
  std::vector<int64_t> shape;
  const void* data;
  size_t bytes;
};

// A file's bytes: tensors by size of an element and by name, as a checkpoint has them.
std::string tensors_file(std::map<std::string, Stored> tensors);

// A file's bytes as the safetensors library writes them, with texts: tensors by name.
std::string adapter_file(const std::map<std::string, Stored>& tensors, const Json& metadata);

}  // namespace host
