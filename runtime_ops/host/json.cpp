#include "json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace host {

Json Json::list(std::vector<Json> items) {
  Json value;
  value.type_ = kList;
  value.items_ = std::move(items);
  return value;
}

Json Json::object(std::vector<Member> members) {
  Json value;
  value.type_ = kObject;
  value.members_ = std::move(members);
  return value;
}

void Json::set(const std::string& key, Json value) {
  for (Member& member : members_) {
    if (member.first == key) {
      member.second = std::move(value);
      return;
    }
  }
  members_.emplace_back(key, std::move(value));
}

const Json* Json::find(const std::string& key) const {
  // The last of equal keys counts, as in Python.
  for (auto member = members_.rbegin(); member != members_.rend(); ++member) {
    if (member->first == key) return &member->second;
  }
  return nullptr;
}

const Json& Json::at(const std::string& key) const {
  const Json* found = find(key);
  if (type_ != kObject || found == nullptr) throw Refused("field '" + key + "' is missing");
  return *found;
}

namespace {

const Json& typed(const Json& value, const std::string& key, Json::Type type, const char* wanted) {
  const bool whole_real = type == Json::kReal && value.type() == Json::kInteger;
  if (value.type() == type || whole_real) return value;
  throw Refused("field '" + key + "': expected " + wanted + ", received " + value.type_name());
}

}  // namespace

const std::string& Json::text(const std::string& key) const { return typed(at(key), key, kText, "a text").text_; }
int64_t Json::integer(const std::string& key) const { return typed(at(key), key, kInteger, "an integer").integer_; }
double Json::real(const std::string& key) const { return typed(at(key), key, kReal, "a number").as_real(); }

std::vector<int64_t> Json::integers(const std::string& key) const {
  std::vector<int64_t> values;
  for (const Json& item : typed(at(key), key, kList, "a list").items()) {
    values.push_back(typed(item, key, kInteger, "integers").integer_);
  }
  return values;
}

const char* Json::type_name() const {
  constexpr const char* kNames[] = {"null", "a boolean", "an integer", "a number", "a text", "a list", "an object"};
  return kNames[type_];
}

std::string number_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char digits[40];
  *std::to_chars(digits, digits + sizeof digits - 1, value, std::chars_format::scientific).ptr = '\0';
  const char* mark = std::strchr(digits, 'e');
  const int exponent = std::atoi(mark + 1);
  if (exponent < -4 || exponent >= 16) return digits;
  char fixed[64];
  *std::to_chars(fixed, fixed + sizeof fixed - 1, value, std::chars_format::fixed).ptr = '\0';
  return std::strchr(fixed, '.') == nullptr ? std::string(fixed) + ".0" : std::string(fixed);
}

namespace {

uint32_t next_letter(const std::string& text, size_t& place) {
  const auto first = static_cast<unsigned char>(text[place++]);
  const int more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : first >= 0xc0 ? 1 : 0;
  uint32_t letter = more == 0 ? first : first & (0x3f >> more);
  for (int i = 0; i < more && place < text.size(); ++i) {
    letter = letter << 6 | (static_cast<unsigned char>(text[place++]) & 0x3f);
  }
  return letter;
}

void write_escape(std::string& out, uint32_t unit) {
  char text[8];
  std::snprintf(text, sizeof text, "\\u%04x", unit);
  out += text;
}

void write_text(std::string& out, const std::string& text, bool ascii) {
  out += '"';
  for (size_t place = 0; place < text.size();) {
    const size_t start = place;
    const uint32_t letter = next_letter(text, place);
    const char* named = letter < 0x80 ? std::strchr("\"\"\\\\\nn\rr\tt\bb\ff", static_cast<int>(letter)) : nullptr;
    if (letter == '"' || letter == '\\' || (letter != 0 && letter < 0x20 && named != nullptr)) {
      out += '\\';
      out += letter < 0x20 ? named[1] : static_cast<char>(letter);
    } else if (letter < 0x20 || (ascii && letter >= 0x7f && letter < 0x10000 && letter != 0x7f)) {
      write_escape(out, letter);
    } else if (ascii && letter >= 0x10000) {
      write_escape(out, 0xd800 + ((letter - 0x10000) >> 10));
      write_escape(out, 0xdc00 + ((letter - 0x10000) & 0x3ff));
    } else {
      out += text.substr(start, place - start);
    }
  }
  out += '"';
}

}  // namespace

std::string Json::dump(int indent, bool spaced, bool ascii, bool sorted) const {
  std::string out;
  write(out, indent, 0, spaced, ascii, sorted);
  return out;
}

void Json::write(std::string& out, int indent, int level, bool spaced, bool ascii, bool sorted) const {
  const auto line = [&](int depth) {
    if (indent >= 0) out += "\n" + std::string(static_cast<size_t>(indent * depth), ' ');
  };
  const char* comma = spaced && indent < 0 ? ", " : ",";
  if (type_ == kNull) out += "null";
  if (type_ == kBool) out += integer_ ? "true" : "false";
  if (type_ == kInteger) out += std::to_string(integer_);
  if (type_ == kText) write_text(out, text_, ascii);
  if (type_ == kReal) {
    const std::string text = number_text(real_);
    out += std::isfinite(real_) ? text : '"' + text + '"';
  }
  if (type_ == kList) {
    out += '[';
    for (size_t i = 0; i < items_.size(); ++i) {
      if (i > 0) out += comma;
      line(level + 1);
      items_[i].write(out, indent, level + 1, spaced, ascii, sorted);
    }
    if (!items_.empty()) line(level);
    out += ']';
  }
  if (type_ != kObject) return;
  std::vector<const Member*> members;
  for (const Member& member : members_) members.push_back(&member);
  if (sorted) std::sort(members.begin(), members.end(), [](auto* a, auto* b) { return a->first < b->first; });
  out += '{';
  for (size_t i = 0; i < members.size(); ++i) {
    if (i > 0) out += comma;
    line(level + 1);
    write_text(out, members[i]->first, ascii);
    out += spaced || indent >= 0 ? ": " : ":";
    members[i]->second.write(out, indent, level + 1, spaced, ascii, sorted);
  }
  if (!members.empty()) line(level);
  out += '}';
}

}  // namespace host
