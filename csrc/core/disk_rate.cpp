// SPDX-License-Identifier: Apache-2.0
#include "disk_rate.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>

#include "hash.h"

namespace hotbed {

namespace {

// A block at random for whoever asks, until `stop`.
class RandomBlocks : public BlockSource {
 public:
  explicit RandomBlocks(uint64_t num_blocks) : num_blocks_(num_blocks) {}
  bool next(BlockRead& read) override {
    if (stops_.load(std::memory_order_relaxed)) return false;
    thread_local uint64_t state = mix64(reinterpret_cast<uint64_t>(&state));
    read = {mix64(state += kGolden) % num_blocks_ * kBlockBytes, kBlockBytes, 0, nullptr};
    return true;
  }
  bool wait() override { return !stops_; }
  void arrived(const BlockRead&, const uint8_t*, int64_t result) noexcept override {
    if (result != kBlockBytes) error_ = result < 0 ? static_cast<int>(-result) : EIO, stops_ = true;
    count_.fetch_add(1, std::memory_order_relaxed);
  }
  void stop() { stops_ = true; }
  bool has_stopped() const { return stops_; }
  // When the engine has ended.
  uint64_t count() const {
    if (error_) throw std::system_error(error_, std::generic_category(), "cannot be read");
    return count_;
  }

 private:
  uint64_t num_blocks_;
  std::atomic<bool> stops_{false};
  std::atomic<uint64_t> count_{0};
  std::atomic<int> error_{0};
};

void write_all(File& file, const uint8_t* from, uint64_t bytes, uint64_t offset) {
  for (uint64_t done = 0; done < bytes;) {
    const int64_t n = file.write(from + done, bytes - done, offset + done);
    if (n <= 0)
      throw std::system_error(n < 0 ? static_cast<int>(-n) : EIO, std::generic_category(), "cannot be written");
    done += static_cast<uint64_t>(n);
  }
}

void fill_random(uint8_t* to, uint64_t bytes, uint64_t seed) {
  for (uint64_t at = 0; at < bytes; at += 8) {
    const uint64_t word = mix64(seed + at * kGolden);
    std::memcpy(to + at, &word, 8);
  }
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

void fill_blocks(File& file, uint64_t offset, uint64_t bytes) {
  constexpr uint64_t kPiece = 1 << 20;
  const Blocks piece = allocate_blocks(kPiece);
  for (uint64_t at = offset; at < offset + bytes; at += kPiece) {
    const uint64_t size = std::min(kPiece, offset + bytes - at);
    fill_random(piece.get(), size, at);
    write_all(file, piece.get(), size, at);
  }
}

uint64_t read_random_blocks(File& file, EngineKind kind, int depth, uint64_t num_blocks, double seconds) {
  RandomBlocks blocks(num_blocks);
  const double end = now() + seconds;
  {
    const auto engine = make_engine(kind, file, blocks, depth);
    while (now() < end && !blocks.has_stopped())
      std::this_thread::sleep_for(std::chrono::duration<double>(std::min(0.02, seconds)));
    blocks.stop();
  }
  return blocks.count();
}

double sync_block(File& file, uint64_t num_blocks) {
  const Blocks block = allocate_blocks(kBlockBytes);
  static std::atomic<uint64_t> state{0};
  const uint64_t draw = mix64(state += kGolden);
  fill_random(block.get(), kBlockBytes, draw);
  const double start = now();
  write_all(file, block.get(), kBlockBytes, draw % num_blocks * kBlockBytes);
#ifdef __linux__
  const int failed = fdatasync(file.descriptor());
#else
  const int failed = fsync(file.descriptor());
#endif
  if (failed) throw std::system_error(errno, std::generic_category(), "cannot be synced");
  return now() - start;
}

}  // namespace hotbed
