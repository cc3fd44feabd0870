#include "tensor_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <stdexcept>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "json.h"
#include "mlx/allocator.h"

namespace ondevice {
namespace {

mx::Dtype type_of(const std::string& name, const std::string& where) {
  if (name == "F32") return mx::float32;
  if (name == "F16") return mx::float16;
  if (name == "BF16") return mx::bfloat16;
  if (name == "U32") return mx::uint32;
  if (name == "I64") return mx::int64;
  if (name == "I32") return mx::int32;
  throw std::runtime_error(where + ": expected F32, F16, BF16, U32, I32 or I64, received " + name);
}

}  // namespace

TensorFile::TensorFile(const std::string& path) : path_(path) {
  file_ = ::open(path.c_str(), O_RDONLY);
  if (file_ < 0) throw std::runtime_error(path + ": " + std::strerror(errno));
  struct stat status {};
  ::fstat(file_, &status);
  auto size = static_cast<uint64_t>(status.st_size);
  uint64_t length = 0;
  if (::pread(file_, &length, 8, 0) != 8 || length > size - 8) {
    ::close(file_);
    throw std::runtime_error(path + " is damaged: its header is longer than the file");
  }
  std::string header(length, ' ');
  fill(header.data(), length, 8, "the header");
  size_t end = 8 + length;
  Json entries = parse_json(header, path);
  for (const auto& [name, value] : entries.items()) {
    if (name == "__metadata__") continue;
    mx::Shape shape;
    for (const Json& item : value.at("shape")) shape.push_back(item);
    size_t start = value.at("data_offsets").at(0), stop = value.at("data_offsets").at(1);
    size_t rows = shape.empty() ? 1 : static_cast<size_t>(shape[0]);
    mx::Dtype type = type_of(value.at("dtype"), path + ": '" + name + "'");
    entries_.emplace(name, Entry{type, shape, 8 + length + start, rows == 0 ? 0 : (stop - start) / rows});
    end = std::max(end, 8 + length + stop);
  }
  if (end > size) {
    ::close(file_);
    throw std::runtime_error(path + " is truncated: " + std::to_string(size) + " bytes of " + std::to_string(end));
  }
}

TensorFile::~TensorFile() {
  if (file_ >= 0) ::close(file_);
}

std::vector<std::string> TensorFile::names() const {
  std::vector<std::string> found;
  for (const auto& item : entries_) found.push_back(item.first);
  return found;
}

mx::Shape TensorFile::shape(const std::string& name) const { return entry(name).shape; }

const TensorFile::Entry& TensorFile::entry(const std::string& name) const {
  auto found = entries_.find(name);
  if (found == entries_.end()) throw std::runtime_error(path_ + " has no tensor '" + name + "'");
  return found->second;
}

void TensorFile::fill(char* into, size_t count, size_t offset, const std::string& name) const {
  while (count > 0) {
    ssize_t done = ::pread(file_, into, count, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) {
      std::string reason = done < 0 ? std::strerror(errno) : "the file ends";
      throw std::runtime_error(path_ + " cannot be read any more: " + reason + " within '" + name + "'");
    }
    into += done;
    offset += static_cast<size_t>(done);
    count -= static_cast<size_t>(done);
  }
}

mx::array TensorFile::read(const std::string& name, int low, int high) const {
  const Entry& found = entry(name);
  mx::Shape shape = found.shape;
  if (high >= 0) shape.at(0) = high - low;
  size_t count = found.row_bytes * (shape.empty() ? 1 : static_cast<size_t>(shape[0]));
  mx::allocator::Data data = mx::allocator::malloc(count);
  fill(static_cast<char*>(data.buffer().raw_ptr()), count, found.start + static_cast<size_t>(low) * found.row_bytes, name);
  return mx::array(std::move(data), shape, found.type);
}

mx::array TensorFile::rows(const std::string& name, const std::vector<int>& numbers) const {
  const Entry& found = entry(name);
  mx::Shape shape = found.shape;
  shape.at(0) = static_cast<int>(numbers.size());
  mx::allocator::Data data = mx::allocator::malloc(found.row_bytes * numbers.size());
  char* into = static_cast<char*>(data.buffer().raw_ptr());
  for (int number : numbers) {
    fill(into, found.row_bytes, found.start + static_cast<size_t>(number) * found.row_bytes, name);
    into += found.row_bytes;
  }
  return mx::array(std::move(data), shape, found.type);
}

void TensorFile::announce() const {
#if defined(__APPLE__)
  struct radvisory advice {};
  struct stat status {};
  ::fstat(file_, &status);
  advice.ra_count = static_cast<int>(std::min<off_t>(status.st_size, INT32_MAX));
  ::fcntl(file_, F_RDADVISE, &advice);
#elif defined(POSIX_FADV_WILLNEED)
  ::posix_fadvise(file_, 0, 0, POSIX_FADV_WILLNEED);
#endif
}

}  // namespace ondevice
