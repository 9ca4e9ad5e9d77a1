// SPDX-License-Identifier: Apache-2.0
#include "map_queue.h"

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>

namespace hotbed {

struct MapTask::Shared {
  bool has_thread() const noexcept { return process == getpid(); }

  const pid_t process = getpid();
  std::mutex mutex;
  std::condition_variable changed;  // for the thread
  std::condition_variable mapped;   // for those who wait for a map
  std::deque<std::shared_ptr<MapTask>> tasks;
  std::exception_ptr error;  // of the first map that failed
  bool is_open = false;
  bool is_closed = false;
};

MapQueue::MapQueue() : shared_(std::make_shared<MapTask::Shared>()), thread_([shared = shared_] { work(*shared); }) {}

MapQueue::~MapQueue() { close(); }

std::shared_ptr<MapTask> MapQueue::add(Step& step, std::vector<FeatureIds> ids, const int64_t* times, bool training) {
  auto task = std::make_shared<MapTask>();
  task->shared_ = shared_;
  task->step_ = &step;
  task->ids_ = std::move(ids);
  task->times_ = times;
  task->training_ = training;
  if (!shared_->has_thread()) throw std::logic_error("map queue: it belongs to another process. Make another one.");
  const std::lock_guard lock(shared_->mutex);
  if (shared_->is_closed) throw std::logic_error("map queue: it is closed, got ids to map. Make another one.");
  step.mapped_by(task);
  shared_->tasks.push_back(task);
  shared_->is_open = false;
  return task;
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
    shared.changed.wait(lock, [&] { return shared.is_closed || (shared.is_open && !shared.tasks.empty()); });
    if (shared.tasks.empty()) return;
    const std::shared_ptr<MapTask> task = shared.tasks.front();
    task->error_ = shared.error;
    lock.unlock();
    if (!task->error_) task->run();
    lock.lock();
    shared.error = task->error_;
    shared.tasks.pop_front();
    task->done_ = true;
    shared.mapped.notify_all();
  }
}

void MapTask::run() noexcept {
  try {
    step_->map(ids_, times_, training_);
    for (const std::shared_ptr<Table>& table : step_->tables()) {
      const std::lock_guard lock(table->mutex());
      statistics_.push_back(table->stats());
    }
  } catch (...) { error_ = std::current_exception(); }
}

void MapTask::open() noexcept {
  if (!shared_->has_thread()) return;
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->is_open = true;
  }
  shared_->changed.notify_one();
}

void MapTask::wait() {
  if (shared_->has_thread()) wait_for_thread();
  else if (!done_)
    throw std::runtime_error(
        "the ids of a batch are mapped by a thread of another process, from which this one was forked. Make a new "
        "hb.Ahead here.");
  if (error_) std::rethrow_exception(error_);
}

void MapTask::wait_for_thread() {
  std::unique_lock lock(shared_->mutex);
  if (done_) return;
  shared_->is_open = true;
  shared_->changed.notify_one();
  shared_->mapped.wait(lock, [this] { return done_; });
}

const std::vector<TableStats>& MapTask::statistics() {
  wait();
  return statistics_;
}

}  // namespace hotbed
