// Errors of the host: what is wrong, expected, received, what to try. The exit codes are those of `ondevice`.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace host {

enum class Kind { kConfig, kData, kArtifact, kCheckpoint, kBusy, kTraining, kStorage };

constexpr int kInterrupted = 130;

struct Failure : std::runtime_error {
  Failure(Kind kind_, const std::string& message, std::string expected_ = "", std::string received_ = "",
          std::string hint_ = "")
      : std::runtime_error(message),
        kind(kind_),
        expected(std::move(expected_)),
        received(std::move(received_)),
        hint(std::move(hint_)) {}

  int exit_code() const {
    constexpr int kCodes[] = {2, 3, 5, 6, 7, 9, 11};
    return kCodes[static_cast<int>(kind)];
  }

  const char* name() const {
    constexpr const char* kNames[] = {"ConfigError", "DataError",     "ArtifactError", "CheckpointError",
                                      "BusyError",   "TrainingError", "StorageError"};
    return kNames[static_cast<int>(kind)];
  }

  Kind kind;
  std::string expected, received, hint;
};

// Content from outside that is damaged, of another kind or over a limit; the caller names the file.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline std::string quoted(const std::string& text) {
  return "'" + (text.size() > 200 ? text.substr(0, 200) + "..." : text) + "'";
}

}  // namespace host
