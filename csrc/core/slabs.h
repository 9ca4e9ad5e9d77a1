// SPDX-License-Identifier: Apache-2.0
// Memory for elements of one size, in slabs that never move. An element has two parts: the front parts of a slab lie
// one after another, and behind them the back parts, so that whoever reads fronts alone fetches no back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hotbed {

class Slabs {
 public:
  static constexpr uint32_t kChunk = 16;  // elements that are added at a time

  Slabs(uint32_t front_bytes, uint32_t back_bytes) noexcept;
  ~Slabs();
  Slabs(const Slabs&) = delete;
  Slabs& operator=(const Slabs&) = delete;

  uint8_t* front(uint32_t i) const noexcept {
    return slabs_[i >> shift_] + static_cast<size_t>(i & mask_) * front_bytes_;
  }
  uint8_t* back(uint32_t i) const noexcept {
    return slabs_[i >> shift_] + first_back_ + static_cast<size_t>(i & mask_) * back_bytes_;
  }
  // Inlined always: GCC takes a function that only prefetches for one without effect, and leaves out its call.
  [[gnu::always_inline]] void prefetch_front(uint32_t i) const noexcept {
    const uint8_t* ahead = front(i);
    for (uint32_t line = 0; line < front_bytes_; line += 64) __builtin_prefetch(ahead + line);
  }
  [[gnu::always_inline]] void prefetch(uint32_t i) const noexcept {
    prefetch_front(i);
    const uint8_t* ahead = back(i);
    for (uint32_t line = 0; line < back_bytes_; line += 64) __builtin_prefetch(ahead + line);
  }
  // The first of kChunk fresh elements. Not safe beside any other call.
  uint32_t add_chunk();
  uint64_t size() const noexcept { return size_; }
  uint64_t num_bytes() const noexcept { return size_ * (uint64_t{front_bytes_} + back_bytes_); }

 private:
  uint32_t front_bytes_, back_bytes_;
  int shift_;
  uint32_t mask_;
  size_t slab_bytes_, first_back_;  // first_back_: where in a slab the back parts begin
  uint64_t size_ = 0;
  bool huge_ = false;
  std::vector<uint8_t*> slabs_;
};

}  // namespace hotbed
