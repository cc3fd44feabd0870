// Rows of token ids, and the batches that `ondevice` makes of them: a pure function of seed and step.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "files.h"

namespace host {

constexpr int64_t kIgnore = -100;

struct Row {
  std::vector<int64_t> ids, labels;  // a label is its token's id, or kIgnore; not shifted
};

struct Rows {
  std::vector<Row> rows;
  std::map<std::string, int64_t> left_out;  // reason to rows
  std::string first_problem;                // of the first row that was left out, with its line
  std::map<std::string, int64_t> unread;    // columns that nothing reads

  int64_t left_out_rows() const;
  // The digest that a run of `ondevice` records for the same rows.
  std::string sha256() const;
};

// Reads JSON lines with `input_ids`, and `labels` or masks; Failure if no row can be trained on or a token is unknown.
Rows read_rows(const fs::path& path, int64_t most_tokens, int64_t vocab);

struct Batch {
  int64_t rows = 0, tokens = 0;
  std::vector<int64_t> ids, labels;  // [rows, tokens], padded on the right

  // The label of each position's next token, kIgnore without one.
  std::vector<int64_t> targets() const;
  int64_t trained_tokens() const;
};

class Batches {
 public:
  Batches(const Rows& rows, int64_t batch_size, std::vector<int64_t> lengths, int64_t seed);
  Batch at(int64_t step);
  double steps_per_epoch() const;

 private:
  const std::vector<size_t>& order(int64_t epoch);

  const Rows& rows_;
  int64_t batch_size_, seed_;
  std::vector<int64_t> lengths_;
  std::map<int64_t, std::vector<size_t>> orders_;
};

}  // namespace host
