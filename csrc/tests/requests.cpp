// SPDX-License-Identifier: Apache-2.0
#include "core/requests.h"

#include <doctest.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

using namespace hotbed;

namespace {

const RequestLimits kLimits{4, 200, 2};

SplitRequest json(const std::string& body) { return split_json(body, kLimits); }

}  // namespace

TEST_CASE("the head of a JSON request holds a number for the values of each tensor") {
  const std::string body = R"({"id":"a]","inputs":[{"name":"u","data":[1,2]},{"data": [[1],["\"],"]] ,"shape":[2]}]})";
  const SplitRequest request = json(body);
  CHECK(request.head == R"({"id":"a]","inputs":[{"name":"u","data":0},{"data": 1 ,"shape":[2]}]})");
  CHECK(request.inputs == 2);
  REQUIRE(request.parts.size() == 2);
  CHECK(body.substr(request.parts[0].begin, request.parts[0].end - request.parts[0].begin) == "[1,2]");
  CHECK(request.parts[0].entries == 2);
  CHECK(request.parts[1].entries == 2);
}

TEST_CASE("values are counted by what separates them, and cut where the outermost list separates them") {
  for (const auto& [data, entries, cuts] : {std::tuple{"[]", 0, 0},
                                            {"[ ]", 0, 0},
                                            {"[[]]", 1, 0},
                                            {"[1]", 1, 0},
                                            {"[1,2,3,4,5]", 5, 2},
                                            {"[[1,2,3],[4,5,6]]", 6, 1},
                                            {"7", 1, 0}}) {
    const SplitRequest request = json(std::string(R"({"inputs":[{"data":)") + data + "}]}");
    CAPTURE(data);
    REQUIRE(request.parts.size() == 1);
    CHECK(request.parts[0].entries == static_cast<std::size_t>(entries));
    CHECK(request.parts[0].cuts.size() == static_cast<std::size_t>(cuts));
  }
}

TEST_CASE("a JSON request with too many inputs or too long a head is read no further") {
  CHECK(json(R"({"inputs":[{},{},{},{},{},{}]})").inputs == 5);
  CHECK_FALSE(json(R"({"x":")" + std::string(300, 'x') + R"("})").head_fits);
  CHECK_FALSE(json(R"({"inputs":[{"data":[1],"x":")" + std::string(300, 'x')).head_fits);
}

TEST_CASE("bytes that are not JSON crash nothing") {
  const std::string body = R"({"inputs":[{"name":"u","data":[[1],["\"],"]],"shape":[2]}],"a":{"b":[1,{}]}})";
  for (std::size_t size = 0; size < body.size(); ++size) {
    CHECK(json(body.substr(0, size)).parts.size() <= 1);
    for (const char c : {'[', ']', '{', '}', '"', ',', '\\', '\0'}) {
      std::string changed = body;
      changed[size] = c;
      json(changed);
    }
  }
}

TEST_CASE("flat lists of whole numbers are read, and all else is left to a decoder") {
  std::vector<std::int64_t> numbers;
  CHECK(read_integers("[ 1,-2 ,\n3, 0,9223372036854775807,-9223372036854775808 ]", numbers));
  CHECK(numbers == std::vector<std::int64_t>{1, -2, 3, 0, INT64_MAX, INT64_MIN});
  for (const char* list : {"",       "[",      "[]",      "[ ]",   "[1",
                           "[1,",    "[1,]",   "[,1]",    "[1]]",  "[1] ",
                           "1",      "[1.0]",  "[1e2]",   "[01]",  "[-01]",
                           "[-0]",   "[-]",    "[+1]",    "[--1]", "[1 2]",
                           "[null]", "[true]", "[\"1\"]", "[[1]]", "[9223372036854775808]",
                           "[0x1]"}) {
    CAPTURE(list);
    numbers.clear();
    CHECK_FALSE(read_integers(list, numbers));
  }
}

TEST_CASE("the head of a message is the message without the values of tensors") {
  const std::string contents = std::string("\x1a\x03\x01\x80\x01", 5) + std::string("\x32\x08") + std::string(8, 'f');
  const std::string input = "\x0a\x01u" + std::string("\x2a") + static_cast<char>(contents.size()) + contents;
  const std::string message =
      "\x0a\x01m" + std::string("\x2a") + static_cast<char>(input.size()) + input + "\x3a\x02xy";
  const SplitRequest request = split_message(message, kLimits);
  CHECK(request.head == std::string("\x0a\x01m\x2a\x03\x0a\x01u"));
  REQUIRE(request.parts.size() == 1);
  CHECK(message.substr(request.parts[0].begin, request.parts[0].end - request.parts[0].begin) == contents);
  CHECK(request.parts[0].entries == 4);
  REQUIRE(request.raw.size() == 1);
  CHECK(message.substr(request.raw[0].begin, request.raw[0].end - request.raw[0].begin) == "xy");
  CHECK(split_message(std::string("\x2a\x00\x2a\x00\x2a\x00\x2a\x00\x2a\x00\x2a\x00", 12), kLimits).inputs == 5);
  CHECK_FALSE(
      split_message("\x0a\x7f" + std::string(127, 'm') + "\x12\x7f" + std::string(127, 'm'), kLimits).head_fits);
  for (std::size_t size = 1; size < message.size(); ++size) {
    try {
      split_message(message.substr(0, size), kLimits);
    } catch (const std::invalid_argument&) {}
  }
}
