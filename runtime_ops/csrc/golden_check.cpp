// Holds the compiled kernels against golden.json on the processor that runs them: golden_check golden.json
//
// Exit status 0: all agree. 1: the first value that differs is named. 2: the file cannot be read.
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "cross_entropy.h"
#include "generator.h"
#include "q4_linear.h"
#include "q8_embedding.h"

namespace {

const auto serial = [](int64_t tasks, const auto& f) { f(0, tasks); };
int64_t checked = 0;

[[noreturn]] void fail(int status, const std::string& message) {
  std::fprintf(stderr, "golden_check: %s\n", message.c_str());
  std::exit(status);
}

// One object of the file: key to its values, nested lists flattened. Keys and values never hold punctuation.
using Record = std::map<std::string, std::vector<std::string>>;

std::vector<Record> read(const char* path) {
  std::ifstream file(path);
  std::stringstream content;
  if (!file || !(content << file.rdbuf())) fail(2, std::string("cannot read ") + path);
  std::vector<Record> records(1);
  std::string word, key;
  for (const char c : content.str()) {
    const bool ends = std::string(" \n\r\t,[]{}:").find(c) != std::string::npos;
    if (!ends && c != '"') word += c;
    if (c == ':') {
      key = word;
      records.back()[key];
      word.clear();
    }
    if (ends && !word.empty()) {
      records.back()[key].push_back(word);
      word.clear();
    }
    if (c == '{') records.emplace_back();
  }
  return records;
}

const std::vector<std::string>& values(const Record& record, const std::string& key) {
  const auto found = record.find(key);
  if (found == record.end() || found->second.empty()) fail(2, "a case has no " + key);
  return found->second;
}

int64_t integer(const std::string& text) { return std::strtoll(text.c_str(), nullptr, 10); }
int64_t integer(const Record& record, const std::string& key) { return integer(values(record, key)[0]); }

std::vector<int64_t> integers(const Record& record, const std::string& key) {
  std::vector<int64_t> out;
  for (const std::string& text : values(record, key)) out.push_back(integer(text));
  return out;
}

std::string hex(uint64_t word) {
  char text[17];
  std::snprintf(text, sizeof text, "%016" PRIx64, word);
  return text;
}

std::string at(size_t index) { return "[" + std::to_string(index) + "]: "; }

void expect(const std::string& what, size_t index, const std::string& expected, const std::string& received) {
  ++checked;
  if (expected == received) return;
  fail(1, what + at(index) + "expected " + expected + ", received " + received);
}

// Every value within `tolerance`, times the golden value where that is above 1; a NaN is never within.
void compare(const std::string& what, const std::vector<std::string>& golden, const std::vector<float>& out,
             double tolerance, bool relative) {
  if (golden.size() != out.size()) fail(2, what + " holds another number of values than its sizes say");
  for (size_t i = 0; i < out.size(); ++i, ++checked) {
    const double expected = std::strtod(golden[i].c_str(), nullptr);
    const double allowed = tolerance * (relative ? std::fmax(1.0, std::fabs(expected)) : 1.0);
    if (std::fabs(static_cast<double>(out[i]) - expected) <= allowed) continue;
    fail(1, what + at(i) + "expected " + golden[i] + ", received " + std::to_string(out[i]));
  }
}

// Words first .. first + count - 1 of a stream, put together from their signs.
std::vector<uint64_t> words(uint64_t key, int64_t first, int64_t count) {
  std::vector<float> signs(static_cast<size_t>(64 * count));
  ondevice::rademacher_range(key, 64 * first, 64 * count, signs.data());
  std::vector<uint64_t> out(static_cast<size_t>(count), 0);
  for (size_t i = 0; i < signs.size(); ++i) out[i / 64] = out[i / 64] << 1 | (signs[i] < 0.0f);
  return out;
}

void check_generator(const Record& record) {
  const auto seed = static_cast<uint64_t>(integer(record, "seed"));
  const auto step = static_cast<uint64_t>(integer(record, "step"));
  const int64_t tensor = integer(record, "tensor"), queries = integer(record, "queries");
  const int64_t start = integer(record, "start"), count = integer(record, "count");
  const uint64_t last = static_cast<uint64_t>(queries - 1);
  const uint64_t key = ondevice::stream_key(seed, step, last, static_cast<uint64_t>(tensor));
  expect("last_key", 0, values(record, "last_key")[0], hex(key));
  const auto& golden_words = values(record, "last_words");
  const auto drawn = words(key, start, static_cast<int64_t>(golden_words.size()));
  for (size_t i = 0; i < drawn.size(); ++i) expect("last_words", i, golden_words[i], hex(drawn[i]));
  std::vector<float> out(static_cast<size_t>(queries * count));
  ondevice::generate(ondevice::normal_range, seed, step, tensor, queries, start, count, out.data(), serial);
  compare("normal", values(record, "normal"), out, 1e-6, false);
  ondevice::generate(ondevice::rademacher_range, seed, step, tensor, queries, start, count, out.data(), serial);
  compare("rademacher", values(record, "rademacher"), out, 0.0, false);
}

// What an op's arguments are drawn from (golden.py): stream (seed 0, step 0, query 0, tensor `stream`).
uint64_t stream_key(uint64_t stream) { return ondevice::stream_key(0, 0, 0, stream); }

std::vector<float> normals(uint64_t stream, int64_t count) {
  std::vector<float> out(static_cast<size_t>(count));
  ondevice::normal_range(stream_key(stream), 0, count, out.data());
  return out;
}

std::vector<uint8_t> some_bytes(uint64_t stream, int64_t count) {
  const auto drawn = words(stream_key(stream), 0, (count + 7) / 8);
  std::vector<uint8_t> out(static_cast<size_t>(count));
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<uint8_t>(drawn[i / 8] >> (8 * (i % 8)));
  return out;
}

std::vector<uint16_t> halves(uint64_t stream, uint16_t base, int64_t count) {
  std::vector<uint16_t> out;
  for (const uint64_t word : words(stream_key(stream), 0, count)) {
    out.push_back(static_cast<uint16_t>(base | (word & 0x3FF)));
  }
  return out;
}

void check_q4(const Record& record) {
  const int64_t rows = integer(record, "rows"), inputs = integer(record, "inputs");
  const int64_t outputs = integer(record, "outputs"), group = integer(record, "group");
  const int64_t padded = (outputs + ondevice::kPanel - 1) / ondevice::kPanel * ondevice::kPanel;
  const int64_t groups = outputs * inputs / group;
  const auto x = normals(1, rows * inputs);
  const auto packed = some_bytes(2, padded * inputs / 2);
  const auto scales = halves(3, 0x2800, groups), mins = halves(4, 0xB400, groups);
  std::vector<float> out(static_cast<size_t>(rows * outputs));
  const ondevice::Q4Weight weight{packed.data(), scales.data(), mins.data(), outputs, inputs, group};
  ondevice::q4_linear(x.data(), rows, weight, out.data(), serial);
  compare("q4_linear", values(record, "out"), out, 1e-5, true);
}

void check_table(const std::string& op, const Record& record) {
  const int64_t vocabulary = integer(record, "vocabulary"), depth = integer(record, "depth");
  std::vector<int8_t> table;
  for (const uint8_t byte : some_bytes(2, vocabulary * depth)) {
    table.push_back(static_cast<int8_t>((byte >> 1) - 64));
  }
  std::vector<float> scales;
  for (const uint16_t half : halves(3, 0x2800, vocabulary)) scales.push_back(ondevice::half_to_float(half));
  std::vector<float> out;
  int64_t bad;
  if (op == "q8_embedding") {
    const auto ids = integers(record, "ids");
    out.resize(ids.size() * static_cast<size_t>(depth));
    bad = ondevice::q8_embedding(ids.data(), static_cast<int64_t>(ids.size()), table.data(), scales.data(),
                                 vocabulary, depth, out.data(), serial);
  } else {
    const auto labels = integers(record, "labels");
    const auto rows = static_cast<int64_t>(labels.size());
    const auto hidden = normals(1, rows * depth);
    out.resize(labels.size());
    const auto losses = [&](const auto& head) {
      return ondevice::linear_cross_entropy(hidden.data(), rows, head, vocabulary, labels.data(), out.data(),
                                            serial);
    };
    const auto weight = normals(2, vocabulary * depth);
    bad = op == "linear_cross_entropy" ? losses(ondevice::FloatHead{weight.data(), depth})
                                       : losses(ondevice::Q8Head{table.data(), scales.data(), depth});
  }
  if (bad >= 0) fail(1, op + " refuses id " + std::to_string(bad));
  compare(op, values(record, "out"), out, 1e-5, true);
}

// FNV-1a of the bits of 2^20 normals: every compiled form prints the same.
uint64_t fingerprint() {
  uint64_t digest = 0xCBF29CE484222325ull;
  for (const float value : normals(0, 1 << 20)) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    digest = (digest ^ bits) * 0x100000001B3ull;
  }
  return digest;
}

}  // namespace

#include "golden_blocks.h"

int main(int argc, char** argv) {
  if (argc != 2) fail(2, "expected one argument, the path of golden.json");
  for (const Record& record : read(argv[1])) {
    if (record.count("seed")) check_generator(record);
    if (!record.count("op")) continue;
    const std::string& op = values(record, "op")[0];
    if (op == "q4_linear") {
      check_q4(record);
    } else if (op == "q8_embedding" || op == "linear_cross_entropy" || op == "q8_linear_cross_entropy") {
      check_table(op, record);
    } else if (!check_block_op(op, record)) {
      fail(2, "no check for the op " + op);
    }
  }
  check_integer_forms();
  if (checked == 0) fail(2, std::string("no golden values in ") + argv[1]);
  std::printf("golden_check: %" PRId64 " values agree, %d lanes\n", checked, ondevice::kLanes);
  std::printf("normals: %016" PRIx64 "\n", fingerprint());
  return 0;
}
