// SPDX-License-Identifier: Apache-2.0
// Rows that requests ask for often, of all tables of a model, within a bound of bytes. A row is copied out under its
// shard's lock, so a row that goes is never read.
//
// A shard is a ring of records, whatever their dim: new ones are written at its head, room is made at its tail. A
// record that was used since the tail last passed it moves to the head instead (the clock algorithm; one list over all
// tables, by bytes). LFU counts uses, halves the counts now and then as the tail passes, and lets a new row in
// only where it was asked for more often than the one at the tail was used (TinyLFU); a sketch remembers how often
// absent ids were asked for.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "request_ids.h"

namespace hotbed {

enum class CachePolicy : uint8_t { kLru, kLfu };

class RowCache {
 public:
  struct Seek {
    int64_t id;
    uint64_t hash;
    size_t row;  // where it lies in the buffer of the call, in floats
    uint32_t table;
    bool hit;
  };
  // Throws std::invalid_argument where `max_bytes` cannot hold a row of each table.
  RowCache(std::vector<int> dims, uint64_t max_bytes, CachePolicy policy);
  ~RowCache();
  RowCache(const RowCache&) = delete;
  RowCache& operator=(const RowCache&) = delete;

  int num_tables() const noexcept { return static_cast<int>(dims_.size()); }
  int dim(uint32_t table) const noexcept { return dims_[table]; }
  // Of a row, from the hash of its id: the same id of two tables is two rows.
  static uint64_t hash_of(uint64_t id_hash, uint32_t table) noexcept { return id_hash ^ table * kGolden; }

  // Each version of a model is an epoch. Rows of another epoch than the given one are misses, and are not kept.
  void find(uint64_t epoch, std::vector<Seek>& seeks, float* rows);
  // Keeps the rows of all seeks that are not hits; `hot`: also those that the policy would refuse.
  void keep(uint64_t epoch, const std::vector<Seek>& seeks, const float* rows, bool hot);
  // Moves on to `epoch` and drops the rows of these ids, by table; all: drops every row.
  void advance(uint64_t epoch, const std::vector<std::vector<int64_t>>& changed, bool all);

  uint64_t num_rows() const;
  uint64_t num_bytes() const;  // touched so far: index, counts and records; never above max_bytes
  uint64_t row_bytes(uint32_t table) const noexcept;  // of a row with what belongs to it
  uint64_t hits() const noexcept { return hits_.load(std::memory_order_relaxed); }
  uint64_t misses() const noexcept { return misses_.load(std::memory_order_relaxed); }

 private:
  class Shard;
  template <class F>
  void by_shard(const std::vector<Seek>& seeks, F&& visit) const;
  size_t shard_of(uint64_t hash) const noexcept { return static_cast<size_t>((hash >> 48) * shards_.size() >> 16); }

  std::vector<int> dims_;
  std::vector<uint32_t> words_;  // of a record, by table
  uint64_t index_bytes_;         // of a row
  std::vector<std::unique_ptr<Shard>> shards_;
  std::atomic<uint64_t> hits_{0}, misses_{0};
};

// The ids of one request over a cache: looked for once, filled where they are missing, and pooled.
class CacheRequest {
 public:
  void find(RowCache& cache, uint64_t epoch, const std::vector<Feature>& features, const std::vector<FeatureIds>& ids);
  bool whole() const noexcept { return num_missing_ == 0; }
  std::vector<std::vector<int64_t>> missing(int num_tables) const;  // by table
  // rows[table]: [missing of it, dim], in that order.
  void fill(const std::vector<const float*>& rows, const RowCache& cache);
  void keep(RowCache& cache, uint64_t epoch) const { cache.keep(epoch, seeks_, rows_.data(), false); }
  void pool(const RowCache& cache, const std::vector<OutputRows>& out, int64_t num_samples);

 private:
  RequestIds ids_;
  std::vector<RowCache::Seek> seeks_;  // of the distinct ids, table after table
  std::vector<float> rows_;
  std::vector<const float*> pointers_;
  size_t num_missing_ = 0;
};

}  // namespace hotbed
