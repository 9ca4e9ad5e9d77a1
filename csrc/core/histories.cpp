// SPDX-License-Identifier: Apache-2.0
#include "histories.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "hash.h"

namespace hotbed {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
constexpr int64_t kEver = std::numeric_limits<int64_t>::min();
constexpr uint64_t kMask56 = (uint64_t{1} << 56) - 1;
constexpr uint32_t kNumbers = 1u << 24;  // row numbers of one serial

// The inverse of mix64.
uint64_t unmix64(uint64_t x) noexcept {
  x ^= x >> 33;
  x *= 0x9cb4b2f8129337dbull;
  x ^= x >> 33;
  x *= 0x4f74430c22a54005ull;
  x ^= x >> 33;
  return x;
}

// A bijection of 56 bits: the low bits choose a bucket of the index, so near numbers must lie apart.
uint64_t mix56(uint64_t x) noexcept {
  x ^= x >> 28;
  x = x * 0x9E3779B97F4A7C15ull & kMask56;
  x ^= x >> 28;
  x = x * 0xC4CEB9FE1A85EC53ull & kMask56;
  return x ^ (x >> 28);
}

// The first time that is at most `limit` before another one.
int64_t back(int64_t time, int64_t limit) noexcept { return limit == kNone ? kEver : time - limit; }

// The history of one key while the rows of a batch pass by.
class Passing {
 public:
  void add(int64_t time, int64_t entry) {
    is_sorted_ &= times_.empty() || times_.back() <= time;
    times_.push_back(time);
    entries_.push_back(entry);
  }

  void see(const HistoryRule& rule, int64_t time, int64_t newest, std::vector<int64_t>& out) {
    const int64_t from = std::max(back(time, rule.within), back(newest, rule.keeps));
    if (is_sorted_) {
      const auto begin = times_.begin() + static_cast<ptrdiff_t>(first_);
      const auto end = std::lower_bound(begin, times_.end(), time);
      const auto oldest = std::lower_bound(begin, end, from);
      const size_t seen = std::min(rule.length, static_cast<size_t>(end - oldest));
      const auto last = entries_.begin() + (end - times_.begin());
      out.insert(out.end(), last - static_cast<ptrdiff_t>(seen), last);
      return;
    }
    order_.clear();
    for (size_t i = first_; i < times_.size(); i++)
      if (times_[i] < time && times_[i] >= from) order_.push_back(i);
    std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) { return times_[a] < times_[b]; });
    const size_t seen = std::min(rule.length, order_.size());
    for (size_t i = order_.size() - seen; i < order_.size(); i++) out.push_back(entries_[order_[i]]);
  }

  // Drops the entries that arrived first, as long as enough others are known by now, or while they are too old. Those
  // that are too old are not counted, wherever they lie: their rows may be gone already.
  void shorten(const HistoryRule& rule, int64_t time, int64_t newest) {
    const int64_t oldest = back(newest, rule.keeps);
    const auto is_known = [&](size_t i) { return times_[i] >= oldest && times_[i] < time; };
    size_t known = 0;
    for (size_t i = first_; i < times_.size(); i++) known += is_known(i);
    for (; first_ < times_.size(); first_++) {
      if (times_[first_] >= oldest && known - is_known(first_) < rule.length) return;
      known -= is_known(first_);
    }
  }

  int64_t dropped() const noexcept { return static_cast<int64_t>(first_); }
  int64_t last() const noexcept {
    int64_t last = kEver;
    for (size_t i = first_; i < times_.size(); i++) last = std::max(last, times_[i]);
    return last;
  }

 private:
  size_t first_ = 0;
  bool is_sorted_ = true;
  std::vector<int64_t> times_, entries_;
  std::vector<size_t> order_;
};

// The newest row of a key. Numbers of entries wrap around at 2^32, a multiple of kRowEntries.
class Newest {
 public:
  Newest(const int32_t* row, size_t lanes) noexcept
      : row_(const_cast<int32_t*>(row)), lanes_(lanes), width_(kHeadLanes + kRowEntries * lanes) {
    for (size_t i = 0; i < width_; i++) is_empty_ &= row[i] == 0;
  }

  bool is_empty() const noexcept { return is_empty_; }
  uint32_t serial() const noexcept { return static_cast<uint32_t>(row_[0]); }
  uint32_t first() const noexcept { return static_cast<uint32_t>(row_[1]); }
  uint32_t end() const noexcept { return static_cast<uint32_t>(row_[2]); }
  uint32_t begin() const noexcept { return is_empty_ ? end() : (end() - 1) & ~(kRowEntries - 1); }  // of its own
  uint32_t first_row() const noexcept { return first() & ~(kRowEntries - 1); }
  // A history may be empty although its row holds entries: they were dropped.
  uint32_t num_older() const noexcept {
    const uint32_t span = begin() - first_row();
    return span > end() - first_row() ? 0 : span / kRowEntries;
  }
  int32_t* entry(uint32_t number) const noexcept { return row_ + kHeadLanes + (number - begin()) * lanes_; }

  void drop(uint32_t n) noexcept { row_[1] = static_cast<int32_t>(first() + n); }
  void push(const int32_t* lanes) noexcept {
    const uint32_t number = end();
    is_empty_ = false;
    row_[2] = static_cast<int32_t>(number + 1);
    if (number % kRowEntries == 0) std::memset(row_ + kHeadLanes, 0, (width_ - kHeadLanes) * sizeof(int32_t));
    std::memcpy(entry(number), lanes, lanes_ * sizeof(int32_t));
  }

 private:
  int32_t* row_;
  size_t lanes_, width_;
  bool is_empty_ = true;
};

}  // namespace

SeenEntries see_entries(const HistoryRule& rule, const HistoryRows& rows, size_t num_keys, const int64_t* offsets,
                        const int64_t* times) {
  SeenEntries seen;
  std::vector<Passing> passing(num_keys);
  for (size_t k = 0; k < num_keys; k++)
    for (int64_t i = offsets[k]; i < offsets[k + 1]; i++) passing[k].add(times[i], i);
  const int64_t num_stored = offsets[num_keys];
  seen.offsets.reserve(rows.n + 1);
  seen.offsets.push_back(0);
  for (size_t i = 0; i < rows.n; i++) {
    if (rows.keys[i] >= 0) {
      Passing& history = passing[static_cast<size_t>(rows.keys[i])];
      history.see(rule, rows.times[i], rows.newest[i], seen.entries);
      if (rows.leaves[i]) {
        history.add(rows.known[i], num_stored + static_cast<int64_t>(i));
        history.shorten(rule, rows.times[i], rows.newest[i]);
      }
    }
    seen.offsets.push_back(static_cast<int64_t>(seen.entries.size()));
  }
  for (const Passing& history : passing) {
    seen.dropped.push_back(history.dropped());
    seen.last.push_back(history.last());
  }
  return seen;
}

int64_t older_id(int partition, uint32_t serial, uint32_t number) noexcept {
  const uint64_t place = mix56(static_cast<uint64_t>(serial) << 24 | (number & (kNumbers - 1)));
  return static_cast<int64_t>(unmix64(static_cast<uint64_t>(partition) << 56 | place));
}

OlderRows older_rows(const int64_t* keys, const int32_t* newest, size_t num_keys, size_t lanes) {
  OlderRows out;
  const size_t width = kHeadLanes + kRowEntries * lanes;
  for (size_t k = 0; k < num_keys; k++) {
    const Newest row(newest + k * width, lanes);
    const uint32_t num_older = row.num_older();
    const int partition = partition_of(hash_id(keys[k]));
    for (uint32_t i = 0; i < num_older; i++)
      out.ids.push_back(older_id(partition, row.serial(), row.first_row() / kRowEntries + i));
    out.counts.push_back(num_older);
  }
  return out;
}

StoredEntries stored_entries(const int32_t* newest, const OlderRows& rows, const int32_t* older, size_t lanes) {
  StoredEntries out;
  out.offsets.push_back(0);
  const size_t width = kHeadLanes + kRowEntries * lanes, older_width = kRowEntries * lanes;
  const auto take = [&](const int32_t* from, uint32_t n, uint32_t place) {
    out.entries.insert(out.entries.end(), from, from + n * lanes);
    for (uint32_t i = 0; i < n; i++) out.places.push_back(place + i);
  };
  for (size_t k = 0; k < rows.counts.size(); k++) {
    const Newest row(newest + k * width, lanes);
    const auto num_older = static_cast<uint32_t>(rows.counts[k]);
    for (uint32_t i = 0; i < num_older; i++, older += older_width) {
      const bool is_gone = std::all_of(older, older + older_width, [](int32_t lane) { return lane == 0; });
      const uint32_t skipped = i == 0 ? row.first() - row.first_row() : 0;
      const uint32_t number = row.first_row() + i * kRowEntries + skipped;
      if (!is_gone) take(older + skipped * lanes, kRowEntries - skipped, number - row.first());
    }
    const uint32_t left = row.end() - row.first(), own = row.end() - row.begin();
    const uint32_t n = std::min(left, own);
    if (n) take(row.entry(row.end() - n), n, left - n);
    out.offsets.push_back(static_cast<int64_t>(out.entries.size() / lanes));
  }
  return out;
}

ChangedRows add_entries(int32_t* newest, size_t num_keys, size_t lanes, const int64_t* offsets, const int32_t* entries,
                        const int64_t* dropped, bool sums) {
  ChangedRows out;
  const size_t width = kHeadLanes + kRowEntries * lanes;
  for (size_t k = 0; k < num_keys; k++) {
    Newest row(newest + k * width, lanes);
    const uint32_t num_older = row.num_older(), oldest = row.first_row();
    const int64_t key = static_cast<int64_t>(k);
    const int64_t num_stored = row.end() - row.first();
    const int64_t skipped = std::max<int64_t>(0, dropped[k] - num_stored);
    row.drop(static_cast<uint32_t>(std::min(dropped[k], num_stored)));
    const uint32_t num_gone = std::min(num_older, (row.first_row() - oldest) / kRowEntries);
    for (uint32_t i = 0; i < num_gone; i++) {
      out.gone_keys.push_back(key);
      out.gone_numbers.push_back(oldest / kRowEntries + i);
    }
    for (int64_t i = offsets[k] + skipped; i < offsets[k + 1]; i++) {
      const int32_t* added = entries + static_cast<size_t>(i) * lanes;
      const uint32_t own = row.end() - row.begin(), left = row.end() - row.first();
      const uint32_t from = row.end() - std::min(own, left);
      uint32_t same = row.end();
      for (uint32_t at = from; sums && at != row.end() && same == row.end(); at++)
        if (row.entry(at)[0] == added[0]) same = at;
      if (same != row.end()) {
        for (size_t lane = 1; lane < lanes; lane++) row.entry(same)[lane] += added[lane];
        continue;
      }
      if (own == kRowEntries && left) {
        out.keys.push_back(key);
        out.numbers.push_back(row.begin() / kRowEntries);
        const int32_t* full = row.entry(row.begin());
        out.rows.insert(out.rows.end(), full, full + kRowEntries * lanes);
      }
      row.push(added);
    }
  }
  return out;
}

}  // namespace hotbed
