// SPDX-License-Identifier: Apache-2.0
#include "map_queue.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>

#include "forks.h"

namespace hotbed {
namespace {

// To wake a sleeping thread takes the thread that trains about 50 us on a virtual machine, as long as a small map. So
// where steps are short, the thread that maps naps between two maps. Each nap takes a core from another thread for a
// few microseconds, so it sleeps after a few naps.
constexpr std::chrono::microseconds kNap{400};
constexpr int kMostNaps = 10;

}  // namespace

struct MapTask::Shared {
  bool has_thread() const noexcept { return process == getpid(); }
  // Whether the thread that maps has something to do.
  bool has_work() const noexcept { return !is_running && (is_closed || (!is_held && !tasks.empty())); }
  // Runs the first task, without the lock, on the thread that calls.
  void run_first(std::unique_lock<std::mutex>& lock) noexcept;

  const pid_t process = getpid();
  std::mutex mutex;
  std::condition_variable changed;  // for the thread
  std::condition_variable mapped;   // for those who wait for a map
  std::deque<std::shared_ptr<MapTask>> tasks;
  std::exception_ptr error;  // of the first map that failed
  bool is_held = true;       // a lookup is due
  bool is_closed = false;
  bool is_running = false;  // the first task is under way
  bool sleeps = false;      // the thread looks for work when it is notified only
};

void MapTask::Shared::run_first(std::unique_lock<std::mutex>& lock) noexcept {
  const std::shared_ptr<MapTask> task = tasks.front();
  task->error_ = error;
  is_running = true;
  lock.unlock();
  if (!task->error_) task->run();
  lock.lock();
  is_running = false;
  error = task->error_;
  tasks.pop_front();
  task->done_ = true;
  mapped.notify_all();
}

MapQueue::MapQueue() : shared_(std::make_shared<MapTask::Shared>()), thread_([shared = shared_] { work(*shared); }) {}

MapQueue::~MapQueue() { close(); }

std::shared_ptr<MapTask> MapQueue::add(Step& step, std::vector<FeatureIds> ids, const int64_t* times, bool training) {
  auto task = std::make_shared<MapTask>();
  task->shared_ = shared_;
  task->step_ = &step;
  task->ids_ = std::move(ids);
  task->times_ = times;
  task->training_ = training;
  if (!shared_->has_thread()) throw ForkedChild("map queue: it belongs to another process. Make another one.");
  bool sleeps = false;
  {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->is_closed) throw std::logic_error("map queue: it is closed, got ids to map. Make another one.");
    step.mapped_by(task);
    shared_->tasks.push_back(task);
    sleeps = shared_->sleeps && !shared_->is_held;
  }
  if (sleeps) shared_->changed.notify_one();
  return task;
}

void MapQueue::hold() noexcept {
  if (!shared_->has_thread()) return;
  const std::lock_guard lock(shared_->mutex);
  shared_->is_held = true;
}

void MapQueue::close() noexcept {
  if (!shared_->has_thread()) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->is_closed = true;
  }
  shared_->changed.notify_one();
  if (thread_.joinable()) thread_.join();
}

void MapQueue::work(MapTask::Shared& shared) {
  std::unique_lock lock(shared.mutex);
  for (;;) {
    for (int naps = 0; !shared.has_work();) {
      shared.sleeps = naps == kMostNaps;
      if (shared.sleeps) shared.changed.wait(lock);
      else shared.changed.wait_for(lock, kNap);
      naps = shared.sleeps ? 0 : naps + 1;
    }
    shared.sleeps = false;
    if (shared.tasks.empty()) return;
    shared.run_first(lock);
  }
}

void MapTask::run() noexcept {
  try {
    step_->map(ids_, times_, training_, true);
    for (const std::shared_ptr<Table>& table : step_->tables()) {
      const std::lock_guard lock(table->mutex());
      statistics_.push_back(table->stats());
    }
  } catch (...) { error_ = std::current_exception(); }
}

void MapTask::release() noexcept {
  if (!shared_->has_thread()) return;
  bool sleeps = false;
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->is_held = false;
    sleeps = shared_->sleeps && !shared_->tasks.empty();
  }
  if (sleeps) shared_->changed.notify_one();
}

void MapTask::wait() {
  if (shared_->has_thread()) wait_for_thread();
  else if (!done_)
    throw ForkedChild(
        "the ids of a batch are mapped by a thread of another process, from which this one was forked. Make a new "
        "hb.Ahead here.");
  if (error_) std::rethrow_exception(error_);
}

// Maps what the thread has not begun itself: that is sooner than to wake it.
void MapTask::wait_for_thread() {
  std::unique_lock lock(shared_->mutex);
  while (!done_) {
    if (!shared_->is_running) shared_->run_first(lock);
    else shared_->mapped.wait(lock, [this] { return done_ || !shared_->is_running; });
  }
}

bool MapTask::take_back() {
  if (!shared_->has_thread()) return false;
  wait_for_thread();
  return error_ || step_->take_back();
}

const std::vector<TableStats>& MapTask::statistics() {
  wait();
  return statistics_;
}

}  // namespace hotbed
