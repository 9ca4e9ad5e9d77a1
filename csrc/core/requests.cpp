// SPDX-License-Identifier: Apache-2.0
#include "core/requests.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <stdexcept>

namespace hotbed {

namespace {

// --- JSON -----------------------------------------------------------------------------------------------------------

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

const char* skip_spaces(const char* at, const char* end) {
  while (at != end && is_space(*at)) ++at;
  return at;
}

class JsonSplitter {
 public:
  JsonSplitter(std::string_view body, const RequestLimits& limits) : body_(body), limits_(limits) {}

  SplitRequest split() {
    object([this](std::string_view key) { return key == "inputs" && next() == '[' ? inputs() : skip_value(); });
    // What follows the first error belongs to the head, whose decoder names the error.
    if (!stopped_) copy(body_.size());
    return std::move(request_);
  }

 private:
  /// The next character that is not a blank; 0 at the end.
  char next() {
    while (at_ < body_.size() && is_space(body_[at_])) ++at_;
    return at_ < body_.size() ? body_[at_] : '\0';
  }

  bool take(char c) {
    if (next() != c) return false;
    ++at_;
    return true;
  }

  /// From the opening to behind the closing quotation mark.
  bool skip_string() {
    for (++at_; at_ < body_.size(); ++at_) {
      if (body_[at_] == '\\') ++at_;
      else if (body_[at_] == '"') return ++at_, true;
    }
    return false;
  }

  /// Any value, counting what lists in it separate.
  bool skip_value() {
    RequestPart part{};
    return measure(part);
  }

  bool measure(RequestPart& part) {
    const char first = next();
    if (first != '[' && first != '{') {
      part.entries = 1;
      if (first == '"') return skip_string();
      const auto end = body_.find_first_of(",]} \t\r\n", at_);
      at_ = std::min(end, body_.size());
      return first != '\0' && first != ',' && first != ']' && first != '}';
    }
    std::size_t depth = 0;
    std::size_t last_cut = 0;
    bool empty = true;
    while (at_ < body_.size()) {
      switch (body_[at_]) {
        case '"':
          empty = false;
          if (!skip_string()) return false;
          continue;
        case '[':
        case '{':
          if (depth++ > 0) empty = false;
          break;
        case ']':
        case '}':
          if (--depth == 0) {
            part.entries += empty ? 0 : 1;
            return ++at_, true;
          }
          break;
        case ',':
          empty = false;
          ++part.entries;
          if (depth == 1 && part.entries - last_cut >= limits_.slice) {
            part.cuts.push_back(at_);
            last_cut = part.entries;
          }
          break;
        default: empty = empty && is_space(body_[at_]);
      }
      ++at_;
    }
    return false;
  }

  /// An object; `value` is called with each key where its value begins.
  template <class Value>
  bool object(Value value) {
    if (!take('{')) return false;
    if (take('}')) return true;
    do {
      if (next() != '"') return false;
      const std::size_t begin = at_ + 1;
      if (!skip_string()) return false;
      const std::string_view key = body_.substr(begin, at_ - begin - 1);
      if (!take(':') || !value(key)) return false;
    } while (take(','));
    return take('}');
  }

  bool inputs() {
    if (!take('[')) return false;
    if (take(']')) return true;
    do {
      if (++request_.inputs > limits_.inputs) return stop();
      const bool whole = next() == '{'
                             ? object([this](std::string_view key) { return key == "data" ? data() : skip_value(); })
                             : skip_value();
      if (!whole || stopped_) return false;
    } while (take(','));
    return take(']');
  }

  bool data() {
    next();
    RequestPart part{};
    part.input = request_.inputs - 1;
    part.begin = at_;
    if (!copy(at_)) return false;
    if (!measure(part)) {
      copied_ = body_.size();  // values without an end need not be looked at again
      return false;
    }
    part.end = at_;
    copied_ = at_;
    request_.head += std::to_string(request_.parts.size());
    request_.parts.push_back(std::move(part));
    return true;
  }

  /// Take what lies before `end` into the head.
  bool copy(std::size_t end) {
    if (request_.head.size() + (end - copied_) > limits_.head_bytes) {
      request_.head_fits = false;
      return stop();
    }
    request_.head.append(body_.substr(copied_, end - copied_));
    copied_ = end;
    return true;
  }

  bool stop() {
    stopped_ = true;
    return false;
  }

  std::string_view body_;
  RequestLimits limits_;
  SplitRequest request_;
  std::size_t at_ = 0;
  std::size_t copied_ = 0;  // what lies before is in the head, or in a part
  bool stopped_ = false;
};

// --- protobuf -------------------------------------------------------------------------------------------------------

enum Wire : std::uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

struct Field {
  std::uint32_t number;
  std::uint32_t wire;
  std::size_t begin;  // of its tag
  std::size_t value;  // of its value; of bytes, behind their length
  std::size_t end;
};

/// Reads the fields of a message that lies at [begin, end) of some bytes.
class Fields {
 public:
  Fields(std::string_view bytes, std::size_t begin, std::size_t end) : bytes_(bytes), at_(begin), end_(end) {}

  bool next(Field& field) {
    if (at_ == end_) return false;
    field.begin = at_;
    const std::uint64_t tag = varint();
    field.number = static_cast<std::uint32_t>(tag >> 3);
    field.wire = static_cast<std::uint32_t>(tag & 7);
    if (tag > UINT32_MAX || field.number == 0) fail();
    field.value = at_;
    switch (field.wire) {
      case kVarint: varint(); break;
      case kFixed64: skip(8); break;
      case kFixed32: skip(4); break;
      case kBytes: {
        const std::uint64_t size = varint();
        field.value = at_;
        skip(size);
        break;
      }
      default: fail();
    }
    field.end = at_;
    return true;
  }

 private:
  [[noreturn]] static void fail() {
    throw std::invalid_argument("request: expected a protobuf message, got other bytes. Send a ModelInferRequest.");
  }

  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      if (at_ == end_) fail();
      const auto byte = static_cast<unsigned char>(bytes_[at_++]);
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    fail();
  }

  void skip(std::uint64_t size) {
    if (size > end_ - at_) fail();
    at_ += size;
  }

  std::string_view bytes_;
  std::size_t at_;
  std::size_t end_;
};

void put_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

/// How many values an InferTensorContents holds.
std::size_t count_contents(std::string_view message, const Field& contents) {
  Fields fields(message, contents.value, contents.end);
  std::size_t entries = 0;
  Field field{};
  while (fields.next(field)) {
    const std::size_t size = field.end - field.value;
    if (field.wire != kBytes || field.number > 7) ++entries;
    else if (field.number == 7) entries += size / 8;
    else if (field.number == 6) entries += size / 4;
    else
      entries += static_cast<std::size_t>(std::count_if(message.begin() + static_cast<std::ptrdiff_t>(field.value),
                                                        message.begin() + static_cast<std::ptrdiff_t>(field.end),
                                                        [](char c) { return !(c & 0x80); }));
  }
  return entries;
}

/// One InferInputTensor without its contents, which become a part.
std::string split_input(std::string_view message, const Field& input, std::size_t number, SplitRequest& request) {
  std::string head;
  Fields fields(message, input.value, input.end);
  Field field{};
  while (fields.next(field)) {
    if (field.number == 5 && field.wire == kBytes) {
      request.parts.push_back({number, field.value, field.end, count_contents(message, field), {}});
    } else {
      head.append(message.substr(field.begin, field.end - field.begin));
    }
  }
  return head;
}

}  // namespace

SplitRequest split_json(std::string_view body, const RequestLimits& limits) {
  return JsonSplitter(body, limits).split();
}

bool read_integers(std::string_view list, std::vector<std::int64_t>& numbers) {
  const char* const end = list.data() + list.size();
  const char* at = list.data();
  if (at == end || *at != '[') return false;
  while (true) {
    at = skip_spaces(at + 1, end);
    const char* digits = at;
    if (digits != end && *digits == '-') ++digits;
    if (digits == end) return false;
    std::int64_t number = 0;
    const auto [rest, error] = std::from_chars(at, end, number);
    const bool is_negative_zero = number == 0 && digits != at;
    const bool has_leading_zero = *digits == '0' && rest - digits > 1;
    if (error != std::errc() || is_negative_zero || has_leading_zero) return false;
    numbers.push_back(number);
    at = skip_spaces(rest, end);
    if (at == end) return false;
    if (*at == ']') return at + 1 == end;
    if (*at != ',') return false;
  }
}

SplitRequest split_message(std::string_view message, const RequestLimits& limits) {
  SplitRequest request;
  Fields fields(message, 0, message.size());
  Field field{};
  while (fields.next(field)) {
    if (field.number == 5 && field.wire == kBytes) {
      if (++request.inputs > limits.inputs) return request;
      const std::string input = split_input(message, field, request.inputs - 1, request);
      request.head.push_back('\x2a');
      put_varint(request.head, input.size());
      request.head += input;
    } else if (field.number == 7 && field.wire == kBytes) {
      request.raw.push_back({0, field.value, field.end, 0, {}});
      if (request.raw.size() > limits.inputs) return request;
    } else {
      request.head.append(message.substr(field.begin, field.end - field.begin));
    }
    request.head_fits = request.head.size() <= limits.head_bytes;
    if (!request.head_fits) return request;
  }
  return request;
}

}  // namespace hotbed
