// SPDX-License-Identifier: Apache-2.0
// Distinct ids of a batch, and what a table finds of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "buckets.h"
#include "distinct.h"
#include "map_log.h"
#include "memory.h"
#include "pool.h"

namespace hotbed {

struct Uniques : UniqueIds {
  Column<uint32_t> slots;        // kNoSlot = no row
  Column<uint32_t> own_frames;   // filled by Table::place where a frame is not the slot
  std::vector<uint32_t> counts;  // occurrences; filled where Table::wants_counts()
  std::vector<int64_t> times;    // latest time; filled where Table::wants_times()
  std::vector<double> scores;    // aged occurrences; filled where Table::wants_scores()
  std::vector<uint32_t> missing;
  std::vector<std::pair<int64_t, uint32_t>> expired;  // of those missing: ids and the slots that they have still
  uint64_t num_rows = 0;                              // rows that the batch uses; filled by Table::count_rows
  uint64_t num_new = 0;                               // those of them that will enter; likewise
  std::unique_ptr<MapLog> log;                        // where the map may be taken back

  // Whether policies count the id now; false where all samples with it were counted before.
  bool is_counted(size_t u) const noexcept {
    if (!counts.empty()) return counts[u] > 0;
    return scores.empty() || scores[u] > -INFINITY;
  }
  // Where in the pool the row of each id lies; kNoFrame = no row, kColdFrame = not there.
  const uint32_t* frames() const noexcept { return own_frames.empty() ? slots.data() : own_frames.data(); }
  bool has_cold() const noexcept;
  void leave_frames() noexcept;  // rows that lie in frames of their own are found anew when they are used

  void take_all(const Uniques& from);                                        // its range, and all ids with their rows
  void take_ids(const Uniques& from, const std::vector<uint32_t>& numbers);  // some ids with their rows
  void append(const Uniques& from, size_t u);                                // an id with its row
  void set_row(size_t u, const Uniques& from, size_t v);                     // the row of the same id
  void drop_row(size_t u);
};

inline bool Uniques::has_cold() const noexcept {
  return std::find(own_frames.begin(), own_frames.end(), kColdFrame) != own_frames.end();
}

inline void Uniques::leave_frames() noexcept {
  for (uint32_t& frame : own_frames)
    if (frame != kNoFrame) frame = kColdFrame;
}

inline void Uniques::take_all(const Uniques& from) {
  static_cast<UniqueIds&>(*this) = from;
  slots = from.slots;
  own_frames = from.own_frames;
}

inline void Uniques::take_ids(const Uniques& from, const std::vector<uint32_t>& numbers) {
  const size_t n = numbers.size();
  ids.resize(n), hashes.resize(n), slots.resize(n), own_frames.resize(from.own_frames.empty() ? 0 : n);
  for (size_t i = 0; i < n; i++) {
    const size_t u = numbers[i] - from.base;
    ids[i] = from.ids[u], hashes[i] = from.hashes[u], slots[i] = from.slots[u];
    if (!own_frames.empty()) own_frames[i] = from.own_frames[u];
  }
}

inline void Uniques::append(const Uniques& from, size_t u) {
  ids.push_back(from.ids[u]);
  hashes.push_back(from.hashes[u]);
  slots.push_back(from.slots[u]);
  if (!from.own_frames.empty()) own_frames.push_back(from.own_frames[u]);
}

inline void Uniques::set_row(size_t u, const Uniques& from, size_t v) {
  slots[u] = from.slots[v];
  if (!own_frames.empty()) own_frames[u] = from.own_frames[v];
}

inline void Uniques::drop_row(size_t u) {
  slots[u] = kNoSlot;
  if (!own_frames.empty()) own_frames[u] = kNoFrame;
}

}  // namespace hotbed
