// SPDX-License-Identifier: Apache-2.0
#include "admission.h"

#include <algorithm>
#include <bit>

namespace hotbed {
namespace {

uint32_t saturating_add(uint32_t a, uint64_t b) noexcept {
  return static_cast<uint32_t>(std::min<uint64_t>(a + b, 0xffffffffu));
}

}  // namespace

Candidates::Candidates(const Admission& admission, int partition)
    : exact_(admission.sketch_bytes == 0),
      capacity_(std::max<uint64_t>(1, (admission.max_candidates + kPartitions - 1) / kPartitions)),
      index_(partition) {
  if (exact_) return;
  const uint64_t width = admission.sketch_bytes / kPartitions / kDepth / sizeof(uint32_t);
  width_ = static_cast<uint32_t>(std::max<uint64_t>(16, std::bit_floor(width)));
  sketch_.assign(size_t{width_} * kDepth, 0);
}

uint32_t& Candidates::counter(uint64_t hash, int row) noexcept {
  const uint64_t at = mix64(hash + static_cast<uint64_t>(row + 1) * kGolden) & (width_ - 1);
  return sketch_[static_cast<size_t>(row) * width_ + at];
}

uint64_t Candidates::peek(int64_t id, uint64_t hash) const noexcept {
  if (exact_) {
    const uint32_t at = index_.find(id, hash);
    return at == kNoSlot ? 0 : list_[at].count;
  }
  uint32_t least = 0xffffffffu;
  for (int row = 0; row < kDepth; row++) least = std::min(least, const_cast<Candidates*>(this)->counter(hash, row));
  return least;
}

bool Candidates::find(int64_t id, uint64_t hash, Candidate* out) const noexcept {
  if (!exact_) return false;
  const uint32_t at = index_.find(id, hash);
  if (at == kNoSlot) return false;
  *out = list_[at];
  return true;
}

uint64_t Candidates::add(int64_t id, uint64_t hash, uint64_t occurrences, int64_t time) {
  if (!exact_) {
    const uint64_t before = peek(id, hash);
    for (int row = 0; row < kDepth; row++) {
      uint32_t& c = counter(hash, row);
      c = saturating_add(c, occurrences);
    }
    return before;
  }
  uint32_t at = index_.find(id, hash);
  if (at == kNoSlot) {
    while (list_.size() >= capacity_) halve();
    at = static_cast<uint32_t>(list_.size());
    list_.push_back({id, 0, time});
    index_.insert(id, hash, at);
  }
  Candidate& candidate = list_[at];
  const uint64_t before = candidate.count;
  candidate.count = saturating_add(candidate.count, occurrences);
  candidate.seen = std::max(candidate.seen, time);
  return before;
}

void Candidates::remove(uint32_t at) {
  index_.erase(list_[at].id, hash_id(list_[at].id));
  const Candidate last = list_.back();
  list_.pop_back();
  if (at < list_.size()) {
    list_[at] = last;
    index_.erase(last.id, hash_id(last.id));
    index_.insert(last.id, hash_id(last.id), at);
  }
}

void Candidates::forget(int64_t id, uint64_t hash) noexcept {
  if (!exact_) return;
  const uint32_t at = index_.find(id, hash);
  if (at != kNoSlot) remove(at);
}

void Candidates::halve() {
  for (Candidate& candidate : list_) candidate.count /= 2;
  for (uint32_t at = static_cast<uint32_t>(list_.size()); at-- > 0;)
    if (list_[at].count == 0) remove(at);
}

void Candidates::expire(int64_t before) {
  for (uint32_t at = static_cast<uint32_t>(list_.size()); at-- > 0;)
    if (list_[at].seen < before) remove(at);
}

std::vector<Candidate> Candidates::entries() const {
  std::vector<Candidate> sorted = list_;
  std::sort(sorted.begin(), sorted.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  return sorted;
}

void Candidates::load(const Candidate& candidate) {
  const uint64_t hash = hash_id(candidate.id);
  if (index_.find(candidate.id, hash) != kNoSlot) forget(candidate.id, hash);
  index_.insert(candidate.id, hash, static_cast<uint32_t>(list_.size()));
  list_.push_back(candidate);
}

uint64_t Candidates::num_bytes() const noexcept {
  return index_.num_bytes() + list_.capacity() * sizeof(Candidate) + sketch_.size() * sizeof(uint32_t);
}

}  // namespace hotbed
