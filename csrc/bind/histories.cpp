// SPDX-License-Identifier: Apache-2.0
// Python face of histories: plain arrays in, plain arrays out. hotbed/data/histories checks and names them.
#include "core/histories.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "arrays.h"
#include "core/hash.h"

namespace nb = nanobind;
using namespace hotbed;

namespace {

using Rows = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(std::string("histories: ") + what + " do not fit the other arrays");
}

bool are_offsets(const Input<int64_t>& offsets, size_t num_values) {
  if (!offsets.size() || offsets(0) != 0 || offsets(offsets.size() - 1) != static_cast<int64_t>(num_values))
    return false;
  for (size_t i = 1; i < offsets.size(); i++)
    if (offsets(i) < offsets(i - 1)) return false;
  return true;
}

size_t width_of(size_t lanes) { return kHeadLanes + kRowEntries * lanes; }

nb::tuple see(int64_t length, int64_t within, int64_t keeps, const Input<int64_t>& keys, const Input<int64_t>& times,
              const Input<int64_t>& newest, const Input<int64_t>& known, const Input<uint8_t>& leaves,
              const Input<int64_t>& offsets, const Input<int64_t>& stored) {
  const size_t n = keys.size();
  check(times.size() == n && newest.size() == n && known.size() == n && leaves.size() == n, "columns of rows");
  check(are_offsets(offsets, stored.size()), "offsets");
  const auto num_keys = static_cast<int64_t>(offsets.size()) - 1;
  for (size_t i = 0; i < n; i++) check(keys(i) >= -1 && keys(i) < num_keys, "numbers of keys");
  SeenEntries seen;
  {
    nb::gil_scoped_release release;
    const HistoryRule rule{static_cast<size_t>(length), within, keeps};
    const HistoryRows rows{n, keys.data(), times.data(), newest.data(), known.data(), leaves.data()};
    seen = see_entries(rule, rows, static_cast<size_t>(num_keys), offsets.data(), stored.data());
  }
  return nb::make_tuple(to_numpy(std::move(seen.offsets)), to_numpy(std::move(seen.entries)),
                        to_numpy(std::move(seen.dropped)), to_numpy(std::move(seen.last)));
}

Output<int64_t> ids(const Input<int64_t>& keys, const Input<int64_t>& serials, const Input<int64_t>& numbers) {
  check(serials.size() == keys.size() && numbers.size() == keys.size(), "serials and numbers");
  std::vector<int64_t> out(keys.size());
  for (size_t i = 0; i < out.size(); i++)
    out[i] = older_id(static_cast<int>(keys(i)), static_cast<uint32_t>(serials(i)), static_cast<uint32_t>(numbers(i)));
  return to_numpy(std::move(out));
}

nb::tuple rows(const Input<int64_t>& keys, const Input<int32_t>& newest, size_t lanes) {
  check(newest.size() == keys.size() * width_of(lanes), "newest rows");
  OlderRows found = older_rows(keys.data(), newest.data(), keys.size(), lanes);
  return nb::make_tuple(to_numpy(std::move(found.counts)), to_numpy(std::move(found.ids)));
}

nb::tuple stored(const Input<int32_t>& newest, const Input<int64_t>& counts, const Input<int32_t>& older,
                 size_t lanes) {
  OlderRows found{to_vector(counts), {}};
  int64_t total = 0;
  for (const int64_t count : found.counts) total += count;
  check(newest.size() == counts.size() * width_of(lanes), "newest rows");
  check(older.size() == static_cast<size_t>(total) * kRowEntries * lanes, "older rows");
  StoredEntries out = stored_entries(newest.data(), found, older.data(), lanes);
  return nb::make_tuple(to_numpy(std::move(out.offsets)), to_numpy(std::move(out.entries)),
                        to_numpy(std::move(out.places)));
}

nb::tuple add(Rows newest, size_t lanes, const Input<int64_t>& offsets, const Input<int32_t>& entries,
              const Input<int64_t>& dropped, bool sums) {
  check(are_offsets(offsets, entries.size() / lanes), "offsets");
  const size_t num_keys = offsets.size() - 1;
  check(newest.size() == num_keys * width_of(lanes) && dropped.size() == num_keys, "newest rows");
  ChangedRows out = add_entries(newest.data(), num_keys, lanes, offsets.data(), entries.data(), dropped.data(), sums);
  return nb::make_tuple(to_numpy(std::move(out.keys)), to_numpy(std::move(out.numbers)), to_numpy(std::move(out.rows)),
                        to_numpy(std::move(out.gone_keys)), to_numpy(std::move(out.gone_numbers)));
}

}  // namespace

void init_histories(nb::module_& m) {
  m.attr("ROW_ENTRIES") = kRowEntries;
  m.attr("HEAD_LANES") = kHeadLanes;
  m.def("see_entries", &see, nb::arg("length"), nb::arg("within"), nb::arg("keeps"), nb::arg("keys"), nb::arg("times"),
        nb::arg("newest"), nb::arg("known"), nb::arg("leaves"), nb::arg("offsets"), nb::arg("stored"));
  m.def("older_ids", &ids, nb::arg("partitions"), nb::arg("serials"), nb::arg("numbers"));
  m.def("older_rows", &rows, nb::arg("keys"), nb::arg("newest"), nb::arg("lanes"));
  m.def("stored_entries", &stored, nb::arg("newest"), nb::arg("counts"), nb::arg("older"), nb::arg("lanes"));
  m.def("add_entries", &add, nb::arg("newest"), nb::arg("lanes"), nb::arg("offsets"), nb::arg("entries"),
        nb::arg("dropped"), nb::kw_only(), nb::arg("sums"));
}
