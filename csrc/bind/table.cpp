// SPDX-License-Identifier: Apache-2.0
#include "core/table.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "arrays.h"
#include "core/step.h"
#include "core/thread_pool.h"
#include "names.h"
#include "statistics.h"

using namespace hotbed;

namespace {

using Floats = std::vector<float>;

// Rows as a dict of flat arrays; columns the table does not keep are absent. "sizes": how many each partition has.
nb::dict to_dict(ExportedRows rows, const RowLayout& fields) {
  nb::dict out;
  out["id"] = to_numpy(std::move(rows.ids));
  out["value"] = to_numpy(std::move(rows.values));
  if (fields.state_width) out["state"] = to_numpy(std::move(rows.state));
  if (fields.has_seen) out["last_seen"] = to_numpy(std::move(rows.seen));
  if (fields.has_count) out["count"] = to_numpy(std::move(rows.counts));
  if (fields.has_updated) out["updated"] = to_numpy(std::move(rows.updated));
  if (fields.has_score) out["score"] = to_numpy(std::move(rows.scores));
  out["sizes"] = rows.sizes;
  out["read_bytes"] = rows.read_bytes;
  return out;
}

nb::dict export_rows(Table& table, const std::vector<int>& partitions) {
  ExportedRows rows;
  {
    nb::gil_scoped_release release;
    rows = table.export_rows(partitions);
  }
  return to_dict(std::move(rows), table.layout());
}

// Sweeps what has expired, catches up what idles, then takes the snapshot; returns its rows (changes: an upper bound).
uint64_t begin_snapshot(Table& table, bool changes) {
  nb::gil_scoped_release release;
  std::lock_guard lock(table.mutex());
  ThreadPool::instance().run(kPartitions, [&](int p) { table.sweep(p, p + 1); });
  catch_up_all({&table});
  return table.begin_snapshot(changes);
}

nb::dict snapshot_rows(Table& table, const std::vector<int>& partitions) {
  ExportedRows rows;
  {
    nb::gil_scoped_release release;
    rows = table.snapshot_rows(partitions);
  }
  return to_dict(std::move(rows), table.layout());
}

void end_snapshot(Table& table, bool saved) {
  nb::gil_scoped_release release;
  std::lock_guard lock(table.mutex());
  table.end_snapshot(saved);
}

// Ids removed between the last snapshot and this one, each once.
nb::object snapshot_removed(Table& table, int partition) {
  std::vector<int64_t> ids = table.snapshot_part(partition).removed;
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return nb::cast(to_numpy(std::move(ids)));
}

uint64_t remove_ids(Table& table, const Input<int64_t>& ids) {
  nb::gil_scoped_release release;
  std::lock_guard lock(table.mutex());
  uint64_t removed = 0;
  for (size_t i = 0; i < ids.size(); i++) removed += table.remove(ids.data()[i]);
  return removed;
}

template <class T>
Column<T> column(const nb::dict& rows, const char* name) {
  if (!rows.contains(name)) return {};
  const auto array = nb::cast<Input<T>>(rows[name]);
  return {array.data(), array.data() + array.size()};
}

void load_rows(Table& table, const nb::dict& in) {
  ExportedRows rows;
  rows.ids = column<int64_t>(in, "id");
  rows.values = column<float>(in, "value");
  rows.state = column<float>(in, "state");
  rows.seen = column<int64_t>(in, "last_seen");
  rows.counts = column<uint32_t>(in, "count");
  rows.missed = column<uint32_t>(in, "missed");
  rows.scores = column<double>(in, "score");
  nb::gil_scoped_release release;
  const std::unique_ptr<Frames::Room> room = table.frames().make_room(rows.ids.size());
  std::lock_guard lock(table.mutex());
  table.load_rows(rows, room.get());
}

// Fills out[n, dim] with the rows of slots; -1 gives the default vector.
void gather(Table& table, const Input<int64_t>& slots, uint64_t out) {
  nb::gil_scoped_release release;
  const auto dim = static_cast<size_t>(table.config().dim), n = static_cast<size_t>(slots.size());
  constexpr size_t kBlock = 4096;
  std::vector<ColdRows> cold((n + kBlock - 1) / kBlock);
  const auto rows_of = [&](size_t block) { return reinterpret_cast<float*>(out) + block * kBlock * dim; };
  const auto each = [&](auto&& work) {
    ThreadPool::instance().run(static_cast<int>(cold.size()), [&](int block) { work(static_cast<size_t>(block)); });
  };
  {
    table.mutex().lock_last();
    std::lock_guard lock(table.mutex(), std::adopt_lock);
    each([&](size_t b) {
      const size_t first = b * kBlock;
      cold[b] = table.read_slots(slots.data() + first, std::min(kBlock, n - first), rows_of(b));
    });
  }
  each([&](size_t b) { table.finish_aside(cold[b], rows_of(b)); });
}

// Removes expired rows in the given range of partitions; the watermark moves first, so expiry is logical at once.
uint64_t evict(Table& table, int64_t now, int first, int last) {
  nb::gil_scoped_release release;
  std::lock_guard lock(table.mutex());
  table.begin_evict(now);
  std::atomic<uint64_t> removed{0};
  const int pieces = last - first;
  ThreadPool::instance().run(pieces, [&](int i) { removed += table.sweep(first + i, first + i + 1); });
  return removed.load();
}

void catch_up(Table& table) {
  nb::gil_scoped_release release;
  std::lock_guard lock(table.mutex());
  catch_up_all({&table});
}

int num_read_together(Table& table) {
  nb::gil_scoped_release release;
  std::lock_guard lock(table.mutex());
  return table.num_read_together();
}

uint64_t size(Table& table) {
  std::lock_guard lock(table.mutex());
  return table.size();
}

nb::dict stats(Table& table) {
  std::lock_guard lock(table.mutex());
  return statistics_of(table.stats());
}

// Of a table on a disk; empty for others.
nb::dict tier_stats(Table& table) {
  nb::dict out;
  const Residency* residency = table.frames().residency();
  if (!residency) return out;
  ResidencyStats stats;
  {
    nb::gil_scoped_release release;
    std::lock_guard lock(table.mutex());
    stats = residency->stats();
  }
  const RowLayout& fields = table.layout();
  out["hits"] = stats.hits, out["misses"] = stats.misses, out["fetched"] = stats.fetched;
  out["waited_seconds"] = static_cast<double>(stats.wait_ns) * 1e-9;
  out["resident"] = stats.num_frames, out["ram_rows"] = residency->num_frames();
  out["row_bytes"] = fields.value_bytes + fields.state_bytes, out["memory_bytes"] = stats.memory_bytes;
  out["engine"] = stats.engine;
  out["num_reads"] = stats.store.num_read, out["put_bytes"] = stats.store.put_bytes;
  out["written_bytes"] = stats.store.written_bytes, out["file_bytes"] = stats.store.file_bytes;
  out["live_bytes"] = stats.store.live_bytes, out["waiting_extents"] = stats.store.num_waiting;
  return out;
}

// Counts of the ids that wait for admission to one partition; null = every id is admitted.
nb::dict to_dict(const Candidates* candidates) {
  std::vector<int64_t> ids, seen;
  std::vector<uint32_t> counts;
  if (candidates)
    for (const Candidate& c : candidates->entries())
      ids.push_back(c.id), counts.push_back(c.count), seen.push_back(c.seen);
  nb::dict out;
  out["id"] = to_numpy(std::move(ids));
  out["count"] = to_numpy(std::move(counts));
  out["last_seen"] = to_numpy(std::move(seen));
  return out;
}

void load_candidates(Table& table, const Input<int64_t>& ids, const Input<uint32_t>& counts,
                     const Input<int64_t>& seen) {
  std::vector<Candidate> all(ids.size());
  for (size_t i = 0; i < ids.size(); i++) all[i] = {ids.data()[i], counts.data()[i], seen.data()[i]};
  table.load_candidates(all);
}

// The generations of one partition's sketch, the younger one first: (bits, newest, words).
nb::list sketch_of(const Candidates* candidates) {
  nb::list all;
  if (!candidates) return all;
  for (SketchPart& part : candidates->parts())
    all.append(nb::make_tuple(part.bits, part.newest, to_numpy(std::move(part.words))));
  return all;
}

auto plain_sketch_of(const Candidates* candidates) {
  return to_numpy(candidates ? std::vector<uint32_t>(candidates->plain()) : std::vector<uint32_t>());
}

using Runs = std::vector<std::tuple<uint64_t, double>>;

Runs rates(const Table& table) {
  Runs runs;
  for (const auto& run : table.rates().runs()) runs.emplace_back(run.first_step, run.lr);
  return runs;
}

void load_scalars(Table& table, uint64_t step, int64_t watermark, uint64_t calls, const Runs& runs) {
  std::vector<RateHistory::Run> history;
  for (const auto& [first_step, lr] : runs) history.push_back({first_step, lr});
  nb::gil_scoped_release release;
  for (int p = 0; step != table.step() && p < kPartitions; p++) {
    const uint64_t num_behind = table.num_behind(p);
    if (num_behind == 0) continue;
    const std::unique_ptr<Frames::Room> room = table.frames().make_room(num_behind);
    const std::lock_guard lock(table.mutex());
    table.settle(p, room.get());
  }
  const std::lock_guard lock(table.mutex());
  table.load_scalars(step, watermark, calls, std::move(history));
}

void init_values(nb::module_& m) {
  nb::class_<Rule>(m, "Rule").def(
      "__init__",
      [](Rule* at, const std::string& name, std::string_view scope, const nb::dict& fields) {
        Rule rule(name);
        rule.scope = value_of(kScopes, "rule scope", scope);
        for (const auto& [field, value] : fields) rule[nb::cast<std::string>(field)] = nb::cast<double>(value);
        new (at) Rule(rule);
      },
      nb::arg("name"), nb::kw_only(), nb::arg("scope"), nb::arg("fields"));
  nb::class_<Admission>(m, "Admission")
      .def(nb::init<>())
      .def_prop_rw(
          "kind", [](const Admission& a) { return name_of(kAdmissions, a.kind); },
          [](Admission& a, std::string_view kind) { a.kind = value_of(kAdmissions, "admission", kind); })
      .def_rw("min_count", &Admission::min_count)
      .def_rw("coefficient", &Admission::coefficient)
      .def_rw("once_a_batch", &Admission::once_a_batch)
      .def_rw("probability", &Admission::probability)
      .def_rw("admission_bytes", &Admission::admission_bytes)
      .def_rw("sketch_bytes", &Admission::sketch_bytes)
      .def_rw("max_candidates", &Admission::max_candidates)
      .def_rw("expire_after", &Admission::expire_after);
  nb::class_<Eviction>(m, "Eviction")
      .def(nb::init<>())
      .def_rw("ttl", &Eviction::ttl)
      .def_rw("max_rows", &Eviction::max_rows)
      .def_rw("by_count", &Eviction::by_count)
      .def_rw("half_life", &Eviction::half_life);
  nb::class_<TableConfig>(m, "TableConfig")
      .def(nb::init<>())
      .def_rw("name", &TableConfig::name)
      .def_rw("name_hash", &TableConfig::name_hash)
      .def_rw("seed", &TableConfig::seed)
      .def_rw("dim", &TableConfig::dim)
      .def_prop_rw(
          "dtype", [](const TableConfig& c) { return name_of(kDtypes, c.dtype); },
          [](TableConfig& c, std::string_view dtype) { c.dtype = value_of(kDtypes, "dtype", dtype); })
      .def_prop_rw(
          "tier", [](const TableConfig& c) { return name_of(kTiers, c.tier); },
          [](TableConfig& c, std::string_view tier) { c.tier = value_of(kTiers, "tier", tier); })
      .def_prop_rw(
          "folder", [](const TableConfig& c) { return c.disk.folder; },
          [](TableConfig& c, const std::string& folder) { c.disk.folder = folder; })
      .def_prop_rw(
          "ram_rows", [](const TableConfig& c) { return c.disk.ram_rows; },
          [](TableConfig& c, uint32_t rows) { c.disk.ram_rows = rows; })
      .def_prop_rw(
          "engine", [](const TableConfig& c) { return name_of(kEngines, c.disk.engine); },
          [](TableConfig& c, std::string_view engine) { c.disk.engine = value_of(kEngines, "engine", engine); })
      .def_rw("rule", &TableConfig::rule)
      .def_prop_rw(
          "init_kind", [](const TableConfig& c) { return name_of(kInits, c.init.kind); },
          [](TableConfig& c, std::string_view kind) { c.init.kind = value_of(kInits, "init", kind); })
      .def_prop_rw(
          "init_scale", [](const TableConfig& c) { return c.init.scale; },
          [](TableConfig& c, double s) { c.init.scale = s; })
      .def_rw("admission", &TableConfig::admission)
      .def_rw("eviction", &TableConfig::eviction)
      .def_rw("keep_count", &TableConfig::keep_count)
      .def_rw("keep_seen", &TableConfig::keep_seen)
      .def_rw("counts_steps", &TableConfig::counts_steps)
      .def_prop_rw(
          "rows_name", [](const TableConfig& c) { return c.disk.rows_name; },
          [](TableConfig& c, const std::string& name) { c.disk.rows_name = name; })
      .def_rw("default_value", &TableConfig::default_value)
      .def_rw("always_default", &TableConfig::always_default);
}

}  // namespace

void init_table(nb::module_& m) {
  init_values(m);
  m.def(
      "hash_ids",
      [](const Input<int64_t>& ids) {
        std::vector<uint64_t> hashes(ids.size());
        for (size_t i = 0; i < ids.size(); i++) hashes[i] = hash_id(ids.data()[i]);
        return to_numpy(std::move(hashes));
      },
      nb::arg("ids"));
  nb::class_<Table>(m, "Table")
      .def(nb::init<TableConfig>(), nb::arg("config"))
      .def("gather", &gather, nb::arg("slots"), nb::arg("out"))
      .def("evict", &evict, nb::arg("now"), nb::arg("first"), nb::arg("last"))
      .def("catch_up", &catch_up)
      .def("size", &size)
      .def("stats", &stats)
      .def("tier_stats", &tier_stats)
      .def("load_counters", &Table::load_counters, nb::arg("admitted"), nb::arg("refused"), nb::arg("evicted"),
           nb::arg("reasons"))
      .def("export_rows", &export_rows, nb::arg("partitions"))
      .def("num_read_together", &num_read_together)
      .def("load_rows", &load_rows, nb::arg("rows"))
      .def("begin_snapshot", &begin_snapshot, nb::kw_only(), nb::arg("changes"))
      .def("end_snapshot", &end_snapshot, nb::kw_only(), nb::arg("saved"))
      .def_prop_ro("has_snapshot", &Table::has_snapshot)
      .def("snapshot_rows", &snapshot_rows, nb::arg("partitions"))
      .def("snapshot_removed", &snapshot_removed, nb::arg("partition"))
      .def(
          "snapshot_candidates", [](Table& t, int p) { return to_dict(t.snapshot_part(p).candidates.get()); },
          nb::arg("partition"))
      .def(
          "snapshot_sketch", [](Table& t, int p) { return sketch_of(t.snapshot_part(p).candidates.get()); },
          nb::arg("partition"))
      .def(
          "snapshot_plain_sketch", [](Table& t, int p) { return plain_sketch_of(t.snapshot_part(p).candidates.get()); },
          nb::arg("partition"))
      .def(
          "track",
          [](Table& t, bool on, bool saved) {
            const std::lock_guard lock(t.mutex());
            t.track(on, saved);
          },
          nb::arg("on"), nb::kw_only(), nb::arg("saved"))
      .def(
          "freeze", [](Table& t, std::string_view frozen) { t.freeze(value_of(kFrozen, "frozen", frozen)); },
          nb::arg("frozen"))
      .def(
          "set_default",
          [](Table& t, float value, bool always) {
            const std::lock_guard lock(t.mutex());
            t.set_default(value, always);
          },
          nb::arg("value"), nb::arg("always"))
      .def(
          "set_min_count",
          [](Table& t, uint64_t count) {
            const std::lock_guard lock(t.mutex());
            t.set_min_count(count);
          },
          nb::arg("count"))
      .def("remove", &remove_ids, nb::arg("ids"))
      .def(
          "candidates", [](const Table& t, int p) { return to_dict(t.candidates(p)); }, nb::arg("partition"))
      .def("load_candidates", &load_candidates, nb::arg("ids"), nb::arg("counts"), nb::arg("last_seen"))
      .def(
          "sketch", [](const Table& t, int p) { return sketch_of(t.candidates(p)); }, nb::arg("partition"))
      .def(
          "load_sketch",
          [](Table& t, int p, size_t generation, int bits, int64_t newest, const Input<uint32_t>& words) {
            t.load_sketch(p, generation, {bits, newest, to_vector(words)});
          },
          nb::arg("partition"), nb::arg("generation"), nb::arg("bits"), nb::arg("newest"), nb::arg("words"))
      .def(
          "plain_sketch", [](const Table& t, int p) { return plain_sketch_of(t.candidates(p)); }, nb::arg("partition"))
      .def(
          "load_plain_sketch", [](Table& t, int p, const Input<uint32_t>& c) { t.load_plain_sketch(p, to_vector(c)); },
          nb::arg("partition"), nb::arg("counters"))
      .def_prop_ro("num_sketched", &Table::num_sketched)
      .def("rates", &rates)
      .def("load_scalars", &load_scalars, nb::arg("step"), nb::arg("watermark"), nb::arg("calls"), nb::arg("rates"))
      .def_prop_ro("step", &Table::step)
      .def_prop_ro("calls", &Table::calls)
      .def_prop_ro("watermark", &Table::watermark)
      .def_prop_ro("num_slots", &Table::num_slots)
      .def_prop_ro("row_bytes", [](const Table& t) { return t.layout().num_bytes(); })
      .def_prop_ro("state_width", [](const Table& t) { return t.layout().state_width; });
}
