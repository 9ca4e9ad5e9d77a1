// SPDX-License-Identifier: Apache-2.0
// Which rows of a table are removed, and why.
#pragma once

#include <array>
#include <cstdint>

namespace hotbed {

struct Eviction {
  int64_t ttl = -1;        // by the table's clock; -1 = off
  uint64_t max_rows = 0;   // 0 = no cap
  bool by_count = false;   // victims by (aged) count instead of last-seen time
  double half_life = 0.0;  // microseconds; 0 = counts do not age
};

// Why a row went: it expired and was swept, it had to make room, it was removed by a call, or it had expired and its id
// came again before a sweep, so that it starts anew.
enum class Reason : uint8_t { kExpired, kOverCap, kRemoved, kRestarted };
using EvictedRows = std::array<uint64_t, 4>;  // by reason

}  // namespace hotbed
