// SPDX-License-Identifier: Apache-2.0
#include "core/delimited.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace hotbed {

namespace {

constexpr auto kNone = std::string_view::npos;

constexpr std::uint64_t kOnes = 0x0101010101010101;

/// The first `wanted` from `at` on. Most fields are short: eight bytes at once take less time than a call of memchr.
std::size_t find_near(std::string_view text, char wanted, std::size_t at) {
  if (std::endian::native == std::endian::little && at + 8 <= text.size()) {
    std::uint64_t word;
    std::memcpy(&word, text.data() + at, 8);
    word ^= kOnes * static_cast<unsigned char>(wanted);
    const std::uint64_t zeros = (word - kOnes) & ~word & (kOnes << 7);
    if (zeros != 0) return at + std::countr_zero(zeros) / 8;
    at += 8;
  }
  return text.find(wanted, at);
}

class RowScanner {
 public:
  RowScanner(std::string_view text, std::size_t begin, const RowFormat& format, bool is_last)
      : text_(text), format_(format), is_last_(is_last), begin_(begin) {
    scan_.end = begin;
  }

  RowScan scan() {
    while (scan_.end < text_.size()) {
      if (!pass_blank_line() && !pass_row()) break;
    }
    return std::move(scan_);
  }

 private:
  bool pass_blank_line() {
    const std::size_t at = scan_.end;
    std::size_t end = at;
    if (text_[at] == '\n') end = at + 1;
    if (text_[at] == '\r' && at + 1 < text_.size() && text_[at + 1] == '\n') end = at + 2;
    if (end == at) return false;
    scan_.end = end;
    ++scan_.lines;
    return true;
  }

  /// Pass one row. False where it is not whole, or bad.
  bool pass_row() {
    const std::size_t begin = scan_.end;
    std::size_t line = 0;  // line ends in quoted fields
    std::size_t at = begin;
    std::size_t line_end = end_of_line(at);
    while (true) {
      const std::size_t open = opening_quote(at, line_end);
      if (open == kNone) break;
      const std::size_t close = closing_quote(open + 1);
      if (close != kNone && close < line_end) {
        at = close + 1;
        continue;
      }
      if (close == kNone || close - begin >= format_.limit || !ends_field(close + 1)) {
        const bool may_close = close == kNone ? text_.size() - begin <= format_.limit : close + 1 == text_.size();
        return may_close && !is_last_ ? false : refuse({begin, line, open, false});
      }
      line += std::count(text_.begin() + open, text_.begin() + close, '\n');
      at = close + 1;
      line_end = end_of_line(at);
    }
    if (line_end - begin > format_.limit) return refuse({begin, line, at, true});
    if (line_end == text_.size() && !is_last_) return false;
    note_jump();
    scan_.end = std::min(line_end + 1, text_.size());
    scan_.lines += line + (line_end < text_.size() ? 1 : 0);
    ++scan_.rows;
    return true;
  }

  bool refuse(BadRow bad) {
    bad.line += scan_.lines;
    scan_.bad = bad;
    note_jump();
    return false;
  }

  /// Note a row whose line is not the one behind the row before it.
  void note_jump() {
    const std::size_t excess = scan_.lines - scan_.rows;
    const std::size_t known = scan_.excess.empty() ? 0 : scan_.excess.back();
    if (excess == known) return;
    scan_.jumps.push_back(scan_.rows);
    scan_.excess.push_back(excess);
  }

  std::size_t end_of_line(std::size_t at) const { return std::min(text_.find('\n', at), text_.size()); }

  /// The next quote before `end` that begins a field.
  std::size_t opening_quote(std::size_t at, std::size_t end) {
    if (format_.quote < 0) return kNone;
    // behind a quoted field
    if (at + 1 < end && text_[at] == format_.delimiter && text_[at + 1] == format_.quote) return at + 1;
    for (at = next_quote(at); at < end; at = next_quote(at + 1)) {
      if (at == begin_) return at;
      const char before = text_[at - 1];
      if (before == format_.delimiter || before == '\n' || before == '\r') return at;
    }
    return kNone;
  }

  /// The first quote from `at` on. As `at` only rises, text without quotes is searched once, not line by line.
  std::size_t next_quote(std::size_t at) {
    if (!quote_ || *quote_ < at) quote_ = text_.find(static_cast<char>(format_.quote), at);
    return *quote_;
  }

  /// The next quote that is not doubled.
  std::size_t closing_quote(std::size_t at) const {
    const char quote = static_cast<char>(format_.quote);
    while (true) {
      at = find_near(text_, quote, at);
      const bool is_doubled = at != kNone && at + 1 < text_.size() && text_[at + 1] == quote;
      if (!is_doubled) return at;
      at += 2;
    }
  }

  bool ends_field(std::size_t at) const {
    if (at == text_.size()) return is_last_;
    return text_[at] == format_.delimiter || text_[at] == '\n' || text_[at] == '\r';
  }

  std::string_view text_;
  const RowFormat& format_;
  bool is_last_;
  std::size_t begin_;
  std::optional<std::size_t> quote_;  // the last quote that was looked for
  RowScan scan_;
};

}  // namespace

RowScan scan_rows(std::string_view text, std::size_t begin, const RowFormat& format, bool is_last) {
  return RowScanner(text, begin, format, is_last).scan();
}

}  // namespace hotbed
