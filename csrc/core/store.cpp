// SPDX-License-Identifier: Apache-2.0
#include "store.h"

#include <pthread.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <utility>

#include "forks.h"
#include "store_reads.h"

namespace hotbed {
namespace {

// A span is compacted where its extents hold more than kCompactAbove records per live one, and owners wait where theirs
// hold more than kWaitAbove. Two extents more are never worth it.
constexpr double kCompactAbove = 1.45, kWaitAbove = 1.5;
constexpr uint64_t kSlack = 2;
// Compaction needs one extent to begin with; each extent that it empties gives one back.
constexpr uint64_t kSpare = 1;
constexpr size_t kMostWaiting = 16;     // extents to be written before owners wait
constexpr size_t kMostIdleBuffers = 8;  // kept for the next extents
constexpr uint32_t kFewestGrown = 4;    // extents that a file grows by at once: a 64th of it,
constexpr uint32_t kMostGrown = 256;    // within these bounds
constexpr uint64_t kFewestKept = 16;    // unused extents that the file keeps: a quarter of those in use, at least these
constexpr size_t kReleased = 64;        // extents given back to the disk at once
constexpr size_t kPiece = 256;          // records moved while the owner is locked
constexpr uint32_t kNoSpan = 0xffffffffu;

bool exceeds(uint64_t num_extents, uint64_t live, uint32_t per_extent, double bound, uint64_t slack) noexcept {
  const double records = static_cast<double>((num_extents - std::min(num_extents, slack)) * per_extent);
  return records > bound * static_cast<double>(live);
}

// Of this process: one more than its parent's. getpid() would be a system call a record.
std::atomic<uint32_t> g_forks{0};

uint32_t count_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { g_forks.fetch_add(1); });
  static_cast<void>(registered);
  return g_forks.load();
}

bool is_full(int error) noexcept { return error == ENOSPC || error == EDQUOT || error == EFBIG; }

// What keeps a file from growing, and what to do.
std::string limit_of(int error, uint64_t free) {
  if (error == EDQUOT)
    return "the user's quota on the disk is used up. Free some space, raise the quota, or choose a folder on another "
           "disk.";
  rlimit limit{};
  if (error == EFBIG && getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    return "a file of this process may have " + std::to_string(limit.rlim_cur) +
           " (ulimit -f). Raise that limit, or keep these rows in hb.Ram.";
  if (error == EFBIG) return "the file system takes no file as large. Choose a folder on another file system.";
  return "the disk has " + std::to_string(free) + " free. Free some space, or choose a folder on another disk.";
}

}  // namespace

StorageFull::StorageFull(const std::string& path, uint64_t needed, uint64_t free, int error)
    : needed_bytes(needed),
      free_bytes(free),
      message("store: '" + path + "' needs " + std::to_string(needed) + " bytes more, " + limit_of(error, free)) {}

RecordLost::RecordLost(const std::string& path, Place place, uint32_t block, uint32_t slot, const std::string& reason)
    : place(place),
      slot(slot),
      message("store: '" + path + "', extent " + std::to_string(place.extent()) + ", block " + std::to_string(block) +
              ", slot " + std::to_string(slot) + ": " + reason +
              ". Resume from the last checkpoint; check the disk if it happens again.") {}

RecordLost::RecordLost(const RecordLost& lost, const std::string& table, int64_t id)
    : place(lost.place),
      slot(lost.slot),
      message("table '" + table + "', id " + std::to_string(id) + ": " + lost.message) {}

struct Store::State {
  // Records are put into one, survivors of compaction into the other: they live longer.
  struct Stream {
    uint32_t extent = kNoExtent;  // opened by its first record
    uint32_t filled = 0;
    uint8_t* bytes = nullptr;
  };
  struct Span {
    static constexpr uint32_t kClasses = 32;  // of sealed extents, by live records

    explicit Span(uint32_t owner) : owner(owner) { sealed.fill(kNoExtent); }
    uint32_t owner;
    uint32_t num_sealed = 0;
    uint64_t live_sealed = 0;
    Stream fresh, survivors;
    bool is_due = false;  // waits to be compacted
    uint32_t damaged = kNoExtent;
    std::array<uint32_t, kClasses> sealed;  // lists
  };
  struct Owner {
    RecordOwner* face;
    RecordLayout layout;
    uint64_t num_reserved = 0, num_sealed = 0, live_sealed = 0, live = 0;
    uint32_t num_spans = 0, num_due = 0;
    bool is_removed = false;
  };
  struct Retired {
    uint32_t extent;
    uint64_t number;  // of the last read that began before
  };
  struct Running : StoredReads {
    Running(std::shared_ptr<State> state, const RecordLayout& layout, size_t most)
        : StoredReads(layout, state->file->path(), most), state(std::move(state)) {}
    void wait() override;
    bool is_done() const override {
      const std::lock_guard lock(state->mutex);
      return done;
    }

    const std::shared_ptr<State> state;
    uint64_t number = 0;
    bool done = false;
  };

  explicit State(StoreConfig& config)
      : file(config.file ? std::move(config.file) : std::make_unique<File>(config.folder)),
        queue([this](StoredReads& batch) { finish(static_cast<Running&>(batch)); }) {
    try {
      writer = std::thread([this] { write(); });
      compactor = std::thread([this] { compact(); });
      engine = make_engine(config.engine, *file, queue, config.depth);
    } catch (...) {
      end_threads();
      throw;
    }
  }
  void close();
  void end_threads();

  // With the mutex held, as all below that take no lock.
  bool has_failed() const noexcept { return !failure.empty(); }
  // In the child of a fork, which may touch nothing of it.
  bool is_foreign() const noexcept { return forks != g_forks.load(std::memory_order_relaxed); }
  void check_process() const {
    if (is_foreign()) throw ForkedChild("store: it belongs to another process. Make another one.");
  }
  void check_extent(uint32_t extent) const {
    if (extent >= extents.size()) throw std::logic_error("store: there is no extent " + std::to_string(extent));
  }
  // Why nothing can be written now.
  void throw_failure() const {
    if (has_failed()) throw StorageFailed(failure);
    if (full_error != 0) throw StorageFull(file->path(), full.size() * kExtentBytes, file->free_bytes(), full_error);
  }
  bool is_stuck() const noexcept { return has_failed() || full_error != 0; }
  void write_again(std::unique_lock<std::mutex>& lock);
  const RecordLayout& layout_of(uint32_t extent) const { return owners[spans[extents[extent].span]->owner]->layout; }
  uint64_t num_available();
  // Extents that puts may open: at worst, each span has a nearly empty extent.
  uint64_t num_set_aside(const Owner& owner, uint64_t count) const noexcept {
    return count / owner.layout.per_extent + std::min<uint64_t>(count, owner.num_spans);
  }
  uint64_t num_set_aside() const noexcept;
  bool can_compact() { return num_available() >= num_set_aside() + kSpare; }
  // Whether compaction will empty extents without anybody's help. A damaged extent may have taken the spare one.
  bool is_compacting() { return compacting != kNoSpan || (!due.empty() && (can_compact() || !retired.empty())); }
  // Whether extents will be unused without anybody's help.
  bool may_have_more() { return !retired.empty() || is_releasing || is_compacting(); }
  bool must_wait(const Owner& owner) {
    const bool is_wide =
        exceeds(owner.num_sealed, owner.live_sealed, owner.layout.per_extent, kWaitAbove, kSlack * owner.num_spans);
    return full.size() >= kMostWaiting || (owner.num_due > 0 && is_wide && is_compacting());
  }
  // Wakes compaction first: a put that needs less room than was set aside for it wakes nobody.
  template <class F>
  void wait(std::unique_lock<std::mutex>& lock, F&& is_over) {
    changed.notify_all();
    changed.wait(lock, std::forward<F>(is_over));
  }
  // Adds room for at least this many extents. 0, or the error number.
  int grow(uint64_t least);
  uint64_t num_taken() const noexcept { return extents.size() - num_holes; }  // that have room on the disk
  // Unused extents that rows will not soon need.
  uint64_t num_surplus() {
    const uint64_t unused = num_available(), used = num_taken() - unused;
    const uint64_t kept = std::max(kFewestKept, used / 4) + num_set_aside() + kSpare;
    return can_release && unused > kept ? unused - kept : 0;
  }
  void release(std::unique_lock<std::mutex>& lock);

  Place append(uint32_t span, Stream& stream, uint32_t slot, const void* first, const void* second);
  void open(uint32_t span, Stream& stream);
  void drop_buffer(uint32_t extent);
  static uint32_t class_of(uint32_t live, uint32_t per_extent) noexcept {
    return live * Span::kClasses / (per_extent + 1);
  }
  uint32_t& list_of(uint32_t extent) {
    const Extent& entry = extents[extent];
    return spans[entry.span]->sealed[class_of(entry.live, layout_of(extent).per_extent)];
  }
  void seal(uint32_t extent);
  void unseal(uint32_t extent);  // takes it out of its span
  void free(uint32_t extent);    // a record of it
  void retire(uint32_t extent);
  void consider(uint32_t span);  // for compaction

  void finish(Running& batch);
  void write();
  int64_t write_extent(uint32_t extent, uint8_t* bytes);
  void compact();
  void move_live(uint32_t victim, uint8_t* bytes, std::unique_lock<std::mutex>& lock);
  std::vector<bool> read_extent(uint32_t extent, const RecordLayout& layout, uint8_t generation, uint8_t* bytes);

  const uint32_t forks = count_forks();
  const std::unique_ptr<File> file;
  std::mutex mutex;
  std::condition_variable changed;     // for everything but the following two
  std::condition_variable full_added;  // for the thread that writes
  std::condition_variable reads_done;
  bool is_closing = false;
  std::string failure;  // of a write
  int full_error = 0;   // of a write that found no room; it is tried again once this is 0
  uint64_t num_tries = 0;

  Extents extents;
  std::vector<std::unique_ptr<Owner>> owners;
  std::vector<std::unique_ptr<Span>> spans;
  uint32_t unused = kNoExtent;  // list
  uint64_t num_unused = 0;
  uint32_t holes = kNoExtent;  // list of those without room on the disk
  uint64_t num_holes = 0;
  bool can_release = true, is_releasing = false;
  std::deque<Retired> retired;                   // to be unused when older reads are done
  std::unordered_map<uint32_t, Blocks> buffers;  // of open extents
  std::vector<Blocks> idle_buffers;
  std::deque<uint32_t> full;  // open extents to be written
  uint32_t writing = kNoExtent;
  std::deque<uint32_t> due;  // spans to be compacted
  uint32_t compacting = kNoSpan;

  uint64_t last_number = 0, done_through = 0;  // of reads
  std::deque<std::shared_ptr<Running>> running;
  StoreStats counts;

  ReadQueue queue;
  std::unique_ptr<ReadEngine> engine;
  std::thread writer, compactor;
};

void Store::State::close() {
  {
    std::unique_lock lock(mutex);
    reads_done.wait(lock, [this] { return running.empty(); });
  }
  end_threads();
}

void Store::State::end_threads() {
  {
    const std::lock_guard lock(mutex);
    is_closing = true;
  }
  changed.notify_all();
  full_added.notify_all();
  queue.close();
  for (std::thread* thread : {&writer, &compactor})
    if (thread->joinable()) thread->join();
  engine.reset();
}

uint64_t Store::State::num_available() {
  for (; !retired.empty() && retired.front().number <= done_through; retired.pop_front(), num_unused++)
    extents.link(unused, retired.front().extent);
  return num_unused;
}

uint64_t Store::State::num_set_aside() const noexcept {
  uint64_t sum = 0;
  for (const auto& owner : owners) sum += num_set_aside(*owner, owner->num_reserved);
  return sum;
}

int Store::State::grow(uint64_t least) {
  for (; least > 0 && holes != kNoExtent; least--, num_holes--, num_unused++) {
    const uint32_t extent = holes;
    const int error = -file->allocate(uint64_t{extent} * kExtentBytes, kExtentBytes);
    if (error != 0) return error;
    extents.unlink(holes, extent);
    extents.link(unused, extent);
  }
  if (least == 0) return 0;
  const uint64_t size = extents.size();
  const uint64_t step = std::clamp<uint64_t>(size / 64, kFewestGrown, kMostGrown);
  int error = ENOSPC;
  for (const uint64_t more : {std::max(step, least), least}) {
    if (size + more > Place::kMostExtents) continue;
    error = -file->allocate(size * kExtentBytes, more * kExtentBytes);
    if (error != 0) continue;
    extents.grow(static_cast<uint32_t>(size + more));
    for (uint64_t i = size; i < size + more; i++, num_unused++) extents.link(unused, static_cast<uint32_t>(i));
    return 0;
  }
  return error;
}

void Store::State::release(std::unique_lock<std::mutex>& lock) {
  std::vector<uint32_t> given;
  for (uint64_t n = std::min<uint64_t>(num_surplus(), kReleased); n > 0; n--, num_unused--) {
    given.push_back(unused);
    extents.unlink(unused, unused);
  }
  is_releasing = true;
  lock.unlock();
  size_t done = 0;
  while (done < given.size() && file->release(uint64_t{given[done]} * kExtentBytes, kExtentBytes) == 0) done++;
  lock.lock();
  is_releasing = false, can_release = done == given.size();
  for (size_t i = 0; i < given.size(); i++) extents.link(i < done ? holes : unused, given[i]);
  num_holes += done, num_unused += given.size() - done;
  changed.notify_all();
}

void Store::State::open(uint32_t span, Stream& stream) {
  if (num_available() == 0) throw std::logic_error("store: a record was put without room reserved for it");
  if (idle_buffers.empty()) idle_buffers.push_back(allocate_blocks(kExtentBytes));
  const uint32_t extent = unused;
  stream.bytes = idle_buffers.back().get();
  buffers.emplace(extent, std::move(idle_buffers.back()));
  idle_buffers.pop_back();
  extents.unlink(unused, extent);
  num_unused--;
  Extent& entry = extents[extent];
  entry.span = span, entry.live = 0, entry.state = ExtentState::kOpen;
  stream.extent = extent, stream.filled = 0;
}

void Store::State::drop_buffer(uint32_t extent) {
  const auto buffer = buffers.find(extent);
  if (idle_buffers.size() < kMostIdleBuffers) idle_buffers.push_back(std::move(buffer->second));
  buffers.erase(buffer);
}

Place Store::State::append(uint32_t span, Stream& stream, uint32_t slot, const void* first, const void* second) {
  if (stream.extent == kNoExtent) open(span, stream);
  const RecordLayout& layout = layout_of(stream.extent);
  const Place place = Place::of(stream.extent, stream.filled);
  layout.write(stream.bytes + layout.offset(stream.filled), slot, first, second);
  extents[stream.extent].live++;
  if (++stream.filled == layout.per_extent) {
    full.push_back(std::exchange(stream.extent, kNoExtent));
    full_added.notify_one();
  }
  return place;
}

void Store::State::seal(uint32_t extent) {
  Extent& entry = extents[extent];
  entry.state = ExtentState::kSealed;
  if (entry.live == 0) return retire(extent);
  Span& span = *spans[entry.span];
  Owner& owner = *owners[span.owner];
  span.num_sealed++, owner.num_sealed++;
  span.live_sealed += entry.live, owner.live_sealed += entry.live;
  extents.link(list_of(extent), extent);
  consider(entry.span);
}

void Store::State::unseal(uint32_t extent) {
  const Extent& entry = extents[extent];
  Span& span = *spans[entry.span];
  Owner& owner = *owners[span.owner];
  span.num_sealed--, owner.num_sealed--;
  span.live_sealed -= entry.live, owner.live_sealed -= entry.live;
  extents.unlink(list_of(extent), extent);
}

void Store::State::free(uint32_t extent) {
  check_extent(extent);
  Extent& entry = extents[extent];
  if (entry.live == 0) throw std::logic_error("store: a record was freed twice");
  Span& span = *spans[entry.span];
  Owner& owner = *owners[span.owner];
  owner.live--;
  if (entry.state == ExtentState::kSealed) {
    const uint32_t per_extent = owner.layout.per_extent;
    const uint32_t before = class_of(entry.live, per_extent), after = class_of(entry.live - 1u, per_extent);
    if (entry.live == 1) {
      unseal(extent);
      entry.live = 0;
      return retire(extent);
    }
    entry.live--, span.live_sealed--, owner.live_sealed--;
    if (before != after) extents.unlink(span.sealed[before], extent), extents.link(span.sealed[after], extent);
    return consider(entry.span);
  }
  if (--entry.live == 0 && entry.state == ExtentState::kDamaged) {
    extents.unlink(span.damaged, extent);
    counts.num_damaged--;
    retire(extent);
  }
}

void Store::State::retire(uint32_t extent) {
  Extent& entry = extents[extent];
  entry.state = ExtentState::kFree;
  entry.generation++;
  retired.push_back({extent, last_number});
  changed.notify_all();
}

void Store::State::consider(uint32_t number) {
  Span& span = *spans[number];
  Owner& owner = *owners[span.owner];
  if (span.is_due || owner.is_removed) return;
  if (!exceeds(span.num_sealed, span.live_sealed, owner.layout.per_extent, kCompactAbove, kSlack)) return;
  span.is_due = true, owner.num_due++;
  due.push_back(number);
  changed.notify_all();
}

void Store::State::Running::wait() {
  state->check_process();
  std::unique_lock lock(state->mutex);
  state->reads_done.wait(lock, [this] { return done; });
  if (!lost_.empty()) throw lost_.front();
}

void Store::State::finish(Running& batch) {
  const std::lock_guard lock(mutex);
  batch.done = true;
  reads_done.notify_all();
  if (running.front().get() != &batch) return;
  for (; !running.empty() && running.front()->done; running.pop_front()) done_through = running.front()->number;
  if (!retired.empty()) changed.notify_all();
}

// Write-behind.

int64_t Store::State::write_extent(uint32_t extent, uint8_t* bytes) {
  const uint64_t offset = uint64_t{extent} * kExtentBytes;
  for (size_t done = 0; done < kExtentBytes;) {
    const int64_t n = file->write(bytes + done, kExtentBytes - done, offset + done);
    if (n < 0) return n;
    const size_t blocks = static_cast<size_t>(n) / kBlockBytes * kBlockBytes;
    if (blocks == 0) return -EIO;
    done += blocks;
  }
  return kExtentBytes;
}

void Store::State::write() {
  std::unique_lock lock(mutex);
  for (;;) {
    full_added.wait(lock, [this] { return is_closing || (!full.empty() && !is_stuck()); });
    if (is_closing) return;
    const uint32_t extent = full.front();
    int64_t result = 0;
    if (extents[extent].live > 0) {
      writing = extent;
      uint8_t* bytes = buffers.at(extent).get();
      const RecordLayout layout = layout_of(extent);
      const uint8_t generation = extents[extent].generation;
      lock.unlock();
      for (uint32_t i = 0; i < layout.per_extent; i++)
        layout.seal(bytes + layout.offset(i), Place::of(extent, i), generation);
      result = write_extent(extent, bytes);
      lock.lock();
      writing = kNoExtent;
    }
    num_tries++;
    if (is_full(static_cast<int>(-result))) {
      full_error = static_cast<int>(-result);
    } else if (result < 0) {
      failure = "store: '" + file->path() + "', extent " + std::to_string(extent) +
                ": cannot write: " + std::strerror(static_cast<int>(-result)) +
                ". Check the disk, then resume from the last checkpoint.";
    } else {
      counts.written_bytes += static_cast<uint64_t>(result);
      full.pop_front();
      drop_buffer(extent);
      seal(extent);
    }
    changed.notify_all();
  }
}

// Lets a write that found no room be tried once more, and waits for that.
void Store::State::write_again(std::unique_lock<std::mutex>& lock) {
  const uint64_t before = num_tries;
  full_error = 0;
  full_added.notify_one();
  wait(lock, [&] { return num_tries != before || full.empty(); });
}

// Compaction.

void Store::State::compact() {
  const Blocks bytes = allocate_blocks(kExtentBytes);
  std::unique_lock lock(mutex);
  for (;;) {
    const auto compacts = [this] {
      return !due.empty() && !has_failed() && full.size() < kMostWaiting && can_compact();
    };
    changed.wait(lock, [&] { return is_closing || compacts() || num_surplus() > 0; });
    if (is_closing) return;
    if (!compacts()) {
      release(lock);
      continue;
    }
    const uint32_t number = due.front();
    due.pop_front();
    Span& span = *spans[number];
    const auto has_some = [](uint32_t list) { return list != kNoExtent; };
    const auto list = std::find_if(span.sealed.begin(), span.sealed.end(), has_some);
    if (list != span.sealed.end()) {  // its records may all have gone since it was due
      compacting = number;
      move_live(*list, bytes.get(), lock);
      compacting = kNoSpan;
    }
    span.is_due = false, owners[span.owner]->num_due--;
    consider(number);
    changed.notify_all();
  }
}

std::vector<bool> Store::State::read_extent(uint32_t extent, const RecordLayout& layout, uint8_t generation,
                                            uint8_t* bytes) {
  const uint64_t offset = uint64_t{extent} * kExtentBytes;
  const bool came = file->read(bytes, kExtentBytes, offset) == kExtentBytes;
  std::vector<bool> whole(layout.per_extent);
  // No other record may be lost for a bad one: its blocks are read again, aside.
  Blocks aside;
  uint32_t first_aside = kExtentBytes;
  for (uint32_t i = 0; i < layout.per_extent; i++) {
    uint8_t* record = bytes + layout.offset(i);
    const Place place = Place::of(extent, i);
    whole[i] = came && layout.is_whole(record, place, generation);
    if (whole[i]) continue;
    if (!aside) aside = allocate_blocks(kMostReadBytes);
    const uint32_t first = layout.first_block(i) * kBlockBytes, end = (layout.last_block(i) + 1) * kBlockBytes;
    if (first != first_aside || end > first + kBlockBytes) file->read(aside.get(), end - first, offset + first);
    first_aside = first;
    const uint8_t* again = aside.get() + (layout.offset(i) - first);
    whole[i] = layout.is_whole(again, place, generation);
    if (whole[i]) std::memcpy(record, again, layout.record_bytes());
  }
  return whole;
}

void Store::State::move_live(uint32_t victim, uint8_t* bytes, std::unique_lock<std::mutex>& lock) {
  Extent& entry = extents[victim];
  Span& span = *spans[entry.span];
  Owner& owner = *owners[span.owner];
  const RecordLayout layout = owner.layout;
  const uint8_t generation = entry.generation;
  unseal(victim);
  entry.state = ExtentState::kCompacting;
  lock.unlock();
  const std::vector<bool> whole = read_extent(victim, layout, generation, bytes);
  std::vector<uint32_t> live;
  for (uint32_t begin = 0; begin < layout.per_extent; begin += kPiece) {
    const std::lock_guard<RecordOwner> guard(*owner.face);
    live.clear();
    for (uint32_t i = begin; i < std::min<uint32_t>(begin + kPiece, layout.per_extent); i++) {
      const uint32_t slot = RecordLayout::slot(bytes + layout.offset(i));
      if (whole[i] && owner.face->lies_at(slot, Place::of(victim, i))) live.push_back(i);
    }
    lock.lock();
    if (is_closing || owner.is_removed) live.clear();
    std::vector<Place> places;
    for (const uint32_t i : live) {
      const uint8_t* record = bytes + layout.offset(i);
      const uint8_t* payload = record + RecordLayout::kHead;
      places.push_back(
          append(entry.span, span.survivors, RecordLayout::slot(record), payload, payload + layout.first_bytes));
      entry.live--;
    }
    lock.unlock();
    for (size_t k = 0; k < live.size(); k++)
      owner.face->moved(RecordLayout::slot(bytes + layout.offset(live[k])), Place::of(victim, live[k]), places[k]);
  }
  lock.lock();
  counts.num_compacted++;
  if (entry.live == 0 || owner.is_removed) return retire(victim);
  entry.state = ExtentState::kDamaged;
  extents.link(span.damaged, victim);
  counts.num_damaged++;
}

// The face.

Store::Store(StoreConfig config) : state_(std::make_shared<State>(config)) {}

Store::~Store() {
  // In the child of a fork, nothing that the parent's threads use may end, nor be waited for.
  if (state_->is_foreign()) new std::shared_ptr<State>(state_);
  else state_->close();
}

Store::State& Store::state() const {
  state_->check_process();
  return *state_;
}

uint32_t Store::add_owner(RecordOwner& owner, uint64_t key, uint32_t first_bytes, uint32_t second_bytes) {
  State& s = state();
  const uint64_t payload = uint64_t{first_bytes} + second_bytes;
  constexpr uint64_t kMost = RecordLayout::kMostBytes - RecordLayout::kHead;
  if (payload < 1 || payload > kMost)
    throw std::invalid_argument("store: a record has 1 to " + std::to_string(kMost) + " bytes, got " +
                                std::to_string(payload) + ". Keep such rows in memory.");
  const std::lock_guard lock(s.mutex);
  s.owners.push_back(std::make_unique<State::Owner>(State::Owner{&owner, {key, first_bytes, second_bytes}}));
  return static_cast<uint32_t>(s.owners.size() - 1);
}

uint32_t Store::add_span(uint32_t owner) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.spans.push_back(std::make_unique<State::Span>(owner));
  s.owners.at(owner)->num_spans++;
  return static_cast<uint32_t>(s.spans.size() - 1);
}

void Store::remove_owner(uint32_t number) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  State::Owner& owner = *s.owners.at(number);
  const auto owns = [&s, number](uint32_t span) { return span != kNoSpan && s.spans[span]->owner == number; };
  owner.is_removed = true;
  s.changed.wait(lock,
                 [&] { return !owns(s.compacting) && (s.writing == kNoExtent || !owns(s.extents[s.writing].span)); });
  const auto drop = [&s](uint32_t extent) {
    s.extents[extent].live = 0;
    s.retire(extent);
  };
  const auto drop_open = [&](uint32_t extent) {
    s.drop_buffer(extent);
    drop(extent);
  };
  const auto is_full = [&](uint32_t extent) { return owns(s.extents[extent].span); };
  for (const uint32_t extent : s.full)
    if (is_full(extent)) drop_open(extent);
  std::erase_if(s.full, is_full);
  std::erase_if(s.due, owns);
  for (const auto& span : s.spans) {
    if (span->owner != number) continue;
    for (State::Stream* stream : {&span->fresh, &span->survivors})
      if (stream->extent != kNoExtent) drop_open(std::exchange(stream->extent, kNoExtent));
    for (const uint32_t& list : span->sealed)
      while (list != kNoExtent) {
        const uint32_t extent = list;
        s.unseal(extent);
        drop(extent);
      }
    for (; span->damaged != kNoExtent; s.counts.num_damaged--) {
      const uint32_t extent = span->damaged;
      s.extents.unlink(span->damaged, extent);
      drop(extent);
    }
  }
  owner.num_reserved = owner.live = 0;
}

void Store::reserve(uint32_t number, uint64_t count) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  State::Owner& owner = *s.owners.at(number);
  if (s.full_error != 0) s.write_again(lock);
  s.wait(lock, [&] { return s.is_stuck() || !s.must_wait(owner); });
  for (;;) {
    s.throw_failure();
    const uint64_t needed = s.num_set_aside() - s.num_set_aside(owner, owner.num_reserved) +
                            s.num_set_aside(owner, owner.num_reserved + count) + kSpare;
    const uint64_t available = s.num_available();
    if (available >= needed) break;
    const int error = s.grow(needed - available);
    if (error == 0) continue;
    if (!is_full(error))
      throw StorageFailed("store: '" + s.file->path() + "': cannot grow: " + std::strerror(error) +
                          ". Choose a folder on another disk.");
    // Extents that compaction empties, or that only wait for a read, may still do.
    if (!s.may_have_more())
      throw StorageFull(s.file->path(), (needed - available) * kExtentBytes, s.file->free_bytes(), error);
    s.changed.notify_all();
    s.changed.wait(lock);
  }
  owner.num_reserved += count;
}

void Store::give_back(uint32_t number, uint64_t count) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  State::Owner& owner = *s.owners.at(number);
  owner.num_reserved -= std::min(owner.num_reserved, count);
  s.changed.notify_all();
}

Place Store::put(uint32_t number, uint32_t slot, const void* first, const void* second) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  State::Span& span = *s.spans.at(number);
  State::Owner& owner = *s.owners[span.owner];
  if (owner.num_reserved == 0) throw std::logic_error("store: a record was put without room reserved for it");
  const Place place = s.append(number, span.fresh, slot, first, second);
  owner.num_reserved--, owner.live++;
  s.counts.put_bytes += owner.layout.record_bytes();
  return place;
}

void Store::free(Place place) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.free(place.extent());
}

std::shared_ptr<ReadBatch> Store::read(uint32_t number, std::vector<RecordRead> records, bool urgent) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  const RecordLayout& layout = s.owners.at(number)->layout;
  const auto batch = std::make_shared<State::Running>(state_, layout, records.size());
  for (const RecordRead& read : records) {
    s.check_extent(read.place.extent());
    const Extent& extent = s.extents[read.place.extent()];
    if (extent.state != ExtentState::kOpen) {
      batch->add(read, extent.generation);
      continue;
    }
    const uint8_t* record = s.buffers.at(read.place.extent()).get() + layout.offset(read.place.index());
    if (RecordLayout::slot(record) == read.slot) layout.read(record, read.first, read.second);
    else batch->lose(read.place, read.slot, "got the record of slot " + std::to_string(RecordLayout::slot(record)));
  }
  s.running.push_back(batch);
  batch->number = ++s.last_number;
  lock.unlock();
  if (batch->empty()) s.finish(*batch);
  else s.queue.add(batch, urgent);
  return batch;
}

void Store::drain() {
  State& s = state();
  std::unique_lock lock(s.mutex);
  if (s.full_error != 0) s.write_again(lock);
  s.wait(lock, [&s] { return s.is_stuck() || (s.full.empty() && !s.is_compacting()); });
  s.throw_failure();
}

StoreStats Store::stats() const {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  StoreStats stats = s.counts;
  for (const auto& owner : s.owners) stats.live_bytes += owner->live * owner->layout.record_bytes();
  stats.file_bytes = s.num_taken() * kExtentBytes;
  stats.num_read = s.queue.num_read();
  stats.num_waiting = static_cast<uint32_t>(s.full.size());
  stats.memory_bytes = s.extents.memory_bytes() + s.spans.size() * (sizeof(State::Span) + 2 * sizeof(void*)) +
                       s.owners.size() * (sizeof(State::Owner) + 2 * sizeof(void*));
  return stats;
}

bool Store::is_foreign() const noexcept { return state_->is_foreign(); }
bool Store::has_failed() const {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.has_failed();
}
const char* Store::engine_name() const noexcept { return state_->engine->name(); }
const std::string& Store::path() const noexcept { return state_->file->path(); }

}  // namespace hotbed
