// SPDX-License-Identifier: Apache-2.0
// Infer requests as raw bytes: where the values of their tensors lie and how many there are, found without decoding
// any. What is left, the head, is short and safe to decode; a request whose head or number of inputs passes the limits
// is read no further.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace hotbed {

struct RequestLimits {
  std::size_t inputs;
  std::size_t head_bytes;
  std::size_t slice;  // values between two cuts
};

/// The values of one tensor, at [begin, end) of the request.
struct RequestPart {
  std::size_t input;  // number of the tensor
  std::size_t begin;
  std::size_t end;
  std::size_t entries;            // values; an empty list in a list counts as one, as does a value that is not a list
  std::vector<std::size_t> cuts;  // commas of the outermost list, at least a slice apart
};

struct SplitRequest {
  std::string head;
  bool head_fits = true;
  std::size_t inputs = 0;  // seen; one above the limit where there are more
  std::vector<RequestPart> parts;
  std::vector<RequestPart> raw;  // raw_input_contents; their `input` and `entries` say nothing
};

/// A request in JSON. In the head the number of its part stands for each `data` of an input. Bytes that are not JSON
/// give a head or parts that are not JSON either.
SplitRequest split_json(std::string_view body, const RequestLimits& limits);

/// The numbers of a flat JSON list of whole numbers. False for all else, also for numbers beyond int64 and for "-0",
/// which a decoder of JSON has to look at.
bool read_integers(std::string_view list, std::vector<std::int64_t>& numbers);

/// A ModelInferRequest as protobuf writes it. The head is a ModelInferRequest as well, without `contents` and
/// `raw_input_contents`. Throws std::invalid_argument for bytes that are not a message.
SplitRequest split_message(std::string_view message, const RequestLimits& limits);

}  // namespace hotbed
