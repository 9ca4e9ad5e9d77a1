// SPDX-License-Identifier: Apache-2.0
// Table: the rows that have changed, and snapshots that are read while training continues.
#include "snapshot.h"

#include <algorithm>
#include <array>
#include <bit>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "table.h"

namespace hotbed {
namespace {

constexpr size_t kAhead = 16;
// Of a snapshot, rows that are read while the table is locked once: where they lie on a disk, as many as it reads well.
constexpr size_t kRowsAtOnce = 4096, kBytesAtOnce = size_t{8} << 20;

constexpr int kMaxDigitBits = 12;
constexpr uint64_t kSign = uint64_t{1} << 63;

}  // namespace

// Radix sort over the bits in which ids differ, in the fewest equal digits.
void sort_by_id(std::vector<SnapshotEntry>& entries) {
  uint64_t varies = 0;
  for (const SnapshotEntry& entry : entries) varies |= static_cast<uint64_t>(entry.id ^ entries[0].id);
  if (varies == 0) return;
  const int low = std::countr_zero(varies), bits = 64 - std::countl_zero(varies) - low;
  const int digits = (bits + kMaxDigitBits - 1) / kMaxDigitBits, digit_bits = (bits + digits - 1) / digits;
  const uint64_t mask = (uint64_t{1} << digit_bits) - 1;
  std::vector<SnapshotEntry> sorted(entries.size());
  for (int shift = low; shift < low + bits; shift += digit_bits) {
    const auto digit = [&](const SnapshotEntry& entry) {
      return ((static_cast<uint64_t>(entry.id) ^ kSign) >> shift) & mask;
    };
    std::array<uint32_t, 1 << kMaxDigitBits> next{};  // place of the next entry with that digit
    for (const SnapshotEntry& entry : entries) next[digit(entry)]++;
    uint32_t before = 0;
    for (uint32_t& place : next) before += std::exchange(place, before);
    for (const SnapshotEntry& entry : entries) sorted[next[digit(entry)]++] = entry;
    entries.swap(sorted);
  }
}

void ImageIndex::follow(const std::vector<uint32_t>& slots) {
  if (slots.size() * 2 > entries_.size()) {
    const size_t capacity = std::bit_ceil(slots.size() * 2);
    entries_.assign(capacity, Entry());
    shift_ = 32 - std::countr_zero(capacity);
    size_ = 0;
  }
  for (; size_ < slots.size(); size_++) put(slots[size_], static_cast<uint32_t>(size_));
}

void ImageIndex::put(uint32_t slot, uint32_t image) noexcept {
  size_t at = home(slot);
  while (entries_[at].image != kNoImage) at = (at + 1) & (entries_.size() - 1);
  entries_[at] = {slot, image};
}

uint32_t Table::add_chunk(int p) {
  const auto first = static_cast<uint32_t>(num_slots());
  frames_.add_chunk();
  ledger_.add_chunk();
  owners_.push_back(static_cast<uint8_t>(p));
  if (tracking_) changed_.add_chunk(0);
  if (snapshot_) snapshot_->settled.add_chunk(0xffff), snapshot_->imaged.add_chunk(0);  // younger than the snapshot
  return first;
}

void Table::mark_changing(uint32_t slot) {
  if (tracking_) changed_.set(slot);
  if (!snapshot_ || snapshot_->settled.test(slot)) return;
  snapshot_->settled.set(slot);
  snapshot_->imaged.set(slot);
  Snapshot::Part& part = snapshot_->parts[owners_[slot / Slabs::kChunk]];
  part.image_slots.push_back(slot);
  const Row image = part.images.push_back(ledger_[slot]);
  naming_lost([&] { frames_.copy(slot, image); });
}

// The row of a slot that is given up lies on the disk: its record stays.
void Table::keep_image(int p, uint32_t slot) {
  snapshot_->settled.set(slot);
  snapshot_->imaged.set(slot);
  Snapshot::Part& part = snapshot_part(p);
  part.kept.emplace(static_cast<uint32_t>(part.image_slots.size()), frames_.keep(slot));
  part.image_slots.push_back(slot);
  part.images.push_back(ledger_[slot]);
}

void Table::mark_born(int p, int64_t id, uint32_t slot) {
  if (tracking_) changed_.set(slot);
  if (!snapshot_) return;
  snapshot_->settled.set(slot);
  Snapshot::Part& part = snapshot_part(p);
  if (!part.collected) part.events.push_back({id, slot, true});
}

void Table::mark_gone(int p, int64_t id, uint32_t slot) {
  if (!marking_) return;
  // A row on the disk lies still until its slot is given up.
  if (frames_.of(slot) < kColdFrame) mark_changing(slot);
  else if (tracking_) changed_.set(slot);
  if (tracking_) partitions_[p].removed.push_back(id);
  if (!snapshot_) return;
  Snapshot::Part& part = snapshot_part(p);
  if (!part.collected) part.events.push_back({id, slot, false});
}

void Table::mark_back(int p, int64_t id, uint32_t slot) {
  if (tracking_) changed_.set(slot);
  if (!snapshot_) return;
  Snapshot::Part& part = snapshot_part(p);
  if (!part.collected) part.events.push_back({id, slot, true});
}

void Table::track(bool on, bool saved) {
  if (on == tracking_ && !saved) return;
  tracking_ = on;
  marking_ = tracking_ || snapshot_;
  changed_ = on ? Marks(owners_.size(), saved ? 0 : 0xffff) : Marks();
  for (Partition& partition : partitions_) partition.removed.clear();
}

uint64_t Table::begin_snapshot(bool changes) {
  if (snapshot_) throw std::logic_error("snapshot: one at a time, got a second. Close the first.");
  if (changes && !tracking_)
    throw std::logic_error("snapshot: the table does not track changes, got changes=True. Call track first.");
  auto snapshot = std::make_unique<Snapshot>();
  snapshot->changes = changes, snapshot->step = step_;
  snapshot->settled = changes ? changed_.inverse() : Marks(owners_.size(), 0);
  snapshot->imaged = Marks(owners_.size(), 0);
  snapshot->parts.reserve(kPartitions);
  for (int p = 0; p < kPartitions; p++) {
    Snapshot::Part& part = snapshot->parts.emplace_back(layout());
    if (const Candidates* waiting = candidates(p)) part.candidates = std::make_unique<Candidates>(*waiting);
    if (tracking_) part.removed = std::exchange(partitions_[p].removed, {});
  }
  if (tracking_) snapshot->changed = std::exchange(changed_, Marks(owners_.size(), 0));
  snapshot_ = std::move(snapshot);
  marking_ = true;
  return changes ? snapshot_->changed.count() : size();
}

std::vector<SnapshotEntry> Table::snapshot_entries(int p) {
  Snapshot::Part& part = snapshot_part(p);
  if (part.collected)
    throw std::logic_error("snapshot: a partition is read once, got a second read. Take another snapshot.");
  part.collected = true;
  std::unordered_map<uint32_t, const Snapshot::Event*> first;  // of slots whose owner may be another by now
  for (const Snapshot::Event& event : part.events)
    if (snapshot_->imaged.test(event.slot) || !snapshot_->settled.test(event.slot))
      first.try_emplace(event.slot, &event);
  std::vector<SnapshotEntry> entries;
  entries.reserve(maps_[p].size());
  maps_[p].for_each([&](int64_t id, uint32_t slot) {
    if (!first.empty() && first.count(slot) > 0) return;
    if (!snapshot_->settled.test(slot) || snapshot_->imaged.test(slot)) entries.push_back({id, slot});
  });
  for (const auto& [slot, event] : first)
    if (!event->born) entries.push_back({event->id, slot});
  part.events = {};
  return entries;
}

// A row may move before it is read: the order is a matter of time alone.
void Table::sort_by_place(std::vector<SnapshotEntry>& entries) {
  constexpr size_t kPiece = size_t{1} << 15;
  std::vector<std::pair<uint64_t, SnapshotEntry>> placed;
  placed.reserve(entries.size());
  for (size_t first = 0; first < entries.size(); first += kPiece) {
    mutex().give_way();
    const std::lock_guard lock(mutex());
    for (size_t i = first; i < std::min(first + kPiece, entries.size()); i++)
      placed.emplace_back(frames_.stored_at(entries[i].slot), entries[i]);
  }
  std::sort(placed.begin(), placed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (size_t i = 0; i < entries.size(); i++) entries[i] = placed[i].second;
}

ColdRows Table::read_snapshot(const SnapshotEntry* entries, size_t n, ExportedRows& out) {
  ColdRows cold;
  cold.step = snapshot_->step;
  for (size_t i = 0; i < n; i++) {
    if (i + kAhead < n) prefetch(entries[i + kAhead].slot);
    const uint32_t slot = entries[i].slot, at = entries[i].at;
    if (snapshot_->imaged.test(slot)) {
      Snapshot::Part& part = snapshot_part(owners_[slot / Slabs::kChunk]);
      part.image_of.follow(part.image_slots);
      const uint32_t image = part.image_of.find(slot);
      const LedgerEntry entry = part.images.entry(image);
      const uint64_t updated = layout().has_updated ? entry.updated() : cold.step;
      if (const auto kept = part.kept.find(image); kept != part.kept.end()) {
        cold.rows.push_back({at, slot, updated, kept->second});
      } else {
        const Row row = part.images.row(image);
        replay(row, updated, cold.step);
        write_row(out, at, row);
      }
      write_entry(out, at, entries[i].id, entry, cold.step);
    } else {
      write_out(out, entries[i], cold);
      snapshot_->settled.set(slot);
    }
  }
  begin_read(cold, false);
  return cold;
}

void Table::finish(ColdRows& rows, ExportedRows& out) {
  try {
    finish_aside(rows, [&](size_t at, const Row& row) { write_row(out, at, row); });
    if (rows.batch) out.read_bytes += rows.batch->num_bytes();
  } catch (const RecordLost& lost) {
    for (const ColdRows::Row& row : rows.rows)
      if (row.slot == lost.slot) throw RecordLost(lost, config_.name, out.ids[row.at]);
    throw;
  }
}

ExportedRows Table::snapshot_rows(const std::vector<int>& partitions, size_t rows_at_once) {
  const auto in_turn = [this] {
    mutex().give_way();
    return std::unique_lock(mutex());
  };
  ExportedRows out;
  std::vector<SnapshotEntry> entries;
  for (const int p : partitions) {
    auto lock = in_turn();
    std::vector<SnapshotEntry> more = snapshot_entries(p);
    lock.unlock();
    sort_by_id(more);
    out.sizes.push_back(more.size());
    for (SnapshotEntry& entry : more) {
      entry.at = static_cast<uint32_t>(entries.size());
      entries.push_back(entry);
    }
  }
  if (!frames_.in_memory()) sort_by_place(entries);
  if (rows_at_once == 0)
    rows_at_once = frames_.in_memory() ? kRowsAtOnce : std::max(kBytesAtOnce / layout().num_bytes(), kRowsAtOnce);
  out.resize(entries.size(), layout());
  for (size_t i = 0; i < entries.size(); i += rows_at_once) {
    auto lock = in_turn();
    ColdRows cold = read_snapshot(entries.data() + i, std::min(rows_at_once, entries.size() - i), out);
    lock.unlock();
    finish(cold, out);
  }
  const auto lock = in_turn();
  for (const int p : partitions) drop_images(p);
  return out;
}

void Table::drop_images(int p) {
  Snapshot::Part& part = snapshot_part(p);
  for (const auto& [image, number] : part.kept) frames_.drop_kept(number);
  part.kept.clear();
  part.images.clear();
  part.image_slots = {}, part.image_of = {};
}

void Table::end_snapshot(bool saved) {
  if (!snapshot_) return;
  for (int p = 0; p < kPartitions; p++) drop_images(p);
  if (tracking_ && !saved) {  // what this snapshot took is changed still
    changed_.unite(snapshot_->changed);
    for (int p = 0; p < kPartitions; p++) {
      std::vector<int64_t>& removed = partitions_[p].removed;
      removed.insert(removed.begin(), snapshot_part(p).removed.begin(), snapshot_part(p).removed.end());
    }
  }
  snapshot_.reset();
  marking_ = tracking_;
}

}  // namespace hotbed
