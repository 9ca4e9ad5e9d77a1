// SPDX-License-Identifier: Apache-2.0
// Python face of attention over packed histories. hotbed/models/layers/sequence/attend.py gives the arrays.
#include "core/attention.h"

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>

#include "arrays.h"

using namespace hotbed;

namespace {

using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(std::string("attention: ") + what + " do not fit the other arrays");
}

template <class Array>
bool has_shape(const Array& array, const Matrix<float>& other) {
  return array.shape(0) == other.shape(0) && array.shape(1) == other.shape(1);
}

PackedRows history_of(const Matrix<float>& queries, const Matrix<float>& rows, const Input<int64_t>& offsets,
                      int64_t length) {
  check(rows.shape(1) == queries.shape(1) && rows.shape(1) > 0, "rows");
  bool are_offsets = offsets.size() == queries.shape(0) + 1 && offsets(0) == 0 &&
                     offsets(offsets.size() - 1) == static_cast<int64_t>(rows.shape(0));
  for (size_t i = 1; are_offsets && i < offsets.size(); i++) are_offsets = offsets(i - 1) <= offsets(i);
  if (!are_offsets)
    throw std::invalid_argument("attention: offsets must begin with 0, never fall, and end with the number of rows, " +
                                std::to_string(rows.shape(0)) + ". Give the offsets of the column, batch.ids[name].");
  return {rows.data(), offsets.data(), length, static_cast<int>(rows.shape(1))};
}

void attend_into(const Matrix<float>& queries, const Matrix<float>& rows, const Input<int64_t>& offsets, int64_t length,
                 Floats weights, FloatRows pooled) {
  const PackedRows history = history_of(queries, rows, offsets, length);
  check(weights.size() == rows.shape(0), "weights");
  check(has_shape(pooled, queries), "results");
  nb::gil_scoped_release release;
  attend(history, {queries.data(), weights.data(), pooled.data()}, static_cast<int64_t>(queries.shape(0)));
}

void attend_backward_into(const Matrix<float>& queries, const Matrix<float>& rows, const Input<int64_t>& offsets,
                          int64_t length, Floats weights, FloatRows pooled, const Matrix<float>& grad,
                          FloatRows query_grads, FloatRows row_grads) {
  const PackedRows history = history_of(queries, rows, offsets, length);
  check(weights.size() == rows.shape(0), "weights");
  check(has_shape(pooled, queries) && has_shape(grad, queries), "results");
  check(has_shape(query_grads, queries) && has_shape(row_grads, rows), "gradients");
  nb::gil_scoped_release release;
  attend_backward(history, {queries.data(), weights.data(), pooled.data()},
                  {grad.data(), query_grads.data(), row_grads.data()}, static_cast<int64_t>(queries.shape(0)));
}

}  // namespace

void init_attention(nb::module_& m) {
  m.def("attend", &attend_into, nb::arg("queries"), nb::arg("rows"), nb::arg("offsets"), nb::arg("length"),
        nb::arg("weights"), nb::arg("pooled"));
  m.def("attend_backward", &attend_backward_into, nb::arg("queries"), nb::arg("rows"), nb::arg("offsets"),
        nb::arg("length"), nb::arg("weights"), nb::arg("pooled"), nb::arg("grad"), nb::arg("query_grads"),
        nb::arg("row_grads"));
}
