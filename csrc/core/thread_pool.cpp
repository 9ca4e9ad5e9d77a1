// SPDX-License-Identifier: Apache-2.0
#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>

namespace hotbed {
namespace {

std::atomic<ThreadPool*> g_pool{nullptr};
std::atomic<int> g_num_threads{0};
std::mutex* g_mutex = new std::mutex;
thread_local bool t_inside = false;

// The child of a fork has none of the parent's threads, and a lock may have been held: start afresh, leak the old pool.
void after_fork_in_child() {
  g_pool.store(nullptr);
  g_mutex = new std::mutex;
  t_inside = false;
}

int default_num_threads() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

}  // namespace

int ThreadPool::num_threads() {
  int n = g_num_threads.load();
  return n > 0 ? n : default_num_threads();
}

ThreadPool& ThreadPool::instance() {
  if (ThreadPool* pool = g_pool.load()) return *pool;
  std::lock_guard lock(*g_mutex);
  if (!g_pool.load()) {
    static const int registered = pthread_atfork(nullptr, nullptr, after_fork_in_child);
    static_cast<void>(registered);
    g_pool.store(new ThreadPool(num_threads()));
  }
  return *g_pool.load();
}

void ThreadPool::set_num_threads(int num_threads) {
  ThreadPool& pool = instance();
  std::lock_guard lock(pool.run_mutex_);
  g_num_threads.store(num_threads);
  if (num_threads > pool.num_threads_) {  // surplus threads of a shrunk pool merely sleep
    for (int i = pool.num_threads_; i < num_threads; i++) pool.threads_.emplace_back([&pool] { pool.serve(); });
    pool.num_threads_ = num_threads;
  }
}

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
  for (int i = 1; i < num_threads; i++) threads_.emplace_back([this] { serve(); });
}

void ThreadPool::work() {
  t_inside = true;
  for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < num_tasks_;) {
    try {
      call_(context_, i);
    } catch (...) {
      std::lock_guard lock(error_mutex_);
      if (!error_ || i < error_task_) error_ = std::current_exception(), error_task_ = i;
    }
  }
  t_inside = false;
}

void ThreadPool::serve() {
  uint32_t seen = 0;
  for (;;) {
    generation_.wait(seen);
    seen = generation_.load();
    // A thread joins a job only while the job still has places: late sleepers find none and go back to sleep.
    uint32_t places = busy_.load();
    while ((places >> 16) != 0 && !busy_.compare_exchange_weak(places, places - (1u << 16) + 1)) {}
    if ((places >> 16) == 0) continue;
    work();
    if ((busy_.fetch_sub(1) & 0xffff) == 1) busy_.notify_all();
  }
}

void ThreadPool::run_erased(int num_tasks, Call call, void* context) {
  const int helpers = std::min(num_threads(), num_tasks) - 1;
  if (t_inside || helpers <= 0) {  // nested or tiny: run here
    for (int i = 0; i < num_tasks; i++) call(context, i);
    return;
  }
  std::lock_guard lock(run_mutex_);
  num_tasks_ = num_tasks, call_ = call, context_ = context, error_ = nullptr;
  next_.store(0, std::memory_order_relaxed);
  busy_.store(static_cast<uint32_t>(helpers) << 16);
  generation_.fetch_add(1);
  generation_.notify_all();
  work();
  uint32_t now = busy_.load();  // withdraw the places that nobody took, then wait for those at work
  while (!busy_.compare_exchange_weak(now, now & 0xffff)) {}
  while ((now = busy_.load()) != 0) busy_.wait(now);
  if (error_) std::rethrow_exception(error_);
}

}  // namespace hotbed
