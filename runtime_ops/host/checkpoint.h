// Checkpoints as `ondevice` writes them: a folder a step, renamed when it is written, so that a name means a whole one.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "session.h"

namespace host {

struct Restored {
  int64_t step = 0;
  std::string name;
};

class Checkpoints {
 public:
  // `identity`: the settings that make two runs the same run.
  Checkpoints(const Manifest& manifest, const fs::path& folder, Json identity);

  // All by step, whole or not.
  std::vector<std::pair<int64_t, fs::path>> paths() const;
  // Writes one after `step` steps, then deletes all but the two newest; its path and size in bytes.
  std::pair<fs::path, int64_t> save(int64_t step, const Session& session) const;
  // Puts the newest intact one into the session; nothing if there is none. `warn` hears of each damaged one. Failure if
  // it is of another run, or all are damaged.
  std::optional<Restored> restore(Session& session, const std::function<void(const std::string&)>& warn) const;
  // Failure if the newest one is of another run.
  void check(int64_t steps) const;
  void clear() const;
  const Json& identity() const { return identity_; }

 private:
  Json read_meta(const fs::path& path) const;
  void check_identity(const fs::path& path, const Json& meta) const;
  void remove_leftovers() const;
  void load(const fs::path& path, const Json& meta, Session& session) const;

  const Manifest& manifest_;
  fs::path folder_;
  Json identity_;
};

}  // namespace host
