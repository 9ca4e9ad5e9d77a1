// SPDX-License-Identifier: Apache-2.0
#include "core/json_lines.h"

#include <doctest.h>

#include <string>

using namespace hotbed;

TEST_CASE("brackets that are open at once outside of texts make a line deep") {
  const std::string open(300, '[');
  const std::string close(300, ']');
  const std::string text =
      "[[1]]\n[[[2]]]\n[\"[[[[\",[3],[4],[5]]\n[\"\\\"[[[\\\\\",[[6]]]\n\n" + open + close + "\n[\"" + open;
  CHECK(deep_lines(text, 2) == std::vector<std::size_t>{1, 3, 5});
  CHECK(deep_lines(text, 299) == std::vector<std::size_t>{5});
  CHECK(deep_lines(text, 300).empty());
  CHECK(deep_lines("", 1).empty());
}
