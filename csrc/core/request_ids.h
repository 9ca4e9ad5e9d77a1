// SPDX-License-Identifier: Apache-2.0
// The ids of a request that only reads: distinct by table, and pooled once a source has found their rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "distinct.h"
#include "pooling.h"

namespace hotbed {

// Kept by its thread from request to request, for its memory.
class RequestIds {
 public:
  // `ids`: by feature. The caller's arrays must live until the last call of pool.
  void assign(const std::vector<Feature>& features, const std::vector<FeatureIds>& ids);

  // Tables are numbered as in the features; one that no feature reads has no ids.
  size_t num_tables() const noexcept { return num_tables_; }
  const UniqueIds& unique(size_t table) const noexcept { return tables_[table].unique; }
  // Pools the features of a table; `rows`: of its distinct ids, `out`: by feature.
  void pool(size_t table, const float* const* rows, int dim, const std::vector<OutputRows>& out,
            int64_t num_samples) const;

 private:
  struct PerTable {
    std::vector<int> features;
    Distinct distinct;
    UniqueIds unique;
  };
  std::vector<PerTable> tables_;
  size_t num_tables_ = 0;
  std::vector<Feature> features_;
};

}  // namespace hotbed
