// SPDX-License-Identifier: Apache-2.0
// The store is a dict of records, whatever its disk does: what it cannot give back it refuses by name.
#include "core/store.h"

#include <doctest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <map>
#include <set>
#include <thread>

#include "faulty_file.h"

using namespace hotbed;

namespace {

constexpr uint64_t kExtentsATerabyte = 1000000000000 / kExtentBytes;

std::string folder() { return std::filesystem::temp_directory_path().string(); }

std::vector<EngineKind> engines() {
  std::vector<EngineKind> kinds{EngineKind::kThreads};
  if (can_use_uring()) kinds.push_back(EngineKind::kUring);
  else MESSAGE("io_uring is not allowed here: only the engine of threads is tested");
  return kinds;
}

StoreConfig config_of(EngineKind engine, std::unique_ptr<File> file = nullptr) {
  StoreConfig config;
  config.folder = folder(), config.engine = engine, config.depth = 8, config.file = std::move(file);
  return config;
}

// What a store should hold: the newest version of each slot. The bytes of a record follow from slot and version.
class Dict : public RecordOwner {
 public:
  Dict(Store& store, uint32_t first_bytes, uint32_t second_bytes, uint32_t num_slots, int num_spans = 1,
       uint64_t key = 7)
      : layout(key, first_bytes, second_bytes), places_(num_slots), versions_(num_slots) {
    attach(store, num_spans, key);
  }
  ~Dict() override {
    if (store_) leave();
  }
  // Ends the use of the store, whose compaction asks its owners for as long as they have not left.
  void leave() {
    store_->remove_owner(number);
    store_ = nullptr;
  }
  // The store is gone.
  void outlive() { store_ = nullptr; }
  // The same slots in another, empty store.
  void attach(Store& store, int num_spans, uint64_t key) {
    store_ = &store;
    number = store.add_owner(*this, key, layout.first_bytes, layout.second_bytes);
    spans_.clear();
    for (int i = 0; i < num_spans; i++) spans_.push_back(store.add_span(number));
    for (uint32_t slot = 0; slot < num_slots(); slot++)
      if (has(slot)) {
        store.reserve(number, 1);
        put_version(slot, versions_[slot]);
      }
  }

  void lock() override { mutex_.lock(); }
  void unlock() override { mutex_.unlock(); }
  bool lies_at(uint32_t slot, Place place) const override {
    return slot < num_slots() && has(slot) && places_[slot] == place;
  }
  void moved(uint32_t slot, Place, Place to) override { places_[slot] = to; }

  uint32_t num_slots() const { return static_cast<uint32_t>(versions_.size()); }
  bool has(uint32_t slot) const { return versions_[slot] > 0; }
  Place place(uint32_t slot) const { return places_[slot]; }  // with the mutex
  Place place_of(uint32_t slot) {
    const std::lock_guard guard(mutex_);
    return places_[slot];
  }
  std::vector<uint8_t> newest_payload(uint32_t slot) const { return payload(slot, versions_[slot]); }
  // Puts a new record of the slot, in room that is reserved, and frees the one before.
  void put(uint32_t slot) {
    const std::lock_guard guard(mutex_);
    const bool had = has(slot);
    const Place before = places_[slot];
    put_version(slot, newest_ + 1);
    versions_[slot] = ++newest_;
    if (had) store_->free(before);
  }
  void rewrite(uint32_t slot) {
    store_->reserve(number, 1);
    put(slot);
  }
  void free(uint32_t slot) {
    const std::lock_guard guard(mutex_);
    if (has(slot)) store_->free(places_[slot]);
    versions_[slot] = 0;
  }

  // Reads the slots, and checks each against the dict. The slots that were refused, and where they were looked for.
  std::map<uint32_t, Place> check(const std::vector<uint32_t>& slots) {
    std::vector<std::vector<uint8_t>> bytes(slots.size());
    std::vector<RecordRead> reads;
    std::shared_ptr<ReadBatch> batch;
    {
      const std::lock_guard guard(mutex_);
      for (size_t i = 0; i < slots.size(); i++) {
        bytes[i].resize(layout.first_bytes + layout.second_bytes);
        if (has(slots[i]))
          reads.push_back({places_[slots[i]], slots[i], bytes[i].data(), bytes[i].data() + layout.first_bytes});
      }
      batch = store_->read(number, reads, reads.size() % 2 == 0);  // both lanes
    }
    std::map<uint32_t, Place> refused;
    try {
      batch->wait();
    } catch (const RecordLost& error) {
      CHECK(error.message == batch->lost().front().message);
      for (const RecordLost& lost : batch->lost()) {
        refused[lost.slot] = lost.place;
        CHECK(lost.message.find(store_->path()) != std::string::npos);
        CHECK(lost.message.find("extent " + std::to_string(lost.place.extent()) + ", block ") != std::string::npos);
        CHECK(lost.message.find(", slot " + std::to_string(lost.slot) + ": ") != std::string::npos);
      }
    }
    for (size_t i = 0; i < slots.size(); i++)
      if (has(slots[i]) && !refused.contains(slots[i])) CHECK(bytes[i] == payload(slots[i], versions_[slots[i]]));
    return refused;
  }
  std::map<uint32_t, Place> check_all() {
    std::vector<uint32_t> slots;
    for (uint32_t slot = 0; slot < num_slots(); slot++) slots.push_back(slot);
    return check(slots);
  }
  // Whether the disk has done something to a block of the record.
  bool is_touched(const FaultyFile& file, Place place) const {
    const uint64_t extent = uint64_t{place.extent()} * kExtentBytes;
    return file.has_touched(extent + uint64_t{layout.first_block(place.index())} * kBlockBytes,
                            extent + (uint64_t{layout.last_block(place.index())} + 1) * kBlockBytes);
  }
  std::vector<uint8_t> payload(uint32_t slot, uint64_t version) const {
    std::vector<uint8_t> bytes(layout.first_bytes + layout.second_bytes);
    Draw draw(mix64(slot) ^ version);
    for (size_t i = 0; i < bytes.size(); i += 8) {
      const uint64_t word = draw.next();
      std::memcpy(bytes.data() + i, &word, std::min<size_t>(8, bytes.size() - i));
    }
    return bytes;
  }

  const RecordLayout layout;
  uint32_t number = 0;

 private:
  void put_version(uint32_t slot, uint64_t version) {
    const std::vector<uint8_t> bytes = payload(slot, version);
    const uint32_t span = spans_[slot % spans_.size()];
    places_[slot] = store_->put(span, slot, bytes.data(), bytes.data() + layout.first_bytes);
  }

  Store* store_ = nullptr;
  std::mutex mutex_;
  std::vector<uint32_t> spans_;
  std::vector<Place> places_;
  std::vector<uint64_t> versions_;  // 0: none
  uint64_t newest_ = 0;
};

void fill(Dict& dict, Store& store) {
  store.reserve(dict.number, dict.num_slots());
  for (uint32_t slot = 0; slot < dict.num_slots(); slot++) dict.put(slot);
}

}  // namespace

TEST_CASE("records of any size come back from memory and from the disk, with both engines, direct or not") {
  constexpr uint32_t kSizes[][2] = {{1, 0}, {0, 3}, {64, 4}, {64, 128}, {2048, 4}, {5000, 100}, {30000, 31433}};
  for (const EngineKind engine : engines())
    for (const bool direct : {true, false})
      for (const auto& [first, second] : kSizes) {
        Store store(config_of(engine, std::make_unique<File>(folder(), direct)));
        const uint32_t per_extent = RecordLayout(7, first, second).per_extent;
        Dict dict(store, first, second, 2 * per_extent + per_extent / 2);
        fill(dict, store);
        CHECK(dict.check_all().empty());  // some written, some not
        store.drain();
        CHECK(dict.check_all().empty());
        Draw draw(first);
        std::vector<uint32_t> some;
        for (int i = 0; i < 20; i++) some.push_back(static_cast<uint32_t>(draw.below(dict.num_slots())));
        CHECK(dict.check(some).empty());
      }
}

TEST_CASE("records that are empty or too large to be read at once are refused") {
  Store store(config_of(EngineKind::kThreads));
  CHECK_NOTHROW(Dict(store, 30000, 31433, 0));
  CHECK_THROWS_AS(Dict(store, 30000, 31434, 0), std::invalid_argument);
  CHECK_THROWS_AS(Dict(store, 0, 0, 0), std::invalid_argument);
}

TEST_CASE("layouts lose at most an eighth of an extent, and read few blocks") {
  for (uint32_t bytes = 1; bytes + RecordLayout::kHead <= RecordLayout::kMostBytes; bytes += bytes / 16 + 1) {
    const RecordLayout layout(1, bytes, 0);
    const uint32_t record = layout.record_bytes(), last = layout.per_extent - 1;
    CHECK(layout.per_extent < 1u << Place::kIndexBits);
    CHECK(layout.offset(last) + record <= kExtentBytes);
    if (record <= kExtentBytes / 8) CHECK(layout.per_extent * record >= kExtentBytes / 8 * 7);
    for (uint32_t i = 0; i < layout.per_extent; i++) {
      if (i > 0) CHECK(layout.offset(i) >= layout.offset(i - 1) + record);
      CHECK((layout.last_block(i) - layout.first_block(i) + 1) * kBlockBytes <= kMostReadBytes);
    }
  }
  for (const uint32_t bytes : {68u, 128u, 192u}) {  // rows of dim 16: row-wise, Adagrad, Adam
    const RecordLayout layout(1, bytes, 0);
    for (uint32_t i = 0; i < layout.per_extent; i++) CHECK(layout.first_block(i) == layout.last_block(i));
  }
}

TEST_CASE("a record passes for no other: each flipped bit, place, generation and owner is seen") {
  const RecordLayout layout(5, 21, 2), other(6, 21, 2);
  std::vector<uint8_t> record(layout.record_bytes());
  layout.write(record.data(), 77, "abcdefghijklmnopqrstu", "vw");
  const Place place = Place::of(3, 9);
  layout.seal(record.data(), place, 4);
  CHECK(layout.is_whole(record.data(), place, 4));
  CHECK_FALSE(layout.is_whole(record.data(), Place::of(3, 8), 4));
  CHECK_FALSE(layout.is_whole(record.data(), Place::of(2, 9), 4));
  CHECK_FALSE(layout.is_whole(record.data(), place, 5));
  CHECK_FALSE(other.is_whole(record.data(), place, 4));
  for (size_t bit = 0; bit < 8 * record.size(); bit++) {
    record[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
    CHECK_FALSE(layout.is_whole(record.data(), place, 4));
    record[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
  }
}

TEST_CASE("random rewrites stay within their space and their bytes written, and lose nothing") {
  for (const EngineKind engine : engines()) {
    Store store(config_of(engine));
    Dict dict(store, 900, 100, 40 * 256, 2);
    fill(dict, store);
    Draw draw(3);
    double most = 0;
    for (uint32_t i = 0; i < 10 * dict.num_slots(); i++) {
      dict.rewrite(static_cast<uint32_t>(draw.below(dict.num_slots())));
      if (i % 1000 != 0) continue;
      const StoreStats stats = store.stats();
      most = std::max(most, static_cast<double>(stats.file_bytes) / static_cast<double>(stats.live_bytes));
    }
    store.drain();
    const StoreStats stats = store.stats();
    CHECK(most < 2.0);
    CHECK(static_cast<double>(stats.written_bytes) < 2.0 * static_cast<double>(stats.put_bytes));
    CHECK(stats.num_compacted > 200);
    CHECK(stats.live_bytes == uint64_t{dict.num_slots()} * dict.layout.record_bytes());
    CHECK(dict.check_all().empty());
  }
}

namespace {

constexpr auto kReadFaults = {FaultyFile::kShortRead, FaultyFile::kReadError, FaultyFile::kFlippedRead};

// Operations in any order against dicts, on a disk on which everything goes wrong now and then.
void run_against_dicts(EngineKind engine, uint64_t num_operations, uint64_t seed, int write_errors) {
  Draw draw(seed);
  std::unique_ptr<Store> store;
  FaultyFile* file = nullptr;
  std::vector<std::unique_ptr<Dict>> dicts;
  uint64_t num_refused = 0, num_full = 0, num_failed = 0, num_compacted = 0;
  uint64_t counts[FaultyFile::kNumFaults] = {};
  const auto open = [&] {
    auto next = std::make_unique<FaultyFile>(folder());
    FaultyFile* const next_file = next.get();
    auto other = std::make_unique<Store>(config_of(engine, std::move(next)));
    if (dicts.empty()) {
      dicts.push_back(std::make_unique<Dict>(*other, 1000, 8, 4000, 2, 1));
      dicts.push_back(std::make_unique<Dict>(*other, 64, 300, 6000, 1, 2));
      dicts.push_back(std::make_unique<Dict>(*other, 2500, 0, 700, 1, 3));  // these cross blocks
    } else {
      for (size_t i = 0; i < dicts.size(); i++) dicts[i]->attach(*other, i == 0 ? 2 : 1, i + 1);
    }
    if (store) {
      for (int i = 0; i < FaultyFile::kNumFaults; i++) counts[i] += file->count[i];
      num_compacted += store->stats().num_compacted;
    }
    store = std::move(other), file = next_file;
    for (const auto fault : kReadFaults) file->rate[fault] = 10;
    for (const auto fault : {FaultyFile::kFlippedWrite, FaultyFile::kTornWrite}) file->rate[fault] = 50;
    file->rate[FaultyFile::kShortWrite] = 100, file->rate[FaultyFile::kFull] = 500;
    file->rate[FaultyFile::kWriteError] = write_errors;
  };
  // All that can be read is right, and what is refused was touched. A record that is lost for good is dropped.
  const auto check = [&](Dict& dict, const std::vector<uint32_t>& slots) {
    const std::map<uint32_t, Place> refused = dict.check(slots);
    for (const auto& [slot, place] : refused) CHECK(dict.is_touched(*file, place));
    num_refused += refused.size();
    std::map<int, int> rates;
    for (const auto fault : kReadFaults) rates[fault] = file->rate[fault].exchange(0);
    file->forget_reads();
    for (const auto& [slot, place] : refused)
      for (const auto& [lost, where] : dict.check({slot})) {
        CHECK(dict.is_touched(*file, where));
        dict.free(lost);
      }
    for (const auto fault : kReadFaults) file->rate[fault] = rates[fault];
  };
  open();
  for (uint64_t done = 0; done < num_operations;) {
    Dict& dict = *dicts[draw.below(dicts.size())];
    const auto slot = [&] { return static_cast<uint32_t>(draw.below(dict.num_slots())); };
    const uint64_t what = draw.below(100);
    if (done > num_operations / 2 && num_failed == 0) file->rate[FaultyFile::kWriteError] = 1000;
    if (what < 30) {
      const uint64_t count = 1 + draw.below(40);
      try {
        store->reserve(dict.number, count);
        const uint64_t unused = draw.below(2) * draw.below(count);
        for (uint64_t i = unused; i < count; i++) dict.put(slot());
        store->give_back(dict.number, unused);
      } catch (const StorageFull&) {  // changes nothing: the dict is what it was
        num_full++;
      } catch (const StorageFailed& failed) {
        CHECK(failed.message.find(store->path()) != std::string::npos);
        num_failed++;
        file->heal();
        for (auto& each : dicts) {
          std::vector<uint32_t> all;
          for (uint32_t i = 0; i < each->num_slots(); i++) all.push_back(i);
          check(*each, all);
        }
        open();
      }
      done += count;
    } else if (what < 40) {
      dict.free(slot());
      done++;
    } else {
      std::vector<uint32_t> slots;
      for (uint64_t i = draw.below(16) + 1; i > 0; i--) slots.push_back(slot());
      std::sort(slots.begin(), slots.end());
      slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
      check(dict, slots);
      done += slots.size();
    }
  }
  file->heal();
  for (auto& dict : dicts) {
    std::vector<uint32_t> all;
    for (uint32_t i = 0; i < dict->num_slots(); i++) all.push_back(i);
    check(*dict, all);
  }
  try {
    store->drain();
  } catch (const StorageFailed&) {  // of a write that failed before
    num_failed++;
  }
  for (auto& dict : dicts) CHECK(dict->check_all().empty());
  for (int i = 0; i < FaultyFile::kNumFaults; i++) {
    CAPTURE(i);
    CHECK(counts[i] + file->count[i] > 0);
  }
  CHECK(num_compacted + store->stats().num_compacted > 0);
  MESSAGE(num_refused, " records refused, full ", num_full, " times, failed ", num_failed, " times");
}

}  // namespace

TEST_CASE("operations against a dict while the disk fails") {
  for (const EngineKind engine : engines()) run_against_dicts(engine, 60000, 1, 15);
}

// scripts/native_tests.sh .venv/bin soak
TEST_CASE("a million operations against a dict while the disk fails" * doctest::skip()) {
  for (const EngineKind engine : engines()) run_against_dicts(engine, 1000000, 2, 2);
}

TEST_CASE("a full disk changes nothing, and compaction goes on in what there is") {
  auto owned = std::make_unique<FaultyFile>(folder());
  FaultyFile& file = *owned;
  file.most_bytes = 24 * kExtentBytes;
  Store store(config_of(EngineKind::kThreads, std::move(owned)));
  Dict dict(store, 1000, 8, 30 * 256);
  uint32_t filled = 0;
  const auto fill_up = [&] {
    for (; filled < dict.num_slots(); filled++) dict.rewrite(filled);
  };
  CHECK_THROWS_AS(fill_up(), StorageFull);
  CHECK(filled > 20 * 256);
  const StoreStats before = store.stats();
  try {
    store.reserve(dict.number, 100000);
    CHECK(false);
  } catch (const StorageFull& error) {
    CHECK(error.needed_bytes > 300 * kExtentBytes);
    CHECK(error.message.find(store.path()) != std::string::npos);
    CHECK(error.message.find(std::to_string(error.needed_bytes)) != std::string::npos);
  }
  CHECK(store.stats().file_bytes == before.file_bytes);
  CHECK(store.stats().live_bytes == before.live_bytes);
  CHECK(dict.check_all().empty());
  // With a third fewer records, the others can be rewritten for ever.
  for (uint32_t slot = 0; slot < filled; slot += 2) dict.free(slot);
  Draw draw(5);
  for (int i = 0; i < 20000; i++) dict.rewrite(static_cast<uint32_t>(draw.below(filled / 2) * 2 + 1));
  CHECK(dict.check_all().empty());
  CHECK(store.stats().file_bytes <= file.most_bytes);
  file.most_bytes = UINT64_MAX;
  fill_up();
  CHECK(dict.check_all().empty());
}

TEST_CASE("a write that finds no room is a full disk, and is tried again") {
  for (const EngineKind engine : engines()) {
    auto owned = std::make_unique<FaultyFile>(folder());
    FaultyFile& file = *owned;
    Store store(config_of(engine, std::move(owned)));
    Dict dict(store, 1000, 8, 60 * 256);
    uint32_t filled = 0;
    const auto fill_up = [&](uint32_t end) {
      for (; filled < end; filled++) dict.rewrite(filled);
    };
    fill_up(2 * 256);
    for (int round = 0; round < 2; round++) {
      file.writes_find_no_room = true;
      const uint32_t before = filled;
      CHECK_THROWS_AS(fill_up(dict.num_slots()), StorageFull);
      CHECK(filled < before + 20 * 256);
      CHECK_THROWS_AS(store.reserve(dict.number, 1), StorageFull);
      CHECK_THROWS_AS(store.drain(), StorageFull);
      CHECK(dict.check_all().empty());
      file.writes_find_no_room = false;
      fill_up(filled + 5 * 256);
      store.drain();
      CHECK(dict.check_all().empty());
    }
    CHECK_FALSE(store.has_failed());
  }
}

TEST_CASE("what keeps a file from growing is named") {
  const auto message = [](int error) { return StorageFull("/disk/x", 4096, 77, error).message; };
  CHECK(message(ENOSPC).find("the disk has 77 free") != std::string::npos);
  CHECK(message(EDQUOT).find("quota") != std::string::npos);
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
  CHECK(message(EFBIG).find(before.rlim_cur == RLIM_INFINITY ? "file system takes no file" : "ulimit -f") !=
        std::string::npos);
  const rlimit small{1 << 20, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  CHECK(message(EFBIG).find("a file of this process may have 1048576 (ulimit -f)") != std::string::npos);
  setrlimit(RLIMIT_FSIZE, &before);
}

TEST_CASE("extents with records that are lost fill a disk up, and hold back nothing else") {
  auto owned = std::make_unique<FaultyFile>(folder());
  FaultyFile& file = *owned;
  file.most_bytes = 24 * kExtentBytes;
  file.rate[FaultyFile::kFlippedWrite] = 1000;
  Store store(config_of(EngineKind::kThreads, std::move(owned)));
  Dict dict(store, 1000, 8, 10 * 256);
  Draw draw(8);
  const auto rewrite_for_ever = [&] {
    for (;;) dict.rewrite(static_cast<uint32_t>(draw.below(dict.num_slots())));
  };
  CHECK_THROWS_AS(rewrite_for_ever(), StorageFull);
  CHECK(store.stats().num_damaged > 0);
  file.heal();
  store.drain();
  const std::map<uint32_t, Place> refused = dict.check_all();
  for (const auto& [slot, place] : refused) CHECK(dict.is_touched(file, place));
  for (const auto& [slot, place] : refused) dict.free(slot);
  store.drain();
  CHECK(refused.size() <= 24);  // one an extent
  CHECK(store.stats().num_damaged == 0);
  CHECK(dict.check_all().empty());
}

TEST_CASE("puts without room reserved, records freed twice and places of nowhere are errors of the caller") {
  Store store(config_of(EngineKind::kThreads));
  Dict dict(store, 8, 0, 10);
  CHECK_THROWS_AS(dict.put(0), std::logic_error);
  store.reserve(dict.number, 2);
  dict.put(0);
  store.give_back(dict.number, 1);
  CHECK_THROWS_AS(dict.put(1), std::logic_error);
  store.free(dict.place_of(0));
  CHECK_THROWS_AS(store.free(dict.place_of(0)), std::logic_error);
  CHECK_THROWS_AS(store.free(Place::of(1000, 0)), std::logic_error);
  CHECK_THROWS_AS(store.read(dict.number, {{Place::of(1000, 0), 0, nullptr, nullptr}}, true), std::logic_error);
}

TEST_CASE("a failed write keeps every record readable, and the store takes no more") {
  auto owned = std::make_unique<FaultyFile>(folder());
  FaultyFile& file = *owned;
  Store store(config_of(EngineKind::kBest, std::move(owned)));
  Dict dict(store, 1000, 8, 2000);
  file.rate[FaultyFile::kWriteError] = 1000;
  fill(dict, store);
  CHECK_THROWS_AS(store.drain(), StorageFailed);
  CHECK_THROWS_AS(store.reserve(dict.number, 1), StorageFailed);
  file.heal();
  CHECK_THROWS_AS(store.reserve(dict.number, 1), StorageFailed);  // for good: no later write may hide it
  CHECK(dict.check_all().empty());
}

TEST_CASE("a read waits for itself alone, and one that somebody waits for goes before those that were begun ahead") {
  for (const int num_threads : {1, 2}) {
    auto owned = std::make_unique<FaultyFile>(folder());
    FaultyFile& file = *owned;
    StoreConfig config = config_of(EngineKind::kThreads, std::move(owned));
    config.depth = num_threads;
    Store store(std::move(config));
    Dict dict(store, 1000, 8, 4 * 256);
    fill(dict, store);
    store.drain();
    std::vector<uint8_t> bytes(3 * 1008);
    const auto begin = [&](uint32_t slot, bool urgent) {
      const std::lock_guard<RecordOwner> lock(dict);
      uint8_t* to = bytes.data() + slot / 300 * 1008;
      return store.read(dict.number, {{dict.place(slot), slot, to, to + 1000}}, urgent);
    };
    const auto block_of = [&](uint32_t slot) {
      const Place place = dict.place_of(slot);
      return uint64_t{place.extent()} * kExtentBytes + dict.layout.first_block(place.index()) * kBlockBytes;
    };
    file.hold_next_read();
    const auto held = begin(0, false);
    file.wait_for_held_read();
    const auto urgent_while_held = num_threads == 2 ? begin(600, true) : nullptr;
    if (urgent_while_held) urgent_while_held->wait();
    CHECK(!held->is_done());
    if (num_threads == 2) {
      CHECK(std::equal(bytes.begin() + 2 * 1008, bytes.end(), dict.newest_payload(600).begin()));
      file.hold_reads(false);
      held->wait();
      continue;
    }
    const auto ahead = begin(300, false), urgent = begin(600, true);
    file.hold_reads(false);
    for (const auto& batch : {held, ahead, urgent}) batch->wait();
    CHECK(file.begun() == std::vector<uint64_t>{block_of(0), block_of(600), block_of(300)});
  }
}

TEST_CASE("a read gets the record that lay there when it began, also if the extent is wanted again meanwhile") {
  for (const EngineKind engine : engines()) {
    auto owned = std::make_unique<FaultyFile>(folder());
    FaultyFile& file = *owned;
    Store store(config_of(engine, std::move(owned)));
    Dict dict(store, 1000, 8, 4 * 256);
    fill(dict, store);
    store.drain();
    const Place place = dict.place_of(10);
    const std::vector<uint8_t> before = dict.newest_payload(10);
    std::vector<uint8_t> bytes(before.size());
    file.hold_reads(true);
    dict.lock();
    const auto batch =
        store.read(dict.number, {{place, 10, bytes.data(), bytes.data() + dict.layout.first_bytes}}, true);
    dict.unlock();
    // Room for eight rounds; a ninth takes extents that were emptied, the oldest first. The extent that is read is
    // among them, so the writer goes around it, or waits.
    std::atomic<bool> is_done = false;
    std::thread writer([&] {
      for (const uint32_t rounds : {8, 1}) {
        store.reserve(dict.number, rounds * dict.num_slots());
        for (uint32_t put = 0; put < rounds * dict.num_slots(); put++) dict.put(put % dict.num_slots());
      }
      store.drain();
      is_done = true;
    });
    for (int i = 0; i < 100 && !is_done; i++) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    file.hold_reads(false);
    writer.join();
    CHECK_NOTHROW(batch->wait());
    CHECK(bytes == before);
    std::set<uint32_t> extents;
    for (int round = 0; round < 20 && !extents.contains(place.extent());
         round++) {  // its room may go to the disk first
      store.reserve(dict.number, 40 * dict.num_slots());
      for (uint32_t put = 0; put < 40 * dict.num_slots(); put++) {
        const uint32_t slot = put % dict.num_slots();
        dict.put(slot);
        extents.insert(dict.place_of(slot).extent());
      }
    }
    CHECK(extents.contains(place.extent()));  // it was free by then
    CHECK(dict.check_all().empty());
  }
}

TEST_CASE("a torn write does not show the records that lay there before") {
  for (const EngineKind engine : engines()) {
    auto owned = std::make_unique<FaultyFile>(folder());
    FaultyFile& file = *owned;
    Store store(config_of(engine, std::move(owned)));
    Dict dict(store, 1000, 8, RecordLayout(7, 1000, 8).per_extent);
    std::set<uint32_t> extents;
    const auto rewrite_all = [&] {  // one extent, each slot at the same place of it
      fill(dict, store);
      store.drain();
      return dict.place_of(0).extent();
    };
    for (int round = 0; round < 12; round++) extents.insert(rewrite_all());
    file.rate[FaultyFile::kTornWrite] = 1000;
    CHECK(extents.contains(rewrite_all()));
    const std::map<uint32_t, Place> refused = dict.check_all();
    CHECK_FALSE(refused.empty());
    for (const auto& [slot, place] : refused) CHECK(dict.is_touched(file, place));
  }
}

TEST_CASE("what is refused says what has happened to it") {
  const std::map<FaultyFile::Fault, std::string> reasons{{FaultyFile::kShortRead, ": short read of "},
                                                         {FaultyFile::kReadError, std::strerror(EIO)},
                                                         {FaultyFile::kFlippedRead, ": the checksum does not match"}};
  for (const EngineKind engine : engines()) {
    auto owned = std::make_unique<FaultyFile>(folder());
    FaultyFile& file = *owned;
    Store store(config_of(engine, std::move(owned)));
    Dict dict(store, 1000, 8, 4 * 256);
    fill(dict, store);
    store.drain();
    for (const auto& [fault, reason] : reasons) {
      std::vector<uint8_t> bytes(dict.num_slots() * 1008);
      std::vector<RecordRead> reads;
      for (uint32_t slot = 0; slot < dict.num_slots(); slot++)
        reads.push_back({dict.place_of(slot), slot, bytes.data() + slot * 1008, bytes.data() + slot * 1008 + 1000});
      file.rate[fault] = 1000;
      const auto batch = store.read(dict.number, reads, true);
      CHECK_THROWS_AS(batch->wait(), RecordLost);
      for (const RecordLost& lost : batch->lost()) CHECK(lost.message.find(reason) != std::string::npos);
      file.heal();
    }
  }
}

TEST_CASE("owners that leave take their records with them, and the room is used again") {
  Store store(config_of(EngineKind::kBest));
  Dict stays(store, 500, 8, 3000, 1, 1);
  fill(stays, store);
  uint64_t file_bytes = 0;
  for (int round = 0; round < 6; round++) {
    Dict leaves(store, 1000, 8, 10 * 256, 3, 2);
    fill(leaves, store);
    Draw draw(static_cast<uint64_t>(round));
    for (int i = 0; i < 4000; i++) leaves.rewrite(static_cast<uint32_t>(draw.below(leaves.num_slots())));
    store.reserve(leaves.number, 1);
    CHECK(leaves.check_all().empty());
    leaves.leave();
    if (round == 2) file_bytes = store.stats().file_bytes;
  }
  CHECK(store.stats().file_bytes <= file_bytes + 4 * kExtentBytes);
  CHECK(store.stats().live_bytes == uint64_t{stays.num_slots()} * stays.layout.record_bytes());
  CHECK(stays.check_all().empty());
}

TEST_CASE("room that records leave goes back to the disk, and comes back where it has room") {
  for (const EngineKind engine : engines()) {
    auto owned = std::make_unique<FaultyFile>(folder());
    FaultyFile& file = *owned;
    Store store(config_of(engine, std::move(owned)));
    Dict dict(store, 1000, 8, 80 * 256);
    const auto taken = [&] {
      struct stat now;
      REQUIRE(fstat(file.descriptor(), &now) == 0);
      return static_cast<uint64_t>(now.st_blocks) * 512;
    };
    for (int round = 0; round < 3; round++) {
      fill(dict, store);
      store.drain();
      const uint64_t whole = store.stats().file_bytes;
      CHECK(taken() >= whole);
      for (uint32_t slot = 0; slot < dict.num_slots(); slot++)
        if (slot % 256 > static_cast<uint32_t>(round)) dict.free(slot);  // some records of each extent stay
      store.drain();
      for (int i = 0; i < 10000 && store.stats().file_bytes > whole / 2; i++)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      CHECK(store.stats().file_bytes < whole / 2);
      CHECK(taken() <= store.stats().file_bytes + kExtentBytes);
      CHECK(dict.check_all().empty());
      if (round > 0) continue;
      file.most_bytes = 0;  // something else took the room
      CHECK_THROWS_AS(store.reserve(dict.number, dict.num_slots()), StorageFull);
      CHECK(dict.check_all().empty());
      file.most_bytes = UINT64_MAX;
    }
  }
}

TEST_CASE("a span whose records all go before its turn is not compacted") {
  auto owned = std::make_unique<FaultyFile>(folder());
  FaultyFile& file = *owned;
  Store store(config_of(EngineKind::kThreads, std::move(owned)));
  Dict dict(store, 1000, 8, 40 * 256, 2);
  fill(dict, store);
  store.drain();
  file.hold_next_read();  // of compaction
  for (uint32_t slot = 0; slot < dict.num_slots(); slot += 2)
    if (slot % 8 != 0) dict.free(slot);
  file.wait_for_held_read();
  for (uint32_t slot = 1; slot < dict.num_slots(); slot += 2) dict.free(slot);
  file.hold_reads(false);
  store.drain();
  CHECK(dict.check_all().empty());
}

TEST_CASE("reads may outlive their store, which waits for them") {
  for (const EngineKind engine : engines()) {
    auto store = std::make_unique<Store>(config_of(engine));
    Dict dict(*store, 1000, 8, 1000);
    fill(dict, *store);
    store->drain();
    std::vector<uint8_t> bytes(1008);
    const Place place = dict.place_of(500);
    const auto batch = store->read(dict.number, {{place, 500, bytes.data(), bytes.data() + 1000}}, true);
    store.reset();
    dict.outlive();
    CHECK(bytes == dict.newest_payload(500));
    batch->wait();
  }
}

TEST_CASE("threads read while others put, and while compaction moves what they read") {
  for (const EngineKind engine : engines()) {
    Store store(config_of(engine));
    Dict dict(store, 1000, 8, 12 * 256);  // slots below half of them are rewritten, the others read
    fill(dict, store);
    const uint32_t half = dict.num_slots() / 2;
    std::atomic<bool> ends{false};
    std::vector<std::thread> readers;
    std::atomic<uint64_t> num_refused{0};
    for (uint64_t seed : {1u, 2u})
      readers.emplace_back([&, seed] {
        for (Draw draw(seed); !ends;) {
          std::vector<uint32_t> slots;
          for (int i = 0; i < 30; i++) slots.push_back(half + static_cast<uint32_t>(draw.below(half)));
          num_refused += dict.check(slots).size();
        }
      });
    Draw draw(9);
    for (int i = 0; i < 20000; i++) dict.rewrite(static_cast<uint32_t>(draw.below(half)));
    ends = true;
    for (std::thread& reader : readers) reader.join();
    CHECK(num_refused == 0);
    CHECK(store.stats().num_compacted > 0);
    CHECK(dict.check_all().empty());
  }
}

namespace {

class EndlessFile : public File {
 public:
  EndlessFile() : File(folder()) {}
  int allocate(uint64_t, uint64_t) override { return 0; }
};

}  // namespace

TEST_CASE("the bookkeeping of a terabyte takes at most 64 MB") {
  Store store(config_of(EngineKind::kThreads, std::make_unique<EndlessFile>()));
  Dict dict(store, 64, 4, 1);
  const uint64_t num_records = kExtentsATerabyte * dict.layout.per_extent;
  for (uint64_t i = 1; i < num_records >> 20; i++) store.add_span(dict.number);  // of a million rows each
  store.reserve(dict.number, num_records);
  CHECK(store.stats().file_bytes >= 999999000000);
  CHECK(store.stats().memory_bytes <= 64000000);
  CHECK(store.stats().memory_bytes >= kExtentsATerabyte * sizeof(Extent));
}

TEST_CASE("a file is gone with its store, and a folder that is missing is an error") {
  const std::string home = folder() + "/hotbed-test-" + std::to_string(getpid());
  std::filesystem::create_directory(home);
  {
    StoreConfig config;
    config.folder = home;
    Store store(std::move(config));
    CHECK(std::filesystem::is_empty(home));  // the file has no name
  }
  std::filesystem::remove(home);
  StoreConfig config;
  config.folder = home;
  CHECK_THROWS_AS(Store(std::move(config)), std::system_error);
}

#if !defined(__SANITIZE_THREAD__)  // the thread sanitizer cannot follow a threaded process through fork()

TEST_CASE("the child of a fork may use nothing of the store, and the parent loses nothing") {
  for (const EngineKind engine : engines()) {
    auto store = std::make_unique<Store>(config_of(engine));
    Dict dict(*store, 1000, 8, 3000);
    fill(dict, *store);
    const auto batch = store->read(dict.number, {}, true);
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // ends the child if it waits for a thread that it does not have
      int num_refused = 0;
      const auto refuses = [&num_refused](auto&& use) {
        try {
          use();
        } catch (const std::logic_error&) { num_refused++; }
      };
      refuses([&] { store->reserve(dict.number, 1); });
      refuses([&] { store->put(0, 0, nullptr, nullptr); });
      refuses([&] { store->free(Place::of(0, 0)); });
      refuses([&] { store->read(dict.number, {}, true); });
      refuses([&] { batch->wait(); });
      refuses([&] { store->drain(); });
      refuses([&] { store->stats(); });
      refuses([&] { store->remove_owner(dict.number); });
      store.reset();
      _exit(num_refused);
    }
    Draw draw(1);
    for (int i = 0; i < 3000; i++) dict.rewrite(static_cast<uint32_t>(draw.below(dict.num_slots())));
    CHECK(dict.check_all().empty());
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 8);
    for (int i = 0; i < 3000; i++) dict.rewrite(static_cast<uint32_t>(draw.below(dict.num_slots())));
    CHECK(dict.check_all().empty());
  }
}

#ifdef SYS_io_uring_setup  // not in headers of a kernel before 5.1

TEST_CASE("where the kernel forbids io_uring, threads read, and a child may have a store of its own") {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    sock_filter rules[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                           BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
                           BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                           BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    const sock_fprog program{4, rules};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) _exit(9);
    if (can_use_uring()) _exit(8);
    try {
      Store refused(config_of(EngineKind::kUring));
      _exit(7);
    } catch (const std::system_error&) {}
    Store store(config_of(EngineKind::kBest));
    Dict dict(store, 1000, 8, 1000);
    fill(dict, store);
    store.drain();
    _exit(dict.check_all().empty() && std::string(store.engine_name()) == "threads" ? 3 : 6);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 3);
}

#endif
#endif
