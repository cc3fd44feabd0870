#include "files.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <sstream>

#include "sha256.h"

namespace host {

namespace {

constexpr size_t kMostNameLetters = 1024;

[[noreturn]] void cannot_write(const fs::path& path) {
  const bool full = errno == ENOSPC || errno == EDQUOT || errno == EFBIG;
  throw Failure(Kind::kStorage, "cannot write " + path.string(), "", std::strerror(errno),
                full ? "free some space; what was there before is unharmed"
                     : "choose a folder that exists and that you may write to");
}

// An open plain file; Refused if it is another thing. A pipe would wait for its writer, for ever.
class Plain {
 public:
  explicit Plain(const fs::path& path) : file_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    if (file_ < 0) throw Refused(std::strerror(errno));
    struct stat status;
    if (fstat(file_, &status) != 0 || !S_ISREG(status.st_mode)) {
      close(file_);
      throw Refused("not a plain file");
    }
    size = static_cast<size_t>(status.st_size);
  }
  ~Plain() { close(file_); }

  size_t read_some(char* out, size_t most) {
    const ssize_t got = read(file_, out, most);
    if (got < 0) throw Refused(std::strerror(errno));
    return static_cast<size_t>(got);
  }

  size_t size = 0;

 private:
  int file_;
};

}  // namespace

void check_name(const std::string& name) {
  const std::string shown = quoted(name.substr(0, 80));
  bool outside = name.empty() || name.size() > kMostNameLetters || name.front() == '/' || name.back() == '/';
  std::stringstream parts(name);
  for (std::string part; std::getline(parts, part, '/');) outside |= part.empty() || part == "." || part == "..";
  if (outside) throw Refused("a file's name leads outside the folder: " + shown);
  for (const char letter : name) {
    const auto code = static_cast<unsigned char>(letter);
    if (code < 0x20 || code == 0x7f || code == '\\') throw Refused("a file's name has letters that no name has: " + shown);
  }
}

fs::path inside(const fs::path& folder, const std::string& name) {
  check_name(name);
  std::error_code error;
  const fs::path home = fs::weakly_canonical(folder, error), place = fs::weakly_canonical(folder / name, error);
  const fs::path relative = place.lexically_relative(home);
  if (error || relative.empty() || *relative.begin() == "..") {
    throw Refused("a link leads outside the folder: " + quoted(name.substr(0, 80)));
  }
  return folder / name;
}

std::string read_plain(const fs::path& path, size_t most_bytes) {
  Plain file(path);
  if (file.size > most_bytes) throw Refused("it is larger than " + std::to_string(most_bytes) + " bytes");
  std::string content(file.size, '\0');
  for (size_t place = 0; place < content.size();) {
    const size_t got = file.read_some(content.data() + place, content.size() - place);
    if (got == 0) throw Refused("it became shorter while it was read");
    place += got;
  }
  return content;
}

std::string sha256_file(const fs::path& path) {
  Plain file(path);
  Sha256 digest;
  std::string part(size_t{1} << 20, '\0');
  while (const size_t got = file.read_some(part.data(), part.size())) digest.update(part.data(), got);
  return digest.hex();
}

void fsync_path(const fs::path& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) cannot_write(path);
  const int outcome = fsync(file);
  close(file);
  if (outcome != 0) cannot_write(path);
}

void write_file(const fs::path& path, const std::string& content) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) cannot_write(path);
  for (size_t place = 0; place < content.size();) {
    const ssize_t wrote = write(file, content.data() + place, content.size() - place);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      close(file);
      cannot_write(path);
    }
    place += static_cast<size_t>(wrote);
  }
  const int outcome = fsync(file);
  close(file);
  if (outcome != 0) cannot_write(path);
}

AtomicFolder::AtomicFolder(const fs::path& target, const std::string& marker) {
  std::error_code error;
  target_ = fs::weakly_canonical(target, error);
  if (fs::exists(target_) && !fs::is_directory(target_)) {
    throw Failure(Kind::kStorage, target_.string() + " is a file", "a folder or a free name", "", "choose another name");
  }
  if (fs::is_directory(target_) && !marker.empty() && !fs::exists(target_ / marker) && !fs::is_empty(target_, error)) {
    throw Failure(Kind::kStorage, target_.string() + " holds other files and would be replaced",
                  "an empty folder, or one with " + marker, "", "choose another name, or empty the folder yourself");
  }
  std::random_device random;
  const std::string end = ".partial-" + std::to_string(getpid()) + "-" + std::to_string(random());
  partial_ = target_.parent_path() / ("." + target_.filename().string() + end);
  fs::create_directories(target_.parent_path(), error);
  if (mkdir(partial_.c_str(), 0777) != 0) cannot_write(target_);
}

AtomicFolder::~AtomicFolder() {
  std::error_code error;
  fs::remove_all(partial_, error);
}

void AtomicFolder::commit() {
  // Flushed before the rename, which may reach the disk first.
  for (const auto& entry : fs::recursive_directory_iterator(partial_)) fsync_path(entry.path());
  fsync_path(partial_);
  if (!fs::exists(target_)) {
    if (rename(partial_.c_str(), target_.c_str()) != 0) cannot_write(target_);
  } else if (syscall(SYS_renameat2, AT_FDCWD, partial_.c_str(), AT_FDCWD, target_.c_str(), RENAME_EXCHANGE) != 0) {
    // A file system that cannot swap two names: the old content has another name between the two renames.
    const fs::path old = partial_.string() + "-old";
    if (rename(target_.c_str(), old.c_str()) != 0 || rename(partial_.c_str(), target_.c_str()) != 0) {
      cannot_write(target_);
    }
    std::error_code error;
    fs::remove_all(old, error);
  }
  fsync_path(target_.parent_path());
}

void check_place(const fs::path& folder) {
  fs::path place = fs::absolute(folder);
  while (!fs::exists(place) && place != place.parent_path()) place = place.parent_path();
  if (fs::is_directory(place) && access(place.c_str(), W_OK) == 0) return;
  throw Failure(Kind::kStorage, folder.string() + ": the run's folder cannot be written",
                "a folder, or a free name in one", place.string() + " cannot be written into",
                "--out names another folder");
}

RunLock::RunLock(const fs::path& folder) {
  check_place(folder);
  const fs::path path = folder / "run.lock";
  std::error_code error;
  fs::create_directories(folder, error);
  file_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (file_ < 0) cannot_write(folder);
  if (flock(file_, LOCK_EX | LOCK_NB) != 0) {
    char holder[32] = "";
    const ssize_t got = pread(file_, holder, sizeof holder - 1, 0);
    close(file_);
    std::string process(holder, got > 0 ? static_cast<size_t>(got) : 0);
    process.erase(process.find_last_not_of("\n ") + 1);
    throw Failure(Kind::kBusy, folder.string() + ": another run holds this folder (process " + process + ")", "", "",
                  "wait for it, or choose another --out");
  }
  const std::string number = std::to_string(getpid()) + "\n";
  if (ftruncate(file_, 0) != 0 || pwrite(file_, number.data(), number.size(), 0) < 0) cannot_write(path);
}

RunLock::~RunLock() {
  if (ftruncate(file_, 0) != 0) return;  // the number only says who holds it
  flock(file_, LOCK_UN);
  close(file_);
}

}  // namespace host
