// SPDX-License-Identifier: Apache-2.0
// Table: rows that go, because they expired, had to make room or were removed.
#include "eviction.h"

#include <algorithm>
#include <bit>

#include "table.h"

namespace hotbed {
namespace {

// An order-preserving image of a double among the integers.
int64_t ordered(double x) noexcept {
  const int64_t bits = std::bit_cast<int64_t>(x);
  return bits < 0 ? INT64_MIN - bits : bits;
}

}  // namespace

bool Table::expired(int64_t seen) const noexcept {
  if (watermark_ == INT64_MIN || config_.eviction.ttl < 0) return false;
  return seen <= watermark_ &&
         static_cast<uint64_t>(watermark_) - static_cast<uint64_t>(seen) >= static_cast<uint64_t>(config_.eviction.ttl);
}

void Table::begin_evict(int64_t now) {
  if (now == INT64_MIN) return;
  watermark_ = std::max(watermark_, now);
  if (config_.eviction.ttl >= 0 || config_.admission.expire_after >= 0)
    for (auto& partition : partitions_) partition.stale = partition.counts_stale = true;
}

int64_t Table::candidates_from() const noexcept {
  return config_.admission.expire_after >= 0 ? watermark_ - config_.admission.expire_after + 1 : INT64_MIN;
}

// Counts must not depend on how far a sweep is: a checkpoint ends it at once.
void Table::expire_candidates(int p) {
  Partition& partition = partitions_[p];
  if (!partition.counts_stale) return;
  partition.counts_stale = false;
  if (!partition.candidates || config_.admission.expire_after < 0) return;
  std::vector<Candidate>* dropped = nullptr;
  if (partition.log) partition.log->counted_anew.push_back(p), dropped = &partition.log->dropped;
  partition.candidates->expire(candidates_from(), dropped);
}

uint64_t Table::sweep(int first, int last) {
  const uint64_t removed = remove_expired(first, last);
  num_withdrawn_.fetch_add(removed);
  return removed;
}

uint64_t Table::remove_expired(int first, int last) {
  uint64_t removed = 0;
  std::vector<std::pair<int64_t, uint32_t>> dead;
  for (int p = first; p < last; p++) {
    Partition& partition = partitions_[p];
    expire_candidates(p);
    if (!partition.stale) continue;
    partition.stale = false;
    if (partition.log) partition.log->swept.push_back(p);
    if (config_.eviction.ttl < 0) continue;
    dead.clear();
    maps_[p].for_each([&](int64_t id, uint32_t slot) {
      if (expired(ledger_[slot].seen())) dead.emplace_back(id, slot);
    });
    std::sort(dead.begin(), dead.end());  // the order of reuse must not depend on the layout of the map
    for (const auto& [id, slot] : dead) remove_row(p, id, slot, Reason::kExpired);
    removed += dead.size();
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
    free_slot(p, slot);
  }
  partition.evicted[static_cast<size_t>(reason)]++;
}

// Nobody knows the slot any more; its row ends, unless a snapshot still wants it.
void Table::free_slot(int p, uint32_t slot) {
  partitions_[p].free.push_back(slot);
  if (frames_.in_memory()) return;
  if (snapshot_ && !snapshot_->settled.test(slot)) {
    if (frames_.of(slot) == kColdFrame) return keep_image(p, slot);
    mark_changing(slot);
  }
  frames_.forget(slot);
}

int64_t Table::victim_key(uint32_t slot) const noexcept {
  const LedgerEntry entry = ledger_[slot];
  if (!config_.eviction.by_count) return entry.seen();
  return layout().has_score ? ordered(entry.score()) : static_cast<int64_t>(entry.count());
}

bool Table::evict_one(int p, const std::vector<uint32_t>& in_batch) {
  IdMap& map = maps_[p];
  Partition& partition = partitions_[p];
  const auto pinned = [&](uint32_t slot) { return std::binary_search(in_batch.begin(), in_batch.end(), slot); };
  const auto scan = [&](auto&& add) {
    map.for_each([&](int64_t id, uint32_t slot) {
      if (pinned(slot)) partition.victims.skipped();
      else add(Victim{victim_key(slot), id, slot});
    });
  };
  const auto current = [&](const Victim& victim, int64_t* key) {
    if (map.find(victim.id, hash_id(victim.id)) != victim.slot) return Victims::State::kGone;
    *key = victim_key(victim.slot);
    return pinned(victim.slot) ? Victims::State::kProtected : Victims::State::kAlive;
  };
  Victim victim;
  if (!partition.victims.pop(scan, current, &victim)) return false;
  // With plans in flight the slot rests; reserve() has provided a fresh one for this insertion. Those plans still read
  // and update the row: their batches came before this one, so that mapping ahead changes no bit.
  remove_row(p, victim.id, victim.slot, Reason::kOverCap);
  return true;
}

bool Table::remove(int64_t id) {
  const uint64_t hash = hash_id(id);
  const int p = partition_of(hash);
  const uint32_t slot = maps_[p].find(id, hash);
  if (slot == kNoSlot) return false;
  remove_row(p, id, slot, Reason::kRemoved);
  num_withdrawn_.fetch_add(1);
  return true;
}

}  // namespace hotbed
