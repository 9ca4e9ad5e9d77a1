// SPDX-License-Identifier: Apache-2.0
#include "core/delimited.h"

#include <doctest.h>

#include <string>

using namespace hotbed;

namespace {

const RowFormat kCsv{'"', ',', 20};

}  // namespace

TEST_CASE("a quoted field may hold line ends, delimiters and doubled quotes") {
  const std::string text = "1,\"a\nb,\"\"\"\n\n2,x\n3,";
  const RowScan scan = scan_rows(text, 0, kCsv, false);
  CHECK(text.substr(scan.end) == "3,");
  CHECK(scan.rows == 2);
  CHECK(scan.lines == 4);
  CHECK(scan.jumps == std::vector<std::size_t>{1});
  CHECK(scan.excess == std::vector<std::size_t>{2});
  CHECK(!scan.bad);
  CHECK(scan_rows(text, 0, kCsv, true).rows == 3);
}

TEST_CASE("a quote that does not close within the limit is bad, and so is a long line") {
  const std::string open = "1,x\n2,\"a\n3,x\n4,x\n5,x\n6,x\n";
  const RowScan scan = scan_rows(open, 0, kCsv, false);
  REQUIRE(scan.bad);
  CHECK(scan.end == scan.bad->begin);
  CHECK(open.substr(scan.bad->at, 2) == "\"a");
  CHECK(scan.bad->line == 1);
  CHECK(!scan.bad->is_long);
  CHECK(!scan_rows(open.substr(0, 12), 0, kCsv, false).bad);  // it may close yet
  CHECK(scan_rows(open.substr(0, 12), 0, kCsv, true).bad);

  const RowScan long_line = scan_rows("1,x\n" + std::string(21, 'y') + "\n", 0, kCsv, false);
  REQUIRE(long_line.bad);
  CHECK(long_line.bad->is_long);
}

TEST_CASE("a quote closes a field of several lines only before a delimiter or a line end") {
  CHECK(scan_rows("\"a\nb\"c\n", 0, kCsv, true).bad);
  CHECK(!scan_rows("\"a\"c\n", 0, kCsv, true).bad);
  CHECK(!scan_rows("\"a\nb\"\n", 0, RowFormat{-1, ',', 20}, true).bad);
}
