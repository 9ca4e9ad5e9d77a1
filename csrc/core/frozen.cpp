// SPDX-License-Identifier: Apache-2.0
#include "frozen.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace hotbed {
namespace {

constexpr size_t kAhead = 24;          // index lines on their way
constexpr size_t kSearchedRows = 256;  // rows on their way before they are pooled: few enough to be near then
constexpr int kPrefetchedLines = 4;    // of a row; hardware fetches the rest

[[noreturn]] void fail(const std::string& path, const char* what) {
  throw std::system_error(errno, std::generic_category(), path + ": " + what);
}

size_t row_bytes(int dim, FrozenDtype dtype) noexcept {
  const size_t lanes = static_cast<size_t>(dim);
  if (dtype == FrozenDtype::kFloat32) return lanes * 4;
  if (dtype == FrozenDtype::kFloat16) return lanes * 2;
  return (4 + lanes + 3) / 4 * 4;
}

void encode_int8(const float* from, size_t dim, uint8_t* to) noexcept {
  float largest = 0.0f;
  for (size_t d = 0; d < dim; d++) largest = std::max(largest, std::fabs(from[d]));
  const float scale = largest / 127.0f;
  std::memcpy(to, &scale, 4);
  for (size_t d = 0; d < dim; d++) {
    const float lane = scale > 0.0f ? std::nearbyint(from[d] / scale) : 0.0f;
    to[4 + d] = static_cast<uint8_t>(static_cast<int8_t>(std::clamp(lane, -127.0f, 127.0f)));
  }
}

uint64_t buckets_for(uint64_t entries) noexcept { return entries ? entries * 10 / (Bucket::kEntries * 7) + 1 : 0; }

uint64_t home_of(uint64_t hash, uint64_t num_buckets) noexcept {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(hash) * num_buckets) >> 64);
}

}  // namespace

std::vector<uint8_t> frozen_rows(const float* values, size_t n, int dim, FrozenDtype dtype) {
  const size_t lanes = static_cast<size_t>(dim), bytes = row_bytes(dim, dtype);
  std::vector<uint8_t> out(n * bytes);
  if (out.empty()) return out;
  if (dtype == FrozenDtype::kFloat32) std::memcpy(out.data(), values, out.size());
  else if (dtype == FrozenDtype::kFloat16)
    for (size_t i = 0; i < n * lanes; i++) {
      const uint16_t half = encode_half(Dtype::kFloat16, values[i], kNearest);
      std::memcpy(out.data() + 2 * i, &half, 2);
    }
  else
    for (size_t i = 0; i < n; i++) encode_int8(values + i * lanes, lanes, out.data() + i * bytes);
  return out;
}

std::vector<Bucket> frozen_index(const int64_t* ids, size_t n, const int64_t* removed, size_t num_removed) {
  if (n >= kRemoved)
    throw std::length_error("rows: a file holds at most 2^32 - 3 rows, got " + std::to_string(n) +
                            ". Shard the table.");
  const uint64_t num_buckets = buckets_for(n + num_removed);
  std::vector<Bucket> buckets(num_buckets);
  const auto place = [&](int64_t id, uint32_t slot) {
    uint64_t b = home_of(hash_id(id), num_buckets);
    while (!buckets[b].put(id, slot)) {
      buckets[b].overflow = 1;
      b = b + 1 == num_buckets ? 0 : b + 1;
    }
  };
  for (size_t i = 0; i < n; i++) {
    if (i + kAhead < n) __builtin_prefetch(&buckets[home_of(hash_id(ids[i + kAhead]), num_buckets)], 1);
    place(ids[i], static_cast<uint32_t>(i));
  }
  for (size_t i = 0; i < num_removed; i++) place(removed[i], kRemoved);
  return buckets;
}

FrozenFooter frozen_footer(uint64_t num_rows, uint64_t num_removed, int dim, FrozenDtype dtype) {
  FrozenFooter footer{};
  footer.num_rows = num_rows, footer.num_removed = num_removed;
  footer.num_buckets = buckets_for(num_rows + num_removed);
  footer.buckets_at = (num_rows * row_bytes(dim, dtype) + 63) / 64 * 64;
  footer.num_bytes = footer.buckets_at + footer.num_buckets * 64 + sizeof(FrozenFooter);
  footer.dim = static_cast<uint32_t>(dim), footer.dtype = dtype;
  std::memcpy(footer.magic, FrozenFooter::kMagic, sizeof footer.magic);
  return footer;
}

FrozenRows::FrozenRows(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) fail(path, "cannot be read");
  struct stat status{};
  const bool ok = ::fstat(file, &status) == 0 && status.st_size >= static_cast<off_t>(sizeof(FrozenFooter)) &&
                  status.st_size % 64 == 0;
  bytes_ = ok ? static_cast<size_t>(status.st_size) : 0;
  void* data = ok ? ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
  const int error = errno;
  ::close(file);
  if (!ok) throw std::runtime_error(path + ": torn");
  if (data == MAP_FAILED) errno = error, fail(path, "cannot be mapped");
  data_ = static_cast<const uint8_t*>(data);
  footer_ = reinterpret_cast<const FrozenFooter*>(data_ + bytes_ - sizeof(FrozenFooter));
  const FrozenFooter& f = *footer_;
  const bool known = std::memcmp(f.magic, FrozenFooter::kMagic, sizeof f.magic) == 0 && f.dim < (1u << 24) &&
                     f.dtype <= FrozenDtype::kInt8 && f.num_rows < kRemoved;
  const FrozenFooter expected =
      known ? frozen_footer(f.num_rows, f.num_removed, static_cast<int>(f.dim), f.dtype) : FrozenFooter{};
  if (!known || f.num_removed > bytes_ || std::memcmp(&expected, &f, sizeof f) != 0 || f.num_bytes != bytes_) {
    ::munmap(data, bytes_);
    data_ = nullptr;
    throw std::runtime_error(path + (known ? ": torn" : ": not a file of rows"));
  }
  row_bytes_ = row_bytes(static_cast<int>(f.dim), f.dtype);
  buckets_ = reinterpret_cast<const Bucket*>(data_ + f.buckets_at);
}

FrozenRows::~FrozenRows() {
  if (data_) ::munmap(const_cast<uint8_t*>(data_), bytes_);
}

void FrozenRows::prefetch(uint64_t hash) const noexcept {
  if (footer_->num_buckets) __builtin_prefetch(&buckets_[home_of(hash, footer_->num_buckets)]);
}

uint32_t FrozenRows::find(int64_t id, uint64_t hash) const noexcept {
  const uint64_t n = footer_->num_buckets;
  if (n == 0) return kNoSlot;
  const uint32_t slot = find_slot(buckets_, n, home_of(hash, n), id);
  return slot < footer_->num_rows || slot == kRemoved ? slot : kNoSlot;
}

void FrozenRows::slots(const int64_t* ids, size_t n, int64_t* out) const noexcept {
  for (size_t i = 0; i < std::min(n, kAhead); i++) prefetch(hash_id(ids[i]));
  for (size_t i = 0; i < n; i++) {
    if (i + kAhead < n) prefetch(hash_id(ids[i + kAhead]));
    const uint32_t slot = find(ids[i], hash_id(ids[i]));
    out[i] = slot == kNoSlot || slot == kRemoved ? -1 : static_cast<int64_t>(slot);
  }
}

void FrozenRows::read(uint32_t slot, float* out) const noexcept {
  const uint8_t* from = row(slot);
  const size_t dim = footer_->dim;
  if (footer_->dtype == FrozenDtype::kFloat32) {
    std::memcpy(out, from, dim * 4);
  } else if (footer_->dtype == FrozenDtype::kFloat16) {
    for (size_t d = 0; d < dim; d++) {
      uint16_t half;
      std::memcpy(&half, from + 2 * d, 2);
      out[d] = decode_half(Dtype::kFloat16, half);
    }
  } else {
    float scale;
    std::memcpy(&scale, from, 4);
    for (size_t d = 0; d < dim; d++) out[d] = scale * static_cast<float>(static_cast<int8_t>(from[4 + d]));
  }
}

void FrozenRows::read_all(const int64_t* slots, size_t n, float* out) const noexcept {
  for (size_t i = 0; i < n; i++) {
    if (i + kAhead < n && slots[i + kAhead] >= 0) prefetch_row(static_cast<uint32_t>(slots[i + kAhead]));
    if (slots[i] >= 0) read(static_cast<uint32_t>(slots[i]), out + i * footer_->dim);
  }
}

void FrozenRows::prefetch_row(uint32_t slot) const noexcept {
  const uint8_t* from = row(slot);
  const size_t bytes = std::min<size_t>(row_bytes_, 64 * kPrefetchedLines);
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
}

FrozenTable::FrozenTable(std::vector<std::shared_ptr<FrozenRows>> layers, int dim, Absent absent)
    : layers_(std::move(layers)), dim_(dim), absent_(absent) {
  for (const auto& layer : layers_)
    if (layer->dim() != dim_) throw std::invalid_argument("a file of dim " + std::to_string(layer->dim()));
}

void FrozenTable::prefetch(uint64_t hash) const noexcept {
  for (const auto& layer : layers_) layer->prefetch(hash);
}

FrozenTable::Place FrozenTable::find(int64_t id, uint64_t hash) const noexcept {
  for (const auto& layer : layers_) {  // the newest that knows the id decides
    const uint32_t slot = layer->find(id, hash);
    if (slot == kNoSlot) continue;
    if (slot == kRemoved) break;
    layer->prefetch_row(slot);
    return {layer.get(), slot};
  }
  return {};
}

void FrozenTable::read(int64_t id, const Place& place, float* out) const noexcept {
  if (place.layer) place.layer->read(place.slot, out);
  else if (absent_.initial_row) initial_row(absent_.init, absent_.key, id, out, dim_);
  else std::fill_n(out, dim_, absent_.value);
}

void FrozenSearch::run() {
  const size_t n = seeks_.size();
  rows_.resize(n);
  for (size_t i = 0; i < std::min(n, kAhead); i++) seeks_[i].table->prefetch(seeks_[i].hash);
  size_t lanes = 0;
  for (size_t i = 0; i < n; i++) {
    if (i + kAhead < n) seeks_[i + kAhead].table->prefetch(seeks_[i + kAhead].hash);
    Seek& seek = seeks_[i];
    seek.place = seek.table->find(seek.id, seek.hash);
    rows_[i] = seek.place.layer ? seek.place.layer->fp32(seek.place.slot) : nullptr;
    if (!rows_[i]) lanes += static_cast<size_t>(seek.table->dim());
  }
  if (lanes == 0) return;
  decoded_.resize(lanes);
  float* next = decoded_.data();
  for (size_t i = 0; i < n; i++) {
    if (rows_[i]) continue;
    const Seek& seek = seeks_[i];
    seek.table->read(seek.id, seek.place, next);
    rows_[i] = next;
    next += seek.table->dim();
  }
}

// Ids are not made distinct: a search in a mapped file costs no more than one among the ids of the request.
void frozen_lookup(const std::vector<const FrozenTable*>& tables, const std::vector<Feature>& features,
                   const std::vector<FeatureIds>& ids, const std::vector<OutputRows>& out, int64_t num_samples) {
  thread_local FrozenSearch search;
  for (size_t first = 0, last = 0; first < features.size(); first = last) {
    search.clear();
    for (; last < features.size() && (last == first || search.size() < kSearchedRows); last++) {
      const FrozenTable& table = *tables[static_cast<size_t>(features[last].table)];
      for (int64_t i = 0; i < ids[last].num_values; i++) search.add(table, ids[last].values[i]);
    }
    search.run();
    const float* const* rows = search.rows();
    for (size_t f = first; f < last; f++) {
      const int dim = tables[static_cast<size_t>(features[f].table)]->dim();
      pool_feature(ids[f], features[f].pooling, nullptr, rows, dim, out[f], num_samples);
      rows += ids[f].num_values;
    }
  }
}

}  // namespace hotbed
