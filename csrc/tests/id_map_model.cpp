// SPDX-License-Identifier: Apache-2.0
// Without a reference a random run only finds the faults that crash: every step is compared with std::unordered_map.
#include <doctest.h>

#include <unordered_map>

#include "core/id_map.h"
#include "draw.h"

using namespace hotbed;

namespace {

void compare(const IdMap& map, const std::unordered_map<int64_t, uint32_t>& model) {
  REQUIRE(map.size() == model.size());
  size_t visited = 0;
  map.for_each([&](int64_t id, uint32_t slot) {
    auto it = model.find(id);
    REQUIRE(it != model.end());
    REQUIRE(it->second == slot);
    visited++;
  });
  REQUIRE(visited == model.size());
}

// `universe` ids; a small one repeats and collides, a large one grows. `erase_share` of 16 operations erase.
void random_run(uint64_t seed, size_t universe, uint64_t erase_share, int num_operations) {
  const std::vector<int64_t> ids = special_and_random_ids(universe, seed);
  std::unordered_map<int64_t, uint32_t> model;
  IdMap map(static_cast<int>(seed % 256));
  Draw draw(seed * 977 + 1);
  for (int i = 0; i < num_operations; i++) {
    const int64_t id = ids[draw.below(ids.size())];
    const uint64_t hash = hash_id(id);
    const auto known = model.find(id);
    const uint32_t found = map.find(id, hash);
    REQUIRE(found == (known == model.end() ? kNoSlot : known->second));
    if (draw.below(16) < erase_share) {
      REQUIRE(map.erase(id, hash) == (known != model.end()));
      model.erase(id);
    } else if (known == model.end()) {
      const uint32_t slot = static_cast<uint32_t>(draw.below(0xfffffffe));
      map.insert(id, hash, slot);
      model.emplace(id, slot);
    }
    if (draw.below(4096) == 0) map.shrink();
    if (i % 5000 == 0) compare(map, model);
  }
  compare(map, model);
}

}  // namespace

TEST_CASE("an id map equals std::unordered_map under random inserts, erasures and lookups") {
  for (uint64_t seed = 0; seed < 6; seed++) {
    CAPTURE(seed);
    random_run(seed, 20, 6, 20000);      // tiny: every id comes and goes
    random_run(seed, 3000, 7, 40000);    // half full, heavy churn
    random_run(seed, 200000, 2, 60000);  // grows
  }
}

TEST_CASE("ids whose hashes share a bucket are told apart") {
  // Ids that fall into one bucket of any small map: equal low 32 bits of the hash, found by search.
  std::vector<int64_t> ids;
  for (int64_t id = 0; ids.size() < 40; id++)
    if ((hash_id(id) & 0xffffffffu) < (1u << 20)) ids.push_back(id);
  IdMap map(3);
  std::unordered_map<int64_t, uint32_t> model;
  for (uint32_t i = 0; i < ids.size(); i++) map.insert(ids[i], hash_id(ids[i]), i), model[ids[i]] = i;
  compare(map, model);
  for (size_t i = 0; i < ids.size(); i += 2) {
    REQUIRE(map.erase(ids[i], hash_id(ids[i])));
    model.erase(ids[i]);
  }
  compare(map, model);
  for (size_t i = 0; i < ids.size(); i++)
    CHECK(map.find(ids[i], hash_id(ids[i])) == (i % 2 ? static_cast<uint32_t>(i) : kNoSlot));
}

TEST_CASE("an empty map finds and erases nothing and holds no memory") {
  IdMap map(0);
  for (int64_t id : kSpecialIds) {
    CHECK(map.find(id, hash_id(id)) == kNoSlot);
    CHECK_FALSE(map.erase(id, hash_id(id)));
  }
  CHECK(map.num_bytes() == 0);
}

TEST_CASE("a search for an absent id ends, also when every bucket was once passed by") {
  // With two buckets both can hold ids of the other: a search that only ends at a bucket nobody passed would go round
  // for ever.
  std::vector<int64_t> low, high;
  for (int64_t id = 0; low.size() < 8 || high.size() < 8; id++)
    (bucket_of(hash_id(id), 2) == 0 ? low : high).push_back(id);
  IdMap map(0);
  while (map.num_bytes() < 128) {  // grow to two buckets, then empty
    const int64_t id = low[map.size()];
    map.insert(id, hash_id(id), 1);
  }
  REQUIRE(map.num_bytes() == 128);
  for (int64_t id : low) map.erase(id, hash_id(id));
  for (size_t i = 0; i < 6; i++) map.insert(low[i], hash_id(low[i]), 1);
  for (size_t i = 0; i < 4; i++) map.erase(low[i], hash_id(low[i]));
  for (size_t i = 0; i < 5; i++) map.insert(high[i], hash_id(high[i]), 2);
  REQUIRE(map.num_bytes() == 128);
  for (int64_t id = -1000; id < 0; id++) {
    REQUIRE(map.find(id, hash_id(id)) == kNoSlot);
    REQUIRE_FALSE(map.erase(id, hash_id(id)));
  }
  for (size_t i = 0; i < 5; i++) REQUIRE(map.find(high[i], hash_id(high[i])) == 2);
}
