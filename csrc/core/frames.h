// SPDX-License-Identifier: Apache-2.0
// Where the rows of a table lie: its tier, as a value. Whoever wants a row asks here by slot, and does not ask which
// tier it is.
//
//   Ram  A frame is the slot of its row, for ever. Nothing is brought, placed, read or given up.
//   Ssd  Rows that batches use lie in frames, the others on a disk (residency.h).
//
// What concerns one row looks for the disk inline; what concerns the rows of a batch does so once. Callers hold the
// mutex of the table, except to make room.
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "pool.h"
#include "residency.h"
#include "uniques.h"

namespace hotbed {

// A batch needs more rows than the policy lets the table keep, or plans in flight more than there are frames.
struct TableFull : std::exception {
  explicit TableFull(std::string message) : message(std::move(message)) {}
  const char* what() const noexcept override { return message.c_str(); }
  std::string message;
};

class Frames {
 public:
  using Plan = Residency::Plan;
  using Room = Residency::Room;

  // `name`, `key`, `mutex`: of the table; `partitions`: of each chunk of its slots. Throws std::system_error where the
  // folder of the disk cannot be used.
  Frames(Tier tier, const DiskConfig& disk, const RowLayout& layout, const std::string& name, uint64_t key,
         TableMutex& mutex, const std::vector<uint8_t>& partitions);

  const Pool& pool() const noexcept { return pool_; }
  bool in_memory() const noexcept { return !disk_; }                   // all rows, always
  const Residency* residency() const noexcept { return disk_.get(); }  // null where all rows are in memory
  uint64_t num_bytes() const;                                          // of memory
  // Throws ForkedChild in the child of a fork, which cannot use the disk of its parent.
  void check_process() const {
    if (disk_ && disk_->is_foreign()) throw_foreign();
  }
  void add_chunk() {
    if (disk_) disk_->add_chunk();
    else pool_.add_chunk();
  }

  // --- one row
  Row operator[](uint32_t frame) const noexcept { return pool_[frame]; }
  // kColdFrame: the row lies in no frame, or the slot has none.
  uint32_t of(uint32_t slot) const noexcept { return disk_ ? disk_->frame_of(slot) : slot; }
  bool has_row(uint32_t slot) const noexcept { return !disk_ || disk_->has_row(slot); }
  uint64_t stored_at(uint32_t slot) const noexcept { return disk_->stored_at(slot); }
  void changing(uint32_t frame) {  // before the row in it changes
    if (disk_) disk_->changing(frame);
  }
  // Copies the row of a slot, wherever it lies, and waits for it. Throws RecordLost.
  void copy(uint32_t slot, const Row& to) const;
  // Writes a row that was changed outside of a batch, also one in a frame, to the disk.
  void put(uint32_t slot, const Row& row, Room* room) {
    if (disk_) disk_->put(slot, row, *room);
  }
  [[gnu::always_inline]] void prefetch(uint32_t slot) const noexcept {
    if (disk_) disk_->prefetch(slot);
    else pool_.prefetch(slot);
  }
  [[gnu::always_inline]] void prefetch_values(uint32_t slot) const noexcept {
    if (disk_) disk_->prefetch(slot);
    else pool_.prefetch_values(slot);
  }

  // --- the end of a row
  void forget(uint32_t slot) { disk_->forget(slot); }
  // Instead, where the row lies in no frame and a snapshot still wants it; `drop_kept` takes the number.
  uint32_t keep(uint32_t slot) { return disk_->keep(slot); }
  void drop_kept(uint32_t number) { disk_->drop_kept(number); }

  // --- a batch. A plan keeps frames while it lives, and room lets rows leave theirs: both null in Ram, where all below
  // returns at once. Without a plan, frames are valid as long as the mutex is held.
  std::shared_ptr<Plan> make_plan() const { return disk_ ? std::make_shared<Plan>(*disk_) : nullptr; }
  // Room for `most` rows that are put, or for those that a batch of `num_ids` moves out of their frames. Waits, so it
  // is made without the mutex. Throws StorageFull or StorageFailed.
  std::unique_ptr<Room> make_room(uint64_t most) const;
  std::unique_ptr<Room> make_room_for_batch(int64_t num_ids) const;
  // Throws TableFull where frames are too few for the rows found, `num_new` more and those of plans in flight.
  // `num_ids`: of the batch, one for each position.
  void check_batch(const std::vector<Uniques>& ranges, uint64_t num_new, int64_t num_ids) const;
  // Reads the rows that were found into frames. `arrive` waits for them, and throws RecordLost.
  void bring(const Uniques& uniques, const Plan* plan, Room* room);
  void arrive(const Uniques& uniques, const Plan* plan, Room* room);
  // Reads ahead what lies in no frame.
  void fetch(const Uniques& uniques, Room* room);
  // Likewise for a reader, which waits for these reads without the mutex of the table.
  std::vector<std::shared_ptr<ReadBatch>> fetch_now(const Uniques& uniques);
  // Finds the frames of the slots. With `room`, slots without a row get one; returns their ids, whose rows are not set.
  std::vector<uint32_t> place(Uniques& uniques, const Plan* plan, Room* room);

  // --- reads into other memory
  // Begins them; `urgent`: somebody waits.
  std::shared_ptr<ReadBatch> read(const std::vector<Residency::Wanted>& rows, bool urgent) const {
    return disk_->read(rows, urgent);
  }
  void finish_loads() {  // what is read into frames is there
    if (disk_) disk_->finish_loads();
  }

 private:
  [[noreturn]] void throw_foreign() const;

  const std::string& name_;
  const DiskConfig& config_;
  const RowLayout& layout_;
  Pool pool_;
  std::unique_ptr<Residency> disk_;  // null in Ram
};

}  // namespace hotbed
