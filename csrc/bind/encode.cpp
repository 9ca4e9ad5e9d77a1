// SPDX-License-Identifier: Apache-2.0
// Python face of the encoder's native pieces: hashing a whole column of strings.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>

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
  if (!valid) throw std::invalid_argument("hash_strings: offsets do not rise within the bytes");
}

template <class Offset>
Hashes hash_strings(Offsets<Offset> offsets, Bytes data, std::uint64_t seed) {
  if (offsets.size() == 0) throw std::invalid_argument("hash_strings: offsets need at least one entry");
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

}  // namespace

void init_encode(nb::module_& m) {
  const char* doc =
      "hash_strings(offsets, data, seed=0) -> int64 [n]: XXH64 of data[offsets[i]:offsets[i + 1]], offsets int32 or "
      "int64 [n + 1], data uint8.";
  m.def("hash_strings", &hash_strings<std::int32_t>, nb::arg("offsets"), nb::arg("data"), nb::arg("seed") = 0, doc);
  m.def("hash_strings", &hash_strings<std::int64_t>, nb::arg("offsets"), nb::arg("data"), nb::arg("seed") = 0, doc);
}
