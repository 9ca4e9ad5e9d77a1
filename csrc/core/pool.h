// SPDX-License-Identifier: Apache-2.0
// The pool of a table: values and optimizer state of its rows, by frame (frames.h).
#pragma once

#include <cstdint>

#include "rows.h"
#include "slabs.h"

namespace hotbed {

inline constexpr uint32_t kNoFrame = 0xffffffffu;    // no row
inline constexpr uint32_t kColdFrame = 0xfffffffeu;  // a row that lies in no frame: it is found anew when it is read

enum class Tier : uint8_t {
  kRam,  // a frame is the slot of its row; an entry of the ledger lies behind the row's state
  kSsd,  // rows lie on a disk, and some of them in frames
};

class Pool {
 public:
  Pool(const RowLayout& layout, Tier tier)
      : layout_(layout),
        slabs_(layout.value_bytes, layout.state_bytes + (tier == Tier::kRam ? layout.ledger_bytes : 0)) {}

  Row operator[](uint32_t frame) const noexcept { return {slabs_.front(frame), slabs_.back(frame), layout_}; }
  uint8_t* values(uint32_t frame) const noexcept { return slabs_.front(frame); }
  uint8_t* state(uint32_t frame) const noexcept { return slabs_.back(frame); }
  [[gnu::always_inline]] void prefetch_values(uint32_t frame) const noexcept { slabs_.prefetch_front(frame); }
  [[gnu::always_inline]] void prefetch(uint32_t frame) const noexcept { slabs_.prefetch(frame); }

  uint32_t add_chunk() { return slabs_.add_chunk(); }
  const Slabs& slabs() const noexcept { return slabs_; }

 private:
  const RowLayout& layout_;
  Slabs slabs_;
};

}  // namespace hotbed
