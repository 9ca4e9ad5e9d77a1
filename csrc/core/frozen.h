// SPDX-License-Identifier: Apache-2.0
// Rows that no longer change: one file, streamed out once, mapped into memory and read in place, so that processes
// share it and starting costs nothing. docs/format.md describes the bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "buckets.h"
#include "init.h"
#include "pooling.h"

namespace hotbed {

enum class FrozenDtype : uint32_t { kFloat32, kFloat16, kInt8 };  // int8: one fp32 scale a row, then its lanes

inline constexpr uint32_t kRemoved = 0xfffffffeu;  // in place of a slot: the id has no row any more

// A file of rows: the rows, padding to 64 bytes, the index, this. A writer streams it.
struct FrozenFooter {
  static constexpr char kMagic[8] = {'H', 'B', 'R', 'O', 'W', 'S', '0', '1'};
  uint64_t num_rows, num_removed, num_buckets, buckets_at, num_bytes, reserved;
  uint32_t dim;  // 0: an index alone, which numbers its ids
  FrozenDtype dtype;
  char magic[8];
};
static_assert(sizeof(FrozenFooter) == 64);

// Bytes of n rows, of the index over their ids and the removed ones, and of the end of the file.
std::vector<uint8_t> frozen_rows(const float* values, size_t n, int dim, FrozenDtype dtype);
std::vector<Bucket> frozen_index(const int64_t* ids, size_t n, const int64_t* removed, size_t num_removed);
FrozenFooter frozen_footer(uint64_t num_rows, uint64_t num_removed, int dim, FrozenDtype dtype);

// One mapped file. Reading needs no lock.
class FrozenRows {
 public:
  explicit FrozenRows(const std::string& path);  // throws std::runtime_error naming the path
  ~FrozenRows();
  FrozenRows(const FrozenRows&) = delete;
  FrozenRows& operator=(const FrozenRows&) = delete;

  int dim() const noexcept { return static_cast<int>(footer_->dim); }
  uint64_t num_rows() const noexcept { return footer_->num_rows; }
  uint64_t num_removed() const noexcept { return footer_->num_removed; }
  uint64_t num_bytes() const noexcept { return footer_->num_bytes; }

  void prefetch(uint64_t hash) const noexcept;
  uint32_t find(int64_t id, uint64_t hash) const noexcept;  // a slot, kRemoved or kNoSlot
  void prefetch_row(uint32_t slot) const noexcept;
  const float* fp32(uint32_t slot) const noexcept {  // the row in place; null where it must be decoded
    return footer_->dtype == FrozenDtype::kFloat32 ? reinterpret_cast<const float*>(row(slot)) : nullptr;
  }
  void read(uint32_t slot, float* out) const noexcept;
  // The slot of each of n ids; -1 for an id without a row.
  void slots(const int64_t* ids, size_t n, int64_t* out) const noexcept;
  // The rows of n slots, which the file has, one after the other; `out` stays as it is for negative slots.
  void read_all(const int64_t* slots, size_t n, float* out) const noexcept;
  // Calls visit(id, slot) for every row, then for every removed id with kRemoved.
  template <class F>
  void for_each(F&& visit) const {
    for (uint64_t b = 0; b < footer_->num_buckets; b++) buckets_[b].for_each(visit);
  }

 private:
  const uint8_t* row(uint32_t slot) const noexcept { return data_ + static_cast<size_t>(slot) * row_bytes_; }

  const uint8_t* data_ = nullptr;
  size_t bytes_ = 0, row_bytes_ = 0;
  const FrozenFooter* footer_ = nullptr;
  const Bucket* buckets_ = nullptr;  // `overflow`: whether an entry has passed it
};

// A table as a server sees it: newer files before older ones, and what an id without a row reads as.
class FrozenTable {
 public:
  struct Absent {
    bool initial_row = false;  // else `value` in every lane
    float value = 0.0f;
    Init init;
    uint64_t key = 0;
  };
  // Where the row of an id is; no layer: the id has none.
  struct Place {
    const FrozenRows* layer = nullptr;
    uint32_t slot = kNoSlot;
  };
  FrozenTable(std::vector<std::shared_ptr<FrozenRows>> layers, int dim, Absent absent);

  int dim() const noexcept { return dim_; }
  const std::vector<std::shared_ptr<FrozenRows>>& layers() const noexcept { return layers_; }
  void prefetch(uint64_t hash) const noexcept;
  Place find(int64_t id, uint64_t hash) const noexcept;                  // has the row prefetched
  void read(int64_t id, const Place& place, float* out) const noexcept;  // decoded, or as an id without a row reads

 private:
  std::vector<std::shared_ptr<FrozenRows>> layers_;
  int dim_;
  Absent absent_;
};

// The rows of many ids of many tables: all index lines and rows are on their way before the first is used.
class FrozenSearch {
 public:
  void clear() noexcept { seeks_.clear(); }
  void add(const FrozenTable& table, int64_t id) { seeks_.push_back({id, hash_id(id), &table, {}}); }
  void run();
  size_t size() const noexcept { return seeks_.size(); }
  const float* const* rows() const noexcept { return rows_.data(); }  // of each id, in the order of `add`; fp32
  bool found(size_t i) const noexcept { return seeks_[i].place.layer != nullptr; }

 private:
  struct Seek {
    int64_t id;
    uint64_t hash;
    const FrozenTable* table;
    FrozenTable::Place place;
  };
  std::vector<Seek> seeks_;
  std::vector<const float*> rows_;
  std::vector<float> decoded_;
};

// Forward over several features; `out` has `num_samples` rows of each that is pooled.
void frozen_lookup(const std::vector<const FrozenTable*>& tables, const std::vector<Feature>& features,
                   const std::vector<FeatureIds>& ids, const std::vector<OutputRows>& out, int64_t num_samples);

}  // namespace hotbed
