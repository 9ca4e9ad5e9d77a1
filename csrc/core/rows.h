// SPDX-License-Identifier: Apache-2.0
// The bytes of a row. The pool has values [dim] (fp32, bf16 or fp16), optimizer state [width] fp32 and, in half
// precision, the id; the ledger has one entry a row, each field only where a policy or the rule needs it.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace hotbed {

struct RowLayout {
  int dim = 0, state_width = 0;
  Dtype dtype = Dtype::kFloat32;
  bool has_updated = false, has_count = false, has_seen = false, has_score = false;
  uint32_t value_bytes = 0, state_bytes = 0, ledger_bytes = 0;
  uint32_t id_at = 0;                            // from the state on
  uint32_t observed_at = 0, observed_bytes = 0;  // from the entry on: count, seen and score together
  uint32_t count_at = 0, seen_at = 0, score_at = 0;

  void arrange() noexcept;
  uint32_t num_bytes() const noexcept { return value_bytes + state_bytes + ledger_bytes; }
};

// A number at any address.
template <class T>
T load(const uint8_t* at) noexcept {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}
template <class T>
void store(uint8_t* at, T value) noexcept {
  std::memcpy(at, &value, sizeof(T));
}

// The part of a row that lies in the pool.
class Row {
 public:
  Row(uint8_t* values, uint8_t* state, const RowLayout& layout) noexcept
      : values_(values), state_(state), layout_(&layout) {}

  float* values() const noexcept { return reinterpret_cast<float*>(values_); }  // fp32 layouts only
  float* state() const noexcept { return reinterpret_cast<float*>(state_); }
  int64_t id() const noexcept { return load<int64_t>(state_ + layout_->id_at); }  // half-precision layouts only
  void set_id(int64_t id) const noexcept { store(state_ + layout_->id_at, id); }

  void read(float* out) const noexcept;
  // `noise` seeds the stochastic rounding of half-precision values; null rounds to nearest.
  void write(const float* in, const uint64_t* noise) const noexcept;
  void copy_to(const Row& other) const noexcept {
    std::memcpy(other.values_, values_, layout_->value_bytes);
    std::memcpy(other.state_, state_, layout_->state_bytes);
  }

 private:
  uint8_t *values_, *state_;
  const RowLayout* layout_;
};

// The part of a row that lies in the ledger.
class LedgerEntry {
 public:
  LedgerEntry(uint8_t* at, const RowLayout& layout) noexcept : at_(at), layout_(&layout) {}

  uint32_t updated() const noexcept { return load<uint32_t>(at_); }
  uint32_t count() const noexcept { return load<uint32_t>(at_ + layout_->count_at); }
  int64_t seen() const noexcept { return load<int64_t>(at_ + layout_->seen_at); }
  double score() const noexcept { return load<double>(at_ + layout_->score_at); }
  void set_updated(uint32_t step) const noexcept { store(at_, step); }
  void set_count(uint32_t count) const noexcept { store(at_ + layout_->count_at, count); }
  void set_seen(int64_t time) const noexcept { store(at_ + layout_->seen_at, time); }
  void set_score(double score) const noexcept { store(at_ + layout_->score_at, score); }

  // The bytes that a lookup in training changes, [observed_bytes].
  uint8_t* observed() const noexcept { return at_ + layout_->observed_at; }
  void copy_to(const LedgerEntry& other) const noexcept { std::memcpy(other.at_, at_, layout_->ledger_bytes); }

 private:
  uint8_t* at_;
  const RowLayout* layout_;
};

}  // namespace hotbed
