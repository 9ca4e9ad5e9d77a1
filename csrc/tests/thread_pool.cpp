// SPDX-License-Identifier: Apache-2.0
#include "core/thread_pool.h"

#include <doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using namespace hotbed;

namespace {

struct Threads {  // leaves the pool as it was found
  explicit Threads(int n) : before(ThreadPool::num_threads()) { ThreadPool::set_num_threads(n); }
  ~Threads() { ThreadPool::set_num_threads(before); }
  int before;
};

bool each_task_once(int num_tasks) {
  std::vector<std::atomic<int>> calls(static_cast<size_t>(num_tasks));
  ThreadPool::instance().run(num_tasks, [&](int i) { calls[static_cast<size_t>(i)]++; });
  for (auto& n : calls)
    if (n != 1) return false;
  return true;
}

}  // namespace

TEST_CASE("every task runs exactly once, for any number of threads and tasks") {
  for (int threads : {1, 2, 3, 4, 8, 2, 1}) {
    Threads guard(threads);
    for (int tasks : {0, 1, 2, 3, 7, 64, 1000})
      for (int repeat = 0; repeat < 20; repeat++) REQUIRE(each_task_once(tasks));
  }
}

TEST_CASE("the error of the lowest failing task is thrown, after all have ended") {
  Threads guard(4);
  for (int repeat = 0; repeat < 50; repeat++) {
    std::atomic<int> ended{0};
    const auto run = [&] {
      ThreadPool::instance().run(64, [&](int i) {
        ended++;
        if (i % 10 == 7) throw std::runtime_error(std::to_string(i));
      });
    };
    REQUIRE_THROWS_WITH(run(), "7");
    REQUIRE(ended == 64);
  }
  CHECK(each_task_once(100));  // and the pool lives on
}

TEST_CASE("a task may use the pool itself") {
  Threads guard(4);
  std::atomic<int> sum{0};
  ThreadPool::instance().run(8, [&](int) { ThreadPool::instance().run(8, [&](int) { sum++; }); });
  CHECK(sum == 64);
}

TEST_CASE("several callers at once all get their work done") {
  Threads guard(3);
  std::atomic<int> sum{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; c++)
    callers.emplace_back([&] {
      for (int i = 0; i < 100; i++) ThreadPool::instance().run(16, [&](int) { sum++; });
    });
  for (std::thread& caller : callers) caller.join();
  CHECK(sum == 4 * 100 * 16);
}

TEST_CASE("the number of threads may change between any two jobs") {
  Threads guard(2);
  for (int i = 0; i < 200; i++) {
    ThreadPool::set_num_threads(1 + i % 5);
    REQUIRE(ThreadPool::num_threads() == 1 + i % 5);
    REQUIRE(each_task_once(33));
  }
}

#if !defined(__SANITIZE_THREAD__)  // the thread sanitizer cannot follow a threaded process through fork()
namespace {

// Data loaders fork workers while the parent's pool sleeps or works; the child must neither hang nor lose tasks.
bool child_works() {
  const pid_t child = fork();
  if (child == 0) _exit(each_task_once(200) && each_task_once(200) ? 0 : 1);
  for (int waited = 0; waited < 2000; waited++) {
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child) return WIFEXITED(status) && WEXITSTATUS(status) == 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return false;
}

}  // namespace

TEST_CASE("a forked child has a working pool, and so has its parent") {
  Threads guard(4);
  for (int i = 0; i < 10; i++) {
    REQUIRE(each_task_once(100));
    REQUIRE(child_works());
    REQUIRE(each_task_once(100));
  }
}

TEST_CASE("a child forked in the middle of another thread's work has a working pool") {
  Threads guard(3);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) ThreadPool::instance().run(50, [](int) { std::this_thread::yield(); });
  });
  bool all = true;
  for (int i = 0; i < 10; i++) all &= child_works();
  stop = true;
  busy.join();
  CHECK(all);
}
#endif
