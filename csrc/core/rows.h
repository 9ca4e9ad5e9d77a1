// SPDX-License-Identifier: Apache-2.0
// Storage of rows: slabs that never move. A slab holds the values of its rows, [dim] each (fp32, bf16 or fp16), one
// after another, and behind them what lies beside the values of each row:
//   optimizer state [width] fp32 | bookkeeping, each field only where a policy needs it.
// A lookup reads values alone: 16 of them are one cache line.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace hotbed {

struct RowLayout {
  int dim = 0, state_width = 0;
  Dtype dtype = Dtype::kFloat32;
  bool has_updated = false, has_count = false, has_seen = false, has_score = false;
  uint32_t value_bytes = 0, beside_bytes = 0;
  uint32_t updated_at = 0, count_at = 0, seen_at = 0, score_at = 0, id_at = 0;  // from the state on

  void arrange() noexcept;
  uint32_t num_bytes() const noexcept { return value_bytes + beside_bytes; }
  bool has_fields() const noexcept { return has_count || has_seen || has_score; }
};

class Row {
 public:
  Row(uint8_t* values, uint8_t* beside, const RowLayout& layout) noexcept
      : values_(values), beside_(beside), layout_(&layout) {}

  float* values() const noexcept { return reinterpret_cast<float*>(values_); }  // fp32 layouts only
  float* state() const noexcept { return reinterpret_cast<float*>(beside_); }
  uint32_t updated() const noexcept { return load<uint32_t>(layout_->updated_at); }
  uint32_t count() const noexcept { return load<uint32_t>(layout_->count_at); }
  int64_t seen() const noexcept { return load<int64_t>(layout_->seen_at); }
  double score() const noexcept { return load<double>(layout_->score_at); }
  int64_t id() const noexcept { return load<int64_t>(layout_->id_at); }  // half-precision layouts only
  void set_updated(uint32_t step) const noexcept { store(layout_->updated_at, step); }
  void set_count(uint32_t count) const noexcept { store(layout_->count_at, count); }
  void set_seen(int64_t time) const noexcept { store(layout_->seen_at, time); }
  void set_score(double score) const noexcept { store(layout_->score_at, score); }
  void set_id(int64_t id) const noexcept { store(layout_->id_at, id); }

  void read(float* out) const noexcept;
  // `noise` seeds the stochastic rounding of half-precision values; null rounds to nearest.
  void write(const float* in, const uint64_t* noise) const noexcept;
  // All bytes, [num_bytes], for a row that is kept elsewhere: values first.
  void copy_to(uint8_t* out) const noexcept;

 private:
  template <class T>
  T load(uint32_t at) const noexcept {
    T value;
    std::memcpy(&value, beside_ + at, sizeof(T));
    return value;
  }
  template <class T>
  void store(uint32_t at, T value) const noexcept {
    std::memcpy(beside_ + at, &value, sizeof(T));
  }

  uint8_t *values_, *beside_;
  const RowLayout* layout_;
};

class Rows {
 public:
  static constexpr uint32_t kChunk = 16;  // rows handed to a partition at a time

  explicit Rows(const RowLayout& layout);
  ~Rows();
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  const RowLayout& layout() const noexcept { return layout_; }
  Row operator[](uint32_t slot) const noexcept {
    uint8_t* slab = slabs_[slot >> shift_];
    const size_t place = slot & mask_;
    return {slab + place * layout_.value_bytes, slab + first_beside_ + place * layout_.beside_bytes, layout_};
  }
  uint8_t* values(uint32_t slot) const noexcept {
    return slabs_[slot >> shift_] + static_cast<size_t>(slot & mask_) * layout_.value_bytes;
  }
  uint8_t* beside(uint32_t slot) const noexcept {
    return slabs_[slot >> shift_] + first_beside_ + static_cast<size_t>(slot & mask_) * layout_.beside_bytes;
  }
  // Inlined always: GCC takes a function that only prefetches for one without effect, and leaves out its call.
  [[gnu::always_inline]] void prefetch_values(uint32_t slot) const noexcept {
    const uint8_t* ahead = values(slot);
    for (uint32_t line = 0; line < layout_.value_bytes; line += 64) __builtin_prefetch(ahead + line);
  }
  [[gnu::always_inline]] void prefetch(uint32_t slot) const noexcept {
    prefetch_values(slot);
    const uint8_t* ahead = beside(slot);
    for (uint32_t line = 0; line < layout_.beside_bytes; line += 64) __builtin_prefetch(ahead + line);
  }
  // The first slot of kChunk fresh rows. Not safe beside any other call.
  uint32_t add_chunk();
  uint64_t capacity() const noexcept { return num_slots_; }
  uint64_t num_bytes() const noexcept { return num_slots_ * layout_.num_bytes(); }

 private:
  RowLayout layout_;
  int shift_;
  uint32_t mask_;
  size_t slab_bytes_, first_beside_;  // first_beside_: where in a slab what is beside the values begins
  uint64_t num_slots_ = 0;
  bool huge_ = false;
  std::vector<uint8_t*> slabs_;
};

}  // namespace hotbed
