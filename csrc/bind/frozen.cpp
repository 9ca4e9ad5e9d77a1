// SPDX-License-Identifier: Apache-2.0
#include "core/frozen.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "arrays.h"
#include "features.h"

using namespace hotbed;

namespace {

nb::object rows(const Input<float>& values, int dim, int dtype) {
  std::vector<uint8_t> out;
  {
    nb::gil_scoped_release release;
    out = frozen_rows(values.data(), values.size() / static_cast<size_t>(dim), dim, static_cast<FrozenDtype>(dtype));
  }
  return nb::cast(to_numpy(std::move(out)));
}

nb::object index_of(const Input<int64_t>& ids, const Input<int64_t>& removed) {
  std::vector<uint8_t> out;
  {
    nb::gil_scoped_release release;
    out = frozen_index(ids.data(), ids.size(), removed.data(), removed.size());
  }
  return nb::cast(to_numpy(std::move(out)));
}

nb::bytes footer(uint64_t num_rows, uint64_t num_removed, int dim, int dtype) {
  const FrozenFooter bytes = frozen_footer(num_rows, num_removed, dim, static_cast<FrozenDtype>(dtype));
  return nb::bytes(&bytes, sizeof bytes);
}

// Rows and whether there is one, of each id.
nb::tuple find(const FrozenTable& table, const Input<int64_t>& ids) {
  std::vector<float> scratch, out(ids.size() * static_cast<size_t>(table.dim()));
  std::vector<const float*> rows;
  std::vector<uint8_t> found(ids.size());
  {
    nb::gil_scoped_release release;
    table.find_rows(ids.data(), static_cast<int64_t>(ids.size()), scratch, rows, found.data());
    for (size_t i = 0; i < rows.size(); i++)
      std::copy_n(rows[i], table.dim(), out.data() + i * static_cast<size_t>(table.dim()));
  }
  return nb::make_tuple(to_numpy(std::move(out)), to_numpy(std::move(found)));
}

// Ids and slots of a file; a slot of 2^32 - 2 says that the id was removed.
nb::tuple entries(const FrozenRows& rows) {
  std::vector<int64_t> ids;
  std::vector<uint32_t> slots;
  rows.for_each([&](int64_t id, uint32_t slot) { ids.push_back(id), slots.push_back(slot); });
  return nb::make_tuple(to_numpy(std::move(ids)), to_numpy(std::move(slots)));
}

using FeatureTuple = std::tuple<int, int>;  // table, pooling

void lookup(const std::vector<std::shared_ptr<FrozenTable>>& tables, const std::vector<FeatureTuple>& layout,
            const std::vector<IdsTuple>& ids, const std::vector<RowsTuple>& out) {
  const std::vector<FeatureIds> features = checked_features(ids);
  const std::vector<OutputRows> rows = output_rows(out);
  std::vector<Feature> wanted;
  for (const auto& [table, pooling] : layout) wanted.push_back({table, static_cast<Pooling>(pooling)});
  std::vector<const FrozenTable*> pointers;
  for (const auto& table : tables) pointers.push_back(table.get());
  nb::gil_scoped_release release;
  frozen_lookup(pointers, wanted, features, rows);
}

}  // namespace

void init_frozen(nb::module_& m) {
  m.def("frozen_rows", &rows, nb::arg("values"), nb::arg("dim"), nb::arg("dtype"));
  m.def("frozen_index", &index_of, nb::arg("ids"), nb::arg("removed"));
  m.def("frozen_footer", &footer, nb::arg("num_rows"), nb::arg("num_removed"), nb::arg("dim"), nb::arg("dtype"));
  nb::class_<FrozenRows>(m, "FrozenRows")
      .def(nb::init<const std::string&>(), nb::arg("path"))
      .def("entries", &entries)
      .def_prop_ro("dim", &FrozenRows::dim)
      .def_prop_ro("num_rows", &FrozenRows::num_rows)
      .def_prop_ro("num_removed", &FrozenRows::num_removed)
      .def_prop_ro("num_bytes", &FrozenRows::num_bytes);
  nb::class_<FrozenTable>(m, "FrozenTable")
      .def(
          "__init__",
          [](FrozenTable* at, std::vector<std::shared_ptr<FrozenRows>> layers, const TableConfig& config) {
            const FrozenTable::Absent absent{config.admission.kind == AdmitKind::kAll, config.default_value,
                                             config.init, table_key(config.seed, config.name_hash)};
            new (at) FrozenTable(std::move(layers), config.dim, absent);
          },
          nb::arg("layers"), nb::arg("config"))
      .def("find", &find, nb::arg("ids"))
      .def_prop_ro("dim", &FrozenTable::dim);
  m.def("frozen_lookup", &lookup, nb::arg("tables"), nb::arg("features"), nb::arg("ids"), nb::arg("out"));
}
