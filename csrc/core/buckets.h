// SPDX-License-Identifier: Apache-2.0
// The index of ids, in memory (IdMap) and in files (FrozenRows): open addressing over 64-byte buckets of five entries,
// so that a lookup touches one cache line as a rule. Which entries are in use is kept in a bit mask, never in the id:
// every int64 is valid.
//
// A bucket records that entries which wanted it lie further on (`overflow`, as in F14): a search ends at the first
// bucket that no entry has passed.
#pragma once

#include <cstdint>

namespace hotbed {

inline constexpr uint32_t kNoSlot = 0xffffffffu;

// How ids lie in a bucket B with the members `id`, [kEntries], and `used`, the mask of entries in use.
template <class B>
struct BucketEntries {
  // The bit of the entry that holds `id`, or 0. No branch an entry: where an id lies in its bucket cannot be predicted.
  uint32_t match(int64_t wanted) const noexcept {
    const B& bucket = static_cast<const B&>(*this);
    uint32_t hit = 0;
    for (int e = 0; e < B::kEntries; e++) hit |= static_cast<uint32_t>(bucket.id[e] == wanted) << e;
    return hit & bucket.used;
  }
  // The entry that is now of this id, or -1 where all are in use.
  int put(int64_t new_id) noexcept {
    B& bucket = static_cast<B&>(*this);
    const uint32_t open = static_cast<uint32_t>(~bucket.used) & ((1u << B::kEntries) - 1);
    if (!open) return -1;
    const int e = __builtin_ctz(open);
    bucket.id[e] = new_id;
    bucket.used |= static_cast<uint16_t>(1u << e);
    return e;
  }
};

struct alignas(64) Bucket : BucketEntries<Bucket> {
  static constexpr int kEntries = 5;

  int64_t id[kEntries];
  uint32_t slot[kEntries];
  uint16_t used;
  uint16_t overflow;

  using BucketEntries<Bucket>::put;
  // False where all entries are in use.
  bool put(int64_t new_id, uint32_t new_slot) noexcept {
    const int e = put(new_id);
    if (e >= 0) slot[e] = new_slot;
    return e >= 0;
  }
  void take(int e, const Bucket& other, int from) noexcept { slot[e] = other.slot[from]; }
  // Calls visit(id, slot) for every entry in use.
  template <class F>
  void for_each(F&& visit) const {
    for (uint32_t left = used; left; left &= left - 1) {
      const int e = __builtin_ctz(left);
      visit(id[e], slot[e]);
    }
  }
};
static_assert(sizeof(Bucket) == 64);

// The slot of an id whose search begins at bucket `home`, or kNoSlot. Goes round once at most: where there are few
// buckets, entries may have passed all of them.
template <class Number>
uint32_t find_slot(const Bucket* buckets, Number num_buckets, Number home, int64_t id) noexcept {
  Number b = home;
  do {
    const Bucket& bucket = buckets[b];
    if (const uint32_t hit = bucket.match(id)) return bucket.slot[__builtin_ctz(hit)];
    if (bucket.overflow == 0) return kNoSlot;
    b = b + 1 == num_buckets ? 0 : b + 1;
  } while (b != home);
  return kNoSlot;
}

}  // namespace hotbed
