// SPDX-License-Identifier: Apache-2.0
#include "norm.h"

#include <bit>
#include <cstring>
#include <optional>

namespace hotbed {

static_assert(std::endian::native == std::endian::little, "Norm files are read as they lie in memory");

namespace {

// A longer sample is damage: a reader must not wait for gigabytes because of one flipped bit.
constexpr std::size_t kMaxSampleBytes = std::size_t{1} << 26;
constexpr std::size_t kCountBytes = 4;

std::int32_t int32_at(const std::uint8_t* place) {
  std::int32_t value;
  std::memcpy(&value, place, sizeof value);
  return value;
}

enum class Extent { kWhole, kIncomplete, kImpossible };

struct Body {
  Extent extent;
  std::size_t bytes;
};

// How long the sample at `place` is by the counts of its slots.
Body measure(const std::uint8_t* place, std::size_t available, const NormLayout& layout) {
  std::size_t bytes = layout.num_floats * sizeof(float);
  for (std::size_t slot = 0; slot < layout.wanted.size(); slot++) {
    if (bytes + kCountBytes > available) return {Extent::kIncomplete, bytes};
    const std::int32_t count = int32_at(place + bytes);
    bytes += kCountBytes;
    if (count < 0) return {Extent::kImpossible, bytes};
    bytes += static_cast<std::size_t>(count) * static_cast<std::size_t>(layout.key_bytes);
    if (bytes > kMaxSampleBytes) return {Extent::kImpossible, bytes};
  }
  return {bytes > available ? Extent::kIncomplete : Extent::kWhole, bytes};
}

std::uint8_t sum_of(const std::uint8_t* place, std::size_t bytes) {
  unsigned sum = 0;
  for (std::size_t i = 0; i < bytes; i++) sum += place[i];
  return static_cast<std::uint8_t>(sum);
}

template <class Key>
void append_keys(const std::uint8_t* place, std::size_t count, std::vector<std::int64_t>& keys) {
  const std::size_t before = keys.size();
  keys.resize(before + count);
  for (std::size_t i = 0; i < count; i++) {
    Key key;
    std::memcpy(&key, place + i * sizeof key, sizeof key);
    keys[before + i] = static_cast<std::int64_t>(key);
  }
}

void append(const std::uint8_t* place, const NormLayout& layout, NormBlock& block) {
  const std::size_t before = block.floats.size();
  block.floats.resize(before + layout.num_floats);
  if (layout.num_floats) std::memcpy(block.floats.data() + before, place, layout.num_floats * sizeof(float));
  place += layout.num_floats * sizeof(float);
  for (std::size_t slot = 0; slot < layout.wanted.size(); slot++) {
    const auto count = static_cast<std::size_t>(int32_at(place));
    place += kCountBytes;
    if (layout.wanted[slot]) {
      NormSlot& keys = block.slots[slot];
      if (layout.key_bytes == 4) append_keys<std::uint32_t>(place, count, keys.keys);
      else append_keys<std::int64_t>(place, count, keys.keys);
      keys.offsets.push_back(static_cast<std::int32_t>(keys.keys.size()));
    }
    place += count * static_cast<std::size_t>(layout.key_bytes);
  }
}

// The bytes between the length and the sum of a sample; none if the block ends before them.
std::optional<std::size_t> framed_bytes(const std::uint8_t* place, std::size_t available, NormBlock& block) {
  if (available < kCountBytes) return std::nullopt;
  const std::int32_t length = int32_at(place);
  block.lost = length < 0 || static_cast<std::size_t>(length) > kMaxSampleBytes;
  if (block.lost || available < kCountBytes + static_cast<std::size_t>(length) + 1) return std::nullopt;
  return static_cast<std::size_t>(length);
}

// Whether a sample with a checksum could be passed.
bool read_framed(const std::uint8_t* data, std::size_t size, const NormLayout& layout, NormBlock& block) {
  const std::uint8_t* place = data + block.bytes;
  const std::optional<std::size_t> length = framed_bytes(place, size - block.bytes, block);
  if (!length) return false;
  const std::uint8_t* body = place + kCountBytes;
  const auto number = static_cast<std::int64_t>(block.num_samples());
  if (sum_of(body, *length) != body[*length]) {
    block.wrong_sum.push_back(number);
  } else if (const Body measured = measure(body, *length, layout);
             measured.extent != Extent::kWhole || measured.bytes != *length) {
    block.misshapen.push_back(number);
  } else {
    append(body, layout, block);
    block.good.push_back(number);
  }
  block.bytes += kCountBytes + *length + 1;
  return true;
}

bool read_bare(const std::uint8_t* data, std::size_t size, const NormLayout& layout, NormBlock& block) {
  const std::uint8_t* place = data + block.bytes;
  const Body measured = measure(place, size - block.bytes, layout);
  block.lost = measured.extent == Extent::kImpossible;
  if (measured.extent != Extent::kWhole) return false;
  append(place, layout, block);
  block.good.push_back(static_cast<std::int64_t>(block.num_samples()));
  block.bytes += measured.bytes;
  return true;
}

}  // namespace

NormBlock read_norm(const std::uint8_t* data, std::size_t size, const NormLayout& layout, std::size_t max_samples) {
  NormBlock block;
  block.slots.resize(layout.wanted.size());
  for (std::size_t slot = 0; slot < layout.wanted.size(); slot++)
    if (layout.wanted[slot]) block.slots[slot].offsets.push_back(0);
  const auto read = layout.checksum ? read_framed : read_bare;
  while (block.num_samples() < max_samples && block.bytes < size)
    if (!read(data, size, layout, block)) break;
  return block;
}

}  // namespace hotbed
