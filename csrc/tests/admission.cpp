// SPDX-License-Identifier: Apache-2.0
#include "core/admission.h"

#include <doctest.h>

#include <unordered_map>

#include "draw.h"

using namespace hotbed;

namespace {

Admission exact(uint64_t max_candidates = 1 << 20) {
  Admission a;
  a.kind = AdmitKind::kMinCount, a.min_count = 3, a.max_candidates = max_candidates;
  return a;
}

}  // namespace

TEST_CASE("exact counts equal a map's under random adds, forgets and expiry") {
  Candidates candidates(exact(), 9);
  std::unordered_map<int64_t, Candidate> model;
  const std::vector<int64_t> ids = special_and_random_ids(500, 4);
  Draw draw(2);
  for (int64_t now = 0; now < 60000; now++) {
    const int64_t id = ids[draw.below(ids.size())];
    const uint64_t hash = hash_id(id);
    if (draw.below(50) == 0) {
      candidates.forget(id, hash);
      model.erase(id);
    } else {
      const uint64_t n = 1 + draw.below(3);
      const uint64_t before = candidates.add(id, hash, n, now);
      REQUIRE(before == (model.count(id) ? model[id].count : 0));
      model[id] = {id, static_cast<uint32_t>(before + n), now};
    }
    REQUIRE(candidates.peek(id, hash) == (model.count(id) ? model[id].count : 0));
    if (now % 7000 == 6999) {
      candidates.expire(now - 300);
      std::erase_if(model, [&](const auto& entry) { return entry.second.seen < now - 300; });
      REQUIRE(candidates.entries().size() == model.size());
    }
  }
  for (const Candidate& c : candidates.entries()) {
    REQUIRE(model.count(c.id) == 1);
    REQUIRE(model[c.id].count == c.count);
    REQUIRE(model[c.id].seen == c.seen);
  }
}

TEST_CASE("exact counts stay inside their bound, and the frequent survive") {
  const uint64_t per_partition = 100;
  Candidates candidates(exact(per_partition * kPartitions), 0);
  Draw draw(6);
  const int64_t frequent = -1;
  for (int i = 0; i < 100000; i++) {
    const int64_t id = static_cast<int64_t>(draw.next());
    candidates.add(id, hash_id(id), 1, i);
    if (i % 3 == 0) candidates.add(frequent, hash_id(frequent), 1, i);
    REQUIRE(candidates.entries().size() <= per_partition);
    if (i > 3000) break;
  }
  CHECK(candidates.peek(frequent, hash_id(frequent)) >= 2);
}

TEST_CASE("a sketch never counts too little, and rarely much too much") {
  Admission a = exact();
  a.sketch_bytes = 256 * 4 * 4 * 4096;  // 4 rows of 4096 counters a partition
  Candidates candidates(a, 77);
  std::unordered_map<int64_t, uint64_t> model;
  Draw draw(3);
  const std::vector<int64_t> ids = special_and_random_ids(3000, 12);
  for (int i = 0; i < 30000; i++) {
    const int64_t id = ids[draw.below(draw.below(10) ? 300 : ids.size())];
    candidates.add(id, hash_id(id), 1, 0);
    model[id]++;
  }
  int over = 0;
  for (const auto& [id, count] : model) {
    REQUIRE(candidates.peek(id, hash_id(id)) >= count);
    over += candidates.peek(id, hash_id(id)) > count + 10;
  }
  CHECK(over < 150);
  CHECK(candidates.num_bytes() <= 4 * 4 * 4096 + 4096);
}

TEST_CASE("counts saturate instead of wrapping") {
  for (uint64_t sketch_bytes : {uint64_t{0}, uint64_t{1} << 20}) {
    Admission a = exact();
    a.sketch_bytes = sketch_bytes;
    Candidates candidates(a, 1);
    for (int i = 0; i < 3; i++) candidates.add(5, hash_id(5), 0xf0000000u, i);
    CHECK(candidates.peek(5, hash_id(5)) == 0xffffffffu);
  }
}

TEST_CASE("candidates that were saved count on after loading") {
  Candidates first(exact(), 3), second(exact(), 3);
  const std::vector<int64_t> ids = special_and_random_ids(40, 1);
  for (size_t i = 0; i < ids.size(); i++) first.add(ids[i], hash_id(ids[i]), 1 + i, static_cast<int64_t>(i));
  for (const Candidate& c : first.entries()) second.load(c);
  for (size_t i = 0; i < ids.size(); i++) CHECK(second.add(ids[i], hash_id(ids[i]), 1, 0) == 1 + i);
}
