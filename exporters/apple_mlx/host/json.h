// A reader of JSON: what program.json and the headers of safetensors files need, and nothing more.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace ondevice {

struct Json {
  enum class Kind { null, boolean, number, text, list, object };

  Kind kind = Kind::null;
  bool boolean = false;
  double number = 0;
  std::string text;
  std::vector<Json> list;
  std::map<std::string, Json> object;

  // The value of a key; an error that names the key where it is not there.
  const Json& at(const std::string& key) const;
  bool has(const std::string& key) const { return object.count(key) != 0; }
  int integer() const;
  std::vector<std::string> texts() const;
};

// Reads a whole document; throws std::runtime_error with the place of the first mistake.
Json parse_json(std::string_view text, const std::string& where);

// Reads a file; throws std::runtime_error that names it.
std::string read_file(const std::string& path);

}  // namespace ondevice
