// SPDX-License-Identifier: Apache-2.0
#include "exchange.h"

#include <algorithm>
#include <cmath>

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

// The asker.

Question::Question(std::vector<std::shared_ptr<Table>> tables, std::vector<Feature> features,
                   std::vector<int64_t> grain_ends)
    : parts_(std::move(tables), std::move(features)) {
  check_grains(grain_ends.size());
  samples_.grain_ends = std::move(grain_ends);
}

void Question::find(const std::vector<FeatureIds>& ids, const int64_t* times) {
  parts_.release();
  parts_.assign(ids, samples_.grain_ends);
  samples_.times = times;
  each_range(parts_, [&](size_t t, size_t r) {
    Uniques& range = parts_[t].ranges[r];
    parts_[t].distinct.find(range);
    samples_.observe(parts_[t], range);
    range.slots.assign(range.ids.size(), 0);  // the owner knows which have none
  });
  for (Part& part : parts_) part.num_unique = part.distinct.number(part.ranges);
  const Locked locked(parts_);
  parts_.keep();
}

std::vector<std::vector<int64_t>> Question::ask(const Owners& owners, int num_owners) {
  std::vector<std::vector<int64_t>> counts(static_cast<size_t>(num_owners), std::vector<int64_t>(parts_.size()));
  orders_.assign(parts_.size(), {});
  ThreadPool::instance().run(static_cast<int>(parts_.size()), [&](int i) {
    const auto t = static_cast<size_t>(i);
    const Part& part = parts_[t];
    Order& order = orders_[t];
    std::array<size_t, kPartitions> ids_of{}, next{};
    for (const Uniques& range : part.ranges)
      for (const uint64_t hash : range.hashes) ids_of[static_cast<size_t>(partition_of(hash))]++;
    size_t first = 0;
    for (size_t owner = 0; owner < static_cast<size_t>(num_owners); owner++) {
      const size_t begin = first;
      for (size_t p = 0; p < kPartitions; p++)
        if (owners[t][p] == owner) next[p] = first, first += ids_of[p];
      counts[owner][t] = static_cast<int64_t>(first - begin);
      order.ends.push_back(first);
    }
    order.ids.resize(static_cast<size_t>(part.num_unique));
    for (const Uniques& range : part.ranges)
      for (size_t u = 0; u < range.ids.size(); u++)
        order.ids[next[static_cast<size_t>(partition_of(range.hashes[u]))]++] = range.base + static_cast<uint32_t>(u);
  });
  return counts;
}

int64_t Question::num_words(const std::vector<int64_t>& counts, bool timed) const noexcept {
  int64_t words = 0;
  for (size_t t = 0; t < parts_.size(); t++) words += Places(*parts_[t].table, counts[t], timed, samples_.marked).end;
  return words;
}

// Calls visit(table, first, last) for each owner and table: the ids of the table that the owner is asked for lie at the
// places from `first` up to `last` of its order.
template <class F>
void Question::each_asked(F&& visit) const {
  for (size_t owner = 0; owner < orders_[0].ends.size(); owner++)
    for (size_t t = 0; t < parts_.size(); t++) visit(t, owner ? orders_[t].ends[owner - 1] : 0, orders_[t].ends[owner]);
}

void Question::write_asked(int64_t* words) const {
  each_asked([&](size_t t, size_t first, size_t last) {
    const Part& part = parts_[t];
    const Places places(*part.table, static_cast<int64_t>(last - first), samples_.times != nullptr, samples_.marked);
    int64_t* times = words + places.times;
    double* scores = reinterpret_cast<double*>(words + places.scores);
    uint32_t* counts = reinterpret_cast<uint32_t*>(words + places.counts);
    if (places.end > places.counts) words[places.end - 1] = 0;  // the last word may be half used
    for (size_t i = first; i < last; i++) {
      const uint32_t number = orders_[t].ids[i];
      size_t r = part.ranges.size() - 1;
      while (part.ranges[r].base > number) r--;
      const Uniques& range = part.ranges[r];
      const size_t u = number - range.base;
      words[i - first] = range.ids[u];
      if (!range.times.empty()) times[i - first] = range.times[u];
      if (!range.scores.empty()) scores[i - first] = range.scores[u];
      if (!range.counts.empty()) counts[i - first] = range.counts[u];
    }
    words += places.end;
  });
}

void Question::take_rows(const float* rows) {
  for (Part& part : parts_) part.received.resize(static_cast<size_t>(part.num_unique));
  each_asked([&](size_t t, size_t first, size_t last) {
    const int dim = parts_[t].table->config().dim;
    for (size_t i = first; i < last; i++, rows += dim) parts_[t].received[orders_[t].ids[i]] = rows;
  });
}

std::vector<std::unique_ptr<Step>> Question::divide() {
  std::vector<std::unique_ptr<Step>> grains;
  for (Parts& parts : hotbed::divide(parts_, samples_.grain_ends.size(), &members_))
    grains.push_back(std::make_unique<Step>(std::move(parts)));
  return grains;
}

void Question::write_sums(const std::vector<GrainSums>& grains, float* out) const {
  const GrainJoin join(views(members_), grains, 0.0f);
  std::vector<std::vector<float*>> to(parts_.size());  // where the sums for each owner begin
  each_asked([&](size_t t, size_t first, size_t last) {
    to[t].push_back(out);
    out += (last - first) * static_cast<size_t>(parts_[t].table->config().dim);
  });
  ThreadPool::instance().run(static_cast<int>(parts_.size()), [&](int i) {
    const auto t = static_cast<size_t>(i);
    const size_t dim = static_cast<size_t>(parts_[t].table->config().dim);
    Column<float> sums(static_cast<size_t>(parts_[t].num_unique) * dim);
    for (const Uniques& range : parts_[t].ranges) join.join(parts_, t, range, sums.data());
    size_t n = 0;
    for (size_t owner = 0; owner < to[t].size(); owner++)
      for (float* at = to[t][owner]; n < orders_[t].ends[owner]; n++, at += dim)
        std::copy_n(sums.data() + orders_[t].ids[n] * dim, dim, at);
  });
}

// The owner.

// As far as the table wants it.
struct Answer::Seen {
  const int64_t* times = nullptr;
  const double* scores = nullptr;
  const uint32_t* counts = nullptr;
};

// Returns what the askers saw, [table][grain].
std::vector<std::vector<Answer::Seen>> Answer::assign(const std::vector<Asked>& grains, bool timed) {
  check_grains(grains.size());
  parts_.release();
  std::vector<const int64_t*> words;
  std::vector<int> lists;
  for (const Asked& asked : grains) {
    lists.push_back(static_cast<int>(words.size()));
    words.push_back(asked.words);
  }
  std::vector<std::vector<Seen>> seen(parts_.size());
  for (size_t t = 0; t < parts_.size(); t++) {
    Part& part = parts_[t];
    std::vector<FeatureIds> ids;
    for (size_t g = 0; g < grains.size(); g++) {
      const int64_t n = grains[g].counts[t];
      const Places places(*part.table, n, timed, marked_);
      ids.push_back({words[g], n, nullptr, nullptr, n});
      seen[t].push_back({words[g] + places.times, reinterpret_cast<const double*>(words[g] + places.scores),
                         reinterpret_cast<const uint32_t*>(words[g] + places.counts)});
      words[g] += places.end;
    }
    part.distinct.assign(ids, lists);
    cut(part.ranges, part.distinct.num_positions());
  }
  return seen;
}

// As Samples::observe, of ids that their askers made distinct and observed.
void Answer::observe(const Part& part, const std::vector<Seen>& seen, bool timed, Uniques& range) const {
  const Table& table = *part.table;
  const size_t num_ids = range.ids.size();
  const bool times = timed && table.wants_times(), once = table.config().admission.once_a_batch;
  range.counts.assign(table.wants_counts(marked_) ? num_ids : 0, 0);
  range.times.assign(times ? num_ids : 0, INT64_MIN);
  range.scores.assign(table.wants_scores() ? num_ids * seen.size() : 0, -INFINITY);
  if (!table.wants_counts(marked_) && !times && !table.wants_scores()) return;
  for (size_t g = 0; g < seen.size(); g++) {
    const FeatureIds& ids = part.distinct.feature(g);
    const uint32_t* inverse = part.distinct.inverse(g);
    for (int64_t i = 0; i < ids.num_values; i++) {
      if (!range.covers_all() && !range.covers(hash_id(ids.values[i]))) continue;
      const uint32_t u = inverse[i];
      if (!range.counts.empty()) {
        const uint32_t more = seen[g].counts[i];
        range.counts[u] = once ? std::max(range.counts[u], std::min(more, 1u)) : range.counts[u] + more;
      }
      if (times) range.times[u] = std::max(range.times[u], seen[g].times[i]);
      if (!range.scores.empty()) range.scores[g * num_ids + u] = seen[g].scores[i];
    }
  }
  add_scores(range, seen.size());
}

std::vector<uint64_t> Answer::count_rows(const std::vector<Asked>& grains, bool timed) {
  const Locked locked(parts_);
  const std::vector<std::vector<Seen>> seen = assign(grains, timed);
  std::vector<uint64_t> num_rows(parts_.size(), 0);
  ThreadPool::instance().run(static_cast<int>(parts_.size()), [&](int i) {
    const auto t = static_cast<size_t>(i);
    Part& part = parts_[t];
    if (!part.table->capped() || !part.table->observes()) return;
    for (Uniques& range : part.ranges) {
      part.distinct.find(range);
      observe(part, seen[t], timed, range);
      part.table->resolve(range, false);
      part.table->count_rows(range);
      num_rows[t] += range.num_rows;
    }
  });
  return num_rows;
}

void Answer::map(const std::vector<Asked>& grains, bool timed, bool training, const std::vector<uint64_t>& num_rows,
                 bool logs) {
  const std::vector<std::vector<Seen>> seen = assign(grains, timed);
  const auto observe_asked = [&](const Part& part, Uniques& range) {
    observe(part, seen[static_cast<size_t>(&part - &parts_[0])], timed, range);
  };
  const Rooms rooms(parts_, training);
  Locked locked(parts_, !training);
  parts_.map({training, logs, locked, observe_asked, num_rows}, [](Part&) {});
  parts_.keep();
}

void Answer::write_rows(const std::vector<std::vector<float*>>& out) {
  Locked locked(parts_);
  parts_.looked_up();
  std::vector<Part*> parts;
  for (Part& part : parts_) {
    parts_.update(part);
    parts.push_back(&part);
  }
  const Members asked = members();
  Parts::read(parts, locked, [&](const Part& part) {
    const auto t = static_cast<size_t>(&part - &parts_[0]);
    const size_t dim = static_cast<size_t>(part.table->config().dim);
    for (size_t g = 0; g < asked[t].size(); g++) {
      float* to = out[g][t];
      for (const uint32_t u : asked[t][g]) std::copy_n(part.rows[u], dim, to), to += dim;
    }
  });
}

std::vector<std::unique_ptr<Answer>> Answer::split(const std::vector<size_t>& num_tables) {
  std::vector<std::unique_ptr<Answer>> answers;
  for (Parts& parts : parts_.split(num_tables)) answers.push_back(std::make_unique<Answer>(std::move(parts)));
  return answers;
}

// The ids that a grain asks for are distinct: each position is one.
Members Answer::members() const {
  Members all;
  for (const Part& part : parts_) {
    std::vector<std::span<const uint32_t>>& of_table = all.emplace_back();
    for (size_t g = 0; g < part.distinct.num_features(); g++)
      of_table.emplace_back(part.distinct.inverse(g), static_cast<size_t>(part.distinct.feature(g).num_values));
  }
  return all;
}

bool Answer::join(const std::vector<GrainSums>& grains, const std::vector<float*>& out) const {
  return GrainJoin(members(), grains, kNoSum).join_all(parts_, out);
}

std::unique_ptr<Step> Answer::summed(const std::vector<float*>& sums) {
  return std::make_unique<Step>(hotbed::summed(parts_, sums));
}

}  // namespace hotbed
