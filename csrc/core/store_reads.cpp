// SPDX-License-Identifier: Apache-2.0
#include "store_reads.h"

#include <algorithm>
#include <cstring>

namespace hotbed {

void StoredReads::lose(Place place, uint32_t slot, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  lost_.emplace_back(path_, place, layout_.first_block(place.index()), slot, reason);
}

uint64_t StoredReads::num_bytes() const {
  uint64_t bytes = 0;
  for (const Job& job : jobs_) bytes += job.bytes;
  return bytes;
}

void StoredReads::arrange() {
  const auto by_place = [](const Record& a, const Record& b) { return a.place.bits < b.place.bits; };
  std::sort(records_.begin(), records_.end(), by_place);
  uint64_t first = 0, last = 0;  // blocks of the file
  for (size_t i = 0; i < records_.size(); i++) {
    const Place place = records_[i].place;
    const uint64_t extent = uint64_t{place.extent()} * (kExtentBytes / kBlockBytes);
    const uint64_t begin = extent + layout_.first_block(place.index());
    const uint64_t end = extent + layout_.last_block(place.index());
    if (!jobs_.empty() && begin <= last + 1 && (end - first + 1) * kBlockBytes <= kMostReadBytes) {
      last = std::max(last, end);
      jobs_.back().end_record = i + 1;
    } else {
      first = begin, last = end;
      jobs_.push_back({i, i + 1, first * kBlockBytes, 0});
    }
    jobs_.back().bytes = static_cast<uint32_t>((last - first + 1) * kBlockBytes);
  }
  jobs_left_.store(jobs_.size());
}

bool StoredReads::take(const Job& job, const uint8_t* bytes, int64_t result) noexcept {
  for (size_t i = job.first_record; i < job.end_record; i++) {
    const Record& record = records_[i];
    const uint64_t place = uint64_t{record.place.extent()} * kExtentBytes + layout_.offset(record.place.index());
    const uint64_t at = place - job.offset;
    const uint8_t* stored = bytes + at;
    if (result < 0) lose(record.place, record.slot, std::strerror(static_cast<int>(-result)));
    else if (at + layout_.record_bytes() > static_cast<uint64_t>(result))
      lose(record.place, record.slot,
           "short read of " + std::to_string(result) + " of " + std::to_string(job.bytes) + " bytes");
    else if (!layout_.is_whole(stored, record.place, record.generation))
      lose(record.place, record.slot, "the checksum does not match");
    else if (RecordLayout::slot(stored) != record.slot)
      lose(record.place, record.slot, "got the record of slot " + std::to_string(RecordLayout::slot(stored)));
    else layout_.read(stored, record.first, record.second);
  }
  if (jobs_left_.fetch_sub(1) != 1) return false;
  const auto by_place = [](const RecordLost& a, const RecordLost& b) { return a.place.bits < b.place.bits; };
  std::sort(lost_.begin(), lost_.end(), by_place);
  return true;
}

void ReadQueue::add(std::shared_ptr<StoredReads> batch, bool urgent) {
  {
    const std::lock_guard lock(mutex_);
    (urgent ? urgent_ : others_).added.push_back(std::move(batch));
  }
  changed_.notify_one();
}

void ReadQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
  }
  changed_.notify_all();
}

bool ReadQueue::next(BlockRead& read) {
  std::unique_lock lock(mutex_);
  Lane* lane;
  while ((lane = urgent_.has_work() ? &urgent_ : &others_)->ready.empty()) {
    if (lane->added.empty()) return false;
    std::shared_ptr<StoredReads> batch = std::move(lane->added.front());
    lane->added.pop_front();
    lock.unlock();
    batch->arrange();
    lock.lock();
    lane->ready.push_back(std::move(batch));
  }
  StoredReads& batch = *lane->ready.front();
  const StoredReads::Job& job = batch.jobs_[batch.next_job_];
  read = {job.offset, job.bytes, static_cast<uint32_t>(batch.next_job_++), &batch};
  if (batch.next_job_ == batch.jobs_.size()) lane->ready.pop_front();
  const bool wakes = num_asleep_ > 0 && has_work();  // a woken thread wakes the next one, so that `add` is quick
  lock.unlock();
  if (wakes) changed_.notify_one();
  return true;
}

bool ReadQueue::wait() {
  std::unique_lock lock(mutex_);
  num_asleep_++;
  changed_.wait(lock, [this] { return is_closed_ || has_work(); });
  num_asleep_--;
  return has_work();
}

void ReadQueue::arrived(const BlockRead& read, const uint8_t* bytes, int64_t result) noexcept {
  num_read_.fetch_add(1, std::memory_order_relaxed);
  StoredReads& batch = *static_cast<StoredReads*>(read.batch);
  if (batch.take(batch.jobs_[read.job], bytes, result)) done_(batch);
}

}  // namespace hotbed
