// Reads `program.json` and the headers of safetensors files.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace ondevice {

using Json = nlohmann::json;
using Texts = std::vector<std::string>;

// Parses a document; throws std::runtime_error that names where it is from and the place of the first mistake.
template <class Source>
Json parse_json(Source&& source, const std::string& where) {
  try {
    return Json::parse(std::forward<Source>(source));
  } catch (const Json::exception& error) {
    throw std::runtime_error(where + ": " + error.what());
  }
}

// Reads a file; throws std::runtime_error that names it.
inline Json read_json(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " cannot be read");
  return parse_json(file, path);
}

}  // namespace ondevice
