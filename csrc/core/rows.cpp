// SPDX-License-Identifier: Apache-2.0
#include "rows.h"

#include <bit>
#include <new>
#include <stdexcept>

#include "hash.h"
#include "memory.h"

namespace hotbed {

void RowLayout::arrange() noexcept {
  const uint32_t value_bytes = static_cast<uint32_t>(dim) * (dtype == Dtype::kFloat32 ? 4 : 2);
  uint32_t at = state_at = (value_bytes + 3) / 4 * 4;
  at += static_cast<uint32_t>(state_width) * 4;
  const auto field = [&at](bool present, uint32_t bytes) {
    const uint32_t here = at;
    if (present) at += bytes;
    return here;
  };
  updated_at = field(has_updated, 4);
  count_at = field(has_count, 4);
  seen_at = field(has_seen, 8);
  score_at = field(has_score, 8);
  id_at = field(dtype != Dtype::kFloat32, 8);
  num_bytes = at;
}

void Row::read(float* out) const noexcept {
  if (layout_->dtype == Dtype::kFloat32) {
    std::memcpy(out, record_, sizeof(float) * static_cast<size_t>(layout_->dim));
    return;
  }
  for (int d = 0; d < layout_->dim; d++)
    out[d] = decode_half(layout_->dtype, load<uint16_t>(static_cast<uint32_t>(2 * d)));
}

void Row::write(const float* in, const uint64_t* noise) const noexcept {
  if (layout_->dtype == Dtype::kFloat32) {
    std::memcpy(record_, in, sizeof(float) * static_cast<size_t>(layout_->dim));
    return;
  }
  for (int d = 0; d < layout_->dim; d++) {
    const uint32_t bits =
        noise ? static_cast<uint32_t>(mix64(*noise + static_cast<uint64_t>(d) * kGolden)) & 0xffffu : kNearest;
    store(static_cast<uint32_t>(2 * d), encode_half(layout_->dtype, in[d], bits));
  }
}

Rows::Rows(const RowLayout& layout) : layout_(layout) {
  const uint64_t per_slab = std::max<uint64_t>(kChunk, (kHugePage + layout_.num_bytes - 1) / layout_.num_bytes);
  shift_ = 63 - std::countl_zero(std::bit_ceil(per_slab));
  mask_ = (1u << shift_) - 1;
  slab_bytes_ = (size_t{1} << shift_) * layout_.num_bytes;
}

Rows::~Rows() {
  for (uint8_t* slab : slabs_) unmap_pages(slab, slab_bytes_);
}

uint32_t Rows::add_chunk() {
  if (num_slots_ + kChunk >= 0xffffffffull)
    throw std::length_error("table: holds at most 2^32 - 2 rows, got more. Evict rows, or split the table.");
  if (num_slots_ >> shift_ == slabs_.size()) slabs_.push_back(static_cast<uint8_t*>(map_pages(slab_bytes_, huge_)));
  const uint32_t first = static_cast<uint32_t>(num_slots_);
  num_slots_ += kChunk;
  // A small table stays on small pages; past an eighth of its first slab, it moves to huge ones.
  if (!huge_ && num_slots_ * layout_.num_bytes >= kHugePage / 8) {
    huge_ = true;
    collapse_pages(slabs_[0], slab_bytes_);
  }
  return first;
}

}  // namespace hotbed
