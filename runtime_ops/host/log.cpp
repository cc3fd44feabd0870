#include "log.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <numeric>

namespace host {

namespace {

constexpr const char* kFile = "events.jsonl";
constexpr size_t kMostBytes = size_t{1} << 32;

Failure cannot_write(const fs::path& path) {
  return {Kind::kStorage, path.string() + ": the event log cannot be written", "", std::strerror(errno),
          "free some space or choose another --out; the last checkpoint is intact"};
}

}  // namespace

void History::add(const Json& event) {
  const Json* kind = event.find("event");
  if (kind == nullptr || kind->as_text() != "step") return;
  losses.push_back(event.real("loss"));
  seconds.push_back(event.real("step_time_s"));
  tokens += event.integer("tokens");
  peak_bytes = std::max(peak_bytes, event.integer("peak_memory_bytes"));
}

double History::first_loss() const { return losses.empty() ? std::nan("") : losses.front(); }

double History::final_loss() const {
  if (losses.empty()) return std::nan("");
  const auto last = static_cast<int64_t>(std::max<size_t>(1, losses.size() / 10));
  return std::accumulate(losses.end() - last, losses.end(), 0.0) / static_cast<double>(last);
}

double History::step_seconds() const {
  if (seconds.empty()) return 0;
  std::vector<double> sorted = seconds;
  std::sort(sorted.begin(), sorted.end());
  const size_t middle = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

double History::tokens_a_second() const {
  const double total = std::accumulate(seconds.begin(), seconds.end(), 0.0);
  return total > 0 ? static_cast<double>(tokens) / total : 0;
}

EventLog::EventLog(const fs::path& folder, int64_t from_step, Sink sink) : path_(folder / kFile), sink_(std::move(sink)) {
  if (from_step >= 0) read_until(from_step);
  const int mode = is_new_ ? O_TRUNC : 0;
  file_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | mode, 0644);
  if (file_ < 0) throw cannot_write(path_);
}

EventLog::~EventLog() { close(file_); }

// Keeps what is before the first event of `step`, without an unfinished last line; the rest is run again.
void EventLog::read_until(int64_t step) {
  if (!fs::exists(path_)) return;
  const std::string content = read_plain(path_, kMostBytes);
  size_t kept = 0;
  for (size_t begin = 0; begin < content.size();) {
    const size_t end = content.find('\n', begin);
    if (end == std::string::npos) break;
    try {
      const Json event = parse_json(content.substr(begin, end - begin));
      const bool is_step = event.text("event") == "step";
      if (is_step && event.integer("step") >= step) break;
      history_.add(event);
      kept = end + 1;
    } catch (const Refused&) {
      // A damaged line in the middle stays, as `ondevice` leaves it.
    }
    begin = end + 1;
  }
  is_new_ = kept == 0;
  if (kept < content.size() && truncate(path_.c_str(), static_cast<off_t>(kept)) != 0) throw cannot_write(path_);
}

void EventLog::write(const std::string& kind, std::vector<Json::Member> fields) {
  const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  std::vector<Json::Member> members{{"event", kind}, {"time_s", now}};
  members.insert(members.end(), fields.begin(), fields.end());
  const Json event = Json::object(std::move(members));
  const std::string line = event.dump() + "\n";
  const off_t before = lseek(file_, 0, SEEK_END);
  for (size_t place = 0; place < line.size();) {
    const ssize_t wrote = ::write(file_, line.data() + place, line.size() - place);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      const Failure failure = cannot_write(path_);
      if (ftruncate(file_, before) != 0) throw failure;  // half a line would make the next one unreadable, too
      throw failure;
    }
    place += static_cast<size_t>(wrote);
  }
  history_.add(event);
  sink_(event);
}

void EventLog::sync() {
  if (fsync(file_) != 0) throw cannot_write(path_);
}

// The system's other figure, of getrusage, begins with that of the process that started this one.
int64_t peak_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::atoll(line.c_str() + 6) * 1024;
  }
  return 0;
}

}  // namespace host
