// SPDX-License-Identifier: Apache-2.0
// Repeatable draws for the tests, and the ids that other systems reserve.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "core/hash.h"

struct Draw {
  uint64_t state;
  explicit Draw(uint64_t seed) : state(seed) {}
  uint64_t next() { return hotbed::mix64(state += hotbed::kGolden); }
  uint64_t below(uint64_t n) { return next() % n; }
  float unit() { return static_cast<float>(next() >> 40) * 0x1p-24f; }  // [0, 1)
  float around() { return unit() * 2.0f - 1.0f; }
};

// Sentinels, empty keys and padding elsewhere; plain ids here.
inline const std::initializer_list<int64_t> kSpecialIds = {0,         -1,           -2, 1, INT64_MIN, INT64_MIN + 1,
                                                           INT64_MAX, INT64_MAX - 1};

inline std::vector<int64_t> special_and_random_ids(size_t n, uint64_t seed) {
  std::vector<int64_t> ids(kSpecialIds);
  for (Draw draw(seed); ids.size() < n;) ids.push_back(static_cast<int64_t>(draw.next()));
  ids.resize(n);
  return ids;
}
