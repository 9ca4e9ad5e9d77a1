// SPDX-License-Identifier: Apache-2.0
// One embedding table: id -> slot -> row, with the policies that decide which ids have a row.
//
// WORDS. An id is any int64. Its hash decides its partition, one of 256. The index of the partition maps it to a slot,
// a number that names its row for as long as the id has one. The entry of a slot lies in the ledger: last step, count,
// time, score. Its row lies in a frame of the pool, or on a disk: frames.h knows where.
//
// UNITS. A time is microseconds of data time, or a step of the table where `counts_steps`; INT64_MIN is none. A step is
// an update, from 1 on. A vector of a row has `dim` floats in calls, whatever the dtype of the table.
//
// THE LIFE OF A ROW
//   waits    an id that is not admitted yet is a candidate: it is counted, and has no slot
//   begins   `insert` gives it a slot and an entry, and a row of initial values where it lies in a frame; else `place`
//   lives    `resolve` finds it, `admit` counts and times it, `read` reads it, `update` changes it
//   expires  `begin_evict` moves the watermark: an expired id is absent at once, and its row goes with the next `sweep`
//   goes     by a sweep, for another row in a full partition, or by `remove`; its slot rests while a plan may know it
//
// THREADS. Hold `mutex()` around every call, and for as long as rows that it returned are used, unless a line below
// says "without the mutex". With it held, calls that take a Uniques, a partition or a range of them may run beside each
// other on several threads, if their partitions differ. All others run alone.
//
// ERRORS. Nothing has changed where a call throws, except as said at the call.
//   TableFull     check_capacity (and Frames::check_batch): a batch needs more rows than there may be
//   RecordLost    a row that lies on a disk cannot be read: arrive, finish_aside, export_rows, snapshot_rows,
//   load_rows,
//                 settle, and calls that change a row whose old one a snapshot still wants
//   ForkedChild   mutex(): rows lie on a disk that belongs to the parent of this process
//   logic_error   begin_snapshot: one is open, or changes are not tracked; snapshot_rows: a partition is read twice
//   bad_alloc     reserve, load_rows: there is no memory for more rows
//
// WHERE. table.cpp: batches, reading, states. table_update.cpp: steps of the rule. eviction.cpp: rows that go.
// snapshot.cpp: changes and snapshots. map_log.cpp: taking back. parts.h calls these in order for a batch.
#pragma once

#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "admission.h"
#include "eviction.h"
#include "frames.h"
#include "id_map.h"
#include "init.h"
#include "ledger.h"
#include "memory.h"
#include "rule.h"
#include "snapshot.h"
#include "table_mutex.h"
#include "uniques.h"
#include "victims.h"

namespace hotbed {

struct TableConfig {
  std::string name;
  uint64_t name_hash = 0, seed = 0;
  int dim = 0;
  Dtype dtype = Dtype::kFloat32;
  Tier tier = Tier::kRam;
  DiskConfig disk;  // of kSsd
  Rule rule;
  Init init;
  Admission admission;
  Eviction eviction;
  bool keep_count = false, keep_seen = false;
  bool counts_steps = false;  // the clock: the table's updates, else microseconds of data time
  float default_value = 0.0f;
  bool always_default = false;  // ids without a row read `default_value`, also where every id is admitted

  bool absent_is_initial() const noexcept { return admission.kind == AdmitKind::kAll && !always_default; }
};

// The part of a table that keeps its bits: nothing, values and optimizer state, or also times, counts and the ids with
// rows.
enum class Frozen : uint8_t { kNothing, kRows, kAll };

struct ExportedRows {
  Column<int64_t> ids, seen;
  Column<float> values, state;
  Column<uint32_t> counts, updated;
  Column<double> scores;
  Column<uint32_t> missed;    // of rows to be loaded: the steps that they have still to catch up with; empty = none
  std::vector<size_t> sizes;  // of rows that were exported: how many each partition has
  uint64_t read_bytes = 0;    // of the disk, for them
  void resize(size_t n, const RowLayout& fields);  // new elements are not set
};

// `rows` are those in memory, expired ones until they are swept: asking costs nothing while they are many.
struct TableStats {
  uint64_t rows = 0, admitted = 0, refused = 0, evicted = 0, index_bytes = 0, row_bytes = 0, candidate_bytes = 0;
  EvictedRows evicted_rows{};        // those of `evicted` whose reason is known
  uint64_t sketched_partitions = 0;  // those whose counts of waiting ids are estimates
};

// Rows that are on their way to copies in memory, from the disk or to be caught up.
struct ColdRows {
  ColdRows() = default;
  ColdRows(ColdRows&&) = default;
  ColdRows& operator=(ColdRows&& other) noexcept;
  ~ColdRows();  // waits, since the reads write to `bytes`

  struct Row {
    size_t at;  // where its caller wants it
    uint32_t slot;
    uint64_t updated;  // the last step that it has seen
    uint32_t kept = Residency::kNotKept;
  };
  std::vector<Row> rows;
  std::vector<uint8_t> bytes;  // values and state, one row after another
  uint64_t step = 0;           // that they are caught up to
  std::shared_ptr<ReadBatch> batch;
};

class Table {
 public:
  explicit Table(TableConfig config);

  // --- 1. What it is. May be asked without the mutex; what group 2 changes may not.
  const TableConfig& config() const noexcept { return config_; }
  const RowLayout& layout() const noexcept { return layout_; }
  uint64_t key() const noexcept { return key_; }  // seeds initial rows, draws and noise
  Scope scope() const noexcept { return config_.rule.scope; }
  bool admits_all() const noexcept { return config_.admission.kind == AdmitKind::kAll; }
  bool capped() const noexcept { return cap_ != 0; }
  // What a batch has to bring of its ids. `marked`: some of its samples are not counted, which times alone do not say.
  bool wants_counts(bool marked) const noexcept {
    return !admits_all() || layout().has_count || (marked && layout().has_seen);
  }
  bool wants_times() const noexcept {
    return !config_.counts_steps && (layout().has_seen || config_.admission.expire_after >= 0);
  }
  bool wants_scores() const noexcept { return layout().has_score; }
  // Throws ForkedChild in the child of a fork where rows lie on a disk.
  TableMutex& mutex() {
    frames_.check_process();
    return mutex_;
  }
  Frames& frames() noexcept { return frames_; }

  // --- 2. Settings that may change while it is in use.
  void set_default(float value, bool always) noexcept {
    config_.default_value = value, config_.always_default = always;
  }
  void set_min_count(uint64_t count) noexcept { config_.admission.min_count = count; }
  // An update passes over a frozen table, and its step does not rise.
  void freeze(Frozen frozen) noexcept { frozen_ = frozen; }
  bool learns() const noexcept { return frozen_ == Frozen::kNothing; }
  bool observes() const noexcept { return frozen_ != Frozen::kAll; }  // times, counts and eviction continue

  // --- 3. The map of a batch, in this order. `turn_generations`, `begin_batch` and `reserve` run alone.
  void turn_generations();  // slots that no plan knows any more are free
  // Probes, and changes nothing. Ids that are not counted are never missing: they get no row.
  void resolve(Uniques& uniques, bool training) const;
  // Whether it may refuse a batch: then no table changes before all tables have counted what the batch needs.
  bool counts_rows() const noexcept { return capped() || !frames_.in_memory(); }
  void count_rows(Uniques& uniques) const;  // those found and those that will enter
  void check_capacity(uint64_t num_rows) const;
  void arrive(const Uniques& uniques, const Frames::Plan* plan, Frames::Room* room);  // waits for Frames::bring
  void begin_batch();
  void end_expired(Uniques& uniques);  // rows that had expired, and counts of ids that are missing
  void admit(Uniques& uniques);        // touches what was found; keeps in `missing` only what gets a row now
  void reserve(const std::vector<Uniques>& ranges);  // fresh slots for all ranges, in partition order
  void insert(Uniques& uniques);                     // a full partition gives up rows that the batch does not use
  // Finds the frames of the slots, of new rows, too, and replays the steps that rows there missed. Without `room`
  // no rows are new; without `plan` the frames are not used later.
  void place(Uniques& uniques, const Frames::Plan* plan, Frames::Room* room);

  // --- 4. Plans in flight: their slots are given to no other id before they retire. A plan often lives until the next
  // one is made, so that there is always one: plans belong to the generation they were made in, and a slot waits for
  // the plans of its own generation and of the one before. Two generations are alive at a time. `retire` and
  // `num_withdrawn` may be called without the mutex, `retain` only while another plan of the generation lives.
  int generation() const noexcept { return generation_.load() & 1; }
  int older(int a, int b) const noexcept { return a == b ? a : 1 - generation(); }
  void retain(int generation) noexcept { plans_[generation].fetch_add(1); }
  void retire(int generation) noexcept { plans_[generation].fetch_sub(1); }
  // The number of rows that a sweep or a call removed: they are absent for plans in flight, too. Rows that the map of a
  // batch removes do not count: plans in flight belong to batches before it, so mapping ahead changes no bit.
  uint64_t num_withdrawn() const noexcept { return num_withdrawn_.load(); }

  // --- 5. Taking back the map of a batch that is not looked up: the newest one first, while its plan lives.
  void begin_log(Uniques& uniques);  // before resolve
  void log(Uniques& uniques);        // before admit
  void end_log(Uniques& uniques) noexcept;
  void take_back(Uniques& uniques);
  void end_take_back() noexcept { calls_--; }  // once a batch

  // --- 6. Reading. The fp32 storage of each id, or a copy for half precision and for ids without a row.
  // `aside`: a copy of every id, which may be used without the mutex.
  size_t num_copies(const Uniques& uniques, bool aside) const noexcept;
  // rows[u]: the row of each id; copies[first:]: [num_copies, dim], where those go. Rows that lie in no frame are there
  // after `finish_aside`.
  ColdRows read(const Uniques& uniques, const float** rows, float* copies, size_t first, bool aside) const;
  // [n, dim]; -1 gives the default vector. Likewise. Throws std::invalid_argument for a slot without a row on a disk.
  ColdRows read_slots(const int64_t* slots, size_t n, float* out) const;
  void finish_aside(ColdRows& rows, float* copies);  // waits, without the mutex
  void read_absent(int64_t id, float* out) const noexcept;

  // --- 7. The update: one step of the rule over the rows of distinct ids.
  uint64_t step() const noexcept { return step_; }
  uint64_t begin_update(double lr);
  void update(const Uniques& uniques, const float* grads);  // [ids, dim]
  // Brings rows that this step did not touch (scope `all`), or that missed steps (`catch_up`), up to date in memory. A
  // row that lies on a disk catches up when it is read.
  void catch_up(int first_partition, int last_partition);

  // --- 8. Expiry and removal.
  int64_t watermark() const noexcept { return watermark_; }
  void begin_evict(int64_t now);  // from here on expired ids are absent. INT64_MIN: those of the last call
  uint64_t sweep(int first_partition, int last_partition);  // returns the number of rows that went
  bool remove(int64_t id);                                  // whether it had a row

  // --- 9. Numbers.
  uint64_t num_slots() const noexcept { return owners_.size() * Slabs::kChunk; }
  uint64_t size() const noexcept;  // rows that have not expired
  uint64_t calls() const noexcept { return calls_; }
  TableStats stats() const;
  void load_counters(uint64_t admitted, uint64_t refused, uint64_t evicted, const EvictedRows& reasons) noexcept;
  // Grows with the partitions whose counts have become estimates; may be read without the mutex.
  uint32_t num_sketched() const noexcept { return num_sketched_.load(); }

  // --- 10. States.
  // How many partitions to ask the two calls below for at once, so that blocks of the disk are read about once in all.
  // 1 in memory. Later calls may say otherwise.
  int num_read_together() const noexcept;
  // All rows of these partitions at one moment, a partition after the other, each by rising id. Called without the
  // mutex, which it takes after everybody who waits, and does not hold while it reads the disk.
  ExportedRows export_rows(const std::vector<int>& partitions);
  // A loaded row is up to date at the step of the table, except for the steps that it has missed. `room`: for all.
  void load_rows(const ExportedRows& rows, Frames::Room* room);
  const RateHistory& rates() const noexcept { return rates_; }
  // Rows that are up to date are so at the new step, too. Before, `settle` brings rows that missed steps up to date
  // where they lie, with `room` for `num_behind` of them; where it throws, some of them are.
  void load_scalars(uint64_t step, int64_t watermark, uint64_t calls, std::vector<RateHistory::Run> rates);
  uint64_t num_behind(int partition) const noexcept;
  void settle(int partition, Frames::Room* room);
  // Ids that wait for admission; null where every id is admitted.
  const Candidates* candidates(int partition) const noexcept {
    return partitions_[static_cast<size_t>(partition)].candidates.get();
  }
  void load_candidates(const std::vector<Candidate>& candidates);
  void load_sketch(int partition, size_t generation, SketchPart part);
  void load_plain_sketch(int partition, const std::vector<uint32_t>& counters);

  // --- 11. Changes and snapshots. A snapshot is read some partitions at a time while training continues.
  // From here on remembers which rows change or go. Those that are there count as changed, unless they are `saved`.
  void track(bool on, bool saved = false);
  bool has_snapshot() const noexcept { return snapshot_ != nullptr; }
  // Of all rows, or of those changed since the last one. Returns their number; `changes`: an upper bound. The caller
  // has swept expired rows and caught up idle ones.
  uint64_t begin_snapshot(bool changes);
  // Its rows in these partitions, as of `export_rows`; once a partition. Called without the mutex, which it takes for
  // some thousand rows at a time, after everybody who waits. `rows_at_once`: 0 = as many as suit the tier.
  ExportedRows snapshot_rows(const std::vector<int>& partitions, size_t rows_at_once = 0);
  Snapshot::Part& snapshot_part(int partition) { return snapshot_->parts[static_cast<size_t>(partition)]; }
  void end_snapshot(bool saved);  // not saved: what it took is changed still

 private:
  struct Partition {
    std::vector<uint32_t> free, fresh, waiting;  // slots without a row: of now, of this generation, of the one before
    std::vector<int64_t> removed;                // since the last snapshot, where changes are tracked
    std::unique_ptr<Candidates> candidates;
    Victims victims;
    uint64_t admitted = 0, refused = 0;
    EvictedRows evicted{};
    MapLog* log = nullptr;  // of the batch that is mapped, where it may be taken back
    // Rows expire in the next sweep; until then those that are expired are absent. Candidates that are expired go with
    // it, or before the next one is counted.
    bool stale = false, counts_stale = false;
  };

  uint64_t num_alive(int partition) const noexcept;
  bool expired(int64_t seen) const noexcept;
  bool has_late_time(const Uniques& uniques, size_t u) const noexcept;
  int64_t candidates_from() const noexcept;  // those that were last seen before are expired
  void expire_candidates(int partition);
  uint64_t remove_expired(int first_partition, int last_partition);
  int64_t victim_key(uint32_t slot) const noexcept;
  bool would_admit(const Candidates& candidates, const Uniques& uniques, size_t u, uint64_t before) const noexcept;
  void touch(uint32_t slot, const Uniques& uniques, size_t u, uint64_t occurrences) const noexcept;
  void free_slot(int partition, uint32_t slot);
  void keep_image(int partition, uint32_t slot);
  void remove_row(int partition, int64_t id, uint32_t slot, Reason reason);
  void next_generation();
  uint32_t add_chunk(int partition);
  void write_entry(ExportedRows& out, size_t at, int64_t id, const LedgerEntry& entry, uint64_t step) const noexcept;
  void write_row(ExportedRows& out, size_t at, const Row& row) const noexcept;
  void write_out(ExportedRows& out, const SnapshotEntry& entry, ColdRows& cold) const;
  void finish(ColdRows& rows, ExportedRows& out);              // waits, without the mutex
  std::vector<SnapshotEntry> snapshot_entries(int partition);  // in no useful order; once a partition
  void sort_by_place(std::vector<SnapshotEntry>& entries);     // likewise without the mutex
  ColdRows read_snapshot(const SnapshotEntry* entries, size_t n, ExportedRows& out);
  void drop_images(int partition);
  template <class F>
  void naming_lost(F&& work) const;
  void begin_read(ColdRows& rows, bool urgent) const;
  template <class F>
  void finish(ColdRows& rows, F&& visit) const;
  template <class F>
  void finish_aside(ColdRows& rows, F&& visit);
  Row row_in(ColdRows& rows, size_t i) const noexcept;
  // Before a row changes; after a slot was given to a new id; before a row goes.
  void changing(uint32_t slot) {
    if (marking_) mark_changing(slot);
  }
  void mark_changing(uint32_t slot);
  void mark_born(int partition, int64_t id, uint32_t slot);
  void mark_back(int partition, int64_t id, uint32_t slot);  // after mark_gone, with its row
  void mark_gone(int partition, int64_t id, uint32_t slot);
  bool evict_one(int partition, const std::vector<uint32_t>& in_batch);  // false: the batch uses every row
  [[gnu::always_inline]] void prefetch(uint32_t slot) const noexcept {
    frames_.prefetch(slot);
    ledger_.prefetch(slot);
  }
  uint64_t updated(uint32_t slot) const noexcept;
  void start_entry(uint32_t slot) const noexcept;
  void start_row(const Row& row, int64_t id) const;
  void replay(uint32_t slot, uint32_t frame, uint64_t to);
  void replay(const Row& row, uint64_t from, uint64_t to) const;
  void update_half(const RuleStep& rule, uint64_t step, const Row& row, const float* grad, float* wide) const;
  const RuleStep& step_at(uint64_t step, RuleStep* scratch) const noexcept;

  TableConfig config_;
  uint64_t key_;
  std::vector<float> initial_state_;  // optimizer state of a new row
  RowLayout layout_;
  TableMutex mutex_;
  std::vector<uint8_t> owners_;  // partition of each chunk of slots
  Frames frames_;
  Ledger ledger_;
  std::vector<IdMap> maps_;  // by partition; side by side, since every lookup reads one
  std::vector<Partition> partitions_;
  std::atomic<int> plans_[2] = {0, 0}, generation_{0};
  std::atomic<uint64_t> num_withdrawn_{0};
  std::atomic<bool> quarantined_{false};
  std::atomic<uint32_t> num_sketched_{0};
  uint64_t evicted_before_ = 0;  // for reasons that the loaded state did not count
  uint64_t cap_ = 0;             // rows a partition may keep; 0 = no cap
  Frozen frozen_ = Frozen::kNothing;
  uint64_t step_ = 0, calls_ = 0;
  int64_t moment_ = 0;  // when the ids of the batch are seen, where they come without times
  int64_t watermark_ = INT64_MIN;
  RateHistory rates_;
  std::vector<RuleStep> steps_;              // of the first kCachedSteps steps, where replays may need them
  bool tracking_ = false, marking_ = false;  // marking: changes are tracked or a snapshot is being read
  Marks changed_;
  std::unique_ptr<Snapshot> snapshot_;
};

// A store knows slots; users know ids.
template <class F>
void Table::naming_lost(F&& work) const {
  try {
    work();
  } catch (const RecordLost& lost) {
    for (const IdMap& map : maps_)
      map.for_each([&](int64_t id, uint32_t slot) {
        if (slot == lost.slot) throw RecordLost(lost, config_.name, id);
      });
    throw;
  }
}

// Likewise without the mutex, but where training may add to the steps that rows catch up with.
template <class F>
void Table::finish_aside(ColdRows& rows, F&& visit) {
  if (rows.rows.empty()) return;
  if (rows.batch) rows.batch->wait();
  std::unique_lock lock(mutex(), std::defer_lock);
  if (layout().has_updated) {
    mutex_.lock_last();
    lock = std::unique_lock(mutex_, std::adopt_lock);
  }
  finish(rows, visit);
}

// Waits for the rows, catches them up and calls visit(at, row) for each.
template <class F>
void Table::finish(ColdRows& rows, F&& visit) const {
  if (rows.rows.empty()) return;
  rows.batch->wait();
  for (size_t i = 0; i < rows.rows.size(); i++) {
    const Row row = row_in(rows, i);
    replay(row, rows.rows[i].updated, rows.step);
    visit(rows.rows[i].at, row);
  }
}

}  // namespace hotbed
