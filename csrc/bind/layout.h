// SPDX-License-Identifier: Apache-2.0
// The features of a lookup, laid out once, and the arrays that a call of it gives.
#pragma once

#include <nanobind/stl/string_view.h>

#include <memory>

#include "arrays.h"
#include "features.h"
#include "names.h"

using Floats = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
using FeatureTuple = std::tuple<nb::str, int, std::string_view>;  // name, table, pooling

inline Floats empty_floats(int64_t n, int64_t width) {
  const size_t rows = static_cast<size_t>(n), columns = static_cast<size_t>(width);
  float* data = std::make_unique_for_overwrite<float[]>(rows * columns).release();
  return Floats(data, {rows, columns}, nb::capsule(data, [](void* p) noexcept { delete[] static_cast<float*>(p); }));
}

// Pooled features side by side [n, width], and the rows [m, dim] of each sequence; `rows`: where to write them.
struct PooledArrays {
  Floats flat;
  nb::list sequences;
  std::vector<hotbed::OutputRows> rows;
  nb::tuple tuple() const { return nb::make_tuple(flat, sequences); }
};

class FeatureLayout {
 public:
  // `dims`: by table.
  FeatureLayout(const std::vector<FeatureTuple>& features, const std::vector<int>& dims) {
    for (const auto& [name, table, pooling] : features) {
      names_.push_back(name);
      features_.push_back({table, value_of(kPoolings, "pooling", pooling)});
      dims_.push_back(dims.at(static_cast<size_t>(table)));
      if (features_.back().pooling != hotbed::Pooling::kNone) width_ += dims_.back();
    }
  }

  const std::vector<nb::str>& names() const noexcept { return names_; }
  const std::vector<hotbed::Feature>& features() const noexcept { return features_; }

  PooledArrays arrays(const std::vector<hotbed::FeatureIds>& ids, int64_t num_samples) const {
    PooledArrays made{empty_floats(num_samples, width_), {}, {}};
    int64_t at = 0;
    for (size_t f = 0; f < features_.size(); f++) {
      if (features_[f].pooling == hotbed::Pooling::kNone) {
        const Floats sequence = empty_floats(ids[f].num_values, dims_[f]);
        made.rows.push_back({sequence.data(), dims_[f]});
        made.sequences.append(sequence);
      } else {
        made.rows.push_back({made.flat.data() + at, width_});
        at += dims_[f];
      }
    }
    return made;
  }

 private:
  std::vector<nb::str> names_;
  std::vector<hotbed::Feature> features_;
  std::vector<int64_t> dims_;
  int64_t width_ = 0;
};
