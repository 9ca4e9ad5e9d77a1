// SPDX-License-Identifier: Apache-2.0
// Turns records to be read into reads of blocks for an engine, and checks and copies what has come.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "store.h"

namespace hotbed {

// The records of one call that lie on the disk.
class StoredReads : public ReadBatch {
 public:
  struct Record {
    Place place;
    uint32_t slot;
    uint8_t generation;
    void *first, *second;
  };

  StoredReads(const RecordLayout& layout, const std::string& path, size_t most) : layout_(layout), path_(path) {
    records_.reserve(most);
  }
  void add(const RecordRead& read, uint8_t generation) {
    records_.push_back({read.place, read.slot, generation, read.first, read.second});
  }
  bool empty() const noexcept { return records_.empty(); }
  void lose(Place place, uint32_t slot, const std::string& reason);
  uint64_t num_bytes() const override;

 private:
  friend class ReadQueue;
  struct Job {  // one read of neighbouring blocks
    size_t first_record, end_record;
    uint64_t offset;
    uint32_t bytes;
  };
  // Sorts the records and finds the blocks to read.
  void arrange();
  // Takes what a job has read. Whether it was the last one.
  bool take(const Job& job, const uint8_t* bytes, int64_t result) noexcept;

  const RecordLayout layout_;
  const std::string path_;
  std::vector<Record> records_;
  std::vector<Job> jobs_;
  size_t next_job_ = 0;
  std::atomic<size_t> jobs_left_{0};
  std::mutex mutex_;  // of lost_
};

class ReadQueue final : public BlockSource {
 public:
  // Calls `done` on a thread of the engine when the last record of a batch is there.
  explicit ReadQueue(std::function<void(StoredReads&)> done) : done_(std::move(done)) {}

  void add(std::shared_ptr<StoredReads> batch, bool urgent);
  void close();
  uint64_t num_read() const noexcept { return num_read_.load(std::memory_order_relaxed); }

  bool next(BlockRead& read) override;
  bool wait() override;
  void arrived(const BlockRead& read, const uint8_t* bytes, int64_t result) noexcept override;

 private:
  struct Lane {
    std::deque<std::shared_ptr<StoredReads>> added;  // not yet arranged
    std::deque<std::shared_ptr<StoredReads>> ready;  // with jobs left to hand out
    bool has_work() const noexcept { return !ready.empty() || !added.empty(); }
  };
  bool has_work() const noexcept { return urgent_.has_work() || others_.has_work(); }

  const std::function<void(StoredReads&)> done_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Lane urgent_, others_;
  int num_asleep_ = 0;
  bool is_closed_ = false;
  std::atomic<uint64_t> num_read_{0};
};

}  // namespace hotbed
