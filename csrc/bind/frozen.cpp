// SPDX-License-Identifier: Apache-2.0
#include "core/frozen.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>

#include "arrays.h"
#include "core/memory.h"
#include "features.h"
#include "layout.h"

using namespace hotbed;

namespace {

nb::object rows(const Input<float>& values, int dim, std::string_view dtype) {
  const FrozenDtype kind = value_of(kFrozenDtypes, "dtype", dtype);
  std::vector<uint8_t> out;
  {
    nb::gil_scoped_release release;
    const size_t num_rows = dim > 0 ? values.size() / static_cast<size_t>(dim) : 0;
    out = frozen_rows(values.data(), num_rows, dim, kind);
  }
  return nb::cast(to_numpy(std::move(out)));
}

nb::object index_of(const Input<int64_t>& ids, const Input<int64_t>& removed) {
  auto held = std::make_unique<std::vector<Bucket>>();
  {
    nb::gil_scoped_release release;
    *held = frozen_index(ids.data(), ids.size(), removed.data(), removed.size());
  }
  uint8_t* bytes = reinterpret_cast<uint8_t*>(held->data());
  const size_t num_bytes = held->size() * sizeof(Bucket);
  nb::capsule owner(held.get(), [](void* p) noexcept { delete static_cast<std::vector<Bucket>*>(p); });
  held.release();
  return nb::cast(Output<uint8_t>(bytes, {num_bytes}, owner));
}

nb::bytes footer(uint64_t num_rows, uint64_t num_removed, int dim, std::string_view dtype) {
  const FrozenFooter bytes = frozen_footer(num_rows, num_removed, dim, value_of(kFrozenDtypes, "dtype", dtype));
  return nb::bytes(&bytes, sizeof bytes);
}

// Rows and whether there is one, of each id.
nb::tuple find(const FrozenTable& table, const Input<int64_t>& ids) {
  const size_t dim = static_cast<size_t>(table.dim());
  std::vector<float> out(ids.size() * dim);
  std::vector<uint8_t> found(ids.size());
  {
    nb::gil_scoped_release release;
    FrozenSearch search;
    for (size_t i = 0; i < ids.size(); i++) search.add(table, ids.data()[i]);
    search.run();
    for (size_t i = 0; i < ids.size(); i++) {
      std::copy_n(search.rows()[i], dim, out.data() + i * dim);
      found[i] = search.found(i);
    }
  }
  return nb::make_tuple(to_numpy(std::move(out)), to_numpy(std::move(found)));
}

// Ids with a row, and ids that were removed.
nb::tuple entries(const FrozenRows& rows) {
  std::vector<int64_t> held, removed;
  {
    nb::gil_scoped_release release;
    held.reserve(rows.num_rows()), removed.reserve(rows.num_removed());
    rows.for_each([&](int64_t id, uint32_t slot) { (slot == kRemoved ? removed : held).push_back(id); });
  }
  return nb::make_tuple(to_numpy(std::move(held)), to_numpy(std::move(removed)));
}

nb::object slots_of(const FrozenRows& rows, const Input<int64_t>& ids) {
  std::vector<int64_t> out(ids.size());
  {
    nb::gil_scoped_release release;
    rows.slots(ids.data(), ids.size(), out.data());
  }
  return nb::cast(to_numpy(std::move(out)));
}

// The rows of slots, one after the other, with NaN in the lanes of negative slots.
nb::object rows_of(const FrozenRows& rows, const Input<int64_t>& slots) {
  const auto is_beyond = [&](int64_t slot) { return slot >= static_cast<int64_t>(rows.num_rows()); };
  if (std::any_of(slots.data(), slots.data() + slots.size(), is_beyond))
    throw nb::index_error("a slot beyond the last row");
  std::vector<float> out;
  {
    nb::gil_scoped_release release;
    out.assign(slots.size() * static_cast<size_t>(rows.dim()), std::numeric_limits<float>::quiet_NaN());
    rows.read_all(slots.data(), slots.size(), out.data());
  }
  return nb::cast(to_numpy(std::move(out)));
}

// The features of a model over its mapped tables: their ids come as a mapping from names to Ids.
class Lookup {
 public:
  Lookup(std::vector<std::shared_ptr<FrozenTable>> tables, const std::vector<FeatureTuple>& features)
      : held_(std::move(tables)), layout_(features, dims(held_)) {
    for (const auto& table : held_) tables_.push_back(table.get());
  }

  nb::tuple operator()(const nb::object& ids, int64_t num_samples) const {
    const HeldFeatures held(ids, layout_.names(), num_samples);
    const PooledArrays out = layout_.arrays(held.features(), num_samples);
    {
      nb::gil_scoped_release release;
      frozen_lookup(tables_, layout_.features(), held.features(), out.rows, num_samples);
    }
    return out.tuple();
  }

 private:
  static std::vector<int> dims(const std::vector<std::shared_ptr<FrozenTable>>& tables) {
    std::vector<int> out;
    for (const auto& table : tables) out.push_back(table->dim());
    return out;
  }

  std::vector<std::shared_ptr<FrozenTable>> held_;
  std::vector<const FrozenTable*> tables_;
  FeatureLayout layout_;
};

}  // namespace

void init_frozen(nb::module_& m) {
  m.def("frozen_rows", &rows, nb::arg("values"), nb::arg("dim"), nb::arg("dtype"));
  m.def("frozen_index", &index_of, nb::arg("ids"), nb::arg("removed"));
  m.def("frozen_footer", &footer, nb::arg("num_rows"), nb::arg("num_removed"), nb::arg("dim"), nb::arg("dtype"));
  m.def("return_free_memory", &return_free_memory, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<FrozenRows>(m, "FrozenRows")
      .def(nb::init<const std::string&>(), nb::arg("path"))
      .def("entries", &entries)
      .def("slots", &slots_of, nb::arg("ids"))
      .def("rows", &rows_of, nb::arg("slots"))
      .def_prop_ro("dim", &FrozenRows::dim)
      .def_prop_ro("num_rows", &FrozenRows::num_rows)
      .def_prop_ro("num_bytes", &FrozenRows::num_bytes);
  nb::class_<FrozenTable>(m, "FrozenTable")
      .def(
          "__init__",
          [](FrozenTable* at, std::vector<std::shared_ptr<FrozenRows>> layers, const TableConfig& config) {
            const FrozenTable::Absent absent{config.absent_is_initial(), config.default_value, config.init,
                                             table_key(config.seed, config.name_hash)};
            new (at) FrozenTable(std::move(layers), config.dim, absent);
          },
          nb::arg("layers"), nb::arg("config"))
      .def("find", &find, nb::arg("ids"))
      .def_prop_ro("dim", &FrozenTable::dim);
  nb::class_<Lookup>(m, "FrozenLookup")
      .def(nb::init<std::vector<std::shared_ptr<FrozenTable>>, const std::vector<FeatureTuple>&>(), nb::arg("tables"),
           nb::arg("features"))
      .def("__call__", &Lookup::operator(), nb::arg("ids"), nb::arg("num_samples"));
}
