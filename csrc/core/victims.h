// SPDX-License-Identifier: Apache-2.0
// The victims of a full partition: the row with the smallest (key, id), found without scanning at every insertion.
// Keys of rows only ever rise, so the lowest sixteenth is kept as a heap and refilled by one scan when it runs dry.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

namespace hotbed {

struct Victim {
  int64_t key, id;
  uint32_t slot;
  bool operator<(const Victim& other) const noexcept { return std::tie(key, id) < std::tie(other.key, other.id); }
};

class Victims {
 public:
  // A row was inserted: it belongs to the heap if it sorts below what the heap covers.
  void inserted(const Victim& victim) {
    if (!heap_.empty() && !(bound_ < victim)) push(victim);
  }
  void clear() noexcept { heap_.clear(); }

  // `scan(add)` offers every row that may go; `current(victim)` gives a row's present state: its key, or absent /
  // protected. Returns false if no row may go.
  enum class State { kGone, kProtected, kAlive };
  template <class Scan, class Current>
  bool pop(Scan&& scan, Current&& current, Victim* out) {
    for (bool refilled = false;;) {
      if (heap_.empty()) {
        if (refilled) return false;
        refill(scan);
        refilled = true;
        if (heap_.empty()) return false;
      }
      std::pop_heap(heap_.begin(), heap_.end(), after);
      Victim victim = heap_.back();
      heap_.pop_back();
      int64_t key = victim.key;
      const State state = current(victim, &key);
      if (state == State::kAlive && key == victim.key) return *out = victim, true;
      if (state == State::kGone) continue;
      victim.key = key;
      if (state == State::kProtected) aside_.push_back(victim);
      else if (!(bound_ < victim)) push(victim);
    }
  }
  // The batch is over: what it protected may go from now on.
  void release() {
    for (const Victim& victim : aside_)
      if (!heap_.empty() && !(bound_ < victim)) push(victim);
    aside_.clear();
    if (skipped_) heap_.clear(), skipped_ = false;
  }
  void skipped() noexcept { skipped_ = true; }  // a scan left protected rows out: the heap must not outlive the batch

 private:
  static bool after(const Victim& a, const Victim& b) noexcept { return b < a; }
  void push(const Victim& victim) {
    heap_.push_back(victim);
    std::push_heap(heap_.begin(), heap_.end(), after);
  }
  template <class Scan>
  void refill(Scan&& scan) {
    scan([this](const Victim& victim) { heap_.push_back(victim); });
    const size_t keep = std::min(heap_.size(), std::max<size_t>(16, heap_.size() / 16));
    if (keep == 0) return;
    std::nth_element(heap_.begin(), heap_.begin() + static_cast<ptrdiff_t>(keep - 1), heap_.end());
    bound_ = heap_[keep - 1];
    heap_.resize(keep);
    std::make_heap(heap_.begin(), heap_.end(), after);
  }

  std::vector<Victim> heap_, aside_;
  Victim bound_{};
  bool skipped_ = false;
};

}  // namespace hotbed
