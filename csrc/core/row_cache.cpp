// SPDX-License-Identifier: Apache-2.0
#include "row_cache.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>

#include "hash.h"
#include "memory.h"

namespace hotbed {
namespace {

constexpr uint64_t kShardBytes = uint64_t{4} << 20, kMaxShards = 16;
constexpr uint64_t kMaxWords = 0xffffffffu;  // places are 32 bits
constexpr uint8_t kMaxUses = 15;
// LFU halves a count once in this number of misses a row. Measured: at 1, counts are halved before they can separate
// rare ids from rarer ones. At 8 the hit rate is a little higher, but much lower after other ids have become popular.
constexpr uint64_t kAgeing = 4;
constexpr int kMaxSpared = 64;  // where everything was used, the search for a victim ends all the same
constexpr size_t kHeadAhead = 24, kRecordAhead = 12;

enum class State : uint8_t { kLive, kStale, kEnd };

struct Record {
  int64_t id;
  uint32_t next;  // place of the next record of its chain, 0 = none
  uint16_t table;
  uint8_t uses;
  State state;  // stale: its row belongs to an older epoch; end: the ring continues at its start
};
static_assert(sizeof(Record) == 16);
constexpr uint32_t kRecordWords = sizeof(Record) / 8;

uint32_t words_of(int dim) { return kRecordWords + (static_cast<uint32_t>(dim) + 1) / 2; }

// How often ids without a row were asked for: 4-bit counters, four an id within one cache line, the smallest counts.
// They are halved a word at a time, each once in kAgeing times as many additions as there are rows.
class Sketch {
 public:
  static uint64_t bytes_for(uint64_t rows) noexcept { return (rows + 7) / 8 * 64; }
  explicit Sketch(uint64_t rows) : words_(bytes_for(rows) / 8) {}

  uint8_t add(uint64_t hash) {
    if (words_.empty()) return 1;
    uint64_t* block = words_.data() + ((hash >> 16 & 0xffffffffu) * (words_.size() / 8) >> 32) * 8;
    const uint64_t bits = mix64(hash ^ kGolden);
    uint64_t smallest = kMaxUses;
    for (int i = 0; i < 4; i++) smallest = std::min(smallest, *word(block, bits, i) >> shift(bits, i) & 15);
    for (int i = 0; i < 4 && smallest < kMaxUses; i++)
      if ((*word(block, bits, i) >> shift(bits, i) & 15) == smallest) *word(block, bits, i) += 1ull << shift(bits, i);
    if (++added_ % kAgeing == 0) {
      uint64_t& aged = words_[added_ / kAgeing % words_.size()];
      aged = aged >> 1 & 0x7777777777777777ull;
    }
    return static_cast<uint8_t>(std::min<uint64_t>(smallest + 1, kMaxUses));
  }

 private:
  static uint64_t* word(uint64_t* block, uint64_t bits, int i) noexcept {
    return block + 2 * i + (bits >> (8 * i) & 1);
  }
  static int shift(uint64_t bits, int i) noexcept { return static_cast<int>(bits >> (8 * i + 1) & 15) * 4; }

  std::vector<uint64_t> words_;
  uint64_t added_ = 0;
};

}  // namespace

class RowCache::Shard {
 public:
  // `rows`: that are expected to find room.
  Shard(const std::vector<uint32_t>& words, uint64_t max_bytes, uint64_t rows, CachePolicy policy)
      : words_(words), lfu_(policy == CachePolicy::kLfu), heads_(2 * rows), sketch_(lfu_ ? rows : 0) {
    fixed_bytes_ = sizeof(Shard) + heads_.size() * 4 + (lfu_ ? Sketch::bytes_for(rows) : 0);
    const uint64_t largest = *std::max_element(words.begin(), words.end());
    const uint64_t slack = kFirst + kRecordWords;  // an end mark always finds room
    const uint64_t given = max_bytes / 8 > fixed_bytes_ / 8 ? (max_bytes - fixed_bytes_) / 8 : 0;
    if (given < slack + largest)
      throw std::invalid_argument("cache: max_bytes must hold a row of each table, got " + std::to_string(max_bytes) +
                                  " for a shard. Give more bytes.");
    num_words_ = std::min(given, kMaxWords);
    end_ = static_cast<uint32_t>(num_words_ - kRecordWords);
    ring_ = static_cast<uint64_t*>(map_pages(num_words_ * 8, num_words_ * 8 >= 4 * kHugePage));
    head_ = tail_ = touched_ = kFirst;
  }
  ~Shard() { unmap_pages(ring_, num_words_ * 8); }
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  std::mutex mutex;
  uint64_t epoch = 0;

  uint64_t num_rows() const noexcept { return num_rows_; }
  uint64_t num_bytes() const noexcept { return fixed_bytes_ + (uint64_t{touched_} + kRecordWords) * 8; }

  void prefetch_head(const Seek& seek) const noexcept { __builtin_prefetch(&heads_[bucket(seek.hash)]); }
  void prefetch_record(const Seek& seek) const noexcept {
    if (const uint32_t place = heads_[bucket(seek.hash)]) {
      const size_t bytes = std::min<size_t>(size_t{words_[seek.table]} * 8, 256);
      for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(reinterpret_cast<char*>(ring_ + place) + at);
    }
  }

  bool read(const Seek& seek, float* out, size_t dim) noexcept {
    Record* record = find(seek);
    if (!record || record->state != State::kLive) return false;
    std::memcpy(out, record + 1, dim * sizeof(float));
    if (record->uses < (lfu_ ? kMaxUses : 1)) record->uses++;
    return true;
  }

  void insert(const Seek& seek, const float* row, size_t dim, bool hot) {
    Record* record = find(seek);
    if (record && record->state == State::kLive) return;
    if (!record) {
      const uint8_t asked = lfu_ ? sketch_.add(seek.hash) : 1;
      const uint32_t place = make_room(words_[seek.table], hot ? kMaxUses : asked);
      if (!place) return;
      uint32_t& head = heads_[bucket(seek.hash)];
      record = at(place);
      const uint8_t uses = static_cast<uint8_t>(hot ? 1 : asked - 1);
      *record = {seek.id, head, static_cast<uint16_t>(seek.table), uses, State::kLive};
      head = place;
    }
    std::memcpy(record + 1, row, dim * sizeof(float));
    record->state = State::kLive;
    num_rows_++;
  }

  void outdate(const Seek& seek) noexcept {
    Record* record = find(seek);
    if (!record || record->state != State::kLive) return;
    record->state = State::kStale;  // it is written again in place when it is asked for
    num_rows_--;
  }

  void clear() noexcept {
    std::fill(heads_.begin(), heads_.end(), 0u);
    head_ = tail_ = kFirst;
    used_ = num_rows_ = 0;
  }

 private:
  static constexpr uint32_t kFirst = 1;  // place 0 says none

  size_t bucket(uint64_t hash) const noexcept {
    return static_cast<size_t>((hash & 0xffffffffu) * heads_.size() >> 32);
  }
  Record* at(uint32_t place) const noexcept { return reinterpret_cast<Record*>(ring_ + place); }

  Record* find(const Seek& seek) const noexcept {
    for (uint32_t place = heads_[bucket(seek.hash)]; place; place = at(place)->next)
      if (at(place)->id == seek.id && at(place)->table == seek.table) return at(place);
    return nullptr;
  }

  // The link that leads to a record.
  uint32_t& link_to(uint32_t place) noexcept {
    uint32_t* link = &heads_[bucket(hash_of(hash_id(at(place)->id), at(place)->table))];
    while (*link != place) link = &at(*link)->next;
    return *link;
  }

  // Returns a place for `words`; 0 where the records at the tail are used more often than the new row was asked for.
  uint32_t make_room(uint32_t words, uint8_t asked) noexcept {
    for (int spared = 0;;) {
      if (used_ == 0) head_ = tail_ = kFirst;
      if (used_ == 0 || head_ > tail_) {  // free: from the head to the end, and before the tail
        if (end_ - head_ >= words) break;
        at(head_)->state = State::kEnd;
        used_ += end_ - head_;
        head_ = kFirst;
      }
      if (tail_ - head_ >= words) break;
      const Record& oldest = *at(tail_);
      if (oldest.state == State::kEnd) {
        used_ -= end_ - tail_;
        tail_ = kFirst;
      } else if (oldest.state == State::kStale) {
        drop();
      } else if (lfu_) {
        const bool wins = asked > oldest.uses;
        if (wins) drop();
        else spare();
        if (!wins) return 0;
      } else if (oldest.uses > 0 && spared++ < kMaxSpared) {
        spare();
      } else {
        drop();
      }
    }
    const uint32_t place = head_;
    head_ += words;
    used_ += words;
    touched_ = std::max(touched_, head_);
    return place;
  }

  void drop() noexcept {
    const uint32_t words = words_[at(tail_)->table];
    link_to(tail_) = at(tail_)->next;
    num_rows_ -= at(tail_)->state == State::kLive;
    tail_ += words;
    used_ -= words;
  }

  // The record at the tail becomes the newest. Its own place is freed, so there is room, if one that overlaps.
  void spare() noexcept {
    const uint32_t words = words_[at(tail_)->table];
    if (!lfu_ || ++num_spared_ % kAgeing == 0) at(tail_)->uses = static_cast<uint8_t>(at(tail_)->uses / 2);
    link_to(tail_) = head_;
    std::memmove(ring_ + head_, ring_ + tail_, size_t{words} * 8);
    head_ += words;
    tail_ += words;
  }

  const std::vector<uint32_t>& words_;
  bool lfu_;
  std::vector<uint32_t> heads_;
  Sketch sketch_;
  uint64_t fixed_bytes_ = 0, num_words_ = 0, num_rows_ = 0, used_ = 0, num_spared_ = 0;
  uint64_t* ring_ = nullptr;
  uint32_t head_ = 0, tail_ = 0, end_ = 0, touched_ = 0;
};

RowCache::RowCache(std::vector<int> dims, uint64_t max_bytes, CachePolicy policy) : dims_(std::move(dims)) {
  if (dims_.empty() || dims_.size() > 0xffff)
    throw std::invalid_argument("cache: the number of tables must be 1 to 65,535, got " + std::to_string(dims_.size()) +
                                ". Split the model.");
  uint64_t mean = 0;
  for (const int dim : dims_) words_.push_back(words_of(dim)), mean += words_.back();
  index_bytes_ = policy == CachePolicy::kLfu ? 16 : 8;  // two heads, and a word of the sketch
  const uint64_t num_shards = std::clamp<uint64_t>(max_bytes / kShardBytes, 1, kMaxShards),
                 each = max_bytes / num_shards;
  const uint64_t row_bytes = mean * 8 / dims_.size() + index_bytes_;
  const uint64_t rows = std::max<uint64_t>(1, each / row_bytes);
  for (uint64_t s = 0; s < num_shards; s++) shards_.push_back(std::make_unique<Shard>(words_, each, rows, policy));
}

RowCache::~RowCache() = default;

// Calls visit(shard, numbers of its seeks) with the shard's lock held.
template <class F>
void RowCache::by_shard(const std::vector<Seek>& seeks, F&& visit) const {
  thread_local std::vector<uint32_t> order, starts;
  starts.assign(shards_.size() + 1, 0);
  for (const Seek& seek : seeks) starts[shard_of(seek.hash) + 1]++;
  for (size_t s = 0; s < shards_.size(); s++) starts[s + 1] += starts[s];
  order.resize(seeks.size());
  for (uint32_t i = 0; i < seeks.size(); i++) order[starts[shard_of(seeks[i].hash)]++] = i;
  for (size_t s = 0, first = 0; s < shards_.size(); first = starts[s++]) {
    const std::span<const uint32_t> own(order.data() + first, starts[s] - first);
    if (own.empty()) continue;
    const std::lock_guard lock(shards_[s]->mutex);
    visit(*shards_[s], own);
  }
}

void RowCache::find(uint64_t epoch, std::vector<Seek>& seeks, float* rows) {
  uint64_t hits = 0;
  by_shard(seeks, [&](Shard& shard, std::span<const uint32_t> own) {
    if (shard.epoch != epoch) return;
    for (size_t i = 0; i < std::min(own.size(), kHeadAhead); i++) shard.prefetch_head(seeks[own[i]]);
    for (size_t i = 0; i < std::min(own.size(), kRecordAhead); i++) shard.prefetch_record(seeks[own[i]]);
    for (size_t i = 0; i < own.size(); i++) {
      if (i + kHeadAhead < own.size()) shard.prefetch_head(seeks[own[i + kHeadAhead]]);
      if (i + kRecordAhead < own.size()) shard.prefetch_record(seeks[own[i + kRecordAhead]]);
      Seek& seek = seeks[own[i]];
      seek.hit = shard.read(seek, rows + seek.row, static_cast<size_t>(dims_[seek.table]));
      hits += seek.hit;
    }
  });
  hits_.fetch_add(hits, std::memory_order_relaxed);
  misses_.fetch_add(seeks.size() - hits, std::memory_order_relaxed);
}

void RowCache::keep(uint64_t epoch, const std::vector<Seek>& seeks, const float* rows, bool hot) {
  by_shard(seeks, [&](Shard& shard, std::span<const uint32_t> own) {
    if (shard.epoch != epoch) return;
    for (const uint32_t i : own)
      if (!seeks[i].hit) shard.insert(seeks[i], rows + seeks[i].row, static_cast<size_t>(dims_[seeks[i].table]), hot);
  });
}

void RowCache::advance(uint64_t epoch, const std::vector<std::vector<int64_t>>& changed, bool all) {
  std::vector<std::vector<Seek>> dropped(shards_.size());
  for (uint32_t table = 0; table < changed.size(); table++)
    for (const int64_t id : changed[table]) {
      const uint64_t hash = hash_of(hash_id(id), table);
      dropped[shard_of(hash)].push_back({id, hash, 0, table, false});
    }
  for (size_t s = 0; s < shards_.size(); s++) {
    Shard& shard = *shards_[s];
    const std::lock_guard lock(shard.mutex);
    if (all) shard.clear();
    for (const Seek& seek : dropped[s]) shard.outdate(seek);
    shard.epoch = epoch;
  }
}

uint64_t RowCache::num_rows() const {
  uint64_t n = 0;
  for (const auto& shard : shards_) {
    const std::lock_guard lock(shard->mutex);
    n += shard->num_rows();
  }
  return n;
}

uint64_t RowCache::num_bytes() const {
  uint64_t n = 0;
  for (const auto& shard : shards_) {
    const std::lock_guard lock(shard->mutex);
    n += shard->num_bytes();
  }
  return n;
}

uint64_t RowCache::row_bytes(uint32_t table) const noexcept { return uint64_t{words_[table]} * 8 + index_bytes_; }

void CacheRequest::find(RowCache& cache, uint64_t epoch, const std::vector<Feature>& features,
                        const std::vector<FeatureIds>& ids) {
  ids_.assign(features, ids);
  seeks_.clear();
  size_t lanes = 0;
  for (uint32_t table = 0; table < ids_.num_tables(); table++) {
    const UniqueIds& unique = ids_.unique(table);
    for (size_t u = 0; u < unique.ids.size(); u++) {
      seeks_.push_back({unique.ids[u], RowCache::hash_of(unique.hashes[u], table), lanes, table, false});
      lanes += static_cast<size_t>(cache.dim(table));
    }
  }
  if (rows_.size() < lanes) rows_.resize(lanes);
  cache.find(epoch, seeks_, rows_.data());
  num_missing_ = 0;
  for (const RowCache::Seek& seek : seeks_) num_missing_ += !seek.hit;
}

std::vector<std::vector<int64_t>> CacheRequest::missing(int num_tables) const {
  std::vector<std::vector<int64_t>> ids(static_cast<size_t>(num_tables));
  for (const RowCache::Seek& seek : seeks_)
    if (!seek.hit) ids[seek.table].push_back(seek.id);
  return ids;
}

void CacheRequest::fill(const std::vector<const float*>& rows, const RowCache& cache) {
  std::vector<const float*> next = rows;
  for (const RowCache::Seek& seek : seeks_)
    if (!seek.hit) {
      const int dim = cache.dim(seek.table);
      std::copy_n(next[seek.table], dim, rows_.data() + seek.row);
      next[seek.table] += dim;
    }
}

void CacheRequest::pool(const RowCache& cache, const std::vector<OutputRows>& out, int64_t num_samples) {
  pointers_.clear();
  for (const RowCache::Seek& seek : seeks_) pointers_.push_back(rows_.data() + seek.row);
  const float* const* rows = pointers_.data();
  for (uint32_t table = 0; table < ids_.num_tables(); table++) {
    ids_.pool(table, rows, cache.dim(table), out, num_samples);
    rows += ids_.unique(table).ids.size();
  }
}

}  // namespace hotbed
