// SPDX-License-Identifier: Apache-2.0
// Rows of several owners: askers and owners together have the bits of one process.
#include "core/exchange.h"

#include <doctest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/hash_bytes.h"
#include "draw.h"

using namespace hotbed;

namespace {

constexpr int kDim = 4;
constexpr int64_t kSamples = 40'000;  // enough that threads share the table

using Row = std::vector<float>;

std::shared_ptr<Table> make_table(const std::string& name) {
  TableConfig c;
  c.name = name, c.name_hash = hash_bytes(name.data(), name.size()), c.dim = kDim;
  c.rule = Rule("Adagrad").with("eps", 1e-10);
  c.admission.kind = AdmitKind::kMinCount, c.admission.min_count = 2;
  c.eviction.max_rows = 256 * 8, c.keep_seen = true;
  return std::make_shared<Table>(c);
}

// The rows of some tables by id: values, state, time.
std::map<int64_t, Row> rows_of(const std::vector<std::shared_ptr<Table>>& tables) {
  std::map<int64_t, Row> all;
  for (const auto& table : tables)
    for (int p = 0; p < kPartitions; p++) {
      const ExportedRows rows = table->export_rows({p});
      for (size_t i = 0; i < rows.ids.size(); i++) {
        Row& row = all[rows.ids[i]];
        REQUIRE(row.empty());
        row.assign(rows.values.begin() + i * kDim, rows.values.begin() + (i + 1) * kDim);
        row.insert(row.end(), rows.state.begin() + i * kDim, rows.state.begin() + (i + 1) * kDim);
        row.push_back(static_cast<float>(rows.seen[i]));
      }
    }
  return all;
}

struct Batch {
  std::vector<int64_t> first, second, times;
  std::vector<FeatureIds> samples(int64_t begin, int64_t end) const {
    return {{first.data() + begin, end - begin, nullptr, nullptr, end - begin},
            {second.data() + begin, end - begin, nullptr, nullptr, end - begin}};
  }
};

const std::vector<Feature> kFeatures = {{0, Pooling::kSum}, {0, Pooling::kSum}};

// Pools a grain into `out` and returns the sums of a gradient that depends on it.
std::vector<float> pool_and_sum(Step& grain, float* out, int64_t num_samples) {
  grain.pool({{out, 2 * kDim}, {out + kDim, 2 * kDim}});
  std::vector<float> grad(out, out + num_samples * 2 * kDim);
  for (size_t i = 0; i < grad.size(); i++) grad[i] = 0.5f * grad[i] + 0.01f * static_cast<float>(i % 13);
  std::vector<float> sums(static_cast<size_t>(grain.num_unique(0)) * kDim);
  grain.sum_gradients({{grad.data(), 2 * kDim}, {grad.data() + kDim, 2 * kDim}}, {sums.data()});
  return sums;
}

void learn_alone(const std::vector<std::shared_ptr<Table>>& tables, const Batch& batch, std::vector<float>& out) {
  Step step(tables, kFeatures, {kSamples / 2, kSamples});
  step.map(batch.samples(0, kSamples), batch.times.data(), true);
  const auto grains = step.divide();
  std::vector<std::vector<float>> sums, merged_sums;
  for (size_t g = 0; g < 2; g++)
    sums.push_back(pool_and_sum(*grains[g], out.data() + g * kSamples / 2 * 2 * kDim, kSamples / 2));
  const auto merged =
      Step::merge({grains[0].get(), grains[1].get()}, {{sums[0].data()}, {sums[1].data()}}, &merged_sums);
  merged->apply({merged_sums[0].data()}, {0.1});
}

void learn_together(const std::vector<std::shared_ptr<Table>>& tables, const Batch& batch, std::vector<float>& out) {
  Owners owners(1);
  for (size_t p = 0; p < kPartitions; p++) owners[0][p] = (p + 77) % kPartitions < 128 ? 0 : 1;
  std::vector<std::unique_ptr<Question>> fronts;
  std::vector<std::unique_ptr<Answer>> owned;
  std::vector<std::vector<std::vector<int64_t>>> counts;
  std::vector<std::vector<int64_t>> words(2);
  for (size_t r = 0; r < 2; r++) {
    const int64_t begin = static_cast<int64_t>(r) * kSamples / 2;
    fronts.push_back(std::make_unique<Question>(std::vector{tables[r]}, kFeatures, std::vector<int64_t>{kSamples / 2}));
    fronts[r]->find(batch.samples(begin, begin + kSamples / 2), batch.times.data() + begin);
    counts.push_back(fronts[r]->ask(owners, 2));
    words[r].resize(
        static_cast<size_t>(fronts[r]->num_words(counts[r][0], true) + fronts[r]->num_words(counts[r][1], true)));
    fronts[r]->write_asked(words[r].data());
  }
  std::vector<std::vector<Asked>> asked;
  std::vector<uint64_t> num_rows(1, 0);
  for (size_t o = 0; o < 2; o++) {
    owned.push_back(std::make_unique<Answer>(std::vector{tables[o]}));
    asked.emplace_back();
    for (size_t r = 0; r < 2; r++)
      asked[o].push_back({counts[r][o], words[r].data() + (o ? fronts[r]->num_words(counts[r][0], true) : 0)});
    num_rows[0] += owned[o]->count_rows(asked[o], true)[0];
  }
  std::vector<std::vector<float>> rows(2), sent(2);
  for (size_t r = 0; r < 2; r++) rows[r].resize(static_cast<size_t>(fronts[r]->num_unique(0)) * kDim);
  for (size_t o = 0; o < 2; o++) {
    owned[o]->map(asked[o], true, true, num_rows);
    std::vector<std::vector<float*>> out_of;
    for (size_t r = 0; r < 2; r++) out_of.push_back({rows[r].data() + (o ? counts[r][0][0] * kDim : 0)});
    owned[o]->write_rows(out_of);
  }
  for (size_t r = 0; r < 2; r++) {
    fronts[r]->take_rows(rows[r].data());
    const auto grains = fronts[r]->divide();
    const std::vector<float> sums = pool_and_sum(*grains[0], out.data() + r * kSamples / 2 * 2 * kDim, kSamples / 2);
    sent[r].resize(sums.size());
    fronts[r]->write_sums({{{grains[0]->num_unique(0)}, {sums.data()}}}, sent[r].data());
  }
  for (size_t o = 0; o < 2; o++) {
    std::vector<GrainSums> sums;
    for (size_t r = 0; r < 2; r++) sums.push_back({counts[r][o], {sent[r].data() + (o ? counts[r][0][0] * kDim : 0)}});
    std::vector<float> joined(static_cast<size_t>(owned[o]->num_unique(0)) * kDim);
    owned[o]->join(sums, {joined.data()});
    owned[o]->summed({joined.data()})->apply({joined.data()}, {0.1});
  }
}

}  // namespace

TEST_CASE("two owners have the rows, counts and results of one process") {
  const std::vector<std::shared_ptr<Table>> alone = {make_table("t")}, together = {make_table("t"), make_table("t")};
  Draw draw(3);
  for (int step = 0; step < 4; step++) {
    Batch batch;
    for (int64_t i = 0; i < kSamples; i++) {
      batch.first.push_back(static_cast<int64_t>(draw.below(600)) + 200 * step);
      batch.second.push_back(static_cast<int64_t>(draw.below(600)) + 1000 + 500 * step);
      batch.times.push_back(step * 1000 + static_cast<int64_t>(draw.below(1000)));
    }
    batch.first[0] = INT64_MAX, batch.second[1] = -1, batch.first[kSamples - 1] = INT64_MIN;
    if (step == 2) std::fill(batch.first.begin(), batch.first.begin() + kSamples / 2, 5);
    std::vector<float> one(kSamples * 2 * kDim), two(kSamples * 2 * kDim);
    learn_alone(alone, batch, one);
    learn_together(together, batch, two);
    CHECK(one == two);
    CHECK(rows_of(alone) == rows_of(together));
  }
  CHECK(alone[0]->stats().evicted > 0);
  CHECK(alone[0]->stats().evicted == together[0]->stats().evicted + together[1]->stats().evicted);
}
