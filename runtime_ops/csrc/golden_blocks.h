// The ops of block programs against golden.json; arguments are drawn as golden_blocks.py draws them.
#pragma once

#include "attention.h"
#include "block_adam.h"
#include "block_linear.h"
#include "block_math.h"
#include "head_step.h"

namespace {

constexpr float kScale = 0.5f, kEps = 1e-5f;

// A matrix of streams 2 to 4, with its memory.
struct DrawnMatrix {
  std::vector<float> weight, scales;
  std::vector<uint8_t> bytes;
  std::vector<uint16_t> halves_, minima;
  ondevice::Matrix matrix;

  DrawnMatrix(const std::string& form, int64_t outputs, int64_t inputs) {
    matrix = {ondevice::Matrix::kFloat, nullptr, nullptr, nullptr, nullptr, outputs, inputs};
    if (form == "float") {
      weight = normals(2, outputs * inputs);
      matrix.data = weight.data();
    } else if (form.compare(0, 2, "q4") == 0) {
      bytes = some_bytes(2, outputs * inputs / 2);
      halves_ = halves(3, 0x2800, outputs * inputs / ondevice::kQ4Group);
      minima = halves(4, 0xB400, outputs * inputs / ondevice::kQ4Group);
      matrix.kind = ondevice::Matrix::kQ4;
      matrix.data = bytes.data();
      matrix.halves = halves_.data();
      matrix.minima = minima.data();
    } else {
      for (const uint8_t byte : some_bytes(2, outputs * inputs)) {
        bytes.push_back(static_cast<uint8_t>((byte >> 1) - 64));
      }
      for (const uint16_t half : halves(3, 0x2800, outputs)) scales.push_back(ondevice::half_to_float(half));
      matrix.kind = ondevice::Matrix::kInt8;
      matrix.data = bytes.data();
      matrix.scales = scales.data();
    }
  }
};

// Rows of levels, with scales that are 1: sums of integers, exact in float32.
ondevice::Grouped some_grouped(int64_t rows, int64_t depth) {
  ondevice::Grouped x;
  x.groups = (depth + ondevice::kQ4Group - 1) / ondevice::kQ4Group;
  x.stride = x.groups * ondevice::kQ4Group;
  x.levels.assign(static_cast<size_t>(rows * x.stride), 0);
  x.lifts.assign(static_cast<size_t>(rows * x.groups), 0);
  x.scales.assign(static_cast<size_t>(rows * x.groups), 1.0f);
  x.sums.assign(static_cast<size_t>(rows * x.groups), 0.0f);
  const auto bytes = some_bytes(1, rows * depth);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t k = 0; k < depth; ++k) {
      const uint8_t byte = bytes[static_cast<size_t>(row * depth + k)];
      const int8_t level = static_cast<int8_t>(byte == 128 ? -127 : byte);
      x.levels[static_cast<size_t>(row * x.stride + k)] = level;
      x.sums[static_cast<size_t>(row * x.groups + k / ondevice::kQ4Group)] += static_cast<float>(level);
      x.lifts[static_cast<size_t>(row * x.groups + k / ondevice::kQ4Group)] -= ondevice::kLift * level;
    }
  }
  return x;
}

void expect_exactly(const std::string& what, const ondevice::IntegerForm& form, int32_t expected, float received) {
  if (received == static_cast<float>(expected)) return;
  fail(1, what + " in " + form.name + ": expected " + std::to_string(expected) + ", received " +
              std::to_string(received));
}

void check_q8_form(const ondevice::IntegerForm& form) {
  const int64_t rows = 29, depth = 70;
  std::vector<uint8_t> bytes = some_bytes(2, ondevice::kColumns * depth);
  std::memset(bytes.data(), 128, 40);  // -128, the level that has no opposite
  const auto* levels = reinterpret_cast<const int8_t*>(bytes.data());
  const std::vector<float> ones(static_cast<size_t>(ondevice::kColumns), 1.0f);
  const ondevice::Matrix w{ondevice::Matrix::kInt8, levels, ones.data(), nullptr, nullptr, ondevice::kColumns, depth};
  const auto x = some_grouped(rows, depth);
  std::vector<int8_t> panel(static_cast<size_t>(x.stride * ondevice::kColumns));
  std::vector<float> sums(static_cast<size_t>(rows * ondevice::kColumns));
  ondevice::pack_integers(w, false, 0, ondevice::kColumns, 0, depth, form.lifts, panel.data());
  form.q8_tile(ondevice::GroupedRows(x, 0, 0), rows, panel.data(), x.groups, sums.data());
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t j = 0; j < ondevice::kColumns; ++j) {
      int32_t expected = 0;
      for (int64_t k = 0; k < depth; ++k) {
        expected += x.levels[static_cast<size_t>(row * x.stride + k)] * levels[j * depth + k];
      }
      expect_exactly("products with 8 bits", form, expected, sums[static_cast<size_t>(row * ondevice::kColumns + j)]);
    }
  }
}

void check_q4_form(const ondevice::IntegerForm& form) {
  const int64_t rows = 7, depth = 96, groups = depth / ondevice::kQ4Group;
  const auto packed = some_bytes(2, ondevice::kColumns * depth / 2);
  const std::vector<uint16_t> ones(static_cast<size_t>(ondevice::kColumns * groups), 0x3C00);
  const ondevice::Matrix w{ondevice::Matrix::kQ4, packed.data(),        nullptr, ones.data(),
                           ones.data(),           ondevice::kColumns, depth};
  const auto x = some_grouped(rows, depth);
  std::vector<int8_t> panel(static_cast<size_t>(depth * ondevice::kColumns));
  std::vector<float> scales(static_cast<size_t>(groups * ondevice::kColumns)), minima = scales;
  std::vector<float> sums(static_cast<size_t>(rows * ondevice::kColumns));
  ondevice::pack_q4(w, 0, ondevice::kColumns, 0, depth, panel.data(), scales.data(), minima.data());
  form.q4_tile(ondevice::GroupedRows(x, 0, 0), rows, panel.data(), scales.data(), groups, sums.data());
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t j = 0; j < ondevice::kColumns; ++j) {
      int32_t expected = 0;
      for (int64_t k = 0; k < depth; ++k) {
        const uint8_t both = packed[static_cast<size_t>((j * depth + k) / 2)];
        expected += x.levels[static_cast<size_t>(row * depth + k)] * (k % 2 ? both & 15 : both >> 4);
      }
      expect_exactly("products with 4 bits", form, expected, sums[static_cast<size_t>(row * ondevice::kColumns + j)]);
    }
  }
}

// One row by the same W, with scales and minima that are 1.
void check_q4_rows(const ondevice::IntegerForm& form) {
  const int64_t depth = 608, outputs = 37, groups = depth / ondevice::kQ4Group;
  const auto packed = some_bytes(2, outputs * depth / 2);
  const std::vector<uint16_t> ones(static_cast<size_t>(outputs * groups), 0x3C00);
  const ondevice::Matrix w{ondevice::Matrix::kQ4, packed.data(), nullptr, ones.data(), ones.data(), outputs, depth};
  ondevice::Grouped row = some_grouped(1, depth);
  std::vector<int32_t> expected(static_cast<size_t>(outputs));
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t j = 0; j < outputs; ++j) {
      const uint8_t both = packed[static_cast<size_t>((j * depth + k) / 2)];
      expected[static_cast<size_t>(j)] += row.levels[static_cast<size_t>(k)] * (1 + (k % 2 ? both & 15 : both >> 4));
    }
  }
  ondevice::split_row(row, ondevice::padded_groups(w));
  std::vector<float> sums(static_cast<size_t>(outputs));
  form.q4_rows(w, 0, 20, row.levels.data(), row.scales.data(), row.sums.data(), sums.data());
  form.q4_rows(w, 20, outputs, row.levels.data(), row.scales.data(), row.sums.data(), sums.data() + 20);
  for (size_t j = 0; j < sums.size(); ++j) expect_exactly("a row's products with 4 bits", form, expected[j], sums[j]);
}

// One row by levels of 8 bits, whose last k fill no vector.
void check_q8_rows(const ondevice::IntegerForm& form) {
  const int64_t depth = 230, outputs = 37;
  const auto bytes = some_bytes(2, outputs * depth);
  const auto* levels = reinterpret_cast<const int8_t*>(bytes.data());
  const auto x = some_grouped(1, depth);
  std::vector<float> sums(static_cast<size_t>(outputs));
  form.q8_rows(levels, depth, outputs, x.levels.data(), x.scales.data(), depth, sums.data());
  for (int64_t row = 0; row < outputs; ++row) {
    int32_t expected = 0;
    for (int64_t k = 0; k < depth; ++k) expected += x.levels[static_cast<size_t>(k)] * levels[row * depth + k];
    expect_exactly("a row's products with 8 bits", form, expected, sums[static_cast<size_t>(row)]);
  }
}

// Products of integers in every form that this processor has, which the environment does not choose.
void check_integer_forms() {
  int count;
  const ondevice::IntegerForm* forms = ondevice::integer_forms(&count);
  for (int i = 0; i < count; ++i) {
    if (!forms[i].available()) continue;
    check_q8_form(forms[i]);
    check_q4_form(forms[i]);
    check_q4_rows(forms[i]);
    check_q8_rows(forms[i]);
    std::printf("integers: %s\n", forms[i].name);
  }
}

std::vector<float> block_linear(const Record& record) {
  const std::string& form = values(record, "form")[0];
  const int64_t rows = integer(record, "rows"), rank = integer(record, "rank");
  const int64_t inputs = integer(record, "inputs"), outputs = integer(record, "outputs");
  const bool transposed = integer(record, "transposed") != 0;
  const int64_t width = transposed ? inputs : outputs, length = transposed ? outputs : inputs;
  const DrawnMatrix drawn(form, outputs, inputs);
  const auto x = normals(1, rows * length), bias = normals(5, width), h = normals(6, rows * rank);
  const auto b = normals(7, rank * width), into = normals(8, rows * width);
  const ondevice::Added added{bias.data(), h.data(), b.data(), into.data(), rank, kScale};
  std::vector<float> out(static_cast<size_t>(rows * width));
  if (form == "integers" || form == "q4_integers") {
    ondevice::block_linear_integers(x.data(), rows, drawn.matrix, transposed, added, out.data(), serial);
  } else {
    ondevice::block_linear(x.data(), rows, drawn.matrix, transposed, added, out.data(), serial);
  }
  return out;
}

std::vector<float> adapted_linear(const Record& record) {
  const std::string& form = values(record, "form")[0];
  const int64_t rows = integer(record, "rows"), rank = integer(record, "rank");
  const int64_t inputs = integer(record, "inputs"), outputs = integer(record, "outputs");
  const int64_t a = integer(record, "a"), b = integer(record, "b");
  const DrawnMatrix drawn(form, outputs, inputs);
  const auto x = normals(1, rows * inputs), bias = normals(5, outputs), adapter = normals(6, b + rank * outputs);
  const auto into = normals(7, rows * outputs);
  const ondevice::Added added{bias.data(), nullptr, nullptr, into.data(), rank, kScale};
  std::vector<float> out(static_cast<size_t>(rows * outputs));
  ondevice::adapted_linear(x.data(), rows, drawn.matrix, adapter.data() + a, adapter.data() + b, added,
                           form == "q4_integers", out.data(), serial);
  return out;
}

std::vector<float> attention(const std::string& op, const Record& record) {
  const ondevice::Heads heads{integer(record, "rows"),     integer(record, "tokens"), integer(record, "heads"),
                              integer(record, "kv_heads"), integer(record, "width"),  kScale,
                              integer(record, "window")};
  const int64_t queries = heads.rows * heads.tokens * heads.heads * heads.width;
  const int64_t keys = heads.rows * heads.tokens * heads.kv_heads * heads.width;
  const uint64_t first = op == "attend" ? 1 : 2;
  const auto g = normals(1, queries), q = normals(first, queries), k = normals(first + 1, keys);
  const auto v = normals(first + 2, keys);
  std::vector<float> out(static_cast<size_t>(op == "attend" ? queries : queries + 2 * keys));
  if (op == "attend") {
    ondevice::attend(q.data(), k.data(), v.data(), heads, out.data(), serial);
  } else {
    ondevice::attend_backward(g.data(), q.data(), k.data(), v.data(), heads, out.data(), out.data() + queries,
                              out.data() + queries + keys, serial);
  }
  return out;
}

std::vector<float> cached(const Record& record) {
  const ondevice::Heads heads{1, integer(record, "tokens"), integer(record, "heads"), integer(record, "kv_heads"),
                              integer(record, "width"), kScale, 0};
  const int64_t context = integer(record, "context"), news = heads.tokens * heads.kv_heads * heads.width;
  const int64_t queries = heads.tokens * heads.heads * heads.width, kept = heads.kv_heads * heads.width * context;
  std::vector<float> out(static_cast<size_t>(queries));
  ondevice::attend_cached(normals(1, queries).data(), normals(2, news).data(), normals(3, news).data(),
                          normals(4, kept).data(), normals(5, kept).data(), heads, context, integer(record, "start"),
                          out.data(), serial);
  return out;
}

std::vector<float> head_step(const Record& record) {
  const auto labels = integers(record, "labels");
  const int64_t depth = integer(record, "depth"), rows = static_cast<int64_t>(labels.size());
  const DrawnMatrix drawn(values(record, "form")[0], integer(record, "vocabulary"), depth);
  const auto x = normals(1, rows * depth);
  auto weights = normals(5, rows);
  for (float& weight : weights) weight = std::fabs(weight);
  std::vector<float> out(static_cast<size_t>(rows * (depth + 1)));
  const int64_t bad = ondevice::head_step(x.data(), rows, drawn.matrix, false, labels.data(), weights.data(),
                                          out.data(), serial);
  if (bad >= 0) fail(1, "head_step refuses label " + std::to_string(bad));
  return out;
}

std::vector<float> adam(int64_t width) {
  const auto value = normals(1, width), gradient = normals(2, width), first = normals(3, width);
  auto second = normals(4, width);
  for (float& one : second) one = std::fabs(one);
  std::vector<float> out(static_cast<size_t>(3 * width));
  const ondevice::Adam settings{0.01f, 0.9f, 0.999f, 1e-8f, 0.1f, 3.0f};
  ondevice::block_adam(value.data(), gradient.data(), first.data(), second.data(), width, settings, out.data(),
                       serial);
  return out;
}

std::vector<float> between(const std::string& op, const Record& record) {
  const int64_t rows = integer(record, "rows"), width = integer(record, "width"), count = rows * width;
  std::vector<float> out(static_cast<size_t>(count));
  if (op == "swiglu") {
    ondevice::swiglu(normals(1, count).data(), normals(2, count).data(), count, out.data(), serial);
  } else if (op == "swiglu_gate") {
    ondevice::swiglu_gate(normals(1, count).data(), normals(2, count).data(), normals(3, count).data(), count,
                          out.data(), serial);
  } else if (op == "rms_norm") {
    ondevice::rms_norm(normals(1, count).data(), rows, width, normals(2, width).data(), kEps, out.data(), serial);
  } else if (op == "rms_norm_backward") {
    ondevice::rms_norm_backward(normals(1, count).data(), rows, width, normals(2, width).data(), kEps,
                                normals(3, count).data(), normals(4, count).data(), out.data(), serial);
  } else {
    const int64_t rank = integer(record, "rank");
    if (op == "narrow_linear") {
      out.resize(static_cast<size_t>(rows * rank));
      ondevice::narrow_linear(normals(1, count).data(), rows, width, normals(2, rank * width).data(), rank, kScale,
                              out.data(), serial);
    } else {
      out.resize(static_cast<size_t>(rank * width));
      ondevice::narrow_gradient(normals(1, rows * rank).data(), normals(2, count).data(), rows, rank, width, kScale,
                                out.data(), serial);
    }
  }
  return out;
}

std::vector<float> rotated(const Record& record) {
  const int64_t rows = integer(record, "rows"), tokens = integer(record, "tokens"), heads = integer(record, "heads");
  const int64_t width = integer(record, "width"), half = integer(record, "half");
  std::vector<float> out(static_cast<size_t>(rows * tokens * heads * width));
  ondevice::rotate(normals(1, rows * tokens * heads * width).data(), rows, tokens, heads, width,
                   normals(2, tokens * half).data(), normals(3, tokens * half).data(), half, -1.0f, out.data(), serial);
  return out;
}

// False for an op that is not of block programs.
bool check_block_op(const std::string& op, const Record& record) {
  std::vector<float> out;
  if (op == "block_linear") {
    out = block_linear(record);
  } else if (op == "adapted_linear") {
    out = adapted_linear(record);
  } else if (op == "attend" || op == "attend_backward") {
    out = attention(op, record);
  } else if (op == "attend_cached") {
    out = cached(record);
  } else if (op == "head_step") {
    out = head_step(record);
  } else if (op == "block_adam") {
    out = adam(integer(record, "width"));
  } else if (op == "rotate") {
    out = rotated(record);
  } else if (op == "swiglu" || op == "swiglu_gate" || op == "rms_norm" || op == "rms_norm_backward" ||
             op == "narrow_linear" || op == "narrow_gradient") {
    out = between(op, record);
  } else {
    return false;
  }
  compare(op, values(record, "out"), out, 1e-5, true);
  return true;
}

}  // namespace
