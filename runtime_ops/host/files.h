// Files and folders that are complete or absent, names that stay in their folder, and the lock of a run's folder.
#pragma once

#include <filesystem>
#include <string>

#include "errors.h"

namespace host {

namespace fs = std::filesystem;

// Refused unless `name` is a relative path that stays below a folder, by its letters.
void check_name(const std::string& name);

// The path of `name` in `folder`; Refused if it, or a link on its way, leads outside.
fs::path inside(const fs::path& folder, const std::string& name);

// The bytes of a plain file; Refused if it is another thing, larger than `most_bytes`, or cannot be read.
std::string read_plain(const fs::path& path, size_t most_bytes);

// Refused as in `read_plain`.
std::string sha256_file(const fs::path& path);

// Writes a whole file and waits for the disk; Failure if it cannot.
void write_file(const fs::path& path, const std::string& content);
void fsync_path(const fs::path& path);

// A folder under another name, which takes the name `target` by `commit`, in the place of what was there.
class AtomicFolder {
 public:
  // With `marker`, a folder that lacks this file and is not empty is never replaced.
  explicit AtomicFolder(const fs::path& target, const std::string& marker = "");
  ~AtomicFolder();
  AtomicFolder(const AtomicFolder&) = delete;
  AtomicFolder& operator=(const AtomicFolder&) = delete;

  const fs::path& path() const { return partial_; }
  void commit();

 private:
  fs::path target_, partial_;
};

// Holds a run's folder while it lives, as `ondevice` does; Failure if another process holds it.
class RunLock {
 public:
  explicit RunLock(const fs::path& folder);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  int file_ = -1;
};

// Failure if no run can be written there; makes nothing.
void check_place(const fs::path& folder);

}  // namespace host
