// SPDX-License-Identifier: Apache-2.0
// Features of a batch as they cross from Python: tensors as addresses, checked by the caller for dtype and layout.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
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

      throw std::invalid_argument("each sample must have one id where there are no offsets, got " +
                                  std::to_string(ids.num_values) + " ids for " + std::to_string(ids.num_samples) +
                                  " samples");
    return;
  }
  bool rising = ids.offsets[0] == 0 && ids.offsets[ids.num_samples] == ids.num_values;
  for (int64_t i = 0; i < ids.num_samples; i++) rising &= ids.offsets[i] <= ids.offsets[i + 1];
  if (!rising)

    throw std::invalid_argument("offsets must start at 0, never fall and end at the number of ids, " +
                                std::to_string(ids.num_values) + ", got " + std::to_string(ids.offsets[0]) + " to " +
                                std::to_string(ids.offsets[ids.num_samples]));
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

// A contiguous NumPy array (or any buffer) of one dimension, held as long as this lives.
template <class T>
class HeldArray {
 public:
  explicit HeldArray(nanobind::handle array) {
    if (array.is_none()) return;
    held_ = PyObject_GetBuffer(array.ptr(), &view_, PyBUF_ND | PyBUF_FORMAT) == 0;
    if (!held_) throw nanobind::python_error();
    const char kind = view_.format ? view_.format[0] : 'B';
    const bool whole = std::is_integral_v<T> ? kind == 'l' || kind == 'q' : kind == 'f';
    if (view_.ndim != 1 || view_.itemsize != sizeof(T) || !whole) {
      PyBuffer_Release(&view_);
      throw std::invalid_argument("ids and offsets must be int64 [n], weights float32 [n], got format '" +
                                  std::string(1, kind) + "'");
    }
  }
  HeldArray(HeldArray&& other) noexcept : view_(other.view_), held_(std::exchange(other.held_, false)) {}
  HeldArray(const HeldArray&) = delete;
  HeldArray& operator=(const HeldArray&) = delete;
  ~HeldArray() {
    if (held_) PyBuffer_Release(&view_);
  }
  const T* data() const noexcept { return held_ ? static_cast<const T*>(view_.buf) : nullptr; }
  int64_t size() const noexcept { return held_ ? view_.shape[0] : 0; }

 private:
  Py_buffer view_{};
  bool held_ = false;
};

// The ids of features, out of a mapping from their names to `hotbed.data.batch.Ids`, or to arrays of one id a sample;
// one sample may stand for all.
class HeldFeatures {
 public:
  HeldFeatures(nanobind::handle ids, const std::vector<nanobind::str>& names, int64_t num_samples) {
    arrays_.reserve(names.size());
    for (const nanobind::str& name : names) {
      try {
        add(nanobind::object(ids[name]), num_samples);
      } catch (const std::invalid_argument& error) {
        throw std::invalid_argument("feature '" + std::string(name.c_str()) + "': " + error.what());
      }
    }
  }
  const std::vector<hotbed::FeatureIds>& features() const noexcept { return features_; }

 private:
  struct Arrays {
    HeldArray<int64_t> values, offsets;
    HeldArray<float> weights;
  };

  void add(const nanobind::object& one, int64_t num_samples) {
    if (PyObject_CheckBuffer(one.ptr()))
      arrays_.push_back(
          {HeldArray<int64_t>(one), HeldArray<int64_t>(nanobind::none()), HeldArray<float>(nanobind::none())});
    else
      arrays_.push_back({HeldArray<int64_t>(one.attr("values")), HeldArray<int64_t>(one.attr("offsets")),
                         HeldArray<float>(one.attr("weights"))});
    const Arrays& held = arrays_.back();
    const int64_t samples = held.offsets.data() ? held.offsets.size() - 1 : held.values.size();
    if (samples != num_samples && samples != 1)
      throw std::invalid_argument("each sample must have one entry, or all samples a single one, got " +
                                  std::to_string(samples) + " entries for " + std::to_string(num_samples) + " samples");
    if (held.weights.data() && held.weights.size() != held.values.size())
      throw std::invalid_argument("each id must have one weight, got " + std::to_string(held.weights.size()) +
                                  " weights for " + std::to_string(held.values.size()) + " ids");
    features_.push_back({held.values.data(), held.values.size(), held.offsets.data(), held.weights.data(), samples});
    check_offsets(features_.back());
  }

  std::vector<Arrays> arrays_;
  std::vector<hotbed::FeatureIds> features_;
};
