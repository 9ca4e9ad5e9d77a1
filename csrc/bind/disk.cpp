// SPDX-License-Identifier: Apache-2.0
// A disk, for those who measure it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <string>

#include "core/disk_rate.h"
#include "names.h"

namespace nb = nanobind;
using namespace hotbed;

namespace {

class Disk {
 public:
  explicit Disk(const std::string& folder) : file_(folder) {}

  void fill(uint64_t bytes) {
    const nb::gil_scoped_release release;
    fill_blocks(file_, num_blocks_ * kBlockBytes, bytes);
    num_blocks_ += bytes / kBlockBytes;
  }
  uint64_t read(std::string_view engine, int depth, double seconds) {
    check();
    const EngineKind kind = value_of(kEngines, "engine", engine);
    const nb::gil_scoped_release release;
    return read_random_blocks(file_, kind, depth, num_blocks_, seconds);
  }
  double sync() {
    check();
    const nb::gil_scoped_release release;
    return sync_block(file_, num_blocks_);
  }
  bool is_direct() const { return file_.is_direct(); }

 private:
  void check() const {
    if (num_blocks_ == 0) throw std::invalid_argument("disk: nothing was written yet. Call fill first.");
  }

  File file_;
  uint64_t num_blocks_ = 0;
};

}  // namespace

void init_disk(nb::module_& m) {
  m.def("can_use_uring", &can_use_uring);
  nb::class_<Disk>(m, "Disk")
      .def(nb::init<const std::string&>(), nb::arg("folder"))
      .def("fill", &Disk::fill, nb::arg("bytes"))
      .def("read", &Disk::read, nb::arg("engine"), nb::arg("depth"), nb::arg("seconds"))
      .def("sync", &Disk::sync)
      .def_prop_ro("is_direct", &Disk::is_direct);
}
