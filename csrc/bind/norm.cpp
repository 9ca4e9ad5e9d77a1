// SPDX-License-Identifier: Apache-2.0
// Python face of the reader of Norm files.
#include "core/norm.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "arrays.h"

namespace nb = nanobind;

namespace {

nb::tuple read_norm(const Input<std::uint8_t>& data, std::size_t num_floats, const std::vector<bool>& wanted,
                    int key_bytes, bool checksum, std::size_t max_samples) {
  hotbed::NormBlock block;
  {
    nb::gil_scoped_release released;
    const hotbed::NormLayout layout{num_floats, wanted, key_bytes, checksum};
    block = hotbed::read_norm(data.data(), data.size(), layout, max_samples);
  }
  nb::list slots;
  for (hotbed::NormSlot& slot : block.slots)
    slots.append(nb::make_tuple(to_numpy(std::move(slot.offsets)), to_numpy(std::move(slot.keys))));
  return nb::make_tuple(block.bytes, block.lost, to_numpy(std::move(block.good)), to_numpy(std::move(block.wrong_sum)),
                        to_numpy(std::move(block.misshapen)), to_numpy(std::move(block.floats)), slots);
}

}  // namespace

void init_norm(nb::module_& m) {
  m.def(
      "read_norm", &read_norm, nb::arg("data"), nb::arg("num_floats"), nb::arg("wanted"), nb::arg("key_bytes"),
      nb::arg("checksum"), nb::arg("max_samples"),
      "read_norm(...) -> (bytes read, lost, good, wrong_sum, misshapen, floats, [(offsets, keys) by slot]): the whole "
      "samples that `data` begins with, at most `max_samples`.");
}
