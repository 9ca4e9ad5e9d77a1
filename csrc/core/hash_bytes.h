// SPDX-License-Identifier: Apache-2.0
// XXH64 of a byte string, written from the public description of the algorithm
// (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md). String ids are this hash with seed 0.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace hotbed {

static_assert(std::endian::native == std::endian::little, "hotbed reads and writes little-endian bytes");

namespace xxh64 {

inline constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87ull;
inline constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4Full;
inline constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9ull;
inline constexpr std::uint64_t kPrime4 = 0x85EBCA77C2B2AE63ull;
inline constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5ull;

template <class Word>
inline Word read(const unsigned char* bytes) {
  Word word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

inline std::uint64_t round(std::uint64_t lane, std::uint64_t word) {
  return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

inline std::uint64_t merge(std::uint64_t hash, std::uint64_t lane) {
  return (hash ^ round(0, lane)) * kPrime1 + kPrime4;
}

/// Four lanes over whole 32-byte stripes; advances `bytes` past them.
inline std::uint64_t stripes(const unsigned char*& bytes, const unsigned char* end, std::uint64_t seed) {
  std::uint64_t lanes[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
  for (; end - bytes >= 32; bytes += 32) {
    for (int lane = 0; lane < 4; ++lane) lanes[lane] = round(lanes[lane], read<std::uint64_t>(bytes + 8 * lane));
  }
  std::uint64_t hash =
      std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
  for (std::uint64_t lane : lanes) hash = merge(hash, lane);
  return hash;
}

}  // namespace xxh64

/// XXH64 of `size` bytes at `data` (which may be null when size is 0).
inline std::uint64_t hash_bytes(const void* data, std::size_t size, std::uint64_t seed = 0) {
  using namespace xxh64;
  const auto* bytes = static_cast<const unsigned char*>(data);
  const unsigned char* end = bytes + size;
  std::uint64_t hash = size >= 32 ? stripes(bytes, end, seed) : seed + kPrime5;
  hash += size;
  for (; end - bytes >= 8; bytes += 8) {
    hash = std::rotl(hash ^ round(0, read<std::uint64_t>(bytes)), 27) * kPrime1 + kPrime4;
  }
  if (end - bytes >= 4) {
    hash = std::rotl(hash ^ read<std::uint32_t>(bytes) * kPrime1, 23) * kPrime2 + kPrime3;
    bytes += 4;
  }
  for (; bytes != end; ++bytes) hash = std::rotl(hash ^ *bytes * kPrime5, 11) * kPrime1;
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace hotbed
