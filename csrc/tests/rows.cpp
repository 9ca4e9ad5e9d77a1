// SPDX-License-Identifier: Apache-2.0
#include "core/rows.h"

#include <doctest.h>

#include <cmath>
#include <vector>

#include "core/ledger.h"
#include "core/memory.h"
#include "core/pool.h"
#include "draw.h"

using namespace hotbed;

namespace {

RowLayout layout(int dim, int width, Dtype dtype, unsigned fields) {
  RowLayout l;
  l.dim = dim, l.state_width = width, l.dtype = dtype;
  l.has_updated = fields & 1, l.has_count = fields & 2, l.has_seen = fields & 4, l.has_score = fields & 8;
  l.arrange();
  return l;
}

}  // namespace

TEST_CASE("rows never move while their storage grows, and keep what was written") {
  for (const Tier tier : {Tier::kRam, Tier::kSsd})
    for (int dim : {1, 3, 16, 1000}) {
      const RowLayout fields = layout(dim, 1, Dtype::kFloat32, 4);
      Pool pool(fields, tier);
      Ledger ledger(fields, pool, tier);
      std::vector<const uint8_t*> at;
      const uint32_t total = dim == 1000 ? 3000 : 80000;
      for (uint32_t slot = 0; slot < total; slot++) {
        if (slot % Slabs::kChunk == 0) {
          REQUIRE(pool.add_chunk() == slot);
          ledger.add_chunk();
        }

        at.push_back(pool.values(slot));
        pool[slot].values()[0] = static_cast<float>(slot);
        pool[slot].values()[dim - 1] = static_cast<float>(slot);
        pool[slot].state()[0] = -static_cast<float>(slot);
        ledger[slot].set_seen(~int64_t{slot});
      }
      for (uint32_t slot = 0; slot < total; slot++) {
        REQUIRE(pool.values(slot) == at[slot]);
        REQUIRE(pool[slot].values()[dim - 1] == static_cast<float>(slot));
        REQUIRE(pool[slot].state()[0] == -static_cast<float>(slot));
        REQUIRE(ledger[slot].seen() == ~int64_t{slot});
      }
    }
}

TEST_CASE("the fields of a row and of its entry do not overlap, whichever are there") {
  for (const Tier tier : {Tier::kRam, Tier::kSsd})
    for (Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16})
      for (int dim : {1, 2, 7, 16})
        for (int width : {0, 1, dim, 2 * dim})
          for (unsigned fields = 0; fields < 16; fields++) {
            const RowLayout of_row = layout(dim, width, dtype, fields);
            Pool pool(of_row, tier);
            Ledger ledger(of_row, pool, tier);
            pool.add_chunk();
            ledger.add_chunk();
            std::vector<float> values(static_cast<size_t>(dim)), read(static_cast<size_t>(dim));
            for (int d = 0; d < dim; d++) values[static_cast<size_t>(d)] = static_cast<float>(d) + 0.5f;
            for (uint32_t slot = 0; slot < 3; slot++) {
              const Row row = pool[slot];
              const LedgerEntry entry = ledger[slot];
              row.write(values.data(), nullptr);
              for (int i = 0; i < width; i++) row.state()[i] = static_cast<float>(i) - 3.0f;
              if (fields & 1) entry.set_updated(0xdeadbeef);
              if (fields & 2) entry.set_count(0xffffffff);
              if (fields & 4) entry.set_seen(INT64_MIN + slot);
              if (fields & 8) entry.set_score(-INFINITY);
              if (dtype != Dtype::kFloat32) row.set_id(-1);
            }
            for (uint32_t slot = 0; slot < 3; slot++) {
              const Row row = pool[slot];
              const LedgerEntry entry = ledger[slot];
              row.read(read.data());
              REQUIRE(read == values);  // halves of small integers are exact
              for (int i = 0; i < width; i++) REQUIRE(row.state()[i] == static_cast<float>(i) - 3.0f);
              if (fields & 1) REQUIRE(entry.updated() == 0xdeadbeef);
              if (fields & 2) REQUIRE(entry.count() == 0xffffffff);
              if (fields & 4) REQUIRE(entry.seen() == INT64_MIN + slot);
              if (fields & 8) REQUIRE(entry.score() == -INFINITY);
              if (dtype != Dtype::kFloat32) REQUIRE(row.id() == -1);
            }
          }
}

TEST_CASE("a plain row costs its floats and nothing else") {
  CHECK(layout(16, 1, Dtype::kFloat32, 0).num_bytes() == 17 * 4);
  CHECK(layout(16, 0, Dtype::kFloat32, 0).num_bytes() == 16 * 4);
  CHECK(layout(16, 1, Dtype::kFloat32, 2 | 4).num_bytes() == 17 * 4 + 4 + 8);
}

TEST_CASE("blocks are aligned to a cache line and apart from each other") {
  std::vector<std::pair<unsigned char*, size_t>> blocks;
  Draw draw(8);
  for (int i = 0; i < 2000; i++) {
    const size_t bytes = size_t{64} << draw.below(i % 50 == 0 ? 17 : 9);
    auto* block = static_cast<unsigned char*>(allocate_block(bytes, BlockUse::kIndex));
    REQUIRE(reinterpret_cast<uintptr_t>(block) % 64 == 0);
    block[0] = block[bytes - 1] = static_cast<unsigned char>(1 + i % 255);
    blocks.emplace_back(block, bytes);
    if (draw.below(3) == 0) {
      const size_t victim = draw.below(blocks.size());
      release_block(blocks[victim].first, blocks[victim].second, BlockUse::kIndex);
      blocks[victim] = blocks.back();
      blocks.pop_back();
    }
  }
  for (auto& [block, bytes] : blocks) {
    REQUIRE(block[0] == block[bytes - 1]);
    REQUIRE(block[0] != 0);
    release_block(block, bytes, BlockUse::kIndex);
  }
}
