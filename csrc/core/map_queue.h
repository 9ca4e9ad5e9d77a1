// SPDX-License-Identifier: Apache-2.0
// Maps the ids of coming batches on a thread of its own, one batch after the other, while their owner trains.
#pragma once

#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "step.h"

namespace hotbed {

// One map that a queue was asked for.
class MapTask {
 public:
  // Waits until the ids are mapped. Rethrows the error of this map, or of one before it: nothing is mapped behind it.
  void wait();
  // Of the tables of the step, after this map and before the next one. Waits as `wait` does.
  const std::vector<TableStats>& statistics();
  // Makes the tables what they were before this map, unless its ids were looked up. Later maps go first. Returns
  // whether they are so now.
  bool take_back();
  // Ends a `hold` of the queue. The step calls it after its lookup.
  void release() noexcept;

 private:
  friend class MapQueue;
  struct Shared;  // by a queue, its thread and its tasks
  void run() noexcept;
  void wait_for_thread();

  std::shared_ptr<Shared> shared_;
  Step* step_ = nullptr;
  std::vector<FeatureIds> ids_;
  const int64_t* times_ = nullptr;
  bool training_ = false;
  bool done_ = false;
  std::exception_ptr error_;
  std::vector<TableStats> statistics_;
};

// Maps and lookups of the same tables exclude each other. So the queue is held while a lookup is due, also at first:
// its thread begins no map. A thread that waits for a map meanwhile runs the map itself. The child of a fork has no
// thread that maps: there a wait is an error, and nothing is mapped.
class MapQueue {
 public:
  MapQueue();
  ~MapQueue();
  MapQueue(const MapQueue&) = delete;
  MapQueue& operator=(const MapQueue&) = delete;

  // Maps the ids later, as Step::map. The arrays must live until then; the end of the step waits for its map.
  std::shared_ptr<MapTask> add(Step& step, std::vector<FeatureIds> ids, const int64_t* times, bool training);
  // Lets the thread begin no map until `release`: a batch is about to be looked up.
  void hold() noexcept;
  // Maps what was added, and ends the thread.
  void close() noexcept;

 private:
  static void work(MapTask::Shared& shared);

  std::shared_ptr<MapTask::Shared> shared_;
  std::thread thread_;
};

}  // namespace hotbed
