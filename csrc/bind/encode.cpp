// SPDX-License-Identifier: Apache-2.0
// Python face of the encoder's native pieces: hashing a whole column of strings, numbering ids.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "arrays.h"
#include "core/distinct.h"
#include "core/hash_bytes.h"

namespace nb = nanobind;

namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class Offset>
using Offsets = nb::ndarray<const Offset, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Hashes = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

/// Offsets come from Arrow buffers, that is from outside: they must rise and stay inside the bytes.
template <class Offset>
void check(const Offset* offsets, std::size_t num_strings, std::size_t num_bytes) {
  bool valid = offsets[0] >= 0 && static_cast<std::uint64_t>(offsets[num_strings]) <= num_bytes;
  for (std::size_t i = 0; i < num_strings; ++i) valid &= offsets[i] <= offsets[i + 1];
  if (!valid)
    throw std::invalid_argument(
        "hash_strings: offsets must rise from 0 to the number of bytes, got others. Check the Arrow buffers.");
}

template <class Offset>
Hashes hash_strings(Offsets<Offset> offsets, Bytes data, std::uint64_t seed) {
  if (offsets.size() == 0)
    throw std::invalid_argument(
        "hash_strings: offsets must have an entry or more, got none. Give [strings + 1] offsets.");
  const std::size_t num_strings = offsets.size() - 1;
  auto* hashes = new std::int64_t[num_strings];
  nb::capsule owner(hashes, [](void* memory) noexcept { delete[] static_cast<std::int64_t*>(memory); });
  {
    nb::gil_scoped_release released;
    const Offset* ends = offsets.data();
    check(ends, num_strings, data.size());
    for (std::size_t i = 0; i < num_strings; ++i) {
      const auto size = static_cast<std::size_t>(ends[i + 1] - ends[i]);
      hashes[i] = static_cast<std::int64_t>(hotbed::hash_bytes(data.data() + ends[i], size, seed));
    }
  }
  return Hashes(hashes, {num_strings}, owner);
}

template <class To, class From>
void convert(const Py_buffer& column, To* out) {
  const From* from = static_cast<const From*>(column.buf);
  for (Py_ssize_t i = 0; i < column.shape[0]; i++) out[i] = static_cast<To>(from[i]);
}

// One column as it is, or with another type; false where that takes more.
bool take(const Py_buffer& column, std::int64_t* out) {
  if (std::strchr("lqLQ", column.format[0]) && column.itemsize == 8)
    return std::memcpy(out, column.buf, static_cast<std::size_t>(column.len)), true;
  return column.format[0] == 'i' && column.itemsize == 4 && (convert<std::int64_t, std::int32_t>(column, out), true);
}

bool take(const Py_buffer& column, float* out) {
  if (column.format[0] == 'f') convert<float, float>(column, out);
  else if (column.format[0] == 'd') convert<float, double>(column, out);
  else if (std::strchr("lq", column.format[0]) && column.itemsize == 8) convert<float, std::int64_t>(column, out);
  else return false;
  return std::all_of(out, out + column.shape[0], [](float one) { return std::isfinite(one); });
}

/// The values of the columns in `names` that are plain arrays, one column after the other; and for each name the number
/// of its values, -1 if its column is not a plain array.
template <class To>
nb::tuple plain_columns(const nb::dict& columns, const nb::list& names, nb::handle array) {
  std::vector<Py_buffer> held;
  nb::list counts;
  std::size_t total = 0;
  for (nb::handle name : names) {
    PyObject* column = name.is_none() ? nullptr : PyDict_GetItemWithError(columns.ptr(), name.ptr());
    Py_buffer view{};
    if (!column || Py_TYPE(column) != reinterpret_cast<PyTypeObject*>(array.ptr()) ||
        PyObject_GetBuffer(column, &view, PyBUF_ND | PyBUF_FORMAT) != 0) {
      PyErr_Clear();
      view.ndim = -1;
    } else if (view.ndim == 1) {
      total += static_cast<std::size_t>(view.shape[0]);
    }
    held.push_back(view);
  }
  To* values = new To[total];
  nb::capsule owner(values, [](void* memory) noexcept { delete[] static_cast<To*>(memory); });
  std::size_t at = 0;
  for (Py_buffer& view : held) {
    const bool taken = view.ndim == 1 && view.format && !view.format[1] && take(view, values + at);
    counts.append(taken ? view.shape[0] : -1);
    if (taken) at += static_cast<std::size_t>(view.shape[0]);
    if (view.ndim >= 0) PyBuffer_Release(&view);
  }
  return nb::make_tuple(nb::ndarray<nb::numpy, To, nb::ndim<1>>(values, {at}, owner), counts);
}

// The different ids in the order in which they first occur, and for each position the number of its id.
nb::tuple distinct_ids(const Input<std::int64_t>& ids) {
  hotbed::UniqueIds unique;
  std::vector<std::int64_t> numbers(ids.size());
  {
    nb::gil_scoped_release released;
    const auto num_ids = static_cast<std::int64_t>(ids.size());
    hotbed::Distinct distinct;
    distinct.assign({{ids.data(), num_ids, nullptr, nullptr, num_ids}}, {0});
    distinct.find(unique);
    std::copy(distinct.inverse().begin(), distinct.inverse().end(), numbers.begin());
  }
  return nb::make_tuple(to_numpy(std::move(unique.ids)), to_numpy(std::move(numbers)));
}

}  // namespace

void init_encode(nb::module_& m) {
  const char* doc =
      "hash_strings(offsets, data, seed=0) -> int64 [n]: XXH64 of data[offsets[i]:offsets[i + 1]], offsets int32 or "
      "int64 [n + 1], data uint8.";
  m.def("hash_strings", &hash_strings<std::int32_t>, nb::arg("offsets"), nb::arg("data"), nb::arg("seed") = 0, doc);
  m.def("distinct_ids", &distinct_ids, nb::arg("ids"));
  m.def("plain_ids", &plain_columns<std::int64_t>, nb::arg("columns"), nb::arg("names"), nb::arg("array"));
  m.def("plain_numbers", &plain_columns<float>, nb::arg("columns"), nb::arg("names"), nb::arg("array"));
  m.def("hash_strings", &hash_strings<std::int64_t>, nb::arg("offsets"), nb::arg("data"), nb::arg("seed") = 0, doc);
}
