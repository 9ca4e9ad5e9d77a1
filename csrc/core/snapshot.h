// SPDX-License-Identifier: Apache-2.0
// The rows of a table that have changed, and a snapshot of the table that can be read while training continues:
// the first change to a row after that moment keeps the old record (copy on write).
//
// Marks are bits by slot, one 16-bit word a chunk. A chunk belongs to one partition for ever, so that threads at work
// on different partitions never write the same word.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "admission.h"
#include "memory.h"
#include "rows.h"
#include "slabs.h"

namespace hotbed {

class Marks {
 public:
  static_assert(Slabs::kChunk == 16);
  explicit Marks(size_t chunks = 0, uint16_t word = 0) : words_(chunks, word) {}

  void add_chunk(uint16_t word) { words_.push_back(word); }
  bool test(uint32_t slot) const noexcept { return words_[slot >> 4] & bit(slot); }
  void set(uint32_t slot) noexcept { words_[slot >> 4] |= bit(slot); }
  void unite(const Marks& other) noexcept {  // `other` has no more chunks than this
    for (size_t i = 0; i < other.words_.size(); i++) words_[i] |= other.words_[i];
  }
  Marks inverse() const {
    Marks out;
    for (const uint16_t word : words_) out.words_.push_back(static_cast<uint16_t>(~word));
    return out;
  }
  uint64_t count() const noexcept {
    uint64_t n = 0;
    for (const uint16_t word : words_) n += static_cast<uint64_t>(__builtin_popcount(word));
    return n;
  }

 private:
  static uint16_t bit(uint32_t slot) noexcept { return static_cast<uint16_t>(1u << (slot & 15)); }
  std::vector<uint16_t> words_;
};

struct SnapshotEntry {
  int64_t id;
  uint32_t slot;
  uint32_t at = 0;  // where its row goes
};
void sort_by_id(std::vector<SnapshotEntry>& entries);  // ids are distinct

// Rows and their entries as they were, in blocks that never move: copying one must not now and then copy all before it.
class Images {
 public:
  explicit Images(const RowLayout& layout) noexcept : layout_(layout) {}
  Images(Images&& other) noexcept
      : layout_(other.layout_), size_(std::exchange(other.size_, 0)), blocks_(std::move(other.blocks_)) {}
  Images& operator=(Images&&) = delete;
  ~Images() { clear(); }

  Row row(size_t i) const noexcept { return {at(i), at(i) + layout_.value_bytes, layout_}; }
  LedgerEntry entry(size_t i) const noexcept { return {at(i) + layout_.value_bytes + layout_.state_bytes, layout_}; }
  // The row of the new image is not set.
  Row push_back(const LedgerEntry& entry_now) {
    if (size_ == blocks_.size() * kBlock)
      blocks_.push_back(static_cast<uint8_t*>(allocate_block(block_bytes(), BlockUse::kSnapshot)));
    entry_now.copy_to(entry(size_));
    return row(size_++);
  }
  void clear() noexcept {
    for (uint8_t* block : blocks_) release_block(block, block_bytes(), BlockUse::kSnapshot);
    blocks_.clear(), size_ = 0;
  }

 private:
  static constexpr size_t kBlock = 256;
  size_t block_bytes() const noexcept { return kBlock * layout_.num_bytes(); }
  uint8_t* at(size_t i) const noexcept { return blocks_[i / kBlock] + i % kBlock * layout_.num_bytes(); }

  const RowLayout& layout_;
  size_t size_ = 0;
  std::vector<uint8_t*> blocks_;
};

// slot -> number of its image, by open addressing.
class ImageIndex {
 public:
  // Takes in the slots of images from number size() on.
  void follow(const std::vector<uint32_t>& slots);
  size_t size() const noexcept { return size_; }
  uint32_t find(uint32_t slot) const noexcept {  // kNoImage: the slot has no image
    if (entries_.empty()) return kNoImage;
    for (size_t at = home(slot);; at = (at + 1) & (entries_.size() - 1))
      if (entries_[at].slot == slot || entries_[at].image == kNoImage) return entries_[at].image;
  }
  static constexpr uint32_t kNoImage = 0xffffffffu;

 private:
  struct Entry {
    uint32_t slot = 0, image = kNoImage;
  };
  size_t home(uint32_t slot) const noexcept { return (slot * 0x9e3779b1u) >> shift_; }
  void put(uint32_t slot, uint32_t image) noexcept;

  std::vector<Entry> entries_;  // a power of two, at most half full
  int shift_ = 0;
  size_t size_ = 0;
};

struct Snapshot {
  // What happened to the owner of a slot since the snapshot began; the first event of a slot tells whose image it has.
  struct Event {
    int64_t id;
    uint32_t slot;
    bool born;  // else gone
  };
  struct Part {  // of one partition
    explicit Part(const RowLayout& layout) : images(layout) {}
    std::vector<int64_t> removed;
    std::unique_ptr<const Candidates> candidates;  // null where every id is admitted
    std::vector<uint32_t> image_slots;
    Images images;
    std::unordered_map<uint32_t, uint32_t> kept;  // image -> the number of its row, where that lies on the disk
    std::vector<Event> events;
    ImageIndex image_of;  // follows image_slots when it is read
    bool collected = false;
  };

  bool changes;   // only rows changed or removed since the last snapshot
  uint64_t step;  // of the table, then
  Marks settled;  // rows that are not part of the snapshot, are read already, or have an image
  Marks imaged;   // those that have one
  Marks changed;  // the marks that this snapshot took from the table
  std::vector<Part> parts;
};

}  // namespace hotbed
