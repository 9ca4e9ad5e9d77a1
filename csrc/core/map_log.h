// SPDX-License-Identifier: Apache-2.0
// What the map of a batch changed in a table, so that it can be taken back.
#pragma once

#include <cstdint>
#include <vector>

#include "admission.h"
#include "eviction.h"
#include "memory.h"

namespace hotbed {

// What the map of a batch changed in a table besides the rows that it inserted, so that it can be taken back.
struct MapLog {
  struct Gone {
    int64_t id;
    uint32_t slot;
    Reason reason;
  };
  struct Waiting {
    uint32_t u;
    bool known;  // in an exact map
    Candidate before;
  };
  std::vector<Gone> gone;          // expired rows and victims, in order
  std::vector<Waiting> waiting;    // the ids that had no row
  std::vector<int> swept;          // partitions
  std::vector<int> counted_anew;   // partitions whose expired counts were dropped
  std::vector<Candidate> dropped;  // these
  Column<uint8_t> observed;        // LedgerEntry::observed of the ids that had one, before
};

}  // namespace hotbed
