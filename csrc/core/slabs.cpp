// SPDX-License-Identifier: Apache-2.0
#include "slabs.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "memory.h"

namespace hotbed {

Slabs::Slabs(uint32_t front_bytes, uint32_t back_bytes) noexcept : front_bytes_(front_bytes), back_bytes_(back_bytes) {
  const size_t num_bytes = size_t{front_bytes} + back_bytes;
  const uint64_t least = std::max<uint64_t>(kChunk, (kHugePage + num_bytes - 1) / num_bytes);
  shift_ = 63 - std::countl_zero(std::bit_ceil(least));
  mask_ = (1u << shift_) - 1;
  slab_bytes_ = (size_t{1} << shift_) * num_bytes;
  first_back_ = (size_t{1} << shift_) * front_bytes;
}

Slabs::~Slabs() {
  for (uint8_t* slab : slabs_) unmap_pages(slab, slab_bytes_);
}

uint32_t Slabs::add_chunk() {
  if (size_ + kChunk >= 0xffffffffull)
    throw std::length_error("table: holds at most 2^32 - 2 rows, got more. Evict rows, or split the table.");
  if (size_ >> shift_ == slabs_.size()) slabs_.push_back(static_cast<uint8_t*>(map_pages(slab_bytes_, huge_)));
  const uint32_t first = static_cast<uint32_t>(size_);
  size_ += kChunk;
  // A small table stays on small pages; past an eighth of its first slab, it moves to huge ones.
  if (!huge_ && num_bytes() >= kHugePage / 8) {
    huge_ = true;
    collapse_pages(slabs_[0], slab_bytes_);
  }
  return first;
}

}  // namespace hotbed
