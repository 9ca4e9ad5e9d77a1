// SPDX-License-Identifier: Apache-2.0
// Step: the rows of a batch lie in several processes. step.h says which process calls what.
#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>

#include "step.h"
#include "thread_pool.h"

namespace hotbed {
namespace {

// Where the parts of a question about one table lie, in words of 8 bytes: ids, times, scores, counts, two in a word.
struct Places {
  int64_t times = 0, scores = 0, counts = 0, end = 0;
  Places(const Table& table, int64_t num_ids, bool timed, bool marked) {
    times = num_ids;
    scores = times + (timed && table.wants_times() ? num_ids : 0);
    counts = scores + (table.wants_scores() ? num_ids : 0);
    end = counts + (table.wants_counts(marked) ? (num_ids + 1) / 2 : 0);
  }
};

}  // namespace

void Step::find(const std::vector<FeatureIds>& ids, const int64_t* times) {
  const Locked locked(*this);
  release();
  plan(ids);
  timed_ = times != nullptr;
  std::vector<std::pair<Part*, size_t>> tasks;
  for (Part& part : parts_)
    for (size_t r = 0; r < part.ranges.size(); r++) tasks.emplace_back(&part, r);
  ThreadPool::instance().run(static_cast<int>(tasks.size()), [&](int i) {
    const auto [part, r] = tasks[static_cast<size_t>(i)];
    find_distinct(*part, part->ranges[r], times);
    part->ranges[r].slots.assign(part->ranges[r].ids.size(), 0);  // the owner knows which have none
  });
  for (Part& part : parts_) part.num_unique = part.distinct.number(part.ranges);
  keep();
}

std::vector<std::vector<int64_t>> Step::ask(const Owners& owners, int num_owners) {
  std::vector<std::vector<int64_t>> counts(static_cast<size_t>(num_owners), std::vector<int64_t>(parts_.size()));
  ThreadPool::instance().run(static_cast<int>(parts_.size()), [&](int t) {
    Part& part = parts_[static_cast<size_t>(t)];
    const auto& owner_of = owners[static_cast<size_t>(t)];
    std::array<size_t, kPartitions> ids_of{}, next{};
    for (const Uniques& range : part.ranges)
      for (const uint64_t hash : range.hashes) ids_of[static_cast<size_t>(partition_of(hash))]++;
    size_t first = 0;
    part.asked_ends.clear();
    for (size_t owner = 0; owner < static_cast<size_t>(num_owners); owner++) {
      const size_t begin = first;
      for (size_t p = 0; p < kPartitions; p++)
        if (owner_of[p] == owner) next[p] = first, first += ids_of[p];
      counts[owner][static_cast<size_t>(t)] = static_cast<int64_t>(first - begin);
      part.asked_ends.push_back(first);
    }
    part.asked.resize(static_cast<size_t>(part.num_unique));
    for (const Uniques& range : part.ranges)
      for (size_t u = 0; u < range.ids.size(); u++)
        part.asked[next[static_cast<size_t>(partition_of(range.hashes[u]))]++] = range.base + static_cast<uint32_t>(u);
  });
  return counts;
}

int64_t Step::num_words(const std::vector<int64_t>& counts, bool timed) const noexcept {
  int64_t words = 0;
  for (size_t t = 0; t < parts_.size(); t++) words += Places(*parts_[t].table, counts[t], timed, marked_).end;
  return words;
}

// Calls visit(table, first, last) for each owner and table: the ids of the table that the owner is asked for lie at the
// places from `first` up to `last` of Part::asked.
template <class F>
void Step::each_asked(F&& visit) const {
  for (size_t owner = 0; owner < parts_[0].asked_ends.size(); owner++)
    for (size_t t = 0; t < parts_.size(); t++)
      visit(t, owner ? parts_[t].asked_ends[owner - 1] : 0, parts_[t].asked_ends[owner]);
}

void Step::write_asked(int64_t* words) const {
  each_asked([&](size_t t, size_t first, size_t last) {
    const Part& part = parts_[t];
    const Places places(*part.table, static_cast<int64_t>(last - first), timed_, marked_);
    int64_t* times = words + places.times;
    double* scores = reinterpret_cast<double*>(words + places.scores);
    uint32_t* counts = reinterpret_cast<uint32_t*>(words + places.counts);
    if (places.end > places.counts) words[places.end - 1] = 0;  // the last word may be half used
    for (size_t i = first; i < last; i++) {
      size_t r = part.ranges.size() - 1;
      while (part.ranges[r].base > part.asked[i]) r--;
      const Uniques& range = part.ranges[r];
      const size_t u = part.asked[i] - range.base;
      words[i - first] = range.ids[u];
      if (!range.times.empty()) times[i - first] = range.times[u];
      if (!range.scores.empty()) scores[i - first] = range.scores[u];
      if (!range.counts.empty()) counts[i - first] = range.counts[u];
    }
    words += places.end;
  });
}

void Step::take_rows(const float* rows) {
  for (Part& part : parts_) part.received.resize(static_cast<size_t>(part.num_unique));
  each_asked([&](size_t t, size_t first, size_t last) {
    Part& part = parts_[t];
    for (size_t i = first; i < last; i++, rows += part.table->config().dim) part.received[part.asked[i]] = rows;
  });
}

std::vector<std::unique_ptr<Step>> Step::split(const std::vector<size_t>& num_tables) {
  std::vector<std::unique_ptr<Step>> steps;
  size_t table = 0, feature = 0;
  for (const size_t count : num_tables) {
    auto step = std::make_unique<Step>(std::vector<std::shared_ptr<Table>>{}, std::vector<Feature>{});
    const size_t first_table = table, first_feature = feature;
    table += count;
    for (; feature < features_.size() && static_cast<size_t>(features_[feature].table) < table; feature++)
      step->features_.push_back({features_[feature].table - static_cast<int>(first_table), features_[feature].pooling});
    for (size_t t = first_table; t < table; t++) {
      step->parts_.push_back(std::move(parts_[t]));
      for (int& f : step->parts_.back().features) f -= static_cast<int>(first_feature);
    }
    step->retained_ = retained_;
    step->num_grains_ = num_grains_;
    steps.push_back(std::move(step));
  }
  retained_ = false;
  parts_.clear();
  return steps;
}

void Step::write_sums(const std::vector<GrainSums>& grains, float* out) const {
  check_grains(grains);
  std::vector<std::vector<float*>> to(parts_.size());  // where the sums for each owner begin
  each_asked([&](size_t t, size_t first, size_t last) {
    to[t].push_back(out);
    out += (last - first) * static_cast<size_t>(parts_[t].table->config().dim);
  });
  ThreadPool::instance().run(static_cast<int>(parts_.size()), [&](int i) {
    const auto t = static_cast<size_t>(i);
    const Part& part = parts_[t];
    const size_t dim = static_cast<size_t>(part.table->config().dim);
    Column<float> sums(static_cast<size_t>(part.num_unique) * dim);
    for (const Uniques& range : part.ranges)
      join_range(t, range, grains.data(), 0, grains.size(), sums.data() + range.base * dim);
    size_t n = 0;
    for (size_t owner = 0; owner < to[t].size(); owner++)
      for (float* at = to[t][owner]; n < part.asked_ends[owner]; n++, at += dim)
        std::copy_n(sums.data() + part.asked[n] * dim, dim, at);
  });
}

void Step::write_rows(const std::vector<std::vector<float*>>& out) {
  Locked locked(*this);
  pooled_ = true;
  std::vector<Part*> parts;
  for (Part& part : parts_) {
    update_plan(part);
    parts.push_back(&part);
  }
  read_parts(parts, locked, [&](const Part& part) {
    const size_t dim = static_cast<size_t>(part.table->config().dim);
    for (size_t g = 0; g < num_grains_; g++) {
      float* to = out[g][static_cast<size_t>(&part - parts_.data())];
      for (const uint32_t u : members_of(part, g)) std::copy_n(part.rows[u], dim, to), to += dim;
    }
  });
}

void Step::plan_asked(const std::vector<Asked>& grains, bool timed) {
  if (!std::has_single_bit(grains.size()))
    throw std::invalid_argument("step: the number of grains must be a power of two, got " +
                                std::to_string(grains.size()) + ". Give such a number.");
  num_grains_ = grains.size();
  timed_ = timed;
  std::vector<const int64_t*> words;
  for (const Asked& asked : grains) words.push_back(asked.words);
  std::vector<int> lists;
  for (size_t g = 0; g < grains.size(); g++) lists.push_back(static_cast<int>(g));
  for (size_t t = 0; t < parts_.size(); t++) {
    Part& part = parts_[t];
    std::vector<FeatureIds> ids;
    part.seen.clear();
    for (size_t g = 0; g < grains.size(); g++) {
      const int64_t n = grains[g].counts[t];
      const Places places(*part.table, n, timed, marked_);
      ids.push_back({words[g], n, nullptr, nullptr, n});
      part.seen.push_back({words[g] + places.times, reinterpret_cast<const double*>(words[g] + places.scores),
                           reinterpret_cast<const uint32_t*>(words[g] + places.counts)});
      words[g] += places.end;
    }
    part.distinct.assign(ids, lists);
    cut(part.ranges, part.distinct.num_positions());
  }
}

void Step::map_asked(const std::vector<Asked>& grains, bool timed, bool training, const std::vector<uint64_t>& num_rows,
                     bool logs) {
  release();
  plan_asked(grains, timed);
  Rooms rooms(*this);
  if (training) rooms.make_for_ids();
  const Locked locked(*this);
  num_rows_ = num_rows;
  map_planned(nullptr, training, logs);
  for (Part& part : parts_) part.seen.clear();
}

std::vector<uint64_t> Step::count_rows(const std::vector<Asked>& grains, bool timed) {
  const Locked locked(*this);
  release();
  plan_asked(grains, timed);
  std::vector<uint64_t> num_rows(parts_.size(), 0);
  ThreadPool::instance().run(static_cast<int>(parts_.size()), [&](int t) {
    Part& part = parts_[static_cast<size_t>(t)];
    if (!part.table->capped() || !part.table->observes()) return;
    for (Uniques& range : part.ranges) {
      find_distinct(part, range, nullptr);
      part.table->resolve(range, false);
      part.table->count_rows(range);
      num_rows[static_cast<size_t>(t)] += range.num_rows;
    }
  });
  for (Part& part : parts_) part.seen.clear();
  return num_rows;
}

// As `observe`, of ids that their askers made distinct and observed.
void Step::observe_asked(const Part& part, Uniques& range) const {
  const Table& table = *part.table;
  const size_t num_ids = range.ids.size();
  const bool timed = timed_ && table.wants_times(), once = table.config().admission.once_a_batch;
  range.counts.assign(table.wants_counts(marked_) ? num_ids : 0, 0);
  range.times.assign(timed ? num_ids : 0, INT64_MIN);
  range.scores.assign(table.wants_scores() ? num_ids * num_grains_ : 0, -INFINITY);
  if (!table.wants_counts(marked_) && !timed && !table.wants_scores()) return;
  for (size_t g = 0; g < num_grains_; g++) {
    const FeatureIds& ids = part.distinct.feature(g);
    const uint32_t* inverse = part.distinct.inverse(g);
    for (int64_t i = 0; i < ids.num_values; i++) {
      if (!range.covers_all() && !range.covers(hash_id(ids.values[i]))) continue;
      const uint32_t u = inverse[i];
      if (!range.counts.empty()) {
        const uint32_t more = part.seen[g].counts[i];
        range.counts[u] = once ? std::max(range.counts[u], std::min(more, 1u)) : range.counts[u] + more;
      }
      if (timed) range.times[u] = std::max(range.times[u], part.seen[g].times[i]);
      if (!range.scores.empty()) range.scores[g * num_ids + u] = part.seen[g].scores[i];
    }
  }
  add_scores(range);
}

}  // namespace hotbed
