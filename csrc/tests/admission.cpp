// SPDX-License-Identifier: Apache-2.0
#include "core/admission.h"

#include <doctest.h>

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "core/table.h"
#include "draw.h"

using namespace hotbed;

namespace {

Admission exact() {
  Admission a;
  a.kind = AdmitKind::kMinCount, a.min_count = 3;
  return a;
}

// Little memory: 33 ids of a partition are counted exactly.
Admission little(uint64_t min_count = 3, int64_t expire_after = -1) {
  Admission a = exact();
  a.min_count = min_count, a.admission_bytes = uint64_t{1} << 18, a.expire_after = expire_after;
  return a;
}

bool same(const std::vector<SketchPart>& a, const std::vector<SketchPart>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const SketchPart& x, const SketchPart& y) {
    return x.bits == y.bits && x.newest == y.newest && x.words == y.words;
  });
}

void load_all(Candidates& to, const Candidates& from) {
  for (const Candidate& candidate : from.entries()) to.load(candidate);
  std::vector<SketchPart> parts = from.parts();
  for (size_t g = 0; g < parts.size(); g++) to.load(g, parts[g]);
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
      const int64_t time = now - static_cast<int64_t>(draw.below(200));
      const Candidate before = candidates.add(id, hash, n, time);
      const bool known = model.count(id) == 1;
      REQUIRE(before.count == (known ? model[id].count : 0));
      model[id] = {id, static_cast<uint32_t>(before.count + n), known ? std::max(model[id].seen, time) : time};
      REQUIRE(before.seen == model[id].seen);
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

TEST_CASE("with max_candidates counts stay inside their bound, and the frequent survive") {
  const uint64_t per_partition = 100;
  Admission a = exact();
  a.max_candidates = per_partition * kPartitions;
  Candidates candidates(a, 0);
  Draw draw(6);
  const int64_t frequent = -1;
  for (int i = 0; i < 3000; i++) {
    const int64_t id = static_cast<int64_t>(draw.next());
    candidates.add(id, hash_id(id), 1, i);
    if (i % 3 == 0) candidates.add(frequent, hash_id(frequent), 1, i);
    REQUIRE(candidates.entries().size() <= per_partition);
  }
  CHECK(candidates.peek(frequent, hash_id(frequent)) >= 2);
  CHECK_FALSE(candidates.is_sketch());
}

TEST_CASE("plain sketches and sketches of full memory never count too little, and rarely much too much") {
  Admission plain = exact();
  plain.sketch_bytes = 256 * 4 * 4 * 4096;  // 4 rows of 4096 counters a partition
  Admission full = little(60);
  full.admission_bytes = 256 * 4096 * 4;
  for (const Admission& a : {plain, full}) {
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
      const uint64_t estimate = candidates.peek(id, hash_id(id));
      REQUIRE((estimate >= count || estimate >= candidates.limit()));
      over += estimate > count + 10;
    }
    CHECK(over < 150);
    CHECK(candidates.num_bytes() <= 4 * 4 * 4096 + 4096);
  }
}

TEST_CASE("a sketch takes the place of the map in the same memory and keeps every count") {
  Candidates candidates(little(), 5);
  const std::vector<int64_t> ids = special_and_random_ids(200, 8);
  uint64_t most = 0;
  for (size_t i = 0; i < ids.size(); i++) {
    const bool was_exact = !candidates.is_sketch();
    candidates.add(ids[i], hash_id(ids[i]), 1 + i % 2, static_cast<int64_t>(i));
    most = std::max(most, candidates.num_bytes());
    if (was_exact && candidates.is_sketch()) CHECK(i == 33);
    for (size_t k = 0; k <= i; k++) REQUIRE(candidates.peek(ids[k], hash_id(ids[k])) >= 1 + k % 2);
  }
  CHECK(candidates.is_sketch());
  CHECK(candidates.entries().empty());
  CHECK(most <= 1024);
}

TEST_CASE("a sketch is the same whatever way its ids lay in the map before") {
  const std::vector<int64_t> ids = special_and_random_ids(300, 3);
  Candidates one(little(2), 1), other(little(2), 200);
  for (size_t i = 0; i < 33; i++) {
    one.add(ids[i], hash_id(ids[i]), 1, 7);
    other.add(ids[32 - i], hash_id(ids[32 - i]), 1, 7);
  }
  for (size_t i = 33; i < ids.size(); i++) {
    one.add(ids[i], hash_id(ids[i]), 1, 7);
    other.add(ids[i], hash_id(ids[i]), 1, 7);
  }
  CHECK(one.is_sketch());
  CHECK(same(one.parts(), other.parts()));
}

TEST_CASE("what a sketch counts is forgotten once it has expired, at the latest after twice the time") {
  const int64_t age = 100;
  Candidates candidates(little(9, age), 2);
  const std::vector<int64_t> ids = special_and_random_ids(400, 5);
  std::unordered_map<int64_t, Candidate> model;  // exact, by the rule of the map
  Draw draw(4);
  int64_t last = 0;
  for (int64_t now = 0; now < 3000; now++) {
    const int64_t id = ids[draw.below(now < 2000 ? ids.size() : 5)];
    const Candidate before = candidates.add(id, hash_id(id), 1, now);
    REQUIRE(before.count + 1 >= std::min<uint64_t>(model[id].count + 1, candidates.limit()));
    model[id] = {id, model[id].count + 1, now};
    if (now % 10 == 9) {
      candidates.expire(now - age + 1);
      std::erase_if(model, [&](const auto& entry) { return entry.second.seen < now - age + 1; });
    }
    last = now;
  }
  REQUIRE(candidates.is_sketch());
  candidates.expire(last - age + 1);
  for (size_t i = 5; i < ids.size(); i++) {  // last seen more than twice the age ago
    uint64_t alike = 0;
    for (size_t k = 0; k < 5; k++) alike = std::max(alike, candidates.peek(ids[k], hash_id(ids[k])));
    CHECK(candidates.peek(ids[i], hash_id(ids[i])) <= alike);
  }
  int counted = 0;
  for (size_t i = 5; i < ids.size(); i++) counted += candidates.peek(ids[i], hash_id(ids[i])) > 0;
  CHECK(counted < 8);
  candidates.expire(last + 1);
  for (const int64_t id : ids) CHECK(candidates.peek(id, hash_id(id)) == 0);
}

TEST_CASE("counts saturate instead of wrapping, and a full cell admits at any threshold") {
  for (uint64_t sketch_bytes : {uint64_t{0}, uint64_t{1} << 20}) {
    Admission a = exact();
    a.sketch_bytes = sketch_bytes;
    Candidates candidates(a, 1);
    for (int i = 0; i < 3; i++) candidates.add(5, hash_id(5), 0xf0000000u, i);
    CHECK(candidates.peek(5, hash_id(5)) == 0xffffffffu);
  }
  for (const auto& [min_count, limit] : std::vector<std::pair<uint64_t, uint64_t>>{
           {1, 1}, {2, 3}, {3, 3}, {4, 15}, {15, 15}, {16, 255}, {256, 65535}, {65536, 0xffffffff}}) {
    Candidates candidates(little(min_count), 1);
    for (int64_t id = 0; id < 40; id++) candidates.add(id, hash_id(id), 0xf0000000u, 0);
    CHECK(candidates.limit() == limit);
    for (int i = 0; i < 3; i++) candidates.add(0, hash_id(0), 0xf0000000u, 0);
    CHECK(candidates.peek(0, hash_id(0)) == limit);
  }
}

TEST_CASE("candidates and sketches that were saved count on after loading, bit for bit") {
  for (const Admission& a : {exact(), little(2), little(20, 50)})
    for (size_t before : {size_t{20}, size_t{33}, size_t{34}, size_t{200}}) {
      Candidates first(a, 3), second(a, 3);
      const std::vector<int64_t> ids = special_and_random_ids(300, 1);
      Draw draw(7);
      const auto step = [&](Candidates& to, size_t i, int64_t id) {
        to.add(id, hash_id(id), 1 + i % 3, static_cast<int64_t>(i));
        if (i % 25 == 24) to.expire(static_cast<int64_t>(i) - 49);
      };
      for (size_t i = 0; i < before; i++) step(first, i, ids[draw.below(ids.size())]);
      load_all(second, first);
      for (size_t i = before; i < before + 200; i++) {
        const int64_t id = ids[draw.below(ids.size())];
        step(first, i, id), step(second, i, id);
      }
      CHECK(same(first.parts(), second.parts()));
      const std::vector<Candidate> left = first.entries(), right = second.entries();
      REQUIRE(left.size() == right.size());
      for (size_t i = 0; i < left.size(); i++) {
        CHECK(left[i].id == right[i].id);
        CHECK(left[i].count == right[i].count);
        CHECK(left[i].seen == right[i].seen);
      }
    }
}

TEST_CASE("a sketch of any size, cell and number of generations never loses a count of another") {
  const std::vector<int64_t> ids = special_and_random_ids(400, 6);
  for (const Admission& from : {little(2), little(20), little(300, 50)})
    for (uint64_t bytes : {uint64_t{1} << 18, uint64_t{3} << 18, uint64_t{1} << 21})
      for (uint64_t min_count : {2, 20, 300})
        for (int64_t age : {int64_t{-1}, int64_t{50}}) {
          Admission to = little(min_count, age);
          to.admission_bytes = bytes;
          Candidates saved(from, 3), loaded(to, 3);
          for (size_t i = 0; i < ids.size(); i++) saved.add(ids[i], hash_id(ids[i]), 1 + i % 30, 5);
          load_all(loaded, saved);
          for (const int64_t id : ids) {
            const uint64_t count = saved.peek(id, hash_id(id)), now = loaded.peek(id, hash_id(id));
            REQUIRE((now >= count || now == loaded.limit()));
            if (count == saved.limit()) REQUIRE(now == loaded.limit());
          }
        }
}

TEST_CASE("more candidates than memory holds become a sketch when they are loaded") {
  Candidates large(exact(), 3), small(little(), 3);
  const std::vector<int64_t> ids = special_and_random_ids(100, 9);
  for (size_t i = 0; i < ids.size(); i++) large.add(ids[i], hash_id(ids[i]), 1 + i % 2, 4);
  load_all(small, large);
  CHECK(small.is_sketch());
  for (size_t i = 0; i < ids.size(); i++) CHECK(small.peek(ids[i], hash_id(ids[i])) >= 1 + i % 2);
}

TEST_CASE("a snapshot keeps the counts of its moment") {
  for (const Admission& a : {exact(), little()}) {
    Candidates candidates(a, 3);
    for (int64_t id = 0; id < 60; id++) candidates.add(id, hash_id(id), 1, id);
    const Candidates copy(candidates);
    Candidates before(a, 3);
    load_all(before, candidates);
    for (int64_t id = 0; id < 60; id++) candidates.add(id, hash_id(id), 1, id), candidates.forget(id, hash_id(id));
    CHECK(same(copy.parts(), before.parts()));
    CHECK(copy.entries().size() == before.entries().size());
    for (int64_t id = 0; id < 60; id++) CHECK(copy.peek(id, hash_id(id)) == before.peek(id, hash_id(id)));
  }
}
