// SPDX-License-Identifier: Apache-2.0
#include <doctest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "core/id_map.h"
#include "draw.h"

using namespace hotbed;

TEST_CASE("growing keeps every id, and an id costs at most 24 bytes on average once a map has a few hundred") {
  IdMap map(17);
  double worst_after_warmup = 0, sum = 0;
  int samples = 0;
  const std::vector<int64_t> ids = special_and_random_ids(100000, 5);
  for (uint32_t i = 0; i < ids.size(); i++) {
    map.insert(ids[i], hash_id(ids[i]), i);
    if (i < 500) continue;
    const double per_id = static_cast<double>(map.num_bytes()) / map.size();
    worst_after_warmup = std::max(worst_after_warmup, per_id);
    sum += per_id, samples++;
  }
  for (uint32_t i = 0; i < ids.size(); i++) REQUIRE(map.find(ids[i], hash_id(ids[i])) == i);
  CHECK(sum / samples <= 24.0);
  CHECK(worst_after_warmup <= 24.0 * 1.5);
}

TEST_CASE("partitions of a steadily growing table rebuild in turn, not together") {
  std::vector<std::unique_ptr<IdMap>> maps;
  for (int p = 0; p < kPartitions; p++) maps.push_back(std::make_unique<IdMap>(p));
  Draw draw(11);
  // Past the first few hundred rows a partition, count rebuilds per 1 % of growth.
  int rebuilds_in_worst = 0, rebuilds = 0;
  uint64_t total = 0, next = 0;
  while (total < 400000) {
    const int64_t id = static_cast<int64_t>(draw.next());
    const uint64_t hash = hash_id(id);
    IdMap& map = *maps[static_cast<size_t>(partition_of(hash))];
    const uint64_t before = map.num_bytes();
    map.insert(id, hash, static_cast<uint32_t>(total++));
    if (total < 100000) continue;
    rebuilds += map.num_bytes() != before;
    if (total >= next) {
      if (next) rebuilds_in_worst = std::max(rebuilds_in_worst, rebuilds);
      rebuilds = 0, next = total + total / 100;
    }
  }
  CHECK(rebuilds_in_worst <= 40);  // all of 256 would be 256; an even spread over growth by half is about 6
}

TEST_CASE("shrinking after many erasures gives memory back and keeps the rest") {
  IdMap map(200);
  const std::vector<int64_t> ids = special_and_random_ids(50000, 6);
  for (uint32_t i = 0; i < ids.size(); i++) map.insert(ids[i], hash_id(ids[i]), i);
  const uint64_t full = map.num_bytes();
  for (size_t i = 1000; i < ids.size(); i++) REQUIRE(map.erase(ids[i], hash_id(ids[i])));
  map.shrink();
  CHECK(map.num_bytes() < full / 10);
  for (uint32_t i = 0; i < ids.size(); i++) REQUIRE(map.find(ids[i], hash_id(ids[i])) == (i < 1000 ? i : kNoSlot));
  for (size_t i = 0; i < 1000; i++) REQUIRE(map.erase(ids[i], hash_id(ids[i])));
  map.shrink();
  CHECK(map.size() == 0);
  map.insert(-1, hash_id(-1), 7);
  CHECK(map.find(-1, hash_id(-1)) == 7);
}
