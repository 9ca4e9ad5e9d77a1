// SPDX-License-Identifier: Apache-2.0
// Tables on a disk beside the same table in memory: while the disk fails, and with plans that begin and end in any
// order.
#include "core/residency.h"

#include <doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "allocations.h"
#include "core/step.h"
#include "draw.h"
#include "faulty_file.h"

using namespace hotbed;

namespace {

using Rows = std::vector<double>;

// Rows of about 800 bytes: some hundred of them fill an extent, so that they reach the disk.
TableConfig config_of(Scope scope = Scope::kTouched, int dim = 64) {
  TableConfig config;
  config.name = std::string("clicks"), config.dim = dim;
  config.rule = Rule("Adam").with("beta1", 0.9).with("beta2", 0.99).with("eps", 1e-8);
  config.rule.scope = scope;
  config.keep_seen = true;
  return config;
}

template <class F>
auto locked(Table& table, F&& work) {
  const std::lock_guard lock(table.mutex());
  return work();
}

Rows all_rows(Table& table) {
  Rows all;
  for (int p = 0; p < kPartitions; p += 4) {
    const ExportedRows rows = table.export_rows({p, p + 1, p + 2, p + 3});
    all.insert(all.end(), rows.ids.begin(), rows.ids.end());
    for (const auto* column : {&rows.values, &rows.state}) all.insert(all.end(), column->begin(), column->end());
    all.insert(all.end(), rows.seen.begin(), rows.seen.end());
    all.insert(all.end(), rows.updated.begin(), rows.updated.end());
  }
  return all;
}

std::vector<float> grads_of(const std::vector<float>& out) {
  std::vector<float> grads(out);
  for (size_t i = 0; i < grads.size(); i++) grads[i] = 0.5f * grads[i] + 0.01f * static_cast<float>(i % 13);
  return grads;
}

// One batch of a feature without pooling.
struct Batch {
  explicit Batch(std::vector<int64_t> ids, int dim = 64)
      : ids(std::move(ids)), times(this->ids.size(), 1), out(this->ids.size() * static_cast<size_t>(dim)), dim(dim) {}

  FeatureIds feature() const { return {ids.data(), size(), nullptr, nullptr, size()}; }
  int64_t size() const { return static_cast<int64_t>(ids.size()); }
  void look_up(Step& step, bool training, bool keeps) {
    step.lookup({feature()}, times.data(), training, keeps, {{out.data(), dim}});
  }
  void learn(Step& step) {
    const std::vector<float> grads = grads_of(out);
    std::vector<float> sums(static_cast<size_t>(step.num_unique(0) * dim));
    REQUIRE(step.sum_gradients({{grads.data(), dim}}, {sums.data()}));
    step.apply({sums.data()}, {0.1});
  }
  void train(const std::shared_ptr<Table>& table) {
    Step step({table}, {{0, Pooling::kNone}});
    look_up(step, true, true);
    learn(step);
  }

  std::vector<int64_t> ids, times;
  std::vector<float> out;
  int dim;
};

std::vector<int64_t> draw_ids(Draw& draw, size_t n, uint64_t most) {
  std::vector<int64_t> ids;
  while (ids.size() < n) ids.push_back(static_cast<int64_t>(draw.below(most)));
  return ids;
}

struct OnFaultyDisk {
  explicit OnFaultyDisk(EngineKind engine, Scope scope = Scope::kTouched, uint32_t ram_rows = 300, int dim = 64)
      : config(config_of(scope, dim)) {
    auto owned = std::make_unique<FaultyFile>(std::filesystem::temp_directory_path().string());
    disk = owned.get();
    StoreConfig store;
    store.engine = engine, store.file = std::move(owned);
    in_ram = std::make_shared<Table>(config);
    config.tier = Tier::kSsd, config.disk.ram_rows = ram_rows;
    config.disk.store = std::make_shared<Store>(std::move(store));
    on_disk = std::make_shared<Table>(config);
  }
  Store& store() const { return *config.disk.store; }
  void break_reads(uint64_t kind) const {
    const FaultyFile::Fault faults[] = {FaultyFile::kShortRead, FaultyFile::kReadError, FaultyFile::kFlippedRead};
    disk->rate[faults[kind % 3]] = 400;
  }
  void check_equal() const {
    disk->heal();
    CHECK(all_rows(*in_ram) == all_rows(*on_disk));
  }

  TableConfig config;
  FaultyFile* disk;
  std::shared_ptr<Table> in_ram, on_disk;
};

bool names_row(const std::string& message) {
  for (const char* part : {"table 'clicks', id ", "extent ", "block ", "slot "})
    if (message.find(part) == std::string::npos) return false;
  return true;
}

}  // namespace

TEST_CASE("a batch that meets a broken read changes nothing, and training goes on when the disk is well") {
  for (const EngineKind engine : {EngineKind::kThreads, EngineKind::kBest})
    for (const Scope scope : {Scope::kTouched, Scope::kCatchUp}) {
      OnFaultyDisk both(engine, scope);
      Draw draw(5);
      for (int i = 0; i < 40; i++) {
        Batch batch(draw_ids(draw, 150, 4000));
        batch.train(both.in_ram), batch.train(both.on_disk);
      }
      int refused = 0, went_well = 0, unread = 0;
      for (int i = 0; i < 150; i++) {
        const auto ids = draw_ids(draw, 150, 4000);
        both.store().drain();
        both.break_reads(draw.next());
        if (draw.below(2)) {  // what is read ahead tells nobody
          Batch some(ids);
          read_ahead({both.on_disk}, {{0, Pooling::kNone}}, {some.feature()});
        }
        if (draw.below(3) == 0) both.disk->heal();
        Batch expected(ids), got(ids);
        const uint64_t before = both.on_disk->calls();
        try {
          got.train(both.on_disk);
          expected.train(both.in_ram);
          went_well++;
        } catch (const RecordLost& lost) {
          CHECK(names_row(lost.message));
          CHECK(both.on_disk->calls() == before);
          refused++;
        }
        if (i % 10 == 0) both.check_equal();
        try {  // evaluation
          Batch read(draw_ids(draw, 50, 4000)), right(read.ids);
          Step of_ram({both.in_ram}, {{0, Pooling::kNone}}), of_disk({both.on_disk}, {{0, Pooling::kNone}});
          right.look_up(of_ram, false, false);
          read.look_up(of_disk, false, false);
          CHECK(right.out == read.out);
        } catch (const RecordLost& lost) {
          CHECK(names_row(lost.message));
          unread++;
        }
        both.disk->heal();
      }
      CHECK(refused > 10);
      CHECK(went_well > 10);
      CHECK(unread > 10);
      both.check_equal();
      CHECK(both.on_disk->frames().residency()->num_pinned() == 0);
    }
}

TEST_CASE("a full disk and a failed write refuse a batch before it changes anything") {
  OnFaultyDisk both(EngineKind::kThreads);
  Draw draw(6);
  both.disk->most_bytes = 6 * (256 << 10);
  int refused = 0;
  for (int i = 0; i < 200; i++) {
    const auto ids = draw_ids(draw, 150, 4000);
    Batch expected(ids), got(ids);
    try {
      got.train(both.on_disk);
      expected.train(both.in_ram);
    } catch (const StorageFull& full) {
      CHECK(full.message.find("table 'clicks': store: '") == 0);
      if (refused++ % 10 == 0) both.check_equal();
      if (refused == 30) both.disk->most_bytes = UINT64_MAX;
    }
  }
  CHECK(refused == 30);
  both.check_equal();
  both.disk->rate[FaultyFile::kWriteError] = 1000;
  std::string message;
  while (message.empty()) {
    const auto ids = draw_ids(draw, 150, 4000);
    Batch expected(ids), got(ids);
    try {
      got.train(both.on_disk);
      expected.train(both.in_ram);
    } catch (const StorageFailed& failed) { message = failed.message; }
  }
  CHECK(message.find("table 'clicks': store: '") == 0);
  CHECK(message.find("extent ") != std::string::npos);
  both.check_equal();  // all rows can still be read
}

TEST_CASE("a snapshot or a load that meets a broken read fails by name, and the next one works") {
  for (const Scope scope : {Scope::kTouched, Scope::kCatchUp}) {
    OnFaultyDisk both(EngineKind::kThreads, scope);
    Draw draw(7);
    const auto train = [&](int n) {
      for (int i = 0; i < n; i++) {
        const auto ids = draw_ids(draw, 150, 4000);
        Batch expected(ids), got(ids);
        expected.train(both.in_ram), got.train(both.on_disk);
      }
    };
    train(40);
    const auto read_snapshot = [&](Table& table) {
      locked(table, [&] { table.begin_snapshot(false); });
      if (&table == both.on_disk.get()) train(2);
      Rows all;
      for (int p = 0; p < kPartitions; p++) {
        const ExportedRows rows = table.snapshot_rows({p});
        all.insert(all.end(), rows.ids.begin(), rows.ids.end());
        for (const auto* column : {&rows.values, &rows.state}) all.insert(all.end(), column->begin(), column->end());
      }
      locked(table, [&] { table.end_snapshot(true); });
      return all;
    };
    for (uint64_t kind = 0; kind < 3; kind++) {
      both.store().drain();
      Table& table = *both.on_disk;
      locked(table, [&] { table.begin_snapshot(false); });
      both.break_reads(kind);
      std::string message;
      try {
        for (int p = 0; p < kPartitions; p++) table.snapshot_rows({p});
      } catch (const RecordLost& lost) { message = lost.message; }
      CHECK(names_row(message));
      both.disk->heal();
      locked(table, [&] { table.end_snapshot(false); });
      both.in_ram->catch_up(0, kPartitions);
      const Rows expected = read_snapshot(*both.in_ram);
      CHECK(expected == read_snapshot(*both.on_disk));

      ExportedRows rows;
      const Rows before = all_rows(*both.on_disk);
      message.clear();
      const auto load = [&] {
        const auto room = table.frames().make_room(rows.ids.size());
        locked(table, [&] { table.load_rows(rows, room.get()); });
      };
      both.break_reads(kind);
      for (int p = 0; message.empty() && p < kPartitions; p++) try {
          rows = both.in_ram->export_rows({p});
          load();
        } catch (const RecordLost& lost) { message = lost.message; }
      CHECK(names_row(message));
      both.disk->heal();
      CHECK(before == all_rows(*both.on_disk));
      load();
      both.check_equal();
    }
  }
}

TEST_CASE("a snapshot is read while rows learn on another thread") {
  OnFaultyDisk both(EngineKind::kThreads, Scope::kCatchUp);
  Draw draw(9);
  for (int i = 0; i < 40; i++) Batch(draw_ids(draw, 150, 4000)).train(both.on_disk);
  Rows expected, got;
  const auto add = [](Rows& all, const ExportedRows& rows) {
    all.insert(all.end(), rows.ids.begin(), rows.ids.end());
    for (const auto* column : {&rows.values, &rows.state}) all.insert(all.end(), column->begin(), column->end());
  };
  for (int p = 0; p < kPartitions; p += 2) add(expected, both.on_disk->export_rows({p, p + 1}));
  {
    const std::lock_guard lock(both.on_disk->mutex());
    both.on_disk->begin_snapshot(false);
  }
  std::thread reader([&] {
    for (int p = 0; p < kPartitions; p += 2) add(got, both.on_disk->snapshot_rows({p, p + 1}, 7));
  });
  for (int i = 0; i < 60; i++) {
    const auto ids = draw_ids(draw, 150, 4000);
    Batch some(ids);
    read_ahead({both.on_disk}, {{0, Pooling::kNone}}, {some.feature()});
    Batch(ids).train(both.on_disk);
  }
  reader.join();
  const std::lock_guard lock(both.on_disk->mutex());
  both.on_disk->end_snapshot(true);
  CHECK(expected == got);
}

TEST_CASE("compaction that meets broken reads loses no row") {
  OnFaultyDisk both(EngineKind::kThreads);
  Draw draw(8);
  both.disk->rate[FaultyFile::kFlippedRead] = 5;
  for (int i = 0; i < 300; i++) {
    const auto ids = draw_ids(draw, 200, 2000);
    Batch expected(ids), got(ids);
    for (bool done = false; !done;) try {
        got.train(both.on_disk);
        done = true;
      } catch (const RecordLost&) {}
    expected.train(both.in_ram);
  }
  CHECK(both.store().stats().num_compacted > 10);
  both.check_equal();
}

namespace {

// Steps of both tables that are alive together: they are mapped, divided, merged, pooled, learned and dropped in any
// order. A batch fits exactly where the distinct slots of all plans alive are not more than the frames.
struct Plans {
  struct Pair {
    std::unique_ptr<Step> of_ram, of_disk;
    std::vector<std::shared_ptr<std::set<uint32_t>>> slots;  // of the plans that it keeps
    int64_t num_samples;
  };
  explicit Plans(uint64_t seed, Scope scope, bool evaluates)
      : draw(seed), both(EngineKind::kThreads, scope, 400, 3), evaluates(evaluates) {}

  std::set<uint32_t> used() const {
    std::set<uint32_t> all;
    for (const Pair& pair : pairs)
      for (const auto& slots : pair.slots) all.insert(slots->begin(), slots->end());
    return all;
  }
  static std::unique_ptr<Step> step_of(const std::shared_ptr<Table>& table, int64_t n, bool divides) {
    return std::make_unique<Step>(std::vector<std::shared_ptr<Table>>{table}, std::vector<Feature>{{0, Pooling::kSum}},
                                  divides ? std::vector<int64_t>{n / 2, n} : std::vector<int64_t>{});
  }

  void map(bool training) {
    const bool divides = training && draw.below(3) == 0;
    Batch batch(draw_ids(draw, 20 + draw.below(160), 1500), 3);
    const int64_t n = batch.size();
    auto of_ram = step_of(both.in_ram, n, divides), of_disk = step_of(both.on_disk, n, divides);
    std::set<uint32_t> needed = used();
    Step probe({both.in_ram}, {{0, Pooling::kSum}});
    probe.map({batch.feature()}, nullptr, false);
    size_t num_new = 0;
    for (const uint32_t slot : probe.unique_slots(0)) slot == kNoSlot ? num_new++ : needed.insert(slot).second;
    bool fits = true;
    try {
      of_disk->map({batch.feature()}, batch.times.data(), training);
    } catch (const TableFull&) { fits = false; }
    if (!evaluates) CHECK(fits == (needed.size() + num_new <= 400));
    fits ? num_fit++ : num_full++;
    if (!fits) return;
    of_ram->map({batch.feature()}, batch.times.data(), training);
    const auto unique = of_ram->unique_slots(0);
    auto slots = std::make_shared<std::set<uint32_t>>(unique.begin(), unique.end());
    slots->erase(kNoSlot);
    if (!divides) {
      pairs.push_back({std::move(of_ram), std::move(of_disk), {slots}, n});
      return;
    }
    auto grains_of_ram = of_ram->divide(), grains_of_disk = of_disk->divide();
    for (size_t g = 0; g < 2; g++)
      pairs.push_back({std::move(grains_of_ram[g]), std::move(grains_of_disk[g]), {slots}, g ? n - n / 2 : n / 2});
  }

  std::vector<float> pool(Step& step, int64_t n) {
    std::vector<float> out(static_cast<size_t>(n) * 3);
    step.pool({{out.data(), 3}});
    return out;
  }
  std::vector<float> sums_of(Step& step, const std::vector<float>& out) {
    const std::vector<float> grads = grads_of(out);
    std::vector<float> sums(static_cast<size_t>(step.num_unique(0)) * 3);
    REQUIRE(step.sum_gradients({{grads.data(), 3}}, {sums.data()}));
    return sums;
  }
  // Pools a pair; both have the same rows.
  std::vector<float> pool(Pair& pair) {
    const std::vector<float> expected = pool(*pair.of_ram, pair.num_samples);
    CHECK(expected == pool(*pair.of_disk, pair.num_samples));
    return expected;
  }
  bool apply(Step& of_ram, Step& of_disk, const std::vector<float>& sums) {
    try {
      of_disk.apply({sums.data()}, {0.1});
    } catch (const TableFull&) {
      CHECK(evaluates);
      return false;
    }
    of_ram.apply({sums.data()}, {0.1});
    return true;
  }
  void learn(Pair& pair) {
    const std::vector<float> out = pool(pair);
    apply(*pair.of_ram, *pair.of_disk, sums_of(*pair.of_ram, out));
  }
  // The merged step outlives those that it is made of.
  void merge() {
    if (pairs.size() < 3) return;
    std::vector<Step*> of_ram, of_disk;
    std::vector<std::vector<float>> sums, merged_of_ram, merged_of_disk;
    std::vector<std::shared_ptr<std::set<uint32_t>>> slots;
    for (size_t i = 0; i < 3; i++) {
      Pair& pair = pairs[i];
      sums.push_back(sums_of(*pair.of_ram, pool(pair)));
      of_ram.push_back(pair.of_ram.get()), of_disk.push_back(pair.of_disk.get());
      slots.insert(slots.end(), pair.slots.begin(), pair.slots.end());
    }
    const std::vector<Sums> addresses = {{sums[0].data()}, {sums[1].data()}, {sums[2].data()}};
    auto merged = Step::merge(of_ram, addresses, &merged_of_ram);
    auto merged_on_disk = Step::merge(of_disk, addresses, &merged_of_disk);
    CHECK(merged_of_ram == merged_of_disk);
    pairs.erase(pairs.begin(), pairs.begin() + 3);
    pairs.push_back({nullptr, nullptr, slots, 0});
    const size_t at = pairs.size() - 1;
    for (uint64_t i = draw.below(4); i > 0; i--) map(true);
    if (apply(*merged, *merged_on_disk, merged_of_ram[0])) num_merged++;
    pairs.erase(pairs.begin() + static_cast<ptrdiff_t>(at));
  }

  void run() {
    for (int i = 0; i < 1500; i++) {
      const size_t at = pairs.empty() ? 0 : draw.below(pairs.size());
      switch (draw.below(12)) {
        case 0:
        case 1:
        case 2: map(true); break;
        case 3:
          if (evaluates) map(false);
          break;
        case 4:
        case 5:
          if (!pairs.empty()) learn(pairs[at]);
          break;
        case 6:
        case 7:
        case 8:
          if (!pairs.empty()) pairs.erase(pairs.begin() + static_cast<ptrdiff_t>(at));
          break;
        case 9: merge(); break;
        case 10: {
          const auto ids = draw_ids(draw, 100, 1500);
          Batch some(ids, 3);
          read_ahead({both.on_disk}, {{0, Pooling::kSum}}, {some.feature()});
          break;
        }
        case 11: {
          const auto id = static_cast<int64_t>(draw.below(1500));
          CHECK(both.in_ram->remove(id) == locked(*both.on_disk, [&] { return both.on_disk->remove(id); }));
          break;
        }
      }
      CHECK(both.on_disk->frames().residency()->num_pinned() <= 400);
      for (const Pair& pair : pairs)  // the frames of each plan alive are still its own
        if (pair.of_ram && draw.below(8) == 0) {
          std::vector<float> of_ram(static_cast<size_t>(pair.of_ram->num_unique(0)) * 3), of_disk(of_ram.size());
          std::vector<int64_t> slots(of_ram.size() / 3);
          pair.of_ram->unique_rows(0, of_ram.data(), slots.data());
          pair.of_disk->unique_rows(0, of_disk.data(), slots.data());
          CHECK(of_ram == of_disk);
        }
    }
    pairs.clear();
    both.check_equal();
    CHECK(both.on_disk->frames().residency()->num_pinned() == 0);
    CHECK(num_fit > 50);
    CHECK(num_full > 20);
    CHECK(num_merged > 20);
  }

  Draw draw;
  OnFaultyDisk both;
  bool evaluates;
  std::vector<Pair> pairs;
  int num_fit = 0, num_full = 0, num_merged = 0;
};

}  // namespace

TEST_CASE("plans that begin and end in any order keep their frames, and a batch fits exactly where its rows do") {
  for (const Scope scope : {Scope::kTouched, Scope::kCatchUp})
    for (uint64_t seed = 1; seed <= 4; seed++) Plans(seed, scope, seed % 2 == 0).run();
}

TEST_CASE("batches of many ranges in few frames, read ahead by another thread, have the bits of rows in memory") {
  OnFaultyDisk both(EngineKind::kThreads, Scope::kCatchUp, 21000, 8);
  Draw draw(4);
  for (int i = 0; i < 25; i++) {
    const auto ids = draw_ids(draw, 20000, 60000), next = draw_ids(draw, 20000, 60000);
    Batch expected(ids, 8), got(ids, 8);
    std::thread ahead([&] {
      Batch some(next, 8);
      read_ahead({both.on_disk}, {{0, Pooling::kNone}}, {some.feature()});
    });
    got.train(both.on_disk);
    expected.train(both.in_ram);
    CHECK(expected.out == got.out);
    ahead.join();
  }
  both.check_equal();
}

#if !defined(__SANITIZE_THREAD__)  // the thread sanitizer cannot follow a threaded process through fork()
TEST_CASE("the child of a fork is refused a table on a disk by name, and does not disturb the parent") {
  TableConfig config = config_of();
  config.tier = Tier::kSsd, config.disk.folder = std::filesystem::temp_directory_path(), config.disk.ram_rows = 300;
  auto table = std::make_shared<Table>(config);
  Draw draw(3);
  for (int i = 0; i < 10; i++) Batch(draw_ids(draw, 150, 4000)).train(table);
  auto kept =
      std::make_unique<Step>(std::vector<std::shared_ptr<Table>>{table}, std::vector<Feature>{{0, Pooling::kNone}});
  Batch batch(draw_ids(draw, 100, 4000));
  batch.look_up(*kept, true, true);
  const pid_t child = fork();
  if (child == 0) {
    int refused = 0;
    for (const bool training : {true, false}) try {
        Step step({table}, {{0, Pooling::kNone}});
        batch.look_up(step, training, true);
      } catch (const std::logic_error& error) {
        refused += std::string(error.what()).find("table 'clicks': its rows lie on a disk for the process") == 0;
      }
    kept.reset();
    table.reset();
    auto own = std::make_shared<Table>(config);
    for (int i = 0; i < 10; i++) Batch(draw_ids(draw, 150, 4000)).train(own);
    own.reset();
    _exit(refused == 2 ? 7 : 8);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 7);
  batch.learn(*kept);
  kept.reset();
  for (int i = 0; i < 10; i++) Batch(draw_ids(draw, 150, 4000)).train(table);
}
#endif

TEST_CASE("a batch does not wait for rows that are read ahead for others") {
  OnFaultyDisk both(EngineKind::kThreads);
  Draw draw(8);
  for (int i = 0; i < 40; i++) {
    Batch batch(draw_ids(draw, 150, 4000));
    batch.train(both.in_ram), batch.train(both.on_disk);
  }
  both.store().drain();
  const auto some_from = [&](int64_t first) {
    std::vector<int64_t> ids = draw_ids(draw, 20, 1300);
    for (int64_t& id : ids) id += first;
    return Batch(std::move(ids));
  };
  Batch later = some_from(0), now = some_from(1300), read = some_from(2600);
  Batch expected(now.ids), right(read.ids);
  both.disk->hold_next_read();
  read_ahead({both.on_disk}, {{0, Pooling::kNone}}, {later.feature()});
  both.disk->wait_for_held_read();
  now.train(both.on_disk), expected.train(both.in_ram);
  Step of_ram({both.in_ram}, {{0, Pooling::kNone}}), of_disk({both.on_disk}, {{0, Pooling::kNone}});
  right.look_up(of_ram, false, false);
  read.look_up(of_disk, false, false);
  CHECK(right.out == read.out);
  both.disk->hold_reads(false);
  later.train(both.on_disk), later.train(both.in_ram);
  both.check_equal();
}

TEST_CASE("reads that were begun are dropped where another table of the step cannot begin its own") {
  constexpr int kWide = 1024;
  OnFaultyDisk narrow(EngineKind::kThreads), wide(EngineKind::kThreads, Scope::kTouched, 100, kWide);
  Draw draw(9);
  const auto train = [&](OnFaultyDisk& both, size_t n, int dim) {
    const Batch drawn(draw_ids(draw, n, 1000), dim);
    for (const auto& table : {both.in_ram, both.on_disk}) Batch(drawn.ids, dim).train(table);
  };
  for (int i = 0; i < 40; i++) train(narrow, 150, 64), train(wide, 50, kWide);
  narrow.store().drain(), wide.store().drain();
  const Batch ids(draw_ids(draw, 80, 1000)), wide_ids(draw_ids(draw, 80, 1000), kWide);
  Step step({narrow.on_disk, wide.on_disk}, {{0, Pooling::kNone}, {1, Pooling::kNone}});
  step.map({ids.feature(), wide_ids.feature()}, ids.times.data(), false);
  std::vector<float> out(80 * 64), wide_out(80 * kWide);
  refused_bytes = 400'000;  // the copies of the wide rows have at most 327,680 bytes, their records thrice as many
  CHECK_THROWS_AS(step.pool({{out.data(), 64}, {wide_out.data(), kWide}}), std::bad_alloc);
  refused_bytes = SIZE_MAX;
  for (const auto& table : {narrow.in_ram, narrow.on_disk}) Batch(ids.ids).train(table);
  Step expected({narrow.in_ram}, {{0, Pooling::kNone}});
  expected.map({ids.feature()}, ids.times.data(), false);
  const auto rows_of = [](Step& of) {
    std::vector<float> rows(static_cast<size_t>(of.num_unique(0)) * 64);
    std::vector<int64_t> slots(static_cast<size_t>(of.num_unique(0)));
    of.unique_rows(0, rows.data(), slots.data());
    return rows;
  };
  CHECK(rows_of(step) == rows_of(expected));
}

TEST_CASE("an id that is not counted and has no row needs no frame") {
  TableConfig config = config_of();
  config.tier = Tier::kSsd;
  config.disk.folder = std::filesystem::temp_directory_path(), config.disk.ram_rows = 4;
  auto table = std::make_shared<Table>(config);
  Batch({1, 2, 3}).train(table);
  Batch batch({1, 2, 3, 9, 5});
  const uint8_t counted[] = {1, 1, 1, 0, 1};
  Step step({table}, {{0, Pooling::kNone}});
  step.mark(counted);
  batch.look_up(step, true, true);
  batch.learn(step);
  CHECK(locked(*table, [&] { return table->size(); }) == 4);
}
