// SPDX-License-Identifier: Apache-2.0
// Parts: the life of mapped ids, and their rows. mapping.cpp maps them.
#include "parts.h"

#include <algorithm>
#include <utility>

#include "thread_pool.h"

namespace hotbed {

void Part::make_plan() {
  if (auto plan = table->frames().make_plan()) plans = {std::move(plan)};
}

bool Part::has_cold() const noexcept {
  return std::any_of(ranges.begin(), ranges.end(), [](const Uniques& range) { return range.has_cold(); });
}

// Where no plan keeps the rows in frames they are found anew, wherever they lie.
void Part::leave_frames() noexcept {
  for (Uniques& range : ranges) range.leave_frames();
}

Parts::Parts(std::vector<std::shared_ptr<Table>> tables, std::vector<Feature> features)
    : features_(std::move(features)), parts_(tables.size()) {
  for (size_t t = 0; t < tables.size(); t++) parts_[t].table = std::move(tables[t]);
  for (size_t f = 0; f < features_.size(); f++)
    parts_[static_cast<size_t>(features_[f].table)].features.push_back(static_cast<int>(f));
}

Parts::Parts(Parts&& other) noexcept
    : features_(std::move(other.features_)),
      parts_(std::exchange(other.parts_, {})),
      retained_(std::exchange(other.retained_, false)),
      let_go_(other.let_go_),
      takes_back_(other.takes_back_) {}

std::vector<std::shared_ptr<Table>> Parts::tables() const {
  std::vector<std::shared_ptr<Table>> all;
  for (const Part& part : parts_) all.push_back(part.table);
  return all;
}

std::vector<Parts> Parts::split(const std::vector<size_t>& num_tables) {
  std::vector<Parts> all;
  size_t table = 0, feature = 0;
  for (const size_t count : num_tables) {
    Parts parts({}, {});
    const size_t first_table = table, first_feature = feature;
    table += count;
    for (; feature < features_.size() && static_cast<size_t>(features_[feature].table) < table; feature++)
      parts.features_.push_back({features_[feature].table - static_cast<int>(first_table), features_[feature].pooling});
    for (size_t t = first_table; t < table; t++) {
      parts.parts_.push_back(std::move(parts_[t]));
      for (int& f : parts.parts_.back().features) f -= static_cast<int>(first_feature);
    }
    parts.retained_ = retained_;
    all.push_back(std::move(parts));
  }
  retained_ = false;
  parts_.clear();
  return all;
}

void cut(std::vector<Uniques>& ranges, int64_t num_ids) {
  const int pieces = Distinct::num_ranges(num_ids);
  ranges.resize(static_cast<size_t>(pieces));
  for (int r = 0; r < pieces; r++) {
    ranges[static_cast<size_t>(r)].first_partition = kPartitions * r / pieces;
    ranges[static_cast<size_t>(r)].last_partition = kPartitions * (r + 1) / pieces;
  }
}

void each_range(const Parts& parts, const std::function<void(size_t, size_t)>& work) {
  std::vector<std::pair<size_t, size_t>> tasks;
  for (size_t t = 0; t < parts.size(); t++)
    for (size_t r = 0; r < parts[t].ranges.size(); r++) tasks.emplace_back(t, r);
  ThreadPool::instance().run(static_cast<int>(tasks.size()), [&](int i) {
    work(tasks[static_cast<size_t>(i)].first, tasks[static_cast<size_t>(i)].second);
  });
}

void Parts::assign(const std::vector<FeatureIds>& ids, const std::vector<int64_t>& grain_ends) {
  for (Part& part : parts_) {
    part.distinct.assign(ids, part.features, grain_ends);
    cut(part.ranges, part.distinct.num_positions());
  }
}

Locked::Locked(const Parts& parts, bool last) {
  for (const Part& part : parts) mutexes_.push_back(&part.table->mutex());
  std::sort(mutexes_.begin(), mutexes_.end());
  if (last) lock_last();
  else
    for (TableMutex* mutex : mutexes_) mutex->lock();
}

void Locked::lock_last() {
  // before it holds any, or it would let others wait for one while it gives way at the next
  for (const TableMutex* mutex : mutexes_) mutex->give_way();
  for (TableMutex* mutex : mutexes_) mutex->lock_unseen();
}

void Locked::wait_for(const std::vector<std::shared_ptr<ReadBatch>>& reads) {
  for (TableMutex* mutex : mutexes_) mutex->unlock();
  for (const std::shared_ptr<ReadBatch>& batch : reads) {
    try {
      batch->wait();
    } catch (const RecordLost&) {}
  }
  lock_last();
}

void Locked::release() {
  for (TableMutex* mutex : mutexes_) mutex->unlock();
  mutexes_.clear();
}

Rooms::Rooms(Parts& parts, bool for_ids) : parts_(parts) {
  for (Part& part : parts)
    if (for_ids) part.room = part.table->frames().make_room_for_batch(part.distinct.num_positions());
}

Rooms::~Rooms() {
  for (Part& part : parts_) part.room.reset();
}

void read_ahead(const std::vector<std::shared_ptr<Table>>& tables, const std::vector<Feature>& features,
                const std::vector<FeatureIds>& ids) {
  Parts parts(tables, features);
  parts.assign(ids, {});
  const Rooms rooms(parts, true);
  for (Part& part : parts) {
    if (!part.room) continue;
    for (Uniques& range : part.ranges) {
      part.distinct.find(range);
      const std::lock_guard lock(part.table->mutex());
      part.table->resolve(range, false);
      part.table->frames().fetch(range, part.room.get());
    }
  }
}

// The life of the mapped ids.

void Parts::keep() {
  for (Part& part : parts_) {
    part.distinct.keep();
    part.withdrawn = part.table->num_withdrawn();
    part.step = part.table->step();
    part.generation = part.table->generation();
    if (part.plans.empty()) part.leave_frames();
  }
  retain();
}

void Parts::retain() noexcept {
  for (Part& part : parts_) part.table->retain(part.generation);
  retained_ = true;
}

void Parts::release() noexcept {
  if (retained_)
    for (Part& part : parts_) part.table->retire(part.generation);
  for (Part& part : parts_) part.plans.clear();
  retained_ = false;
}

void Parts::let_go() {
  if (!retained_) return;
  release();
  for (Part& part : parts_) part.leave_frames();
  let_go_ = true;
}

namespace {

// Ids whose rows have gone have none from now on.
void drop_gone(Part& part) {
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

void finish_read(Part& part) {
  std::vector<ColdRows> cold = std::exchange(part.cold, {});
  ThreadPool::instance().run(static_cast<int>(cold.size()), [&](int r) {
    part.table->finish_aside(cold[static_cast<size_t>(r)], part.copies.data());
  });
}

}  // namespace

bool Parts::hold() {
  if (!let_go_) return false;
  const Locked locked(*this);
  for (Part& part : parts_) part.generation = part.table->generation();
  retain();
  let_go_ = false;
  for (Part& part : parts_) {
    drop_gone(part);
    part.withdrawn = part.table->num_withdrawn();
  }
  return true;
}

bool Parts::take_back() {
  if (!takes_back_ || !retained_) return false;
  const Locked locked(*this);
  for (Part& part : parts_) {
    if (!part.table->observes()) continue;
    for (Uniques& range : part.ranges)
      if (range.log) part.table->take_back(range);
    part.table->end_take_back();
  }
  takes_back_ = false;
  return true;
}

// A withdrawn id has no row any more, so that it reads as absent and takes no gradient; a row that missed steps replays
// them.
void Parts::refresh(Part& part) const {
  drop_gone(part);
  for (Uniques& range : part.ranges) part.table->place(range, part.plan(), nullptr);
  if (part.plans.empty()) part.leave_frames();
}

void Parts::update(Part& part) const {
  if (!part.received.empty()) return;
  const bool behind = part.table->scope() != Scope::kTouched && part.step != part.table->step();
  if (behind || part.withdrawn != part.table->num_withdrawn()) refresh(part);
}

void Parts::bring(Part& part) const {
  if (!part.room) return;
  Frames& frames = part.table->frames();
  if (part.plans.empty()) part.make_plan();
  frames.check_batch(part.ranges, 0, part.num_unique);
  for (const Uniques& range : part.ranges) frames.bring(range, part.plan(), part.room.get());
  for (Uniques& range : part.ranges) {
    part.table->arrive(range, part.plan(), part.room.get());
    part.table->place(range, part.plan(), nullptr);
    for (size_t u = 0; u < range.slots.size(); u++)
      if (range.own_frames[u] == kColdFrame) range.drop_row(u);  // a slot without a row
  }
}

// Points every unique id at its fp32 row, or at a copy. Where rows lie in no frame, all are copied, so that they may be
// used without the mutex of the table; these rows come with `finish_read`.
void Parts::begin_read(Part& part) {
  if (!part.received.empty()) return part.rows.assign(part.received.begin(), part.received.end());
  const Table& table = *part.table;
  const bool aside = part.has_cold();
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

void Parts::read(const std::vector<Part*>& parts, Locked& locked, const std::function<void(const Part&)>& done) {
  std::vector<Part*> small, large, cold;
  for (Part* part : parts) (part->has_cold() ? cold : part->ranges.size() == 1 ? small : large).push_back(part);
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

}  // namespace hotbed
