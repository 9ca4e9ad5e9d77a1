// SPDX-License-Identifier: Apache-2.0
#include "request_ids.h"

#include <algorithm>

namespace hotbed {

void RequestIds::assign(const std::vector<Feature>& features, const std::vector<FeatureIds>& ids) {
  features_ = features;
  num_tables_ = 0;
  for (const Feature& feature : features) num_tables_ = std::max(num_tables_, static_cast<size_t>(feature.table) + 1);
  if (tables_.size() < num_tables_) tables_.resize(num_tables_);
  for (PerTable& table : tables_) table.features.clear();
  for (size_t f = 0; f < features.size(); f++)
    tables_[static_cast<size_t>(features[f].table)].features.push_back(static_cast<int>(f));
  for (size_t t = 0; t < num_tables_; t++) {
    PerTable& table = tables_[t];
    table.distinct.assign(ids, table.features);
    table.distinct.find(table.unique);
  }
}

void RequestIds::pool(size_t table, const float* const* rows, int dim, const std::vector<OutputRows>& out,
                      int64_t num_samples) const {
  const PerTable& of = tables_[table];
  for (size_t k = 0; k < of.features.size(); k++) {
    const size_t f = static_cast<size_t>(of.features[k]);
    pool_feature(of.distinct.feature(k), features_[f].pooling, of.distinct.inverse(k), rows, dim, out[f], num_samples);
  }
}

}  // namespace hotbed
