// SPDX-License-Identifier: Apache-2.0
// Admission: counts of the ids that have no row yet, in bounded memory, for one partition. Counts are exact until the
// memory is full; from then on a sketch in the same memory counts, never too little.
#pragma once

#include <cstdint>
#include <vector>

#include "bucket_map.h"

namespace hotbed {

enum class AdmitKind : uint8_t { kAll, kMinCount, kProbability };

struct Admission {
  AdmitKind kind = AdmitKind::kAll;
  uint64_t min_count = 0;
  uint64_t coefficient = 1;
  bool once_a_batch = false;  // an id counts once a batch, however often it occurs there
  double probability = 1.0;
  uint64_t admission_bytes = uint64_t{1} << 26;  // of all partitions
  int64_t expire_after = -1;                     // by the table's clock; -1 = off
  // For states of earlier versions:
  uint64_t sketch_bytes = 0;    // 0 = off; else plain counters of 32 bits from the first id on
  uint64_t max_candidates = 0;  // 0 = off; else the ids of an exact map, whose counts are halved when it is full
};

struct Candidate {
  int64_t id;
  uint32_t count;
  int64_t seen;
};

// Three candidates in a cache line.
struct alignas(64) CandidateBucket : BucketEntries<CandidateBucket> {
  static constexpr int kEntries = 3;

  int64_t id[kEntries];
  int64_t seen[kEntries];
  uint32_t count[kEntries];
  uint16_t used;
  uint16_t overflow;

  void take(int e, const CandidateBucket& other, int from) noexcept {
    count[e] = other.count[from], seen[e] = other.seen[from];
  }
};
static_assert(sizeof(CandidateBucket) == 64);

class CandidateMap : public BucketMap<CandidateBucket> {
 public:
  CandidateMap(int partition, uint32_t max_buckets) noexcept
      : BucketMap(partition, BlockUse::kAdmission, max_buckets) {}
  CandidateMap(const CandidateMap& other);
  // The memory of the map, which is empty from then on; the caller releases it.
  uint32_t* detach() noexcept;
};

// A count-min sketch (Cormode and Muthukrishnan 2005) with conservative update (Estan and Varghese 2002): the count of
// an id is the least of its cells, one in each of four rows, and only cells below the new count rise. Cells of 1 to 32
// bits end at their largest value, limit(). The memory is the caller's.
class CountSketch {
 public:
  static constexpr uint32_t kDepth = 4;

  CountSketch(uint32_t* words, uint64_t num_words, int bits) noexcept
      : words_(words),
        num_words_(num_words),
        width_(num_words * 32 / static_cast<uint32_t>(bits) / kDepth),
        bits_(bits) {}

  uint64_t num_words() const noexcept { return num_words_; }
  const uint32_t* words() const noexcept { return words_; }
  uint32_t limit() const noexcept { return static_cast<uint32_t>((uint64_t{1} << bits_) - 1); }
  uint32_t count(uint64_t hash) const noexcept;
  void raise(uint64_t hash, uint32_t count) noexcept;
  void clear() noexcept;
  void prefetch(uint64_t hash) const noexcept;
  // Counts at least what `other` counts, which may have cells of another number and size.
  void unite(const CountSketch& other) noexcept;

 private:
  uint64_t cell_of(uint64_t hash, uint32_t row) const noexcept {
    const uint64_t mixed = mix64(hash + uint64_t{row + 1} * kGolden);
    return row * width_ + ((uint64_t{static_cast<uint32_t>(mixed)} * width_) >> 32);
  }
  uint32_t get(uint64_t cell) const noexcept {
    const uint64_t bit = cell * static_cast<uint32_t>(bits_);
    return (words_[bit >> 5] >> (bit & 31)) & limit();
  }
  void raise_cell(uint64_t cell, uint32_t count) noexcept {
    const uint64_t bit = cell * static_cast<uint32_t>(bits_);
    const uint32_t old = get(cell);
    if (old < count) words_[bit >> 5] ^= (old ^ count) << (bit & 31);
  }

  uint32_t* words_;
  uint64_t num_words_, width_;
  int bits_;
};

// One generation of a sketch, as it is saved.
struct SketchPart {
  int bits;
  int64_t newest;  // time of the newest id that it counts
  std::vector<uint32_t> words;
};

class Candidates {
 public:
  Candidates(const Admission& admission, int partition);
  Candidates(const Candidates& other);  // what a snapshot keeps
  ~Candidates();

  // The count before these occurrences, and the newest sighting as far as it is known; adds the occurrences.
  Candidate add(int64_t id, uint64_t hash, uint64_t occurrences, int64_t time);
  // The count of an id once those last seen before `alive_from` are expired.
  uint64_t peek(int64_t id, uint64_t hash, int64_t alive_from = INT64_MIN) const noexcept;
  bool find(int64_t id, uint64_t hash, Candidate* out) const noexcept;  // false: unknown, or counted in a sketch
  void prefetch(uint64_t hash) const noexcept;
  // A count that can rise no further: the true one may be any above it.
  uint64_t limit() const noexcept { return limit_; }
  bool is_sketch() const noexcept { return words_ != nullptr; }
  void forget(int64_t id, uint64_t hash) noexcept;  // admitted: the row keeps the count from here on
  // Drops candidates last seen before `before`; those that were counted exactly are added to `dropped`, if given.
  void expire(int64_t before, std::vector<Candidate>* dropped = nullptr);

  std::vector<Candidate> entries() const;  // by id
  void load(const Candidate& candidate);
  std::vector<SketchPart> parts() const;  // the younger generation first; none before the sketch begins
  void load(size_t generation, SketchPart part);
  std::vector<uint32_t>& plain() noexcept { return plain_; }
  const std::vector<uint32_t>& plain() const noexcept { return plain_; }
  uint64_t num_bytes() const noexcept;

 private:
  uint32_t& plain_counter(uint64_t hash, int row) noexcept;
  Candidate add_to_plain(int64_t id, uint64_t hash, uint64_t occurrences, int64_t time) noexcept;
  Candidate add_to_sketch(int64_t id, uint64_t hash, uint64_t occurrences, int64_t time) noexcept;
  CountSketch generation(int number) const noexcept;
  void raise(uint64_t hash, uint32_t count, int64_t time) noexcept;
  void begin_sketch();
  void halve();
  void expire_generation(int64_t before) noexcept;

  uint64_t block_bytes_;  // of this partition, a multiple of 64
  uint32_t capacity_;     // ids that the map holds
  bool halves_;
  int bits_, num_generations_;
  BlockUse use_ = BlockUse::kAdmission;
  uint64_t limit_ = 0xffffffffu;
  CandidateMap map_;
  // The sketch. Where candidates expire, it has two generations: ids are counted in the younger one, which also takes
  // over their counts; the older one goes when all that it counts has expired.
  uint32_t* words_ = nullptr;
  int young_ = 0;
  int64_t newest_[2] = {INT64_MIN, INT64_MIN};
  std::vector<uint32_t> plain_;
  uint32_t plain_width_ = 0;
};

}  // namespace hotbed
