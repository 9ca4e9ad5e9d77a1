// SPDX-License-Identifier: Apache-2.0
// What the ids of one partition map to, in buckets of one cache line (buckets.h): open addressing that grows. A bucket
// counts the entries that have passed it, so that erasing needs no tombstones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "buckets.h"
#include "hash.h"
#include "memory.h"

namespace hotbed {

// Number of buckets of a partition's map at its (level + 1)th size.
uint32_t buckets_at(int level, uint8_t partition);

template <class B>
class BucketMap {
 public:
  struct Place {
    B* bucket = nullptr;  // null: there is no such id
    int entry = 0;
  };

  // `max_buckets`: the most that growing makes; entries_of() them fit.
  BucketMap(int partition, BlockUse use, uint32_t max_buckets = std::numeric_limits<uint32_t>::max()) noexcept
      : max_buckets_(max_buckets), use_(use), partition_(static_cast<uint8_t>(partition)) {}
  ~BucketMap() { release(buckets_, num_buckets_); }
  BucketMap(BucketMap&& other) noexcept
      : buckets_(std::exchange(other.buckets_, nullptr)),
        num_buckets_(std::exchange(other.num_buckets_, 0)),
        size_(std::exchange(other.size_, 0)),
        max_size_(std::exchange(other.max_size_, 0)),
        max_buckets_(other.max_buckets_),
        level_(other.level_),
        use_(other.use_),
        partition_(other.partition_) {}
  BucketMap& operator=(const BucketMap&) = delete;

  static uint32_t entries_of(uint32_t buckets) noexcept {
    return static_cast<uint32_t>(std::max(1.0, buckets * double{B::kEntries} * kMaxLoad));
  }

  uint32_t size() const noexcept { return size_; }
  uint64_t num_bytes() const noexcept { return uint64_t{num_buckets_} * sizeof(B); }

  void prefetch(uint64_t hash) const noexcept {
    if (num_buckets_) __builtin_prefetch(&buckets_[bucket_of(hash, num_buckets_)]);
  }

  Place locate(int64_t id, uint64_t hash) const noexcept {
    if (num_buckets_ == 0) return {};
    const uint32_t home = bucket_of(hash, num_buckets_);
    uint32_t b = home;
    do {
      if (const uint32_t hit = buckets_[b].match(id)) return {&buckets_[b], __builtin_ctz(hit)};
      if (buckets_[b].overflow == 0) return {};
      b = after(b);
    } while (b != home);
    return {};
  }

  // The id must be absent; what it maps to is for the caller to write.
  Place add(int64_t id, uint64_t hash) {
    if (size_ + 1 > max_size_) grow();
    size_++;
    return place(id, hash);
  }

  bool erase(int64_t id, uint64_t hash) noexcept {
    const Place found = locate(id, hash);
    if (!found.bucket) return false;
    found.bucket->used &= static_cast<uint16_t>(~(1u << found.entry));
    const uint32_t end = static_cast<uint32_t>(found.bucket - buckets_);
    for (uint32_t b = bucket_of(hash, num_buckets_); b != end; b = after(b))
      if (buckets_[b].overflow != kSticky) buckets_[b].overflow--;
    size_--;
    return true;
  }

  // Calls visit(bucket, entry) for every entry, in no useful order.
  template <class F>
  void for_each_place(F&& visit) const {
    for (uint32_t b = 0; b < num_buckets_; b++)
      for (uint32_t left = buckets_[b].used; left; left &= left - 1) visit(buckets_[b], __builtin_ctz(left));
  }

  void clear() noexcept {
    release(std::exchange(buckets_, nullptr), num_buckets_);
    num_buckets_ = size_ = max_size_ = 0, level_ = -1;
  }

  // Gives memory back after many erasures.
  void shrink() {
    if (num_buckets_ < 8 || size_ > max_size_ / 4) return;
    int level = level_;
    while (level > 0 && entries_of(buckets_at(level - 1, partition_)) > size_ + size_ / 4) level--;
    rebuild(level);
  }

 protected:
  static constexpr double kMaxLoad = 0.74;
  static constexpr uint16_t kSticky = 0xffff;

  uint32_t after(uint32_t b) const noexcept { return b + 1 == num_buckets_ ? 0 : b + 1; }

  Place place(int64_t id, uint64_t hash) noexcept {
    for (uint32_t b = bucket_of(hash, num_buckets_);; b = after(b)) {
      if (const int entry = buckets_[b].put(id); entry >= 0) return {&buckets_[b], entry};
      if (buckets_[b].overflow != kSticky) buckets_[b].overflow++;
    }
  }

  void release(B* buckets, uint32_t num_buckets) noexcept {
    if (buckets) release_block(buckets, uint64_t{num_buckets} * sizeof(B), use_);
  }

  void grow() {
    int level = level_ + 1;
    while (std::min(buckets_at(level, partition_), max_buckets_) <= num_buckets_ && num_buckets_ < max_buckets_)
      level++;
    rebuild(level);
  }

  void rebuild(int level) {
    B* old = buckets_;
    const uint32_t old_num = num_buckets_;
    num_buckets_ = std::min(buckets_at(level, partition_), max_buckets_);
    buckets_ = static_cast<B*>(allocate_block(num_bytes(), use_));
    for (uint32_t b = 0; b < num_buckets_; b++) buckets_[b].used = buckets_[b].overflow = 0;
    max_size_ = entries_of(num_buckets_), level_ = static_cast<int16_t>(level);
    for (uint32_t b = 0; b < old_num; b++)
      for (uint32_t left = old[b].used; left; left &= left - 1) {
        const int entry = __builtin_ctz(left);
        const int64_t id = old[b].id[entry];
        const Place to = place(id, hash_id(id));
        to.bucket->take(to.entry, old[b], entry);
      }
    release(old, old_num);
  }

  B* buckets_ = nullptr;
  uint32_t num_buckets_ = 0, size_ = 0, max_size_ = 0, max_buckets_;
  int16_t level_ = -1;
  BlockUse use_;
  uint8_t partition_;
};

}  // namespace hotbed
