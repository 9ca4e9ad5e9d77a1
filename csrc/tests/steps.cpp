// SPDX-License-Identifier: Apache-2.0
// Whole training steps over tables: the promises about threads, scopes, groups, admission and eviction.
#include <doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <string>

#include "core/hash_bytes.h"
#include "core/step.h"
#include "core/thread_pool.h"
#include "draw.h"

using namespace hotbed;

namespace {

TableConfig config(const std::string& name, int dim) {
  TableConfig c;
  c.name = name, c.name_hash = hash_bytes(name.data(), name.size()), c.dim = dim;
  c.rule = Rule("Adagrad").with("eps", 1e-10);
  return c;
}

// One feature a table, one id a sample: forward, gradient = a function of the position, update.
struct Group {
  std::vector<std::shared_ptr<Table>> tables;
  std::vector<float> out, grad;
  int64_t step_width = 0;

  explicit Group(const std::vector<TableConfig>& configs) {
    for (const TableConfig& c : configs) tables.push_back(std::make_shared<Table>(c)), step_width += c.dim;
  }

  void look(const std::vector<std::vector<int64_t>>& ids, const int64_t* times, bool training, Step& step) {
    const int64_t n = static_cast<int64_t>(ids[0].size());
    out.assign(static_cast<size_t>(n * step_width), NAN);
    std::vector<FeatureIds> features;
    std::vector<OutputRows> rows;
    int64_t at = 0;
    for (size_t t = 0; t < tables.size(); t++) {
      features.push_back({ids[t].data(), n, nullptr, nullptr, n});
      rows.push_back({out.data() + at, step_width});
      at += tables[t]->config().dim;
    }
    step.lookup(features, times, training, training, rows);
  }

  std::unique_ptr<Step> make_step() const {
    std::vector<Feature> features;
    for (size_t t = 0; t < tables.size(); t++) features.push_back({static_cast<int>(t), Pooling::kSum});
    return std::make_unique<Step>(tables, features);
  }

  void train(const std::vector<std::vector<int64_t>>& ids, const int64_t* times, double lr) {
    auto step = make_step();
    look(ids, times, true, *step);
    grad.resize(out.size());
    for (size_t i = 0; i < grad.size(); i++)
      grad[i] = 0.5f * out[i] + 0.01f * static_cast<float>(static_cast<int>(i % 13) - 6);
    std::vector<GradientRows> grads;
    std::vector<std::vector<float>> sums;
    std::vector<float*> sum_at;
    Sums sum_in;
    int64_t at = 0;
    for (size_t t = 0; t < tables.size(); t++) {
      const int dim = tables[t]->config().dim;
      grads.push_back({grad.data() + at, step_width});
      at += dim;
      sums.emplace_back(static_cast<size_t>(step->num_unique(static_cast<int>(t)) * dim));
    }
    for (auto& sum : sums) sum_at.push_back(sum.data()), sum_in.push_back(sum.data());
    REQUIRE(step->sum_gradients(grads, sum_at));
    step->apply(sum_in, std::vector<double>(tables.size(), lr));
  }

  // Every row as bytes, by table and id.
  std::map<std::pair<size_t, int64_t>, std::vector<float>> dump() {
    std::map<std::pair<size_t, int64_t>, std::vector<float>> all;
    for (size_t t = 0; t < tables.size(); t++)
      for (int p = 0; p < kPartitions; p++) {
        const ExportedRows rows = tables[t]->export_rows({p});
        const size_t dim = static_cast<size_t>(tables[t]->config().dim),
                     width = static_cast<size_t>(tables[t]->layout().state_width);
        for (size_t i = 0; i < rows.ids.size(); i++) {
          auto& row = all[{t, rows.ids[i]}];
          row.assign(rows.values.begin() + static_cast<int64_t>(i * dim),
                     rows.values.begin() + static_cast<int64_t>((i + 1) * dim));
          row.insert(row.end(), rows.state.begin() + static_cast<int64_t>(i * width),
                     rows.state.begin() + static_cast<int64_t>((i + 1) * width));
        }
      }
    return all;
  }
};

bool same_bits(const std::map<std::pair<size_t, int64_t>, std::vector<float>>& a,
               const std::map<std::pair<size_t, int64_t>, std::vector<float>>& b) {
  if (a.size() != b.size()) return false;
  for (const auto& [key, row] : a) {
    const auto it = b.find(key);
    if (it == b.end() || std::memcmp(row.data(), it->second.data(), row.size() * sizeof(float)) != 0) return false;
  }
  return true;
}

std::vector<std::vector<int64_t>> draw_ids(Draw& draw, size_t num_tables, size_t n, uint64_t universe) {
  std::vector<std::vector<int64_t>> ids(num_tables);
  for (auto& feature : ids)
    for (size_t i = 0; i < n; i++) {
      const uint64_t k = std::min(draw.below(universe), draw.below(universe));
      feature.push_back(k < kSpecialIds.size() ? kSpecialIds.begin()[k] : static_cast<int64_t>(mix64(k)));
    }
  return ids;
}

struct Threads {
  explicit Threads(int n) : before(ThreadPool::num_threads()) { ThreadPool::set_num_threads(n); }
  ~Threads() { ThreadPool::set_num_threads(before); }
  int before;
};

auto run(std::vector<TableConfig> configs, int threads, size_t batch, int steps, uint64_t universe = 3000) {
  Threads guard(threads);
  Group group(configs);
  Draw draw(123);
  std::vector<int64_t> times;
  for (int s = 0; s < steps; s++) {
    const auto ids = draw_ids(draw, configs.size(), batch, universe);
    times.assign(batch, 0);
    for (int64_t& t : times) t = 1000 * s + static_cast<int64_t>(draw.below(5000));
    group.train(ids, times.data(), s % 3 == 2 ? 0.02 : 0.05);
    if (s % 4 == 3)
      for (auto& table : group.tables) {
        table->begin_evict(1000 * s);
        table->sweep(0, kPartitions / 2);  // a partial sweep: expiry must not depend on it
      }
  }
  return group.dump();
}

}  // namespace

TEST_CASE("the same bits for 1, 2 and 4 threads, small and large batches") {
  for (Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16})
    for (size_t batch : {size_t{100}, size_t{40000}}) {  // 40000 ids cut a table into ranges
      CAPTURE(static_cast<int>(dtype));
      CAPTURE(batch);
      TableConfig a = config("a", 16), b = config("b", 5);
      b.rule = Rule("Adam").with("beta1", 0.9).with("beta2", 0.99).with("eps", 1e-8);
      b.eviction.ttl = 3000, b.keep_seen = true;
      b.admission.kind = AdmitKind::kMinCount, b.admission.min_count = 3;
      a.dtype = b.dtype = dtype;
      const auto one = run({a, b}, 1, batch, 8);
      CHECK(one.size() > 100);
      CHECK(same_bits(one, run({a, b}, 2, batch, 8)));
      CHECK(same_bits(one, run({a, b}, 4, batch, 8)));
    }
}

TEST_CASE("ids that a sketch admits are the same for 1, 2 and 4 threads") {
  for (int64_t expire_after : {int64_t{-1}, int64_t{3000}}) {
    CAPTURE(expire_after);
    TableConfig c = config("waiting", 3);
    c.eviction.ttl = 4000, c.keep_seen = true;
    c.admission.kind = AdmitKind::kMinCount, c.admission.min_count = 3;
    c.admission.admission_bytes = uint64_t{1} << 18, c.admission.expire_after = expire_after;
    const auto one = run({c}, 1, 40000, 6, 60000);
    CHECK(one.size() > 1000);
    CHECK(same_bits(one, run({c}, 2, 40000, 6, 60000)));
    CHECK(same_bits(one, run({c}, 4, 40000, 6, 60000)));
  }
}

TEST_CASE("catching up gives the bits of updating every row at every step, for any thread count and storage") {
  for (Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16})
    for (const Rule& rule : {Rule("Sgd"), Rule("Momentum").with("momentum", 0.9), Rule("Adagrad").with("eps", 1e-8),
                             Rule("Adam").with("beta1", 0.9).with("beta2", 0.99).with("eps", 1e-8),
                             Rule("Ftrl").with("initial_accumulator", 0.1)}) {
      CAPTURE(rule.traits().name);
      CAPTURE(static_cast<int>(dtype));
      TableConfig a = config("a", 6);
      a.dtype = dtype;
      a.rule = rule;
      a.rule.l2 = 0.01;
      a.rule.scope = Scope::kAll;
      TableConfig b = a;
      b.rule.scope = Scope::kCatchUp;
      const auto all = run({a}, 1, 60, 20);
      CHECK(same_bits(all, run({b}, 1, 60, 20)));
      CHECK(same_bits(all, run({a}, 4, 60, 20)));
      CHECK(same_bits(all, run({b}, 4, 60, 20)));
    }
}

TEST_CASE("the tables of a group keep the same ids apart") {
  Group group({config("a", 4), config("b", 4), config("c", 4)});
  const std::vector<int64_t> ids(kSpecialIds);
  for (int s = 0; s < 3; s++) group.train({ids, ids, ids}, nullptr, 0.1);
  for (auto& table : group.tables) CHECK(table->size() == ids.size());
  const auto rows = group.dump();
  CHECK(rows.size() == 3 * ids.size());
  for (int64_t id : ids) CHECK(rows.at({0, id}) != rows.at({1, id}));
}

TEST_CASE("evaluation inserts nothing, counts nothing and reads what a server would") {
  TableConfig open = config("open", 3), gated = config("gated", 3);
  gated.admission.kind = AdmitKind::kMinCount, gated.admission.min_count = 2, gated.default_value = 0.25f;
  Group group({open, gated});
  const std::vector<int64_t> ids = {-1, -1, 5};
  for (int repeat = 0; repeat < 3; repeat++) {
    auto step = group.make_step();
    group.look({ids, ids}, nullptr, false, *step);
    float first[3];
    initial_row(open.init, group.tables[0]->key(), 5, first, 3);
    for (int d = 0; d < 3; d++) {
      CHECK(group.out[static_cast<size_t>(2 * 6 + d)] == first[d]);
      CHECK(group.out[static_cast<size_t>(2 * 6 + 3 + d)] == 0.25f);
    }
  }
  CHECK(group.tables[0]->size() == 0);
  CHECK(group.tables[1]->size() == 0);
  group.train({ids, ids}, nullptr, 0.1);
  CHECK(group.tables[0]->size() == 2);
  CHECK(group.tables[1]->size() == 1);  // -1 came twice in the batch: admitted; 5 once: not yet
  CHECK(group.tables[1]->candidates(partition_of(hash_id(5)))->entries().size() == 1);
}

TEST_CASE("the cap of a partition holds, the oldest go, and only a batch that uses more rows goes beyond it") {
  TableConfig c = config("capped", 2);
  c.eviction.max_rows = 256 * 4, c.keep_seen = true;
  Group group({c});
  std::map<int64_t, int64_t> seen;
  std::vector<std::vector<int64_t>> by_partition(kPartitions);
  for (int64_t id = 0; id < 20000; id++) by_partition[static_cast<size_t>(partition_of(hash_id(id)))].push_back(id);
  const auto& mine = by_partition[7];
  for (size_t i = 0; i < 12; i++) {
    const int64_t time = static_cast<int64_t>(i);
    group.train({{mine[i]}}, &time, 0.1);
    CHECK(group.tables[0]->size() == std::min<size_t>(i + 1, 4));
  }
  const auto rows = group.dump();
  for (size_t i = 8; i < 12; i++) CHECK(rows.count({0, mine[i]}) == 1);
  const std::vector<int64_t> times(2000, 99);
  auto step = group.make_step();
  std::vector<int64_t> all(1025);
  for (size_t i = 0; i < all.size(); i++) all[i] = static_cast<int64_t>(i);
  CHECK_THROWS_AS(group.look({all}, times.data(), true, *step), TableFull);
  CHECK(same_bits(rows, group.dump()));
  group.train({{mine[20], mine[21], mine[22], mine[23], mine[24]}}, times.data(), 0.1);
  CHECK(group.tables[0]->size() == 5);  // all of them are used: the partition goes beyond its quota
  const int64_t later = 100;
  group.train({{mine[24]}}, &later, 0.1);
  CHECK(group.tables[0]->size() == 4);
  CHECK(group.dump().count({0, mine[20]}) == 0);
  group.train({{by_partition[8][0]}}, &later, 0.1);
  CHECK(group.tables[0]->size() == 5);  // another partition has its own quota
}

TEST_CASE("an expired id is absent before any sweep, and comes back as new") {
  TableConfig c = config("short", 2);
  c.eviction.ttl = 100, c.keep_seen = true;
  Group group({c});
  int64_t time = 1000;
  group.train({{42}}, &time, 0.5);
  const auto trained = group.dump();
  Table& table = *group.tables[0];
  table.begin_evict(1099);
  CHECK(table.size() == 1);
  table.begin_evict(1100);  // inclusive
  CHECK(table.size() == 0);
  CHECK(group.dump().empty());
  auto step = group.make_step();
  group.look({{42}}, nullptr, false, *step);
  float first[2];
  initial_row(c.init, table.key(), 42, first, 2);
  CHECK(group.out[0] == first[0]);
  time = 1101;
  auto training = group.make_step();
  group.look({{42}}, &time, true, *training);
  CHECK(group.out[0] == first[0]);
  CHECK(table.size() == 1);
  CHECK(table.sweep(0, kPartitions) == 0);
  table.begin_evict(1000);  // the watermark never goes back
  CHECK(table.watermark() == 1100);
}

TEST_CASE("a table that counts steps ages by its updates, whatever times and lookups there are") {
  TableConfig c = config("steps", 2);
  c.eviction.ttl = 2, c.keep_seen = c.counts_steps = true;
  c.admission.kind = AdmitKind::kMinCount, c.admission.min_count = 2, c.admission.expire_after = 1;
  Group group({c});
  Table& table = *group.tables[0];
  const int64_t late[] = {INT64_MAX, INT64_MAX}, early[] = {INT64_MIN, INT64_MIN};
  group.train({{7, 7}}, late, 0.1);  // step 1
  group.train({{8, 8}}, early, 0.1);
  auto step = group.make_step();
  for (int i = 0; i < 5; i++) group.look({{9, 9}}, nullptr, true, *step);  // in step 3, which no update ended yet
  const auto evict = [&] {
    table.begin_evict(static_cast<int64_t>(table.step()));
    return table.sweep(0, kPartitions);
  };
  CHECK(evict() == 0);  // a row of step 1 lives through step 2
  group.train({{8, 10}}, nullptr, 0.1);
  const int p = partition_of(hash_id(10));
  CHECK(table.candidates(p)->entries().size() == 1);
  CHECK(table.candidates(p)->entries()[0].seen == 3);
  CHECK(evict() == 1);
  CHECK(table.candidates(p)->entries().size() == 1);
  CHECK(table.size() == 2);
  const auto rows = group.dump();
  for (const int64_t id : {8, 9}) CHECK(rows.count({0, id}) == 1);
  group.train({{8, 8}}, nullptr, 0.1);
  CHECK(evict() == 0);
  CHECK(table.candidates(p)->entries().empty());
  group.train({{8, 8}}, nullptr, 0.1);
  CHECK(evict() == 1);
  CHECK(group.dump().count({0, 8}) == 1);
}

TEST_CASE("an update that comes after an eviction does not touch the row's successor") {
  TableConfig c = config("slots", 2);
  c.eviction.ttl = 10, c.keep_seen = true;
  Group group({c});
  int64_t time = 0;
  auto in_flight = group.make_step();
  group.look({{1}}, &time, true, *in_flight);
  group.tables[0]->begin_evict(1000);
  group.tables[0]->sweep(0, kPartitions);
  time = 1000;
  auto later = group.make_step();
  group.look({{2}}, &time, true, *later);
  const auto before = group.dump();
  const float sum[2] = {1.0f, 1.0f};
  in_flight->apply({sum}, {0.5});
  CHECK(same_bits(before, group.dump()));
}

TEST_CASE("mapping and pooling in two calls is a lookup, bit for bit") {
  for (size_t batch : {size_t{100}, size_t{40000}})  // 40000 ids cut a table into ranges
    for (uint64_t max_rows : {uint64_t{0}, uint64_t{256} * 32}) {
      CAPTURE(batch);
      CAPTURE(max_rows);
      TableConfig a = config("a", 16), b = config("b", 5);
      a.eviction.max_rows = max_rows, a.keep_seen = true;
      b.dtype = Dtype::kBfloat16;
      b.admission.kind = AdmitKind::kMinCount, b.admission.min_count = 2, b.default_value = 0.5f;
      const std::vector<Feature> features = {{0, Pooling::kMean}, {1, Pooling::kNone}, {1, Pooling::kMax}};
      Group whole({a, b}), split({a, b});
      Draw draw(5);
      for (int s = 0; s < 4; s++) {
        const auto ids = draw_ids(draw, 3, batch, 3000);
        const int64_t n = static_cast<int64_t>(batch);
        const std::vector<int64_t> times(batch, s);
        std::vector<int64_t> offsets;
        for (int64_t i = 0; i <= n / 2; i++) offsets.push_back(2 * i);
        std::vector<float> weights(batch);
        for (float& weight : weights) weight = static_cast<float>(draw.below(8)) / 4.0f;
        std::vector<FeatureIds> input = {{ids[0].data(), n, offsets.data(), weights.data(), n / 2},
                                         {ids[1].data(), n, offsets.data(), nullptr, n / 2},
                                         {ids[2].data(), n, offsets.data(), nullptr, n / 2}};
        std::vector<float> expected(batch * 16 * 3, NAN), out(expected);
        const auto rows = [&](std::vector<float>& to) {
          float* third = to.data() + batch * 32;
          return std::vector<OutputRows>{{to.data(), 16}, {to.data() + batch * 16, 5}, {third, 5}};
        };
        Step one(whole.tables, features), two(split.tables, features);
        one.lookup(input, times.data(), true, true, rows(expected));
        two.map(input, times.data(), true);
        for (int64_t& offset : offsets) offset = -1;  // a mapped step keeps what pooling needs
        weights.assign(batch, NAN);
        two.pool(rows(out));
        CHECK(std::memcmp(expected.data(), out.data(), out.size() * sizeof(float)) == 0);
        CHECK(same_bits(whole.dump(), split.dump()));
      }
    }
}

TEST_CASE("batches that are mapped ahead of the steps before them change no bit, whatever their maps evict") {
  for (size_t batch : {size_t{100}, size_t{40000}})  // 40000 ids cut a table into ranges
    for (size_t depth : {size_t{1}, size_t{3}}) {
      CAPTURE(batch);
      CAPTURE(depth);
      TableConfig a = config("a", 4), b = config("b", 3);
      a.eviction.max_rows = 256 * (batch / 100), a.keep_seen = true;
      b.eviction.max_rows = 256 * (batch / 100), b.eviction.by_count = true, b.keep_count = true;
      b.admission.kind = AdmitKind::kMinCount, b.admission.min_count = 2, b.default_value = 0.5f;
      const std::vector<Feature> features = {{0, Pooling::kSum}, {1, Pooling::kMax}};
      const int num_steps = 12;
      Draw draw(11);
      std::vector<std::vector<std::vector<int64_t>>> ids;
      for (int s = 0; s < num_steps; s++) ids.push_back(draw_ids(draw, 2, batch, batch * 3));
      const int64_t n = static_cast<int64_t>(batch);
      const auto input = [&](size_t s) {
        return std::vector<FeatureIds>{{ids[s][0].data(), n, nullptr, nullptr, n},
                                       {ids[s][1].data(), n, nullptr, nullptr, n}};
      };
      const auto learn = [&](Step& step) {  // returns what the lookup gave
        std::vector<float> out(batch * 7), grad(out.size());
        step.pool({{out.data(), 7}, {out.data() + 4, 7}});
        for (size_t i = 0; i < grad.size(); i++) grad[i] = out[i] + 0.01f * static_cast<float>(i % 13);
        std::vector<float> first(static_cast<size_t>(step.num_unique(0) * 4));
        std::vector<float> second(static_cast<size_t>(step.num_unique(1) * 3));
        REQUIRE(step.sum_gradients({{grad.data(), 7}, {grad.data() + 4, 7}}, {first.data(), second.data()}));
        step.apply({first.data(), second.data()}, {0.1, 0.1});
        return out;
      };
      Group alone({a, b}), ahead({a, b});
      std::deque<std::unique_ptr<Step>> mapped;
      size_t next = 0;
      for (size_t s = 0; s < num_steps; s++) {
        const std::vector<int64_t> times(batch, static_cast<int64_t>(s));
        Step step(alone.tables, features);
        step.map(input(s), times.data(), true);
        const std::vector<float> expected = learn(step);
        for (; next < num_steps && next <= s + depth; next++) {
          const std::vector<int64_t> times_of_next(batch, static_cast<int64_t>(next));
          mapped.push_back(std::make_unique<Step>(ahead.tables, features));
          mapped.back()->map(input(next), times_of_next.data(), true);
        }
        const std::vector<float> out = learn(*mapped.front());
        mapped.pop_front();
        CHECK(std::memcmp(expected.data(), out.data(), out.size() * sizeof(float)) == 0);
      }
      CHECK(alone.tables[0]->stats().evicted > 200);
      CHECK(alone.tables[0]->stats().evicted == ahead.tables[0]->stats().evicted);
      CHECK(same_bits(alone.dump(), ahead.dump()));
    }
}

TEST_CASE("a mapped step pools its rows as they are when it pools") {
  for (Scope scope : {Scope::kTouched, Scope::kAll, Scope::kCatchUp}) {
    CAPTURE(static_cast<int>(scope));
    TableConfig c = config("late", 2);
    c.rule = Rule("Momentum").with("momentum", 0.9);
    c.rule.scope = scope;
    c.eviction.ttl = 10, c.keep_seen = true;
    Group group({c});
    const std::vector<int64_t> first_times = {0, 0};
    group.train({{1, 2}}, first_times.data(), 0.5);
    const std::vector<int64_t> ids = {1, 2};
    const std::vector<int64_t> times = {0, 1000};
    auto step = group.make_step();
    step->map({{ids.data(), 2, nullptr, nullptr, 2}}, times.data(), true);
    group.train({{2}}, times.data() + 1, 0.5);
    float now[2][2], expected[2][2];
    for (size_t i = 0; i < 2; i++) {
      auto fresh = group.make_step();
      group.look({{ids[i]}}, nullptr, false, *fresh);
      std::copy_n(group.out.data(), 2, expected[i]);
    }
    step->pool({{now[0], 2}});
    CHECK(std::memcmp(now, expected, sizeof now) == 0);
    group.tables[0]->begin_evict(100);
    CHECK(group.tables[0]->sweep(0, kPartitions) == 1);
    initial_row(c.init, group.tables[0]->key(), 1, expected[0], 2);
    step->pool({{now[0], 2}});  // 1 has gone, and reads as an id without a row
    CHECK(std::memcmp(now, expected, sizeof now) == 0);
  }
}

TEST_CASE("a mapped step pools rows that have taken the steps of others since, whoever replays them") {
  std::vector<std::vector<float>> pooled;
  for (Scope scope : {Scope::kAll, Scope::kCatchUp, Scope::kTouched}) {
    TableConfig c = config("late", 2);
    c.rule = Rule("Momentum").with("momentum", 0.9);
    c.rule.scope = scope;
    Group group({c});
    group.train({{1, 2}}, nullptr, 0.5);
    const std::vector<int64_t> ids = {1, 2};
    auto step = group.make_step();
    step->map({{ids.data(), 2, nullptr, nullptr, 2}}, nullptr, true);
    group.train({{2}}, nullptr, 0.5);
    pooled.emplace_back(4, NAN);
    step->pool({{pooled.back().data(), 2}});
  }
  CHECK(pooled[0] == pooled[1]);
  CHECK(pooled[0] != pooled[2]);
}

TEST_CASE("only a mapped step can be pooled") {
  Group group({config("t", 2)});
  auto step = group.make_step();
  CHECK_THROWS_AS(step->pool({{nullptr, 0}}), std::logic_error);
  group.look({{1}}, nullptr, false, *step);  // not kept
  CHECK_THROWS_AS(step->pool({{nullptr, 0}}), std::logic_error);
}

TEST_CASE("slots of rows that went are reused, also where a plan always lives until the next is made") {
  for (int together : {1, 2, 3}) {  // plans alive at a time
    TableConfig c = config("churn", 2);
    c.eviction.ttl = 10, c.keep_seen = true;
    Group group({c});
    std::vector<std::unique_ptr<Step>> alive;
    uint64_t early = 0;
    for (int64_t n = 0; n < 120; n++) {
      const int64_t time = n * 100;
      std::vector<int64_t> ids(500);
      for (size_t i = 0; i < ids.size(); i++) ids[i] = n * 500 + static_cast<int64_t>(i);
      const std::vector<int64_t> times(ids.size(), time);
      auto step = group.make_step();
      group.look({ids}, times.data(), true, *step);
      alive.push_back(std::move(step));
      if (static_cast<int>(alive.size()) > together) alive.erase(alive.begin());
      group.tables[0]->begin_evict(time + 50);
      CHECK(group.tables[0]->sweep(0, kPartitions) == 500);
      if (n == 20) early = group.tables[0]->num_slots();
    }
    CHECK(group.tables[0]->num_slots() <= 2 * early);
  }
}

TEST_CASE("a slot is not given away while a plan knows it, whatever else is made and retired") {
  TableConfig c = config("held", 2);
  c.eviction.ttl = 10, c.keep_seen = true;
  Group group({c});
  int64_t time = 0;
  auto old = group.make_step();
  group.look({{1}}, &time, true, *old);
  std::unique_ptr<Step> last;
  for (int64_t n = 2; n < 40; n++) {
    time = n * 1000;
    group.tables[0]->begin_evict(time);
    group.tables[0]->sweep(0, kPartitions);
    auto step = group.make_step();
    group.look({{n}}, &time, true, *step);
    last = std::move(step);
    uint32_t slot = 0, held = 0;
    int64_t slots[1];
    old->position_slots(0, slots), held = static_cast<uint32_t>(slots[0]);
    last->position_slots(0, slots), slot = static_cast<uint32_t>(slots[0]);
    CHECK(slot != held);
  }
}

TEST_CASE("bags of a million ids, empty batches, dimensions of one and of a thousand") {
  for (int dim : {1, 1000}) {
    Group group({config("t", dim)});
    group.train({std::vector<int64_t>(64, -1)}, nullptr, 0.1);
    group.train({{}}, nullptr, 0.1);
    CHECK(group.tables[0]->size() == 1);
  }
  auto table = std::make_shared<Table>(config("bag", 4));
  Step step({table}, {{0, Pooling::kMean}});
  std::vector<int64_t> ids(1000000), offsets = {0, 0, 1000000, 1000000};
  for (size_t i = 0; i < ids.size(); i++) ids[i] = static_cast<int64_t>(i % 5000);
  std::vector<float> out(3 * 4, NAN);
  step.lookup({{ids.data(), 1000000, offsets.data(), nullptr, 3}}, nullptr, true, true, {{out.data(), 4}});
  for (int d = 0; d < 4; d++) {
    CHECK(out[static_cast<size_t>(d)] == 0.0f);
    CHECK(std::isfinite(out[static_cast<size_t>(4 + d)]));
    CHECK(out[static_cast<size_t>(8 + d)] == 0.0f);
  }
  CHECK(table->size() == 5000);
}

namespace {

// The gradient of `id` in each step that has it: summed by the tree, in the order of the steps [first, last).
std::optional<std::vector<float>> tree_sum(const std::vector<std::map<int64_t, std::vector<float>>>& of_steps,
                                           int64_t id, size_t first, size_t last) {
  if (last - first == 1) {
    const auto at = of_steps[first].find(id);
    return at == of_steps[first].end() ? std::nullopt : std::optional(at->second);
  }
  const size_t middle = first + std::bit_ceil(last - first) / 2;
  auto left = tree_sum(of_steps, id, first, middle), right = tree_sum(of_steps, id, middle, last);
  if (!left || !right) return left ? left : right;
  for (size_t d = 0; d < left->size(); d++) (*left)[d] += (*right)[d];
  return left;
}

}  // namespace

TEST_CASE("merged steps hold the sum of each id in the order of the steps, for any number of threads") {
  for (const size_t batch : {size_t{0}, size_t{50}, size_t{30'000}})
    for (const size_t num_steps : {size_t{1}, size_t{2}, size_t{3}, size_t{8}})
      for (const int threads : {1, 4}) {
        const Threads guard(threads);
        Group group({config("a", 3)});
        Draw draw(batch + num_steps);
        std::vector<std::unique_ptr<Step>> steps;
        std::vector<Step*> pointers;
        std::vector<std::vector<float>> arrays;
        std::vector<Sums> sums;
        std::vector<std::map<int64_t, std::vector<float>>> of_steps(num_steps);
        for (size_t s = 0; s < num_steps; s++) {
          steps.push_back(group.make_step());
          group.look(draw_ids(draw, 1, batch, 40'000), nullptr, true, *steps.back());
          const std::vector<int64_t> ids = steps.back()->unique_ids(0);
          for (float& x : arrays.emplace_back(ids.size() * 3)) x = draw.around() * 1e3f;
          for (size_t u = 0; u < ids.size(); u++)
            of_steps[s][ids[u]] = {arrays[s][3 * u], arrays[s][3 * u + 1], arrays[s][3 * u + 2]};
          pointers.push_back(steps.back().get());
        }
        for (const auto& array : arrays) sums.push_back({array.data()});
        std::vector<std::vector<float>> merged_sums;
        const auto merged = Step::merge(pointers, sums, &merged_sums);
        std::map<int64_t, size_t> place;
        const std::vector<int64_t> ids = merged->unique_ids(0);
        for (size_t u = 0; u < ids.size(); u++) REQUIRE(place.emplace(ids[u], u).second);
        size_t num_ids = 0;
        for (const auto& of_step : of_steps)
          for (const auto& [id, gradient] : of_step) {
            const auto at = place.find(id);
            REQUIRE(at != place.end());
            std::vector<float> expected(3, 0.0f);
            for (const auto& other : of_steps)
              if (const auto part = other.find(id); part != other.end())
                for (size_t d = 0; d < 3; d++) expected[d] += part->second[d];
            REQUIRE(std::memcmp(expected.data(), merged_sums[0].data() + 3 * at->second, 12) == 0);
            num_ids++;
          }
        CHECK(num_ids >= ids.size());
      }
}

TEST_CASE("the sums of grains are joined by halves, without the grains that have none, for any number of threads") {
  for (const int64_t batch : {int64_t{0}, int64_t{50}, int64_t{60'000}})  // the last has several ranges
    for (const size_t num_grains : {size_t{1}, size_t{2}, size_t{8}})
      for (const int threads : {1, 4}) {
        const Threads guard(threads);
        Group group({config("a", 3)});
        Draw draw(static_cast<uint64_t>(batch) + num_grains);
        const std::vector<int64_t> ids = draw_ids(draw, 1, static_cast<size_t>(batch), 40'000)[0];
        std::vector<int64_t> ends;
        for (size_t g = 1; g < num_grains; g++) ends.push_back(batch * static_cast<int64_t>(g) / 9);
        ends.push_back(batch);
        Step step({group.tables[0]}, {{0, Pooling::kSum}}, ends);
        step.map({{ids.data(), batch, nullptr, nullptr, batch}}, nullptr, true);
        const auto grains = step.divide();
        std::vector<std::vector<float>> arrays(num_grains);
        std::vector<GrainSums> sums(num_grains);
        std::vector<std::map<int64_t, std::vector<float>>> of_grains(num_grains);
        for (size_t g = 0; g < num_grains; g++) {
          const std::vector<int64_t> of_grain = grains[g]->unique_ids(0);
          for (size_t i = 0; i < of_grain.size() * 3; i++) arrays[g].push_back(i % 5 ? draw.around() * 1e3f : -0.0f);
          sums[g] = {{static_cast<int64_t>(of_grain.size())}, {std::nullopt}};
          if (g == 1) continue;  // it has no sums
          sums[g].sums[0] = arrays[g].data();
          for (size_t u = 0; u < of_grain.size(); u++)
            of_grains[g][of_grain[u]] = {arrays[g][3 * u], arrays[g][3 * u + 1], arrays[g][3 * u + 2]};
        }
        std::vector<float> joined(static_cast<size_t>(step.num_unique(0)) * 3);
        CHECK(step.join(sums, {joined.data()}));
        const auto summed = step.summed({joined.data()});
        const std::vector<int64_t> all = step.unique_ids(0);
        const std::vector<uint32_t> slots = step.unique_slots(0), slots_with_sum = summed->unique_slots(0);
        CHECK(summed->unique_ids(0) == all);
        for (size_t u = 0; u < all.size(); u++) {
          const auto expected = tree_sum(of_grains, all[u], 0, num_grains);
          REQUIRE(slots_with_sum[u] == (expected ? slots[u] : kNoSlot));
          for (size_t d = 0; d < 3; d++) REQUIRE(joined[3 * u + d] == (expected ? (*expected)[d] : 0.0f));
        }
        if (batch == 0) continue;
        arrays[0][0] = INFINITY;
        CHECK(!step.join(sums, {joined.data()}));
        sums[0].num_ids[0]--;
        CHECK_THROWS_AS(step.join(sums, {joined.data()}), std::invalid_argument);
      }
}

TEST_CASE("the grains of a mapped batch pool its rows, and sum the gradients of their own ids") {
  constexpr int64_t kDim = 2;
  for (const int64_t n : {int64_t{11}, int64_t{30'000}})  // the second has several ranges
    for (const Pooling pooling : {Pooling::kSum, Pooling::kMean, Pooling::kMax})
      for (const int threads : {1, 4}) {
        const Threads guard(threads);
        Group group({config("a", kDim)});
        Draw draw(static_cast<uint64_t>(n));
        const std::vector<int64_t> single = draw_ids(draw, 1, static_cast<size_t>(n), 5000)[0];
        std::vector<int64_t> offsets{0};
        for (int64_t i = 0; i < n; i++) offsets.push_back(offsets.back() + static_cast<int64_t>(draw.below(3)));
        const std::vector<int64_t> bag = draw_ids(draw, 1, static_cast<size_t>(offsets.back()), 5000)[0];
        std::vector<float> weights(bag.size());
        for (float& weight : weights) weight = draw.around();
        const std::vector<FeatureIds> ids{
            {single.data(), n, nullptr, nullptr, n},
            {bag.data(), offsets.back(), offsets.data(), pooling == Pooling::kMax ? nullptr : weights.data(), n}};
        const std::vector<Feature> features{{0, Pooling::kSum}, {0, pooling}};
        std::vector<float> expected(static_cast<size_t>(n * 2 * kDim), NAN), out = expected, grad = expected;
        for (float& x : grad) x = draw.around();
        const std::vector<int64_t> ends{n / 3, n / 3, n, n};  // the second and the last are empty
        Step whole(group.tables, features, ends);
        whole.map(ids, nullptr, true);
        const uint64_t calls = group.tables[0]->calls();
        const auto runs = whole.divide();
        CHECK(group.tables[0]->calls() == calls);
        Step(group.tables, features)
            .lookup(ids, nullptr, false, false, {{expected.data(), 2 * kDim}, {expected.data() + kDim, 2 * kDim}});
        int64_t first = 0;
        for (size_t i = 0; i < runs.size(); first = ends[i++]) {
          Step& run = *runs[i];
          float* rows = out.data() + first * 2 * kDim;
          run.pool({{rows, 2 * kDim}, {rows + kDim, 2 * kDim}});
          // a step over these samples alone, whose ids have rows already
          std::vector<int64_t> starts(offsets.begin() + first, offsets.begin() + ends[i] + 1);
          const int64_t begin = starts[0], m = ends[i] - first;
          for (int64_t& start : starts) start -= begin;
          Step alone(group.tables, features);
          const float* of_bag = pooling == Pooling::kMax ? nullptr : weights.data() + begin;
          alone.map({{single.data() + first, m, nullptr, nullptr, m},
                     {bag.data() + begin, starts.back(), starts.data(), of_bag, m}},
                    nullptr, false);
          const float* upstream = grad.data() + first * 2 * kDim;
          const std::vector<GradientRows> grads{{upstream, 2 * kDim}, {upstream + kDim, 2 * kDim}};
          std::map<int64_t, std::pair<float, float>> sums[2];
          double squares[2][kPartitions] = {};
          Step* both[] = {&run, &alone};
          for (int k = 0; k < 2; k++) {
            const std::vector<int64_t> unique = both[k]->unique_ids(0);
            std::vector<float> sum(unique.size() * kDim);
            REQUIRE(both[k]->sum_gradients(grads, {sum.data()}));
            both[k]->add_squares(0, sum.data(), squares[k]);
            for (size_t u = 0; u < unique.size(); u++)
              REQUIRE(sums[k].emplace(unique[u], std::pair(sum[u * kDim], sum[u * kDim + 1])).second);
          }
          CHECK(sums[0] == sums[1]);
          // in a partition the ids come in one order, for any number of ranges
          CHECK(std::memcmp(squares[0], squares[1], sizeof squares[0]) == 0);
        }
        CHECK(std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)) == 0);
      }
}
