// SPDX-License-Identifier: Apache-2.0
// The ledger of a table: what its policies and its rule keep of each row beside values and state, by slot, always in
// memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "pool.h"

namespace hotbed {

class Ledger {
 public:
  // In Ram the entries lie in the slabs of `pool`, so that a row and its entry share lines.
  Ledger(const RowLayout& layout, const Pool& pool, Tier tier) : layout_(layout) {
    if (tier == Tier::kRam) slabs_ = &pool.slabs(), first_ = layout.state_bytes;
    else slabs_ = &own_.emplace(0, std::max(layout.ledger_bytes, 1u));
  }
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  LedgerEntry operator[](uint32_t slot) const noexcept { return {slabs_->back(slot) + first_, layout_}; }
  [[gnu::always_inline]] void prefetch(uint32_t slot) const noexcept {
    if (layout_.ledger_bytes > 0) __builtin_prefetch(slabs_->back(slot) + first_);
  }

  void add_chunk() {
    if (own_) own_->add_chunk();
  }
  uint64_t num_bytes() const noexcept { return own_ ? own_->num_bytes() : 0; }  // beside those of the pool

 private:
  const RowLayout& layout_;
  std::optional<Slabs> own_;
  const Slabs* slabs_;
  uint32_t first_ = 0;  // where in the back part of an element the entry begins
};

}  // namespace hotbed
