#include "safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace host {

namespace {

constexpr size_t kLengthBytes = 8, kMostHeaderBytes = size_t{32} << 20, kMostDimensions = 16;
constexpr int64_t kMostElements = int64_t{1} << 62;

int bits_of(const std::string& dtype) {
  static const std::map<std::string, int> kBits = {{"F64", 64}, {"F32", 32}, {"F16", 16}, {"BF16", 16}, {"I64", 64},
                                                   {"I32", 32}, {"I16", 16}, {"I8", 8},   {"U64", 64},  {"U32", 32},
                                                   {"U16", 16}, {"U8", 8},   {"BOOL", 8}};
  const auto found = kBits.find(dtype);
  return found == kBits.end() ? 0 : found->second;
}

Place place_of(const std::string& name, const Json& entry, size_t start, size_t size) {
  const std::string shown = "tensor " + quoted(name.substr(0, 80));
  if (entry.type() != Json::kObject) throw Refused(shown + " has no dtype, shape or data_offsets");
  Place place;
  place.dtype = entry.text("dtype");
  place.shape = entry.integers("shape");
  const std::vector<int64_t> offsets = entry.integers("data_offsets");
  const int bits = bits_of(place.dtype);
  if (bits == 0) throw Refused(shown + " is of an unknown dtype: " + place.dtype.substr(0, 20));
  if (place.shape.size() > kMostDimensions || offsets.size() != 2 || offsets[0] < 0 || offsets[1] < offsets[0]) {
    throw Refused(shown + ": shape or data_offsets are wrong");
  }
  const auto bytes = static_cast<uint64_t>(elements(place.shape));
  const auto length = static_cast<uint64_t>(offsets[1] - offsets[0]);
  if (length % (bits / 8) != 0 || length / (bits / 8) != bytes) {
    throw Refused(shown + " has another size than its shape " + shape_text(place.shape));
  }
  if (static_cast<uint64_t>(offsets[1]) > size - start) throw Refused("truncated: " + shown + " ends behind the file");
  place.start = start + static_cast<size_t>(offsets[0]);
  place.end = start + static_cast<size_t>(offsets[1]);
  return place;
}

std::map<std::string, Place> read_header(const char* data, size_t size) {
  uint64_t length = 0;
  if (size >= kLengthBytes) std::memcpy(&length, data, kLengthBytes);
  if (length == 0 || length > size - std::min(size, kLengthBytes)) {
    throw Refused("truncated, or another kind of file: a header of " + std::to_string(length) + " bytes in a file of " +
                  std::to_string(size));
  }
  if (length > kMostHeaderBytes) throw Refused("its header is larger than 32 MiB");
  const Json header = parse_json(std::string(data + kLengthBytes, length), kMostHeaderBytes);
  if (header.type() != Json::kObject) throw Refused("its header is not an object");
  std::map<std::string, Place> places;
  std::vector<const Place*> in_order;
  for (const auto& [name, entry] : header.members()) {
    if (name == "__metadata__") continue;
    const auto [added, is_new] = places.emplace(name, place_of(name, entry, kLengthBytes + length, size));
    if (!is_new) throw Refused("tensor " + quoted(name) + " is there twice");
    in_order.push_back(&added->second);
  }
  std::sort(in_order.begin(), in_order.end(), [](auto* a, auto* b) { return a->start < b->start; });
  for (size_t i = 1; i < in_order.size(); ++i) {
    if (in_order[i]->start < in_order[i - 1]->end) throw Refused("a tensor begins inside another");
  }
  return places;
}

std::string with_header(std::string header, const std::vector<const Stored*>& tensors) {
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t length = header.size();
  std::string file(reinterpret_cast<const char*>(&length), kLengthBytes);
  file += header;
  for (const Stored* tensor : tensors) file.append(static_cast<const char*>(tensor->data), tensor->bytes);
  return file;
}

Json entry_of(const Stored& tensor, int64_t& offset) {
  Json shape = Json::list();
  for (const int64_t size : tensor.shape) shape.add(size);
  const auto end = offset + static_cast<int64_t>(tensor.bytes);
  Json entry = Json::object({{"dtype", tensor.dtype}, {"shape", shape}, {"data_offsets", Json::list({offset, end})}});
  offset = end;
  return entry;
}

}  // namespace

int64_t elements(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) {
    if (size < 0 || (size > 0 && count > kMostElements / size)) throw Refused("a shape is too large");
    count *= size;
  }
  return count;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

MappedTensors::MappedTensors(const fs::path& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) throw Refused(std::strerror(errno));
  struct stat status;
  const bool plain = fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  size_ = plain ? static_cast<size_t>(status.st_size) : 0;
  // Private: a kernel that wrote into a weight would change this process's copy, never the file.
  void* map = size_ > 0 ? mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0) : MAP_FAILED;
  close(file);
  if (!plain) throw Refused("not a plain file");
  if (map == MAP_FAILED) throw Refused(size_ == 0 ? "it is empty" : std::strerror(errno));
  map_ = static_cast<char*>(map);
  try {
    places_ = read_header(map_, size_);
  } catch (...) {
    munmap(map_, size_);
    throw;
  }
}

MappedTensors::~MappedTensors() { munmap(map_, size_); }

const Place* MappedTensors::find(const std::string& name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? nullptr : &found->second;
}

std::string tensors_file(std::map<std::string, Stored> tensors) {
  Json header = Json::object();
  int64_t offset = 0;
  std::vector<const Stored*> in_order;
  for (const int bits : {64, 32, 16, 8}) {
    for (const auto& [name, tensor] : tensors) {
      if (bits_of(tensor.dtype) != bits) continue;
      header.set(name, entry_of(tensor, offset));
      in_order.push_back(&tensor);
    }
  }
  return with_header(header.dump(), in_order);
}

std::string adapter_file(const std::map<std::string, Stored>& tensors, const Json& metadata) {
  Json header = Json::object({{"__metadata__", metadata}});
  int64_t offset = 0;
  std::vector<const Stored*> in_order;
  for (const auto& [name, tensor] : tensors) {
    header.set(name, entry_of(tensor, offset));
    in_order.push_back(&tensor);
  }
  return with_header(header.dump(-1, false, false), in_order);
}

}  // namespace host
