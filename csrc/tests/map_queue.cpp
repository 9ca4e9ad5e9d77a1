// SPDX-License-Identifier: Apache-2.0
// Maps by a queue: in order, none before the lookup under way is over, none behind an error.
#include "core/map_queue.h"

#include <doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/forks.h"

using namespace hotbed;

namespace {

void wait_a_little() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

struct World {
  explicit World(uint64_t max_rows = 0) {
    TableConfig config;
    config.name = std::string("table"), config.dim = 2;
    config.rule = Rule("Adagrad").with("eps", 1e-10);
    config.eviction.max_rows = max_rows;
    table = std::make_shared<Table>(config);
  }

  std::unique_ptr<Step> make_step() const {
    return std::make_unique<Step>(std::vector<std::shared_ptr<Table>>{table}, std::vector<Feature>{{0, Pooling::kSum}});
  }

  uint64_t num_rows() const {
    const std::lock_guard lock(table->mutex());
    return table->stats().rows;
  }

  // Whether the table has so many rows within ten seconds.
  bool comes_to(uint64_t rows) const {
    for (int i = 0; i < 500 && num_rows() < rows; i++) wait_a_little();
    return num_rows() == rows;
  }

  std::shared_ptr<Table> table;
};

struct Batch {  // `n` ids from `first` on, one a sample
  explicit Batch(int64_t first, int64_t n = 100) : ids(static_cast<size_t>(n)), rows(static_cast<size_t>(2 * n)) {
    for (size_t i = 0; i < ids.size(); i++) ids[i] = first + static_cast<int64_t>(i);
  }

  std::vector<FeatureIds> features() const {
    const int64_t n = static_cast<int64_t>(ids.size());
    return {{ids.data(), n, nullptr, nullptr, n}};
  }

  void look_up(Step& step) { step.pool({{rows.data(), 2}}); }

  std::vector<int64_t> ids;
  std::vector<float> rows;
};

}  // namespace

TEST_CASE("a queue maps in order, and keeps the statistics after each map") {
  World world;
  MapQueue queue;
  std::vector<Batch> batches;
  std::vector<std::unique_ptr<Step>> steps;
  std::vector<std::shared_ptr<MapTask>> tasks;
  for (int64_t b = 0; b < 20; b++) batches.emplace_back(100 * b);
  for (const Batch& batch : batches) {
    steps.push_back(world.make_step());
    tasks.push_back(queue.add(*steps.back(), batch.features(), nullptr, true));
  }
  tasks.back()->wait();
  for (size_t b = 0; b < batches.size(); b++) {
    CHECK(tasks[b]->statistics().at(0).rows == 100 * (b + 1));
    CHECK(steps[b]->unique_ids(0) == batches[b].ids);
  }
}

TEST_CASE("a map that was added begins when the lookup before it is over") {
  World world;
  MapQueue queue;
  Batch first(0), second(100);
  const auto now = world.make_step(), later = world.make_step();
  queue.add(*now, first.features(), nullptr, true)->wait();
  const auto task = queue.add(*later, second.features(), nullptr, true);
  wait_a_little();
  CHECK(world.num_rows() == 100);
  first.look_up(*now);
  CHECK(world.comes_to(200));
  task->wait();
}

TEST_CASE("a map that is added after the lookup begins at once, also while the thread sleeps") {
  World world;
  MapQueue queue;
  Batch first(0), second(100), third(200);
  const auto now = world.make_step(), later = world.make_step(), last = world.make_step();
  const auto task = queue.add(*now, first.features(), nullptr, true);
  task->wait();
  first.look_up(*now);
  queue.add(*later, second.features(), nullptr, true);
  CHECK(world.comes_to(200));
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // until it no longer naps
  queue.add(*last, third.features(), nullptr, true);
  CHECK(world.comes_to(300));
}

TEST_CASE("no map begins from a hold until the next lookup is over") {
  World world;
  MapQueue queue;
  Batch first(0), second(100), third(200);
  const auto a = world.make_step(), b = world.make_step(), c = world.make_step();
  queue.add(*a, first.features(), nullptr, true)->wait();
  first.look_up(*a);
  queue.hold();
  queue.add(*b, second.features(), nullptr, true)->wait();
  queue.add(*c, third.features(), nullptr, true);
  wait_a_little();
  CHECK(world.num_rows() == 200);
  second.look_up(*b);
  CHECK(world.comes_to(300));
}

TEST_CASE("a wait maps what the thread has not begun, also while the thread sleeps and after it has woken") {
  World world;
  MapQueue queue;
  Batch first(0), second(100), third(200);
  const auto a = world.make_step(), b = world.make_step(), c = world.make_step();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // until it no longer naps
  queue.add(*a, first.features(), nullptr, true)->wait();
  CHECK(world.num_rows() == 100);
  queue.add(*b, second.features(), nullptr, true)->wait();
  CHECK(world.num_rows() == 200);
  queue.add(*c, third.features(), nullptr, true);
  second.look_up(*b);  // wakes it
  CHECK(world.comes_to(300));
}

TEST_CASE("nothing is mapped behind an error, which every later map gets") {
  World world(64);
  MapQueue queue;
  Batch small(0, 10), large(100, 5000), behind(10000, 10);
  const auto a = world.make_step(), b = world.make_step(), c = world.make_step();
  const auto fits = queue.add(*a, small.features(), nullptr, true);
  const auto fails = queue.add(*b, large.features(), nullptr, true);
  const auto late = queue.add(*c, behind.features(), nullptr, true);
  CHECK_NOTHROW(fits->wait());
  CHECK_THROWS_AS(fails->wait(), TableFull);
  CHECK_THROWS_AS(late->wait(), TableFull);
  CHECK(world.num_rows() == 10);
}

TEST_CASE("the end of a step waits for its map, and the end of a queue maps what was added") {
  World world;
  Batch first(0), second(100);
  const auto kept = world.make_step();
  {
    MapQueue queue;
    {
      const auto dropped = world.make_step();
      queue.add(*dropped, first.features(), nullptr, true);
    }
    CHECK(world.num_rows() == 100);
    queue.add(*kept, second.features(), nullptr, true);
    queue.close();
    CHECK(world.num_rows() == 200);
    CHECK_THROWS_AS(queue.add(*kept, second.features(), nullptr, true), std::logic_error);
  }
  CHECK_NOTHROW(second.look_up(*kept));
}

#if !defined(__SANITIZE_THREAD__)  // the thread sanitizer cannot follow a threaded process through fork()

TEST_CASE("the child of a fork waits for no map, and ends its steps and its queue at once") {
  World world;
  Batch first(0);
  auto queue = std::make_unique<MapQueue>();
  auto step = world.make_step();
  const auto task = queue->add(*step, first.features(), nullptr, true);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // ends the child if it waits for a thread that it does not have
    bool is_refused = false;
    try {
      task->wait();
    } catch (const ForkedChild&) { is_refused = true; }
    task->release();
    step.reset();
    queue.reset();
    _exit(is_refused ? 7 : 8);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 7);
  task->wait();
  CHECK(world.num_rows() == 100);
}

#endif
