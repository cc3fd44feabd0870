#include "json.h"

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace ondevice {
namespace {

class Reader {
 public:
  Reader(std::string_view text, const std::string& where) : text_(text), where_(where) {}

  Json document() {
    Json value = read(0);
    skip();
    if (at_ != text_.size()) fail("more after the end");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error(where_ + ": " + what + " at byte " + std::to_string(at_));
  }

  void skip() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
  }

  char peek() {
    skip();
    if (at_ >= text_.size()) fail("the text ends too early");
    return text_[at_];
  }

  void expect(char wanted) {
    if (peek() != wanted) fail(std::string("expected '") + wanted + "'");
    ++at_;
  }

  bool word(std::string_view wanted) {
    if (text_.substr(at_, wanted.size()) != wanted) return false;
    at_ += wanted.size();
    return true;
  }

  std::string string() {
    expect('"');
    std::string found;
    while (true) {
      if (at_ >= text_.size()) fail("a string without end");
      char letter = text_[at_++];
      if (letter == '"') return found;
      if (letter != '\\') {
        found += letter;
        continue;
      }
      if (at_ >= text_.size()) fail("a string without end");
      char escaped = text_[at_++];
      switch (escaped) {
        case 'n': found += '\n'; break;
        case 't': found += '\t'; break;
        case 'r': found += '\r'; break;
        case 'b': found += '\b'; break;
        case 'f': found += '\f'; break;
        case 'u': unicode(found); break;
        default: found += escaped;
      }
    }
  }

  void unicode(std::string& found) {
    if (at_ + 4 > text_.size()) fail("a string without end");
    auto code = std::strtoul(std::string(text_.substr(at_, 4)).c_str(), nullptr, 16);
    at_ += 4;
    if (code < 0x80) {
      found += static_cast<char>(code);
    } else if (code < 0x800) {
      found += static_cast<char>(0xC0 | (code >> 6));
      found += static_cast<char>(0x80 | (code & 0x3F));
    } else {
      found += static_cast<char>(0xE0 | (code >> 12));
      found += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
      found += static_cast<char>(0x80 | (code & 0x3F));
    }
  }

  Json read(int depth) {
    if (depth > 64) fail("nested too deeply");
    Json value;
    char first = peek();
    if (first == '{') {
      value.kind = Json::Kind::object;
      ++at_;
      if (peek() == '}') {
        ++at_;
        return value;
      }
      while (true) {
        if (peek() != '"') fail("expected a key");
        std::string key = string();
        expect(':');
        value.object.emplace(std::move(key), read(depth + 1));
        if (peek() == '}') break;
        expect(',');
      }
      ++at_;
    } else if (first == '[') {
      value.kind = Json::Kind::list;
      ++at_;
      if (peek() == ']') {
        ++at_;
        return value;
      }
      while (true) {
        value.list.push_back(read(depth + 1));
        if (peek() == ']') break;
        expect(',');
      }
      ++at_;
    } else if (first == '"') {
      value.kind = Json::Kind::text;
      value.text = string();
    } else if (word("true") || word("false")) {
      value.kind = Json::Kind::boolean;
      value.boolean = text_[at_ - 2] == 'u';
    } else if (!word("null")) {
      value.kind = Json::Kind::number;
      std::string rest(text_.substr(at_, 64));
      char* end = nullptr;
      value.number = std::strtod(rest.c_str(), &end);
      if (end == rest.c_str()) fail("expected a value");
      at_ += static_cast<size_t>(end - rest.c_str());
    }
    return value;
  }

  std::string_view text_;
  std::string where_;
  size_t at_ = 0;
};

}  // namespace

const Json& Json::at(const std::string& key) const {
  auto found = object.find(key);
  if (found == object.end()) throw std::runtime_error("the program lacks '" + key + "'");
  return found->second;
}

int Json::integer() const {
  if (kind != Kind::number) throw std::runtime_error("the program has no number where one is expected");
  return static_cast<int>(number);
}

std::vector<std::string> Json::texts() const {
  std::vector<std::string> found;
  for (const Json& item : list) found.push_back(item.text);
  return found;
}

Json parse_json(std::string_view text, const std::string& where) { return Reader(text, where).document(); }

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " cannot be read");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace ondevice
