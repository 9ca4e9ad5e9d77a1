// SPDX-License-Identifier: Apache-2.0
// One batch over several tables, from ids to the update of their rows:
//
//   1  map, or wait for a queue that maps    ids are made distinct, counted, admitted; they have slots
//   2  pool                                  the outputs of the features
//   3  sum_gradients                         the gradients of the outputs, summed once an id
//   4  apply                                 the rule, once a row
//
// `lookup` is 1 and 2 in one call. A batch of grains is divided after 1; each grain does 2 and 3; `join`, `summed` and
// `apply` of what that returns end the batch. `merge` ends several batches together. exchange.h has the steps whose
// rows lie in several processes.
#pragma once

#include <memory>
#include <vector>

#include "parts.h"
#include "sums.h"

namespace hotbed {

// As OutputRows, of the gradient of a feature's output.
struct GradientRows {
  const float* data = nullptr;  // null = no gradient reached this feature
  int64_t step = 0;
};

class MapTask;

class Step {
 public:
  // `grain_ends`: the samples before which the grains of the batch end; empty = it is not divided. A batch of grains is
  // mapped in the order grain, feature, sample, position, and then divided. Its scores are added a grain at a time, and
  // these by halves. Throws std::invalid_argument where the number of grains is not a power of two.
  Step(std::vector<std::shared_ptr<Table>> tables, std::vector<Feature> features, std::vector<int64_t> grain_ends = {});
  explicit Step(Parts parts) : parts_(std::move(parts)) {}
  // Over given slots of a table, each a position, without a lookup: for `sum_gradients` and `apply`.
  static Step of_slots(std::shared_ptr<Table> table, const int64_t* slots, int64_t n);
  ~Step();
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  // --- 1: from ids to slots
  // Lets policies pass over the samples that are 0 here, [samples], which must live until the ids are mapped: such ids
  // are neither counted nor timed, and get no row.
  void mark(const uint8_t* counted) noexcept { samples_.counted = counted, samples_.marked = true; }
  // Maps ids to slots. In training, ids are counted and timed, and those that are admitted get a row. `times`:
  // microseconds a sample, or null. The plan lives as long as this: its slots are given to no other id.
  // `logs`: it may be taken back.
  void map(const std::vector<FeatureIds>& ids, const int64_t* times, bool training, bool logs = false);
  // The map of a queue: the end of this step waits for it, and `pool` lets the next one begin.
  void mapped_by(std::shared_ptr<MapTask> task) { task_ = std::move(task); }
  // As Parts::take_back.
  bool take_back() { return parts_.take_back(); }
  // Returns each grain as a step of its own, with the distinct ids of its samples in the order feature, sample,
  // position, mapped as they are here. The grains are pooled in the place of this step; with the last that has samples
  // a queue may map on.
  std::vector<std::unique_ptr<Step>> divide();
  // One step for each of `num_tables`, as Parts::split.
  std::vector<std::unique_ptr<Step>> split(const std::vector<size_t>& num_tables);

  // --- 2: rows of the mapped ids, as they are now
  // Gives mapped ids other weights, [positions] of each feature, which are copied; null = they keep theirs.
  void set_weights(const std::vector<const float*>& weights);
  // Features without an output are passed over.
  void pool(const std::vector<OutputRows>& out);
  // map and pool in one call, table by table while its rows are near. `keeps`: pool, sum_gradients or apply will
  // follow; else the plan ends with the call.
  void lookup(const std::vector<FeatureIds>& ids, const int64_t* times, bool training, bool keeps,
              const std::vector<OutputRows>& out);
  // Writes the row of each position of a feature, [positions, dim]: neither weighted nor pooled.
  void position_rows(int feature, float* rows);
  // Writes the rows of a table's distinct ids, [num_unique, dim], and their slots (-1 = no row).
  void unique_rows(int table, float* rows, int64_t* slots);
  // From now on, rows may leave their frames, and slots of removed rows may be given to other ids. Later uses of the
  // ids find their rows anew; ids whose rows were removed meanwhile take no gradient.
  void let_go() { parts_.let_go(); }

  // --- what is mapped
  int num_tables() const noexcept { return static_cast<int>(parts_.size()); }
  std::vector<std::shared_ptr<Table>> tables() const { return parts_.tables(); }
  int64_t num_unique(int table) const noexcept { return parts_[static_cast<size_t>(table)].num_unique; }
  std::vector<int64_t> unique_ids(int table) const;
  std::vector<uint32_t> unique_slots(int table) const;
  // The slot of every position of a table's features, in order (-1 = no row).
  void position_slots(int table, int64_t* out) const;

  // --- 3: gradients, summed once an id
  // sums[table] = [num_unique, dim]: the gradients of each id, summed in the order feature, sample, position. Returns
  // whether all of them are finite. Throws std::logic_error where max pooling needs rows that an update has changed
  // since `let_go`.
  bool sum_gradients(const std::vector<GradientRows>& grads, const std::vector<float*>& sums);
  // out[table] = [num_unique, dim]: the sums of the grains that `divide` gave, as GrainJoin. Returns whether all of
  // them are finite.
  bool join(const std::vector<GrainSums>& grains, const std::vector<float*>& out) const;
  // A step of these ids, for sums that `join` made: an id without one takes no gradient, and its sum becomes 0.
  std::unique_ptr<Step> summed(const std::vector<float*>& sums);
  // As merge of sums.h.
  static std::unique_ptr<Step> merge(const std::vector<Step*>& steps, const std::vector<Sums>& sums,
                                     std::vector<std::vector<float>>* merged_sums);
  // Lets the distinct ids of these numbers take no gradient, as if they had no row.
  void leave_out(int table, const int64_t* numbers, int64_t n);
  // Adds the squares of the lanes of the sums of `table` to squares[partition of their id], an id after the other.
  void add_squares(int table, const float* sums, double* squares) const noexcept;
  // Finds the first id of `table` whose sum is not finite; returns false where all sums are finite.
  bool find_nonfinite(int table, const float* sums, int64_t* id) const noexcept;

  // --- 4: the update
  // Applies the rule of each table that has sums once to every id with a row. Rows withdrawn since the lookup are
  // passed over.
  void apply(const Sums& sums, const std::vector<double>& rates);

 private:
  void check_undivided() const;
  Mapping mapping(const int64_t* times, bool training, bool logs, Locked& locked);
  void pool_features(const Part& part, const std::vector<OutputRows>& out) const;
  Bags bags(const Part& part, size_t k) const;

  Parts parts_;
  Samples samples_;
  OwnMembers members_;  // of the grains that `divide` gave
  std::shared_ptr<MapTask> task_;
};

// As Table::catch_up, of all rows of the tables, on all threads.
void catch_up_all(const std::vector<Table*>& tables);

}  // namespace hotbed
