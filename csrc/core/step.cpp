// SPDX-License-Identifier: Apache-2.0
#include "step.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "map_queue.h"
#include "thread_pool.h"

namespace hotbed {
namespace {

constexpr int64_t kSamplesPerTask = 8192;

bool has_output(const Part& part, const std::vector<OutputRows>& out) {
  return std::any_of(part.features.begin(), part.features.end(),
                     [&](int feature) { return out[static_cast<size_t>(feature)].data != nullptr; });
}

std::vector<Part*> with_output(const std::vector<Part*>& parts, const std::vector<OutputRows>& out) {
  std::vector<Part*> some;
  for (Part* part : parts)
    if (has_output(*part, out)) some.push_back(part);
  return some;
}

}  // namespace

void catch_up_all(const std::vector<Table*>& tables) {
  constexpr int kPieces = 16;
  ThreadPool::instance().run(kPieces * static_cast<int>(tables.size()), [&](int task) {
    const int piece = task % kPieces;
    tables[static_cast<size_t>(task / kPieces)]->catch_up(kPartitions * piece / kPieces,
                                                          kPartitions * (piece + 1) / kPieces);
  });
}

Step::Step(std::vector<std::shared_ptr<Table>> tables, std::vector<Feature> features, std::vector<int64_t> grain_ends)
    : parts_(std::move(tables), std::move(features)) {
  if (!grain_ends.empty()) check_grains(grain_ends.size());
  samples_.grain_ends = std::move(grain_ends);
}

Step Step::of_slots(std::shared_ptr<Table> table, const int64_t* slots, int64_t n) {
  Parts parts({std::move(table)}, {{0, Pooling::kNone}});
  Part& part = parts[0];
  part.distinct.assign({{slots, n, nullptr, nullptr, n}}, part.features);
  Uniques& uniques = part.ranges.emplace_back();
  part.distinct.find(uniques);
  part.num_unique = part.distinct.number(part.ranges);
  uniques.slots.resize(uniques.ids.size());
  for (size_t u = 0; u < uniques.ids.size(); u++)
    uniques.slots[u] = uniques.ids[u] < 0 ? kNoSlot : static_cast<uint32_t>(uniques.ids[u]);
  if (!part.table->frames().in_memory()) uniques.own_frames = uniques.slots;
  uniques.leave_frames();  // until they learn
  part.withdrawn = part.table->num_withdrawn();
  part.distinct.keep();
  return Step(std::move(parts));
}

Step::~Step() {
  try {
    if (task_) task_->wait();
  } catch (...) {  // whoever waited for the map got the error
  }
}

// 1: from ids to slots.

Mapping Step::mapping(const int64_t* times, bool training, bool logs, Locked& locked) {
  samples_.times = times;
  return {training, logs, locked, [this](const Part& part, Uniques& range) { samples_.observe(part, range); }, {}};
}

void Step::map(const std::vector<FeatureIds>& ids, const int64_t* times, bool training, bool logs) {
  parts_.release();
  parts_.assign(ids, samples_.grain_ends);
  const Rooms rooms(parts_, training);
  Locked locked(parts_, !training);
  parts_.map(mapping(times, training, logs, locked), [](Part&) {});
  parts_.keep();
}

std::vector<std::unique_ptr<Step>> Step::divide() {
  const std::vector<int64_t>& ends = samples_.grain_ends;
  if (!parts_.is_mapped()) throw std::logic_error("step: to divide needs mapped ids, got none. Call map first.");
  if (ends.empty()) throw std::logic_error("step: to divide needs grains, got none. Give their ends.");
  parts_.looked_up();
  std::vector<std::unique_ptr<Step>> grains;
  for (Parts& parts : hotbed::divide(parts_, ends.size(), &members_))
    grains.push_back(std::make_unique<Step>(std::move(parts)));
  size_t last = ends.size() - 1;  // with samples
  while (last > 0 && ends[last] == ends[last - 1]) last--;
  grains[last]->task_ = task_;
  return grains;
}

std::vector<std::unique_ptr<Step>> Step::split(const std::vector<size_t>& num_tables) {
  std::vector<std::unique_ptr<Step>> steps;
  for (Parts& parts : parts_.split(num_tables)) steps.push_back(std::make_unique<Step>(std::move(parts)));
  return steps;
}

// The positions of a batch of grains are not those of its features.
void Step::check_undivided() const {
  if (!samples_.grain_ends.empty())
    throw std::logic_error("step: a batch of grains is pooled grain by grain. Call divide.");
}

// 2: rows of the mapped ids.

void Step::set_weights(const std::vector<const float*>& weights) {
  if (!parts_.is_mapped()) throw std::logic_error("step: weights are those of mapped ids, got none. Call map first.");
  check_undivided();
  for (Part& part : parts_)
    for (size_t k = 0; k < part.features.size(); k++)
      if (const float* of_feature = weights[static_cast<size_t>(part.features[k])])
        part.distinct.set_weights(k, of_feature);
}

Bags Step::bags(const Part& part, size_t k) const {
  const Pooling pooling = parts_.features()[static_cast<size_t>(part.features[k])].pooling;
  return bags_of(part.distinct.feature(k), pooling, part.distinct.inverse(k));
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

void Step::pool(const std::vector<OutputRows>& out) {
  if (!parts_.is_mapped()) throw std::logic_error("step: pool needs mapped ids, got none. Call map first.");
  check_undivided();
  parts_.looked_up();
  {
    Locked locked(parts_);
    std::vector<Part*> parts;
    for (Part& part : parts_) {
      parts_.update(part);
      parts.push_back(&part);
    }
    Parts::read(with_output(parts, out), locked, [&](const Part& part) { pool_features(part, out); });
  }
  if (task_) task_->release();
}

void Step::lookup(const std::vector<FeatureIds>& ids, const int64_t* times, bool training, bool keeps,
                  const std::vector<OutputRows>& out) {
  check_undivided();
  parts_.release();
  parts_.assign(ids, {});
  const Rooms rooms(parts_, training);
  Locked locked(parts_, !training);
  try {
    const std::vector<Part*> large = parts_.map(mapping(times, training, false, locked), [&](Part& part) {
      if (!has_output(part, out)) return;
      Parts::begin_read(part);
      pool_features(part, out);
    });
    if (keeps) parts_.keep();
    Parts::read(with_output(large, out), locked, [&](const Part& part) { pool_features(part, out); });
  } catch (...) {
    parts_.release();
    throw;
  }
  if (!keeps) parts_.release();
}

void Step::position_rows(int feature, float* rows) {
  check_undivided();
  parts_.hold();
  Part& part = parts_[static_cast<size_t>(parts_.features()[static_cast<size_t>(feature)].table)];
  const auto k =
      static_cast<size_t>(std::find(part.features.begin(), part.features.end(), feature) - part.features.begin());
  Locked locked(parts_);
  parts_.update(part);
  Parts::read({&part}, locked, [k, rows](const Part& read) {
    const auto dim = static_cast<size_t>(read.table->config().dim);
    const uint32_t* inverse = read.distinct.inverse(k);
    const auto num_positions = static_cast<size_t>(read.distinct.feature(k).num_values);
    for (size_t i = 0; i < num_positions; i++) std::copy_n(read.rows[inverse[i]], dim, rows + i * dim);
  });
}

void Step::unique_rows(int table, float* rows, int64_t* slots) {
  parts_.hold();
  Part& part = parts_[static_cast<size_t>(table)];
  Locked locked(parts_);
  parts_.update(part);
  Parts::read({&part}, locked, [rows](const Part& read) {
    const size_t dim = static_cast<size_t>(read.table->config().dim);
    for (size_t u = 0; u < read.rows.size(); u++) std::copy_n(read.rows[u], dim, rows + u * dim);
  });
  for (const Uniques& range : part.ranges)
    for (const uint32_t slot : range.slots) *slots++ = slot == kNoSlot ? -1 : static_cast<int64_t>(slot);
}

// What is mapped.

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

// 3: gradients.

bool Step::sum_gradients(const std::vector<GradientRows>& grads, const std::vector<float*>& sums) {
  const bool was_let_go = parts_.hold();
  std::vector<Part*> maxima;  // max pooling reads the rows again; eviction or growth may have come between
  for (Part& part : parts_) {
    if (std::none_of(part.features.begin(), part.features.end(), [&](int feature) {
          return parts_.features()[static_cast<size_t>(feature)].pooling == Pooling::kMax;
        }))
      continue;
    if (was_let_go && part.step != part.table->step())
      throw std::logic_error("table '" + part.table->config().name +
                             "': the gradient of max pooling needs the rows of the forward pass, got rows that an "
                             "update has changed since. Call the module again before this backward pass.");
    maxima.push_back(&part);
  }
  if (!maxima.empty()) {
    Locked locked(parts_);
    Parts::read(maxima, locked, [](const Part&) {});
  }
  std::atomic<bool> finite{true};
  each_range(parts_, [&](size_t t, size_t r) {
    const Part& part = parts_[t];
    const Uniques& range = part.ranges[r];
    const int dim = part.table->config().dim;
    const int64_t first = int64_t{range.base} * dim, length = static_cast<int64_t>(range.ids.size()) * dim;
    std::fill_n(sums[t] + first, length, 0.0f);
    for (size_t k = 0; k < part.features.size(); k++) {
      const GradientRows& grad = grads[static_cast<size_t>(part.features[k])];
      if (grad.data)
        kernels().accumulate(bags(part, k), part.rows.data(), grad.data, grad.step, sums[t], dim, range.base,
                             range.base + static_cast<uint32_t>(range.ids.size()));
    }
    if (!kernels().finite(sums[t] + first, length)) finite.store(false);
  });
  return finite.load();
}

bool Step::join(const std::vector<GrainSums>& grains, const std::vector<float*>& out) const {
  return GrainJoin(views(members_), grains, 0.0f).join_all(parts_, out);
}

std::unique_ptr<Step> Step::summed(const std::vector<float*>& sums) {
  return std::make_unique<Step>(hotbed::summed(parts_, sums));
}

std::unique_ptr<Step> Step::merge(const std::vector<Step*>& steps, const std::vector<Sums>& sums,
                                  std::vector<std::vector<float>>* merged_sums) {
  std::vector<Parts*> all;
  for (Step* step : steps) all.push_back(&step->parts_);
  return std::make_unique<Step>(hotbed::merge(all, sums, merged_sums));
}

void Step::leave_out(int table, const int64_t* numbers, int64_t n) {
  std::vector<Uniques>& ranges = parts_[static_cast<size_t>(table)].ranges;
  for (int64_t i = 0; i < n; i++)
    for (Uniques& range : ranges) {
      const int64_t u = numbers[i] - range.base;
      if (u >= 0 && u < static_cast<int64_t>(range.slots.size())) range.drop_row(static_cast<size_t>(u));
    }
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

// 4: the update.

void Step::apply(const Sums& sums, const std::vector<double>& rates) {
  parts_.hold();
  const Rooms rooms(parts_, false);
  for (size_t t = 0; t < parts_.size(); t++)
    if (sums[t] && parts_[t].table->learns() && parts_[t].has_cold())
      parts_[t].room = parts_[t].table->frames().make_room_for_batch(parts_[t].num_unique);
  const Locked locked(parts_);
  for (Part& part : parts_) parts_.bring(part);
  std::vector<uint8_t> learns(parts_.size(), 0);
  std::vector<Table*> eager;
  for (size_t t = 0; t < parts_.size(); t++) {
    Table& table = *parts_[t].table;
    if (!sums[t] || !table.learns()) continue;
    learns[t] = 1;
    if (parts_.is_mapped() && parts_[t].withdrawn != table.num_withdrawn()) parts_.refresh(parts_[t]);
    table.begin_update(rates[t]);
    if (table.scope() == Scope::kAll) eager.push_back(&table);
  }
  each_range(parts_, [&](size_t t, size_t r) {
    if (!learns[t]) return;
    const Uniques& range = parts_[t].ranges[r];
    parts_[t].table->update(range, *sums[t] + int64_t{range.base} * parts_[t].table->config().dim);
  });
  catch_up_all(eager);
}

}  // namespace hotbed
