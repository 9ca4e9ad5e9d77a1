// SPDX-License-Identifier: Apache-2.0
#include "rows.h"

#include <bit>
#include <new>
#include <stdexcept>

#include "hash.h"
#include "memory.h"

namespace hotbed {

void RowLayout::arrange() noexcept {
  value_bytes = (static_cast<uint32_t>(dim) * (dtype == Dtype::kFloat32 ? 4 : 2) + 3) / 4 * 4;
  uint32_t at = static_cast<uint32_t>(state_width) * 4;
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
  beside_bytes = at;
}

void Row::read(float* out) const noexcept {
  if (layout_->dtype == Dtype::kFloat32) {
    std::memcpy(out, values_, sizeof(float) * static_cast<size_t>(layout_->dim));
    return;
  }
  for (int d = 0; d < layout_->dim; d++) {
    uint16_t bits;
    std::memcpy(&bits, values_ + 2 * d, sizeof(bits));
    out[d] = decode_half(layout_->dtype, bits);
  }
}

void Row::write(const float* in, const uint64_t* noise) const noexcept {
  if (layout_->dtype == Dtype::kFloat32) {
    std::memcpy(values_, in, sizeof(float) * static_cast<size_t>(layout_->dim));
    return;
  }
  for (int d = 0; d < layout_->dim; d++) {
    const uint32_t bits =
        noise ? static_cast<uint32_t>(mix64(*noise + static_cast<uint64_t>(d) * kGolden)) & 0xffffu : kNearest;
    const uint16_t half = encode_half(layout_->dtype, in[d], bits);
    std::memcpy(values_ + 2 * d, &half, sizeof(half));
  }
}

void Row::copy_to(uint8_t* out) const noexcept {
  std::memcpy(out, values_, layout_->value_bytes);
  std::memcpy(out + layout_->value_bytes, beside_, layout_->beside_bytes);
}

Rows::Rows(const RowLayout& layout) : layout_(layout) {
  const size_t num_bytes = layout_.num_bytes();
  const uint64_t per_slab = std::max<uint64_t>(kChunk, (kHugePage + num_bytes - 1) / num_bytes);
  shift_ = 63 - std::countl_zero(std::bit_ceil(per_slab));
  mask_ = (1u << shift_) - 1;
  slab_bytes_ = (size_t{1} << shift_) * num_bytes;
  first_beside_ = (size_t{1} << shift_) * layout_.value_bytes;
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
  if (!huge_ && num_bytes() >= kHugePage / 8) {
    huge_ = true;
    collapse_pages(slabs_[0], slab_bytes_);
  }
  return first;
}

}  // namespace hotbed
