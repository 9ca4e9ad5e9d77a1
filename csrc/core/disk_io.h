// SPDX-License-Identifier: Apache-2.0
// A scratch file on a local disk, and engines that read many blocks of it at once: io_uring where the kernel allows it,
// threads with pread elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace hotbed {

inline constexpr uint32_t kBlockBytes = 4096;         // what a disk reads at once
inline constexpr uint32_t kMostReadBytes = 64 << 10;  // of one read of an engine

// Blocks in memory, aligned as O_DIRECT wants them. The child of a fork does not have them: a disk that writes to
// memory while a process forks may otherwise write to the child's copy (open(2), NOTES).
struct UnmapBlocks {
  size_t bytes;
  void operator()(uint8_t* blocks) const noexcept;
};
using Blocks = std::unique_ptr<uint8_t[], UnmapBlocks>;
Blocks allocate_blocks(size_t bytes);

// A file without a name: its bytes are gone with the process that made it, however that ends. Virtual, so that tests
// can let a disk fail.
class File {
 public:
  // In `folder`. Reads and writes pass by the page cache where the file system can (O_DIRECT), if `direct`.
  explicit File(const std::string& folder, bool direct = true);
  virtual ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // The bytes read or written, or -errno.
  virtual int64_t read(uint8_t* to, size_t bytes, uint64_t offset);
  virtual int64_t write(const uint8_t* from, size_t bytes, uint64_t offset);
  // Gives the range its room on the disk, so that no later write to it finds the disk full. 0, or -errno.
  virtual int allocate(uint64_t offset, uint64_t bytes);
  // Gives the room of the range back to the disk. 0, or -errno: some file systems cannot.
  virtual int release(uint64_t offset, uint64_t bytes);
  // An engine that reads through the descriptor passes each result through here, with what was read.
  virtual int64_t arrived(uint8_t* /*bytes*/, size_t /*size*/, uint64_t /*offset*/, int64_t result) { return result; }

  int descriptor() const noexcept { return descriptor_; }
  bool is_direct() const noexcept { return direct_; }
  const std::string& path() const noexcept { return path_; }  // for messages
  uint64_t free_bytes() const noexcept;                       // of the file system

 private:
  int extend(uint64_t bytes);  // 0, or -errno

  std::string path_;
  int descriptor_ = -1;
  bool direct_ = false;
};

struct BlockRead {
  uint64_t offset;
  uint32_t bytes;
  uint32_t job;  // the source's own numbers
  void* batch;
};

// A source of blocks to read. Engines call it from their threads.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  virtual bool next(BlockRead& read) = 0;  // false: nothing now
  virtual bool wait() = 0;                 // until there may be something; false: never again
  // `result` as of File::read. The bytes lie there until this returns.
  virtual void arrived(const BlockRead& read, const uint8_t* bytes, int64_t result) noexcept = 0;
};

enum class EngineKind : uint8_t { kBest, kUring, kThreads };

// Reads what the source has, up to `depth` reads at once, until the source ends; the destructor waits for that.
class ReadEngine {
 public:
  virtual ~ReadEngine() = default;
  virtual const char* name() const noexcept = 0;
};

// Whether the kernel lets this process use io_uring; containers often forbid it.
bool can_use_uring() noexcept;
// kBest is io_uring where it can be used: it takes half the CPU time of threads. Depth 0 is 128 of io_uring, and 32
// threads. Throws std::system_error where kUring cannot be used.
std::unique_ptr<ReadEngine> make_engine(EngineKind kind, File& file, BlockSource& source, int depth);

}  // namespace hotbed
