// SPDX-License-Identifier: Apache-2.0
// Histories of keys: which entries a row sees, and how entries of any number lie in rows of one size.
//
// A history is its entries by arrival. An entry is `lanes` whole numbers of 32 bits, its time first. The `newest` row
// of a key holds a head and the last of its entries; every kRowEntries before them are an older row, which never
// changes.
//
// UNITS. A time is a whole number of whatever unit the caller has; INT64_MAX as a limit is none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hotbed {

inline constexpr uint32_t kRowEntries = 16;  // of a row, a power of two
inline constexpr size_t kHeadLanes = 3;      // serial, entries that were dropped, entries ever: all modulo 2^32

// The rule by which a history is read and shortened; see docs/design/0023-histories.md.
struct HistoryRule {
  size_t length;   // the newest entries that are seen
  int64_t within;  // how old those are at most
  int64_t keeps;   // entries that are older than this before the newest row are gone
};

// The rows of a batch, in their order.
struct HistoryRows {
  size_t n;
  const int64_t* keys;    // the number of each row's key; -1 = it has none
  const int64_t* times;   // when each row was shown
  const int64_t* newest;  // the newest time of each row and of all that were learned before it
  const int64_t* known;   // the time of the entry that it leaves
  const uint8_t* leaves;  // whether it leaves one
};

// Entries of all keys one after the other: those of key k are [offsets[k], offsets[k + 1]).
struct SeenEntries {
  std::vector<int64_t> offsets, entries;  // of each row; an entry from the number of stored ones on is that of a row
  std::vector<int64_t> dropped;           // of each key: of its stored entries and those of rows, the first so many go
  std::vector<int64_t> last;              // of each key: the newest time of those that stay; INT64_MIN = none stays
};

// `times`: of the stored entries.
SeenEntries see_entries(const HistoryRule& rule, const HistoryRows& rows, size_t num_keys, const int64_t* offsets,
                        const int64_t* times);

// The ids of the older rows of keys. Rows of other keys or numbers never have the same id: it is a bijection of
// partition, serial number and row number. Serial 0 names no history.
int64_t older_id(int partition, uint32_t serial, uint32_t number) noexcept;

struct OlderRows {
  std::vector<int64_t> counts;  // of each key
  std::vector<int64_t> ids;
};
// `newest`: [num_keys, kHeadLanes + kRowEntries * lanes]; a row of zeros is that of a key without entries.
OlderRows older_rows(const int64_t* keys, const int32_t* newest, size_t num_keys, size_t lanes);

struct StoredEntries {
  std::vector<int64_t> offsets;
  std::vector<int32_t> entries;  // [offsets.back(), lanes]
  std::vector<int64_t> places;   // of each entry among those that were not dropped, with those whose rows are gone
};
// `older`: [number of ids, kRowEntries * lanes]; a row of zeros is gone.
StoredEntries stored_entries(const int32_t* newest, const OlderRows& rows, const int32_t* older, size_t lanes);

// What the entries of a batch change beside the newest rows: older rows that begin, and that go.
struct ChangedRows {
  std::vector<int64_t> keys, numbers;  // of rows that begin
  std::vector<int32_t> rows;
  std::vector<int64_t> gone_keys, gone_numbers;
};
// Adds entries to the newest rows: [offsets[k], offsets[k + 1]) to those of key k, after `dropped[k]` of all went.
// `sums`: an entry is added to one of the same time in the newest row, lane by lane.
ChangedRows add_entries(int32_t* newest, size_t num_keys, size_t lanes, const int64_t* offsets, const int32_t* entries,
                        const int64_t* dropped, bool sums);

}  // namespace hotbed
