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
#include <numeric>
#include <stdexcept>
#include <system_error>

namespace hotbed {
namespace {

constexpr int64_t kAhead = 12;

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

}  // namespace

std::vector<uint8_t> frozen_rows(const float* values, size_t n, int dim, FrozenDtype dtype) {
  const size_t lanes = static_cast<size_t>(dim), bytes = row_bytes(dim, dtype);
  std::vector<uint8_t> out(n * bytes);
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

std::vector<uint8_t> frozen_index(const int64_t* ids, size_t n, const int64_t* removed, size_t num_removed) {
  using Bucket = FrozenRows::Bucket;
  if (n >= kRemoved) throw std::length_error("[frozen] a file holds at most 2^32 - 3 rows");
  const uint64_t num_buckets = FrozenRows::buckets_for(n + num_removed);
  std::vector<uint8_t> out(num_buckets * sizeof(Bucket), 0);
  Bucket* buckets = reinterpret_cast<Bucket*>(out.data());
  const auto place = [&](int64_t id, uint32_t slot) {
    for (uint64_t b = FrozenRows::bucket_of(hash_id(id), num_buckets);; b = b + 1 == num_buckets ? 0 : b + 1) {
      const uint32_t open = static_cast<uint32_t>(~buckets[b].used) & ((1u << FrozenRows::kEntries) - 1);
      if (!open) {
        buckets[b].overflow = 1;
        continue;
      }
      const int e = __builtin_ctz(open);
      buckets[b].id[e] = id, buckets[b].slot[e] = slot;
      buckets[b].used = static_cast<uint16_t>(buckets[b].used | 1u << e);
      return;
    }
  };
  for (size_t i = 0; i < n; i++) place(ids[i], static_cast<uint32_t>(i));
  for (size_t i = 0; i < num_removed; i++) place(removed[i], kRemoved);
  return out;
}

FrozenFooter frozen_footer(uint64_t num_rows, uint64_t num_removed, int dim, FrozenDtype dtype) {
  FrozenFooter footer{};
  footer.num_rows = num_rows, footer.num_removed = num_removed;
  footer.num_buckets = FrozenRows::buckets_for(num_rows + num_removed);
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
  const bool known = std::memcmp(f.magic, FrozenFooter::kMagic, sizeof f.magic) == 0 && f.dim > 0 &&
                     f.dim < (1u << 24) && f.dtype <= FrozenDtype::kInt8 && f.num_rows < kRemoved;
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
  if (footer_->num_buckets) __builtin_prefetch(&buckets_[bucket_of(hash, footer_->num_buckets)]);
}

uint32_t FrozenRows::find(int64_t id, uint64_t hash) const noexcept {
  const uint64_t n = footer_->num_buckets;
  if (n == 0) return kNoSlot;
  const uint64_t home = bucket_of(hash, n);
  for (uint64_t b = home;;) {
    const Bucket& bucket = buckets_[b];
    for (int e = 0; e < kEntries; e++)
      if (bucket.id[e] == id && (bucket.used >> e & 1)) {
        const uint32_t slot = bucket.slot[e];
        return slot < footer_->num_rows || slot == kRemoved ? slot : kNoSlot;
      }
    if (!bucket.overflow) return kNoSlot;
    b = b + 1 == n ? 0 : b + 1;
    if (b == home) return kNoSlot;
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

FrozenTable::FrozenTable(std::vector<std::shared_ptr<FrozenRows>> layers, int dim, Absent absent)
    : layers_(std::move(layers)), dim_(dim), absent_(absent) {
  for (const auto& layer : layers_)
    if (layer->dim() != dim_) throw std::invalid_argument("[frozen] files of one table differ in dim");
}

void FrozenTable::find_rows(const int64_t* ids, int64_t n, std::vector<float>& scratch, std::vector<const float*>& rows,
                            uint8_t* found) const {
  struct Place {
    const FrozenRows* layer = nullptr;
    uint32_t slot = kNoSlot;
  };
  thread_local std::vector<Place> places;
  places.assign(static_cast<size_t>(n), {});
  const auto warm = [&](int64_t i) {
    const uint64_t hash = hash_id(ids[i]);
    for (const auto& layer : layers_) layer->prefetch(hash);
  };
  for (int64_t i = 0; i < std::min(n, kAhead); i++) warm(i);
  size_t decoded = 0;
  for (int64_t i = 0; i < n; i++) {
    if (i + kAhead < n) warm(i + kAhead);
    const uint64_t hash = hash_id(ids[i]);
    Place& place = places[static_cast<size_t>(i)];
    for (const auto& layer : layers_) {  // the newest that knows the id decides
      const uint32_t slot = layer->find(ids[i], hash);
      if (slot == kNoSlot) continue;
      if (slot != kRemoved) place = {layer.get(), slot}, layer->prefetch_row(slot);
      break;
    }
    if (place.layer == nullptr || place.layer->fp32(place.slot) == nullptr) decoded++;
  }
  const size_t dim = static_cast<size_t>(dim_);
  scratch.resize(decoded * dim);
  rows.resize(static_cast<size_t>(n));
  float* next = scratch.data();
  for (int64_t i = 0; i < n; i++) {
    const Place& place = places[static_cast<size_t>(i)];
    const float* row = place.layer ? place.layer->fp32(place.slot) : nullptr;
    if (!row) {
      row = next;
      if (place.layer) place.layer->read(place.slot, next);
      else if (absent_.initial_row) initial_row(absent_.init, absent_.key, ids[i], next, dim_);
      else std::fill_n(next, dim, absent_.value);
      next += dim;
    }
    rows[static_cast<size_t>(i)] = row;
    if (found) found[i] = place.layer != nullptr;
  }
}

void frozen_lookup(const std::vector<const FrozenTable*>& tables, const std::vector<Feature>& features,
                   const std::vector<FeatureIds>& ids, const std::vector<OutputRows>& out) {
  thread_local std::vector<float> scratch;
  thread_local std::vector<const float*> rows;
  thread_local std::vector<uint32_t> positions;
  for (size_t f = 0; f < features.size(); f++) {
    const FrozenTable& table = *tables[static_cast<size_t>(features[f].table)];
    const FeatureIds& one = ids[f];
    table.find_rows(one.values, one.num_values, scratch, rows, nullptr);
    if (static_cast<int64_t>(positions.size()) < one.num_values) {
      positions.resize(static_cast<size_t>(one.num_values));
      std::iota(positions.begin(), positions.end(), 0u);
    }
    const bool flat = features[f].pooling == Pooling::kNone || !one.offsets;  // as Step::bags
    const int64_t n = flat ? one.num_values : one.num_samples;
    const Bags bags{positions.data(), flat ? nullptr : one.offsets, one.weights, n, features[f].pooling};
    kernels().pool(bags, rows.data(), out[f].data, out[f].step, table.dim(), 0, n);
  }
}

}  // namespace hotbed
