// SPDX-License-Identifier: Apache-2.0
// The distinct ids of features, for every way to cut them into ranges, against an ordered list.
#include "core/distinct.h"

#include <doctest.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/request_ids.h"
#include "draw.h"

using namespace hotbed;

namespace {

// The ids of two features of one table and of one that belongs elsewhere.
struct Input {
  std::vector<std::vector<int64_t>> values;
  std::vector<FeatureIds> ids;

  Input(size_t n, uint64_t universe, uint64_t seed) : values(3) {
    Draw draw(seed);
    for (std::vector<int64_t>& feature : values) {
      for (const int64_t id : kSpecialIds) feature.push_back(id);
      while (feature.size() < n) feature.push_back(static_cast<int64_t>(mix64(draw.below(universe))));
    }
    for (const std::vector<int64_t>& feature : values) {
      const int64_t num_values = static_cast<int64_t>(feature.size());
      ids.push_back({feature.data(), num_values, nullptr, nullptr, num_values});
    }
  }
};

std::vector<UniqueIds> cut(int pieces) {
  std::vector<UniqueIds> ranges(static_cast<size_t>(pieces));
  for (int r = 0; r < pieces; r++) {
    ranges[static_cast<size_t>(r)].first_partition = kPartitions * r / pieces;
    ranges[static_cast<size_t>(r)].last_partition = kPartitions * (r + 1) / pieces;
  }
  return ranges;
}

}  // namespace

TEST_CASE("every position finds its id again, each id has one number, numbers follow the first occurrence") {
  for (int pieces : {1, 4, 32})
    for (uint64_t universe : {uint64_t{3}, uint64_t{1} << 40}) {
      CAPTURE(pieces);
      CAPTURE(universe);
      const Input input(20000, universe, 7);
      Distinct distinct;
      distinct.assign(input.ids, {2, 0});
      std::vector<UniqueIds> ranges = cut(pieces);
      for (UniqueIds& range : ranges) distinct.find(range);
      const uint32_t num_unique = distinct.number(ranges);
      std::vector<int64_t> unique;
      for (const UniqueIds& range : ranges) {
        CHECK(range.base == unique.size());
        for (size_t u = 0; u < range.ids.size(); u++) {
          REQUIRE(range.hashes[u] == hash_id(range.ids[u]));
          REQUIRE(range.covers(range.hashes[u]));
        }
        unique.insert(unique.end(), range.ids.begin(), range.ids.end());
      }
      REQUIRE(unique.size() == num_unique);
      std::vector<int64_t> sorted = unique;
      std::sort(sorted.begin(), sorted.end());
      CHECK(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end());
      std::vector<uint32_t> next(ranges.size());  // number that the next new id of a range must have
      for (size_t r = 0; r < ranges.size(); r++) next[r] = ranges[r].base;
      for (size_t k = 0; k < 2; k++) {
        const std::vector<int64_t>& values = input.values[k == 0 ? 2 : 0];
        for (size_t i = 0; i < values.size(); i++) {
          const uint32_t number = distinct.inverse(k)[i];
          REQUIRE(unique[number] == values[i]);
          uint32_t& fresh = next[static_cast<size_t>(partition_of(hash_id(values[i]))) * ranges.size() / kPartitions];
          REQUIRE(number <= fresh);
          fresh += number == fresh;
        }
      }
    }
}

TEST_CASE("a batch is cut into ranges by its size alone, and an empty one has no ids") {
  const Input input(40000, 1 << 20, 3);
  Distinct distinct;
  distinct.assign(input.ids, {0, 1, 2});
  CHECK(distinct.num_positions() == 120000);
  CHECK(Distinct::num_ranges(distinct.num_positions()) == 4);
  distinct.assign(input.ids, {});
  CHECK(Distinct::num_ranges(distinct.num_positions()) == 1);
  UniqueIds none;
  distinct.find(none);
  CHECK(none.ids.empty());
}

TEST_CASE("a batch of more ids than numbers is refused, and the message names the count") {
  FeatureIds ids;
  ids.num_values = ids.num_samples = 0xffffffffll;
  Distinct distinct;
  std::string message;
  try {
    distinct.assign({ids}, {0});
  } catch (const std::length_error& error) { message = error.what(); }
  CHECK(message.find("got 4294967295") != std::string::npos);
}

TEST_CASE("offsets and weights that are kept outlive the caller's arrays") {
  const std::vector<int64_t> values{4, 4, 9};
  std::vector<int64_t> offsets{0, 2, 3};
  std::vector<float> weights{1.0f, 2.0f, 3.0f};
  Distinct distinct;
  distinct.assign({{values.data(), 3, offsets.data(), weights.data(), 2}}, {0});
  UniqueIds unique;
  distinct.find(unique);
  distinct.keep();
  offsets.assign(3, -1);
  weights.assign(3, -1.0f);
  CHECK(distinct.feature(0).offsets[1] == 2);
  CHECK(distinct.feature(0).weights[2] == 3.0f);
  CHECK(distinct.feature(0).values == nullptr);
  CHECK(distinct.inverse() == Column<uint32_t>{0, 0, 1});
}

TEST_CASE("a request pools each table's features, a single sample for all, and skips tables without features") {
  const std::vector<int64_t> items{7, 8, 7}, user{5}, offsets{0, 1};
  const std::vector<Feature> features{{2, Pooling::kSum}, {0, Pooling::kMean}, {2, Pooling::kNone}};
  const std::vector<FeatureIds> ids{{items.data(), 3, nullptr, nullptr, 3},
                                    {user.data(), 1, offsets.data(), nullptr, 1},
                                    {items.data(), 3, nullptr, nullptr, 3}};
  RequestIds request;
  for (int round = 0; round < 2; round++) {  // its memory serves the next request
    request.assign(features, ids);
    REQUIRE(request.num_tables() == 3);
    CHECK(request.unique(0).ids == Column<int64_t>{5});
    CHECK(request.unique(1).ids.empty());
    CHECK(request.unique(2).ids == Column<int64_t>{7, 8});
    const float five = 0.5f, seven = 0.7f, eight = 0.8f;
    const float* of_user[] = {&five};
    const float* of_items[] = {&seven, &eight};
    std::vector<float> flat(6), sequence(3);
    const std::vector<OutputRows> out{{flat.data(), 2}, {flat.data() + 1, 2}, {sequence.data(), 1}};
    request.pool(0, of_user, 1, out, 3);
    request.pool(1, nullptr, 1, out, 3);
    request.pool(2, of_items, 1, out, 3);
    CHECK(flat == std::vector<float>{0.7f, 0.5f, 0.8f, 0.5f, 0.7f, 0.5f});
    CHECK(sequence == std::vector<float>{0.7f, 0.8f, 0.7f});
  }
}
