// The log of a run, `events.jsonl`, as `ondevice` writes and reads it, and the figures of its steps.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "files.h"
#include "json.h"

namespace host {

// The steps of a run, those before a resume included.
struct History {
  std::vector<double> losses, seconds;
  int64_t tokens = 0, peak_bytes = 0;

  void add(const Json& event);
  double first_loss() const;
  double final_loss() const;   // mean of the last tenth of the steps
  double step_seconds() const;  // median
  double tokens_a_second() const;
};

class EventLog {
 public:
  using Sink = std::function<void(const Json&)>;

  // Opens the log; `from_step` at or above 0 goes on with it, cut back to the first event of that step.
  EventLog(const fs::path& folder, int64_t from_step, Sink sink);
  ~EventLog();
  EventLog(const EventLog&) = delete;
  EventLog& operator=(const EventLog&) = delete;

  void write(const std::string& kind, std::vector<Json::Member> fields);
  void sync();
  const History& history() const { return history_; }
  bool is_new() const { return is_new_; }

 private:
  void read_until(int64_t step);

  fs::path path_;
  Sink sink_;
  int file_ = -1;
  bool is_new_ = true;
  History history_;
};

// Highest resident memory of this process.
int64_t peak_bytes();

}  // namespace host
