#include "run.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <optional>

#include "adapter.h"
#include "checkpoint.h"
#include "manifest.h"
#include "rows.h"
#include "session.h"

namespace host {

namespace {

constexpr double kFirstShare = 0.2, kSavingShare = 0.05;
volatile std::sig_atomic_t stopped_by = 0;

const char* signal_name() {
  if (stopped_by == SIGINT) return "SIGINT";
  return stopped_by == SIGTERM ? "SIGTERM" : "SIGHUP";
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Linear warmup to the peak, then constant, linear or cosine decay to 0: the same arithmetic as `ondevice`.
double rate_at(const Options& options, double peak, int64_t step) {
  if (step < options.warmup_steps) return peak * static_cast<double>(step + 1) / static_cast<double>(options.warmup_steps + 1);
  const auto span = static_cast<double>(std::max<int64_t>(1, options.steps - 1 - options.warmup_steps));
  const double done = std::min(1.0, static_cast<double>(step - options.warmup_steps) / span);
  if (options.schedule == "constant") return peak;
  const double left = options.schedule == "linear" ? 1.0 - done : 0.5 * (1.0 + std::cos(M_PI * done));
  return peak * (0.0 + (1.0 - 0.0) * left);
}

class Run {
 public:
  explicit Run(const Options& given)
      : options_(given),
        manifest_(read_manifest(given.artifact)),
        rows_(read_rows(given.data, manifest_.lengths.back(), manifest_.vocab)),
        batches_(rows_, manifest_.batch_size, manifest_.lengths, manifest_.seed),
        peak_(given.learning_rate > 0 ? given.learning_rate : manifest_.learning_rate),
        checkpoints_(manifest_, given.out, identity()) {
    if (options_.epochs > 0) {
      options_.steps = std::max<int64_t>(1, static_cast<int64_t>(std::ceil(options_.epochs * batches_.steps_per_epoch() - 1e-9)));
    }
    if (options_.warmup_steps >= options_.steps) {
      throw Failure(Kind::kConfig, "the warmup must end before the run does",
                    "0 <= --warmup-steps < " + std::to_string(options_.steps), std::to_string(options_.warmup_steps),
                    "fewer warmup steps, or more steps");
    }
    if (!(peak_ > 0)) throw Failure(Kind::kConfig, "a learning rate must be positive", "", number_text(peak_));
  }

  Json plan() {
    check_place(options_.out);
    check_folder();
    Json values = Json::object({{"fits", true}, {"steps", options_.steps}, {"batch_size", manifest_.batch_size}});
    values.set("rows", static_cast<int64_t>(rows_.rows.size()));
    values.set("unused_rows", rows_.left_out_rows());
    values.set("learning_rate", peak_);
    values.set("out", options_.out.string());
    values.set("quantize", manifest_.quantize);
    values.set("kernels", manifest_.fused() ? "fused" : "stock");
    return values;
  }

  Json train() {
    RunLock lock(options_.out);
    check_folder();
    Session session(manifest_);
    if (options_.overwrite) checkpoints_.clear();
    std::vector<std::string> warnings;
    std::optional<Restored> restored;
    if (options_.resume && !options_.overwrite) {
      restored = checkpoints_.restore(session, [&](const std::string& text) { warnings.push_back(text); });
    }
    done_ = restored ? restored->step : 0;
    saved_ = restored ? restored->step : -1;
    const bool goes_on = options_.resume && !options_.overwrite;
    EventLog log(options_.out, goes_on ? done_ : -1, [this](const Json& event) { show(event); });
    head(log, restored);
    for (const std::string& text : warnings) log.write("warning", {{"message", text}, {"step", done_}});
    try {
      steps(log, session);
    } catch (const Failure& failure) {
      log.write("error", {{"step", done_}, {"error", Json::object({{"error", failure.name()},
                                                                    {"message", failure.what()},
                                                                    {"exit_code", failure.exit_code()}})}});
      log.sync();
      throw;
    }
    save_adapter(manifest_, session.adapter(), options_.out / "adapter");
    return result(log.history());
  }

 private:
  Json identity() const {
    return Json::object({{"model", manifest_.model_sha256},
                         {"seed", manifest_.seed},
                         {"artifact", manifest_.files.at(manifest_.program)},
                         {"learning_rate", peak_},
                         {"host", "native"},
                         {"data", Json::object({{"batch_size", manifest_.batch_size}})},
                         {"encoded", Json::object({{"rows", rows_.sha256()}})}});
  }

  void check_folder() const {
    if (options_.overwrite) return;
    if (options_.resume) {
      checkpoints_.check(options_.steps);
      return;
    }
    std::error_code error;
    const bool has_log = fs::file_size(options_.out / "events.jsonl", error) > 0 && !error;
    if (!has_log && checkpoints_.paths().empty()) return;
    throw Failure(Kind::kCheckpoint, options_.out.string() + " already holds a run", "", "",
                  "--resume goes on with it, --overwrite deletes it, --out names another folder");
  }

  // The first line that this process adds to the log.
  void head(EventLog& log, const std::optional<Restored>& restored) const {
    if (!log.is_new()) {
      log.write("resume", {{"step", done_},
                           {"steps", options_.steps},
                           {"backend", "executorch"},
                           {"checkpoint", restored ? restored->name : ""},
                           {"changed", Json::object()}});
      return;
    }
    Json left_out = Json::object(), unread = Json::object();
    for (const auto& [reason, count] : rows_.left_out) left_out.set(reason, count);
    for (const auto& [name, count] : rows_.unread) unread.set(name, count);
    const Json train = Json::object({{"steps", options_.steps},
                                     {"schedule", options_.schedule},
                                     {"warmup_steps", options_.warmup_steps},
                                     {"batch_size", manifest_.batch_size},
                                     {"seed", manifest_.seed},
                                     {"out", options_.out.string()}});
    const Json data = Json::object({{"sequences", static_cast<int64_t>(rows_.rows.size())},
                                    {"left_out", left_out},
                                    {"max_length_tokens", manifest_.lengths.back()},
                                    {"notes", Json::list()},
                                    {"unread", unread}});
    const Json config = Json::object({{"model", Json::object({{"source", manifest_.source}})},
                                      {"data", Json::object({{"path", options_.data.string()}})},
                                      {"method", manifest_.method},
                                      {"train", train}});
    log.write("start", {{"schema", 1},
                        {"config", config},
                        {"identity", checkpoints_.identity()},
                        {"seed", manifest_.seed},
                        {"backend", "executorch"},
                        {"generator_backend", "none"},
                        {"model_source", manifest_.source},
                        {"model_sha256", manifest_.model_sha256},
                        {"steps", options_.steps},
                        {"said", Json::list()},
                        {"decided", Json::object()},
                        {"environment", Json::object({{"executorch", ONDEVICE_EXECUTORCH_VERSION}, {"host", "native"}})},
                        {"data", Json::object({{"train", data}})}});
  }

  void steps(EventLog& log, Session& session) {
    saved_at_s_ = seconds();
    while (done_ < options_.steps && stopped_by == 0) {
      step(log, session);
      if (done_ == options_.steps || done_ % options_.checkpoint_every == 0 || is_save_due()) save(log, session);
    }
    if (stopped_by != 0) {
      if (done_ > 0 && saved_ != done_) save(log, session);
      log.write("interrupt", {{"step", done_}, {"signal", signal_name()}});
    } else {
      const History& history = log.history();
      log.write("finish", {{"steps", done_},
                           {"first_loss", history.first_loss()},
                           {"final_loss", history.final_loss()},
                           {"step_time_s", history.step_seconds()},
                           {"tokens_per_s", history.tokens_a_second()},
                           {"peak_memory_bytes", history.peak_bytes},
                           {"reason", ""}});
    }
    log.sync();
  }

  void step(EventLog& log, Session& session) {
    const Batch batch = batches_.at(done_);
    const double rate = rate_at(options_, peak_, done_);
    const double began = seconds();
    const double loss = session.step(batch, done_, rate);
    const double taken = seconds() - began;
    const auto tokens = static_cast<int64_t>(batch.ids.size());
    log.write("step", {{"step", done_},
                       {"loss", loss},
                       {"losses", Json::list({loss})},
                       {"projected_gradients", Json::list()},
                       {"learning_rate", rate},
                       {"tokens", tokens},
                       {"step_time_s", taken},
                       {"tokens_per_s", static_cast<double>(tokens) / taken},
                       {"peak_memory_bytes", peak_bytes()},
                       {"peak_device_bytes", Json()},
                       {"eta_s", taken * static_cast<double>(options_.steps - done_ - 1)},
                       {"overlap", Json()},
                       {"preferences", Json()}});
    ++done_;
  }

  bool is_save_due() const {
    if (options_.checkpoint_minutes <= 0) return false;
    const double share = saved_ < 0 ? kFirstShare : 1.0;
    return seconds() - saved_at_s_ >= std::max(options_.checkpoint_minutes * 60 * share, save_time_s_ / kSavingShare);
  }

  void save(EventLog& log, const Session& session) {
    saved_at_s_ = seconds();
    log.sync();  // first the log: a checkpoint must not be of a step that the log has lost
    const auto [path, bytes] = checkpoints_.save(done_, session);
    save_time_s_ = seconds() - saved_at_s_;
    saved_ = done_;
    log.write("checkpoint",
              {{"step", done_}, {"path", path.filename().string()}, {"size_bytes", bytes}, {"seconds_s", save_time_s_}});
  }

  // Progress for people, on standard error.
  void show(const Json& event) const {
    const std::string& kind = event.text("event");
    if (kind == "warning") std::fprintf(stderr, "warning: %s\n", event.text("message").c_str());
    if (options_.json || options_.quiet || kind != "step") return;
    const char end = isatty(STDERR_FILENO) != 0 && event.integer("step") + 1 < options_.steps ? '\r' : '\n';
    std::fprintf(stderr, "step %lld of %lld  loss %.4f  %.2f s a step  %.0f s left%c",
                 static_cast<long long>(event.integer("step") + 1), static_cast<long long>(options_.steps),
                 event.real("loss"), event.real("step_time_s"), event.real("eta_s"), end);
  }

  Json result(const History& history) const {
    Json values = Json::object({{"steps", done_},
                                {"first_loss", history.first_loss()},
                                {"final_loss", history.final_loss()},
                                {"step_time_s", history.step_seconds()},
                                {"tokens_per_s", history.tokens_a_second()},
                                {"peak_memory_bytes", history.peak_bytes},
                                {"interrupted", stopped_by != 0},
                                {"adapter", (options_.out / "adapter").string()}});
    values.set("rows", static_cast<int64_t>(rows_.rows.size()));
    values.set("unused_rows", rows_.left_out_rows());
    return values;
  }

  Options options_;
  Manifest manifest_;
  Rows rows_;
  Batches batches_;
  double peak_;
  Checkpoints checkpoints_;
  int64_t done_ = 0, saved_ = -1;
  double saved_at_s_ = 0, save_time_s_ = 0;
};

void receive(int number) {
  if (stopped_by != 0) _exit(kInterrupted);  // the second signal: at once
  stopped_by = number;
}

}  // namespace

void take_signals() {
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action {};
    sigaction(number, nullptr, &action);
    if (action.sa_handler == SIG_IGN) continue;  // as `nohup` asks
    action = {};
    action.sa_handler = receive;
    action.sa_flags = SA_RESTART;
    sigaction(number, &action, nullptr);
  }
}

Json run(const Options& options) {
  Run made(options);
  return options.dry_run ? made.plan() : made.train();
}

}  // namespace host
