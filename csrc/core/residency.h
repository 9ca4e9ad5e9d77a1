// SPDX-License-Identifier: Apache-2.0
// The rows of a table that lie on a disk, and which of them are in memory. A row that a batch trains lies in a frame of
// the pool; the others are records of a store. Which rows are in frames decides time, never a bit.
//
// A row that is taken from its frame is put into the store, unless it is there already: a row that was read and has not
// changed since keeps its record. Frames are taken by SIEVE (Zhang et al., NSDI 2024): rows are in a list in the order
// in which they came, a hand goes from the oldest to the newest, and takes the first row that no batch has used since
// the hand was there last.
//
// Plans have numbers, and a frame knows the newest plan that uses it. A frame is not taken while a plan lives that is
// not younger than that.
//
// Callers hold the mutex of the table. Ranges of partitions may be at work in parallel: what they share is guarded
// here.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "buckets.h"
#include "pool.h"
#include "store.h"
#include "table_mutex.h"

namespace hotbed {

struct DiskConfig {
  std::string folder;
  uint32_t ram_rows = 0;
  std::string rows_name = "ram_rows";  // in messages: what the program calls it
  EngineKind engine = EngineKind::kBest;
  std::shared_ptr<Store> store;  // of tests: another than that of the folder
};

struct ResidencyStats {
  uint64_t hits = 0, misses = 0;  // rows that batches in training found in frames, and those that were read for them
  uint64_t fetched = 0;           // misses that were read before their batch, ahead or by evaluation
  uint64_t wait_ns = 0;           // that batches in training waited for reads
  uint32_t num_frames = 0;        // in use
  uint64_t memory_bytes = 0;      // of the bookkeeping by slot and by frame
  StoreStats store;               // of all tables of the folder
  const char* engine = "";
};

class Residency final : RecordOwner {
 public:
  // `partitions`: of each chunk of slots. Throws std::system_error where the folder cannot be used.
  Residency(const RowLayout& layout, Pool& pool, TableMutex& mutex, const std::vector<uint8_t>& partitions,
            uint64_t key, const DiskConfig& config);
  ~Residency() override;
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  // Whether this is the child of a fork: it has the frames, but cannot read or write the disk.
  bool is_foreign() const noexcept { return store_->is_foreign(); }

  void add_chunk() {
    words_.add_chunk();
    num_slots_.store(words_.size(), std::memory_order_relaxed);
  }

  // Room in the store for `most` rows that have to leave their frames. Made without the mutex of the table, since it
  // waits for compaction; throws StorageFull or StorageFailed, and nothing has changed.
  class Room {
   public:
    Room(Residency& residency, uint64_t most);
    ~Room();
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;

   private:
    friend class Residency;
    Residency& residency_;
    uint64_t left_;
  };

  // A plan: the frames that it uses stay while it lives. It may end on any thread, without the mutex of the table.
  class Plan {
   public:
    explicit Plan(Residency& residency);
    ~Plan();
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;
    uint64_t number() const noexcept { return number_; }

   private:
    Residency& residency_;
    uint64_t number_;
  };

  // The number of frames that plans use: in all; and of these slots, each slot once.
  uint64_t num_pinned() const;
  uint64_t num_pinned(const uint32_t* slots, size_t n) const;
  // A plan that outlives younger ones seems to use their frames, too, until these are counted anew. Returns whether
  // there may be fewer now.
  bool recount();
  uint64_t num_frames() const noexcept { return num_frames_; }
  uint64_t num_plans() const;  // that live

  // Gives the rows of the slots frames for the plan, and begins to read them; kNoSlot and slots without a row are
  // passed over. There are frames enough. `arrive` waits, and reads once more what did not come. It throws RecordLost
  // where a row could not be read: all rows are where they were.
  void bring(const uint32_t* slots, size_t n, const Plan& plan, Room& room);
  void arrive(const uint32_t* slots, size_t n, const Plan& plan, Room& room);
  // Reads ahead what is in no frame, as far as frames can be had without harm. Only time depends on it.
  void fetch(const uint32_t* slots, size_t n, Room& room);
  // Likewise for a reader, which waits for the reads that this returns, without the mutex of the table. It takes frames
  // that are free; where no batch has trained the table, also those of rows that the disk has.
  std::vector<std::shared_ptr<ReadBatch>> fetch_now(const uint32_t* slots, size_t n);

  // The frames of slots as they are now: kNoFrame for kNoSlot, kColdFrame for a row in no frame. Slots that have no row
  // yet get a frame where there is room, and their places in `slots` go to `fresh`.
  void place(const uint32_t* slots, size_t n, const Plan* plan, Room* room, uint32_t* frames,
             std::vector<uint32_t>* fresh);
  bool has_row(uint32_t slot) const noexcept { return word(slot) != 0; }
  // Rises with the place of the row's record on the disk.
  uint64_t stored_at(uint32_t slot) const noexcept {
    const uint64_t at = word(slot);
    return at & kInFrame ? frames_[static_cast<uint32_t>(at)].place : at;
  }
  // kColdFrame also while the row is being read.
  uint32_t frame_of(uint32_t slot) const noexcept { return frame_at(slot); }
  // The row in the frame is about to change: its record is not its own any more.
  void changing(uint32_t frame) {
    if (frames_[frame].place & kStored) free_record(frame);
  }
  // The row of the slot ends.
  void forget(uint32_t slot);

  // Writes the row of a slot into the store. It stays in its frame, or comes into one that is free.
  void put(uint32_t slot, const Row& row, Room& room);
  void finish_loads();

  // A row to be read from wherever it lies, to other memory; `kept`: the number that `keep` gave, or kNotKept.
  static constexpr uint32_t kNotKept = 0xffffffffu;
  struct Wanted {
    uint32_t slot, kept;
    Row to;
  };
  // Copies those in frames, and begins to read the others; `urgent` as of Store::read. The table's mutex may be let go
  // before the wait.
  std::shared_ptr<ReadBatch> read(const std::vector<Wanted>& rows, bool urgent);

  // The records of rows that ended, for a snapshot that still wants them.
  uint32_t keep(uint32_t slot);  // instead of `forget`, where the row lies in no frame
  void drop_kept(uint32_t number);

  void prefetch(uint32_t slot) const noexcept { __builtin_prefetch(words_.back(slot)); }
  ResidencyStats stats() const;

 private:
  // Of a slot, and of the record of a frame: a place with kStored, a frame with kInFrame, or 0 = no row, no record.
  static constexpr uint64_t kStored = uint64_t{1} << 63, kInFrame = uint64_t{1} << 62;
  // kAhead: nobody has used the row since it was read; kFetched: no batch in training has.
  enum : uint32_t { kVisited = 1, kLoading = 2, kAhead = 4, kFetched = 8 };
  static constexpr int kFlagBits = 4, kLoadBits = 32 - kFlagBits;
  struct Frame {
    uint64_t place = 0;  // of the record with these bytes
    uint64_t used = 0;   // the newest plan; 0 = none yet
    uint32_t slot = kNoSlot;
    uint32_t newer = kNoFrame, older = kNoFrame;
    uint32_t flags : kFlagBits = 0;
    uint32_t load : kLoadBits = 0;  // the low bits of its number
  };
  static_assert(sizeof(Frame) == 32);
  struct Load {
    uint64_t number;
    std::shared_ptr<ReadBatch> batch;
    std::vector<uint32_t> frames;
  };
  struct LivePlan {
    bool lives = true;
    uint64_t num_frames = 0;       // frames of which it is the newest plan
    std::vector<uint32_t> frames;  // all that it uses, some of them more than once
  };

  void lock() override { mutex_of_table_.lock(); }
  void unlock() override {
    mutex_of_table_.unlock();
    mutex_of_table_.give_way();
  }
  bool lies_at(uint32_t slot, Place place) const override;
  void moved(uint32_t slot, Place from, Place to) override;

  uint64_t& word(uint32_t slot) const noexcept { return *reinterpret_cast<uint64_t*>(words_.back(slot)); }
  static Place place_of(uint64_t word) noexcept { return {word & ~kStored}; }
  uint32_t frame_at(uint32_t slot) const noexcept {
    const uint64_t at = word(slot);
    if (!(at & kInFrame)) return kColdFrame;
    const auto frame = static_cast<uint32_t>(at);
    return frames_[frame].flags & kLoading ? kColdFrame : frame;
  }
  bool pinned(const Frame& frame) const noexcept { return frame.used >= first_live_; }

  // With the mutex held, as all below.
  void use(uint32_t frame, uint64_t plan);
  // Without room, rows that the disk does not have stay; `ahead`: and those that were read ahead.
  uint32_t take_frame(Room* room, bool ahead);
  uint32_t victim(const Room* room, bool ahead);
  void evict(uint32_t frame, Room* room);
  bool has_free_frame() const noexcept { return !free_.empty() || num_used_ < num_frames_; }
  bool has_trained() const noexcept { return first_live_ > 1 || !plans_.empty(); }  // there was a plan
  void release(uint32_t frame);
  void link(uint32_t frame);
  void unlink(uint32_t frame);
  // For a batch with its plan, ahead with room alone, or for a reader.
  std::shared_ptr<ReadBatch> load(std::unique_lock<std::mutex>& lock, const std::vector<uint32_t>& slots,
                                  const Plan* plan, Room* room);
  uint32_t take_frame(std::unique_lock<std::mutex>& lock, Room& room);  // for a batch
  // The numbers of the loads that bring rows of these slots.
  std::vector<uint64_t> loads_of(const uint32_t* slots, size_t n) const;
  std::deque<Load>::iterator find_load(uint64_t number);
  // Waits for a load; rows that did not come are where they were.
  void settle(std::unique_lock<std::mutex>& lock, uint64_t number);
  void settle_all(std::unique_lock<std::mutex>& lock);
  uint64_t number_of(const Frame& frame) const noexcept;  // of its load
  void end_plan(uint64_t number);
  uint32_t span_of(uint32_t slot) const noexcept;
  void free_record(uint32_t frame);

  const RowLayout& layout_;
  Pool& pool_;
  TableMutex& mutex_of_table_;
  const std::vector<uint8_t>& partitions_;
  std::shared_ptr<Store> store_;
  uint32_t owner_;

  mutable std::mutex mutex_;
  Slabs words_;  // by slot
  std::atomic<uint64_t> num_slots_{0};
  const uint64_t num_frames_;
  Frame* const frames_;  // pages come when they are touched: from num_used_ on none was ever taken
  uint32_t num_used_ = 0;
  std::vector<uint32_t> free_;
  uint32_t newest_ = kNoFrame, oldest_ = kNoFrame, hand_ = kNoFrame;
  uint64_t num_ahead_ = 0;      // frames with kAhead
  std::deque<LivePlan> plans_;  // from first_live_ on
  uint64_t first_live_ = 1, num_pinned_ = 0;
  std::deque<Load> loads_;
  uint64_t num_loads_ = 0;
  std::vector<uint32_t> spans_;  // of the store, a power of two; partitions in order share them
  uint32_t num_rooms_ = 0;
  std::vector<uint64_t> kept_;                      // words by number; 0 = free
  std::unordered_map<uint64_t, uint32_t> kept_at_;  // place -> number
  std::vector<uint32_t> free_kept_;
  uint64_t hits_ = 0, misses_ = 0, fetched_ = 0, wait_ns_ = 0;
};

}  // namespace hotbed
