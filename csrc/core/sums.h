// SPDX-License-Identifier: Apache-2.0
// Sums of gradients by id: those of the grains of a batch, joined by halves, and those of several steps, merged.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "parts.h"

namespace hotbed {

// Of each table the summed gradients of its distinct ids, [num_unique, dim]; a table without is left alone.
using Sums = std::vector<std::optional<const float*>>;

// What a grain leaves: of each table the number of its distinct ids, and their sums; a table without sums is left out.
struct GrainSums {
  std::vector<int64_t> num_ids;
  Sums sums;
};

// Where all grains leave an id out, its sum is this, which adds nothing; no other sum is.
inline constexpr float kNoSum = -0.0f;

// Of each table and grain the numbers that the distinct ids of the grain have in the batch; they rise from one range to
// the next.
using Members = std::vector<std::vector<std::span<const uint32_t>>>;
using OwnMembers = std::vector<std::vector<std::vector<uint32_t>>>;

// Each grain of a batch as parts of its own, with the distinct ids of its samples in the order feature, sample,
// position, mapped as they are in `whole`.
std::vector<Parts> divide(const Parts& whole, size_t num_grains, OwnMembers* members);
Members views(const OwnMembers& members);

// Adds the sums of the grains of a batch by halves: (0 + 1) + (2 + 3). A grain without an id is left out of its sum.
class GrainJoin {
 public:
  // Throws std::invalid_argument where the sums are not those of the members. `zero` is added to each gradient: 0 turns
  // -0.0, which would seem to be kNoSum, into 0.0; kNoSum changes nothing, where somebody has done so before.
  GrainJoin(Members members, const std::vector<GrainSums>& grains, float zero);

  // Writes the sums of one range of ids of table t to sums, [num_unique, dim] of the table.
  void join(const Parts& parts, size_t t, const Uniques& range, float* sums) const;
  // Writes those of all tables. Returns whether all are finite.
  bool join_all(const Parts& parts, const std::vector<float*>& sums) const;

 private:
  void add(size_t t, const Uniques& range, size_t dim, size_t first, size_t last, float* sums) const;

  Members members_;
  const std::vector<GrainSums>& grains_;
  float zero_;
};

// The same ids for sums that were joined: an id without one takes no gradient, and its sum becomes 0.
Parts summed(Parts& parts, const std::vector<float*>& sums);

// The tables of all parts that have sums, each with the distinct ids of all and their sums added one after another.
Parts merge(const std::vector<Parts*>& all, const std::vector<Sums>& sums,
            std::vector<std::vector<float>>* merged_sums);

}  // namespace hotbed
