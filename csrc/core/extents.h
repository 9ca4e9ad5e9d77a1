// SPDX-License-Identifier: Apache-2.0
// How a store divides its file: extents of 256 KiB, each of one span, cut into records of one size. 16 bytes of memory
// an extent, so that a terabyte takes 61 MB.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "disk_io.h"
#include "hash.h"
#include "hash_bytes.h"

namespace hotbed {

inline constexpr uint32_t kExtentBytes = 256 << 10;
inline constexpr uint32_t kNoExtent = 0xffffffffu;

// Where a record lies. 40 bits hold any place, of up to 8 TiB.
struct Place {
  static constexpr int kIndexBits = 15;
  static constexpr uint32_t kMostExtents = 1u << 25;

  static Place of(uint32_t extent, uint32_t index) noexcept { return {uint64_t{extent} << kIndexBits | index}; }
  uint32_t extent() const noexcept { return static_cast<uint32_t>(bits >> kIndexBits); }
  uint32_t index() const noexcept { return static_cast<uint32_t>(bits) & ((1u << kIndexBits) - 1); }
  bool operator==(const Place&) const = default;

  uint64_t bits;
};

// A record: checksum 4 | slot 4 | payload, which its owner keeps in two pieces. No record crosses a block, so that one
// block is read for it, unless more than an eighth of the file would stay empty.
class RecordLayout {
 public:
  static constexpr uint32_t kHead = 8;
  static constexpr uint32_t kMostBytes = kMostReadBytes - kBlockBytes + 1;  // read at once, wherever it begins

  RecordLayout(uint64_t key, uint32_t first_bytes, uint32_t second_bytes) noexcept
      : first_bytes(first_bytes), second_bytes(second_bytes), key_(key) {
    const uint32_t bytes = record_bytes();
    per_block_ = kBlockBytes / bytes;
    if (kBlockBytes - per_block_ * bytes > kBlockBytes / 8) per_block_ = 0;
    per_extent = per_block_ ? kExtentBytes / kBlockBytes * per_block_ : kExtentBytes / bytes;
  }

  uint32_t record_bytes() const noexcept { return kHead + first_bytes + second_bytes; }
  // Of a record, in its extent.
  uint32_t offset(uint32_t index) const noexcept {
    if (!per_block_) return index * record_bytes();
    return index / per_block_ * kBlockBytes + index % per_block_ * record_bytes();
  }
  uint32_t first_block(uint32_t index) const noexcept { return offset(index) / kBlockBytes; }
  uint32_t last_block(uint32_t index) const noexcept { return (offset(index) + record_bytes() - 1) / kBlockBytes; }

  static uint32_t slot(const uint8_t* record) noexcept { return load(record + 4); }
  void write(uint8_t* record, uint32_t slot, const void* first, const void* second) const noexcept {
    std::memcpy(record + 4, &slot, 4);
    if (first_bytes) std::memcpy(record + kHead, first, first_bytes);
    if (second_bytes) std::memcpy(record + kHead + first_bytes, second, second_bytes);
  }
  void read(const uint8_t* record, void* first, void* second) const noexcept {
    if (first_bytes) std::memcpy(first, record + kHead, first_bytes);
    if (second_bytes) std::memcpy(second, record + kHead + first_bytes, second_bytes);
  }
  // Over owner, place, generation of the extent, slot and payload: what was written elsewhere, before or by others does
  // not pass for this record.
  uint32_t checksum(const uint8_t* record, Place place, uint8_t generation) const noexcept {
    const uint64_t seed = mix64(key_ ^ mix64(place.bits << 8 | generation));
    return static_cast<uint32_t>(hash_bytes(record + 4, record_bytes() - 4, seed));
  }
  void seal(uint8_t* record, Place place, uint8_t generation) const noexcept {
    const uint32_t sum = checksum(record, place, generation);
    std::memcpy(record, &sum, 4);
  }
  bool is_whole(const uint8_t* record, Place place, uint8_t generation) const noexcept {
    return load(record) == checksum(record, place, generation);
  }

  uint32_t first_bytes, second_bytes, per_extent;

 private:
  static uint32_t load(const uint8_t* from) noexcept {
    uint32_t word;
    std::memcpy(&word, from, 4);
    return word;
  }

  uint64_t key_;
  uint32_t per_block_;
};

enum class ExtentState : uint8_t {
  kFree,
  kOpen,        // in memory: being filled, or waiting to be written
  kSealed,      // on the disk
  kCompacting,  // its live records are being moved
  kDamaged,     // some live record of it could not be read when it was compacted
};

struct Extent {
  uint32_t span = 0;
  uint32_t previous = kNoExtent, next = kNoExtent;  // in the ring that it is in
  uint16_t live = 0;
  ExtentState state = ExtentState::kFree;
  uint8_t generation = 0;  // how often it was used before
};
static_assert(sizeof(Extent) == 16);

// All extents of a file; they never move in memory. Lists go through them.
class Extents {
 public:
  Extent& operator[](uint32_t extent) noexcept { return chunks_[extent / kChunk][extent % kChunk]; }
  const Extent& operator[](uint32_t extent) const noexcept { return chunks_[extent / kChunk][extent % kChunk]; }
  uint32_t size() const noexcept { return size_; }
  void grow(uint32_t size) {
    while (chunks_.size() * kChunk < size) chunks_.push_back(std::make_unique<Extent[]>(kChunk));
    size_ = size;
  }
  uint64_t memory_bytes() const noexcept {
    return chunks_.size() * kChunk * sizeof(Extent) + chunks_.capacity() * sizeof(chunks_[0]);
  }

  // Lists are rings: a new extent is the last one, before the head.
  void link(uint32_t& head, uint32_t extent) noexcept {
    if (head == kNoExtent) head = extent;
    const uint32_t last = head == extent ? extent : (*this)[head].previous;
    Extent& entry = (*this)[extent];
    entry.previous = last, entry.next = head;
    (*this)[last].next = extent, (*this)[head].previous = extent;
  }
  void unlink(uint32_t& head, uint32_t extent) noexcept {
    const Extent& entry = (*this)[extent];
    if (head == extent) head = entry.next == extent ? kNoExtent : entry.next;
    (*this)[entry.previous].next = entry.next;
    (*this)[entry.next].previous = entry.previous;
  }

 private:
  static constexpr uint32_t kChunk = 4096;
  std::vector<std::unique_ptr<Extent[]>> chunks_;
  uint32_t size_ = 0;
};

}  // namespace hotbed
