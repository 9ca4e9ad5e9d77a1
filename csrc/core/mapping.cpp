// SPDX-License-Identifier: Apache-2.0
// Parts: from ids to slots.
#include <algorithm>
#include <bit>
#include <cmath>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "parts.h"
#include "thread_pool.h"

namespace hotbed {
namespace {

// What a map does with a range of ids, in this order; `trains`: the table observes them.
void find(Part& part, Uniques& range, const Mapping& mapping, bool trains) {
  part.distinct.find(range);
  mapping.observe(part, range);
  if (trains && mapping.logs) part.table->begin_log(range);
  part.table->resolve(range, trains);
}

void admit(Part& part, Uniques& range, const Mapping& mapping, bool trains) {
  if (!trains) return range.missing.clear();
  part.table->end_expired(range);
  if (mapping.logs) part.table->log(range);
  part.table->admit(range);
}

// Of ranges that are resolved, for evaluation: `each` calls its argument for each of them. Their ids may get other
// slots while the locks are not held.
template <class Each>
void fetch_now(Locked& locked, Each&& each) {
  std::mutex mutex;
  std::vector<std::shared_ptr<ReadBatch>> reads;
  each([&](Part& part, Uniques& range, bool) {
    const std::vector<std::shared_ptr<ReadBatch>> more = part.table->frames().fetch_now(range);
    const std::lock_guard guard(mutex);
    reads.insert(reads.end(), more.begin(), more.end());
  });
  if (reads.empty()) return;
  locked.wait_for(reads);
  each([](Part& part, Uniques& range, bool) { part.table->resolve(range, false); });
}

}  // namespace

void Samples::observe(const Part& part, Uniques& range) const {
  const Table& table = *part.table;
  const bool counts = table.wants_counts(marked), timed = times && table.wants_times();
  if (!counts && !timed && !table.wants_scores()) return;
  const bool whole = range.covers_all();
  const double half_life = table.config().eviction.half_life;
  const bool once = table.config().admission.once_a_batch;
  const size_t num_ids = range.ids.size();
  range.counts.assign(counts ? num_ids : 0, 0);
  range.times.assign(timed ? num_ids : 0, INT64_MIN);
  range.scores.assign(table.wants_scores() ? num_ids * std::max<size_t>(grain_ends.size(), 1) : 0, -INFINITY);
  for (size_t k = 0; k < part.distinct.num_features(); k++) {
    const FeatureIds& feature = part.distinct.feature(k);
    const uint32_t* inverse = part.distinct.inverse(k);
    const size_t grain = k / part.features.size();
    const int64_t first_sample = grain ? grain_ends[grain - 1] : 0;
    const int64_t* moments = times ? times + first_sample : nullptr;
    const uint8_t* counted_here = counted ? counted + first_sample : nullptr;
    double* scores = range.scores.data() + (range.scores.empty() ? 0 : grain * num_ids);
    int64_t sample = 0;
    for (int64_t i = 0; i < feature.num_values; i++) {
      if (feature.offsets)
        while (feature.offsets[sample + 1] <= i) sample++;
      else sample = i;
      if (counted_here && !counted_here[sample]) continue;
      if (!whole && !range.covers(hash_id(feature.values[i]))) continue;
      const uint32_t u = inverse[i];
      if (!range.counts.empty()) range.counts[u] = once ? 1 : range.counts[u] + 1;
      if (!range.times.empty()) range.times[u] = std::max(range.times[u], moments[sample]);
      if (!range.scores.empty())
        scores[u] = log2_sum(scores[u], static_cast<double>(moments ? moments[sample] : 0) / half_life);
    }
  }
  add_scores(range, grain_ends.size());
}

void check_grains(size_t num_grains) {
  if (!std::has_single_bit(num_grains))
    throw std::invalid_argument("step: the number of grains must be a power of two, got " + std::to_string(num_grains) +
                                ". Give such a number.");
}

void add_scores(Uniques& range, size_t num_grains) {
  if (range.scores.empty()) return;
  const size_t num_ids = range.ids.size();
  double* scores = range.scores.data();
  for (size_t half = 1; half < num_grains; half *= 2)  // a grain without an id is left out
    for (size_t g = 0; g < num_grains; g += 2 * half)
      for (size_t u = 0; u < num_ids; u++)
        scores[g * num_ids + u] = log2_sum(scores[g * num_ids + u], scores[(g + half) * num_ids + u]);
  range.scores.resize(num_ids);
}

// A part of a single range.
void Parts::map_small(Part& part, const Mapping& mapping, bool trains) const {
  Table& table = *part.table;
  Uniques& range = part.ranges[0];
  find(part, range, mapping, trains);
  part.num_unique = part.distinct.number(part.ranges);
  admit(part, range, mapping, trains);
  if (!range.missing.empty()) {
    table.reserve(part.ranges);
    table.insert(range);
  }
  if (trains && mapping.logs) table.end_log(range);
  table.place(range, nullptr, nullptr);
}

std::vector<Part*> Parts::map_phases(const Mapping& mapping, const std::function<void(Part&)>& mapped) {
  const auto trains = [&](const Part& part) { return mapping.training && part.table->observes(); };
  // A small part goes from ids to slots in one task. Parts of several ranges, and those that may refuse the batch, go
  // through the phases together, so that a refusal comes before any table has changed.
  const auto is_small = [&](const Part& part) {
    const bool refuses = trains(part) && part.table->capped();
    return part.ranges.size() == 1 && part.table->frames().in_memory() && !refuses;
  };
  std::vector<std::pair<Part*, size_t>> phased;
  std::vector<Part*> small, large;
  for (Part& part : parts_) {
    if (trains(part)) part.table->turn_generations();
    // Also of frozen tables: the phases that follow read no disk, and cannot fail for it. Evaluations keep no frames: a
    // loop may hold on to the outputs of many.
    if (mapping.training) part.make_plan();
    (is_small(part) ? small : large).push_back(&part);
  }
  for (Part* part : large)
    for (size_t r = 0; r < part->ranges.size(); r++) phased.emplace_back(part, r);
  std::stable_sort(small.begin(), small.end(), [](const Part* a, const Part* b) {
    return a->distinct.num_positions() > b->distinct.num_positions();
  });
  ThreadPool& pool = ThreadPool::instance();
  const auto each = [&](auto&& work) {
    pool.run(static_cast<int>(phased.size()), [&](int i) {
      const auto [part, r] = phased[static_cast<size_t>(i)];
      work(*part, part->ranges[r], trains(*part));
    });
  };
  each([&](Part& part, Uniques& range, bool training) {
    find(part, range, mapping, training);
    if (training && part.table->counts_rows()) part.table->count_rows(range);
  });
  if (!mapping.training) fetch_now(mapping.locked, each);
  for (size_t t = 0; t < parts_.size(); t++) {
    const Part& part = parts_[t];
    uint64_t num_rows = 0, num_new = 0;
    if (trains(part) && part.table->counts_rows()) {
      for (const Uniques& range : part.ranges) {
        num_rows += range.num_rows;
        if (part.table->learns()) num_new += range.num_new;
      }
      part.table->check_capacity(mapping.num_rows.empty() ? num_rows : mapping.num_rows[t]);
    }
    if (part.plan()) part.table->frames().check_batch(part.ranges, num_new, part.distinct.num_positions());
  }
  each([&](Part& part, Uniques& range, bool) { part.table->frames().bring(range, part.plan(), part.room.get()); });
  each([&](Part& part, Uniques& range, bool) { part.table->arrive(range, part.plan(), part.room.get()); });
  for (Part& part : parts_)
    if (trains(part)) part.table->begin_batch();
  pool.run(static_cast<int>(small.size()), [&](int i) {
    Part& part = *small[static_cast<size_t>(i)];
    map_small(part, mapping, trains(part));
    mapped(part);
  });
  if (large.empty()) return large;
  if (mapping.training) {
    each([&](Part& part, Uniques& range, bool training) { admit(part, range, mapping, training); });
    for (Part* part : large) part->table->reserve(part->ranges);
    each([&](Part& part, Uniques& range, bool training) {
      if (training) part.table->insert(range);
      if (training && mapping.logs) part.table->end_log(range);
    });
  }
  each([&](Part& part, Uniques& range, bool training) {
    part.table->place(range, part.plan(), training ? part.room.get() : nullptr);
  });
  for (Part* part : large) part->num_unique = part->distinct.number(part->ranges);
  return large;
}

std::vector<Part*> Parts::map(const Mapping& mapping, const std::function<void(Part&)>& mapped) {
  takes_back_ = mapping.training && mapping.logs;
  try {
    return map_phases(mapping, mapped);
  } catch (...) {  // a batch that is refused changes nothing
    takes_back_ = false;
    for (Part& part : parts_) {
      for (Uniques& range : part.ranges) part.table->end_log(range);
      part.plans.clear();
    }
    throw;
  }
}

}  // namespace hotbed
