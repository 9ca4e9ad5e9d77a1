// SPDX-License-Identifier: Apache-2.0
#include "core/row_cache.h"

#include <nanobind/stl/shared_ptr.h>

#include "arrays.h"
#include "features.h"
#include "layout.h"

using namespace hotbed;

namespace {

using Row = Input<float>;
using Ids = Input<int64_t>;

// The memory of a thread's requests.
CacheRequest& spare() {
  thread_local CacheRequest request;
  return request;
}

// A request with ids that the cache does not hold.
class Missed {
 public:
  Missed(std::shared_ptr<RowCache> cache, const FeatureLayout& layout, HeldFeatures held, uint64_t epoch,
         int64_t samples)
      : cache_(std::move(cache)),
        layout_(layout),
        held_(std::move(held)),
        request_(std::move(spare())),
        epoch_(epoch),
        num_samples_(samples),
        missing_(request_.missing(cache_->num_tables())) {}
  Missed(Missed&&) = default;
  Missed(const Missed&) = delete;

  // Table and ids, of each table with missing ids.
  nb::list missing() const {
    nb::list out;
    for (size_t table = 0; table < missing_.size(); table++)
      if (!missing_[table].empty()) out.append(nb::make_tuple(table, to_numpy(std::vector<int64_t>(missing_[table]))));
    return out;
  }

  // `rows`: [n * dim] of each table in `missing`, in its order; keep: for later requests.
  nb::tuple pool(const std::vector<Row>& rows, bool keep) {
    std::vector<const float*> by_table(missing_.size(), nullptr);
    size_t given = 0;
    for (size_t table = 0; table < missing_.size(); table++) {
      if (missing_[table].empty()) continue;
      const size_t wanted = missing_[table].size() * static_cast<size_t>(cache_->dim(static_cast<uint32_t>(table)));
      if (given == rows.size() || rows[given].size() != wanted)
        throw std::invalid_argument("cache: the rows of the missing ids do not fit table " + std::to_string(table) +
                                    ". Give [missing ids * dim] floats of each table in `missing`.");
      by_table[table] = rows[given++].data();
    }
    const PooledArrays out = layout_.arrays(held_.features(), num_samples_);
    {
      nb::gil_scoped_release release;
      request_.fill(by_table, *cache_);
      if (keep) request_.keep(*cache_, epoch_);
      request_.pool(*cache_, out.rows, num_samples_);
      spare() = std::move(request_);
    }
    return out.tuple();
  }

 private:
  std::shared_ptr<RowCache> cache_;
  FeatureLayout layout_;
  HeldFeatures held_;
  CacheRequest request_;
  uint64_t epoch_;
  int64_t num_samples_;
  std::vector<std::vector<int64_t>> missing_;
};

// A model's features over a cache, for requests of one epoch.
class CachedLookup {
 public:
  CachedLookup(std::shared_ptr<RowCache> cache, const std::vector<FeatureTuple>& features, uint64_t epoch)
      : cache_(std::move(cache)), layout_(features, dims(*cache_)), epoch_(epoch) {}

  nb::object operator()(const nb::object& ids, int64_t num_samples) const {
    HeldFeatures held(ids, layout_.names(), num_samples);
    {
      nb::gil_scoped_release release;
      spare().find(*cache_, epoch_, layout_.features(), held.features());
    }
    if (!spare().whole()) return nb::cast(Missed(cache_, layout_, std::move(held), epoch_, num_samples));
    const PooledArrays out = layout_.arrays(held.features(), num_samples);
    {
      nb::gil_scoped_release release;
      spare().pool(*cache_, out.rows, num_samples);
    }
    return out.tuple();
  }

 private:
  static std::vector<int> dims(const RowCache& cache) {
    std::vector<int> out;
    for (int table = 0; table < cache.num_tables(); table++) out.push_back(cache.dim(static_cast<uint32_t>(table)));
    return out;
  }

  std::shared_ptr<RowCache> cache_;
  FeatureLayout layout_;
  uint64_t epoch_;
};

[[noreturn]] void throw_no_table(const RowCache& cache, int64_t table) {
  throw std::out_of_range("cache: tables are numbered from 0 to " + std::to_string(cache.num_tables() - 1) + ", got " +
                          std::to_string(table) + ". Give the number of a table.");
}

uint32_t checked_table(const RowCache& cache, int table) {
  if (table < 0 || table >= cache.num_tables()) throw_no_table(cache, table);
  return static_cast<uint32_t>(table);
}

// Rows of ids that are expected to be asked for, whatever the policy says of them.
void preload(RowCache& cache, uint64_t epoch, int table, const Ids& ids, const Row& rows) {
  const uint32_t which = checked_table(cache, table);
  const size_t dim = static_cast<size_t>(cache.dim(which));
  if (rows.size() != ids.size() * dim)
    throw std::invalid_argument("cache: each id must have one row of dim " + std::to_string(dim) + ", got " +
                                std::to_string(rows.size()) + " floats for " + std::to_string(ids.size()) +
                                " ids. Give [ids * dim] floats.");
  nb::gil_scoped_release release;
  std::vector<RowCache::Seek> seeks;
  for (size_t i = 0; i < ids.size(); i++) {
    const int64_t id = ids.data()[i];
    seeks.push_back({id, RowCache::hash_of(hash_id(id), which), i * dim, which, false});
  }
  cache.keep(epoch, seeks, rows.data(), true);
}

// `changed`: ids by table; none: all.
void advance(RowCache& cache, uint64_t epoch, const std::vector<Ids>& changed, bool all) {
  if (changed.size() > static_cast<size_t>(cache.num_tables()))
    throw_no_table(cache, static_cast<int64_t>(changed.size()) - 1);
  std::vector<std::vector<int64_t>> ids;
  for (const Ids& one : changed) ids.push_back(to_vector(one));
  nb::gil_scoped_release release;
  cache.advance(epoch, ids, all);
}

}  // namespace

void init_row_cache(nb::module_& m) {
  nb::class_<RowCache>(m, "RowCache")
      .def(
          "__init__",
          [](RowCache* at, std::vector<int> dims, uint64_t max_bytes, std::string_view policy) {
            new (at) RowCache(std::move(dims), max_bytes, value_of(kCachePolicies, "policy", policy));
          },
          nb::arg("dims"), nb::arg("max_bytes"), nb::arg("policy"))
      .def("preload", &preload, nb::arg("epoch"), nb::arg("table"), nb::arg("ids"), nb::arg("rows"))
      .def("advance", &advance, nb::arg("epoch"), nb::arg("changed"), nb::kw_only(), nb::arg("all"))
      .def(
          "row_bytes", [](const RowCache& cache, int table) { return cache.row_bytes(checked_table(cache, table)); },
          nb::arg("table"))
      .def_prop_ro("num_rows", &RowCache::num_rows, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("num_bytes", &RowCache::num_bytes, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("hits", &RowCache::hits)
      .def_prop_ro("misses", &RowCache::misses);
  nb::class_<Missed>(m, "Missed")
      .def("missing", &Missed::missing, nb::sig("def missing(self) -> list[tuple[int, NDArray[numpy.int64]]]"))
      .def("pool", &Missed::pool, nb::arg("rows"), nb::kw_only(), nb::arg("keep"));
  nb::class_<CachedLookup>(m, "CachedLookup")
      .def(nb::init<std::shared_ptr<RowCache>, const std::vector<FeatureTuple>&, uint64_t>(), nb::arg("cache"),
           nb::arg("features"), nb::arg("epoch"))
      .def("__call__", &CachedLookup::operator(), nb::arg("ids"), nb::arg("num_samples"),
           nb::sig("def __call__(self, ids: object, num_samples: int) -> tuple | Missed"));
}
