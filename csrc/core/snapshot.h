// SPDX-License-Identifier: Apache-2.0
// Which rows of a table have changed, and a picture of the table at one moment that can be read while training goes on:
// the first change to a row after that moment keeps the old record (copy on write).
//
// Marks are bits by slot, one 16-bit word a chunk. A chunk belongs to one partition for ever, so that threads at work
// on different partitions never write the same word.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "admission.h"
#include "rows.h"

namespace hotbed {

class Marks {
 public:
  static_assert(Rows::kChunk == 16);
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
};
void sort_by_id(std::vector<SnapshotEntry>& entries);  // ids are distinct

struct Snapshot {
  // What happened to the owner of a slot since the snapshot began; the first event of a slot tells whose image it has.
  struct Event {
    int64_t id;
    uint32_t slot;
    bool born;  // else gone
  };
  struct Part {  // of one partition
    std::vector<int64_t> removed;
    std::vector<Candidate> candidates;
    std::vector<uint32_t> sketch;
    std::vector<uint32_t> image_slots;
    std::vector<uint8_t> images;  // records as they were, one after another
    std::vector<Event> events;
    std::unordered_map<uint32_t, size_t> image_of;  // slot -> number of its image; follows image_slots when it is read
    bool collected = false;
  };

  bool changes;   // only rows changed or removed since the last snapshot
  Marks settled;  // rows that are no part of the picture, are read already, or have an image
  Marks changed;  // the marks that this snapshot took from the table
  std::vector<Part> parts;
};

}  // namespace hotbed
