// SPDX-License-Identifier: Apache-2.0
// id -> slot for one partition of a table: open addressing over 64-byte buckets of five entries, so that a lookup
// touches one cache line as a rule. Which entries are in use is kept in a bit mask, never in the id: every int64 is
// valid.
//
// A bucket counts the entries that wanted it but lie further on (`overflow`, as in F14): a search ends at the first
// bucket that none has passed, and erasing needs no tombstones.
#pragma once

#include <cstdint>
#include <utility>

#include "hash.h"
#include "memory.h"

namespace hotbed {

inline constexpr uint32_t kNoSlot = 0xffffffffu;

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
    const uint32_t home = bucket_of(hash, num_buckets_);
    uint32_t b = home;
    do {  // once round at most: in a small map every bucket may have been passed
      const Bucket& bucket = buckets_[b];
      if (uint32_t hit = match(bucket, id)) return bucket.slot[__builtin_ctz(hit)];
      if (bucket.overflow == 0) return kNoSlot;
      b = after(b);
    } while (b != home);
    return kNoSlot;
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
      if (uint32_t hit = match(buckets_[b], id)) {
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
    for (uint32_t b = 0; b < num_buckets_; b++)
      for (uint32_t left = buckets_[b].used; left; left &= left - 1) {
        const int e = __builtin_ctz(left);
        visit(buckets_[b].id[e], buckets_[b].slot[e]);
      }
  }

  // Gives memory back after many erasures.
  void shrink();

 private:
  static constexpr int kEntries = 5;
  static constexpr uint16_t kSticky = 0xffff;

  struct alignas(64) Bucket {
    int64_t id[kEntries];
    uint32_t slot[kEntries];
    uint16_t used;
    uint16_t overflow;
  };
  static_assert(sizeof(Bucket) == 64);

  uint32_t after(uint32_t b) const noexcept { return b + 1 == num_buckets_ ? 0 : b + 1; }

  static uint32_t match(const Bucket& bucket, int64_t id) noexcept {
    uint32_t hit = 0;
    for (int e = 0; e < kEntries; e++) hit |= static_cast<uint32_t>(bucket.id[e] == id) << e;
    return hit & bucket.used;
  }

  void place(int64_t id, uint64_t hash, uint32_t slot) noexcept {
    for (uint32_t b = bucket_of(hash, num_buckets_);; b = after(b)) {
      Bucket& bucket = buckets_[b];
      const uint32_t open = static_cast<uint32_t>(~bucket.used) & ((1u << kEntries) - 1);
      if (open) {
        const int e = __builtin_ctz(open);
        bucket.id[e] = id, bucket.slot[e] = slot;
        bucket.used |= static_cast<uint16_t>(1u << e);
        return;
      }
      if (bucket.overflow != kSticky) bucket.overflow++;
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
