// SPDX-License-Identifier: Apache-2.0
// id -> slot for one partition of a table.
#pragma once

#include <cstdint>

#include "bucket_map.h"

namespace hotbed {

class IdMap : public BucketMap<Bucket> {
 public:
  explicit IdMap(int partition) noexcept : BucketMap(partition, BlockUse::kIndex) {}

  uint32_t find(int64_t id, uint64_t hash) const noexcept {
    if (num_buckets_ == 0) return kNoSlot;
    return find_slot(buckets_, num_buckets_, bucket_of(hash, num_buckets_), id);
  }

  // The id must be absent.
  void insert(int64_t id, uint64_t hash, uint32_t slot) {
    const Place at = add(id, hash);
    at.bucket->slot[at.entry] = slot;
  }

  // Calls visit(id, slot) for every entry, in no useful order.
  template <class F>
  void for_each(F&& visit) const {
    for (uint32_t b = 0; b < num_buckets_; b++) buckets_[b].for_each(visit);
  }
};

}  // namespace hotbed
