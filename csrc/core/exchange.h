// SPDX-License-Identifier: Apache-2.0
// A batch whose rows lie in several processes. A process asks the owners for the rows of the distinct ids of its
// grains. An owner maps what it is asked for as a batch whose grains are those of the askers.
//
//   asker  Question: find, ask, write_asked; take_rows; divide, whose steps pool and sum; write_sums
//   owner  Answer:   count_rows, map; write_rows; split, join, summed, whose step is applied
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "step.h"

namespace hotbed {

// To which process each partition of a table belongs, a table after the other.
using Owners = std::vector<std::array<uint8_t, kPartitions>>;

// What a process asks an owner for: of each table the number of ids, and what `Question::write_asked` wrote for the
// owner. A grain without ids asks for nothing.
struct Asked {
  std::vector<int64_t> counts;
  const int64_t* words = nullptr;
};

// The ids of some grains, whose rows other processes own. No table of this process changes.
class Question {
 public:
  // `grain_ends`: as of Step.
  Question(std::vector<std::shared_ptr<Table>> tables, std::vector<Feature> features, std::vector<int64_t> grain_ends);

  // As Step::mark.
  void mark(const uint8_t* counted) noexcept { samples_.counted = counted, samples_.marked = true; }
  // Makes the ids distinct and counts and times them as the tables want. The rows come with `take_rows`.
  void find(const std::vector<FeatureIds>& ids, const int64_t* times);
  // Orders the distinct ids by owner and partition. Returns the number of ids, [owner][table].
  std::vector<std::vector<int64_t>> ask(const Owners& owners, int num_owners);
  // The length of what an owner is asked in words of 8 bytes; `counts`: of each table. `timed`: the batch has times.
  int64_t num_words(const std::vector<int64_t>& counts, bool timed) const noexcept;
  // Writes what the owners are asked, an owner after the other.
  void write_asked(int64_t* words) const;
  // Takes the rows of the ids in the order in which they were asked for, [num_unique, dim] of a table after the other
  // for each owner. The rows must live as long as the grains.
  void take_rows(const float* rows);
  // As Step::divide.
  std::vector<std::unique_ptr<Step>> divide();
  // Writes the sums that GrainJoin makes of the grains, in the order in which `take_rows` takes rows.
  void write_sums(const std::vector<GrainSums>& grains, float* out) const;

  int num_tables() const noexcept { return static_cast<int>(parts_.size()); }
  int64_t num_unique(int table) const noexcept { return parts_[static_cast<size_t>(table)].num_unique; }

 private:
  struct Order {
    std::vector<uint32_t> ids;  // the distinct ids of a table by owner and partition
    std::vector<size_t> ends;   // of each owner
  };
  template <class F>
  void each_asked(F&& visit) const;

  Parts parts_;
  Samples samples_;
  std::vector<Order> orders_;  // of each table
  OwnMembers members_;         // of the grains that `divide` gave
};

// What all processes ask this one for.
class Answer {
 public:
  explicit Answer(std::vector<std::shared_ptr<Table>> tables) : parts_(std::move(tables), {}) {}
  explicit Answer(Parts parts) : parts_(std::move(parts)) {}

  // The askers pass over some samples.
  void mark() noexcept { marked_ = true; }
  // The rows of tables with a cap that `map` would use in this process; 0 for other tables. No table changes.
  std::vector<uint64_t> count_rows(const std::vector<Asked>& grains, bool timed);
  // Maps what the processes ask for, a grain after the other: as many as a power of two. `num_rows`: of each table the
  // rows that the batch uses, of all owners, which a table with a cap must have room for. `logs`: it may be taken back.
  void map(const std::vector<Asked>& grains, bool timed, bool training, const std::vector<uint64_t>& num_rows = {},
           bool logs = false);
  // As Parts::take_back.
  bool take_back() { return parts_.take_back(); }
  // As Step::let_go.
  void let_go() { parts_.let_go(); }
  // Writes the rows of the ids that each grain asks for, as they are now, to out[grain][table]: [asked, dim].
  void write_rows(const std::vector<std::vector<float*>>& out);
  // As Parts::split.
  std::vector<std::unique_ptr<Answer>> split(const std::vector<size_t>& num_tables);
  // As of Step, of the grains that asked.
  bool join(const std::vector<GrainSums>& grains, const std::vector<float*>& out) const;
  std::unique_ptr<Step> summed(const std::vector<float*>& sums);

  int num_tables() const noexcept { return static_cast<int>(parts_.size()); }
  int64_t num_unique(int table) const noexcept { return parts_[static_cast<size_t>(table)].num_unique; }

 private:
  struct Seen;  // what an asker saw of its ids
  std::vector<std::vector<Seen>> assign(const std::vector<Asked>& grains, bool timed);
  void observe(const Part& part, const std::vector<Seen>& seen, bool timed, Uniques& range) const;
  Members members() const;

  Parts parts_;
  bool marked_ = false;
};

}  // namespace hotbed
