#include "checkpoint.h"

#include <algorithm>
#include <cmath>
#include <fstream>

#include "sha256.h"

namespace host {

namespace {

constexpr const char* kState = "state.safetensors";
constexpr const char* kMeta = "meta.json";
constexpr const char* kPrefix = "checkpoint-";
constexpr size_t kKept = 2, kMostMetaBytes = size_t{16} << 20;

// Settings of an identity that a resumed run may change.
bool is_free(const std::string& key) { return key == "learning_rate" || key == "method.learning_rate"; }

// Nested objects as one, with dotted keys, each value as its text.
void flatten(const Json& value, const std::string& prefix, std::map<std::string, std::string>& out) {
  for (const auto& [key, member] : value.members()) {
    if (member.type() == Json::kObject) {
      flatten(member, prefix + key + ".", out);
    } else {
      out[prefix + key] = member.dump();
    }
  }
}

Stored stored(const int64_t& value) { return {"I64", {1}, &value, sizeof value}; }

}  // namespace

Checkpoints::Checkpoints(const Manifest& manifest, const fs::path& folder, Json identity)
    : manifest_(manifest), folder_(folder), identity_(std::move(identity)) {}

std::vector<std::pair<int64_t, fs::path>> Checkpoints::paths() const {
  std::vector<std::pair<int64_t, fs::path>> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder_, error)) {
    const std::string name = entry.path().filename().string();
    const std::string digits = name.rfind(kPrefix, 0) == 0 ? name.substr(std::string(kPrefix).size()) : "";
    const bool is_number = digits.size() >= 8 && digits.size() < 18 &&
                           digits.find_first_not_of("0123456789") == std::string::npos;
    if (is_number) found.emplace_back(std::stoll(digits), entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::pair<fs::path, int64_t> Checkpoints::save(int64_t step, const Session& session) const {
  std::map<std::string, Stored> tensors;
  for (const auto& [name, values] : session.state()) {
    if (!std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); })) {
      throw Failure(Kind::kTraining, "step " + std::to_string(step - 1) + " left NaN or infinity in '" + name + "'",
                    "finite parameters", "inf or nan", "resume from the last checkpoint with a lower learning rate");
    }
    tensors[name] = {"F32", {static_cast<int64_t>(values.size())}, values.data(), values.size() * sizeof(float)};
  }
  const int64_t updates = session.updates();
  tensors["seed"] = stored(manifest_.seed);
  for (const auto& [name, counts_updates] : manifest_.counters) {
    if (counts_updates) tensors[name] = stored(updates);
  }
  const std::string state = tensors_file(tensors);
  Sha256 digest, own;
  digest.update(state);
  own.update(identity_.dump(-1, false, true, true));
  const Json meta = Json::object({{"schema", 1},
                                  {"step", step},
                                  {"identity", identity_},
                                  {"identity_sha256", own.hex()},
                                  {"seed", manifest_.seed},
                                  {"backend", "executorch"},
                                  {"evaluation", Json()},
                                  {"score", Json()},
                                  {"state_sha256", digest.hex()}});
  std::string number = std::to_string(step);
  number.insert(0, number.size() < 8 ? 8 - number.size() : 0, '0');
  const fs::path path = folder_ / (kPrefix + number);
  const std::string text = meta.dump(1) + "\n";
  AtomicFolder folder(path);
  write_file(folder.path() / kState, state);
  write_file(folder.path() / kMeta, text);
  folder.commit();
  std::vector<std::pair<int64_t, fs::path>> past = paths();
  // Later ones are damaged: a resume passed them over.
  past.erase(std::remove_if(past.begin(), past.end(), [&](auto& item) { return item.first > step; }), past.end());
  for (const auto& [its_step, its_path] : paths()) {
    const bool is_kept = std::any_of(past.end() - std::min<int64_t>(kKept, static_cast<int64_t>(past.size())), past.end(),
                                     [&, its = its_path](auto& item) { return item.second == its; });
    std::error_code error;
    if (!is_kept) fs::remove_all(its_path, error);
  }
  return {path, static_cast<int64_t>(state.size() + text.size())};
}

Json Checkpoints::read_meta(const fs::path& path) const {
  Json meta = parse_json(read_plain(path / kMeta, kMostMetaBytes));
  if (meta.integer("schema") != 1) {
    throw Failure(Kind::kCheckpoint, path.filename().string() + " is of another version", "schema 1",
                  "schema " + meta.at("schema").dump(), "resume with the version that wrote it");
  }
  meta.integer("step");
  meta.text("state_sha256");
  if (meta.at("identity").type() != Json::kObject) throw Refused("field 'identity' is not an object");
  return meta;
}

void Checkpoints::check_identity(const fs::path& path, const Json& meta) const {
  std::map<std::string, std::string> ours, theirs;
  flatten(identity_, "", ours);
  flatten(meta.at("identity"), "", theirs);
  std::string names, expected, received;
  std::map<std::string, std::string> all = ours;
  all.insert(theirs.begin(), theirs.end());
  for (const auto& [key, value] : all) {
    const std::string mine = ours.count(key) > 0 ? ours[key] : "absent";
    const std::string other = theirs.count(key) > 0 ? theirs[key] : "absent";
    if (is_free(key) || mine == other) continue;
    const std::string comma = names.empty() ? "" : ", ";
    names += comma + key;
    expected += comma + key + " = " + mine;
    received += comma + key + " = " + other;
  }
  if (names.empty()) return;
  throw Failure(Kind::kCheckpoint, path.string() + " belongs to another run: " + names, expected, received,
                "resume with the settings that the run was started with, or choose another --out");
}

void Checkpoints::load(const fs::path& path, const Json& meta, Session& session) const {
  if (sha256_file(path / kState) != meta.text("state_sha256")) throw Refused(std::string(kState) + " is not what was written");
  const MappedTensors file(path / kState);
  const auto tensor = [&](const std::string& name, const std::string& dtype, int64_t count) {
    const Place* place = file.find(name);
    if (place == nullptr || place->dtype != dtype || elements(place->shape) != count) {
      throw Failure(Kind::kCheckpoint, path.string() + ": the checkpoint is not of this program: " + name,
                    dtype + " [" + std::to_string(count) + "]",
                    place == nullptr ? "none" : place->dtype + " " + shape_text(place->shape), "choose another --out");
    }
    return file.data(*place);
  };
  State state;
  for (const StateTensor& own : manifest_.state) {
    Floats values(static_cast<size_t>(own.size));
    std::copy_n(tensor(own.name, "F32", own.size), values.size() * sizeof(float), reinterpret_cast<char*>(values.data()));
    state[own.name] = std::move(values);
  }
  int64_t updates = 0;
  for (const auto& [name, counts_updates] : manifest_.counters) {
    if (counts_updates) std::copy_n(tensor(name, "I64", 1), sizeof updates, reinterpret_cast<char*>(&updates));
  }
  session.load_state(std::move(state), updates);
}

// What killed processes left half written; the lock says that nobody else writes here.
void Checkpoints::remove_leftovers() const {
  std::vector<fs::path> leftovers;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(std::string(".") + kPrefix, 0) == 0 && name.find(".partial-") != std::string::npos) {
      leftovers.push_back(entry.path());
    }
  }
  for (const fs::path& path : leftovers) fs::remove_all(path);
}

std::optional<Restored> Checkpoints::restore(Session& session, const std::function<void(const std::string&)>& warn) const {
  remove_leftovers();
  const auto all = paths();
  for (auto item = all.rbegin(); item != all.rend(); ++item) {
    try {
      const Json meta = read_meta(item->second);
      check_identity(item->second, meta);
      load(item->second, meta, session);
      return Restored{meta.integer("step"), item->second.filename().string()};
    } catch (const Refused& error) {
      warn(item->second.filename().string() + " is damaged: " + error.what() + "; the checkpoint before it is used");
    }
  }
  if (all.empty()) return std::nullopt;
  throw Failure(Kind::kCheckpoint, folder_.string() + ": none of the " + std::to_string(all.size()) + " checkpoints is whole",
                "", "", "start again in another folder, or with --overwrite");
}

void Checkpoints::check(int64_t steps) const {
  std::ifstream log(folder_ / "events.jsonl");
  std::string line;
  if (std::getline(log, line)) {
    try {
      check_identity(folder_ / "events.jsonl", parse_json(line));
    } catch (const Refused&) {
      // A damaged head of a log is no reason to give the checkpoints up.
    }
  }
  const auto all = paths();
  if (all.empty()) return;
  try {
    check_identity(all.back().second, read_meta(all.back().second));
  } catch (const Refused&) {
    return;  // a damaged one is passed over when the run resumes
  }
  if (all.back().first <= steps) return;
  throw Failure(Kind::kCheckpoint, "the run in " + folder_.string() + " is beyond the steps that are asked for",
                "--steps " + std::to_string(all.back().first) + " or more", "--steps " + std::to_string(steps),
                "--steps counts from the run's beginning; nothing was changed");
}

void Checkpoints::clear() const {
  remove_leftovers();
  for (const auto& [step, path] : paths()) fs::remove_all(path);
}

}  // namespace host
