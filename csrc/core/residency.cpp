// SPDX-License-Identifier: Apache-2.0
#include "residency.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <stdexcept>
#include <utility>

#include "memory.h"

namespace hotbed {
namespace {

// More rows than this in a span on average, and there are twice as many spans. Small tables have more spans than they
// need, since records stay where they are put: the rows of a table that was small share few spans for long.
uint64_t most_rows(size_t num_spans) noexcept {
  return num_spans * std::min(uint64_t{1} << 19, num_spans * (uint64_t{1} << 15));
}
constexpr size_t kAhead = 12;

// The store of a folder: one file for all tables of the process that lie there.
std::shared_ptr<Store> store_at(const std::string& folder, EngineKind engine) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, EngineKind>, std::weak_ptr<Store>> stores;
  const std::lock_guard lock(mutex);
  std::weak_ptr<Store>& known = stores[{folder, engine}];
  std::shared_ptr<Store> store = known.lock();
  if (store && (store->is_foreign() || store->has_failed())) store.reset();
  if (!store) {
    StoreConfig config;
    config.folder = folder, config.engine = engine;
    known = store = std::make_shared<Store>(std::move(config));
  }
  return store;
}

}  // namespace

Residency::Residency(const RowLayout& layout, Pool& pool, TableMutex& mutex, const std::vector<uint8_t>& partitions,
                     uint64_t key, const DiskConfig& config)
    : layout_(layout),
      pool_(pool),
      mutex_of_table_(mutex),
      partitions_(partitions),
      store_(config.store ? config.store : store_at(config.folder, config.engine)),
      owner_(store_->add_owner(*this, key, layout.value_bytes, layout.state_bytes)),
      words_(0, sizeof(uint64_t)),
      num_frames_(config.ram_rows),
      frames_(static_cast<Frame*>(map_pages(num_frames_ * sizeof(Frame), false))) {
  spans_.push_back(store_->add_span(owner_));
  while (pool_.slabs().size() < num_frames_) pool_.add_chunk();  // pages come when they are touched
}

Residency::~Residency() {
  if (is_foreign()) return;  // the parent's threads may hold the mutexes for ever
  {
    const std::lock_guard guard(mutex_of_table_);  // compaction asks still
    finish_loads();
  }
  store_->remove_owner(owner_);
  unmap_pages(frames_, num_frames_ * sizeof(Frame));
}

// Plans.

Residency::Plan::Plan(Residency& residency) : residency_(residency) {
  const std::lock_guard lock(residency.mutex_);
  number_ = residency.first_live_ + residency.plans_.size();
  residency.plans_.emplace_back();
}

Residency::Plan::~Plan() { residency_.end_plan(number_); }

void Residency::end_plan(uint64_t number) {
  if (is_foreign()) return;
  const std::lock_guard lock(mutex_);
  LivePlan& plan = plans_[number - first_live_];
  plan.lives = false, plan.frames = {};
  for (; !plans_.empty() && !plans_.front().lives; plans_.pop_front(), first_live_++)
    num_pinned_ -= plans_.front().num_frames;
}

void Residency::use(uint32_t number, uint64_t plan) {
  Frame& frame = frames_[number];
  if (frame.used == plan) return;
  LivePlan& user = plans_[plan - first_live_];
  if (user.frames.size() >= 2 * num_frames_) {  // it was brought up to date again and again
    std::sort(user.frames.begin(), user.frames.end());
    user.frames.erase(std::unique(user.frames.begin(), user.frames.end()), user.frames.end());
  }
  user.frames.push_back(number);
  if (frame.used > plan) return;
  if (pinned(frame)) plans_[frame.used - first_live_].num_frames--, num_pinned_--;
  frame.used = plan;
  user.num_frames++, num_pinned_++;
}

bool Residency::recount() {
  const std::lock_guard lock(mutex_);
  if (std::all_of(plans_.begin(), plans_.end(), [](const LivePlan& plan) { return plan.lives; })) return false;
  for (uint32_t i = 0; i < num_used_; i++) frames_[i].used = 0;
  num_pinned_ = 0;
  for (LivePlan& plan : plans_) plan.num_frames = 0;
  for (size_t i = 0; i < plans_.size(); i++)
    for (const uint32_t number : std::exchange(plans_[i].frames, {}))
      if (frames_[number].slot != kNoSlot) use(number, first_live_ + i);
  return true;
}

uint64_t Residency::num_pinned() const {
  const std::lock_guard lock(mutex_);
  return num_pinned_;
}

uint64_t Residency::num_pinned(const uint32_t* slots, size_t n) const {
  const std::lock_guard lock(mutex_);
  uint64_t count = 0;
  for (size_t i = 0; i < n; i++)
    if (slots[i] != kNoSlot && word(slots[i]) & kInFrame)
      count += pinned(frames_[static_cast<uint32_t>(word(slots[i]))]);
  return count;
}

uint64_t Residency::num_plans() const {
  const std::lock_guard lock(mutex_);
  const auto lives = [](const LivePlan& plan) { return plan.lives; };
  return static_cast<uint64_t>(std::count_if(plans_.begin(), plans_.end(), lives));
}

// Room.

Residency::Room::Room(Residency& residency, uint64_t most) : residency_(residency), left_(most) {
  {
    const std::lock_guard lock(residency.mutex_);
    std::vector<uint32_t>& spans = residency.spans_;
    while (residency.num_rooms_ == 0 && spans.size() < kPartitions &&
           residency.num_slots_.load(std::memory_order_relaxed) > most_rows(spans.size()))
      for (size_t more = spans.size(); more > 0; more--) spans.push_back(residency.store_->add_span(residency.owner_));
    residency.num_rooms_++;
  }
  try {
    residency.store_->reserve(residency.owner_, most);
  } catch (...) {
    const std::lock_guard lock(residency.mutex_);
    residency.num_rooms_--;
    throw;
  }
}

Residency::Room::~Room() {
  if (residency_.is_foreign()) return;
  residency_.store_->give_back(residency_.owner_, left_);
  const std::lock_guard lock(residency_.mutex_);
  residency_.num_rooms_--;
}

uint32_t Residency::span_of(uint32_t slot) const noexcept {
  return spans_[partitions_[slot / Slabs::kChunk] * spans_.size() / kPartitions];
}

// Frames.

void Residency::link(uint32_t number) {
  Frame& frame = frames_[number];
  frame.older = newest_, frame.newer = kNoFrame;
  (newest_ == kNoFrame ? oldest_ : frames_[newest_].newer) = number;
  newest_ = number;
}

void Residency::unlink(uint32_t number) {
  const Frame& frame = frames_[number];
  (frame.older == kNoFrame ? oldest_ : frames_[frame.older].newer) = frame.newer;
  (frame.newer == kNoFrame ? newest_ : frames_[frame.newer].older) = frame.older;
  if (hand_ == number) hand_ = frame.newer;
}

uint32_t Residency::victim(const Room* room, bool ahead) {
  uint32_t at = hand_;
  for (uint64_t looked = 0; looked <= 2 * num_frames_; looked++) {
    if (at == kNoFrame) at = oldest_;
    if (at == kNoFrame) break;
    Frame& frame = frames_[at];
    const bool may_go = room || frame.place & kStored;
    if (may_go && !(frame.flags & kLoading) && !pinned(frame) && !(ahead && frame.flags & kAhead)) {
      if (!(frame.flags & kVisited)) {
        hand_ = at;
        return at;
      }
      frame.flags &= ~kVisited;
    }
    at = frame.newer;
  }
  return kNoFrame;
}

void Residency::evict(uint32_t number, Room* room) {
  Frame& frame = frames_[number];
  if (!(frame.place & kStored)) {
    if (!room || room->left_ == 0)
      throw std::logic_error("residency: a row leaves its frame without room reserved for it");
    room->left_--;
    frame.place =
        kStored | store_->put(span_of(frame.slot), frame.slot, pool_.values(number), pool_.state(number)).bits;
  }
  word(frame.slot) = frame.place;
  if (frame.flags & kAhead) num_ahead_--;
  unlink(number);
  frame = Frame();
}

// A frame that nothing is in, or kNoFrame.
uint32_t Residency::take_frame(Room* room, bool ahead) {
  if (!free_.empty()) {
    const uint32_t number = free_.back();
    free_.pop_back();
    return number;
  }
  if (num_used_ < num_frames_) {
    frames_[num_used_] = Frame();
    return num_used_++;
  }
  const uint32_t number = victim(room, ahead);
  if (number != kNoFrame) evict(number, room);
  return number;
}

uint32_t Residency::take_frame(std::unique_lock<std::mutex>& lock, Room& room) {
  uint32_t number = take_frame(&room, false);
  if (number == kNoFrame) {  // rows are on their way into those that are left
    settle_all(lock);
    number = take_frame(&room, false);
  }
  if (number == kNoFrame) throw std::logic_error("residency: a batch needs more frames than were counted");
  return number;
}

void Residency::release(uint32_t number) {
  Frame& frame = frames_[number];
  if (pinned(frame)) plans_[frame.used - first_live_].num_frames--, num_pinned_--;
  if (frame.flags & kAhead) num_ahead_--;
  unlink(number);
  const bool loading = frame.flags & kLoading;
  frame = Frame();
  if (loading) frame.flags = kLoading;  // free when the bytes have come
  else free_.push_back(number);
}

void Residency::free_record(uint32_t number) { store_->free(place_of(std::exchange(frames_[number].place, 0))); }

void Residency::forget(uint32_t slot) {
  const std::lock_guard lock(mutex_);
  const uint64_t at = std::exchange(word(slot), 0);
  if (at & kStored) store_->free(place_of(at));
  if (!(at & kInFrame)) return;
  const auto number = static_cast<uint32_t>(at);
  if (frames_[number].place & kStored) free_record(number);
  release(number);
}

// Reads.

uint64_t Residency::number_of(const Frame& frame) const noexcept {
  const uint64_t first = loads_.front().number;
  return first + ((frame.load - static_cast<uint32_t>(first)) & ((1u << kLoadBits) - 1));
}

std::shared_ptr<ReadBatch> Residency::load(std::unique_lock<std::mutex>& lock, const std::vector<uint32_t>& slots,
                                           const Plan* plan, Room* room) {
  if (slots.empty()) return nullptr;
  const bool is_ahead = room && !plan;
  // First find the frames, which may release the mutex; then use them.
  std::vector<uint32_t> frames;
  frames.reserve(slots.size());
  try {
    while (frames.size() < slots.size()) {
      if (is_ahead && num_ahead_ + frames.size() >= (num_frames_ - num_pinned_) / 2) break;
      if (!room && has_trained() && !has_free_frame()) break;
      const uint32_t number = plan ? take_frame(lock, *room) : take_frame(room, is_ahead);
      if (number == kNoFrame) break;
      frames.push_back(number);
    }
    if (frames.empty()) return nullptr;
    std::vector<RecordRead> reads;
    reads.reserve(frames.size());
    for (size_t i = 0; i < frames.size(); i++)
      reads.push_back({place_of(word(slots[i])), slots[i], pool_.values(frames[i]), pool_.state(frames[i])});
    loads_.push_back({num_loads_ + 1, nullptr, frames});
    try {
      loads_.back().batch = store_->read(owner_, std::move(reads), !is_ahead);
    } catch (...) {
      loads_.pop_back();
      throw;
    }
  } catch (...) {
    free_.insert(free_.end(), frames.begin(), frames.end());
    throw;
  }
  num_loads_++;
  for (size_t i = 0; i < frames.size(); i++) {
    Frame& frame = frames_[frames[i]];
    frame.place = word(slots[i]), frame.slot = slots[i];
    frame.flags = kLoading | (is_ahead ? kAhead : 0u) | (plan ? 0u : kFetched);
    frame.load = static_cast<uint32_t>(num_loads_);
    word(slots[i]) = kInFrame | frames[i];
    link(frames[i]);
    if (plan) use(frames[i], plan->number());
    if (is_ahead) num_ahead_++;
  }
  return loads_.back().batch;
}

std::vector<uint64_t> Residency::loads_of(const uint32_t* slots, size_t n) const {
  std::vector<uint64_t> numbers;
  for (size_t i = 0; i < n; i++) {
    if (slots[i] == kNoSlot || !(word(slots[i]) & kInFrame)) continue;
    const Frame& frame = frames_[static_cast<uint32_t>(word(slots[i]))];
    if (!(frame.flags & kLoading)) continue;
    const uint64_t number = number_of(frame);
    if (std::find(numbers.begin(), numbers.end(), number) == numbers.end()) numbers.push_back(number);
  }
  return numbers;
}

std::deque<Residency::Load>::iterator Residency::find_load(uint64_t number) {
  const auto is_before = [](const Load& load, uint64_t number) { return load.number < number; };
  const auto load = std::lower_bound(loads_.begin(), loads_.end(), number, is_before);
  return load == loads_.end() || load->number != number ? loads_.end() : load;
}

void Residency::settle(std::unique_lock<std::mutex>& lock, uint64_t number) {
  auto at = find_load(number);
  if (at == loads_.end()) return;
  const std::shared_ptr<ReadBatch> batch = at->batch;
  lock.unlock();
  try {
    batch->wait();
  } catch (const RecordLost&) {  // whoever wants that row reads it once more
  }
  lock.lock();
  at = find_load(number);
  if (at == loads_.end()) return;
  const Load load = std::move(*at);
  loads_.erase(at);
  for (const uint32_t frame_number : load.frames) {
    Frame& frame = frames_[frame_number];
    frame.flags &= ~kLoading;
    if (frame.slot == kNoSlot) free_.push_back(frame_number);  // the row ended meanwhile
  }
  for (const RecordLost& lost : batch->lost()) {
    const uint64_t word_of_lost = word(lost.slot);
    const auto frame_number = static_cast<uint32_t>(word_of_lost);
    if (!(word_of_lost & kInFrame) || frames_[frame_number].place != (kStored | lost.place.bits)) continue;
    word(lost.slot) = kStored | lost.place.bits;
    release(frame_number);
  }
}

void Residency::settle_all(std::unique_lock<std::mutex>& lock) {
  while (!loads_.empty()) settle(lock, loads_.front().number);
}

void Residency::finish_loads() {
  std::unique_lock lock(mutex_);
  settle_all(lock);
}

void Residency::bring(const uint32_t* slots, size_t n, const Plan& plan, Room& room) {
  std::unique_lock lock(mutex_);
  std::vector<uint32_t> cold;
  for (size_t i = 0; i < n; i++) {
    if (i + kAhead < n && slots[i + kAhead] != kNoSlot) {
      const uint64_t ahead = word(slots[i + kAhead]);
      if (ahead & kInFrame) __builtin_prefetch(&frames_[static_cast<uint32_t>(ahead)]);
    }
    if (slots[i] == kNoSlot) continue;
    const uint64_t at = word(slots[i]);
    if (!(at & kInFrame)) {
      if (at & kStored) cold.push_back(slots[i]);
      continue;
    }
    Frame& frame = frames_[static_cast<uint32_t>(at)];
    use(static_cast<uint32_t>(at), plan.number());
    if (frame.flags & kAhead) frame.flags &= ~kAhead, num_ahead_--;
    if (frame.flags & kFetched) frame.flags &= ~kFetched, misses_++, fetched_++;
    else frame.flags |= kVisited, hits_++;
  }
  misses_ += cold.size();
  load(lock, cold, &plan, &room);
}

void Residency::arrive(const uint32_t* slots, size_t n, const Plan& plan, Room& room) {
  std::unique_lock lock(mutex_);
  std::shared_ptr<ReadBatch> again;
  for (;;) {
    std::vector<uint32_t> lost;
    for (size_t i = 0; i < n; i++)
      if (slots[i] != kNoSlot && word(slots[i]) & kStored) lost.push_back(slots[i]);
    if (again && !again->lost().empty()) throw again->lost().front();
    if (!lost.empty()) again = load(lock, lost, &plan, &room);
    const std::vector<uint64_t> needed = loads_of(slots, n);
    if (needed.empty()) return;
    const auto start = std::chrono::steady_clock::now();
    for (const uint64_t number : needed) settle(lock, number);
    wait_ns_ += static_cast<uint64_t>((std::chrono::steady_clock::now() - start).count());
  }
}

void Residency::fetch(const uint32_t* slots, size_t n, Room& room) {
  std::unique_lock lock(mutex_);
  while (!loads_.empty() && loads_.front().batch->is_done()) settle(lock, loads_.front().number);
  std::vector<uint32_t> cold;
  for (size_t i = 0; i < n; i++) {
    if (slots[i] == kNoSlot) continue;
    const uint64_t at = word(slots[i]);
    if (at & kStored) cold.push_back(slots[i]);
    else if (at & kInFrame) frames_[static_cast<uint32_t>(at)].flags |= kVisited;  // it stays until its batch comes
  }
  load(lock, cold, nullptr, &room);
}

std::vector<std::shared_ptr<ReadBatch>> Residency::fetch_now(const uint32_t* slots, size_t n) {
  std::unique_lock lock(mutex_);
  std::vector<uint32_t> cold;
  for (size_t i = 0; i < n; i++) {
    if (slots[i] == kNoSlot) continue;
    const uint64_t at = word(slots[i]);
    if (at & kStored) cold.push_back(slots[i]);
    if (!(at & kInFrame)) continue;
    Frame& frame = frames_[static_cast<uint32_t>(at)];
    if (frame.flags & kAhead) frame.flags &= ~kAhead, num_ahead_--;
    else frame.flags |= kVisited;
  }
  load(lock, cold, nullptr, nullptr);
  std::vector<std::shared_ptr<ReadBatch>> reads;
  for (const uint64_t number : loads_of(slots, n)) reads.push_back(find_load(number)->batch);
  return reads;
}

void Residency::place(const uint32_t* slots, size_t n, const Plan* plan, Room* room, uint32_t* frames,
                      std::vector<uint32_t>* fresh) {
  std::unique_lock lock(mutex_);
  // Rows that are being read ahead are not read again. Only those with a plan wait for them; readers do not.
  for (const uint64_t number : loads_of(slots, n))
    if (plan || find_load(number)->batch->is_done()) settle(lock, number);
  for (size_t i = 0; i < n; i++) {
    if (slots[i] == kNoSlot) {
      frames[i] = kNoFrame;
      continue;
    }
    if (word(slots[i]) == 0 && room) {
      const uint32_t number = take_frame(lock, *room);
      frames_[number].slot = slots[i];
      word(slots[i]) = kInFrame | number;
      link(number);
      fresh->push_back(static_cast<uint32_t>(i));
    }
    frames[i] = frame_at(slots[i]);
    if (plan && frames[i] < kColdFrame) use(frames[i], plan->number());
  }
}

void Residency::put(uint32_t slot, const Row& row, Room& room) {
  const std::lock_guard lock(mutex_);
  if (room.left_ == 0) throw std::logic_error("residency: a row is put without room reserved for it");
  room.left_--;
  uint64_t& at = word(slot);
  uint64_t& record = at & kInFrame ? frames_[static_cast<uint32_t>(at)].place : at;
  if (record & kStored) store_->free(place_of(record));
  record = kStored | store_->put(span_of(slot), slot, row.values(), row.state()).bits;
  if (at & kInFrame || !has_free_frame()) return;
  const uint32_t number = take_frame(nullptr, false);
  row.copy_to(pool_[number]);
  frames_[number].place = at, frames_[number].slot = slot;
  at = kInFrame | number;
  link(number);
}

std::shared_ptr<ReadBatch> Residency::read(const std::vector<Wanted>& rows, bool urgent) {
  const std::lock_guard lock(mutex_);
  std::vector<RecordRead> reads;
  for (const Wanted& row : rows) {
    uint64_t at = row.kept == kNotKept ? word(row.slot) : kept_[row.kept];
    if (at & kInFrame) {
      const auto number = static_cast<uint32_t>(at);
      at = frames_[number].place;
      if (!(frames_[number].flags & kLoading)) {
        pool_[number].copy_to(row.to);
        continue;
      }
    }
    if (!(at & kStored)) throw std::logic_error("residency: slot " + std::to_string(row.slot) + " has no row");
    reads.push_back({place_of(at), row.slot, row.to.values(), row.to.state()});
  }
  return store_->read(owner_, std::move(reads), urgent);
}

// Rows that ended, for a snapshot.

uint32_t Residency::keep(uint32_t slot) {
  const std::lock_guard lock(mutex_);
  uint64_t at = std::exchange(word(slot), 0);
  if (at & kInFrame) {
    const auto number = static_cast<uint32_t>(at);
    at = std::exchange(frames_[number].place, 0);
    release(number);
  }
  if (free_kept_.empty()) free_kept_.push_back(static_cast<uint32_t>(kept_.size())), kept_.push_back(0);
  const uint32_t number = free_kept_.back();
  free_kept_.pop_back();
  kept_[number] = at;
  kept_at_.emplace(at, number);
  return number;
}

void Residency::drop_kept(uint32_t number) {
  const std::lock_guard lock(mutex_);
  const uint64_t at = std::exchange(kept_[number], 0);
  kept_at_.erase(at);
  store_->free(place_of(at));
  free_kept_.push_back(number);
}

// Compaction asks with the mutex of the table.

bool Residency::lies_at(uint32_t slot, Place place) const {
  const uint64_t stored = kStored | place.bits;
  const uint64_t at = word(slot);
  return at == stored || (at & kInFrame && frames_[static_cast<uint32_t>(at)].place == stored) ||
         kept_at_.count(stored) > 0;
}

void Residency::moved(uint32_t slot, Place from, Place to) {
  const uint64_t before = kStored | from.bits, after = kStored | to.bits;
  uint64_t& at = word(slot);
  if (at == before) {
    at = after;
  } else if (at & kInFrame && frames_[static_cast<uint32_t>(at)].place == before) {
    frames_[static_cast<uint32_t>(at)].place = after;
  } else {
    const uint32_t number = kept_at_.at(before);
    kept_at_.erase(before);
    kept_at_.emplace(after, number);
    kept_[number] = after;
  }
}

ResidencyStats Residency::stats() const {
  const std::lock_guard lock(mutex_);
  ResidencyStats stats;
  stats.hits = hits_, stats.misses = misses_, stats.fetched = fetched_, stats.wait_ns = wait_ns_;
  stats.num_frames = num_used_ - static_cast<uint32_t>(free_.size());
  stats.memory_bytes = words_.num_bytes() + num_used_ * sizeof(Frame) + free_.capacity() * sizeof(uint32_t);
  stats.store = store_->stats();
  stats.engine = store_->engine_name();
  return stats;
}

}  // namespace hotbed
