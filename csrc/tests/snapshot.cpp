// SPDX-License-Identifier: Apache-2.0
// A snapshot is the table of its moment, also when another thread reads it while steps continue.
#include "core/snapshot.h"

#include <doctest.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "core/hash_bytes.h"
#include "core/step.h"
#include "draw.h"

using namespace hotbed;

namespace {

using Picture = std::map<int64_t, std::pair<std::vector<float>, int64_t>>;  // id -> values, last seen

std::shared_ptr<Table> make_table() {
  TableConfig c;
  c.name = std::string("t"), c.name_hash = hash_bytes("t", 1), c.dim = 3;
  c.rule = Rule("Adagrad").with("eps", 1e-8);
  c.keep_seen = true, c.eviction.ttl = 40;
  return std::make_shared<Table>(c);
}

void step(const std::shared_ptr<Table>& table, const std::vector<int64_t>& ids, int64_t now) {
  const int64_t n = static_cast<int64_t>(ids.size());
  const std::vector<int64_t> times(ids.size(), now);
  std::vector<float> out(ids.size() * 3), grads(out.size(), 1.0f);
  Step one({table}, {{0, Pooling::kSum}});
  one.lookup({{ids.data(), n, nullptr, nullptr, n}}, times.data(), true, true, {{out.data(), 3}});
  std::vector<float> sums(static_cast<size_t>(one.num_unique(0)) * 3);
  REQUIRE(one.sum_gradients({{grads.data(), 3}}, {sums.data()}));
  one.apply({sums.data()}, {0.1});
}

void evict(Table& table, int64_t now) {
  std::lock_guard lock(table.mutex());
  table.begin_evict(now);
  table.sweep(0, kPartitions);
}

void add(Picture& picture, const ExportedRows& rows) {
  for (size_t i = 0; i < rows.ids.size(); i++)
    picture[rows.ids[i]] = {
        {rows.values.begin() + static_cast<ptrdiff_t>(3 * i), rows.values.begin() + static_cast<ptrdiff_t>(3 * i + 3)},
        rows.seen[i]};
}

Picture everything(Table& table) {
  Picture picture;
  for (int p = 0; p < kPartitions; p++) add(picture, table.export_rows({p}));
  return picture;
}

Picture read(Table& table) {
  Picture picture;
  for (int p = 0; p < kPartitions; p++) add(picture, table.snapshot_rows({p}, 7));
  return picture;
}

}  // namespace

TEST_CASE("a picture read on another thread while steps and evictions go on is that of its moment") {
  for (const bool changes : {false, true}) {
    auto table = make_table();
    Draw draw(changes);
    const auto batch = [&draw] {
      std::vector<int64_t> ids(300);
      for (int64_t& id : ids) id = static_cast<int64_t>(draw.below(4000)) - 2000;
      return ids;
    };
    int64_t now = 0;
    for (; now < 60; now++) step(table, batch(), now);
    evict(*table, now);
    table->track(true);
    table->begin_snapshot(false);
    Picture base = read(*table);
    table->end_snapshot(true);
    for (; now < 70; now++) step(table, batch(), now);
    evict(*table, now);
    const Picture expected = everything(*table);
    table->begin_snapshot(changes);
    Picture found;
    std::thread reader([&] { found = read(*table); });
    for (int i = 0; i < 60; i++, now++) {
      step(table, batch(), now);
      if (i % 9 == 0) evict(*table, now);
    }
    reader.join();
    if (changes) {
      for (int p = 0; p < kPartitions; p++)
        for (const int64_t id : table->snapshot_part(p).removed) base.erase(id);
      for (auto& [id, row] : found) base[id] = row;
      found = base;
    }
    table->end_snapshot(true);
    CHECK(found == expected);
    CHECK_FALSE(everything(*table) == expected);
  }
}

TEST_CASE("ids are sorted as signed numbers, wherever their bits differ") {
  Draw draw(7);
  for (const int64_t range : {int64_t{1}, int64_t{1000}, int64_t{1} << 40, INT64_MAX}) {
    std::vector<SnapshotEntry> entries;
    for (const int64_t id : {INT64_MIN, int64_t{-1}, int64_t{0}, INT64_MAX}) entries.push_back({id, 0});
    for (uint32_t i = 0; i < 500; i++) {
      const int64_t id = static_cast<int64_t>(draw.below(static_cast<uint64_t>(range)));
      entries.push_back({i % 3 ? id : -id, i});
    }
    std::vector<SnapshotEntry> expected = entries;
    const auto by_id = [](const SnapshotEntry& a, const SnapshotEntry& b) { return a.id < b.id; };
    std::stable_sort(expected.begin(), expected.end(), by_id);
    sort_by_id(entries);
    const auto same = [](const SnapshotEntry& a, const SnapshotEntry& b) { return a.id == b.id && a.slot == b.slot; };
    CHECK(std::equal(entries.begin(), entries.end(), expected.begin(), expected.end(), same));
  }
  std::vector<SnapshotEntry> none;
  sort_by_id(none);
  CHECK(none.empty());
}

TEST_CASE("marks of chunks that belong to different partitions share no word") {
  Marks marks(3, 0);
  for (const uint32_t slot : {0u, 15u, 16u, 47u}) marks.set(slot);
  CHECK(marks.count() == 4);
  CHECK(marks.test(0));
  CHECK_FALSE(marks.test(14));
  CHECK(marks.inverse().count() == 44);
  Marks fewer(2, 0xffff);
  marks.unite(fewer);
  CHECK(marks.count() == 33);
}
