// SPDX-License-Identifier: Apache-2.0
// A disk that fails on purpose, and remembers what it did to which bytes.
#pragma once

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/disk_io.h"
#include "draw.h"

class FaultyFile : public hotbed::File {
 public:
  enum Fault { kShortRead, kReadError, kFlippedRead, kShortWrite, kFlippedWrite, kTornWrite, kWriteError, kFull };
  static constexpr int kNumFaults = 8;

  explicit FaultyFile(const std::string& folder, bool direct = true) : File(folder, direct) {}

  // Of 1000 calls that the fault is possible in, on average.
  std::atomic<int> rate[kNumFaults] = {};
  std::atomic<uint64_t> count[kNumFaults] = {};
  std::atomic<uint64_t> most_bytes{UINT64_MAX};  // of the disk
  std::atomic<bool> writes_find_no_room{false};  // as of a file system that copies on write
  void heal() {
    for (auto& one : rate) one = 0;
  }

  // Whether something was done to the bytes: to what is written there, or to a read of them since `forget_reads`.
  bool has_touched(uint64_t begin, uint64_t end) const {
    const std::lock_guard lock(mutex_);
    for (const auto* ranges : {&damaged_, &misread_})
      for (const Range& range : *ranges)
        if (range.begin < end && begin < range.end) return true;
    return false;
  }
  void forget_reads() {
    const std::lock_guard lock(mutex_);
    misread_.clear();
  }
  // Lets no read arrive between the two calls. Those by threads do not even begin; io_uring may have read the bytes.
  void hold_reads(bool holds) {
    const std::lock_guard lock(mutex_);
    holds_ = holds;
    if (!holds) holds_one_ = false;
    released_.notify_all();
  }
  // Lets the next read by a thread not begin before `hold_reads(false)`; those that come later pass it.
  void hold_next_read() {
    const std::lock_guard lock(mutex_);
    is_next_ = true;
  }
  void wait_for_held_read() {
    std::unique_lock lock(mutex_);
    released_.wait(lock, [this] { return holds_one_; });
  }
  int num_waiting() const {  // reads that `hold_reads` holds before they begin
    const std::lock_guard lock(mutex_);
    return num_waiting_;
  }
  std::vector<uint64_t> begun() const {  // where threads read, in order
    const std::lock_guard lock(mutex_);
    return begun_;
  }

  int64_t read(uint8_t* to, size_t bytes, uint64_t offset) override {
    {
      std::unique_lock lock(mutex_);
      if (std::exchange(is_next_, false)) {
        holds_one_ = true;
        released_.notify_all();
        released_.wait(lock, [this] { return !holds_one_; });
      }
      num_waiting_++;
      released_.wait(lock, [this] { return !holds_; });
      num_waiting_--;
      begun_.push_back(offset);
    }
    return arrived(to, bytes, offset, File::read(to, bytes, offset));
  }

  int64_t arrived(uint8_t* bytes, size_t size, uint64_t offset, int64_t result) override {
    std::unique_lock lock(mutex_);
    released_.wait(lock, [this] { return !holds_; });
    const bool is_short = happens(kShortRead), fails = happens(kReadError), flips = happens(kFlippedRead);
    if (is_short || fails || flips) misread_.push_back({offset, offset + size});
    if (fails) return -EIO;
    if (flips) bytes[draw_.below(size)] ^= static_cast<uint8_t>(1u << draw_.below(8));
    if (!is_short) return result;
    const size_t come = draw_.below(size);
    std::memset(bytes + come, 0xa5, size - come);
    return static_cast<int64_t>(come);
  }

  int64_t write(const uint8_t* from, size_t bytes, uint64_t offset) override {
    std::unique_lock lock(mutex_);
    if (happens(kWriteError)) return -EIO;
    if (writes_find_no_room) return -ENOSPC;
    if (happens(kShortWrite)) bytes = (1 + draw_.below(bytes / hotbed::kBlockBytes)) * hotbed::kBlockBytes;
    std::erase_if(damaged_, [&](const Range& r) { return offset <= r.begin && r.end <= offset + bytes; });
    const hotbed::Blocks written = hotbed::allocate_blocks(bytes);
    std::memcpy(written.get(), from, bytes);
    if (happens(kFlippedWrite)) {
      const uint64_t place = draw_.below(bytes);
      written[place] ^= static_cast<uint8_t>(1u << draw_.below(8));
      damaged_.push_back({offset + place, offset + place + 1});
    }
    if (happens(kTornWrite)) {  // the sectors behind keep what was there before
      const uint64_t sectors = draw_.below(bytes / 512);
      const hotbed::Blocks before = hotbed::allocate_blocks(bytes);
      File::read(before.get(), bytes, offset);
      std::memcpy(written.get() + sectors * 512, before.get() + sectors * 512, bytes - sectors * 512);
      damaged_.push_back({offset + sectors * 512, offset + bytes});
    }
    return File::write(written.get(), bytes, offset);
  }

  int allocate(uint64_t offset, uint64_t bytes) override {
    std::unique_lock lock(mutex_);
    if (happens(kFull) || offset + bytes > most_bytes) return -ENOSPC;
    return File::allocate(offset, bytes);
  }

 private:
  struct Range {
    uint64_t begin, end;
  };
  bool happens(Fault fault) {
    if (draw_.below(1000) >= static_cast<uint64_t>(rate[fault].load())) return false;
    count[fault]++;
    return true;
  }

  mutable std::mutex mutex_;
  std::condition_variable released_;
  bool holds_ = false, holds_one_ = false, is_next_ = false;
  int num_waiting_ = 0;
  std::vector<uint64_t> begun_;
  Draw draw_{11};
  std::vector<Range> damaged_, misread_;
};
