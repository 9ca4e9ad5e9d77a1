// SPDX-License-Identifier: Apache-2.0
// Rows of delimited text: where they end, which lines they begin on, and quotes that are never closed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace hotbed {

struct RowFormat {
  int quote;          // the quote character; -1 = quotes are ordinary characters
  char delimiter;     // between two fields
  std::size_t limit;  // bytes that a row may have
};

/// Text that cannot be read as a row: its line is too long, or a quote opens in it that is not closed within the limit.
struct BadRow {
  std::size_t begin;  // of the row
  std::size_t line;   // line ends between the begin of the scan and the bad line
  std::size_t at;     // in the bad line: the quote that opens, or the begin of the line
  bool is_long;       // the line is too long; else a quote opens that is never closed
};

/// Rows of the text behind `end` are not whole yet, or the first of them is `bad`.
struct RowScan {
  std::size_t end = 0;
  std::size_t rows = 0;             // before `end`; blank lines are not rows
  std::size_t lines = 0;            // line ends before `end`
  std::vector<std::size_t> jumps;   // rows before which line ends were passed that ended no row
  std::vector<std::size_t> excess;  // such line ends before each of these rows
  std::optional<BadRow> bad;
};

/// Scan the rows of `text` from `begin` on, where a row begins. A quoted field may hold line ends if a delimiter or a
/// line end follows its closing quote. `is_last`: nothing follows the text.
RowScan scan_rows(std::string_view text, std::size_t begin, const RowFormat& format, bool is_last);

}  // namespace hotbed
