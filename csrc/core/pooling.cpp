// SPDX-License-Identifier: Apache-2.0
#include "pooling.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace hotbed {
namespace {

// Pooling of single ids: each sample is its row. The rows are in a cache of the processor already.
void copy_rows(const uint32_t* inverse, const float* const* rows, int64_t n, int dim, const OutputRows& out) noexcept {
  const auto row_of = [&](int64_t i) { return rows[inverse ? inverse[i] : i]; };
  for (int64_t i = 0; i < n; i++) {
    if (dim == 16) std::memcpy(out.data + i * out.step, row_of(i), 64);
    else std::memcpy(out.data + i * out.step, row_of(i), static_cast<size_t>(dim) * 4);
  }
}

// The inverse of ids that are all taken as distinct.
const uint32_t* own_numbers(int64_t num_ids) {
  thread_local std::vector<uint32_t> numbers;
  while (numbers.size() < static_cast<size_t>(num_ids)) numbers.push_back(static_cast<uint32_t>(numbers.size()));
  return numbers.data();
}

}  // namespace

Bags bags_of(const FeatureIds& ids, Pooling pooling, const uint32_t* inverse) noexcept {
  const bool flat = pooling == Pooling::kNone || !ids.offsets;
  return {inverse, flat ? nullptr : ids.offsets, ids.weights, flat ? ids.num_values : ids.num_samples, pooling};
}

void pool_feature(const FeatureIds& ids, Pooling pooling, const uint32_t* inverse, const float* const* rows, int dim,
                  const OutputRows& out, int64_t num_samples) {
  if (!ids.offsets && !ids.weights && ids.num_values == num_samples)
    return copy_rows(inverse, rows, num_samples, dim, out);
  const bool repeated = pooling != Pooling::kNone && ids.num_samples == 1;
  if (repeated && num_samples == 0) return;
  const Bags bags = bags_of(ids, pooling, inverse ? inverse : own_numbers(ids.num_values));
  kernels().pool(bags, rows, out.data, out.step, dim, 0, bags.num_samples);
  for (int64_t i = 1; repeated && i < num_samples; i++) std::copy_n(out.data, dim, out.data + i * out.step);
}

}  // namespace hotbed
