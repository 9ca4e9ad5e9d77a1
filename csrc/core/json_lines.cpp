// SPDX-License-Identifier: Apache-2.0
#include "core/json_lines.h"

#include <algorithm>
#include <cstdint>

namespace hotbed {

namespace {

constexpr std::size_t kCounted = 255;  // bytes whose matches fit into one byte

/// Opening brackets, those in texts included: '[' and '{' differ in one bit.
std::size_t count_openings(std::string_view line) {
  std::size_t count = 0;
  for (std::size_t begin = 0; begin < line.size(); begin += kCounted) {
    const std::string_view part = line.substr(begin, kCounted);
    std::uint8_t matches = 0;
    for (const char c : part) matches += (c | 0x20) == '{';
    count += matches;
  }
  return count;
}

bool is_deep(std::string_view line, std::size_t levels) {
  std::size_t depth = 0;
  bool in_text = false;
  for (std::size_t at = 0; at < line.size(); ++at) {
    const char c = line[at];
    if (c == '"') in_text = !in_text;
    if (in_text) {
      if (c == '\\') ++at;
    } else if (c == '[' || c == '{') {
      if (++depth > levels) return true;
    } else if ((c == ']' || c == '}') && depth > 0) {
      --depth;
    }
  }
  return false;
}

}  // namespace

std::vector<std::size_t> deep_lines(std::string_view text, std::size_t levels) {
  std::vector<std::size_t> deep;
  std::size_t begin = 0;
  for (std::size_t number = 0; begin < text.size(); ++number) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    if (line.size() > levels && count_openings(line) > levels && is_deep(line, levels)) deep.push_back(number);
    begin = end + 1;
  }
  return deep;
}

}  // namespace hotbed
