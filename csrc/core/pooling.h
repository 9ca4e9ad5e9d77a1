// SPDX-License-Identifier: Apache-2.0
// The last piece of a lookup: the output of a feature, from the number of the id at each position and the fp32 row of
// each id.
#pragma once

#include <cstdint>

#include "distinct.h"
#include "kernels.h"

namespace hotbed {

struct Feature {
  int table = 0;
  Pooling pooling = Pooling::kSum;
};

// Rows of `dim` floats, `step` floats apart: one a sample, or one a position where pooling is kNone.
struct OutputRows {
  float* data = nullptr;
  int64_t step = 0;
};

// A feature as the kernels take it. Without pooling, every position is a sample.
Bags bags_of(const FeatureIds& ids, Pooling pooling, const uint32_t* inverse) noexcept;

// Pools a feature on the calling thread. A single sample in `ids` holds for all `num_samples`; a feature that is not
// pooled has one row an id. `inverse` null: rows has one entry for each position.
void pool_feature(const FeatureIds& ids, Pooling pooling, const uint32_t* inverse, const float* const* rows, int dim,
                  const OutputRows& out, int64_t num_samples);

}  // namespace hotbed
