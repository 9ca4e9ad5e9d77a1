// SPDX-License-Identifier: Apache-2.0
// Table: taking back the map of a batch.
#include "map_log.h"

#include <algorithm>
#include <cstring>

#include "table.h"

namespace hotbed {

void Table::begin_log(Uniques& uniques) {
  uniques.log = std::make_unique<MapLog>();
  for (int p = uniques.first_partition; p < uniques.last_partition; p++)
    partitions_[static_cast<size_t>(p)].log = uniques.log.get();
}

void Table::log(Uniques& uniques) {
  MapLog& log = *uniques.log;
  const size_t width = layout().observed_bytes;
  log.observed.resize(uniques.slots.size() * width);
  for (size_t u = 0; width > 0 && u < uniques.slots.size(); u++)
    if (uniques.slots[u] != kNoSlot)
      std::memcpy(log.observed.data() + u * width, ledger_[uniques.slots[u]].observed(), width);
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
  const MapLog& log = *uniques.log;
  const size_t width = layout().observed_bytes;
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
      mark_back(p, id, slot);
      break;
    }
  }
  for (size_t u = 0; width > 0 && u < uniques.slots.size(); u++) {
    if (uniques.slots[u] == kNoSlot || inserted[u]) continue;
    changing(uniques.slots[u]);
    std::memcpy(ledger_[uniques.slots[u]].observed(), log.observed.data() + u * width, width);
  }
  for (const MapLog::Waiting& waiting : log.waiting) {
    const uint64_t hash = uniques.hashes[waiting.u];
    Partition& partition = partitions_[static_cast<size_t>(partition_of(hash))];
    if (!inserted[waiting.u]) partition.refused--;
    if (waiting.known) partition.candidates->load(waiting.before);
    else partition.candidates->forget(uniques.ids[waiting.u], hash);
  }
  for (const Candidate& candidate : log.dropped)
    if (Candidates& candidates = *partitions_[partition_of(hash_id(candidate.id))].candidates; !candidates.is_sketch())
      candidates.load(candidate);
  for (const int p : log.counted_anew) partitions_[p].counts_stale = true;
  for (const int p : log.swept) partitions_[p].stale = true;
  for (int p = uniques.first_partition; p < uniques.last_partition; p++)
    partitions_[static_cast<size_t>(p)].victims.clear();
}

}  // namespace hotbed
