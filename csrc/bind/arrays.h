// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <vector>

namespace nb = nanobind;

template <class T>
using Input = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Output = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

// Hands a vector's memory to NumPy without a copy.
template <class T, class Allocator>
Output<T> to_numpy(std::vector<T, Allocator> values) {
  using Values = std::vector<T, Allocator>;
  auto held = std::make_unique<Values>(std::move(values));
  T* data = held->data();
  const size_t n = held->size();
  nb::capsule owner(held.get(), [](void* p) noexcept { delete static_cast<Values*>(p); });
  held.release();
  return Output<T>(data, {n}, owner);
}

template <class T>
std::vector<T> to_vector(const Input<T>& array) {
  return std::vector<T>(array.data(), array.data() + array.size());
}
