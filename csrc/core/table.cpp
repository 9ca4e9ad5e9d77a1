// SPDX-License-Identifier: Apache-2.0
// Table: batches and persistence.
#include "table.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_set>

namespace hotbed {
namespace {

constexpr size_t kAhead = 12;
constexpr uint64_t kReadTogether = uint64_t{64} << 20;  // bytes of rows of a disk that a caller gets at once

RowLayout layout_of(const TableConfig& config) {
  RowLayout layout;
  layout.dim = config.dim;
  layout.dtype = config.dtype;
  layout.state_width = config.rule.state_width(config.dim);
  layout.has_updated = config.rule.scope != Scope::kTouched;
  layout.has_count = config.keep_count;
  layout.has_seen = config.keep_seen;
  layout.has_score = config.eviction.by_count && config.eviction.half_life > 0.0;
  layout.arrange();
  return layout;
}

}  // namespace

Table::Table(TableConfig config)
    : config_(std::move(config)),
      key_(table_key(config_.seed, config_.name_hash)),
      initial_state_(config_.rule.initial_state(config_.dim)),
      layout_(layout_of(config_)),
      frames_(config_.tier, config_.disk, layout_, config_.name, key_, mutex_, owners_),
      ledger_(layout_, frames_.pool(), config_.tier) {
  maps_.reserve(kPartitions);
  partitions_.resize(kPartitions);
  for (int p = 0; p < kPartitions; p++) {
    maps_.emplace_back(p);
    if (!admits_all()) partitions_[p].candidates = std::make_unique<Candidates>(config_.admission, p);
  }
  if (config_.eviction.max_rows) cap_ = (config_.eviction.max_rows + kPartitions - 1) / kPartitions;
}

void Table::begin_batch() {
  calls_++;
  // all lookups between two updates belong to the step that the second one ends
  moment_ = static_cast<int64_t>(config_.counts_steps ? step_ + 1 : calls_);
}

// Before rows of this batch may restart: their slots must rest until it can not be taken back any more.
void Table::turn_generations() {
  while (quarantined_.load() && plans_[1 - generation()].load() == 0) next_generation();
}

// No plan of the generation before lives: nobody can know the slots that waited through it.
void Table::next_generation() {
  bool waits = false;
  for (int p = 0; p < kPartitions; p++) {
    Partition& partition = partitions_[p];
    for (const uint32_t slot : partition.waiting) free_slot(p, slot);
    partition.waiting.clear();
    partition.waiting.swap(partition.fresh);
    waits = waits || !partition.waiting.empty();
  }
  generation_.fetch_add(1);
  quarantined_.store(waits);
}

void Table::touch(uint32_t slot, const Uniques& uniques, size_t u, uint64_t occurrences) const noexcept {
  const RowLayout& fields = layout();
  const LedgerEntry entry = ledger_[slot];
  if (fields.has_seen) entry.set_seen(std::max(entry.seen(), uniques.times.empty() ? moment_ : uniques.times[u]));
  if (fields.has_count)
    entry.set_count(static_cast<uint32_t>(std::min<uint64_t>(entry.count() + occurrences, 0xffffffffu)));
  if (fields.has_score) entry.set_score(log2_sum(entry.score(), uniques.scores[u]));
}

void Table::resolve(Uniques& uniques, bool training) const {
  const size_t n = uniques.ids.size();
  const bool expires = config_.eviction.ttl >= 0;
  uniques.slots.resize(n);
  uniques.missing.clear(), uniques.expired.clear();
  for (size_t u = 0; u < std::min(n, kAhead); u++) maps_[partition_of(uniques.hashes[u])].prefetch(uniques.hashes[u]);
  for (size_t u = 0; u < n; u++) {
    if (u + kAhead < n) {
      const uint64_t ahead = uniques.hashes[u + kAhead];
      maps_[partition_of(ahead)].prefetch(ahead);
    }
    const uint64_t hash = uniques.hashes[u];
    const int p = partition_of(hash);
    uint32_t slot = maps_[p].find(uniques.ids[u], hash);
    if (expires && slot != kNoSlot && partitions_[p].stale && expired(ledger_[slot].seen())) [[unlikely]] {
      uniques.expired.emplace_back(uniques.ids[u], slot);  // past its time but not swept yet: it starts anew
      slot = kNoSlot;
    }
    uniques.slots[u] = slot;
    if (slot == kNoSlot && !uniques.is_counted(u)) continue;
    if (slot == kNoSlot) [[unlikely]] {
      uniques.missing.push_back(static_cast<uint32_t>(u));
      continue;
    }
    frames_.prefetch_values(slot);
    if (training) ledger_.prefetch(slot);
  }
}

void Table::end_expired(Uniques& uniques) {
  for (const auto& [id, slot] : uniques.expired) remove_row(partition_of(hash_id(id)), id, slot, Reason::kRestarted);
  for (const uint32_t u : uniques.missing) expire_candidates(partition_of(uniques.hashes[u]));
}

void Table::arrive(const Uniques& uniques, const Frames::Plan* plan, Frames::Room* room) {
  naming_lost([&] { frames_.arrive(uniques, plan, room); });
}

void Table::place(Uniques& uniques, const Frames::Plan* plan, Frames::Room* room) {
  for (const uint32_t u : frames_.place(uniques, plan, room)) start_row(frames_[uniques.own_frames[u]], uniques.ids[u]);
  if (config_.rule.scope == Scope::kTouched) return;
  for (size_t u = 0; u < uniques.slots.size(); u++)
    if (uniques.frames()[u] < kColdFrame) replay(uniques.slots[u], uniques.frames()[u], step_);
}

bool Table::would_admit(const Candidates& candidates, const Uniques& uniques, size_t u,
                        uint64_t before) const noexcept {
  const Admission& rule = config_.admission;
  if (rule.kind == AdmitKind::kMinCount)
    return before + uniques.counts[u] * rule.coefficient >= rule.min_count || before >= candidates.limit();
  for (uint64_t k = before + 1; k <= before + uniques.counts[u]; k++)
    if (occurrence_draw(key_, uniques.ids[u], k) < rule.probability) return true;
  return false;
}

void Table::count_rows(Uniques& uniques) const {
  const auto absent = std::count(uniques.slots.begin(), uniques.slots.end(), kNoSlot);
  const size_t num_found = uniques.ids.size() - static_cast<size_t>(absent);
  uniques.num_rows = num_found + uniques.missing.size();
  if (!admits_all())
    for (const uint32_t u : uniques.missing) {
      const Partition& partition = partitions_[static_cast<size_t>(partition_of(uniques.hashes[u]))];
      const Candidates& candidates = *partition.candidates;
      const int64_t alive_from = partition.counts_stale ? candidates_from() : INT64_MIN;
      const uint64_t before = candidates.peek(uniques.ids[u], uniques.hashes[u], alive_from);
      if (!would_admit(candidates, uniques, u, before)) uniques.num_rows--;
    }
  uniques.num_new = uniques.num_rows - num_found;
}

void Table::check_capacity(uint64_t num_rows) const {
  const uint64_t capacity = cap_ * kPartitions;
  if (capped() && learns() && num_rows > capacity)
    throw TableFull("table '" + config_.name + "': a batch may use " + std::to_string(capacity) + " rows, got " +
                    std::to_string(num_rows) + ". Raise max_rows or make the batch smaller.");
}

void Table::admit(Uniques& uniques) {
  const uint64_t coefficient = config_.admission.kind == AdmitKind::kMinCount ? config_.admission.coefficient : 1;
  if (layout().observed_bytes > 0)
    for (size_t u = 0; u < uniques.slots.size(); u++)
      if (uniques.slots[u] != kNoSlot && uniques.is_counted(u)) {
        changing(uniques.slots[u]);
        touch(uniques.slots[u], uniques, u, layout().has_count ? uniques.counts[u] * coefficient : 0);
      }
  if (!learns()) uniques.missing.clear();
  if (admits_all()) return;
  size_t kept = 0;
  for (size_t i = 0; i < uniques.missing.size(); i++) {
    if (i + kAhead < uniques.missing.size()) {
      const uint64_t ahead = uniques.hashes[uniques.missing[i + kAhead]];
      partitions_[partition_of(ahead)].candidates->prefetch(ahead);
    }
    const uint32_t u = uniques.missing[i];
    Partition& partition = partitions_[partition_of(uniques.hashes[u])];
    Candidates& candidates = *partition.candidates;
    const int64_t time = uniques.times.empty() ? moment_ : uniques.times[u];
    const bool was_sketch = candidates.is_sketch();
    const Candidate before = candidates.add(uniques.ids[u], uniques.hashes[u], uniques.counts[u] * coefficient, time);
    if (candidates.is_sketch() != was_sketch) num_sketched_.fetch_add(1);
    if (would_admit(candidates, uniques, u, before.count)) {
      candidates.forget(uniques.ids[u], uniques.hashes[u]);
      uniques.counts[u] =
          static_cast<uint32_t>(std::min<uint64_t>(before.count + uniques.counts[u] * coefficient, 0xffffffffu));
      if (!uniques.times.empty()) uniques.times[u] = before.seen;  // the newest sighting, also if it was refused
      uniques.missing[kept++] = u;
    } else {
      partition.refused++;
    }
  }
  uniques.missing.resize(kept);
}

void Table::reserve(const std::vector<Uniques>& ranges) {
  std::array<uint32_t, kPartitions> needed{};
  for (const Uniques& range : ranges)
    for (const uint32_t u : range.missing) needed[static_cast<size_t>(partition_of(range.hashes[u]))]++;
  for (int p = 0; p < kPartitions; p++) {
    std::vector<uint32_t>& free = partitions_[p].free;
    while (free.size() < needed[static_cast<size_t>(p)]) {
      const uint32_t first = add_chunk(p);
      const size_t old = free.size();  // fresh rows go below the freed ones, lowest slot on top
      free.resize(old + Slabs::kChunk);
      std::move_backward(free.begin(), free.begin() + static_cast<ptrdiff_t>(old), free.end());
      for (uint32_t i = 0; i < Slabs::kChunk; i++) free[i] = first + Slabs::kChunk - 1 - i;
    }
  }
}

void Table::start_row(const Row& row, int64_t id) const {
  const RowLayout& fields = layout();
  if (fields.dtype == Dtype::kFloat32) {
    initial_row(config_.init, key_, id, row.values(), fields.dim);
  } else {
    std::vector<float> values(static_cast<size_t>(fields.dim));
    initial_row(config_.init, key_, id, values.data(), fields.dim);
    row.write(values.data(), nullptr);
    row.set_id(id);
  }
  std::copy(initial_state_.begin(), initial_state_.end(), row.state());
}

void Table::start_entry(uint32_t slot) const noexcept {
  const RowLayout& fields = layout();
  const LedgerEntry entry = ledger_[slot];
  if (fields.has_updated) entry.set_updated(static_cast<uint32_t>(step_));
  if (fields.has_seen) entry.set_seen(INT64_MIN);
  if (fields.has_count) entry.set_count(0);
  if (fields.has_score) entry.set_score(-INFINITY);
}

bool Table::has_late_time(const Uniques& uniques, size_t u) const noexcept {
  return layout().has_seen && expired(uniques.times.empty() ? moment_ : uniques.times[u]);
}

void Table::insert(Uniques& uniques) {
  std::vector<uint32_t> in_batch;  // slots that this batch uses: none of them may be a victim
  const auto make_room = [&](int p) {
    if (partitions_[p].stale && remove_expired(p, p + 1) > 0) return true;  // expired rows take no room
    if (in_batch.empty()) {
      for (const uint32_t slot : uniques.slots)
        if (slot != kNoSlot) in_batch.push_back(slot);
      std::sort(in_batch.begin(), in_batch.end());
    }
    return evict_one(p, in_batch);
  };
  for (size_t i = 0; i < uniques.missing.size(); i++) {
    if (i + kAhead < uniques.missing.size()) {  // the bucket, and the row that will be next in that partition
      const uint64_t ahead = uniques.hashes[uniques.missing[i + kAhead]];
      maps_[partition_of(ahead)].prefetch(ahead);
      if (!partitions_[partition_of(ahead)].free.empty()) prefetch(partitions_[partition_of(ahead)].free.back());
    }
    const uint32_t u = uniques.missing[i];
    const uint64_t hash = uniques.hashes[u];
    const int p = partition_of(hash);
    Partition& partition = partitions_[p];
    if (partition.stale && has_late_time(uniques, u))
      remove_expired(p, p + 1);  // this row expires in the next eviction
    if (cap_ && maps_[p].size() >= cap_) make_room(p);
    const uint32_t slot = partition.free.back();
    maps_[p].insert(uniques.ids[u], hash, slot);
    partition.free.pop_back();
    mark_born(p, uniques.ids[u], slot);
    if (const uint32_t frame = frames_.of(slot); frame < kColdFrame)
      start_row(frames_[frame], uniques.ids[u]);  // else in `place`
    start_entry(slot);
    touch(slot, uniques, u, layout().has_count ? uniques.counts[u] : 0);
    partition.admitted++;
    uniques.slots[u] = slot;
    if (cap_) {
      partition.victims.inserted({victim_key(slot), uniques.ids[u], slot});
      if (!in_batch.empty()) in_batch.insert(std::lower_bound(in_batch.begin(), in_batch.end(), slot), slot);
    }
  }
  if (!cap_) return;
  for (int p = uniques.first_partition; p < uniques.last_partition; p++) {
    while (maps_[p].size() > cap_ && make_room(p)) continue;  // an earlier batch may have left more than the quota
    partitions_[p].victims.release();
  }
}

void Table::read_absent(int64_t id, float* out) const noexcept {
  if (config_.absent_is_initial()) initial_row(config_.init, key_, id, out, config_.dim);
  else std::fill_n(out, config_.dim, config_.default_value);
}

size_t Table::num_copies(const Uniques& uniques, bool aside) const noexcept {
  const size_t n = uniques.slots.size();
  if (aside || layout().dtype != Dtype::kFloat32) return n;
  const uint32_t* frames = uniques.frames();
  return static_cast<size_t>(std::count_if(frames, frames + n, [](uint32_t frame) { return frame >= kColdFrame; }));
}

ColdRows Table::read(const Uniques& uniques, const float** rows, float* copies, size_t first, bool aside) const {
  const bool stored = layout().dtype == Dtype::kFloat32 && !aside;
  const uint32_t* frames = uniques.frames();
  const size_t n = uniques.ids.size();
  ColdRows cold;
  cold.step = step_;
  for (size_t u = 0; u < n; u++) {
    const uint32_t frame = frames[u];
    if (stored && frame < kColdFrame) {
      rows[u] = frames_[frame].values();
      continue;
    }
    float* copy = copies + first;
    if (frame == kNoFrame) read_absent(uniques.ids[u], copy);
    else if (frame == kColdFrame) cold.rows.push_back({first, uniques.slots[u], updated(uniques.slots[u])});
    else frames_[frame].read(copy);
    rows[u] = copy;
    first += static_cast<size_t>(config_.dim);
  }
  begin_read(cold, true);
  return cold;
}

void Table::finish_aside(ColdRows& rows, float* copies) {
  try {
    finish_aside(rows, [&](size_t at, const Row& row) { row.read(copies + at); });
  } catch (const RecordLost& lost) {
    const std::lock_guard lock(mutex());
    naming_lost([&] { throw lost; });
  }
}

ColdRows& ColdRows::operator=(ColdRows&& other) noexcept {
  rows.swap(other.rows), bytes.swap(other.bytes), batch.swap(other.batch);
  std::swap(step, other.step);
  return *this;
}

ColdRows::~ColdRows() {
  try {
    if (batch) batch->wait();
  } catch (const std::exception&) {  // nobody wants the rows any more
  }
}

// The last step that a row has seen.
uint64_t Table::updated(uint32_t slot) const noexcept { return layout().has_updated ? ledger_[slot].updated() : step_; }

Row Table::row_in(ColdRows& rows, size_t i) const noexcept {
  uint8_t* at = rows.bytes.data() + i * (layout().value_bytes + layout().state_bytes);
  return {at, at + layout().value_bytes, layout()};
}

void Table::begin_read(ColdRows& rows, bool urgent) const {
  if (rows.rows.empty()) return;
  rows.bytes.resize(rows.rows.size() * (layout().value_bytes + layout().state_bytes));
  std::vector<Residency::Wanted> wanted;
  wanted.reserve(rows.rows.size());
  for (size_t i = 0; i < rows.rows.size(); i++)
    wanted.push_back({rows.rows[i].slot, rows.rows[i].kept, row_in(rows, i)});
  rows.batch = frames_.read(wanted, urgent);
}

ColdRows Table::read_slots(const int64_t* slots, size_t n, float* out) const {
  ColdRows waiting;
  waiting.step = step_;
  const auto dim = static_cast<size_t>(config_.dim);
  for (size_t i = 0; i < n; i++) {
    if (slots[i] < 0) {
      std::fill_n(out + i * dim, dim, config_.default_value);
      continue;
    }
    const auto slot = static_cast<uint32_t>(slots[i]);
    if (!frames_.has_row(slot))
      throw std::invalid_argument("table '" + config_.name + "': slot " + std::to_string(slot) +
                                  " has no row. Give slots of ids that have one, or -1.");
    if (const uint32_t frame = frames_.of(slot); frame < kColdFrame) frames_[frame].read(out + i * dim);
    else waiting.rows.push_back({i * dim, slot, updated(slot)});
  }
  begin_read(waiting, true);
  return waiting;
}

uint64_t Table::num_alive(int p) const noexcept {
  if (!partitions_[p].stale || config_.eviction.ttl < 0) return maps_[p].size();
  uint64_t n = 0;
  maps_[p].for_each([&](int64_t, uint32_t slot) { n += !expired(ledger_[slot].seen()); });
  return n;
}

uint64_t Table::size() const noexcept {
  uint64_t n = 0;
  for (int p = 0; p < kPartitions; p++) n += num_alive(p);
  return n;
}

TableStats Table::stats() const {
  TableStats s;
  s.row_bytes = frames_.num_bytes() + ledger_.num_bytes();
  s.evicted = evicted_before_;
  for (int p = 0; p < kPartitions; p++) {
    const Partition& partition = partitions_[p];
    s.rows += maps_[p].size(), s.admitted += partition.admitted, s.refused += partition.refused;
    for (size_t reason = 0; reason < s.evicted_rows.size(); reason++) {
      s.evicted_rows[reason] += partition.evicted[reason];
      s.evicted += partition.evicted[reason];
    }
    s.index_bytes += maps_[p].num_bytes() + partition.free.capacity() * sizeof(uint32_t);
    if (partition.candidates) {
      s.candidate_bytes += partition.candidates->num_bytes();
      s.sketched_partitions += partition.candidates->is_sketch();
    }
  }
  return s;
}

void Table::load_counters(uint64_t admitted, uint64_t refused, uint64_t evicted, const EvictedRows& reasons) noexcept {
  for (auto& p : partitions_) p.admitted = p.refused = 0, p.evicted = {};
  partitions_[0].admitted = admitted, partitions_[0].refused = refused, partitions_[0].evicted = reasons;
  evicted_before_ = evicted - std::accumulate(reasons.begin(), reasons.end(), uint64_t{0});
}

int Table::num_read_together() const noexcept {
  if (frames_.in_memory()) return 1;
  uint64_t num_rows = 0;
  if (snapshot_ && snapshot_->changes) num_rows = snapshot_->changed.count();
  else
    for (const IdMap& map : maps_) num_rows += map.size();
  const auto lanes = static_cast<uint64_t>(layout().dim + layout().state_width);
  int num_partitions = kPartitions;  // a power of two, as those of a span of the store
  while (num_partitions > 1 && num_rows * lanes * sizeof(float) / kPartitions * num_partitions > kReadTogether)
    num_partitions /= 2;
  return num_partitions;
}

ExportedRows Table::export_rows(const std::vector<int>& partitions) {
  ExportedRows out;
  ColdRows cold;
  mutex().lock_last();
  std::unique_lock lock(mutex_, std::adopt_lock);
  std::vector<SnapshotEntry> entries;
  for (const int p : partitions) {
    catch_up(p, p + 1);
    std::vector<SnapshotEntry> more;
    more.reserve(maps_[p].size());
    maps_[p].for_each([&](int64_t id, uint32_t slot) {
      if (!partitions_[p].stale || !expired(ledger_[slot].seen())) more.push_back({id, slot});
    });
    sort_by_id(more);
    out.sizes.push_back(more.size());
    entries.insert(entries.end(), more.begin(), more.end());
  }
  out.resize(entries.size(), layout());
  cold.step = step_;
  for (size_t i = 0; i < entries.size(); i++) {
    if (i + kAhead < entries.size()) prefetch(entries[i + kAhead].slot);
    entries[i].at = static_cast<uint32_t>(i);
    write_out(out, entries[i], cold);
  }
  begin_read(cold, false);
  lock.unlock();
  finish(cold, out);
  return out;
}

void ExportedRows::resize(size_t n, const RowLayout& fields) {
  ids.resize(n);
  values.resize(n * static_cast<size_t>(fields.dim));
  state.resize(n * static_cast<size_t>(fields.state_width));
  if (fields.has_seen) seen.resize(n);
  if (fields.has_count) counts.resize(n);
  if (fields.has_updated) updated.resize(n);
  if (fields.has_score) scores.resize(n);
}

// The row itself follows, with `finish`, where it is on the disk or has missed steps before that of `cold`.
void Table::write_out(ExportedRows& out, const SnapshotEntry& entry, ColdRows& cold) const {
  const size_t at = entry.at;
  const LedgerEntry in_ledger = ledger_[entry.slot];
  const uint32_t frame = frames_.of(entry.slot);
  if (frame < kColdFrame && updated(entry.slot) >= cold.step) write_row(out, at, frames_[frame]);
  else cold.rows.push_back({at, entry.slot, updated(entry.slot)});
  write_entry(out, at, entry.id, in_ledger, cold.step);
}

void Table::write_entry(ExportedRows& out, size_t at, int64_t id, const LedgerEntry& entry,
                        uint64_t step) const noexcept {
  const RowLayout& fields = layout();
  out.ids[at] = id;
  if (fields.has_seen) out.seen[at] = entry.seen();
  if (fields.has_count) out.counts[at] = entry.count();
  if (fields.has_updated) out.updated[at] = std::max(entry.updated(), static_cast<uint32_t>(step));
  if (fields.has_score) out.scores[at] = entry.score();
}

void Table::write_row(ExportedRows& out, size_t at, const Row& row) const noexcept {
  const size_t dim = static_cast<size_t>(layout().dim), width = static_cast<size_t>(layout().state_width);
  row.read(out.values.data() + at * dim);
  if (width) std::memcpy(out.state.data() + at * width, row.state(), width * sizeof(float));
}

void Table::load_rows(const ExportedRows& in, Frames::Room* room) {
  const RowLayout& fields = layout();
  // Rows that lie on the disk are read before anything changes.
  ColdRows cold;
  if (!frames_.in_memory()) {
    frames_.finish_loads();
    std::unordered_set<uint32_t> slots;  // what an id that comes twice has lies elsewhere by then
    for (size_t i = 0; i < in.ids.size(); i++) {
      const uint64_t hash = hash_id(in.ids[i]);
      const uint32_t slot = maps_[partition_of(hash)].find(in.ids[i], hash);
      if (slot != kNoSlot && frames_.of(slot) == kColdFrame && slots.insert(slot).second)
        cold.rows.push_back({i, slot, 0});
    }
    begin_read(cold, true);
    if (cold.batch) naming_lost([&] { cold.batch->wait(); });
  }
  size_t next_cold = 0;
  std::vector<uint8_t> aside(fields.value_bytes + fields.state_bytes);  // a row for the disk
  const Row row_aside(aside.data(), aside.data() + fields.value_bytes, fields);
  const size_t dim = static_cast<size_t>(fields.dim), width = static_cast<size_t>(fields.state_width);
  for (size_t i = 0; i < in.ids.size(); i++) {
    const uint64_t hash = hash_id(in.ids[i]);
    const int p = partition_of(hash);
    IdMap& map = maps_[p];
    Partition& partition = partitions_[p];
    uint32_t slot = map.find(in.ids[i], hash);
    const bool is_new = slot == kNoSlot;
    if (is_new) {
      if (partition.free.empty()) {
        const uint32_t first = add_chunk(p);
        for (uint32_t k = Slabs::kChunk; k-- > 0;) partition.free.push_back(first + k);
      }
      slot = partition.free.back();
      partition.free.pop_back();
      map.insert(in.ids[i], hash, slot);
      mark_born(p, in.ids[i], slot);
      start_entry(slot);
    }
    changing(slot);
    const uint32_t frame = frames_.of(slot);
    const bool was_cold = next_cold < cold.rows.size() && cold.rows[next_cold].at == i;
    Row row = row_aside;
    if (was_cold) row = row_in(cold, next_cold++);
    if (frame < kColdFrame) row = frames_[frame];  // also of an id that comes twice
    if (frame < kColdFrame) frames_.changing(frame);
    if (is_new) start_row(row, in.ids[i]);
    else if (frame == kColdFrame && !was_cold) frames_.copy(slot, row);  // likewise
    const LedgerEntry entry = ledger_[slot];
    if (fields.has_updated) {
      if (in.state.empty()) replay(row, entry.updated(), step_);  // the state stays, and has steps of its own to see
      const uint64_t missed = in.missed.empty() ? 0 : in.missed[i];
      entry.set_updated(static_cast<uint32_t>(step_ - std::min(missed, step_)));
    }
    row.write(in.values.data() + i * dim, nullptr);
    if (width && !in.state.empty()) std::memcpy(row.state(), in.state.data() + i * width, width * sizeof(float));
    if (fields.has_seen && !in.seen.empty()) entry.set_seen(in.seen[i]);
    if (fields.has_count && !in.counts.empty()) entry.set_count(in.counts[i]);
    if (fields.has_score && !in.scores.empty()) entry.set_score(in.scores[i]);
    frames_.put(slot, row, room);
    partition.victims.clear();
  }
}

void Table::load_candidates(const std::vector<Candidate>& candidates) {
  for (const Candidate& candidate : candidates) {
    auto& known = partitions_[partition_of(hash_id(candidate.id))].candidates;
    if (!known) continue;
    const bool was_sketch = known->is_sketch();
    known->load(candidate);
    if (known->is_sketch() != was_sketch) num_sketched_.fetch_add(1);
  }
}

void Table::load_sketch(int p, size_t generation, SketchPart part) {
  auto& known = partitions_[p].candidates;
  if (!known) return;
  if (!known->is_sketch()) num_sketched_.fetch_add(1);
  known->load(generation, std::move(part));
}

void Table::load_plain_sketch(int p, const std::vector<uint32_t>& counters) {
  if (auto& known = partitions_[p].candidates; known && known->plain().size() == counters.size())
    known->plain() = counters;
}

}  // namespace hotbed
