// SPDX-License-Identifier: Apache-2.0
// id -> slot for one partition of a table. A bucket counts the entries that have passed it, so that erasing needs no
// tombstones.
#pragma once

#include <cstdint>
#include <utility>

#include "buckets.h"
#include "hash.h"
#include "memory.h"

namespace hotbed {

class IdMap {
 public:
  explicit IdMap(int partition) noexcept : partition_(static_cast<uint8_t>(partition)) {}
  ~IdMap() { release(buckets_, num_buckets_); }
  IdMap(IdMap&& other) noexcept
      : buckets_(std::exchange(other.buckets_, nullptr)),
        num_buckets_(std::exchange(other.num_buckets_, 0)),
        size_(std::exchange(other.size_, 0)),
        max_size_(std::exchange(other.max_size_, 0)),
        level_(other.level_),
        partition_(other.partition_) {}
  IdMap& operator=(const IdMap&) = delete;

  uint32_t size() const noexcept { return size_; }
  uint64_t num_bytes() const noexcept { return uint64_t{num_buckets_} * sizeof(Bucket); }

  void prefetch(uint64_t hash) const noexcept {
    if (num_buckets_) __builtin_prefetch(&buckets_[bucket_of(hash, num_buckets_)]);
  }

  uint32_t find(int64_t id, uint64_t hash) const noexcept {
    if (num_buckets_ == 0) return kNoSlot;
    return find_slot(buckets_, num_buckets_, bucket_of(hash, num_buckets_), id);
  }

  // The id must be absent.
  void insert(int64_t id, uint64_t hash, uint32_t slot) {
    if (size_ + 1 > max_size_) grow();
    place(id, hash, slot);
    size_++;
  }

  bool erase(int64_t id, uint64_t hash) noexcept {
    if (num_buckets_ == 0) return false;
    const uint32_t home = bucket_of(hash, num_buckets_);
    uint32_t b = home;
    do {
      if (const uint32_t hit = buckets_[b].match(id)) {
        buckets_[b].used &= static_cast<uint16_t>(~hit);
        for (uint32_t c = home; c != b; c = after(c))
          if (buckets_[c].overflow != kSticky) buckets_[c].overflow--;
        size_--;
        return true;
      }
      if (buckets_[b].overflow == 0) return false;
      b = after(b);
    } while (b != home);
    return false;
  }

  // Calls visit(id, slot) for every entry, in no useful order.
  template <class F>
  void for_each(F&& visit) const {
    for (uint32_t b = 0; b < num_buckets_; b++) buckets_[b].for_each(visit);
  }

  // Gives memory back after many erasures.
  void shrink();

 private:
  static constexpr uint16_t kSticky = 0xffff;

  uint32_t after(uint32_t b) const noexcept { return b + 1 == num_buckets_ ? 0 : b + 1; }

  void place(int64_t id, uint64_t hash, uint32_t slot) noexcept {
    for (uint32_t b = bucket_of(hash, num_buckets_);; b = after(b)) {
      if (buckets_[b].put(id, slot)) return;
      if (buckets_[b].overflow != kSticky) buckets_[b].overflow++;
    }
  }

  static void release(Bucket* buckets, uint32_t num_buckets) noexcept {
    if (buckets) release_block(buckets, uint64_t{num_buckets} * sizeof(Bucket), BlockUse::kIndex);
  }
  void grow();
  void rebuild(int level);

  Bucket* buckets_ = nullptr;
  uint32_t num_buckets_ = 0, size_ = 0, max_size_ = 0;
  int16_t level_ = -1;
  uint8_t partition_;
};

}  // namespace hotbed
