// SPDX-License-Identifier: Apache-2.0
// Table: what happens to rows over time: the rule's steps, replays of missed steps, expiry and eviction.
#include <algorithm>
#include <bit>
#include <cmath>

#include "table.h"

namespace hotbed {
namespace {

constexpr size_t kCachedSteps = size_t{1} << 16;
constexpr int64_t kRun = 256;  // rows handed to a kernel at a time

// An order-preserving image of a double among the integers.
int64_t ordered(double x) noexcept {
  const int64_t bits = std::bit_cast<int64_t>(x);
  return bits < 0 ? INT64_MIN - bits : bits;
}

}  // namespace

const RuleStep& Table::step_at(uint64_t step, RuleStep* scratch) const noexcept {
  if (step <= steps_.size()) return steps_[step - 1];
  *scratch = rule_step(config_.rule, rates_.at(step), step);
  return *scratch;
}

uint64_t Table::begin_update(double lr) {
  step_++;
  rates_.record(step_, lr);
  if (config_.rule.scope != Scope::kTouched && steps_.size() + 1 == step_ && step_ <= kCachedSteps)
    steps_.push_back(rule_step(config_.rule, lr, step_));
  return step_;
}

void Table::load_scalars(uint64_t step, int64_t watermark, uint64_t calls, std::vector<RateHistory::Run> rates) {
  step_ = step, watermark_ = watermark, calls_ = calls;
  rates_.assign(std::move(rates));
  steps_.clear();
  if (config_.rule.scope != Scope::kTouched)
    for (uint64_t t = 1; t <= std::min<uint64_t>(step, kCachedSteps); t++)
      steps_.push_back(rule_step(config_.rule, rates_.at(t), t));
}

// Half-precision rows are widened, stepped in fp32, and rounded by noise that depends on (seed, table, id, step, lane)
// only.
void Table::update_half(const RuleStep& rule, uint64_t step, const uint32_t* slots, const float* grads, int64_t n) {
  std::vector<float> wide(static_cast<size_t>(config_.dim));
  float* values = wide.data();
  for (int64_t i = 0; i < n; i++) {
    const Row row = rows_[slots[i]];
    row.read(values);
    float* state = row.state();
    kernels().update(rule, &values, &state, grads ? grads + i * config_.dim : nullptr, 1, config_.dim);
    const uint64_t noise = mix64(mix64(key_ ^ mix64(static_cast<uint64_t>(row.id()) + kGolden)) + step * kGolden);
    row.write(values, &noise);
  }
}

void Table::update(const uint32_t* slots, const float* grads, int64_t n) {
  RuleStep scratch;
  const RuleStep step = step_at(step_, &scratch);
  const bool marks = layout().has_updated;
  float *values[kRun], *state[kRun];
  for (int64_t begin = 0; begin < n;) {
    if (slots[begin] == kNoSlot) {
      begin++;
      continue;
    }
    int64_t length = 0;
    for (; length < kRun && begin + length < n && slots[begin + length] != kNoSlot; length++) {
      changing(slots[begin + length]);
      const Row row = rows_[slots[begin + length]];
      values[length] = row.values(), state[length] = row.state();
      if (marks) {
        replay(slots[begin + length], step_ - 1);
        row.set_updated(static_cast<uint32_t>(step_));
      }
    }
    if (layout().dtype == Dtype::kFloat32)
      kernels().update(step, values, state, grads + begin * config_.dim, length, config_.dim);
    else update_half(step, step_, slots + begin, grads + begin * config_.dim, length);
    begin += length;
  }
}

void Table::replay(uint32_t slot, uint64_t to) {
  const Row row = rows_[slot];
  const uint64_t from = row.updated();
  if (from >= to) return;
  changing(slot);
  RuleStep scratch;
  if (layout().dtype == Dtype::kFloat32) {
    float *values = row.values(), *state = row.state();
    for (uint64_t t = from + 1; t <= to; t++)
      kernels().update(step_at(t, &scratch), &values, &state, nullptr, 1, config_.dim);
  } else {
    for (uint64_t t = from + 1; t <= to; t++) update_half(step_at(t, &scratch), t, &slot, nullptr, 1);
  }
  row.set_updated(static_cast<uint32_t>(to));
}

void Table::update_idle(int first, int last) {
  for (int p = first; p < last; p++) maps_[p].for_each([&](int64_t, uint32_t slot) { replay(slot, step_); });
}

void Table::catch_up(int first, int last) {
  if (config_.rule.scope != Scope::kTouched) update_idle(first, last);
}

bool Table::expired(const Row& row) const noexcept {
  if (watermark_ == INT64_MIN) return false;
  const int64_t seen = row.seen();
  return seen <= watermark_ &&
         static_cast<uint64_t>(watermark_) - static_cast<uint64_t>(seen) >= static_cast<uint64_t>(config_.eviction.ttl);
}

void Table::begin_evict(int64_t now) {
  if (now <= watermark_) return;
  watermark_ = now;
  if (config_.eviction.ttl >= 0 || config_.admission.expire_after >= 0)
    for (auto& partition : partitions_) partition.stale = true;
}

uint64_t Table::sweep(int first, int last) {
  uint64_t removed = 0;
  std::vector<std::pair<int64_t, uint32_t>> dead;
  for (int p = first; p < last; p++) {
    Partition& partition = partitions_[p];
    if (partition.candidates && config_.admission.expire_after >= 0 && watermark_ != INT64_MIN)
      partition.candidates->expire(watermark_ - config_.admission.expire_after + 1);
    partition.stale = false;
    if (config_.eviction.ttl < 0) continue;
    dead.clear();
    maps_[p].for_each([&](int64_t id, uint32_t slot) {
      if (expired(rows_[slot])) dead.emplace_back(id, slot);
    });
    std::sort(dead.begin(), dead.end());  // the order of reuse must not depend on the layout of the map
    for (const auto& [id, slot] : dead) remove_row(p, id, slot, Reason::kExpired);
    removed += dead.size();
    num_withdrawn_.fetch_add(dead.size());
    if (!dead.empty()) maps_[p].shrink();
  }
  return removed;
}

void Table::remove_row(int p, int64_t id, uint32_t slot, Reason reason) {
  Partition& partition = partitions_[p];
  maps_[p].erase(id, hash_id(id));
  mark_gone(p, id, slot);
  if (partition.log) partition.log->gone.push_back({id, slot, reason});
  if (partition.log || plans_[0].load() > 0 || plans_[1].load() > 0) {
    partition.fresh.push_back(slot);
    quarantined_.store(true);
  } else {
    partition.free.push_back(slot);
  }
  partition.evicted[static_cast<size_t>(reason)]++;
}

int64_t Table::victim_key(const Row& row) const noexcept {
  if (!config_.eviction.by_count) return row.seen();
  return layout().has_score ? ordered(row.score()) : static_cast<int64_t>(row.count());
}

bool Table::evict_one(int p, const std::vector<uint32_t>& in_batch) {
  IdMap& map = maps_[p];
  Partition& partition = partitions_[p];
  const auto pinned = [&](uint32_t slot) { return std::binary_search(in_batch.begin(), in_batch.end(), slot); };
  const auto scan = [&](auto&& add) {
    map.for_each([&](int64_t id, uint32_t slot) {
      if (pinned(slot)) partition.victims.skipped();
      else add(Victim{victim_key(rows_[slot]), id, slot});
    });
  };
  const auto current = [&](const Victim& victim, int64_t* key) {
    if (map.find(victim.id, hash_id(victim.id)) != victim.slot) return Victims::State::kGone;
    *key = victim_key(rows_[victim.slot]);
    return pinned(victim.slot) ? Victims::State::kProtected : Victims::State::kAlive;
  };
  Victim victim;
  if (!partition.victims.pop(scan, current, &victim)) return false;
  // With plans in flight the slot rests; reserve() has provided a fresh one for this insertion. Those plans still read
  // and update the row: their batches came before this one, so that mapping ahead changes no bit.
  remove_row(p, victim.id, victim.slot, Reason::kOverCap);
  return true;
}

void Table::begin_log(Uniques& uniques) {
  uniques.log = std::make_unique<MapLog>();
  for (int p = uniques.first_partition; p < uniques.last_partition; p++)
    partitions_[static_cast<size_t>(p)].log = uniques.log.get();
}

void Table::log(Uniques& uniques) {
  const RowLayout& fields = layout();
  MapLog& log = *uniques.log;
  log.seen.assign(fields.has_seen ? uniques.slots.size() : 0, 0);
  log.counts.assign(fields.has_count ? uniques.slots.size() : 0, 0);
  log.scores.assign(fields.has_score ? uniques.slots.size() : 0, 0.0);
  if (fields.has_seen || fields.has_count || fields.has_score)
    for (size_t u = 0; u < uniques.slots.size(); u++) {
      if (uniques.slots[u] == kNoSlot) continue;
      const Row row = rows_[uniques.slots[u]];
      if (fields.has_seen) log.seen[u] = row.seen();
      if (fields.has_count) log.counts[u] = row.count();
      if (fields.has_score) log.scores[u] = row.score();
    }
  if (admits_all() || !learns()) return;
  for (const uint32_t u : uniques.missing) {
    MapLog::Waiting waiting{u, false, {}};
    const Candidates& candidates = *partitions_[static_cast<size_t>(partition_of(uniques.hashes[u]))].candidates;
    waiting.known = candidates.find(uniques.ids[u], uniques.hashes[u], &waiting.before);
    log.waiting.push_back(waiting);
  }
}

void Table::end_log(Uniques& uniques) noexcept {
  for (int p = uniques.first_partition; p < uniques.last_partition; p++)
    partitions_[static_cast<size_t>(p)].log = nullptr;
}

void Table::take_back(Uniques& uniques) {
  const RowLayout& fields = layout();
  const MapLog& log = *uniques.log;
  std::vector<uint8_t> inserted(uniques.slots.size(), 0);
  for (const uint32_t u : uniques.missing) {
    const int p = partition_of(uniques.hashes[u]);
    Partition& partition = partitions_[static_cast<size_t>(p)];
    inserted[u] = 1;
    partition.admitted--;
    if (maps_[p].find(uniques.ids[u], uniques.hashes[u]) != uniques.slots[u]) continue;
    maps_[p].erase(uniques.ids[u], uniques.hashes[u]);
    mark_gone(p, uniques.ids[u], uniques.slots[u]);
    partition.fresh.push_back(uniques.slots[u]);
    quarantined_.store(true);
  }
  for (size_t i = log.gone.size(); i-- > 0;) {
    const auto [id, slot, reason] = log.gone[i];
    const uint64_t hash = hash_id(id);
    const int p = partition_of(hash);
    Partition& partition = partitions_[static_cast<size_t>(p)];
    partition.evicted[static_cast<size_t>(reason)]--;
    for (std::vector<uint32_t>* resting : {&partition.fresh, &partition.waiting}) {
      const auto at = std::find(resting->begin(), resting->end(), slot);
      if (at == resting->end()) continue;
      resting->erase(at);
      maps_[p].insert(id, hash, slot);
      mark_born(p, id, slot);
      break;
    }
  }
  if (fields.has_seen || fields.has_count || fields.has_score)
    for (size_t u = 0; u < uniques.slots.size(); u++) {
      if (uniques.slots[u] == kNoSlot || inserted[u]) continue;
      changing(uniques.slots[u]);
      const Row row = rows_[uniques.slots[u]];
      if (fields.has_seen) row.set_seen(log.seen[u]);
      if (fields.has_count) row.set_count(log.counts[u]);
      if (fields.has_score) row.set_score(log.scores[u]);
    }
  for (const MapLog::Waiting& waiting : log.waiting) {
    const uint64_t hash = uniques.hashes[waiting.u];
    Partition& partition = partitions_[static_cast<size_t>(partition_of(hash))];
    if (!inserted[waiting.u]) partition.refused--;
    if (waiting.known) partition.candidates->load(waiting.before);
    else partition.candidates->forget(uniques.ids[waiting.u], hash);
  }
  for (int p = uniques.first_partition; p < uniques.last_partition; p++)
    partitions_[static_cast<size_t>(p)].victims.clear();
}

}  // namespace hotbed
