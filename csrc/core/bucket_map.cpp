// SPDX-License-Identifier: Apache-2.0
#include "bucket_map.h"

#include <cmath>
#include <new>

namespace hotbed {
namespace {

constexpr double kGrowth = 1.5;

}  // namespace

// Capacities of the partitions are spread evenly over one growth factor (bit-reversed partition number as the phase):
// a table that grows steadily rebuilds one partition after the other instead of all 256 in the same few batches.
uint32_t buckets_at(int level, uint8_t partition) {
  uint32_t reversed = 0;
  for (int i = 0; i < 8; i++) reversed |= ((partition >> i) & 1u) << (7 - i);
  const double buckets = std::ceil(std::pow(kGrowth, level + reversed / 256.0));
  if (buckets > 4e9) throw std::bad_alloc();
  return static_cast<uint32_t>(buckets);
}

}  // namespace hotbed
