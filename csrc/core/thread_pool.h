// SPDX-License-Identifier: Apache-2.0
// The core's own threads. One job at a time; the caller works too; idle threads sleep.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hotbed {

class ThreadPool {
 public:
  // The process's pool. After fork() the child gets a fresh one, since threads do not survive a fork.
  static ThreadPool& instance();
  static void set_num_threads(int num_threads);
  static int num_threads();

  // Calls task(i) for every i in [0, num_tasks), in any order, and returns when all are done. The exception of the
  // lowest failing task is rethrown after all have ended, so that errors do not depend on timing.
  template <class F>
  void run(int num_tasks, F&& task) {
    run_erased(num_tasks, [](void* f, int i) { (*static_cast<std::remove_reference_t<F>*>(f))(i); }, &task);
  }

 private:
  using Call = void (*)(void*, int);
  explicit ThreadPool(int num_threads);
  void run_erased(int num_tasks, Call call, void* context);
  void work();
  void serve();

  int num_threads_;
  std::vector<std::thread> threads_;
  std::mutex run_mutex_;
  std::atomic<uint32_t> generation_{0};
  std::atomic<uint32_t> busy_{0};
  std::atomic<int> next_{0};
  int num_tasks_ = 0;
  Call call_ = nullptr;
  void* context_ = nullptr;
  std::mutex error_mutex_;
  int error_task_ = 0;
  std::exception_ptr error_;
};

}  // namespace hotbed
