// SPDX-License-Identifier: Apache-2.0
#include "admission.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace hotbed {
namespace {

constexpr uint64_t kMaxCount = 0xffffffffu;
constexpr int kPlainDepth = 4;
constexpr uint64_t kMinBlockBytes = 4 * sizeof(CandidateBucket);

uint32_t saturating_add(uint32_t a, uint64_t b) noexcept { return static_cast<uint32_t>(std::min(a + b, kMaxCount)); }

// Less a cache line, so that blocks of a power of two fill the slabs that they share.
uint64_t block_bytes_of(const Admission& admission) noexcept {
  const uint64_t share = admission.admission_bytes / kPartitions / 64 * 64;
  return std::max(kMinBlockBytes, share - std::min<uint64_t>(share, 64));
}

uint32_t max_buckets_of(const Admission& admission) noexcept {
  if (admission.max_candidates) return std::numeric_limits<uint32_t>::max();
  return static_cast<uint32_t>(std::min<uint64_t>(block_bytes_of(admission) / sizeof(CandidateBucket), kMaxCount));
}

uint32_t capacity_of(const Admission& admission) noexcept {
  if (!admission.max_candidates) return CandidateMap::entries_of(max_buckets_of(admission));
  const uint64_t share = (admission.max_candidates + kPartitions - 1) / kPartitions;
  return static_cast<uint32_t>(std::clamp<uint64_t>(share, 1, kMaxCount));
}

// Bits of a cell: a power of two, enough to count up to the threshold.
int bits_of(const Admission& admission) noexcept {
  if (admission.kind != AdmitKind::kMinCount) return 32;
  const uint64_t most = std::clamp<uint64_t>(admission.min_count, 1, kMaxCount);
  return static_cast<int>(std::bit_ceil(static_cast<unsigned>(std::bit_width(most))));
}

}  // namespace

CandidateMap::CandidateMap(const CandidateMap& other) : BucketMap(other.partition_, other.use_, other.max_buckets_) {
  if (!other.buckets_) return;
  buckets_ = static_cast<CandidateBucket*>(allocate_block(other.num_bytes(), BlockUse::kSnapshot));
  use_ = BlockUse::kSnapshot;
  num_buckets_ = other.num_buckets_, size_ = other.size_, max_size_ = other.max_size_, level_ = other.level_;
  std::memcpy(static_cast<void*>(buckets_), other.buckets_, other.num_bytes());
}

uint32_t* CandidateMap::detach() noexcept {
  num_buckets_ = size_ = max_size_ = 0, level_ = -1;
  return reinterpret_cast<uint32_t*>(std::exchange(buckets_, nullptr));
}

uint32_t CountSketch::count(uint64_t hash) const noexcept {
  uint32_t least = limit();
  for (uint32_t row = 0; row < kDepth; row++) least = std::min(least, get(cell_of(hash, row)));
  return least;
}

void CountSketch::raise(uint64_t hash, uint32_t count) noexcept {
  for (uint32_t row = 0; row < kDepth; row++) raise_cell(cell_of(hash, row), count);
}

void CountSketch::clear() noexcept { std::fill_n(words_, num_words_, 0); }

void CountSketch::prefetch(uint64_t hash) const noexcept {
  for (uint32_t row = 0; row < kDepth; row++)
    __builtin_prefetch(&words_[(cell_of(hash, row) * static_cast<uint32_t>(bits_)) >> 5]);
}

// A cell counts the ids of a range of hashes: its count goes to every cell whose range meets it.
void CountSketch::unite(const CountSketch& other) noexcept {
  const auto first_hash = [](uint64_t cell, uint64_t width) { return ((cell << 32) + width - 1) / width; };
  for (uint32_t row = 0; row < kDepth; row++)
    for (uint64_t cell = 0; cell < other.width_; cell++) {
      uint32_t count = other.get(row * other.width_ + cell);
      if (count == 0) continue;
      count = count == other.limit() ? limit() : std::min(count, limit());
      const uint64_t first = first_hash(cell, other.width_), last = first_hash(cell + 1, other.width_) - 1;
      for (uint64_t to = (first * width_) >> 32; to <= (last * width_) >> 32; to++)
        raise_cell(row * width_ + to, count);
    }
}

Candidates::Candidates(const Admission& admission, int partition)
    : block_bytes_(block_bytes_of(admission)),
      capacity_(capacity_of(admission)),
      halves_(admission.max_candidates != 0),
      bits_(bits_of(admission)),
      num_generations_(admission.expire_after >= 0 ? 2 : 1),
      map_(partition, max_buckets_of(admission)) {
  if (admission.sketch_bytes == 0) return;
  const uint64_t width = admission.sketch_bytes / kPartitions / kPlainDepth / sizeof(uint32_t);
  plain_width_ = static_cast<uint32_t>(std::max<uint64_t>(16, std::bit_floor(width)));
  plain_.assign(size_t{plain_width_} * kPlainDepth, 0);
}

Candidates::Candidates(const Candidates& other)
    : block_bytes_(other.block_bytes_),
      capacity_(other.capacity_),
      halves_(other.halves_),
      bits_(other.bits_),
      num_generations_(other.num_generations_),
      use_(BlockUse::kSnapshot),
      limit_(other.limit_),
      map_(other.map_),
      young_(other.young_),
      newest_{other.newest_[0], other.newest_[1]},
      plain_(other.plain_),
      plain_width_(other.plain_width_) {
  if (!other.words_) return;
  words_ = static_cast<uint32_t*>(allocate_block(block_bytes_, use_));
  std::memcpy(words_, other.words_, block_bytes_);
}

Candidates::~Candidates() { release_block(words_, block_bytes_, use_); }

CountSketch Candidates::generation(int number) const noexcept {
  const uint64_t num_words = block_bytes_ / sizeof(uint32_t) / static_cast<uint64_t>(num_generations_);
  return CountSketch(words_ + static_cast<uint64_t>(number) * num_words, num_words, bits_);
}

uint32_t& Candidates::plain_counter(uint64_t hash, int row) noexcept {
  const uint64_t at = mix64(hash + static_cast<uint64_t>(row + 1) * kGolden) & (plain_width_ - 1);
  return plain_[static_cast<size_t>(row) * plain_width_ + at];
}

uint64_t Candidates::peek(int64_t id, uint64_t hash, int64_t alive_from) const noexcept {
  if (is_sketch()) {
    uint64_t most = generation(young_).count(hash);
    if (num_generations_ == 1) return most;
    const int old = 1 - young_;  // it goes first
    if (newest_[old] >= alive_from) return std::max<uint64_t>(most, generation(old).count(hash));
    return newest_[young_] >= alive_from ? most : 0;
  }
  if (plain_.empty()) {
    const auto place = map_.locate(id, hash);
    return place.bucket && place.bucket->seen[place.entry] >= alive_from ? place.bucket->count[place.entry] : 0;
  }
  uint32_t least = 0xffffffffu;
  for (int row = 0; row < kPlainDepth; row++)
    least = std::min(least, const_cast<Candidates*>(this)->plain_counter(hash, row));
  return least;
}

bool Candidates::find(int64_t id, uint64_t hash, Candidate* out) const noexcept {
  if (is_sketch() || !plain_.empty()) return false;
  const auto place = map_.locate(id, hash);
  if (!place.bucket) return false;
  *out = {id, place.bucket->count[place.entry], place.bucket->seen[place.entry]};
  return true;
}

void Candidates::prefetch(uint64_t hash) const noexcept {
  if (!is_sketch()) return map_.prefetch(hash);
  for (int g = 0; g < num_generations_; g++) generation(g).prefetch(hash);
}

Candidate Candidates::add_to_plain(int64_t id, uint64_t hash, uint64_t occurrences, int64_t time) noexcept {
  const uint64_t before = peek(id, hash);
  for (int row = 0; row < kPlainDepth; row++) {
    uint32_t& counter = plain_counter(hash, row);
    counter = saturating_add(counter, occurrences);
  }
  return {id, static_cast<uint32_t>(before), time};
}

void Candidates::raise(uint64_t hash, uint32_t count, int64_t time) noexcept {
  generation(young_).raise(hash, static_cast<uint32_t>(std::min<uint64_t>(count, limit_)));
  newest_[young_] = std::max(newest_[young_], time);
}

Candidate Candidates::add_to_sketch(int64_t id, uint64_t hash, uint64_t occurrences, int64_t time) noexcept {
  const uint32_t before = static_cast<uint32_t>(peek(id, hash));
  raise(hash, saturating_add(before, occurrences), time);
  return {id, before, time};
}

Candidate Candidates::add(int64_t id, uint64_t hash, uint64_t occurrences, int64_t time) {
  if (is_sketch()) return add_to_sketch(id, hash, occurrences, time);
  if (!plain_.empty()) return add_to_plain(id, hash, occurrences, time);
  auto place = map_.locate(id, hash);
  if (!place.bucket) {
    if (map_.size() >= capacity_ && !halves_) {
      begin_sketch();
      return add_to_sketch(id, hash, occurrences, time);
    }
    while (map_.size() >= capacity_) halve();
    place = map_.add(id, hash);
    place.bucket->count[place.entry] = 0, place.bucket->seen[place.entry] = time;
  }
  uint32_t& count = place.bucket->count[place.entry];
  int64_t& seen = place.bucket->seen[place.entry];
  const uint32_t before = count;
  count = saturating_add(count, occurrences);
  seen = std::max(seen, time);
  return {id, before, seen};
}

// The ids go over by rising id: a map has other places after it was loaded, and the order leaves its mark on a sketch.
void Candidates::begin_sketch() {
  const std::vector<Candidate> all = entries();
  if (map_.num_bytes() == block_bytes_) {
    words_ = map_.detach();
  } else {
    map_.clear();
    words_ = static_cast<uint32_t*>(allocate_block(block_bytes_, use_));
  }
  std::fill_n(words_, block_bytes_ / sizeof(uint32_t), 0);
  limit_ = generation(young_).limit();
  for (const Candidate& candidate : all) raise(hash_id(candidate.id), candidate.count, candidate.seen);
}

void Candidates::forget(int64_t id, uint64_t hash) noexcept {
  if (plain_.empty() && !is_sketch()) map_.erase(id, hash);
}

void Candidates::halve() {
  std::vector<int64_t> gone;
  map_.for_each_place([&](CandidateBucket& bucket, int entry) {
    bucket.count[entry] /= 2;
    if (bucket.count[entry] == 0) gone.push_back(bucket.id[entry]);
  });
  for (const int64_t id : gone) map_.erase(id, hash_id(id));
}

// Where all ids of the older generation have expired, it is emptied and becomes the younger one.
void Candidates::expire_generation(int64_t before) noexcept {
  const int old = 1 - young_;
  if (num_generations_ == 1 || newest_[old] >= before) return;
  if (newest_[old] != INT64_MIN) generation(old).clear();
  newest_[old] = INT64_MIN;
  if (newest_[young_] != INT64_MIN) young_ = old;
}

void Candidates::expire(int64_t before, std::vector<Candidate>* dropped) {
  if (is_sketch()) {
    for (int g = 0; g < num_generations_; g++) expire_generation(before);
    return;
  }
  std::vector<int64_t> gone;
  map_.for_each_place([&](const CandidateBucket& bucket, int entry) {
    if (bucket.seen[entry] >= before) return;
    gone.push_back(bucket.id[entry]);
    if (dropped) dropped->push_back({bucket.id[entry], bucket.count[entry], bucket.seen[entry]});
  });
  for (const int64_t id : gone) map_.erase(id, hash_id(id));
  if (!gone.empty()) map_.shrink();
}

std::vector<Candidate> Candidates::entries() const {
  std::vector<Candidate> sorted;
  sorted.reserve(map_.size());
  map_.for_each_place(
      [&](const CandidateBucket& bucket, int e) { sorted.push_back({bucket.id[e], bucket.count[e], bucket.seen[e]}); });
  std::sort(sorted.begin(), sorted.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  return sorted;
}

void Candidates::load(const Candidate& candidate) {
  const uint64_t hash = hash_id(candidate.id);
  auto place = map_.locate(candidate.id, hash);
  if (!place.bucket && !is_sketch() && map_.size() >= capacity_ && !halves_) begin_sketch();
  if (is_sketch()) return raise(hash, candidate.count, candidate.seen);
  if (!place.bucket) place = map_.add(candidate.id, hash);
  place.bucket->count[place.entry] = candidate.count, place.bucket->seen[place.entry] = candidate.seen;
}

std::vector<SketchPart> Candidates::parts() const {
  std::vector<SketchPart> all;
  for (int g = 0; is_sketch() && g < num_generations_; g++) {
    const int number = g == 0 ? young_ : 1 - young_;
    const CountSketch sketch = generation(number);
    all.push_back({bits_, newest_[number], {sketch.words(), sketch.words() + sketch.num_words()}});
  }
  return all;
}

void Candidates::load(size_t generation_number, SketchPart part) {
  if (!is_sketch()) begin_sketch();
  const int number = generation_number == 0 || num_generations_ == 1 ? young_ : 1 - young_;
  generation(number).unite(CountSketch(part.words.data(), part.words.size(), part.bits));
  newest_[number] = std::max(newest_[number], part.newest);
}

uint64_t Candidates::num_bytes() const noexcept {
  return map_.num_bytes() + (words_ ? block_bytes_ : 0) + plain_.size() * sizeof(uint32_t);
}

}  // namespace hotbed
