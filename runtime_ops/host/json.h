// JSON as the host reads and writes it: bounded in size, depth and number of values; numbers as Python prints them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"

namespace host {

class Json {
 public:
  enum Type { kNull, kBool, kInteger, kReal, kText, kList, kObject };
  using Member = std::pair<std::string, Json>;

  Json() = default;
  Json(bool value) : type_(kBool), integer_(value) {}
  Json(int value) : type_(kInteger), integer_(value) {}
  Json(int64_t value) : type_(kInteger), integer_(value) {}
  Json(double value) : type_(kReal), real_(value) {}
  Json(std::string value) : type_(kText), text_(std::move(value)) {}
  Json(const char* value) : type_(kText), text_(value) {}

  static Json list(std::vector<Json> items = {});
  static Json object(std::vector<Member> members = {});

  Type type() const { return type_; }
  bool is_null() const { return type_ == kNull; }
  const std::vector<Json>& items() const { return items_; }
  const std::vector<Member>& members() const { return members_; }

  void add(Json item) { items_.push_back(std::move(item)); }
  void set(const std::string& key, Json value);

  // The member of that name, null if there is none.
  const Json* find(const std::string& key) const;
  // The same; Refused, with the name, if there is none or it is of another type.
  const Json& at(const std::string& key) const;
  const std::string& text(const std::string& key) const;
  int64_t integer(const std::string& key) const;
  double real(const std::string& key) const;
  std::vector<int64_t> integers(const std::string& key) const;

  bool as_bool() const { return integer_ != 0; }
  int64_t as_integer() const { return integer_; }
  double as_real() const { return type_ == kInteger ? static_cast<double>(integer_) : real_; }
  const std::string& as_text() const { return text_; }
  const char* type_name() const;

  // `indent` below 0: one line, with `", "` and `": "` if `spaced`. `ascii` escapes other letters.
  std::string dump(int indent = -1, bool spaced = false, bool ascii = true, bool sorted = false) const;

 private:
  void write(std::string& out, int indent, int level, bool spaced, bool ascii, bool sorted) const;

  Type type_ = kNull;
  int64_t integer_ = 0;
  double real_ = 0;
  std::string text_;
  std::vector<Json> items_;
  std::vector<Member> members_;
};

// Reads one document; Refused if it is not one, or over a limit.
Json parse_json(const std::string& text, size_t most_bytes = size_t{16} << 20);

// A number with the fewest digits that give it back, as Python's `repr` writes it.
std::string number_text(double value);

}  // namespace host
