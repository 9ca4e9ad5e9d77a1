// SPDX-License-Identifier: Apache-2.0
#include "distinct.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "thread_pool.h"

namespace hotbed {
namespace {

// Ids of a table are cut into ranges of partitions once a batch holds this many of them.
constexpr int64_t kIdsPerRange = 16384;
constexpr int kMaxRanges = 32;
constexpr int64_t kIdsPerTask = 8192;

// Open addressing from a hash to 1 + the number of a unique id; kept by its thread, cleared for every use.
template <class Number>
class Heads {
 public:
  explicit Heads(int64_t num_ids) {
    thread_local std::vector<Number> kept;
    heads_ = &kept;
    clear(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(num_ids, 8)) * 2));
  }
  size_t size() const noexcept { return heads_->size(); }
  void clear(size_t size) {
    heads_->assign(size, 0);
    mask_ = size - 1;
  }
  uint64_t home(uint64_t hash) const noexcept { return (hash >> 20) & mask_; }
  uint64_t next(uint64_t at) const noexcept { return (at + 1) & mask_; }
  Number* data() noexcept { return heads_->data(); }

 private:
  std::vector<Number>* heads_;
  uint64_t mask_ = 0;
};

// Numbers the distinct ids of `values` on from `count`; ids[number] and hashes[number] receive them, inverse their
// numbers. Written without a branch on "seen before?", which no predictor can guess: the new id is always stored, and
// kept if it is new.
template <class Number>
uint32_t number_distinct(const int64_t* values, int64_t n, Heads<Number>& heads, int64_t* ids, uint64_t* hashes,
                         uint32_t count, uint32_t* inverse) {
  Number* slots = heads.data();
  for (int64_t i = 0; i < n; i++) {
    const int64_t id = values[i];
    const uint64_t hash = hash_id(id);
    uint64_t at = heads.home(hash);
    uint32_t u = slots[at];
    while (u != 0 && ids[size_t{u} - 1] != id) u = slots[at = heads.next(at)];
    const uint32_t fresh = u == 0;
    ids[count] = id;
    hashes[count] = hash;
    u = fresh ? count + 1 : u;
    slots[at] = static_cast<Number>(u);
    count += fresh;
    inverse[i] = u - 1;
  }
  return count;
}

// The samples [first, last) of a feature; `offsets` holds where their ids begin, and must outlive them.
FeatureIds samples_of(const FeatureIds& whole, int64_t first, int64_t last, std::vector<int64_t>& offsets) {
  const int64_t begin = whole.offsets ? whole.offsets[first] : first;
  const int64_t end = whole.offsets ? whole.offsets[last] : last;
  if (whole.offsets) {
    offsets.assign(whole.offsets + first, whole.offsets + last + 1);
    for (int64_t& offset : offsets) offset -= begin;
  }
  return {whole.values + begin, end - begin, whole.offsets ? offsets.data() : nullptr,
          whole.weights ? whole.weights + begin : nullptr, last - first};
}

}  // namespace

void Distinct::assign(const std::vector<FeatureIds>& ids, const std::vector<int>& features,
                      const std::vector<int64_t>& grain_ends) {
  features_.clear(), first_.clear();
  offsets_.assign(grain_ends.size() * features.size(), {});
  if (grain_ends.empty())
    for (const int f : features) features_.push_back(ids[static_cast<size_t>(f)]);
  for (size_t g = 0; g < grain_ends.size(); g++)
    for (const int f : features) {
      const FeatureIds& whole = ids[static_cast<size_t>(f)];
      const int64_t first = g ? grain_ends[g - 1] : 0;
      if (first > grain_ends[g] || grain_ends.back() != whole.num_samples)
        throw std::invalid_argument("lookup: the ends of grains must rise to the number of samples, " +
                                    std::to_string(whole.num_samples) + ", got " + std::to_string(grain_ends.back()) +
                                    " at the end. Check the batch.");
      features_.push_back(samples_of(whole, first, grain_ends[g], offsets_[features_.size()]));
    }
  int64_t num_positions = 0;
  for (const FeatureIds& feature : features_) {
    first_.push_back(num_positions);
    num_positions += feature.num_values;
  }
  first_.push_back(num_positions);
  if (num_positions >= 0xffffffffll)
    throw std::length_error("lookup: a batch holds at most 2^32 - 2 ids of one table, got " +
                            std::to_string(num_positions) + ". Use smaller batches.");
  inverse_.resize(static_cast<size_t>(num_positions));
}

void Distinct::keep() {
  offsets_.resize(features_.size());
  weights_.resize(features_.size());
  for (size_t k = 0; k < features_.size(); k++) {
    FeatureIds& ids = features_[k];
    if (ids.offsets && offsets_[k].empty()) {
      offsets_[k].assign(ids.offsets, ids.offsets + ids.num_samples + 1);
      ids.offsets = offsets_[k].data();
    }
    if (ids.weights) {
      weights_[k].assign(ids.weights, ids.weights + ids.num_values);
      ids.weights = weights_[k].data();
    }
    ids.values = nullptr;
  }
}

void Distinct::set_weights(size_t k, const float* weights) {
  weights_[k].assign(weights, weights + features_[k].num_values);
  features_[k].weights = weights_[k].data();
}

Distinct Distinct::grain(size_t number, size_t num_grains) const {
  const size_t num_features = features_.size() / num_grains, first = number * num_features;
  Distinct out;
  for (size_t k = first; k < first + num_features; k++) {
    out.features_.push_back(features_[k]);
    out.first_.push_back(first_[k] - first_[first]);
  }
  out.first_.push_back(first_[first + num_features] - first_[first]);
  out.inverse_.assign(inverse_.begin() + first_[first], inverse_.begin() + first_[first + num_features]);
  out.keep();
  return out;
}

void Distinct::renumber(const std::vector<uint32_t>& numbers) noexcept {
  for (uint32_t& number : inverse_) number = numbers[number];
}

int Distinct::num_ranges(int64_t num_ids) noexcept {
  const int64_t wanted = num_ids / kIdsPerRange;
  return static_cast<int>(std::bit_floor(static_cast<uint64_t>(std::clamp<int64_t>(wanted, 1, kMaxRanges))));
}

void Distinct::find(UniqueIds& range) {
  if (!range.covers_all()) return find_in_range(range);
  const int64_t n = num_positions();
  range.ids.resize(static_cast<size_t>(n) + 1);  // the place after the last is written too
  range.hashes.resize(static_cast<size_t>(n) + 1);
  uint32_t count = 0;
  const auto number_all = [&](auto heads) {
    for (size_t k = 0; k < features_.size(); k++)
      count = number_distinct(features_[k].values, features_[k].num_values, heads, range.ids.data(),
                              range.hashes.data(), count, inverse_.data() + first_[k]);
  };
  if (n < 0xffff) number_all(Heads<uint16_t>(n));
  else number_all(Heads<uint32_t>(n));
  range.ids.resize(count);
  range.hashes.resize(count);
}

// The same where a batch is cut into several ranges: ids of other ranges are passed over.
void Distinct::find_in_range(UniqueIds& range) {
  const int64_t share = num_positions() * (range.last_partition - range.first_partition) / kPartitions;
  Heads<uint32_t> heads(share * 2);
  range.ids.clear(), range.hashes.clear();
  for (size_t k = 0; k < features_.size(); k++) {
    const FeatureIds& feature = features_[k];
    uint32_t* inverse = inverse_.data() + first_[k];
    for (int64_t i = 0; i < feature.num_values; i++) {
      const int64_t id = feature.values[i];
      const uint64_t hash = hash_id(id);
      if (!range.covers(hash)) continue;
      if (range.ids.size() * 2 > heads.size()) {  // a skewed batch: more distinct ids here than expected
        heads.clear(heads.size() * 2);
        for (uint32_t u = 0; u < range.ids.size(); u++) {
          uint64_t at = heads.home(range.hashes[u]);
          while (heads.data()[at]) at = heads.next(at);
          heads.data()[at] = u + 1;
        }
      }
      uint64_t at = heads.home(hash);
      while (heads.data()[at] && range.ids[heads.data()[at] - 1] != id) at = heads.next(at);
      uint32_t& head = heads.data()[at];
      if (head == 0) {
        range.ids.push_back(id);
        range.hashes.push_back(hash);
        head = static_cast<uint32_t>(range.ids.size());
      }
      inverse[i] = head - 1;
    }
  }
}

// Makes `inverse` of several ranges point at the numbers among all unique ids.
void Distinct::add_bases(const std::array<uint32_t, kPartitions>& base_of) {
  for (size_t k = 0; k < features_.size(); k++) {
    const FeatureIds& feature = features_[k];
    uint32_t* inverse = inverse_.data() + first_[k];
    const int64_t tasks = (feature.num_values + kIdsPerTask - 1) / kIdsPerTask;
    ThreadPool::instance().run(static_cast<int>(tasks), [&](int task) {
      const int64_t end = std::min(feature.num_values, (task + 1) * kIdsPerTask);
      for (int64_t i = task * kIdsPerTask; i < end; i++)
        inverse[i] += base_of[static_cast<size_t>(partition_of(hash_id(feature.values[i])))];
    });
  }
}

}  // namespace hotbed
