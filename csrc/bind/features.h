// SPDX-License-Identifier: Apache-2.0
// Features of a batch as they cross from Python: tensors as addresses, checked by the caller for dtype and layout.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>
#include <vector>

#include "core/step.h"

using Address = uint64_t;
using IdsTuple = std::tuple<Address, int64_t, Address, Address, int64_t>;  // values, count, offsets, weights, samples
using RowsTuple = std::tuple<Address, int64_t>;                            // first row, floats between rows

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

inline void check_offsets(const hotbed::FeatureIds& ids) {
  if (!ids.offsets) {
    if (ids.num_values != ids.num_samples)
      throw std::invalid_argument("[lookup] without offsets a feature has one id a sample");
    return;
  }
  bool rising = ids.offsets[0] == 0 && ids.offsets[ids.num_samples] == ids.num_values;
  for (int64_t i = 0; i < ids.num_samples; i++) rising &= ids.offsets[i] <= ids.offsets[i + 1];
  if (!rising)
    throw std::invalid_argument("[lookup] offsets must start at 0, never fall, and end at the number of ids");
}

inline std::vector<hotbed::FeatureIds> checked_features(const std::vector<IdsTuple>& ids) {
  std::vector<hotbed::FeatureIds> features;
  for (const auto& [values, count, offsets, weights, samples] : ids) {
    features.push_back({pointer<const int64_t>(values), count, pointer<const int64_t>(offsets),
                        pointer<const float>(weights), samples});
    check_offsets(features.back());
  }
  return features;
}

inline std::vector<hotbed::OutputRows> output_rows(const std::vector<RowsTuple>& out) {
  std::vector<hotbed::OutputRows> rows;
  for (const auto& [data, distance] : out) rows.push_back({pointer<float>(data), distance});
  return rows;
}
