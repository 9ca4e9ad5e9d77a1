// SPDX-License-Identifier: Apache-2.0
// The distinct ids of a batch in each of its tables, and where their rows are. A step, a question and an answer have
// this in common. Work is cut by table and range of partitions, never by thread, so that results do not depend on
// threads.
//
// Ids are assigned, then mapped: now they have slots, which are given to no other id until `release`, and their rows
// stay in frames. After `let_go` rows may leave and go; `hold` finds them anew.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "pooling.h"
#include "table.h"

namespace hotbed {

// One table's share of a batch.
struct Part {
  std::shared_ptr<Table> table;
  std::vector<int> features;  // by number
  Distinct distinct;          // the ids of the features, once a grain
  std::vector<Uniques> ranges;
  int64_t num_unique = 0;

  // --- while the ids are mapped
  uint64_t withdrawn = 0;  // rows that the table had withdrawn by then
  uint64_t step = 0;       // of the table, likewise
  int generation = 0;
  std::vector<std::shared_ptr<Frames::Plan>> plans;  // those that keep the frames
  std::unique_ptr<Frames::Room> room;                // for rows that make way, for the length of a call

  // --- once the rows are read
  Column<const float*> rows;   // unique id -> fp32 row
  Column<float> copies;        // of rows that have no fp32 storage: half precision, absent ids, rows in no frame
  std::vector<ColdRows> cold;  // of each range: what is on its way into the copies
  std::vector<const float*> received;  // unique id -> row, where another process owns it

  const Frames::Plan* plan() const noexcept { return plans.empty() ? nullptr : plans[0].get(); }
  void make_plan();  // none in memory, where nothing has to be kept
  bool has_cold() const noexcept;
  void leave_frames() noexcept;
};

class Locked;

// How ids are mapped.
struct Mapping {
  bool training;
  bool logs;       // it may be taken back
  Locked& locked;  // all tables; evaluation does without while rows come into frames that are free
  // Counts and times the ids of a range, as far as the table wants it.
  std::function<void(const Part&, Uniques&)> observe;
  // Of each table the rows that the batch uses in all processes, which a cap must have room for; empty = all are here.
  std::vector<uint64_t> num_rows;
};

class Parts {
 public:
  Parts(std::vector<std::shared_ptr<Table>> tables, std::vector<Feature> features);
  Parts(Parts&& other) noexcept;
  ~Parts() { release(); }

  size_t size() const noexcept { return parts_.size(); }
  Part& operator[](size_t t) noexcept { return parts_[t]; }
  const Part& operator[](size_t t) const noexcept { return parts_[t]; }
  auto begin() noexcept { return parts_.begin(); }
  auto end() noexcept { return parts_.end(); }
  auto begin() const noexcept { return parts_.begin(); }
  auto end() const noexcept { return parts_.end(); }
  const std::vector<Feature>& features() const noexcept { return features_; }
  std::vector<std::shared_ptr<Table>> tables() const;
  // Cuts them: each of the values has this number of tables, one after another, and the features of these tables.
  // Nothing is left here.
  std::vector<Parts> split(const std::vector<size_t>& num_tables);

  // Takes the ids of the features, once a grain.
  void assign(const std::vector<FeatureIds>& ids, const std::vector<int64_t>& grain_ends);

  // --- with the locks of all tables
  // Maps assigned ids; where it throws, no table has changed. Calls mapped(part) for each small part when its slots are
  // there, from several threads, and returns the others.
  std::vector<Part*> map(const Mapping& mapping, const std::function<void(Part&)>& mapped);
  void keep();  // the plan lives on after the call; the caller's arrays do not
  // Brings a part whose rows were withdrawn, or missed steps, since it was mapped up to date.
  void update(Part& part) const;
  void refresh(Part& part) const;  // likewise, without a look whether it must
  // Lets a part that was mapped in evaluation, or by its slots, learn: its rows come into frames.
  void bring(Part& part) const;
  // Calls done(part) for each of these parts when its rows are there, from several threads. Parts with rows in no frame
  // come last: the locks are released before the wait for them.
  static void read(const std::vector<Part*>& parts, Locked& locked, const std::function<void(const Part&)>& done);
  static void begin_read(Part& part);

  // --- the life of the mapped ids
  bool is_mapped() const noexcept { return retained_; }
  void looked_up() noexcept { takes_back_ = false; }
  // Makes the tables what they were before the map, unless the ids were looked up since. Later maps go first. Returns
  // whether they are so now.
  bool take_back();
  void retain() noexcept;  // the slots of the generations that the parts name
  void release() noexcept;
  void let_go();
  bool hold();  // returns whether they had been let go

 private:
  std::vector<Part*> map_phases(const Mapping& mapping, const std::function<void(Part&)>& mapped);
  void map_small(Part& part, const Mapping& mapping, bool trains) const;

  std::vector<Feature> features_;
  std::vector<Part> parts_;
  bool retained_ = false;
  bool let_go_ = false;      // after `let_go`, until the ids are used again
  bool takes_back_ = false;  // the map was logged, and the ids were not looked up
};

// The locks of all tables, taken in one order.
class Locked {
 public:
  // `last`: after everybody else who waits, to read.
  explicit Locked(const Parts& parts, bool last = false);
  ~Locked() { release(); }
  void release();
  // Waits without them, then takes them again, after everybody else who waits. Whoever wants a lost record reads it.
  void wait_for(const std::vector<std::shared_ptr<ReadBatch>>& reads);
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  void lock_last();

  std::vector<TableMutex*> mutexes_;
};

// Room for rows that make way, for the length of a call. Made without the locks, since it waits; where the disk is full
// it throws, and no table has changed.
class Rooms {
 public:
  // `for_ids`: for as many rows of each table as there are ids; else parts that want it get room one by one.
  Rooms(Parts& parts, bool for_ids);
  ~Rooms();
  Rooms(const Rooms&) = delete;
  Rooms& operator=(const Rooms&) = delete;

 private:
  Parts& parts_;
};

// The samples of a batch, which say how often and when its ids occur.
struct Samples {
  const int64_t* times = nullptr;    // microseconds a sample; null = there are none
  const uint8_t* counted = nullptr;  // 0 = policies pass over the sample; null = they count all
  bool marked = false;               // some samples are not counted
  std::vector<int64_t> grain_ends;   // the samples before which the grains end; empty = the batch is not divided

  // Occurrences, latest time and aged count of each id of a range, where the table's policies want them.
  void observe(const Part& part, Uniques& range) const;
};

// Throws std::invalid_argument where it is not a power of two.
void check_grains(size_t num_grains);

// Adds the scores of the ids, which are there grain by grain, by halves.
void add_scores(Uniques& range, size_t num_grains);

// Cuts the partitions into as many ranges as `num_ids` ids need.
void cut(std::vector<Uniques>& ranges, int64_t num_ids);

// Calls work(t, r) for each range r of partitions of each table t, from several threads.
void each_range(const Parts& parts, const std::function<void(size_t, size_t)>& work);

// Begins to read the rows of these ids that lie on a disk and in no frame. No table changes: nobody sees it, but by the
// time that a later map takes. May run beside everything else.
void read_ahead(const std::vector<std::shared_ptr<Table>>& tables, const std::vector<Feature>& features,
                const std::vector<FeatureIds>& ids);

}  // namespace hotbed
