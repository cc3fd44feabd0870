#include "rows.h"

#include <algorithm>
#include <fstream>
#include <set>

#include "json.h"
#include "pcg64.h"
#include "sha256.h"

namespace host {

namespace {

constexpr size_t kMostLineBytes = size_t{64} << 20, kMostTokens = size_t{1} << 22;
const std::set<std::string> kMasks = {"completion_mask", "assistant_masks", "assistant_mask", "loss_mask"};
const std::set<std::string> kPacked = {"position_ids", "seq_lengths"};
const std::set<std::string> kWithoutEffect = {"length", "num_tokens"};

bool has(const Json& record, const std::string& key) {
  const Json* found = record.find(key);
  return found != nullptr && !found->is_null();
}

// Numbers of a column, one a token; Refused otherwise.
std::vector<int64_t> column(const Json& record, const std::string& key, size_t count) {
  std::vector<int64_t> values = record.integers(key);
  if (values.size() == count) return values;
  throw Refused(key + ": expected " + std::to_string(count) + " numbers, one a token; received " +
                std::to_string(values.size()));
}

std::vector<int64_t> flags(const Json& record, const std::string& key, size_t count) {
  std::vector<int64_t> values = column(record, key, count);
  for (const int64_t value : values) {
    if (value != 0 && value != 1) throw Refused(key + ": expected zeros and ones");
  }
  return values;
}

void mask_labels(Row& row, const Json& record, const std::string& key) {
  const std::vector<int64_t> mask = flags(record, key, row.ids.size());
  for (size_t i = 0; i < mask.size(); ++i) {
    if (mask[i] == 0) row.labels[i] = kIgnore;
  }
}

// Cuts padding off; a mask with holes is refused.
void cut_padding(Row& row, const std::vector<int64_t>& mask) {
  const auto first = std::find(mask.begin(), mask.end(), 1), end = std::find(first, mask.end(), 0);
  if (std::find(end, mask.end(), 1) != mask.end()) throw Refused("attention_mask: expected padding at the ends only");
  for (std::vector<int64_t>* values : {&row.ids, &row.labels}) {
    *values = {values->begin() + (first - mask.begin()), values->begin() + (end - mask.begin())};
  }
}

Row row_of(const Json& record, Rows& rows) {
  Row row;
  if (record.type() != Json::kObject) throw Refused("a row is an object");
  row.ids = record.integers("input_ids");
  if (row.ids.size() > kMostTokens) throw Refused("input_ids has too many tokens");
  row.labels = has(record, "labels") ? column(record, "labels", row.ids.size()) : row.ids;
  const bool is_padded = has(record, "attention_mask");
  const std::vector<int64_t> used = is_padded ? flags(record, "attention_mask", row.ids.size())
                                              : std::vector<int64_t>(row.ids.size(), 1);
  for (size_t i = 0; i < row.ids.size(); ++i) {
    if (used[i] == 0 || row.labels[i] == row.ids[i] || row.labels[i] == kIgnore) continue;
    throw Refused("labels: expected the token or -100; labels are not shifted, the model does that");
  }
  for (const auto& [key, value] : record.members()) {
    if (kMasks.count(key) > 0 && !value.is_null()) mask_labels(row, record, key);
    if (kPacked.count(key) > 0 && !value.is_null()) throw Refused(key + ": this host takes one sequence a row");
    const bool is_read = key == "input_ids" || key == "labels" || key == "attention_mask" || key == "token_type_ids";
    const bool known = is_read || kMasks.count(key) > 0 || kPacked.count(key) > 0 || kWithoutEffect.count(key) > 0;
    if (!known && !value.is_null()) ++rows.unread[key];
  }
  if (has(record, "token_type_ids")) {
    const std::vector<int64_t> types = column(record, "token_type_ids", row.ids.size());
    if (std::any_of(types.begin(), types.end(), [](int64_t type) { return type != 0; })) {
      throw Refused("token_type_ids: expected zeros");
    }
  }
  cut_padding(row, used);
  return row;
}

bool is_trained(const Row& row) {
  return std::any_of(row.labels.begin() + (row.labels.empty() ? 0 : 1), row.labels.end(),
                     [](int64_t label) { return label != kIgnore; });
}

void add_row(const std::string& line, int64_t number, const std::string& file, int64_t most, int64_t vocab, Rows& rows) {
  std::string reason;
  Row row;
  try {
    row = row_of(parse_json(line, kMostLineBytes), rows);
    if (static_cast<int64_t>(row.ids.size()) > most) {
      reason = "input_ids has more tokens than the " + std::to_string(most) + " that fit";
    } else if (!is_trained(row)) {
      reason = "labels: there is no token to train on";
    }
  } catch (const Refused& error) {
    reason = error.what();
  }
  if (!reason.empty()) {
    ++rows.left_out[reason];
    if (rows.first_problem.empty()) rows.first_problem = file + ":" + std::to_string(number) + ": " + reason;
    return;
  }
  for (const int64_t id : row.ids) {
    if (id >= 0 && id < vocab) continue;
    throw Failure(Kind::kData, file + ":" + std::to_string(number) + ": token " + std::to_string(id) +
                  " is not in the model's vocabulary", "ids from 0 to " + std::to_string(vocab - 1), std::to_string(id),
                  "the rows were encoded with another model's tokenizer");
  }
  rows.rows.push_back(std::move(row));
}

}  // namespace

int64_t Rows::left_out_rows() const {
  int64_t count = 0;
  for (const auto& [reason, times] : left_out) count += times;
  return count;
}

std::string Rows::sha256() const {
  Sha256 digest;
  for (const Row& row : rows) {
    digest.update(std::to_string(row.ids.size()) + " ");
    digest.update(row.ids.data(), row.ids.size() * sizeof(int64_t));
    digest.update(row.labels.data(), row.labels.size() * sizeof(int64_t));
    digest.update("None None ()\n");
  }
  return digest.hex();
}

Rows read_rows(const fs::path& path, int64_t most_tokens, int64_t vocab) {
  std::ifstream file(path);
  if (!fs::is_regular_file(path) || !file) {
    throw Failure(Kind::kData, path.string() + " cannot be read", "a file of JSON lines with input_ids", "",
                  "--data names the file");
  }
  Rows rows;
  int64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    add_row(line, number, path.filename().string(), most_tokens, vocab, rows);
  }
  if (rows.rows.empty()) {
    throw Failure(Kind::kData, path.string() + ": no row can be trained on", "one row or more with input_ids",
                  rows.first_problem.empty() ? "no row" : rows.first_problem, "`ondevice run ARTIFACT --data FILE --tokens OUT` writes them");
  }
  return rows;
}

std::vector<int64_t> Batch::targets() const {
  std::vector<int64_t> next(labels.size(), kIgnore);
  for (size_t i = 0; i + 1 < labels.size(); ++i) {
    if ((i + 1) % static_cast<size_t>(tokens) != 0) next[i] = labels[i + 1];
  }
  return next;
}

int64_t Batch::trained_tokens() const {
  const std::vector<int64_t> all = targets();
  return std::count_if(all.begin(), all.end(), [](int64_t label) { return label != kIgnore; });
}

Batches::Batches(const Rows& rows, int64_t batch_size, std::vector<int64_t> lengths, int64_t seed)
    : rows_(rows), batch_size_(batch_size), seed_(seed), lengths_(std::move(lengths)) {}

double Batches::steps_per_epoch() const { return static_cast<double>(rows_.rows.size()) / batch_size_; }

const std::vector<size_t>& Batches::order(int64_t epoch) {
  auto found = orders_.find(epoch);
  if (found != orders_.end()) return found->second;
  for (auto other = orders_.begin(); other != orders_.end();) {
    other = std::abs(other->first - epoch) > 1 ? orders_.erase(other) : std::next(other);
  }
  Pcg64 generator({static_cast<uint64_t>(seed_), static_cast<uint64_t>(epoch)});
  std::vector<uint64_t> words;
  std::vector<size_t> sorted;
  for (size_t i = 0; i < rows_.rows.size(); ++i) {
    words.push_back(generator.next());
    sorted.push_back(i);
  }
  std::stable_sort(sorted.begin(), sorted.end(), [&](size_t a, size_t b) { return words[a] < words[b]; });
  return orders_[epoch] = std::move(sorted);
}

Batch Batches::at(int64_t step) {
  const auto count = static_cast<int64_t>(rows_.rows.size());
  std::vector<const Row*> taken;
  int64_t longest = 0;
  for (int64_t number = step * batch_size_; number < (step + 1) * batch_size_; ++number) {
    taken.push_back(&rows_.rows[order(number / count)[static_cast<size_t>(number % count)]]);
    longest = std::max(longest, static_cast<int64_t>(taken.back()->ids.size()));
  }
  Batch batch;
  batch.rows = batch_size_;
  batch.tokens = *std::lower_bound(lengths_.begin(), lengths_.end(), longest);
  for (const Row* row : taken) {
    batch.ids.insert(batch.ids.end(), row->ids.begin(), row->ids.end());
    batch.labels.insert(batch.labels.end(), row->labels.begin(), row->labels.end());
    const size_t filled = static_cast<size_t>(batch.tokens) - row->ids.size();
    batch.ids.insert(batch.ids.end(), filled, 0);  // padding is never trained on, and nothing attends to it
    batch.labels.insert(batch.labels.end(), filled, kIgnore);
  }
  return batch;
}

}  // namespace host
