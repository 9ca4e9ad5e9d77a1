// SPDX-License-Identifier: Apache-2.0
#include "sums.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <numeric>
#include <stdexcept>
#include <unordered_map>

#include "thread_pool.h"

namespace hotbed {
namespace {

// Fills a grain's part, whose positions are there, and the numbers of its ids in the whole.
void take_ids(const Part& whole, Part& part, std::vector<uint32_t>& members) {
  constexpr uint32_t kAbsent = 0xffffffffu;
  part.withdrawn = whole.withdrawn;
  part.step = whole.step;
  part.ranges.resize(whole.ranges.size());
  for (size_t r = 0; r < whole.ranges.size(); r++) {
    part.ranges[r].first_partition = whole.ranges[r].first_partition;
    part.ranges[r].last_partition = whole.ranges[r].last_partition;
  }
  if (part.distinct.num_positions() == whole.distinct.num_positions()) {  // the other grains have no ids
    for (size_t r = 0; r < whole.ranges.size(); r++) part.ranges[r].take_all(whole.ranges[r]);
    part.num_unique = whole.num_unique;
    part.received = whole.received;
    members.resize(static_cast<size_t>(whole.num_unique));
    std::iota(members.begin(), members.end(), 0u);
    return;
  }
  std::vector<uint32_t> numbers(static_cast<size_t>(whole.num_unique), kAbsent);  // in their range of the part
  std::vector<std::vector<uint32_t>> of_range(whole.ranges.size());
  for (const uint32_t u : part.distinct.inverse()) {
    if (numbers[u] != kAbsent) continue;
    size_t r = whole.ranges.size() - 1;
    while (whole.ranges[r].base > u) r--;
    numbers[u] = static_cast<uint32_t>(of_range[r].size());
    of_range[r].push_back(u);
  }
  for (size_t r = 0; r < whole.ranges.size(); r++) {
    const uint32_t base = static_cast<uint32_t>(members.size());
    part.ranges[r].base = base;
    part.ranges[r].take_ids(whole.ranges[r], of_range[r]);
    for (const uint32_t u : of_range[r]) numbers[u] += base;
    members.insert(members.end(), of_range[r].begin(), of_range[r].end());
  }
  part.num_unique = static_cast<int64_t>(members.size());
  if (!whole.received.empty()) {
    part.received.resize(members.size());
    for (size_t u = 0; u < members.size(); u++) part.received[u] = whole.received[members[u]];
  }
  part.distinct.renumber(numbers);
}

}  // namespace

std::vector<Parts> divide(const Parts& whole, size_t num_grains, OwnMembers* members) {
  std::vector<Parts> grains;
  for (size_t g = 0; g < num_grains; g++) {
    Parts& grain = grains.emplace_back(whole.tables(), whole.features());
    for (size_t t = 0; t < whole.size(); t++) {
      grain[t].generation = whole[t].generation;
      grain[t].plans = whole[t].plans;
    }
    grain.retain();
  }
  members->assign(whole.size(), std::vector<std::vector<uint32_t>>(num_grains));
  ThreadPool::instance().run(static_cast<int>(num_grains * whole.size()), [&](int task) {
    const size_t g = static_cast<size_t>(task) / whole.size(), t = static_cast<size_t>(task) % whole.size();
    grains[g][t].distinct = whole[t].distinct.grain(g, num_grains);
    take_ids(whole[t], grains[g][t], (*members)[t][g]);
  });
  return grains;
}

Members views(const OwnMembers& members) {
  Members all;
  for (const std::vector<std::vector<uint32_t>>& of_table : members) all.emplace_back(of_table.begin(), of_table.end());
  return all;
}

GrainJoin::GrainJoin(Members members, const std::vector<GrainSums>& grains, float zero)
    : members_(std::move(members)), grains_(grains), zero_(zero) {
  if (members_.empty()) throw std::logic_error("step: join needs a divided batch, got none. Call divide first.");
  for (size_t t = 0; t < members_.size(); t++) {
    if (grains.size() != members_[t].size())
      throw std::invalid_argument("step: join needs the sums of each grain, got " + std::to_string(grains.size()) +
                                  " of " + std::to_string(members_[t].size()) + ".");
    for (size_t g = 0; g < grains.size(); g++)
      if (grains[g].sums[t] && grains[g].num_ids[t] != static_cast<int64_t>(members_[t][g].size()))
        throw std::invalid_argument("step: a grain must have a sum for each of its distinct ids, got " +
                                    std::to_string(grains[g].num_ids[t]) + " for " +
                                    std::to_string(members_[t][g].size()) + " ids.");
  }
}

// Of the grains [first, last), for the ids of one range, whose first sum is sums[0].
void GrainJoin::add(size_t t, const Uniques& range, size_t dim, size_t first, size_t last, float* sums) const {
  const size_t length = range.ids.size() * dim;
  if (last - first > 2) {
    const size_t middle = first + (last - first) / 2;
    Column<float> second(length);
    add(t, range, dim, first, middle, sums);
    add(t, range, dim, middle, last, second.data());
    for (size_t i = 0; i < length; i++) sums[i] += second[i];
    return;
  }
  std::fill_n(sums, length, kNoSum);
  const float zero = zero_;
  for (size_t g = first; g < last; g++) {
    const std::optional<const float*> of_grain = grains_[g].sums[t];
    if (!of_grain) continue;
    const std::span<const uint32_t> members = members_[t][g];
    const uint32_t end = range.base + static_cast<uint32_t>(range.ids.size());
    auto at = std::partition_point(members.begin(), members.end(), [&](uint32_t u) { return u < range.base; });
    const float* gradient = *of_grain + static_cast<size_t>(at - members.begin()) * dim;
    for (; at != members.end() && *at < end; at++, gradient += dim) {
      const size_t u = *at - range.base;
      if (range.slots[u] == kNoSlot) continue;  // refused when it was mapped: it had no row to take a gradient
      for (size_t d = 0; d < dim; d++) sums[u * dim + d] += gradient[d] + zero;
    }
  }
}

void GrainJoin::join(const Parts& parts, size_t t, const Uniques& range, float* sums) const {
  const auto dim = static_cast<size_t>(parts[t].table->config().dim);
  add(t, range, dim, 0, grains_.size(), sums + range.base * dim);
}

bool GrainJoin::join_all(const Parts& parts, const std::vector<float*>& sums) const {
  std::atomic<bool> finite{true};
  each_range(parts, [&](size_t t, size_t r) {
    const Uniques& range = parts[t].ranges[r];
    join(parts, t, range, sums[t]);
    const int64_t dim = parts[t].table->config().dim;
    if (!kernels().finite(sums[t] + range.base * dim, static_cast<int64_t>(range.ids.size()) * dim))
      finite.store(false);
  });
  return finite.load();
}

Parts summed(Parts& parts, const std::vector<float*>& sums) {
  parts.hold();
  Parts with_sums(parts.tables(), {});
  for (size_t t = 0; t < parts.size(); t++) {
    const Part& from = parts[t];
    Part& part = with_sums[t];
    part.num_unique = from.num_unique, part.withdrawn = from.withdrawn, part.step = from.step;
    part.generation = from.generation, part.plans = from.plans;
    part.ranges.resize(from.ranges.size());
  }
  with_sums.retain();
  ThreadPool::instance().run(static_cast<int>(parts.size()), [&](int i) {
    const auto t = static_cast<size_t>(i);
    const size_t dim = static_cast<size_t>(parts[t].table->config().dim);
    float* sum = sums[t];
    for (size_t r = 0; r < parts[t].ranges.size(); r++) {
      Uniques& range = with_sums[t].ranges[r];
      range.take_all(parts[t].ranges[r]);
      for (size_t u = 0; u < range.ids.size(); u++, sum += dim) {
        if (std::bit_cast<uint32_t>(*sum) != std::bit_cast<uint32_t>(kNoSum)) continue;
        range.drop_row(u);
        std::fill_n(sum, dim, 0.0f);
      }
    }
  });
  return with_sums;
}

// The sums of several steps, merged.

namespace {

// The number of each distinct id of a range, by its hash.
class Numbers {
 public:
  explicit Numbers(size_t most) : cells_(std::bit_ceil(2 * most + 1), kNone), mask_(cells_.size() - 1) {}
  // The number among `uniques` of id number u of `from`, which is taken in where it is new.
  uint32_t number_of(const Uniques& from, size_t u, Uniques& uniques) {
    size_t at = from.hashes[u] & mask_;
    while (cells_[at] != kNone && uniques.ids[cells_[at]] != from.ids[u]) at = (at + 1) & mask_;
    if (cells_[at] != kNone) return cells_[at];
    uniques.append(from, u);
    return cells_[at] = static_cast<uint32_t>(uniques.ids.size() - 1);
  }

 private:
  static constexpr uint32_t kNone = 0xffffffffu;
  std::vector<uint32_t> cells_;
  size_t mask_;
};

// One table of a merge: its share of each step, and of each range the numbers that their ids get, in order.
struct Shares {
  struct Share {
    const Part* part;
    const float* sums;
  };
  std::vector<Share> shares;
  std::vector<std::vector<uint32_t>> numbers;

  // The plans that keep the frames of all parts.
  std::vector<std::shared_ptr<Frames::Plan>> plans() const {
    std::vector<std::shared_ptr<Frames::Plan>> all;
    for (const Share& share : shares)
      for (const auto& plan : share.part->plans)
        if (std::find(all.begin(), all.end(), plan) == all.end()) all.push_back(plan);
    return all;
  }

  // Calls visit(ids of a share, number of one of them among these, its gradient) for each id in the range.
  template <class F>
  void each(const Uniques& range, F&& visit) const {
    for (const Share& share : shares) {
      const int64_t dim = share.part->table->config().dim;
      for (const Uniques& from : share.part->ranges) {
        if (from.last_partition <= range.first_partition || from.first_partition >= range.last_partition) continue;
        const bool whole = from.first_partition >= range.first_partition && from.last_partition <= range.last_partition;
        for (size_t u = 0; u < from.ids.size(); u++)
          if (whole || range.covers(from.hashes[u]))
            visit(from, u, share.sums + (from.base + static_cast<int64_t>(u)) * dim);
      }
    }
  }

  void find(Uniques& range, std::vector<uint32_t>& numbered) const {
    size_t most = 0;
    each(range, [&](const Uniques&, size_t, const float*) { most++; });
    Numbers numbers_by_id(most);
    numbered.reserve(most);
    each(range, [&](const Uniques& from, size_t u, const float*) {
      const uint32_t number = numbers_by_id.number_of(from, u, range);
      if (from.slots[u] != kNoSlot) range.set_row(number, from, u);
      numbered.push_back(number);
    });
  }

  // `sums`: of the range, zeroed.
  void add(const Uniques& range, const std::vector<uint32_t>& numbered, float* sums, int dim) const {
    const uint32_t* number = numbered.data();
    each(range, [&](const Uniques& from, size_t u, const float* gradient) {
      float* sum = sums + int64_t{*number++} * dim;
      if (from.slots[u] == kNoSlot) return;  // refused when it was mapped: it had no row to take a gradient
      for (int d = 0; d < dim; d++) sum[d] += gradient[d];
    });
  }
};

}  // namespace

Parts merge(const std::vector<Parts*>& all, const std::vector<Sums>& sums,
            std::vector<std::vector<float>>* merged_sums) {
  for (Parts* parts : all) parts->hold();
  std::vector<std::shared_ptr<Table>> tables;
  std::unordered_map<const Table*, size_t> place;
  std::vector<Shares> shares;
  for (size_t s = 0; s < all.size(); s++)
    for (size_t p = 0; p < all[s]->size(); p++) {
      const Part& part = (*all[s])[p];
      if (!sums[s][p]) continue;
      const auto [at, is_new] = place.try_emplace(part.table.get(), tables.size());
      if (is_new) tables.push_back(part.table), shares.emplace_back();
      shares[at->second].shares.push_back({&part, *sums[s][p]});
    }
  Parts merged(tables, {});
  for (size_t t = 0; t < tables.size(); t++) {
    Part& part = merged[t];
    part.withdrawn = UINT64_MAX;
    part.generation = tables[t]->generation();
    part.plans = shares[t].plans();
    int64_t num_ids = 0;
    for (const Shares::Share& share : shares[t].shares) {
      num_ids += share.part->num_unique;
      part.withdrawn = std::min(part.withdrawn, share.part->withdrawn);
      part.generation = tables[t]->older(part.generation, share.part->generation);
    }
    cut(part.ranges, num_ids);
    shares[t].numbers.resize(part.ranges.size());
  }
  each_range(merged, [&](size_t t, size_t r) { shares[t].find(merged[t].ranges[r], shares[t].numbers[r]); });
  merged_sums->assign(tables.size(), {});
  for (size_t t = 0; t < tables.size(); t++) {
    Part& part = merged[t];
    for (Uniques& range : part.ranges) {
      range.base = static_cast<uint32_t>(part.num_unique);
      part.num_unique += static_cast<int64_t>(range.ids.size());
    }
    (*merged_sums)[t].resize(static_cast<size_t>(part.num_unique * tables[t]->config().dim));
  }
  merged.retain();
  each_range(merged, [&](size_t t, size_t r) {
    const Uniques& range = merged[t].ranges[r];
    const int dim = tables[t]->config().dim;
    shares[t].add(range, shares[t].numbers[r], (*merged_sums)[t].data() + int64_t{range.base} * dim, dim);
  });
  return merged;
}

}  // namespace hotbed
