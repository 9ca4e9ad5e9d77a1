// SPDX-License-Identifier: Apache-2.0
// The first piece of a lookup: the ids of the features that share a table become distinct ids, each with a number, and
// for every position of the features the number of its id. A source finds the rows of the distinct ids (Table,
// RowCache, FrozenTable); pooling.h makes the output of the positions from them.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "hash.h"
#include "memory.h"

namespace hotbed {

// The ids of one feature, as the caller holds them; they must outlive the call they are passed to.
struct FeatureIds {
  const int64_t* values = nullptr;
  int64_t num_values = 0;
  const int64_t* offsets = nullptr;  // [num_samples + 1]; null = one id a sample
  const float* weights = nullptr;    // [num_values]; null = 1
  int64_t num_samples = 0;
};

// The distinct ids that fall into one range of partitions, in order of first occurrence (feature, sample, position).
struct UniqueIds {
  int first_partition = 0, last_partition = kPartitions;
  Column<int64_t> ids;
  Column<uint64_t> hashes;
  uint32_t base = 0;  // number of the first of them among the unique ids of all ranges

  bool covers_all() const noexcept { return last_partition - first_partition == kPartitions; }
  bool covers(uint64_t hash) const noexcept {
    const int p = partition_of(hash);
    return p >= first_partition && p < last_partition;
  }
};

class Distinct {
 public:
  // Takes those of `ids` that `features` names. With `grain_ends`, the samples before which the grains of a batch end,
  // each feature is taken once a grain: positions are in the order grain, feature, sample. Throws std::length_error
  // above 2^32 - 2 ids, std::invalid_argument for ends that are not those of the samples.
  void assign(const std::vector<FeatureIds>& ids, const std::vector<int>& features,
              const std::vector<int64_t>& grain_ends = {});
  // Offsets and weights are copied, ids are dropped: the caller's arrays may end.
  void keep();

  // Gives a feature of kept ids other weights, [num_values], which are copied.
  void set_weights(size_t k, const float* weights);

  // The positions of a grain of kept ids, with the numbers that their ids have here.
  Distinct grain(size_t number, size_t num_grains) const;
  // Gives the ids other numbers: that of number u is numbers[u].
  void renumber(const std::vector<uint32_t>& numbers) noexcept;

  size_t num_features() const noexcept { return features_.size(); }
  const FeatureIds& feature(size_t k) const noexcept { return features_[k]; }
  int64_t num_positions() const noexcept { return first_.back(); }
  // How many ranges of partitions `num_ids` ids are cut into, so that threads share the work: a power of two.
  static int num_ranges(int64_t num_ids) noexcept;

  // Finds the ids of one range. Ranges may run on different threads; one range has numbers from 0.
  void find(UniqueIds& range);
  // Numbers the ids of all ranges through, once all have been found; returns how many there are.
  template <class Range>
  uint32_t number(std::vector<Range>& ranges) {
    uint32_t base = 0;
    std::array<uint32_t, kPartitions> base_of{};
    for (Range& range : ranges) {
      range.base = base;
      base += static_cast<uint32_t>(range.ids.size());
      for (int p = range.first_partition; p < range.last_partition; p++) base_of[static_cast<size_t>(p)] = range.base;
    }
    if (ranges.size() > 1) add_bases(base_of);
    return base;
  }

  // Number of the id at each position: of one feature, and of all features one after the other.
  const uint32_t* inverse(size_t k) const noexcept { return inverse_.data() + first_[k]; }
  const Column<uint32_t>& inverse() const noexcept { return inverse_; }

 private:
  void find_in_range(UniqueIds& range);
  void add_bases(const std::array<uint32_t, kPartitions>& base_of);

  std::vector<FeatureIds> features_;  // grain by grain
  std::vector<int64_t> first_;        // position at which each feature starts, and the end
  Column<uint32_t> inverse_;
  std::vector<std::vector<int64_t>> offsets_;
  std::vector<std::vector<float>> weights_;
};

}  // namespace hotbed
