// SPDX-License-Identifier: Apache-2.0
// The id hash. Pinned by golden files: changing it breaks every checkpoint.
#pragma once

#include <bit>
#include <cstdint>

static_assert(std::endian::native == std::endian::little, "Hotbed's files and hashes are little-endian");

namespace hotbed {

inline constexpr int kPartitions = 256;
inline constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

// The 64-bit finalizer of MurmurHash3 (Appleby, public domain): a bijection, so no two ids collide in full. Inlined
// always, since kernels.cpp calls it.
[[gnu::always_inline]] inline uint64_t mix64(uint64_t x) noexcept {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return x;
}

inline uint64_t hash_id(int64_t id) noexcept { return mix64(static_cast<uint64_t>(id)); }

// The top 8 bits choose the partition, the low 32 the bucket inside it.
inline int partition_of(uint64_t hash) noexcept { return static_cast<int>(hash >> 56); }
inline uint32_t bucket_of(uint64_t hash, uint32_t num_buckets) noexcept {
  return static_cast<uint32_t>((static_cast<uint64_t>(static_cast<uint32_t>(hash)) * num_buckets) >> 32);
}

// Key of a table's random streams: initial rows, probabilistic admission, stochastic rounding.
inline uint64_t table_key(uint64_t seed, uint64_t name_hash) noexcept {
  return mix64(mix64(seed + kGolden) ^ name_hash);
}

}  // namespace hotbed
