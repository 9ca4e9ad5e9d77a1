// SPDX-License-Identifier: Apache-2.0
// Golden values: a change to a hash or to an initial row breaks every checkpoint, so it must be a decision, not an
// accident.
#include <doctest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <string>

#include "core/hash.h"
#include "core/hash_bytes.h"
#include "core/init.h"
#include "draw.h"

using namespace hotbed;

TEST_CASE("the id hash is the one that files were written with") {
  // As in tests/golden/id_hash.json, which the NumPy reference wrote.
  const std::pair<int64_t, uint64_t> golden[] = {
      {0, 0x0000000000000000ull},          {1, 0xb456bcfc34c2cb2cull},
      {-1, 0x64b5720b4b825f21ull},         {-2, 0x3a8593886c55a02bull},
      {INT64_MAX, 0xabb93df0a930edeaull},  {INT64_MIN, 0x8f780810af31a493ull},
      {4294967296, 0xba3a9e160a5f1419ull}, {1234567890123456789, 0x9c49c6098a8f367eull},
  };
  for (const auto& [id, hash] : golden) {
    CAPTURE(id);
    CHECK(hash_id(id) == hash);
  }
}

TEST_CASE("the partition is the hash's top byte and the bucket its low half, scaled") {
  CHECK(partition_of(0xab00000000000000ull) == 0xab);
  CHECK(bucket_of(0x00000000ffffffffull, 10) == 9);
  CHECK(bucket_of(0xffffffff00000000ull, 10) == 0);
  CHECK(bucket_of(0x0000000080000000ull, 10) == 5);
}

TEST_CASE("partitions of consecutive ids are even") {
  std::array<int, kPartitions> count{};
  for (int64_t id = -128000; id < 128000; id++) count[static_cast<size_t>(partition_of(hash_id(id)))]++;
  for (int n : count) CHECK(std::abs(n - 1000) < 200);
}

TEST_CASE("the hash of strings is XXH64") {
  const std::pair<std::string, uint64_t> golden[] = {
      {"", 0xef46db3751d8e999ull},
      {"user", 0x3da0fd9c44cfc9eeull},
      {"item", 0x5fe193bb4b6b9cd0ull},
      {"film.linear", 0x23d03c20b3e660fdull},
      {"a table with a long name: more than thirty-two bytes of UTF-8", 0x249aef10b23689e0ull},
  };
  for (const auto& [text, hash] : golden) {
    CAPTURE(text);
    CHECK(hash_bytes(text.data(), text.size()) == hash);
    // Any alignment of the bytes gives the same hash.
    for (size_t shift = 1; shift < 8; shift++) {
      const std::string padded = std::string(shift, '#') + text;
      CHECK(hash_bytes(padded.data() + shift, text.size()) == hash);
    }
  }
}
