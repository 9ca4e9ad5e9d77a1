// SPDX-License-Identifier: Apache-2.0
#include "id_map.h"

#include <algorithm>
#include <cmath>
#include <new>

namespace hotbed {
namespace {

constexpr double kGrowth = 1.5, kMaxLoad = 0.74;

// Capacities of the partitions are spread evenly over one growth factor (bit-reversed partition number as the phase):
// a table that grows steadily rebuilds one partition after the other instead of all 256 in the same few batches.
uint32_t buckets_at(int level, uint8_t partition) {
  uint32_t reversed = 0;
  for (int i = 0; i < 8; i++) reversed |= ((partition >> i) & 1u) << (7 - i);
  const double buckets = std::ceil(std::pow(kGrowth, level + reversed / 256.0));
  if (buckets > 4e9) throw std::bad_alloc();
  return static_cast<uint32_t>(buckets);
}

uint32_t entries_of(uint32_t buckets) {
  return static_cast<uint32_t>(std::max(1.0, buckets * double{Bucket::kEntries} * kMaxLoad));
}

}  // namespace

void IdMap::rebuild(int level) {
  const uint32_t num_buckets = buckets_at(level, partition_);
  Bucket* old = buckets_;
  const uint32_t old_num = num_buckets_;
  buckets_ = static_cast<Bucket*>(allocate_block(uint64_t{num_buckets} * sizeof(Bucket), BlockUse::kIndex));
  for (uint64_t b = 0; b < num_buckets; b++) buckets_[b].used = buckets_[b].overflow = 0;
  num_buckets_ = num_buckets, max_size_ = entries_of(num_buckets), level_ = static_cast<int16_t>(level);
  for (uint32_t b = 0; b < old_num; b++)
    old[b].for_each([&](int64_t id, uint32_t slot) { place(id, hash_id(id), slot); });
  release(old, old_num);
}

void IdMap::grow() {
  int level = level_ + 1;
  while (buckets_at(level, partition_) <= num_buckets_) level++;
  rebuild(level);
}

void IdMap::shrink() {
  if (num_buckets_ < 8 || size_ > max_size_ / 4) return;
  int level = level_;
  while (level > 0 && entries_of(buckets_at(level - 1, partition_)) > size_ + size_ / 4) level--;
  rebuild(level);
}

}  // namespace hotbed
