// SPDX-License-Identifier: Apache-2.0
#include "rows.h"

#include "hash.h"

namespace hotbed {

void RowLayout::arrange() noexcept {
  value_bytes = (static_cast<uint32_t>(dim) * (dtype == Dtype::kFloat32 ? 4 : 2) + 3) / 4 * 4;
  id_at = static_cast<uint32_t>(state_width) * 4;
  state_bytes = id_at + (dtype == Dtype::kFloat32 ? 0 : 8);
  observed_at = has_updated ? 4 : 0;
  count_at = observed_at;
  seen_at = count_at + (has_count ? 4 : 0);
  score_at = seen_at + (has_seen ? 8 : 0);
  ledger_bytes = score_at + (has_score ? 8 : 0);
  observed_bytes = ledger_bytes - observed_at;
}

void Row::read(float* out) const noexcept {
  if (layout_->dtype == Dtype::kFloat32) {
    std::memcpy(out, values_, sizeof(float) * static_cast<size_t>(layout_->dim));
    return;
  }
  for (int d = 0; d < layout_->dim; d++) out[d] = decode_half(layout_->dtype, load<uint16_t>(values_ + 2 * d));
}

void Row::write(const float* in, const uint64_t* noise) const noexcept {
  if (layout_->dtype == Dtype::kFloat32) {
    std::memcpy(values_, in, sizeof(float) * static_cast<size_t>(layout_->dim));
    return;
  }
  for (int d = 0; d < layout_->dim; d++) {
    const uint32_t bits =
        noise ? static_cast<uint32_t>(mix64(*noise + static_cast<uint64_t>(d) * kGolden)) & 0xffffu : kNearest;
    store(values_ + 2 * d, encode_half(layout_->dtype, in[d], bits));
  }
}

}  // namespace hotbed
