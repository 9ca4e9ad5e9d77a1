// SPDX-License-Identifier: Apache-2.0
#include "frames.h"

#include <algorithm>

#include "forks.h"

namespace hotbed {

Frames::Frames(Tier tier, const DiskConfig& disk, const RowLayout& layout, const std::string& name, uint64_t key,
               TableMutex& mutex, const std::vector<uint8_t>& partitions)
    : name_(name), config_(disk), layout_(layout), pool_(layout, tier) {
  if (tier == Tier::kSsd) disk_ = std::make_unique<Residency>(layout, pool_, mutex, partitions, key, disk);
}

uint64_t Frames::num_bytes() const {
  if (!disk_) return pool_.slabs().num_bytes();
  const ResidencyStats stats = disk_->stats();
  return stats.memory_bytes + uint64_t{stats.num_frames} * (layout_.value_bytes + layout_.state_bytes);
}

void Frames::throw_foreign() const {
  throw ForkedChild("table '" + name_ +
                    "': its rows lie on a disk for the process that made it, got a use in a child that was forked "
                    "from it. Make the table in the child, or start the child by 'spawn'.");
}

void Frames::copy(uint32_t slot, const Row& to) const {
  if (const uint32_t frame = of(slot); frame < kColdFrame) pool_[frame].copy_to(to);
  else disk_->read({{slot, Residency::kNotKept, to}}, true)->wait();
}

std::unique_ptr<Frames::Room> Frames::make_room(uint64_t most) const {
  if (!disk_) return nullptr;
  check_process();
  try {
    return std::make_unique<Room>(*disk_, most);
  } catch (StorageFull& full) {
    full.message = "table '" + name_ + "': " + full.message;
    throw;
  } catch (StorageFailed& failed) {
    failed.message = "table '" + name_ + "': " + failed.message;
    throw;
  }
}

std::unique_ptr<Frames::Room> Frames::make_room_for_batch(int64_t num_ids) const {
  // A frame that was taken is not taken again in one call.
  return disk_ ? make_room(std::min(static_cast<uint64_t>(num_ids), disk_->num_frames())) : nullptr;
}

void Frames::check_batch(const std::vector<Uniques>& ranges, uint64_t num_new, int64_t num_ids) const {
  if (!disk_) return;
  const uint64_t ram_rows = disk_->num_frames();
  const auto count = [&](bool exact) {
    uint64_t needed = disk_->num_pinned() + num_new;
    for (const Uniques& range : ranges) {
      const size_t n = range.slots.size();
      needed += n - static_cast<size_t>(std::count(range.slots.begin(), range.slots.end(), kNoSlot));
      if (exact) needed -= disk_->num_pinned(range.slots.data(), n);
    }
    return needed;
  };
  if (count(false) <= ram_rows) return;
  uint64_t needed = count(true);
  if (needed > ram_rows && disk_->recount()) needed = count(true);
  if (needed <= ram_rows) return;
  // Later batches may have more distinct ids, but not more than ids.
  const uint64_t num_plans = disk_->num_plans(), most = num_plans * static_cast<uint64_t>(num_ids);
  const std::string& rows = config_.rows_name;
  const std::string suffices = most < needed
                                   ? std::to_string(needed)
                                   : std::to_string(most) + " (" + std::to_string(num_plans) + " batches of " +
                                         std::to_string(num_ids) + " ids in flight never use more)";
  throw TableFull("table '" + name_ + "': the batches in flight use " + std::to_string(needed) + " rows, " + rows +
                  " is " + std::to_string(ram_rows) + ". Raise " + rows + " to at least " + suffices +
                  ", map fewer batches ahead, or step after each forward pass.");
}

void Frames::bring(const Uniques& uniques, const Plan* plan, Room* room) {
  if (plan) disk_->bring(uniques.slots.data(), uniques.slots.size(), *plan, *room);
}

void Frames::arrive(const Uniques& uniques, const Plan* plan, Room* room) {
  if (plan) disk_->arrive(uniques.slots.data(), uniques.slots.size(), *plan, *room);
}

void Frames::fetch(const Uniques& uniques, Room* room) {
  if (disk_) disk_->fetch(uniques.slots.data(), uniques.slots.size(), *room);
}

std::vector<std::shared_ptr<ReadBatch>> Frames::fetch_now(const Uniques& uniques) {
  if (!disk_) return {};
  return disk_->fetch_now(uniques.slots.data(), uniques.slots.size());
}

std::vector<uint32_t> Frames::place(Uniques& uniques, const Plan* plan, Room* room) {
  std::vector<uint32_t> fresh;
  if (!disk_) return fresh;
  uniques.own_frames.resize(uniques.slots.size());
  disk_->place(uniques.slots.data(), uniques.slots.size(), plan, room, uniques.own_frames.data(), &fresh);
  return fresh;
}

}  // namespace hotbed
