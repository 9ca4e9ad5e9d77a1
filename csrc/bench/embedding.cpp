// SPDX-License-Identifier: Apache-2.0
// The headline score of the core, without Python: bench_embedding [gather|forward|step|insert|all] [--quick]
// [--rule NAME]
// 26 tables of 1 M ids, batches of 4096 samples (106,496 lookups), dim 16, power law 1.05, row-wise Adagrad by default.
// One JSON line each.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/step.h"
#include "core/thread_pool.h"

using namespace hotbed;

namespace {

struct Size {
  int tables = 26, batch = 4096, dim = 16, steps = 100, batches = 16;
  int64_t ids = 1000000;
  std::string rule = "RowwiseAdagrad";
};

Rule rule_of(const std::string& name) {
  Rule rule(name);
  if (name == "Adam") rule.with("beta1", 0.9).with("beta2", 0.999);
  return rule.with("eps", 1e-10);
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Ranks drawn from the power law by inversion, then scattered by a bijection.
std::vector<std::vector<int64_t>> draw(const Size& size) {
  std::vector<double> mass(static_cast<size_t>(size.ids));
  double sum = 0;
  for (size_t k = 0; k < mass.size(); k++) mass[k] = sum += std::pow(static_cast<double>(k + 1), -1.05);
  uint64_t state = 1;
  std::vector<std::vector<int64_t>> out(static_cast<size_t>(size.batches));
  for (auto& batch : out)
    for (int i = 0; i < size.tables * size.batch; i++) {
      const double x = static_cast<double>(mix64(state++) >> 11) * 0x1p-53 * sum;
      batch.push_back(std::lower_bound(mass.begin(), mass.end(), x) - mass.begin());
    }
  return out;
}

int64_t raw(int64_t rank, int table) {
  return static_cast<int64_t>(mix64(static_cast<uint64_t>(rank) * 64 + static_cast<uint64_t>(table) + 1));
}

void report(const char* name, std::vector<double> seconds, const Size& size) {
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  std::printf(
      "{\"peer\": \"native_%s\", \"median_ms\": %.3f, \"min_ms\": %.3f, \"mega_ids_per_s\": %.2f, \"tables\": %d, "
      "\"ids\": %lld, "
      "\"batch\": %d, \"dim\": %d, \"alpha\": 1.05, \"rule\": \"%s\", \"threads\": %d}\n",
      name, median * 1e3, seconds[0] * 1e3, size.tables * size.batch / median / 1e6, size.tables,
      static_cast<long long>(size.ids), size.batch, size.dim, size.rule.c_str(), ThreadPool::num_threads());
}

// The machine's own limit: rows of the same draws copied from one array, prefetched, on all threads.
void bare_gather(const Size& size, const std::vector<std::vector<int64_t>>& ranks) {
  const size_t dim = static_cast<size_t>(size.dim), lookups = ranks[0].size();
  std::vector<float> rows(static_cast<size_t>(size.tables) * static_cast<size_t>(size.ids) * dim, 1.0f),
      out(lookups * dim);
  std::vector<std::vector<uint32_t>> slots(ranks.size());
  for (size_t b = 0; b < ranks.size(); b++)
    for (size_t i = 0; i < lookups; i++) {
      const uint64_t table = i / static_cast<size_t>(size.batch);
      const uint64_t place = mix64(static_cast<uint64_t>(ranks[b][i]) * 64 + table) % static_cast<uint64_t>(size.ids);
      slots[b].push_back(static_cast<uint32_t>(table * static_cast<uint64_t>(size.ids) + place));
    }
  std::vector<double> seconds;
  for (int s = 0; s < size.steps; s++) {
    const std::vector<uint32_t>& at = slots[static_cast<size_t>(s) % slots.size()];
    const double start = now();
    const size_t pieces = 16;
    ThreadPool::instance().run(static_cast<int>(pieces), [&](int p) {
      const size_t first = lookups * static_cast<size_t>(p) / pieces,
                   last = lookups * (static_cast<size_t>(p) + 1) / pieces;
      for (size_t i = first; i < last; i++) {
        if (i + 16 < last) __builtin_prefetch(rows.data() + at[i + 16] * dim);
        std::memcpy(out.data() + i * dim, rows.data() + at[i] * dim, dim * sizeof(float));
      }
    });
    seconds.push_back(now() - start);
  }
  report("gather", seconds, size);
}

struct Workload {
  std::vector<std::shared_ptr<Table>> tables;
  std::vector<Feature> features;
  std::vector<std::vector<int64_t>> ids;  // by batch: [tables * batch]

  Workload(const Size& size, const std::vector<std::vector<int64_t>>& ranks) {
    for (int t = 0; t < size.tables; t++) {
      TableConfig config;
      config.name = std::to_string(t), config.name_hash = mix64(static_cast<uint64_t>(t)), config.dim = size.dim;
      config.rule = rule_of(size.rule);
      tables.push_back(std::make_shared<Table>(config));
      features.push_back({t, Pooling::kSum});
    }
    for (const auto& batch : ranks) {
      ids.emplace_back();
      for (size_t i = 0; i < batch.size(); i++)
        ids.back().push_back(raw(batch[i], static_cast<int>(i / static_cast<size_t>(size.batch))));
    }
  }

  void forward(Step& step, const std::vector<int64_t>& batch, std::vector<float>& out, bool training) const {
    const int64_t n = static_cast<int64_t>(batch.size() / tables.size()), dim = tables[0]->config().dim;
    std::vector<FeatureIds> in;
    std::vector<OutputRows> rows;
    for (size_t t = 0; t < tables.size(); t++) {
      in.push_back({batch.data() + static_cast<int64_t>(t) * n, n, nullptr, nullptr, n});
      rows.push_back({out.data() + static_cast<int64_t>(t) * dim, dim * static_cast<int64_t>(tables.size())});
    }
    step.lookup(in, nullptr, training, training, rows);
  }
};

void insert_all(const Size& size, Workload& work) {
  const double start = now();
  std::vector<int64_t> ids(static_cast<size_t>(size.batch) * work.tables.size());
  std::vector<float> out(ids.size() * static_cast<size_t>(size.dim));
  for (int64_t first = 0; first < size.ids; first += size.batch) {
    for (size_t i = 0; i < ids.size(); i++)
      ids[i] = raw(first + static_cast<int64_t>(i) % size.batch, static_cast<int>(i / static_cast<size_t>(size.batch)));
    Step step(work.tables, work.features);
    work.forward(step, ids, out, true);
  }
  const double seconds = now() - start, n = static_cast<double>(size.ids) * size.tables;
  std::printf("{\"peer\": \"native_insert\", \"ids_per_s\": %.0f, \"ids\": %.0f}\n", n / seconds, n);
}

void lookups_and_steps(const Size& size, const std::string& what, const std::vector<std::vector<int64_t>>& ranks) {
  Workload work(size, ranks);
  insert_all(size, work);
  if (what == "insert") return;
  std::vector<float> out(ranks[0].size() * static_cast<size_t>(size.dim)), grad(out.size(), 0.01f);
  std::vector<double> forward_s, step_s;
  for (int s = 0; s < size.steps && what != "step"; s++) {
    Step step(work.tables, work.features);
    const double start = now();
    work.forward(step, work.ids[static_cast<size_t>(s) % work.ids.size()], out, false);
    forward_s.push_back(now() - start);
  }
  if (what != "step") report("forward", forward_s, size);
  if (what == "forward") return;
  const int64_t width = int64_t{size.dim} * size.tables;
  std::vector<float> sums(out.size());
  for (int s = 0; s < size.steps; s++) {
    const double start = now();
    Step step(work.tables, work.features);
    work.forward(step, work.ids[static_cast<size_t>(s) % work.ids.size()], out, true);
    std::vector<GradientRows> grads;
    std::vector<float*> to;
    Sums from;
    int64_t at = 0;
    for (int t = 0; t < size.tables; t++) {
      grads.push_back({grad.data() + int64_t{t} * size.dim, width});
      to.push_back(sums.data() + at), from.push_back(sums.data() + at);
      at += step.num_unique(t) * size.dim;
    }
    step.sum_gradients(grads, to);
    step.apply(from, std::vector<double>(work.tables.size(), 0.01));
    step_s.push_back(now() - start);
  }
  report("step", step_s, size);
}

}  // namespace

int main(int argc, char** argv) {
  Size size;
  std::string what = "all";
  for (int i = 1; i < argc; i++) {
    if (std::strcmp(argv[i], "--quick") == 0) size.tables = 2, size.batch = 128, size.ids = 1000, size.steps = 4;
    else if (std::strcmp(argv[i], "--rule") == 0 && i + 1 < argc) size.rule = argv[++i];
    else what = argv[i];
  }
  const auto ranks = draw(size);
  if (what == "all" || what == "gather") bare_gather(size, ranks);
  if (what != "gather") lookups_and_steps(size, what, ranks);
}
