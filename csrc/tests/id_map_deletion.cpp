// SPDX-License-Identifier: Apache-2.0
// Open addressing that leaves tombstones slows down or grows under churn. This map keeps overflow counts instead.
#include <doctest.h>

#include <deque>

#include "core/id_map.h"
#include "draw.h"

using namespace hotbed;

TEST_CASE("a map of constant size does not grow under endless churn") {
  IdMap map(42);
  std::deque<int64_t> alive;
  Draw draw(1);
  const auto add = [&] {
    const int64_t id = static_cast<int64_t>(draw.next());
    map.insert(id, hash_id(id), 1);
    alive.push_back(id);
  };
  for (int i = 0; i < 3000; i++) add();
  const uint64_t bytes = map.num_bytes();
  for (int i = 0; i < 300000; i++) {
    REQUIRE(map.erase(alive.front(), hash_id(alive.front())));
    alive.pop_front();
    add();
  }
  CHECK(map.num_bytes() == bytes);
  CHECK(map.size() == 3000);
  for (int64_t id : alive) REQUIRE(map.find(id, hash_id(id)) == 1);
}

TEST_CASE("an id that was erased can come back with another slot") {
  IdMap map(1);
  for (int round = 0; round < 100; round++)
    for (int64_t id : kSpecialIds) {
      const uint32_t slot = static_cast<uint32_t>(round * 8);
      REQUIRE(map.find(id, hash_id(id)) == kNoSlot);
      map.insert(id, hash_id(id), slot);
      REQUIRE(map.find(id, hash_id(id)) == slot);
      REQUIRE(map.erase(id, hash_id(id)));
      REQUIRE_FALSE(map.erase(id, hash_id(id)));
    }
  CHECK(map.size() == 0);
}
