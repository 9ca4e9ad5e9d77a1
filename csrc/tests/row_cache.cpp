// SPDX-License-Identifier: Apache-2.0
#include "core/row_cache.h"

#include <doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>
#include <vector>

#include "draw.h"

using namespace hotbed;

namespace {

// Every lane tells table, id and epoch: a row that lies anywhere but in its place is seen.
float lane(uint32_t table, int64_t id, uint64_t epoch, int d) {
  return static_cast<float>(
      mix64(static_cast<uint64_t>(id) * 31 + table * 7 + epoch * 1009 + static_cast<uint64_t>(d)) % 100003);
}

std::vector<RowCache::Seek> seeks_of(const RowCache& cache, const std::vector<std::pair<uint32_t, int64_t>>& ids) {
  std::vector<RowCache::Seek> seeks;
  size_t at = 0;
  for (const auto& [table, id] : ids) {
    seeks.push_back({id, RowCache::hash_of(hash_id(id), table), at, table, false});
    at += static_cast<size_t>(cache.dim(table));
  }
  return seeks;
}

size_t lanes_of(const RowCache& cache, const std::vector<RowCache::Seek>& seeks) {
  return seeks.empty() ? 0 : seeks.back().row + static_cast<size_t>(cache.dim(seeks.back().table));
}

// Looks for ids, checks the hits, keeps what is missing; returns the hits.
size_t ask(RowCache& cache, uint64_t epoch, std::vector<RowCache::Seek> seeks, bool* right) {
  std::vector<float> rows(lanes_of(cache, seeks));
  cache.find(epoch, seeks, rows.data());
  size_t hits = 0;
  for (const RowCache::Seek& seek : seeks)
    for (int d = 0; d < cache.dim(seek.table); d++) {
      float& value = rows[seek.row + static_cast<size_t>(d)];
      const float expected = lane(seek.table, seek.id, epoch, d);
      if (seek.hit) *right &= value == expected;
      else value = expected;
      hits += seek.hit && d == 0;
    }
  cache.keep(epoch, seeks, rows.data(), false);
  return hits;
}

}  // namespace

TEST_CASE("a hit has the row that was kept, whatever was dropped meanwhile, and the bytes stay bounded") {
  for (const CachePolicy policy : {CachePolicy::kLru, CachePolicy::kLfu})
    for (const uint64_t max_bytes : {uint64_t{700}, uint64_t{5000}, uint64_t{100000}, uint64_t{9} << 20}) {
      RowCache cache({1, 16, 5}, max_bytes, policy);
      Draw draw(7);
      bool right = true;
      size_t hits = 0;
      for (int round = 0; round < 400; round++) {
        std::vector<std::pair<uint32_t, int64_t>> ids;
        for (int i = 0; i < 60; i++) {
          const int64_t id = static_cast<int64_t>(draw.below(1 + draw.below(2000))) - 3;
          const std::pair<uint32_t, int64_t> one(static_cast<uint32_t>(draw.below(3)), id);
          if (std::find(ids.begin(), ids.end(), one) == ids.end()) ids.push_back(one);
        }
        const uint64_t epoch = static_cast<uint64_t>(round / 100);
        if (round % 100 == 0) cache.advance(epoch, {}, true);
        hits += ask(cache, epoch, seeks_of(cache, ids), &right);
        REQUIRE(cache.num_bytes() <= max_bytes);
      }
      CHECK(right);
      CHECK(hits > 0);
      CHECK(cache.num_rows() > 0);
    }
}

TEST_CASE("room for no row is refused") {
  CHECK_THROWS_AS(RowCache({16}, 100, CachePolicy::kLru), std::invalid_argument);
  CHECK_THROWS_AS(RowCache({}, 1 << 20, CachePolicy::kLru), std::invalid_argument);
}

TEST_CASE("going on to an epoch drops the ids that it names, and an older epoch neither reads nor keeps") {
  RowCache cache({4, 4}, 1 << 16, CachePolicy::kLfu);
  bool right = true;
  cache.advance(1, {}, true);
  const auto all = seeks_of(cache, {{0, 1}, {0, 2}, {1, 1}, {1, 2}});
  CHECK(ask(cache, 1, all, &right) == 0);
  CHECK(ask(cache, 1, all, &right) == 4);
  cache.advance(2, {{1, 99}, {2}}, false);
  CHECK(cache.num_rows() == 2);
  std::vector<float> rows(16);
  auto now = all;
  cache.find(2, now, rows.data());
  CHECK(!now[0].hit);
  CHECK(now[1].hit);
  CHECK(now[2].hit);
  CHECK(!now[3].hit);
  CHECK(ask(cache, 1, all, &right) == 0);  // nor was anything kept of it
  auto again = all;
  cache.find(2, again, rows.data());
  CHECK(!again[0].hit);
  CHECK(cache.num_rows() == 2);
  cache.keep(2, again, rows.data(), false);
  CHECK(cache.num_rows() == 4);
  CHECK(right);
}

TEST_CASE("threads read, keep and go on to new epochs without ever seeing a row of another one") {
  for (const CachePolicy policy : {CachePolicy::kLru, CachePolicy::kLfu}) {
    RowCache cache({3, 8}, 5 * (uint64_t{4} << 20), policy);  // several shards
    cache.advance(1, {}, true);
    std::atomic<uint64_t> epoch{1};
    std::atomic<bool> right{true};
    std::atomic<int> left{3};
    std::vector<std::thread> readers;
    for (int t = 0; t < 3; t++)
      readers.emplace_back([&, t] {
        Draw draw(static_cast<uint64_t>(t));
        bool mine = true;
        for (int round = 0; round < 300; round++) {
          std::vector<std::pair<uint32_t, int64_t>> ids;
          for (int i = 0; i < 50; i++) ids.emplace_back(i % 2, static_cast<int64_t>(draw.below(300)) * 50 + i);
          ask(cache, epoch.load(), seeks_of(cache, ids), &mine);
        }
        if (!mine) right = false;
        left--;
      });
    std::vector<std::vector<int64_t>> every(2);
    for (int64_t id = 0; id < 15000; id++) every[0].push_back(id), every[1].push_back(id);
    while (left > 0) {  // all rows change with an epoch
      const uint64_t next = epoch + 1;
      cache.advance(next, every, next % 3 == 0);
      epoch = next;
      CHECK(cache.num_bytes() <= 5 * (uint64_t{4} << 20));
    }
    for (std::thread& reader : readers) reader.join();
    CHECK(right.load());
  }
}

TEST_CASE("a request finds each id once and pools hits and fills alike") {
  RowCache cache({2, 3}, 1 << 16, CachePolicy::kLru);
  cache.advance(1, {}, true);
  const std::vector<Feature> features{{0, Pooling::kSum}, {1, Pooling::kMean}, {0, Pooling::kNone}};
  const std::vector<int64_t> a{5, 5, 7, -1}, b{5, 6, 5}, offsets{0, 2, 2, 3, 4}, few{0, 1, 3, 3, 3};
  const std::vector<float> weights{1.0f, 0.5f, 2.0f, 1.0f};
  const std::vector<FeatureIds> ids{{a.data(), 4, offsets.data(), weights.data(), 4},
                                    {b.data(), 3, few.data(), nullptr, 4},
                                    {a.data(), 4, nullptr, nullptr, 4}};
  for (int round = 0; round < 3; round++) {
    CacheRequest request;
    request.find(cache, 1, features, ids);
    const auto missing = request.missing(2);
    if (round == 0) CHECK(missing == std::vector<std::vector<int64_t>>{{5, 7, -1}, {5, 6}});
    else CHECK(request.whole());
    std::vector<std::vector<float>> rows(2);
    for (uint32_t t = 0; t < 2; t++)
      for (const int64_t id : missing[t])
        for (int d = 0; d < cache.dim(t); d++) rows[t].push_back(lane(t, id, 1, d));
    request.fill({rows[0].data(), rows[1].data()}, cache);
    request.keep(cache, 1);
    std::vector<float> flat(4 * 5, -1.0f), sequence(4 * 2, -1.0f);
    request.pool(cache, {{flat.data(), 5}, {flat.data() + 2, 5}, {sequence.data(), 2}}, 4);
    CHECK(flat[0] == lane(0, 5, 1, 0) * 1.0f + lane(0, 5, 1, 0) * 0.5f);
    CHECK(flat[5] == 0.0f);
    CHECK(flat[2] == lane(1, 5, 1, 0));
    CHECK(sequence[7] == lane(0, -1, 1, 1));
  }
  CHECK(cache.hits() == 10);
  CHECK(cache.misses() == 5);
}

TEST_CASE("the same id of two tables is two ids of a request") {
  RowCache cache({1, 1}, 1 << 16, CachePolicy::kLru);
  const std::vector<Feature> features{{0, Pooling::kNone}, {1, Pooling::kNone}};
  Draw draw(3);
  for (int round = 0; round < 300; round++) {
    std::vector<int64_t> ids;
    for (int i = 0; i < 64; i++) ids.push_back(static_cast<int64_t>(draw.next()));
    CacheRequest request;
    request.find(cache, 9, features, {{ids.data(), 64, nullptr, nullptr, 64}, {ids.data(), 64, nullptr, nullptr, 64}});
    REQUIRE(request.missing(2) == std::vector<std::vector<int64_t>>{ids, ids});
  }
}
