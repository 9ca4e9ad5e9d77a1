// SPDX-License-Identifier: Apache-2.0
// Admission: counts of the ids that have no row yet, in bounded memory, for one partition.
#pragma once

#include <cstdint>
#include <vector>

#include "id_map.h"

namespace hotbed {

enum class AdmitKind : uint8_t { kAll, kMinCount, kProbability };

struct Admission {
  AdmitKind kind = AdmitKind::kAll;
  uint64_t min_count = 0;
  uint64_t coefficient = 1;
  bool once_a_batch = false;  // an id counts once a batch, however often it occurs there
  double probability = 1.0;
  uint64_t sketch_bytes = 0;  // 0 = exact
  uint64_t max_candidates = uint64_t{1} << 20;
  int64_t expire_after = -1;  // by the table's clock; -1 = off
};

struct Candidate {
  int64_t id;
  uint32_t count;
  int64_t seen;
};

class Candidates {
 public:
  Candidates(const Admission& admission, int partition);

  // Count before these occurrences; adds them.
  uint64_t add(int64_t id, uint64_t hash, uint64_t occurrences, int64_t time);
  uint64_t peek(int64_t id, uint64_t hash) const noexcept;
  bool find(int64_t id, uint64_t hash, Candidate* out) const noexcept;  // false: unknown, or counted in a sketch
  void forget(int64_t id, uint64_t hash) noexcept;  // admitted: the row keeps the count from here on
  void expire(int64_t before);                      // drops exact candidates last seen before `before`

  std::vector<Candidate> entries() const;
  void load(const Candidate& candidate);
  std::vector<uint32_t>& sketch() noexcept { return sketch_; }
  uint64_t num_bytes() const noexcept;

 private:
  static constexpr int kDepth = 4;
  uint32_t& counter(uint64_t hash, int row) noexcept;
  void halve();
  void remove(uint32_t at);

  bool exact_;
  uint32_t width_ = 0;
  size_t capacity_;
  IdMap index_;
  std::vector<Candidate> list_;
  std::vector<uint32_t> sketch_;
};

}  // namespace hotbed
