// SPDX-License-Identifier: Apache-2.0
// Victims come in order of (key, id), as a full sort would give them, while rows come, go and are touched.
#include "core/victims.h"

#include <doctest.h>

#include <cstddef>
#include <map>

#include "draw.h"

using namespace hotbed;

TEST_CASE("the victim is always the smallest (key, id) that is not protected") {
  Draw draw(10);
  std::map<int64_t, int64_t> rows;  // id -> key
  Victims victims;
  int64_t clock = 0;
  std::vector<int64_t> protected_ids;
  const auto is_protected = [&](int64_t id) {
    return std::find(protected_ids.begin(), protected_ids.end(), id) != protected_ids.end();
  };
  const auto scan = [&](auto&& add) {
    for (const auto& [id, key] : rows) {
      if (is_protected(id)) victims.skipped();
      else add(Victim{key, id, 0});
    }
  };
  const auto current = [&](const Victim& victim, int64_t* key) {
    const auto it = rows.find(victim.id);
    if (it == rows.end()) return Victims::State::kGone;
    *key = it->second;
    return is_protected(victim.id) ? Victims::State::kProtected : Victims::State::kAlive;
  };
  for (int i = 0; i < 400; i++) {
    const int64_t id = static_cast<int64_t>(draw.next());
    rows[id] = clock++ / 3;
    victims.inserted({rows[id], id, 0});
  }
  for (int round = 0; round < 3000; round++) {
    protected_ids.clear();
    for (int k = 0; k < 5; k++) {  // a batch touches a few rows: their keys only rise
      auto it = std::next(rows.begin(), static_cast<int64_t>(draw.below(rows.size())));
      it->second = clock / 3;
      protected_ids.push_back(it->first);
    }
    clock++;
    for (int k = 0; k < 2; k++) {
      Victim expected{INT64_MAX, INT64_MAX, 0};
      for (const auto& [id, key] : rows)
        if (!is_protected(id)) expected = std::min(expected, Victim{key, id, 0});
      Victim victim{};
      REQUIRE(victims.pop(scan, current, &victim));
      REQUIRE(victim.id == expected.id);
      REQUIRE(victim.key == expected.key);
      rows.erase(victim.id);
      const int64_t id = static_cast<int64_t>(draw.next());
      rows[id] = clock / 3;
      protected_ids.push_back(id);
      victims.inserted({rows[id], id, 0});
    }
    victims.release();
  }
}

TEST_CASE("where every row is protected there is no victim, and there is one again after the batch") {
  Victims victims;
  bool held = true;
  const auto scan = [&](auto&& add) {
    if (held) victims.skipped();
    else add(Victim{1, 2, 3});
  };
  const auto current = [&](const Victim&, int64_t*) {
    return held ? Victims::State::kProtected : Victims::State::kAlive;
  };
  Victim victim{};
  CHECK_FALSE(victims.pop(scan, current, &victim));
  victims.release();
  held = false;
  REQUIRE(victims.pop(scan, current, &victim));
  CHECK(victim.slot == 3);
}
