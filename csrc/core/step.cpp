// SPDX-License-Identifier: Apache-2.0
#include "step.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <unordered_map>

#include "map_queue.h"
#include "thread_pool.h"

namespace hotbed {
namespace {

constexpr int64_t kSamplesPerTask = 8192;
constexpr float kNoSum = -0.0f;

}  // namespace

void for_each_range(int pieces, const std::vector<Table*>& tables, void (*work)(Table&, int, int)) {
  ThreadPool::instance().run(pieces * static_cast<int>(tables.size()), [&](int task) {
    const int piece = task % pieces;
    work(*tables[static_cast<size_t>(task / pieces)], kPartitions * piece / pieces, kPartitions * (piece + 1) / pieces);
  });
}

Step::Step(std::vector<std::shared_ptr<Table>> tables, std::vector<Feature> features, std::vector<int64_t> grain_ends)
    : features_(std::move(features)), grain_ends_(std::move(grain_ends)), num_grains_(grain_ends_.size()) {
  if (!grain_ends_.empty() && !std::has_single_bit(grain_ends_.size()))
    throw std::invalid_argument("step: the number of grains must be a power of two, got " +
                                std::to_string(grain_ends_.size()) + ". Give such a number.");
  parts_.resize(tables.size());
  for (size_t t = 0; t < tables.size(); t++) parts_[t].table = std::move(tables[t]);
  for (size_t f = 0; f < features_.size(); f++)
    parts_[static_cast<size_t>(features_[f].table)].features.push_back(static_cast<int>(f));
}

Step::~Step() {
  try {
    if (task_) task_->wait();
  } catch (...) {  // whoever waited for the map got the error
  }
  release();
}

void Step::release() noexcept {
  if (retained_)
    for (Part& part : parts_) part.table->retire(part.generation);
  for (Part& part : parts_) part.plans.clear();
  retained_ = false;
}

Step::Locked::Locked(const Step& step, bool last) {
  for (const Part& part : step.parts_) mutexes_.push_back(&part.table->mutex());
  std::sort(mutexes_.begin(), mutexes_.end());
  if (last)  // before it holds any, or it would let others wait for one while it gives way at the next
    for (const TableMutex* mutex : mutexes_) mutex->give_way();
  for (TableMutex* mutex : mutexes_) last ? mutex->lock_unseen() : mutex->lock();
}

Step::Locked::~Locked() { release(); }

void Step::Locked::release() {
  for (TableMutex* mutex : mutexes_) mutex->unlock();
  mutexes_.clear();
}

void Step::plan(const std::vector<FeatureIds>& ids) {
  for (Part& part : parts_) {
    part.distinct.assign(ids, part.features, grain_ends_);
    cut(part.ranges, part.distinct.num_positions());
  }
}

void Step::cut(std::vector<Uniques>& ranges, int64_t num_ids) {
  const int pieces = Distinct::num_ranges(num_ids);
  ranges.resize(static_cast<size_t>(pieces));
  for (int r = 0; r < pieces; r++) {
    ranges[static_cast<size_t>(r)].first_partition = kPartitions * r / pieces;
    ranges[static_cast<size_t>(r)].last_partition = kPartitions * (r + 1) / pieces;
  }
}

void Step::find_distinct(Part& part, Uniques& range, const int64_t* times) const {
  part.distinct.find(range);
  if (!part.seen.empty()) observe_asked(part, range);
  else if (part.table->wants_counts(marked_) || (times && part.table->wants_times()) || part.table->wants_scores())
    observe(part, range, times);
}

// Occurrences, latest time and aged count of each unique id, where the table's policies want them.
void Step::observe(const Part& part, Uniques& range, const int64_t* times) const {
  const Table& table = *part.table;
  const bool whole = range.covers_all();
  const double half_life = table.config().eviction.half_life;
  const bool once = table.config().admission.once_a_batch;
  range.counts.assign(table.wants_counts(marked_) ? range.ids.size() : 0, 0);
  range.times.assign(times && table.wants_times() ? range.ids.size() : 0, INT64_MIN);
  const size_t num_ids = range.ids.size();
  range.scores.assign(table.wants_scores() ? num_ids * std::max<size_t>(num_grains_, 1) : 0, -INFINITY);
  for (size_t k = 0; k < part.distinct.num_features(); k++) {
    const FeatureIds& feature = part.distinct.feature(k);
    const uint32_t* inverse = part.distinct.inverse(k);
    const size_t grain = k / part.features.size();
    const int64_t first_sample = grain ? grain_ends_[grain - 1] : 0;
    const int64_t* moments = times ? times + first_sample : nullptr;
    const uint8_t* counted = counted_ ? counted_ + first_sample : nullptr;
    double* scores = range.scores.data() + (range.scores.empty() ? 0 : grain * num_ids);
    int64_t sample = 0;
    for (int64_t i = 0; i < feature.num_values; i++) {
      if (feature.offsets)
        while (feature.offsets[sample + 1] <= i) sample++;
      else sample = i;
      if (counted && !counted[sample]) continue;
      if (!whole && !range.covers(hash_id(feature.values[i]))) continue;
      const uint32_t u = inverse[i];
      if (!range.counts.empty()) range.counts[u] = once ? 1 : range.counts[u] + 1;
      if (!range.times.empty()) range.times[u] = std::max(range.times[u], moments[sample]);
      if (!range.scores.empty())
        scores[u] = log2_sum(scores[u], static_cast<double>(moments ? moments[sample] : 0) / half_life);
    }
  }
  add_scores(range);
}

// Adds the scores of the ids, which are there grain by grain, by halves.
void Step::add_scores(Uniques& range) const {
  if (range.scores.empty()) return;
  const size_t num_ids = range.ids.size();
  double* scores = range.scores.data();
  for (size_t half = 1; half < num_grains_; half *= 2)  // a grain without an id is left out
    for (size_t g = 0; g < num_grains_; g += 2 * half)
      for (size_t u = 0; u < num_ids; u++)
        scores[g * num_ids + u] = log2_sum(scores[g * num_ids + u], scores[(g + half) * num_ids + u]);
  range.scores.resize(num_ids);
}

bool Step::has_cold(const Part& part) {
  return std::any_of(part.ranges.begin(), part.ranges.end(), [](const Uniques& range) { return range.has_cold(); });
}

// Points every unique id at its fp32 row, or at a copy. Where rows lie in no frame, all are copied, so that they may be
// used without the mutex of the table; these rows come with `finish_read`.
void Step::begin_read(Part& part) {
  if (!part.received.empty()) return part.rows.assign(part.received.begin(), part.received.end());
  const Table& table = *part.table;
  const bool aside = has_cold(part);
  std::vector<size_t> first_copy(part.ranges.size() + 1, 0);
  for (size_t r = 0; r < part.ranges.size(); r++)
    first_copy[r + 1] = first_copy[r] + table.num_copies(part.ranges[r], aside);
  const auto dim = static_cast<size_t>(table.config().dim);
  part.rows.resize(static_cast<size_t>(part.num_unique));
  part.copies.resize(first_copy.back() * dim);
  part.cold.resize(aside ? part.ranges.size() : 0);
  ThreadPool::instance().run(static_cast<int>(part.ranges.size()), [&](int i) {
    const auto r = static_cast<size_t>(i);
    const Uniques& range = part.ranges[r];
    ColdRows cold = table.read(range, part.rows.data() + range.base, part.copies.data(), first_copy[r] * dim, aside);
    if (aside) part.cold[r] = std::move(cold);
  });
}

void Step::finish_read(Part& part) {
  std::vector<ColdRows> cold = std::exchange(part.cold, {});
  ThreadPool::instance().run(static_cast<int>(cold.size()), [&](int r) {
    part.table->finish_aside(cold[static_cast<size_t>(r)], part.copies.data());
  });
}

// Calls done(part) for each part when its rows are there, from several threads. Parts with rows in no frame come last:
// the locks are released before the wait for them.
void Step::read_parts(const std::vector<Part*>& parts, Locked& locked, const std::function<void(const Part&)>& done) {
  std::vector<Part*> small, large, cold;
  for (Part* part : parts) (has_cold(*part) ? cold : part->ranges.size() == 1 ? small : large).push_back(part);
  const auto each = [](const std::vector<Part*>& of, auto&& work) {
    ThreadPool::instance().run(static_cast<int>(of.size()), [&](int i) { work(*of[static_cast<size_t>(i)]); });
  };
  each(small, [&](Part& part) { begin_read(part), done(part); });
  for (Part* part : large) begin_read(*part), done(*part);
  if (cold.empty()) return;
  const struct Reads {  // waits for those that have begun
    const std::vector<Part*>& parts;
    ~Reads() {
      for (Part* part : parts) part->cold.clear();
    }
  } reads{cold};
  each(cold, begin_read);
  locked.release();
  each(cold, finish_read);
  each(cold, done);
}

Bags Step::bags(const Part& part, size_t k) const {
  const Pooling pooling = features_[static_cast<size_t>(part.features[k])].pooling;
  return bags_of(part.distinct.feature(k), pooling, part.distinct.inverse(k));
}

Step::Rooms::~Rooms() {
  for (Part& part : step_.parts_) part.room.reset();
}

void Step::Rooms::make_for_ids() {
  for (Part& part : step_.parts_) part.room = part.table->frames().make_room_for_batch(part.distinct.num_positions());
}

void Step::fetch(const std::vector<FeatureIds>& ids) {
  plan(ids);
  Rooms rooms(*this);
  rooms.make_for_ids();
  for (Part& part : parts_) {
    if (!part.room) continue;
    for (Uniques& range : part.ranges) {
      part.distinct.find(range);
      const std::lock_guard lock(part.table->mutex());
      part.table->resolve(range, false);
      part.table->frames().fetch(range, part.room.get());
    }
  }
}

// Maps one part of a single range, from ids to slots.
void Step::map_part(Part& part, const int64_t* times, bool training) const {
  Table& table = *part.table;
  Uniques& uniques = part.ranges[0];
  find_distinct(part, uniques, times);
  part.num_unique = part.distinct.number(part.ranges);
  if (training && logs_) table.begin_log(uniques);
  table.resolve(uniques, training);
  if (training) {
    table.end_expired(uniques);
    if (logs_) table.log(uniques);
    table.admit(uniques);
    if (!uniques.missing.empty()) {
      Uniques* all[] = {&uniques};
      table.reserve(all, 1);
      table.insert(uniques);
    }
    if (logs_) table.end_log(uniques);
  }
  table.place(uniques, nullptr, nullptr);
}

// Maps all parts, whose ids are planned. Calls mapped(part) for each small part when its slots are there, from several
// threads, and returns the others.
template <class F>
std::vector<Step::Part*> Step::map_parts(const int64_t* times, bool training, F&& mapped) {
  const auto trains = [&](const Part& part) { return training && part.table->observes(); };
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
    if (training) part.make_plan();
    (is_small(part) ? small : large).push_back(&part);
  }
  for (Part* part : large)
    for (size_t r = 0; r < part->ranges.size(); r++) phased.emplace_back(part, r);
  std::stable_sort(small.begin(), small.end(), [](const Part* a, const Part* b) {
    return a->distinct.num_positions() > b->distinct.num_positions();
  });
  ThreadPool& pool = ThreadPool::instance();
  const auto each = [&](auto&& work) {
    pool.run(static_cast<int>(phased.size()),
             [&](int i) { work(*phased[static_cast<size_t>(i)].first, phased[static_cast<size_t>(i)].second); });
  };
  each([&](Part& part, size_t r) {
    find_distinct(part, part.ranges[r], times);
    if (trains(part) && logs_) part.table->begin_log(part.ranges[r]);
    part.table->resolve(part.ranges[r], trains(part));
    if (trains(part) && part.table->counts_rows()) part.table->count_rows(part.ranges[r]);
  });
  for (size_t t = 0; t < parts_.size(); t++) {
    const Part& part = parts_[t];
    uint64_t num_rows = 0, num_new = 0;
    if (trains(part) && part.table->counts_rows()) {
      for (const Uniques& range : part.ranges) {
        num_rows += range.num_rows;
        if (part.table->learns()) num_new += range.num_new;
      }
      part.table->check_capacity(num_rows_.empty() ? num_rows : num_rows_[t]);
    }
    if (part.plan()) part.table->frames().check_batch(part.ranges, num_new);
  }
  each([&](Part& part, size_t r) { part.table->frames().bring(part.ranges[r], part.plan(), part.room.get()); });
  each([&](Part& part, size_t r) { part.table->arrive(part.ranges[r], part.plan(), part.room.get()); });
  for (Part& part : parts_)
    if (trains(part)) part.table->begin_batch();
  pool.run(static_cast<int>(small.size()), [&](int i) {
    Part& part = *small[static_cast<size_t>(i)];
    map_part(part, times, trains(part));
    mapped(part);
  });
  if (large.empty()) return large;
  if (training) {
    each([&](Part& part, size_t r) {
      if (trains(part)) part.table->end_expired(part.ranges[r]);
      if (trains(part) && logs_) part.table->log(part.ranges[r]);
      if (trains(part)) part.table->admit(part.ranges[r]);
      else part.ranges[r].missing.clear();
    });
    for (Part* part : large) {
      std::vector<Uniques*> all;
      for (Uniques& range : part->ranges) all.push_back(&range);
      part->table->reserve(all.data(), static_cast<int>(all.size()));
    }
    each([&](Part& part, size_t r) {
      if (trains(part)) part.table->insert(part.ranges[r]);
      if (trains(part) && logs_) part.table->end_log(part.ranges[r]);
    });
  }
  each([&](Part& part, size_t r) {
    part.table->place(part.ranges[r], part.plan(), trains(part) ? part.room.get() : nullptr);
  });
  for (Part* part : large) part->num_unique = part->distinct.number(part->ranges);
  return large;
}

bool Step::has_output(const Part& part, const std::vector<OutputRows>& out) {
  return std::any_of(part.features.begin(), part.features.end(),
                     [&](int feature) { return out[static_cast<size_t>(feature)].data != nullptr; });
}

std::vector<Step::Part*> Step::with_output(const std::vector<Part*>& parts, const std::vector<OutputRows>& out) {
  std::vector<Part*> some;
  std::copy_if(parts.begin(), parts.end(), std::back_inserter(some),
               [&](const Part* part) { return has_output(*part, out); });
  return some;
}

// Called from within a task of the pool, it runs on that thread alone.
void Step::pool_features(const Part& part, const std::vector<OutputRows>& out) const {
  for (size_t k = 0; k < part.features.size(); k++) {
    const OutputRows& to = out[static_cast<size_t>(part.features[k])];
    if (!to.data) continue;
    const Bags feature = bags(part, k);
    const int64_t n = feature.num_samples;
    ThreadPool::instance().run(static_cast<int>((n + kSamplesPerTask - 1) / kSamplesPerTask), [&](int b) {
      kernels().pool(feature, part.rows.data(), to.data, to.step, part.table->config().dim, b * kSamplesPerTask,
                     std::min(n, (b + 1) * kSamplesPerTask));
    });
  }
}

// The plan lives on after the call, its slots with it; the caller's arrays do not.
void Step::keep() {
  for (Part& part : parts_) {
    part.distinct.keep();
    part.withdrawn = part.table->num_withdrawn();
    part.step = part.table->step();
    if (part.plans.empty()) leave_frames(part);
  }
  retain();
}

void Step::retain() {
  for (Part& part : parts_) {
    part.generation = part.table->generation();
    part.table->retain(part.generation);
  }
  retained_ = true;
}

// Where no plan keeps the rows in frames they are found anew, wherever they lie.
void Step::leave_frames(Part& part) {
  for (Uniques& range : part.ranges) range.leave_frames();
}

void Step::let_go() {
  if (!retained_) return;
  release();
  for (Part& part : parts_) leave_frames(part);
  let_go_ = true;
}

// Whether the rows had been let go.
bool Step::hold() {
  if (!let_go_) return false;
  const Locked locked(*this);
  retain();
  let_go_ = false;
  for (Part& part : parts_) {
    drop_gone(part);
    part.withdrawn = part.table->num_withdrawn();
  }
  return true;
}

void Step::map(const std::vector<FeatureIds>& ids, const int64_t* times, bool training, bool logs) {
  release();
  plan(ids);
  Rooms rooms(*this);
  if (training) rooms.make_for_ids();
  const Locked locked(*this);
  map_planned(times, training, logs);
}

void Step::map_planned(const int64_t* times, bool training, bool logs) {
  logs_ = logs && training;
  pooled_ = false;
  try {
    map_parts(times, training, [](Part&) {});
  } catch (...) {  // a batch that is refused changes nothing
    for (Part& part : parts_)
      for (Uniques& range : part.ranges) part.table->end_log(range);
    logs_ = false;
    for (Part& part : parts_) part.plans.clear();
    throw;
  }
  keep();
}

std::vector<std::unique_ptr<Step>> Step::divide() {
  if (!retained_) throw std::logic_error("step: to divide needs mapped ids, got none. Call map first.");
  if (num_grains_ == 0) throw std::logic_error("step: to divide needs grains, got none. Give their ends.");
  pooled_ = true;
  std::vector<std::unique_ptr<Step>> grains;
  size_t last = num_grains_ - 1;  // with samples
  while (last > 0 && !grain_ends_.empty() && grain_ends_[last] == grain_ends_[last - 1]) last--;
  for (size_t g = 0; g < num_grains_; g++) {
    grains.push_back(std::make_unique<Step>(tables(), features_));
    for (size_t t = 0; t < parts_.size(); t++) {
      grains[g]->parts_[t].generation = parts_[t].generation;
      grains[g]->parts_[t].plans = parts_[t].plans;
      parts_[t].table->retain(parts_[t].generation);
    }
    grains[g]->retained_ = true;
  }
  for (Part& part : parts_) part.members.assign(num_grains_, {});
  grains[last]->task_ = task_;
  ThreadPool::instance().run(static_cast<int>(grains.size() * parts_.size()), [&](int task) {
    const size_t g = static_cast<size_t>(task) / parts_.size(), t = static_cast<size_t>(task) % parts_.size();
    Part& part = grains[g]->parts_[t];
    part.distinct = parts_[t].distinct.grain(g, grains.size());
    take_ids(parts_[t], part, parts_[t].members[g]);
  });
  return grains;
}

// The positions of a batch of grains are not those of its features.
void Step::check_undivided() const {
  if (num_grains_ > 0) throw std::logic_error("step: a batch of grains is pooled grain by grain. Call divide.");
}

void Step::take_ids(const Part& whole, Part& part, std::vector<uint32_t>& members) {
  constexpr uint32_t kAbsent = 0xffffffffu;
  part.withdrawn = whole.withdrawn;
  part.step = whole.step;
  part.ranges.resize(whole.ranges.size());
  for (size_t r = 0; r < whole.ranges.size(); r++) {
    part.ranges[r].first_partition = whole.ranges[r].first_partition;
    part.ranges[r].last_partition = whole.ranges[r].last_partition;
  }
  if (part.distinct.num_positions() == whole.distinct.num_positions()) {  // the other grains have no ids
    for (size_t r = 0; r < whole.ranges.size(); r++) part.ranges[r].take_all(whole.ranges[r]);
    part.num_unique = whole.num_unique;
    part.received = whole.received;
    members.resize(static_cast<size_t>(whole.num_unique));
    std::iota(members.begin(), members.end(), 0u);
    return;
  }
  std::vector<uint32_t> numbers(static_cast<size_t>(whole.num_unique), kAbsent);  // in their range of the part
  std::vector<std::vector<uint32_t>> of_range(whole.ranges.size());
  for (const uint32_t u : part.distinct.inverse()) {
    if (numbers[u] != kAbsent) continue;
    size_t r = whole.ranges.size() - 1;
    while (whole.ranges[r].base > u) r--;
    numbers[u] = static_cast<uint32_t>(of_range[r].size());
    of_range[r].push_back(u);
  }
  for (size_t r = 0; r < whole.ranges.size(); r++) {
    const uint32_t base = static_cast<uint32_t>(members.size());
    part.ranges[r].base = base;
    part.ranges[r].take_ids(whole.ranges[r], of_range[r]);
    for (const uint32_t u : of_range[r]) numbers[u] += base;
    members.insert(members.end(), of_range[r].begin(), of_range[r].end());
  }
  part.num_unique = static_cast<int64_t>(members.size());
  if (!whole.received.empty()) {
    part.received.resize(members.size());
    for (size_t u = 0; u < members.size(); u++) part.received[u] = whole.received[members[u]];
  }
  part.distinct.renumber(numbers);
}

bool Step::take_back() {
  if (!logs_ || pooled_ || !retained_) return false;
  const Locked locked(*this);
  for (Part& part : parts_) {
    if (!part.table->observes()) continue;
    for (Uniques& range : part.ranges)
      if (range.log) part.table->take_back(range);
    part.table->end_take_back();
  }
  logs_ = false;
  return true;
}

void Step::set_weights(const std::vector<const float*>& weights) {
  if (!retained_) throw std::logic_error("step: weights are those of mapped ids, got none. Call map first.");
  check_undivided();
  for (Part& part : parts_)
    for (size_t k = 0; k < part.features.size(); k++)
      if (const float* of_feature = weights[static_cast<size_t>(part.features[k])])
        part.distinct.set_weights(k, of_feature);
}

void Step::position_rows(int feature, float* rows) {
  check_undivided();
  hold();
  Part& part = parts_[static_cast<size_t>(features_[static_cast<size_t>(feature)].table)];
  const auto k =
      static_cast<size_t>(std::find(part.features.begin(), part.features.end(), feature) - part.features.begin());
  Locked locked(*this);
  update_plan(part);
  read_parts({&part}, locked, [k, rows](const Part& read) {
    const auto dim = static_cast<size_t>(read.table->config().dim);
    const uint32_t* inverse = read.distinct.inverse(k);
    const auto num_positions = static_cast<size_t>(read.distinct.feature(k).num_values);
    for (size_t i = 0; i < num_positions; i++) std::copy_n(read.rows[inverse[i]], dim, rows + i * dim);
  });
}

void Step::pool(const std::vector<OutputRows>& out) {
  if (!retained_) throw std::logic_error("step: pool needs mapped ids, got none. Call map first.");
  check_undivided();
  hold();
  pooled_ = true;
  pool_parts(out);
  if (task_) task_->release();
}

void Step::pool_parts(const std::vector<OutputRows>& out) {
  Locked locked(*this);
  std::vector<Part*> parts;
  for (Part& part : parts_) {
    update_plan(part);
    parts.push_back(&part);
  }
  read_parts(with_output(parts, out), locked, [&](const Part& part) { pool_features(part, out); });
}

void Step::lookup(const std::vector<FeatureIds>& ids, const int64_t* times, bool training, bool keeps,
                  const std::vector<OutputRows>& out) {
  check_undivided();
  release();
  plan(ids);
  Rooms rooms(*this);
  if (training) rooms.make_for_ids();
  Locked locked(*this, !training);
  try {
    const std::vector<Part*> large = map_parts(times, training, [&](Part& part) {
      if (!has_output(part, out)) return;
      begin_read(part);
      pool_features(part, out);
    });
    if (keeps) keep();
    read_parts(with_output(large, out), locked, [&](const Part& part) { pool_features(part, out); });
  } catch (...) {
    release();
    throw;
  }
  if (!keeps) release();
}

void Step::adopt_slots(const int64_t* slots, int64_t n) {
  Part& part = parts_[0];
  part.distinct.assign({{slots, n, nullptr, nullptr, n}}, part.features);
  part.ranges.resize(1);
  Uniques& uniques = part.ranges[0];
  part.distinct.find(uniques);
  part.num_unique = part.distinct.number(part.ranges);
  uniques.slots.resize(uniques.ids.size());
  for (size_t u = 0; u < uniques.ids.size(); u++)
    uniques.slots[u] = uniques.ids[u] < 0 ? kNoSlot : static_cast<uint32_t>(uniques.ids[u]);
  if (!part.table->frames().in_memory()) uniques.own_frames = uniques.slots;
  uniques.leave_frames();  // until they learn
  part.withdrawn = part.table->num_withdrawn();
  part.distinct.keep();
}

// Lets a part that was mapped in evaluation, or by its slots, learn: its rows come into frames.
void Step::bring(Part& part) {
  if (!part.room) return;
  if (part.plans.empty()) part.make_plan();
  part.table->frames().check_batch(part.ranges, 0);
  for (const Uniques& range : part.ranges) part.table->frames().bring(range, part.plan(), part.room.get());
  for (Uniques& range : part.ranges) {
    part.table->arrive(range, part.plan(), part.room.get());
    part.table->place(range, part.plan(), nullptr);
    for (size_t u = 0; u < range.slots.size(); u++)
      if (range.own_frames[u] == kColdFrame) range.drop_row(u);  // a slot without a row
  }
}

std::vector<std::shared_ptr<Table>> Step::tables() const {
  std::vector<std::shared_ptr<Table>> all;
  for (const Part& part : parts_) all.push_back(part.table);
  return all;
}

uint64_t Step::num_refused() const noexcept {
  uint64_t n = 0;
  for (const Part& part : parts_)
    for (const Uniques& range : part.ranges) n += range.num_refused;
  return n;
}

std::vector<int64_t> Step::unique_ids(int table) const {
  std::vector<int64_t> all;
  for (const Uniques& range : parts_[static_cast<size_t>(table)].ranges)
    all.insert(all.end(), range.ids.begin(), range.ids.end());
  return all;
}

std::vector<uint32_t> Step::unique_slots(int table) const {
  std::vector<uint32_t> all;
  for (const Uniques& range : parts_[static_cast<size_t>(table)].ranges)
    all.insert(all.end(), range.slots.begin(), range.slots.end());
  return all;
}

void Step::position_slots(int table, int64_t* out) const {
  const std::vector<uint32_t> slots = unique_slots(table);
  const Column<uint32_t>& inverse = parts_[static_cast<size_t>(table)].distinct.inverse();
  for (size_t i = 0; i < inverse.size(); i++)
    out[i] = slots[inverse[i]] == kNoSlot ? -1 : static_cast<int64_t>(slots[inverse[i]]);
}

void Step::unique_rows(int table, float* rows, int64_t* slots) {
  hold();
  Part& part = parts_[static_cast<size_t>(table)];
  Locked locked(*this);
  update_plan(part);
  read_parts({&part}, locked, [rows](const Part& read) {
    const size_t dim = static_cast<size_t>(read.table->config().dim);
    for (size_t u = 0; u < read.rows.size(); u++) std::copy_n(read.rows[u], dim, rows + u * dim);
  });
  for (const Uniques& range : part.ranges)
    for (const uint32_t slot : range.slots) *slots++ = slot == kNoSlot ? -1 : static_cast<int64_t>(slot);
}

void Step::leave_out(int table, const int64_t* numbers, int64_t n) {
  std::vector<Uniques>& ranges = parts_[static_cast<size_t>(table)].ranges;
  for (int64_t i = 0; i < n; i++)
    for (Uniques& range : ranges) {
      const int64_t u = numbers[i] - range.base;
      if (u >= 0 && u < static_cast<int64_t>(range.slots.size())) range.drop_row(static_cast<size_t>(u));
    }
}

bool Step::sum_gradients(const std::vector<GradientRows>& grads, const std::vector<float*>& sums) {
  const bool was_let_go = hold();
  struct Task {
    size_t part, range;
  };
  std::vector<Task> tasks;
  for (size_t t = 0; t < parts_.size(); t++)
    for (size_t r = 0; r < parts_[t].ranges.size(); r++) tasks.push_back({t, r});
  std::vector<Part*> maxima;  // max pooling reads the rows again; eviction or growth may have come between
  for (Part& part : parts_) {
    if (std::none_of(part.features.begin(), part.features.end(),
                     [&](int f) { return features_[static_cast<size_t>(f)].pooling == Pooling::kMax; }))
      continue;
    if (was_let_go && part.step != part.table->step())
      throw std::logic_error("table '" + part.table->config().name +
                             "': the gradient of max pooling needs the rows of the forward pass, got rows that an "
                             "update has changed since. Call the module again before this backward pass.");
    maxima.push_back(&part);
  }
  if (!maxima.empty()) {
    Locked locked(*this);
    read_parts(maxima, locked, [](const Part&) {});
  }
  std::atomic<bool> finite{true};
  ThreadPool::instance().run(static_cast<int>(tasks.size()), [&](int i) {
    const Part& part = parts_[tasks[static_cast<size_t>(i)].part];
    const Uniques& range = part.ranges[tasks[static_cast<size_t>(i)].range];
    float* sum = sums[tasks[static_cast<size_t>(i)].part];
    const int dim = part.table->config().dim;
    const int64_t first = int64_t{range.base} * dim, length = static_cast<int64_t>(range.ids.size()) * dim;
    std::fill_n(sum + first, length, 0.0f);
    for (size_t k = 0; k < part.features.size(); k++) {
      const GradientRows& grad = grads[static_cast<size_t>(part.features[k])];
      if (grad.data)
        kernels().accumulate(bags(part, k), part.rows.data(), grad.data, grad.step, sum, dim, range.base,
                             range.base + static_cast<uint32_t>(range.ids.size()));
    }
    if (!kernels().finite(sum + first, length)) finite.store(false);
  });
  return finite.load();
}

void Step::add_squares(int table, const float* sums, double* squares) const noexcept {
  const Part& part = parts_[static_cast<size_t>(table)];
  const int64_t dim = part.table->config().dim;
  for (const Uniques& range : part.ranges)
    for (size_t u = 0; u < range.ids.size(); u++) {
      double& square = squares[partition_of(range.hashes[u])];
      const float* sum = sums + (range.base + static_cast<int64_t>(u)) * dim;
      for (int64_t d = 0; d < dim; d++) square += static_cast<double>(sum[d]) * sum[d];
    }
}

bool Step::find_nonfinite(int table, const float* sums, int64_t* id) const noexcept {
  const Part& part = parts_[static_cast<size_t>(table)];
  const int64_t dim = part.table->config().dim;
  for (const Uniques& range : part.ranges)
    for (size_t u = 0; u < range.ids.size(); u++)
      if (!kernels().finite(sums + (range.base + static_cast<int64_t>(u)) * dim, dim)) return *id = range.ids[u], true;
  return false;
}

// The number of each distinct id of a range, by its hash.
class Step::Numbers {
 public:
  explicit Numbers(size_t most) : cells_(std::bit_ceil(2 * most + 1), kNone), mask_(cells_.size() - 1) {}
  // The number among `uniques` of id number u of `from`, which is taken in where it is new.
  uint32_t number_of(const Uniques& from, size_t u, Uniques& uniques) {
    size_t at = from.hashes[u] & mask_;
    while (cells_[at] != kNone && uniques.ids[cells_[at]] != from.ids[u]) at = (at + 1) & mask_;
    if (cells_[at] != kNone) return cells_[at];
    uniques.append(from, u);
    return cells_[at] = static_cast<uint32_t>(uniques.ids.size() - 1);
  }

 private:
  static constexpr uint32_t kNone = 0xffffffffu;
  std::vector<uint32_t> cells_;
  size_t mask_;
};

// One table of a merge: its share of each step, and of each range the numbers that their ids get, in order.
struct Step::Shares {
  struct Share {
    const Part* part;
    const float* sums;
  };
  std::vector<Share> shares;
  std::vector<std::vector<uint32_t>> numbers;

  // The plans that keep the frames of all parts.
  std::vector<std::shared_ptr<Frames::Plan>> plans() const {
    std::vector<std::shared_ptr<Frames::Plan>> all;
    for (const Share& share : shares)
      for (const auto& plan : share.part->plans)
        if (std::find(all.begin(), all.end(), plan) == all.end()) all.push_back(plan);
    return all;
  }

  // Calls visit(ids of a share, number of one of them among these, its gradient) for each id in the range.
  template <class F>
  void each(const Uniques& range, F&& visit) const {
    for (const Share& share : shares) {
      const int64_t dim = share.part->table->config().dim;
      for (const Uniques& from : share.part->ranges) {
        if (from.last_partition <= range.first_partition || from.first_partition >= range.last_partition) continue;
        const bool whole = from.first_partition >= range.first_partition && from.last_partition <= range.last_partition;
        for (size_t u = 0; u < from.ids.size(); u++)
          if (whole || range.covers(from.hashes[u]))
            visit(from, u, share.sums + (from.base + static_cast<int64_t>(u)) * dim);
      }
    }
  }

  void find(Uniques& range, std::vector<uint32_t>& numbered) const {
    size_t most = 0;
    each(range, [&](const Uniques&, size_t, const float*) { most++; });
    Numbers numbers_by_id(most);
    numbered.reserve(most);
    each(range, [&](const Uniques& from, size_t u, const float*) {
      const uint32_t number = numbers_by_id.number_of(from, u, range);
      if (from.slots[u] != kNoSlot) range.set_row(number, from, u);
      numbered.push_back(number);
    });
  }

  // `sums`: of the range, zeroed.
  void add(const Uniques& range, const std::vector<uint32_t>& numbered, float* sums, int dim) const {
    const uint32_t* number = numbered.data();
    each(range, [&](const Uniques& from, size_t u, const float* gradient) {
      float* sum = sums + int64_t{*number++} * dim;
      if (from.slots[u] == kNoSlot) return;  // refused when it was mapped: it had no row to take a gradient
      for (int d = 0; d < dim; d++) sum[d] += gradient[d];
    });
  }
};

std::unique_ptr<Step> Step::merge(const std::vector<Step*>& steps, const std::vector<Sums>& sums,
                                  std::vector<std::vector<float>>* merged_sums) {
  for (Step* step : steps) step->hold();
  std::vector<std::shared_ptr<Table>> tables;
  std::unordered_map<const Table*, size_t> place;
  std::vector<Shares> shares;
  for (size_t s = 0; s < steps.size(); s++)
    for (size_t p = 0; p < steps[s]->parts_.size(); p++) {
      const Part& part = steps[s]->parts_[p];
      if (!sums[s][p]) continue;
      const auto [at, is_new] = place.try_emplace(part.table.get(), tables.size());
      if (is_new) tables.push_back(part.table), shares.emplace_back();
      shares[at->second].shares.push_back({&part, *sums[s][p]});
    }
  auto merged = std::make_unique<Step>(tables, std::vector<Feature>{});
  std::vector<std::pair<size_t, size_t>> tasks;  // table, range
  for (size_t t = 0; t < tables.size(); t++) {
    Part& part = merged->parts_[t];
    part.withdrawn = UINT64_MAX;
    part.generation = tables[t]->generation();
    part.plans = shares[t].plans();
    int64_t num_ids = 0;
    for (const Shares::Share& share : shares[t].shares) {
      num_ids += share.part->num_unique;
      part.withdrawn = std::min(part.withdrawn, share.part->withdrawn);
      part.generation = tables[t]->older(part.generation, share.part->generation);
    }
    cut(part.ranges, num_ids);
    shares[t].numbers.resize(part.ranges.size());
    for (size_t r = 0; r < part.ranges.size(); r++) tasks.emplace_back(t, r);
  }
  ThreadPool& pool = ThreadPool::instance();
  pool.run(static_cast<int>(tasks.size()), [&](int i) {
    const auto [t, r] = tasks[static_cast<size_t>(i)];
    shares[t].find(merged->parts_[t].ranges[r], shares[t].numbers[r]);
  });
  merged_sums->assign(tables.size(), {});
  for (size_t t = 0; t < tables.size(); t++) {
    Part& part = merged->parts_[t];
    for (Uniques& range : part.ranges) {
      range.base = static_cast<uint32_t>(part.num_unique);
      part.num_unique += static_cast<int64_t>(range.ids.size());
    }
    (*merged_sums)[t].resize(static_cast<size_t>(part.num_unique * tables[t]->config().dim));
    part.table->retain(part.generation);
  }
  merged->retained_ = true;
  pool.run(static_cast<int>(tasks.size()), [&](int i) {
    const auto [t, r] = tasks[static_cast<size_t>(i)];
    const Uniques& range = merged->parts_[t].ranges[r];
    const int dim = tables[t]->config().dim;
    shares[t].add(range, shares[t].numbers[r], (*merged_sums)[t].data() + int64_t{range.base} * dim, dim);
  });
  return merged;
}

// The numbers here of the distinct ids of a grain; they rise from one range to the next.
std::span<const uint32_t> Step::members_of(const Part& part, size_t grain) {
  if (!part.members.empty()) return part.members[grain];
  return {part.distinct.inverse(grain), static_cast<size_t>(part.distinct.feature(grain).num_values)};
}

// `join` of the grains [first, last), for the ids of one range, whose first sum is sums[0].
void Step::join_range(size_t table, const Uniques& range, const GrainSums* grains, size_t first, size_t last,
                      float* sums) const {
  const Part& part = parts_[table];
  const size_t dim = static_cast<size_t>(part.table->config().dim), length = range.ids.size() * dim;
  if (last - first > 2) {
    const size_t middle = first + (last - first) / 2;
    Column<float> second(length);
    join_range(table, range, grains, first, middle, sums);
    join_range(table, range, grains, middle, last, second.data());
    for (size_t i = 0; i < length; i++) sums[i] += second[i];
    return;
  }
  std::fill_n(sums, length, kNoSum);
  // -0.0 marks "no sum", so a sum of a grain must not be -0.0: the side that asks has made sure of it.
  const float zero = part.members.empty() ? kNoSum : 0.0f;
  for (size_t g = first; g < last; g++) {
    const std::optional<const float*> of_grain = grains[g].sums[table];
    if (!of_grain) continue;
    const std::span<const uint32_t> members = members_of(part, g);
    const uint32_t end = range.base + static_cast<uint32_t>(range.ids.size());
    auto at = std::partition_point(members.begin(), members.end(), [&](uint32_t u) { return u < range.base; });
    const float* gradient = *of_grain + static_cast<size_t>(at - members.begin()) * dim;
    for (; at != members.end() && *at < end; at++, gradient += dim) {
      const size_t u = *at - range.base;
      if (range.slots[u] == kNoSlot) continue;  // refused when it was mapped: it had no row to take a gradient
      for (size_t d = 0; d < dim; d++) sums[u * dim + d] += gradient[d] + zero;
    }
  }
}

void Step::check_grains(const std::vector<GrainSums>& grains) const {
  if (grains.size() != num_grains_)
    throw std::invalid_argument("step: join needs the sums of each grain, got " + std::to_string(grains.size()) +
                                " of " + std::to_string(num_grains_) + ".");
  for (size_t t = 0; t < parts_.size(); t++)
    for (size_t g = 0; g < grains.size(); g++)
      if (grains[g].sums[t] && grains[g].num_ids[t] != static_cast<int64_t>(members_of(parts_[t], g).size()))
        throw std::invalid_argument("step: a grain must have a sum for each of its distinct ids, got " +
                                    std::to_string(grains[g].num_ids[t]) + " for " +
                                    std::to_string(members_of(parts_[t], g).size()) + " ids.");
}

bool Step::join(const std::vector<GrainSums>& grains, const std::vector<float*>& out) const {
  check_grains(grains);
  std::vector<std::pair<size_t, size_t>> tasks;  // table, range
  for (size_t t = 0; t < parts_.size(); t++)
    for (size_t r = 0; r < parts_[t].ranges.size(); r++) tasks.emplace_back(t, r);
  std::atomic<bool> finite{true};
  ThreadPool::instance().run(static_cast<int>(tasks.size()), [&](int i) {
    const auto [t, r] = tasks[static_cast<size_t>(i)];
    const Uniques& range = parts_[t].ranges[r];
    const size_t dim = static_cast<size_t>(parts_[t].table->config().dim);
    float* sums = out[t] + range.base * dim;
    join_range(t, range, grains.data(), 0, grains.size(), sums);
    if (!kernels().finite(sums, static_cast<int64_t>(range.ids.size() * dim))) finite.store(false);
  });
  return finite.load();
}

std::unique_ptr<Step> Step::summed(const std::vector<float*>& sums) {
  hold();
  auto step = std::make_unique<Step>(tables(), std::vector<Feature>{});
  for (size_t t = 0; t < parts_.size(); t++) {
    const Part& from = parts_[t];
    Part& part = step->parts_[t];
    part.num_unique = from.num_unique, part.withdrawn = from.withdrawn, part.step = from.step;
    part.generation = from.generation, part.plans = from.plans;
    part.table->retain(part.generation);
    part.ranges.resize(from.ranges.size());
  }
  step->retained_ = true;
  ThreadPool::instance().run(static_cast<int>(parts_.size()), [&](int i) {
    const auto t = static_cast<size_t>(i);
    const size_t dim = static_cast<size_t>(parts_[t].table->config().dim);
    float* sum = sums[t];
    for (size_t r = 0; r < parts_[t].ranges.size(); r++) {
      Uniques& range = step->parts_[t].ranges[r];
      range.take_all(parts_[t].ranges[r]);
      for (size_t u = 0; u < range.ids.size(); u++, sum += dim) {
        if (std::bit_cast<uint32_t>(*sum) != std::bit_cast<uint32_t>(kNoSum)) continue;
        range.drop_row(u);
        std::fill_n(sum, dim, 0.0f);
      }
    }
  });
  return step;
}

// Brings a plan up to date after withdrawals and updates: a withdrawn id has no row any more, so that it reads as
// absent and takes no gradient; a row that missed steps replays them.
void Step::refresh(Part& part) const {
  drop_gone(part);
  for (Uniques& range : part.ranges) part.table->place(range, part.plan(), nullptr);
  if (part.plans.empty()) leave_frames(part);
}

// Ids whose rows have gone have none from now on.
void Step::drop_gone(Part& part) {
  if (!part.received.empty()) return;
  for (Uniques& range : part.ranges) {
    Uniques probe;
    probe.ids = range.ids;
    probe.hashes = range.hashes;
    part.table->resolve(probe, false);
    for (size_t u = 0; u < range.slots.size(); u++)
      if (probe.slots[u] != range.slots[u]) range.drop_row(u);
  }
}

// Refreshes a part whose rows were withdrawn, or missed steps, since it was mapped.
void Step::update_plan(Part& part) const {
  if (!part.received.empty()) return;
  const bool behind = part.table->scope() != Scope::kTouched && part.step != part.table->step();
  if (behind || part.withdrawn != part.table->num_withdrawn()) refresh(part);
}

void Step::apply(const Sums& sums, const std::vector<double>& rates) {
  hold();
  Rooms rooms(*this);
  for (size_t t = 0; t < parts_.size(); t++)
    if (sums[t] && parts_[t].table->learns() && has_cold(parts_[t]))
      parts_[t].room = parts_[t].table->frames().make_room_for_batch(parts_[t].num_unique);
  const Locked locked(*this);
  for (Part& part : parts_) bring(part);
  struct Task {
    size_t part, range;
  };
  std::vector<Task> tasks;
  std::vector<Table*> eager;
  for (size_t t = 0; t < parts_.size(); t++) {
    if (!sums[t] || !parts_[t].table->learns()) continue;
    if (retained_ && parts_[t].withdrawn != parts_[t].table->num_withdrawn()) refresh(parts_[t]);
    parts_[t].table->begin_update(rates[t]);
    if (parts_[t].table->scope() == Scope::kAll) eager.push_back(parts_[t].table.get());
    for (size_t r = 0; r < parts_[t].ranges.size(); r++) tasks.push_back({t, r});
  }
  ThreadPool::instance().run(static_cast<int>(tasks.size()), [&](int i) {
    Part& part = parts_[tasks[static_cast<size_t>(i)].part];
    const Uniques& range = part.ranges[tasks[static_cast<size_t>(i)].range];
    part.table->update(range,
                       *sums[tasks[static_cast<size_t>(i)].part] + int64_t{range.base} * part.table->config().dim);
  });
  if (!eager.empty())
    for_each_range(16, eager, [](Table& table, int first, int last) { table.update_idle(first, last); });
}

}  // namespace hotbed
