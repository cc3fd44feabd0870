// Reading JSON: a recursive walk whose depth, size and number of values are bounded before it begins.
#include <charconv>
#include <cmath>

#include "json.h"

namespace host {

namespace {

constexpr int kMostDepth = 64;
// An empty list takes 2 bytes in a file and over 100 in memory: so there may be one for so many bytes of the limit.
constexpr size_t kBytesAContainer = 16;

class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}

  Json document() {
    Json value = read(0);
    skip();
    if (place_ != text_.size()) fail("more than one value");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Refused("not JSON: " + what + " at byte " + std::to_string(place_));
  }

  char peek() const { return place_ < text_.size() ? text_[place_] : '\0'; }

  void skip() {
    while (place_ < text_.size() && std::string_view(" \t\r\n").find(text_[place_]) != std::string_view::npos) ++place_;
  }

  bool take(char letter) {
    skip();
    if (peek() != letter) return false;
    ++place_;
    return true;
  }

  bool word(std::string_view wanted) {
    if (text_.compare(place_, wanted.size(), wanted) != 0) return false;
    place_ += wanted.size();
    return true;
  }

  Json read(int depth) {
    if (depth > kMostDepth) throw Refused("it is nested more than " + std::to_string(kMostDepth) + " deep");
    skip();
    switch (peek()) {
      case '{':
        return object(depth);
      case '[':
        return list(depth);
      case '"':
        return text();
      case 't':
        if (word("true")) return true;
        break;
      case 'f':
        if (word("false")) return false;
        break;
      case 'n':
        if (word("null")) return Json();
        break;
      default:
        return number();
    }
    fail("an unknown word");
  }

  Json object(int depth) {
    std::vector<Json::Member> members;
    ++place_;
    if (take('}')) return Json::object();
    do {
      skip();
      if (peek() != '"') fail("a key is missing");
      std::string key = text();
      if (!take(':')) fail("':' is missing");
      Json value = read(depth + 1);
      members.emplace_back(std::move(key), std::move(value));
    } while (take(','));
    if (!take('}')) fail("'}' is missing");
    return Json::object(std::move(members));
  }

  Json list(int depth) {
    std::vector<Json> items;
    ++place_;
    if (take(']')) return Json::list();
    do {
      items.push_back(read(depth + 1));
    } while (take(','));
    if (!take(']')) fail("']' is missing");
    return Json::list(std::move(items));
  }

  Json number() {
    const char* begin = text_.data() + place_;
    const char* end = begin;
    const char* last = text_.data() + text_.size();
    while (end < last && std::string_view("+-.0123456789eE").find(*end) != std::string_view::npos) ++end;
    const std::string_view seen(begin, static_cast<size_t>(end - begin));
    const size_t digit = seen.rfind('-', 0) == 0 ? 1 : 0;
    const bool leading = seen.size() > digit + 1 && seen[digit] == '0' && std::isdigit(seen[digit + 1]);
    if (seen.size() <= digit || !std::isdigit(seen[digit]) || leading) fail("an unknown value");
    place_ += seen.size();
    if (seen.find_first_of(".eE") == std::string_view::npos) {
      int64_t value = 0;
      const auto [stop, error] = std::from_chars(begin, end, value);
      if (error != std::errc() || stop != end) fail("a number that 64 bits do not hold");
      return value;
    }
    double value = 0;
    const auto [stop, error] = std::from_chars(begin, end, value);
    if (error != std::errc() || stop != end || !std::isfinite(value)) fail("a number that is not one");
    return value;
  }

  uint32_t unit() {
    uint32_t value = 0;
    if (place_ + 4 > text_.size()) fail("an escape that ends");
    const char* begin = text_.data() + place_;
    if (std::from_chars(begin, begin + 4, value, 16).ptr != begin + 4) fail("a wrong escape");
    place_ += 4;
    return value;
  }

  static void append(std::string& out, uint32_t letter) {
    if (letter < 0x80) {
      out += static_cast<char>(letter);
      return;
    }
    const int more = letter >= 0x10000 ? 3 : letter >= 0x800 ? 2 : 1;
    out += static_cast<char>((0xff00 >> (more + 1) & 0xff) | letter >> 6 * more);
    for (int i = more - 1; i >= 0; --i) out += static_cast<char>(0x80 | (letter >> 6 * i & 0x3f));
  }

  void escape(std::string& out) {
    const char letter = peek();
    ++place_;
    const size_t named = std::string_view("\"\\/bfnrt").find(letter);
    if (letter != 'u') {
      if (named == std::string_view::npos || letter == '\0') fail("a wrong escape");
      out += "\"\\/\b\f\n\r\t"[named];
      return;
    }
    uint32_t first = unit();
    if (first >= 0xd800 && first < 0xdc00 && word("\\u")) {
      const uint32_t second = unit();
      if (second < 0xdc00 || second > 0xdfff) fail("half a pair of surrogates");
      first = 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
    } else if (first >= 0xd800 && first < 0xe000) {
      fail("half a pair of surrogates");
    }
    append(out, first);
  }

  std::string text() {
    std::string out;
    for (++place_; peek() != '"';) {
      if (place_ >= text_.size() || static_cast<unsigned char>(peek()) < 0x20) fail("a text that does not end");
      if (peek() == '\\') {
        ++place_;
        escape(out);
      } else {
        out += text_[place_++];
      }
    }
    ++place_;
    return out;
  }

  const std::string& text_;
  size_t place_ = 0;
};

// Bytes that follow a first byte of UTF-8; -1 if none begins so.
int following(unsigned char first) {
  if (first < 0x80) return 0;
  if (first >= 0xc2 && first < 0xe0) return 1;
  if (first >= 0xe0 && first < 0xf0) return 2;
  return first >= 0xf0 && first < 0xf5 ? 3 : -1;
}

void check_utf8(const std::string& text) {
  for (size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i]);
    const int more = following(first);
    bool whole = more >= 0 && i + static_cast<size_t>(more) < text.size();
    for (int j = 1; whole && j <= more; ++j) whole = (static_cast<unsigned char>(text[i + j]) & 0xc0) == 0x80;
    const auto second = whole && more > 0 ? static_cast<unsigned char>(text[i + 1]) : 0x80;
    const bool overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
    const bool beyond = (first == 0xed && second > 0x9f) || (first == 0xf4 && second > 0x8f);
    if (!whole || overlong || beyond) throw Refused("not UTF-8 at byte " + std::to_string(i));
    i += static_cast<size_t>(more) + 1;
  }
}

}  // namespace

Json parse_json(const std::string& text, size_t most_bytes) {
  if (text.size() > most_bytes) throw Refused("it is larger than " + std::to_string(most_bytes >> 20) + " MiB");
  check_utf8(text);
  size_t containers = 0;
  for (const char letter : text) containers += letter == '[' || letter == '{';
  if (containers > most_bytes / kBytesAContainer) throw Refused("it has too many lists and objects");
  return Reader(text).document();
}

}  // namespace host
