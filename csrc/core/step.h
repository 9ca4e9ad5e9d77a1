// SPDX-License-Identifier: Apache-2.0
// One batch over several tables: ids are made distinct, mapped and pooled; later their gradients are summed, once an
// id, and the rule is applied. Work is cut by table and range of partitions, never by thread, so that results do not
// depend on threads.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "pooling.h"
#include "table.h"

namespace hotbed {

// As OutputRows, of the gradient of a feature's output.
struct GradientRows {
  const float* data = nullptr;  // null = no gradient reached this feature
  int64_t step = 0;
};

// Of each table of a step the summed gradients of its distinct ids, [num_unique, dim]; a table without is left alone.
using Sums = std::vector<std::optional<const float*>>;

// What a grain leaves: of each table the number of its distinct ids, and their sums; a table without sums is left out.
struct GrainSums {
  std::vector<int64_t> num_ids;
  Sums sums;
};

// To which process each partition of a table belongs, a table after the other.
using Owners = std::vector<std::array<uint8_t, kPartitions>>;

// What a process asks an owner for: of each table the number of ids, and what `Step::write_asked` wrote for the owner.
// A grain without ids asks for nothing.
struct Asked {
  std::vector<int64_t> counts;
  const int64_t* words = nullptr;
};

class MapTask;

class Step {
 public:
  // `grain_ends`: the samples before which the grains of the batch end; empty = it is not divided. A batch of grains is
  // mapped in the order grain, feature, sample, position, and then divided. Its scores are added a grain at a time, and
  // these by halves. Throws std::invalid_argument where the number of grains is not a power of two.
  Step(std::vector<std::shared_ptr<Table>> tables, std::vector<Feature> features, std::vector<int64_t> grain_ends = {});
  ~Step();
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  // Maps ids to slots. In training, ids are counted and timed, and those that are admitted get a row. `times`:
  // microseconds a sample, or null. The plan lives as long as this: its slots are given to no other id.
  // `logs`: it may be taken back.
  void map(const std::vector<FeatureIds>& ids, const int64_t* times, bool training, bool logs = false);
  // Lets policies pass over the samples that are 0 here, [samples], which must live until the ids are mapped: such ids
  // are neither counted nor timed, and get no row. Null: the processes that ask for ids have done so.
  void mark(const uint8_t* counted) noexcept { counted_ = counted, marked_ = true; }
  // Makes the tables what they were before the map, unless the ids were looked up since. Later maps go first. Returns
  // whether they are so now.
  bool take_back();
  // The map of a queue: the end of this step waits for it, and `pool` lets the next one begin.
  void mapped_by(std::shared_ptr<MapTask> task) { task_ = std::move(task); }
  // Returns each grain as a step of its own, with the distinct ids of its samples in the order feature, sample,
  // position, mapped as they are here. The grains are pooled in the place of this step; with the last that has samples
  // a queue may map on.
  std::vector<std::unique_ptr<Step>> divide();
  // From now on, rows may leave their frames, and slots of removed rows may be given to other ids. Later uses of the
  // ids find their rows anew; ids whose rows were removed meanwhile take no gradient.
  void let_go();
  // Gives mapped ids other weights, [positions] of each feature, which are copied; null = they keep theirs.
  void set_weights(const std::vector<const float*>& weights);
  // Pools the rows of the mapped ids, as they are now. Features without an output are passed over.
  void pool(const std::vector<OutputRows>& out);
  // Writes the row of each position of a feature as it is now, [positions, dim]: neither weighted nor pooled.
  void position_rows(int feature, float* rows);
  // Begins to read the rows of these ids that lie on a disk and in no frame. No table changes: nobody sees it, but by
  // the time that a later map takes. May run beside everything else; the step is for this alone.
  void fetch(const std::vector<FeatureIds>& ids);
  // map and pool in one call, table by table while its rows are near. `keeps`: pool, sum_gradients or apply will
  // follow; else the plan ends with the call.
  void lookup(const std::vector<FeatureIds>& ids, const int64_t* times, bool training, bool keeps,
              const std::vector<OutputRows>& out);
  // --- rows that other processes own (exchange.cpp). A process asks the owners for the rows of the distinct ids of its
  // grains; an owner maps what it is asked for as a batch whose grains are those of the askers.
  //   process: find, ask, write_asked; take_rows; divide, split, pool, sum_gradients; write_sums
  //   owner:   count_rows, map_asked; write_rows; split, join, summed, apply
  // Makes the ids distinct and counts and times them as the tables want. No table changes; the rows come with
  // `take_rows`.
  void find(const std::vector<FeatureIds>& ids, const int64_t* times);
  // Orders the distinct ids by owner and partition. Returns the number of ids, [owner][table].
  std::vector<std::vector<int64_t>> ask(const Owners& owners, int num_owners);
  // The length of a question in words of 8 bytes. `timed`: whether the batch has times.
  int64_t num_words(const std::vector<int64_t>& counts, bool timed) const noexcept;
  // Writes what the owners are asked, an owner after the other.
  void write_asked(int64_t* words) const;
  // Cuts the step: returns one step for each of `num_tables`, with this number of tables, one after another, and with
  // the features of these tables. Nothing is left here.
  std::vector<std::unique_ptr<Step>> split(const std::vector<size_t>& num_tables);
  // Takes the rows of the ids in the order in which they were asked for, [num_unique, dim] of a table after the other
  // for each owner. The rows must live as long as this.
  void take_rows(const float* rows);
  // Writes the sums that `join` makes of the grains, in the order in which `take_rows` takes rows.
  void write_sums(const std::vector<GrainSums>& grains, float* out) const;
  // Maps what the processes ask for, a grain after the other: as many as a power of two. The step needs one feature a
  // table, without pooling.
  // `num_rows`: of each table the rows that the batch uses, of all owners, which a table with a cap must have room for.
  // `logs`: it may be taken back.
  void map_asked(const std::vector<Asked>& grains, bool timed, bool training,
                 const std::vector<uint64_t>& num_rows = {}, bool logs = false);
  // Writes the rows of the ids that each grain asks for, as they are now, to out[grain][table]: [asked, dim].
  void write_rows(const std::vector<std::vector<float*>>& out);
  // The rows of tables with a cap that `map_asked` would use in this process; 0 for other tables. No table changes.
  std::vector<uint64_t> count_rows(const std::vector<Asked>& grains, bool timed);

  // A step over given slots or ids of a single table, without a forward (Table.update).
  void adopt_slots(const int64_t* slots, int64_t n);

  int num_tables() const noexcept { return static_cast<int>(parts_.size()); }
  std::vector<std::shared_ptr<Table>> tables() const;
  int64_t num_unique(int table) const noexcept { return parts_[static_cast<size_t>(table)].num_unique; }
  uint64_t num_refused() const noexcept;
  std::vector<int64_t> unique_ids(int table) const;
  std::vector<uint32_t> unique_slots(int table) const;
  // Slot of every position of a table's features, in order (kNoSlot = no row).
  void position_slots(int table, int64_t* out) const;
  // The rows of a table's distinct ids as they are now, [num_unique, dim], and their slots (-1 = no row).
  void unique_rows(int table, float* rows, int64_t* slots);
  // Lets the distinct ids of these numbers take no gradient, as if they had no row.
  void leave_out(int table, const int64_t* numbers, int64_t n);

  // sums[table] = [num_unique, dim]: the gradients of each id, summed in the order feature, sample, position.
  // Returns whether all of them are finite.
  // Throws std::logic_error where max pooling needs rows that an update has changed since `let_go`.
  bool sum_gradients(const std::vector<GradientRows>& grads, const std::vector<float*>& sums);
  // The tables of all steps that have sums, each with the distinct ids of all and their sums added one after another.
  static std::unique_ptr<Step> merge(const std::vector<Step*>& steps, const std::vector<Sums>& sums,
                                     std::vector<std::vector<float>>* merged_sums);
  // out[table] = [num_unique, dim]: the sums of the grains that `divide` gave, or that `map_asked` was asked for, added
  // by halves: (0 + 1) + (2 + 3). A grain without an id is left out of its sum. Where all are left out, the sum is
  // -0.0, which adds nothing; no other sum is. Returns whether all of them are finite.
  bool join(const std::vector<GrainSums>& grains, const std::vector<float*>& out) const;
  // A step of these ids, for sums that `join` made: an id without one takes no gradient, and its sum becomes 0.
  std::unique_ptr<Step> summed(const std::vector<float*>& sums);
  // Adds the squares of the lanes of the sums of `table` to squares[partition of their id], an id after the other.
  void add_squares(int table, const float* sums, double* squares) const noexcept;
  // Finds the first id of `table` whose sum is not finite; returns false where all sums are finite.
  bool find_nonfinite(int table, const float* sums, int64_t* id) const noexcept;
  // Applies the rule of each table that has sums once to every id with a row. Rows withdrawn since the lookup are
  // passed over.
  void apply(const Sums& sums, const std::vector<double>& rates);

 private:
  struct Seen {  // what an asker saw of each of its ids, as far as the table wants it
    const int64_t* times = nullptr;
    const double* scores = nullptr;
    const uint32_t* counts = nullptr;
  };
  struct Part {  // one table's share of the batch
    std::shared_ptr<Table> table;
    std::vector<int> features;
    Distinct distinct;  // the features once a grain
    std::vector<Uniques> ranges;
    Column<const float*> rows;   // unique id -> fp32 row
    Column<float> copies;        // of rows that have no fp32 storage: half precision, absent ids, rows on a disk
    std::vector<ColdRows> cold;  // of each range: what is on its way into the copies
    int64_t num_unique = 0;
    uint64_t withdrawn = 0;  // rows that the table had withdrawn when it was mapped
    uint64_t step = 0;       // of the table, likewise
    int generation = 0;
    std::vector<std::shared_ptr<Frames::Plan>> plans;  // those that keep the frames
    std::unique_ptr<Frames::Room> room;                // for rows that make way, for the length of a call
    std::vector<Seen> seen;                            // of each grain that was asked for
    std::vector<uint32_t> asked;                       // the unique ids by owner and partition
    std::vector<size_t> asked_ends;                    // of each owner
    std::vector<const float*> received;                // unique id -> row, where another process owns it
    std::vector<std::vector<uint32_t>> members;  // of each grain that `divide` gave, the numbers of its unique ids here
    const Frames::Plan* plan() const noexcept { return plans.empty() ? nullptr : plans[0].get(); }
    void make_plan() {  // none in memory, where nothing has to be kept
      if (auto made = table->frames().make_plan()) plans = {std::move(made)};
    }
  };
  class Locked {  // holds the locks of all tables, taken in one order
   public:
    // `last`: after everybody else who waits, to read.
    explicit Locked(const Step& step, bool last = false);
    ~Locked();
    void release();
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;

   private:
    std::vector<TableMutex*> mutexes_;
  };
  // Room for rows that will make way, for the length of a call. Made without the locks, since it waits; where the disk
  // is full it throws, and no table has changed.
  class Rooms {
   public:
    explicit Rooms(Step& step) : step_(step) {}
    ~Rooms();
    Rooms(const Rooms&) = delete;
    Rooms& operator=(const Rooms&) = delete;
    void make_for_ids();

   private:
    Step& step_;
  };
  class Numbers;
  struct Shares;

  template <class F>
  std::vector<Part*> map_parts(const int64_t* times, bool training, F&& mapped);
  void plan(const std::vector<FeatureIds>& ids);
  void check_undivided() const;
  static void take_ids(const Part& whole, Part& part, std::vector<uint32_t>& members);
  static std::span<const uint32_t> members_of(const Part& part, size_t grain);
  void check_grains(const std::vector<GrainSums>& grains) const;
  void join_range(size_t table, const Uniques& range, const GrainSums* grains, size_t first, size_t last,
                  float* sums) const;
  static void cut(std::vector<Uniques>& ranges, int64_t num_ids);
  void map_part(Part& part, const int64_t* times, bool training) const;
  void find_distinct(Part& part, Uniques& range, const int64_t* times) const;
  void observe(const Part& part, Uniques& range, const int64_t* times) const;
  void observe_asked(const Part& part, Uniques& range) const;
  void add_scores(Uniques& range) const;
  template <class F>
  void each_asked(F&& visit) const;
  void plan_asked(const std::vector<Asked>& grains, bool timed);
  void map_planned(const int64_t* times, bool training, bool logs);
  void bring(Part& part);
  static bool has_cold(const Part& part);
  static void begin_read(Part& part);
  static void finish_read(Part& part);
  void read_parts(const std::vector<Part*>& parts, Locked& locked, const std::function<void(const Part&)>& done);
  static std::vector<Part*> with_output(const std::vector<Part*>& parts, const std::vector<OutputRows>& out);
  void pool_parts(const std::vector<OutputRows>& out);
  static bool has_output(const Part& part, const std::vector<OutputRows>& out);
  void pool_features(const Part& part, const std::vector<OutputRows>& out) const;
  Bags bags(const Part& part, size_t k) const;
  void keep();
  void retain();
  void release() noexcept;
  bool hold();
  static void leave_frames(Part& part);
  void refresh(Part& part) const;
  static void drop_gone(Part& part);
  void update_plan(Part& part) const;

  std::vector<Feature> features_;
  std::vector<int64_t> grain_ends_;
  size_t num_grains_ = 0;  // 0 = the batch is not divided
  std::vector<Part> parts_;
  bool retained_ = false;
  bool let_go_ = false;             // after `let_go`, until the ids are used again
  bool logs_ = false;               // the map may be taken back
  bool pooled_ = false;             // the mapped ids were looked up
  std::vector<uint64_t> num_rows_;  // that the batch uses, where other processes own some; empty = all are here
  bool timed_ = false;              // ids that are asked for have times
  const uint8_t* counted_ = nullptr;
  bool marked_ = false;  // some samples are not counted
  std::shared_ptr<MapTask> task_;
};

// The work of every table cut into `pieces` ranges of partitions, on all threads.
void for_each_range(int pieces, const std::vector<Table*>& tables, void (*work)(Table&, int first, int last));

}  // namespace hotbed
