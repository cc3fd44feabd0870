// ondevice-host: trains an artifact's block program on rows of token ids, without Python.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <new>
#include <stdexcept>
#include <string>

#include "run.h"

namespace {

using host::Failure;
using host::Json;
using host::Kind;
using host::Options;

constexpr const char* kUsage = R"(Usage: ondevice-host ARTIFACT --data ROWS.jsonl [options]

Fine-tune with an exported block program (android-cpu, --method mesp), with the bits of `ondevice run`.
ROWS.jsonl has a JSON object a line: input_ids, and labels (-100 for a token that is not trained on) or a mask.

  -d, --data FILE            rows of token ids; `ondevice run ARTIFACT --data FILE --tokens ROWS.jsonl` writes them
  -o, --out FOLDER           events, checkpoints and the adapter (default: runs/default)
  -n, --steps N              steps (default: 100)
      --epochs X             passes over the rows, instead of a number of steps
      --learning-rate X      (default: the artifact's)
      --schedule NAME        constant, linear or cosine (default: constant)
      --warmup-steps N       steps of linear warmup
      --checkpoint-every N   steps between two checkpoints (default: 100)
      --checkpoint-minutes X also after so many minutes (default: 5; 0: only by steps)
      --resume               go on from the newest checkpoint
      --overwrite            replace the run in the folder
      --dry-run              check everything, train nothing
      --json                 print one JSON object
  -q, --quiet                print no progress
      --version              print the runtime's version

Ctrl-C lets the running step end, saves, and exits with 130. Other exit codes are those of `ondevice`.
)";

[[noreturn]] void wrong(const std::string& message, const std::string& expected, const std::string& received) {
  throw Failure(Kind::kConfig, message, expected, received, "ondevice-host --help lists the options");
}

double number(const std::string& flag, const std::string& text, double least) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(value) || value < least) {
    wrong(flag + " takes a number", "a number from " + host::number_text(least), text);
  }
  return value;
}

int64_t whole(const std::string& flag, const std::string& text, int64_t least) {
  const double value = number(flag, text, static_cast<double>(least));
  if (value != std::floor(value) || value > 1e12) wrong(flag + " takes a whole number", "a whole number", text);
  return static_cast<int64_t>(value);
}

Options parse(int count, char** words) {
  Options options;
  const std::map<std::string, std::string> short_names = {
      {"-d", "--data"}, {"-o", "--out"}, {"-n", "--steps"}, {"-q", "--quiet"}, {"-h", "--help"}};
  const std::map<std::string, bool*> switches = {{"--resume", &options.resume},
                                                 {"--overwrite", &options.overwrite},
                                                 {"--dry-run", &options.dry_run},
                                                 {"--json", &options.json},
                                                 {"--quiet", &options.quiet}};
  using Take = std::function<void(const std::string&, const std::string&)>;
  const std::map<std::string, Take> values = {
      {"--data", [&](auto&, auto& text) { options.data = text; }},
      {"--out", [&](auto&, auto& text) { options.out = text; }},
      {"--steps", [&](auto& flag, auto& text) { options.steps = whole(flag, text, 1); }},
      {"--warmup-steps", [&](auto& flag, auto& text) { options.warmup_steps = whole(flag, text, 0); }},
      {"--checkpoint-every", [&](auto& flag, auto& text) { options.checkpoint_every = whole(flag, text, 1); }},
      {"--checkpoint-minutes", [&](auto& flag, auto& text) { options.checkpoint_minutes = number(flag, text, 0); }},
      {"--epochs", [&](auto& flag, auto& text) { options.epochs = number(flag, text, 1e-9); }},
      {"--learning-rate", [&](auto& flag, auto& text) { options.learning_rate = number(flag, text, 1e-30); }},
      {"--schedule", [&](auto&, auto& text) { options.schedule = text; }}};
  for (int i = 1; i < count; ++i) {
    std::string word = words[i], value;
    const size_t equals = word.rfind("--", 0) == 0 ? word.find('=') : std::string::npos;
    const bool has_value = equals != std::string::npos;
    if (has_value) {
      value = word.substr(equals + 1);
      word = word.substr(0, equals);
    }
    if (short_names.count(word) > 0) word = short_names.at(word);
    if (switches.count(word) > 0 && !has_value) {
      *switches.at(word) = true;
    } else if (values.count(word) > 0) {
      if (!has_value && i + 1 >= count) wrong(word + " has no value", "a value behind it", "nothing");
      values.at(word)(word, has_value ? value : words[++i]);
    } else if (word.rfind('-', 0) == 0 || !options.artifact.empty()) {
      wrong("unknown option or second artifact", "one artifact and the options of --help", word);
    } else {
      options.artifact = word;
    }
  }
  if (options.artifact.empty()) wrong("no artifact is given", "ARTIFACT", "nothing");
  if (options.data.empty()) wrong("no data is given", "--data ROWS.jsonl", "nothing");
  if (options.schedule != "constant" && options.schedule != "linear" && options.schedule != "cosine") {
    wrong("unknown schedule", "constant, linear or cosine", options.schedule);
  }
  return options;
}

void print_result(const Json& result, bool as_json) {
  if (as_json) {
    std::printf("%s\n", result.dump(2, false, false).c_str());
    return;
  }
  for (const auto& [name, value] : result.members()) {
    const bool is_text = value.type() == Json::kText;
    std::printf("%-18s %s\n", name.c_str(), is_text ? value.as_text().c_str() : value.dump().c_str());
  }
  if (result.find("unused_rows")->as_integer() > 0) {
    std::fprintf(stderr, "warning: %s rows were not used\n", result.at("unused_rows").dump().c_str());
  }
}

int fail(const Failure& failure, bool as_json) {
  const auto or_null = [](const std::string& text) { return text.empty() ? Json() : Json(text); };
  if (as_json) {
    const Json error = Json::object({{"error", failure.name()},
                                     {"message", failure.what()},
                                     {"expected", or_null(failure.expected)},
                                     {"received", or_null(failure.received)},
                                     {"try", or_null(failure.hint)},
                                     {"exit_code", failure.exit_code()}});
    std::printf("%s\n", error.dump(2, false, false).c_str());
    return failure.exit_code();
  }
  std::fprintf(stderr, "error: %s\n", failure.what());
  if (!failure.expected.empty()) std::fprintf(stderr, "  expected: %s\n", failure.expected.c_str());
  if (!failure.received.empty()) std::fprintf(stderr, "  received: %s\n", failure.received.c_str());
  if (!failure.hint.empty()) std::fprintf(stderr, "  try: %s\n", failure.hint.c_str());
  return failure.exit_code();
}

}  // namespace

int main(int count, char** words) {
  bool as_json = false;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    as_json |= word == "--json";
    if (word == "--help" || word == "-h") return std::fputs(kUsage, stdout) < 0;
    if (word == "--version") return std::printf("ondevice-host, ExecuTorch %s\n", ONDEVICE_EXECUTORCH_VERSION) < 0;
  }
  try {
    host::take_signals();
    const Json result = host::run(parse(count, words));
    print_result(result, as_json);
    const Json* interrupted = result.find("interrupted");
    if (interrupted == nullptr || !interrupted->as_bool()) return 0;
    if (!as_json) std::fprintf(stderr, "stopped; everything is saved, and --resume goes on\n");
    return host::kInterrupted;
  } catch (const Failure& failure) {
    return fail(failure, as_json);
  } catch (const std::bad_alloc&) {
    return fail({Kind::kTraining, "out of memory", "", "", "export the model with --quantize int8 or q4"}, as_json);
  } catch (const std::out_of_range& error) {
    return fail({Kind::kArtifact, "the artifact is damaged", "", error.what(), "export the model again"}, as_json);
  } catch (const std::exception& error) {
    return fail({Kind::kStorage, error.what()}, as_json);
  }
}
