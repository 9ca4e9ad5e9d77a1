// SPDX-License-Identifier: Apache-2.0
// A table whose rows lie on a disk has the bits of one in Ram, whatever is asked of it.
#include <doctest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "core/exchange.h"
#include "draw.h"
#include "faulty_file.h"

using namespace hotbed;

namespace {

constexpr int kDim = 3;
constexpr int64_t kSamples = 64;
const std::vector<Feature> kFeatures = {{0, Pooling::kSum}, {0, Pooling::kMax}};

// Drives one table, and records whatever it answers.
struct Drive {
  std::shared_ptr<Table> table;
  Draw draw{17}, draw_ahead{18};
  std::vector<int64_t> ids, times;
  std::vector<float> out;
  std::vector<double> answers;

  explicit Drive(const TableConfig& config) : table(std::make_shared<Table>(config)) {}

  std::vector<FeatureIds> next_batch(int64_t now) {
    ids.clear();
    for (int64_t i = 0; i < 2 * kSamples; i++) ids.push_back(static_cast<int64_t>(draw.below(1200)));
    times.assign(kSamples, now);
    out.assign(2 * kSamples * kDim, NAN);
    return {{ids.data(), kSamples, nullptr, nullptr, kSamples},
            {ids.data() + kSamples, kSamples, nullptr, nullptr, kSamples}};
  }
  // The outputs of samples from `first` on.
  std::vector<OutputRows> outputs(int64_t first = 0) {
    return {{out.data() + first * 2 * kDim, 2 * kDim}, {out.data() + first * 2 * kDim + kDim, 2 * kDim}};
  }

  template <class Values>
  void record(const Values& values) {
    for (const auto value : values) answers.push_back(static_cast<double>(value));
  }
  void record(const ExportedRows& rows) {
    record(rows.ids), record(rows.values), record(rows.state), record(rows.seen);
    record(rows.counts), record(rows.updated), record(rows.scores);
  }

  std::vector<float> sums_of(Step& step, int64_t first = 0) {
    std::vector<float> grads(out);
    for (size_t i = 0; i < grads.size(); i++) grads[i] = 0.5f * grads[i] + 0.01f * static_cast<float>(i % 13);
    const float* from = grads.data() + first * 2 * kDim;
    std::vector<float> sums(static_cast<size_t>(step.num_unique(0)) * kDim);
    REQUIRE(step.sum_gradients({{from, 2 * kDim}, {from + kDim, 2 * kDim}}, {sums.data()}));
    return sums;
  }

  void learn(int64_t now) {
    Step step({table}, kFeatures);
    const auto batch = next_batch(now);
    step.lookup(batch, times.data(), true, true, outputs());
    const std::vector<float> sums = sums_of(step);
    const int64_t numbers[] = {1, 4};
    step.leave_out(0, numbers, 2);
    step.apply({sums.data()}, {0.1});
    record(out), record(step.unique_slots(0));
  }

  void learn_by_grains(int64_t now) {
    Step step({table}, kFeatures, {kSamples / 2, kSamples});
    step.map(next_batch(now), times.data(), true);
    const auto grains = step.divide();
    std::vector<std::vector<float>> sums;
    std::vector<GrainSums> of_grains;
    for (int64_t g = 0; g < 2; g++) {
      grains[static_cast<size_t>(g)]->pool(outputs(g * kSamples / 2));
      sums.push_back(sums_of(*grains[static_cast<size_t>(g)], g * kSamples / 2));
    }
    for (size_t g = 0; g < 2; g++) of_grains.push_back({{grains[g]->num_unique(0)}, {sums[g].data()}});
    std::vector<float> joined(static_cast<size_t>(step.num_unique(0)) * kDim);
    step.join(of_grains, {joined.data()});
    step.summed({joined.data()})->apply({joined.data()}, {0.1});
    record(out), record(joined);
  }

  // Two batches share an update; the first may have refused an id that the second admits.
  void learn_together(int64_t now) {
    Step first({table}, kFeatures), second({table}, kFeatures);
    std::vector<std::vector<float>> sums, merged_sums;
    for (Step* step : {&first, &second}) {
      step->map(next_batch(now), times.data(), true);
      step->pool(outputs());
      sums.push_back(sums_of(*step));
    }
    const auto merged = Step::merge({&first, &second}, {{sums[0].data()}, {sums[1].data()}}, &merged_sums);
    merged->apply({merged_sums[0].data()}, {0.1});
    record(merged_sums[0]);
  }

  // A batch is mapped before the one before it learns, and rows go and change before it is pooled.
  void learn_late(int64_t now) {
    Step step({table}, kFeatures);
    step.map(next_batch(now), times.data(), true);
    const std::vector<int64_t> ids_of_step = ids;
    learn(now);
    table->remove(ids_of_step[3]);
    std::vector<float> rows(static_cast<size_t>(step.num_unique(0)) * kDim);
    std::vector<int64_t> slots(static_cast<size_t>(step.num_unique(0)));
    step.unique_rows(0, rows.data(), slots.data());
    step.pool(outputs());
    const std::vector<float> sums = sums_of(step);
    step.apply({sums.data()}, {0.1});
    record(rows), record(slots), record(out);
  }

  void map_and_take_back(int64_t now) {
    Step step({table}, kFeatures);
    step.map(next_batch(now), times.data(), true, true);
    step.take_back();
  }

  // By slots, without a lookup.
  void update_slots(int64_t now) {
    Step mapped({table}, {{0, Pooling::kNone}});
    next_batch(now);
    mapped.map({{ids.data(), kSamples, nullptr, nullptr, kSamples}}, times.data(), true);
    std::vector<int64_t> slots(kSamples);
    mapped.position_slots(0, slots.data());
    Step step = Step::of_slots(table, slots.data(), kSamples);
    std::vector<float> grads(kSamples * kDim, 0.25f), sums(static_cast<size_t>(step.num_unique(0)) * kDim);
    REQUIRE(step.sum_gradients({{grads.data(), kDim}}, {sums.data()}));
    step.apply({sums.data()}, {0.1});
    std::vector<float> rows(kSamples * kDim);
    ColdRows cold = table->read_slots(slots.data(), slots.size(), rows.data());
    table->finish_aside(cold, rows.data());
    record(rows);
  }

  // Of ids that may come, and of some that do not.
  void fetch() {
    std::vector<int64_t> some(kSamples);
    for (int64_t& id : some) id = static_cast<int64_t>(draw_ahead.below(1500));
    read_ahead({table}, {{0, Pooling::kSum}}, {{some.data(), kSamples, nullptr, nullptr, kSamples}});
  }

  void evaluate(int64_t now) {
    Step step({table}, kFeatures);
    step.lookup(next_batch(now), nullptr, false, false, outputs());
    record(out);
  }

  void read_snapshot() {
    for (int p = 0; p < kPartitions; p++) record(table->snapshot_rows({p}));
    table->end_snapshot(true);
  }

  void run() {
    table->track(table->scope() == Scope::kTouched);
    for (int64_t now = 0; now < 12; now++) {
      if (now == 3 || now == 8) {
        table->catch_up(0, kPartitions);
        table->begin_snapshot(now == 8 && table->scope() == Scope::kTouched);
      }
      fetch(), learn(now), fetch(), learn_by_grains(now), learn_together(now), fetch(), learn_late(now);
      map_and_take_back(now), update_slots(now), evaluate(now);
      table->begin_evict(now);
      table->sweep(0, kPartitions / 2);
      if (now == 5 || now == 10) read_snapshot();
    }
    const auto loaded = std::make_shared<Table>(table->config());
    for (int p = 0; p < kPartitions; p++) {
      const ExportedRows rows = table->export_rows({p});
      record(rows);
      const auto room = loaded->frames().make_room(rows.ids.size());
      loaded->load_rows(rows, room.get());
      record(loaded->export_rows({p}));
    }
    table = loaded;
    run_loaded();
  }

  // Evaluation has frames of its own before the table learns, and where rows have gone.
  void run_loaded() {
    for (int64_t now = 12; now < 18; now++) {
      for (int i = 0; i < 4; i++) evaluate(now), fetch();
      if (now < 14) continue;
      for (int i = 0; i < 40; i++) table->remove(static_cast<int64_t>(draw.below(1200)));
      if (now == 15) {
        table->catch_up(0, kPartitions);
        table->begin_snapshot(false);
      }
      evaluate(now), learn(now), evaluate(now), map_and_take_back(now), learn_late(now);
      if (now == 16) read_snapshot();
      table->begin_evict(now);
      table->sweep(0, kPartitions);
    }
    for (int p = 0; p < kPartitions; p++) record(table->export_rows({p}));
  }
};

std::vector<double> answers_of(TableConfig config, Tier tier, EngineKind engine = EngineKind::kThreads) {
  config.tier = tier;
  config.disk.folder = std::filesystem::temp_directory_path();
  config.disk.ram_rows = 2 * 2 * kSamples;  // two batches are in flight at most
  config.disk.engine = engine;
  Drive drive(config);
  const std::shared_ptr<Table> first = drive.table;
  drive.run();
  if (tier == Tier::kSsd) {
    const ResidencyStats stats = first->frames().residency()->stats();
    CHECK(stats.misses > 100);
    CHECK(stats.fetched > 10);
  }
  return drive.answers;
}

}  // namespace

TEST_CASE("rows on a disk have the bits of rows in memory") {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16})
    for (const Scope scope : {Scope::kTouched, Scope::kCatchUp})
      for (const std::string policy : {"none", "ttl", "lru", "lfu"}) {
        CAPTURE(static_cast<int>(dtype));
        CAPTURE(static_cast<int>(scope));
        CAPTURE(policy);
        TableConfig config;
        config.name = std::string("t"), config.dim = kDim, config.dtype = dtype;
        config.rule = Rule("Adam").with("beta1", 0.9).with("beta2", 0.99).with("eps", 1e-8);
        config.rule.scope = scope;
        if (policy == "ttl") config.eviction.ttl = 3, config.keep_seen = true;
        if (policy == "lru") config.eviction.max_rows = 768, config.keep_seen = true;
        if (policy == "lfu") {
          config.eviction.max_rows = 768, config.eviction.by_count = true, config.eviction.half_life = 5.0;
          config.admission.kind = AdmitKind::kMinCount, config.admission.min_count = 2;
          config.keep_count = true;
        }
        const std::vector<double> in_ram = answers_of(config, Tier::kRam);
        for (const EngineKind engine : {EngineKind::kThreads, EngineKind::kBest}) {
          const std::vector<double> on_disk = answers_of(config, Tier::kSsd, engine);
          REQUIRE(in_ram.size() == on_disk.size());
          CHECK(std::memcmp(in_ram.data(), on_disk.data(), in_ram.size() * sizeof(double)) == 0);
        }
      }
}

namespace {

constexpr int kWide = 256, kGroups = 16;
constexpr int64_t kGroup = 40;

// A table whose rows are learned a group at a time, all with one gradient: at any moment the rows of a group are equal.
struct Groups {
  std::shared_ptr<Table> table;
  std::vector<int64_t> slots = std::vector<int64_t>(kGroups * kGroup);

  explicit Groups(const TableConfig& config, bool is_filled = true) : table(std::make_shared<Table>(config)) {
    for (int group = 0; is_filled && group < kGroups; group++) {
      const std::vector<int64_t> ids = ids_of(group);
      Step step({table}, {{0, Pooling::kNone}});
      step.map({{ids.data(), kGroup, nullptr, nullptr, kGroup}}, nullptr, true);
      step.position_slots(0, slots.data() + group * kGroup);
    }
  }
  static std::vector<int64_t> ids_of(int group) {
    std::vector<int64_t> ids(kGroup);
    for (int64_t i = 0; i < kGroup; i++) ids[static_cast<size_t>(i)] = i * kGroups + group;
    return ids;
  }

  void learn(int group) const {
    const std::vector<int64_t> ids = ids_of(group);
    Step step({table}, {{0, Pooling::kMax}});
    std::vector<float> rows(kGroup * kWide), grads(kGroup * kWide, 1.0f), sums(kGroup * kWide);
    step.lookup({{ids.data(), kGroup, nullptr, nullptr, kGroup}}, nullptr, true, true, {{rows.data(), kWide}});
    step.sum_gradients({{grads.data(), kWide}}, {sums.data()});
    step.apply({sums.data()}, {0.1});
  }
  // Removes a group; its frames are free when another one has learned.
  void end(int group, int other) const {
    for (const int64_t id : ids_of(group)) table->remove(id);
    for (int i = 0; i < 3; i++) learn(other);
  }
  // Each by another way to read; the value of the rows, or NAN where they differ or lanes of them do.
  float read(int group, int way) const {
    const std::vector<int64_t> ids = ids_of(group);
    const FeatureIds feature{ids.data(), kGroup, nullptr, nullptr, kGroup};
    std::vector<float> rows(kGroup * kWide), sums(kGroup * kWide);
    if (way == 0) {
      Step step({table}, {{0, Pooling::kNone}});
      step.lookup({feature}, nullptr, false, false, {{rows.data(), kWide}});
    } else if (way == 1) {  // max pooling reads the rows again in its backward pass
      Step step({table}, {{0, Pooling::kMax}});
      step.lookup({feature}, nullptr, false, true, {{rows.data(), kWide}});
      const std::vector<float> grads(kGroup * kWide, 1.0f);
      step.sum_gradients({{grads.data(), kWide}}, {sums.data()});
      if (sums != grads) return NAN;
    } else if (way == 2) {
      Answer answer({table});
      answer.map({{{kGroup}, ids.data()}}, false, false);
      answer.write_rows({{rows.data()}});
    } else {
      table->mutex().lock_last();
      ColdRows cold = table->read_slots(slots.data() + group * kGroup, kGroup, rows.data());
      table->mutex().unlock();
      table->finish_aside(cold, rows.data());
    }
    for (const float value : rows)
      if (value != rows[0]) return NAN;
    return rows[0];
  }
};

}  // namespace

TEST_CASE("what is read beside training on a disk is before or after a step") {
  for (const EngineKind engine : {EngineKind::kThreads, EngineKind::kBest})
    for (const Scope scope : {Scope::kTouched, Scope::kCatchUp}) {
      TableConfig config;
      config.name = std::string("t"), config.dim = kWide, config.tier = Tier::kSsd;
      config.init = {InitKind::kConstant, 1.0};
      config.rule = Rule("Adam").with("beta1", 0.9).with("beta2", 0.99).with("eps", 1e-8);
      config.rule.scope = scope;
      config.disk.folder = std::filesystem::temp_directory_path();
      config.disk.ram_rows = 3 * kGroup;
      config.disk.engine = engine;
      Groups groups(config);
      std::atomic<bool> is_over{false};
      std::atomic<int> num_wrong{0}, num_read{0};
      std::vector<std::thread> readers;
      for (int number = 0; number < 3; number++)
        readers.emplace_back([&, number] {
          Draw draw{static_cast<uint64_t>(number)};
          std::vector<float> last(kGroups, 1.0f);
          for (int i = number; !is_over; i++) {
            const auto group = static_cast<int>(draw.below(kGroups));
            const float value = groups.read(group, i % 4);
            if (!(value <= last[static_cast<size_t>(group)])) num_wrong++;  // rows fall with each step
            last[static_cast<size_t>(group)] = value;
            num_read++;
          }
        });
      Draw draw{5};
      int num_steps = 0;
      for (; num_steps < 150 || (num_read < 100 && num_steps < 5000); num_steps++)
        groups.learn(static_cast<int>(draw.below(kGroups)));
      is_over = true;
      for (std::thread& reader : readers) reader.join();
      CHECK(num_wrong == 0);
      CHECK(num_read >= 100);
      CHECK(groups.table->frames().residency()->stats().misses > 100);
    }
}

TEST_CASE("who waits for the disk to read holds up no training") {
  StoreConfig disk;
  disk.file = std::make_unique<FaultyFile>(std::filesystem::temp_directory_path());
  auto& file = static_cast<FaultyFile&>(*disk.file);
  disk.engine = EngineKind::kThreads;
  TableConfig config;
  config.name = std::string("t"), config.dim = kWide, config.tier = Tier::kSsd;
  config.init = {InitKind::kConstant, 1.0};
  config.disk.store = std::make_shared<Store>(std::move(disk));
  config.disk.ram_rows = 2 * kGroup;
  Groups groups(config);
  config.disk.store->drain();
  for (const bool has_free_frames : {false, true})
    for (int way = 0; way < 4; way++) {
      CAPTURE(has_free_frames);
      CAPTURE(way);
      groups.learn(15);
      if (has_free_frames) {
        groups.learn(8 + way);
        groups.end(8 + way, 15);
      }
      const int group = has_free_frames ? 4 + way : way;
      file.hold_reads(true);
      std::thread reader([&] { CHECK(groups.read(group, way) == 1.0f); });
      auto learned = std::async(std::launch::async, [&] {
        while (file.num_waiting() == 0) std::this_thread::yield();
        groups.learn(15);
      });
      CHECK(learned.wait_for(std::chrono::seconds(2)) == std::future_status::ready);
      file.hold_reads(false);
      reader.join();
      learned.wait();
    }
}

namespace {

// How many reads of the disk a table has made.
uint64_t num_reads(const Groups& groups) { return groups.table->frames().residency()->stats().store.num_read; }

uint64_t num_misses(const Groups& groups) { return groups.table->frames().residency()->stats().misses; }

uint32_t num_resident(const Groups& groups) { return groups.table->frames().residency()->stats().num_frames; }

}  // namespace

TEST_CASE("rows that are loaded or read come into frames that are free, and leave those of training where they are") {
  TableConfig config;
  config.name = std::string("t"), config.dim = kWide, config.tier = Tier::kSsd;
  config.init = {InitKind::kConstant, 1.0};
  config.disk.folder = std::filesystem::temp_directory_path();
  config.disk.ram_rows = 4 * kGroup;
  const Groups source(config);
  const auto loaded = [&](uint32_t ram_rows) {
    config.disk.ram_rows = ram_rows;
    StoreConfig disk;
    disk.file = std::make_unique<FaultyFile>(std::filesystem::temp_directory_path());
    config.disk.store = std::make_shared<Store>(std::move(disk));  // with figures of its own
    Groups groups(config, false);
    for (int p = 0; p < kPartitions; p++) {
      const ExportedRows rows = source.table->export_rows({p});
      const auto room = groups.table->frames().make_room(rows.ids.size());
      groups.table->load_rows(rows, room.get());
    }
    config.disk.store->drain();
    return groups;
  };
  for (int way = 0; way < 3; way++) {
    CAPTURE(way);
    Groups groups = loaded(kGroups * kGroup);  // for all rows
    CHECK(num_resident(groups) == kGroups * kGroup);
    for (int group = 0; group < kGroups; group++) CHECK(groups.read(group, way) == 1.0f);
    CHECK(num_reads(groups) == 0);

    groups = loaded(3 * kGroup);  // reading alone replaces rows
    for (int i = 0; i < 3; i++) CHECK(groups.read(5, way) == 1.0f);
    const uint64_t before = num_reads(groups);
    CHECK(before > 0);
    for (int i = 0; i < 3; i++) CHECK(groups.read(5, way) == 1.0f);
    CHECK(num_reads(groups) == before);

    groups = loaded(4 * kGroup);  // from the first step on it does not
    for (int i = 0; i < 30; i++) groups.learn(1 + i % 3);
    const uint64_t misses = num_misses(groups);
    CHECK(misses > 0);
    for (int group = 4; group < kGroups; group++) CHECK(groups.read(group, way) == 1.0f);
    for (const int group : {1, 2, 3}) groups.learn(group);
    CHECK(num_misses(groups) == misses);

    groups.end(2, 1);  // but where frames are free
    CHECK(num_resident(groups) == 3 * kGroup);
    CHECK(groups.read(9, way) == 1.0f);
    CHECK(num_resident(groups) > 3 * kGroup);
    const uint64_t after = num_reads(groups);
    CHECK(groups.read(9, way) == 1.0f);
    CHECK(num_reads(groups) == after);
    for (const int group : {1, 3}) groups.learn(group);
    CHECK(num_misses(groups) == misses);
  }
}
