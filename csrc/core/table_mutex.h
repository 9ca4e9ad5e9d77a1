// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

namespace hotbed {

// A mutex whose holder can see that a thread waits. Training takes it once a step; a thread that takes it repeatedly,
// for a piece of work each time, gives way first, or training would starve.
class TableMutex {
 public:
  void lock() {
    waiting_.fetch_add(1);
    mutex_.lock();
    waiting_.fetch_sub(1);
  }
  // For those who only read: after everybody who waits. Nobody gives way to them.
  void lock_last() {
    give_way();
    lock_unseen();
  }
  void lock_unseen() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }
  void give_way() const noexcept {
    while (waiting_.load() > 0) std::this_thread::yield();
  }

 private:
  std::mutex mutex_;
  std::atomic<int> waiting_{0};
};

}  // namespace hotbed
