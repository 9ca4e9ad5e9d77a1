// SPDX-License-Identifier: Apache-2.0
// Norm samples: damaged bytes are never read past their end, and a cut block gives the same samples.
#include "core/norm.h"

#include <doctest.h>

#include <array>
#include <vector>

#include "draw.h"

using namespace hotbed;

namespace {

void put32(std::vector<uint8_t>& data, uint32_t value) {
  std::array<uint8_t, 4> bytes;
  for (std::size_t i = 0; i < 4; i++) bytes[i] = static_cast<uint8_t>(value >> (8 * i));
  data.insert(data.end(), bytes.begin(), bytes.end());
}

std::vector<uint8_t> samples(Draw& draw, int count, bool checksum) {
  std::vector<uint8_t> data;
  for (int i = 0; i < count; i++) {
    std::vector<uint8_t> body;
    put32(body, static_cast<uint32_t>(draw.next()));
    for (int slot = 0; slot < 2; slot++) {
      const auto num_keys = static_cast<uint32_t>(draw.below(4));
      put32(body, num_keys);
      for (uint32_t key = 0; key < num_keys; key++) put32(body, static_cast<uint32_t>(draw.next()));
    }
    if (checksum) put32(data, static_cast<uint32_t>(body.size()));
    uint8_t sum = 0;
    for (uint8_t byte : body) sum = static_cast<uint8_t>(sum + byte);
    data.insert(data.end(), body.begin(), body.end());
    if (checksum) data.push_back(sum);
  }
  return data;
}

}  // namespace

TEST_CASE("blocks that are cut anywhere give the samples of the whole") {
  Draw draw(1);
  for (bool checksum : {false, true}) {
    const NormLayout layout{1, {true, false}, 4, checksum};
    const std::vector<uint8_t> data = samples(draw, 20, checksum);
    const NormBlock whole = read_norm(data.data(), data.size(), layout, 100);
    REQUIRE(whole.good.size() == 20);
    REQUIRE(whole.bytes == data.size());
    REQUIRE(whole.slots[1].offsets.empty());
    for (std::size_t cut = 0; cut <= data.size(); cut++) {
      const std::vector<uint8_t> head(data.begin(), data.begin() + static_cast<std::ptrdiff_t>(cut));
      const NormBlock first = read_norm(head.data(), head.size(), layout, 100);
      const NormBlock rest = read_norm(data.data() + first.bytes, data.size() - first.bytes, layout, 100);
      REQUIRE(first.good.size() + rest.good.size() == 20);
      std::vector<int64_t> keys = first.slots[0].keys;
      keys.insert(keys.end(), rest.slots[0].keys.begin(), rest.slots[0].keys.end());
      REQUIRE(keys == whole.slots[0].keys);
    }
  }
}

TEST_CASE("flipped bits are counted, and never lead outside of the data") {
  Draw draw(2);
  for (bool checksum : {false, true}) {
    const NormLayout layout{1, {true, true}, 4, checksum};
    const std::vector<uint8_t> data = samples(draw, 20, checksum);
    for (std::size_t place = 0; place < data.size(); place++) {
      std::vector<uint8_t> flipped = data;
      flipped[place] ^= static_cast<uint8_t>(1u << draw.below(8));
      const NormBlock block = read_norm(flipped.data(), flipped.size(), layout, 100);
      REQUIRE(block.bytes <= flipped.size());
      if (checksum) REQUIRE(block.good.size() < 20);
    }
  }
}
