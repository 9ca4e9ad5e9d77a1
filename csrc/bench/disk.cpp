// SPDX-License-Identifier: Apache-2.0
// A disk, and the store on it, in one run: bench_disk FOLDER [--quick]. One JSON line each.
// read: random blocks of the store's own file by the bare engine, and random records through the store, in turn.
// rewrite: ten times the live bytes in random rewrites; the space and the bytes written that they take.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/disk_rate.h"
#include "core/store.h"

using namespace hotbed;

namespace {

constexpr uint32_t kPayload = 68;  // a row of dim 16 with a row-wise rule

struct Size {
  uint64_t read_bytes = uint64_t{2} << 30, rewrite_bytes = uint64_t{256} << 20;
  double seconds = 1;
  int rounds = 3, batch = 4096;
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double cpu_seconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * t.tv_usec; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Draw {
  uint64_t state;
  uint64_t below(uint64_t n) { return mix64(state += kGolden) % n; }
};

struct Rows : RecordOwner {
  Rows(Store& store, uint64_t live_bytes)
      : store(store), places(live_bytes / RecordLayout(1, kPayload, 0).record_bytes()) {
    owner = store.add_owner(*this, 1, kPayload, 0);
    span = store.add_span(owner);
    payload.resize(kPayload);
    for (size_t slot = 0; slot < places.size(); slot++) {
      reserve(slot);
      places[slot] = put(slot);
    }
    store.give_back(owner, UINT64_MAX);
  }
  void lock() override { mutex.lock(); }
  void unlock() override { mutex.unlock(); }
  bool lies_at(uint32_t slot, Place place) const override { return places[slot] == place; }
  void moved(uint32_t slot, Place, Place to) override { places[slot] = to; }

  void reserve(uint64_t done) {  // as a batch does
    if (done % 1024 == 0) store.reserve(owner, 1024);
  }
  Place put(uint64_t slot) {
    std::memcpy(payload.data(), &slot, sizeof slot);
    return store.put(span, static_cast<uint32_t>(slot), payload.data(), nullptr);
  }
  void rewrite(uint64_t slot) {
    const std::lock_guard guard(mutex);
    const Place before = places[slot];
    places[slot] = put(slot);
    store.free(before);
  }

  Store& store;
  std::vector<Place> places;
  std::vector<uint8_t> payload;
  std::mutex mutex;
  uint32_t owner, span;
};

struct Rate {
  double a_second, cpu_us;
};

Rate read_raw(File& file, EngineKind kind, int depth, uint64_t num_blocks, double seconds) {
  const double start = now(), cpu = cpu_seconds();
  const double count = static_cast<double>(read_random_blocks(file, kind, depth, num_blocks, seconds));
  return {count / (now() - start), (cpu_seconds() - cpu) / count * 1e6};
}

// Records, two batches ahead; hardly any two of a batch lie in one block.
Rate read_store(Rows& rows, const Size& size, Draw& draw) {
  struct Batch {
    std::vector<uint8_t> bytes;
    std::vector<uint32_t> slots;
    std::shared_ptr<ReadBatch> reads;
  };
  std::deque<Batch> batches;
  const auto end_first = [&] {
    Batch& batch = batches.front();
    batch.reads->wait();
    for (size_t i = 0; i < batch.slots.size(); i++)
      if (std::memcmp(batch.bytes.data() + i * kPayload, &batch.slots[i], 4) != 0) std::abort();
    batches.pop_front();
  };
  const uint64_t before = rows.store.stats().num_read;
  const double start = now(), cpu = cpu_seconds();
  while (now() - start < size.seconds) {
    Batch& batch = batches.emplace_back();
    batch.bytes.resize(static_cast<size_t>(size.batch) * kPayload);
    std::vector<RecordRead> reads;
    {
      const std::lock_guard guard(rows.mutex);
      for (int i = 0; i < size.batch; i++) {
        batch.slots.push_back(static_cast<uint32_t>(draw.below(rows.places.size())));
        uint8_t* const to = batch.bytes.data() + static_cast<size_t>(i) * kPayload;
        reads.push_back({rows.places[batch.slots.back()], batch.slots.back(), to, nullptr});
      }
      batch.reads = rows.store.read(rows.owner, std::move(reads), true);
    }
    if (batches.size() > 2) end_first();
  }
  while (!batches.empty()) end_first();
  const double count = static_cast<double>(rows.store.stats().num_read - before);  // of the disk
  return {count / (now() - start), (cpu_seconds() - cpu) / count * 1e6};
}

void reads(const std::string& folder, const Size& size, EngineKind kind, int depth) {
  StoreConfig config;
  config.engine = kind, config.depth = depth;
  config.file = std::make_unique<File>(folder);
  File& file = *config.file;
  Store store(std::move(config));
  const double start = now();
  Rows rows(store, size.read_bytes);
  store.drain();
  const double fill = static_cast<double>(store.stats().written_bytes) / (now() - start);
  const uint64_t num_blocks = store.stats().written_bytes / kBlockBytes;
  std::vector<double> raw, raw_cpu, through, through_cpu;
  Draw draw{1};
  for (int round = 0; round < size.rounds; round++) {
    const Rate bare = read_raw(file, kind, depth, num_blocks, size.seconds);
    raw.push_back(bare.a_second), raw_cpu.push_back(bare.cpu_us);
    const Rate records = read_store(rows, size, draw);
    through.push_back(records.a_second), through_cpu.push_back(records.cpu_us);
  }
  std::printf(
      "{\"what\": \"read\", \"engine\": \"%s\", \"direct\": %s, \"depth\": %d, \"raw_blocks_a_second\": %.0f, "
      "\"store_blocks_a_second\": %.0f, \"ratio\": %.3f, \"raw_cpu_us\": %.2f, \"store_cpu_us\": %.2f, "
      "\"raw_spread\": [%.0f, %.0f], \"fill_bytes_a_second\": %.3g}\n",
      store.engine_name(), file.is_direct() ? "true" : "false", depth, median(raw), median(through),
      median(through) / median(raw), median(raw_cpu), median(through_cpu), *std::min_element(raw.begin(), raw.end()),
      *std::max_element(raw.begin(), raw.end()), fill);
  std::fflush(stdout);
}

// Uniform, or nine of ten rewrites in a tenth of the slots.
void rewrites(const std::string& folder, const Size& size, bool skewed) {
  StoreConfig config;
  config.folder = folder;
  Store store(std::move(config));
  Rows rows(store, size.rewrite_bytes);
  store.drain();
  const StoreStats before = store.stats();
  const uint64_t num_rows = rows.places.size();
  Draw draw{2};
  double most = 0, sum = 0;
  int samples = 0;
  const double start = now(), cpu = cpu_seconds();
  for (uint64_t i = 0; i < 10 * num_rows; i++) {
    rows.reserve(i);
    const bool is_hot = skewed && draw.below(10) > 0;
    rows.rewrite(draw.below(is_hot ? num_rows / 10 : num_rows));
    if (i % (num_rows / 20) != 0) continue;
    const StoreStats stats = store.stats();
    const double space = static_cast<double>(stats.file_bytes) / static_cast<double>(stats.live_bytes);
    most = std::max(most, space), sum += space, samples++;
  }
  store.give_back(rows.owner, UINT64_MAX);
  store.drain();
  const double seconds = now() - start;
  const StoreStats stats = store.stats();
  const double put = static_cast<double>(stats.put_bytes - before.put_bytes);
  const double written = static_cast<double>(stats.written_bytes - before.written_bytes);
  std::printf(
      "{\"what\": \"rewrite\", \"slots\": \"%s\", \"live_bytes\": %.4g, \"put_bytes\": %.4g, \"written_bytes\": %.4g, "
      "\"written_a_byte\": %.3f, \"space_mean\": %.3f, \"space_most\": %.3f, \"put_bytes_a_second\": %.3g, "
      "\"cpu_us_a_put\": %.3f, \"memory_bytes\": %.3g}\n",
      skewed ? "90 % in a tenth" : "uniform", static_cast<double>(stats.live_bytes), put, written, written / put,
      sum / samples, most, put / seconds, (cpu_seconds() - cpu) / static_cast<double>(10 * num_rows) * 1e6,
      static_cast<double>(stats.memory_bytes));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  Size size;
  std::string folder;
  for (int i = 1; i < argc; i++) {
    if (std::strcmp(argv[i], "--quick") == 0)
      size.read_bytes = 16 << 20, size.rewrite_bytes = 32 << 20, size.seconds = 0.1, size.rounds = 1;
    else folder = argv[i];
  }
  if (folder.empty()) return std::fprintf(stderr, "bench_disk FOLDER [--quick]: name a folder on the disk\n"), 2;
  for (const int depth : {32, 128}) {
    reads(folder, size, EngineKind::kThreads, depth);
    if (can_use_uring()) reads(folder, size, EngineKind::kUring, depth);
    else std::printf("{\"what\": \"read\", \"engine\": \"io_uring\", \"allowed\": false}\n");
  }
  for (const bool skewed : {false, true}) rewrites(folder, size, skewed);
}
