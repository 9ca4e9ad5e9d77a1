// SPDX-License-Identifier: Apache-2.0
// Histories of keys against lists: what a row sees, and how entries of any number lie in rows of one size.
#include "core/histories.h"

#include <doctest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "core/hash.h"
#include "draw.h"

using namespace hotbed;

namespace {

constexpr size_t kLanes = 3;
constexpr size_t kWidth = kHeadLanes + kRowEntries * kLanes;
constexpr size_t kOlderWidth = kRowEntries * kLanes;

// The rows of two tables, and beside them the list of each key that they stand for.
struct Kept {
  std::vector<int64_t> keys{7, -1, INT64_MAX, INT64_MIN, 0};
  std::vector<int32_t> newest = std::vector<int32_t>(keys.size() * kWidth);
  std::map<int64_t, std::vector<int32_t>> older;
  std::vector<std::vector<int32_t>> lists = std::vector<std::vector<int32_t>>(keys.size());
  int32_t next_serial = 1;

  int64_t id_of(size_t key, int64_t number) const {
    const auto serial = static_cast<uint32_t>(newest[key * kWidth]);
    return older_id(partition_of(hash_id(keys[key])), serial, static_cast<uint32_t>(number));
  }

  // A key gets its number when its first older row begins.
  void apply(const ChangedRows& changed) {
    for (size_t i = 0; i < changed.keys.size(); i++) {
      const auto key = static_cast<size_t>(changed.keys[i]);
      int32_t& serial = newest[key * kWidth];
      if (!serial) serial = next_serial++;
      const int32_t* row = changed.rows.data() + i * kOlderWidth;
      const bool is_new = older.emplace(id_of(key, changed.numbers[i]), std::vector(row, row + kOlderWidth)).second;
      CHECK(is_new);
    }
    for (size_t i = 0; i < changed.gone_keys.size(); i++)
      CHECK(older.erase(id_of(static_cast<size_t>(changed.gone_keys[i]), changed.gone_numbers[i])) == 1);
  }

  StoredEntries read() const {
    const OlderRows rows = older_rows(keys.data(), newest.data(), keys.size(), kLanes);
    std::vector<int32_t> values;
    for (const int64_t id : rows.ids) {
      const auto row = older.find(id);
      const std::vector<int32_t> gone(kOlderWidth);
      const std::vector<int32_t>& lanes = row == older.end() ? gone : row->second;
      values.insert(values.end(), lanes.begin(), lanes.end());
    }
    return stored_entries(newest.data(), rows, values.data(), kLanes);
  }
};

std::vector<int32_t> part_of(const StoredEntries& stored, size_t key) {
  const auto begin = stored.entries.begin();
  const auto lanes = static_cast<int64_t>(kLanes);
  return {begin + stored.offsets[key] * lanes, begin + stored.offsets[key + 1] * lanes};
}

}  // namespace

TEST_CASE("ids of older rows lie in their partition, and never are the same") {
  std::set<int64_t> ids;
  size_t num_ids = 0;
  for (int partition : {0, 1, 128, 255})
    for (uint32_t serial : {0u, 1u, 2u, 65'536u, UINT32_MAX})
      for (uint32_t number : {0u, 1u, 2u, 255u, 65'536u, (1u << 24) - 1}) {
        const int64_t id = older_id(partition, serial, number);
        CHECK(partition_of(hash_id(id)) == partition);
        ids.insert(id);
        num_ids++;
      }
  CHECK(ids.size() == num_ids);
}

TEST_CASE("entries that come and go in any numbers are those of a list") {
  for (uint64_t seed = 0; seed < 20; seed++) {
    Draw draw(seed);
    Kept kept;
    for (int round = 0; round < 40; round++) {
      std::vector<int64_t> offsets{0}, dropped;
      std::vector<int32_t> entries;
      for (auto& list : kept.lists) {
        const uint64_t num_added = draw.below(4) ? draw.below(5) : draw.below(70);
        for (uint64_t i = 0; i < num_added * kLanes; i++) {
          entries.push_back(static_cast<int32_t>(1 + draw.below(1000)));
          list.push_back(entries.back());
        }
        offsets.push_back(static_cast<int64_t>(entries.size() / kLanes));
        const uint64_t num_dropped = draw.below(3) ? 0 : draw.below(list.size() / kLanes + 1);
        dropped.push_back(static_cast<int64_t>(num_dropped));
        list.erase(list.begin(), list.begin() + static_cast<int64_t>(num_dropped * kLanes));
      }
      kept.apply(add_entries(kept.newest.data(), kept.keys.size(), kLanes, offsets.data(), entries.data(),
                             dropped.data(), false));
      const StoredEntries stored = kept.read();
      for (size_t key = 0; key < kept.keys.size(); key++) CHECK(part_of(stored, key) == kept.lists[key]);
      CHECK(older_rows(kept.keys.data(), kept.newest.data(), kept.keys.size(), kLanes).ids.size() == kept.older.size());
    }
  }
}

TEST_CASE("an older row that is gone takes its entries along, and no others") {
  Kept kept;
  std::vector<int32_t> entries;
  for (int32_t i = 1; i <= 40 * static_cast<int32_t>(kLanes); i++) entries.push_back(i);
  const std::vector<int64_t> offsets{0, 40, 40, 40, 40, 40}, dropped(5);
  kept.apply(add_entries(kept.newest.data(), 5, kLanes, offsets.data(), entries.data(), dropped.data(), false));
  CHECK(kept.older.size() == 2);
  kept.older.erase(kept.id_of(0, 0));
  const StoredEntries stored = kept.read();
  CHECK(part_of(stored, 0) == std::vector(entries.begin() + kOlderWidth, entries.end()));
  CHECK(stored.places.front() == 16);
  CHECK(stored.places.back() == 39);
}

TEST_CASE("entries of one time add up where they are sums") {
  std::vector<int32_t> newest(kWidth);
  const std::vector<int32_t> entries{5, 1, 10, 5, 2, 20, 6, 4, 40};
  const std::vector<int64_t> offsets{0, 3}, dropped{0};
  add_entries(newest.data(), 1, kLanes, offsets.data(), entries.data(), dropped.data(), true);
  const std::vector<int32_t> again{5, 8, 80};
  const std::vector<int64_t> one{0, 1};
  add_entries(newest.data(), 1, kLanes, one.data(), again.data(), dropped.data(), true);
  const StoredEntries stored = stored_entries(newest.data(), {{0}, {}}, nullptr, kLanes);
  CHECK(stored.entries == std::vector<int32_t>{5, 11, 110, 6, 4, 40});
}

TEST_CASE("a row sees what the rule says, whatever the order of times is") {
  struct Entry {
    int64_t known, number;
  };
  for (uint64_t seed = 0; seed < 200; seed++) {
    Draw draw(seed);
    const size_t num_keys = 3, n = 80;
    const bool is_bounded = draw.below(2) == 1;
    const HistoryRule rule{1 + draw.below(6), is_bounded ? 9 : INT64_MAX, is_bounded ? 18 : INT64_MAX};
    std::vector<std::vector<Entry>> lists(num_keys);
    std::vector<int64_t> offsets{0}, stored;
    for (auto& list : lists) {
      for (uint64_t i = draw.below(10); i > 0; i--) {
        list.push_back({static_cast<int64_t>(draw.below(20)), static_cast<int64_t>(stored.size())});
        stored.push_back(list.back().known);
      }
      offsets.push_back(static_cast<int64_t>(stored.size()));
    }
    std::vector<int64_t> keys, times, newest, known, dropped(num_keys), last;
    std::vector<uint8_t> leaves;
    for (size_t i = 0; i < n; i++) {
      keys.push_back(static_cast<int64_t>(draw.below(num_keys + 1)) - 1);
      times.push_back(static_cast<int64_t>(i / 4 + draw.below(draw.below(8) ? 12 : 60)));
      newest.push_back(std::max(newest.empty() ? 0 : newest.back(), times.back()));
      known.push_back(times.back() + static_cast<int64_t>(draw.below(6)));
      leaves.push_back(draw.below(2) == 1);
    }
    const HistoryRows rows{n, keys.data(), times.data(), newest.data(), known.data(), leaves.data()};
    const SeenEntries seen = see_entries(rule, rows, num_keys, offsets.data(), stored.data());
    for (size_t i = 0; i < n; i++) {
      std::vector<int64_t> numbers;
      if (keys[i] >= 0) {
        auto& list = lists[static_cast<size_t>(keys[i])];
        const auto is_gone = [&](const Entry& entry) { return is_bounded && entry.known < newest[i] - rule.keeps; };
        std::vector<Entry> eligible;
        for (const Entry& entry : list)
          if (entry.known < times[i] && !is_gone(entry) && (!is_bounded || entry.known >= times[i] - rule.within))
            eligible.push_back(entry);
        std::stable_sort(eligible.begin(), eligible.end(),
                         [](const Entry& a, const Entry& b) { return a.known < b.known; });
        while (eligible.size() > rule.length) eligible.erase(eligible.begin());
        for (const Entry& entry : eligible) numbers.push_back(entry.number);
        if (leaves[i]) list.push_back({known[i], static_cast<int64_t>(stored.size() + i)});
        while (leaves[i] && !list.empty()) {
          const auto later = std::count_if(list.begin() + 1, list.end(), [&](const Entry& entry) {
            return entry.known < times[i] && !is_gone(entry);
          });
          if (!is_gone(list.front()) && static_cast<size_t>(later) < rule.length) break;
          list.erase(list.begin());
          dropped[static_cast<size_t>(keys[i])]++;
        }
      }
      const auto begin = seen.entries.begin();
      CHECK(std::vector(begin + seen.offsets[i], begin + seen.offsets[i + 1]) == numbers);
    }
    CHECK(seen.dropped == dropped);
    for (const auto& list : lists) {
      last.push_back(INT64_MIN);
      for (const Entry& entry : list) last.back() = std::max(last.back(), entry.known);
    }
    CHECK(seen.last == last);
  }
}
