// SPDX-License-Identifier: Apache-2.0
// Records on a local disk, for owners whose rows do not fit in memory. The disk is scratch: nothing is synced, logged
// or opened again, and the file goes with the process.
//
// Records of one span lie together in extents of 256 KiB. A new record goes to the open extent of its span, in memory,
// and a thread writes extents that are full. A record never changes: its owner puts a new one and frees the old one.
// Where more than a third of a span is dead, another thread compacts it: it moves the live records of the extents with
// the fewest, and asks the owner which these are.
//
// Locks. An owner has a mutex that guards where its records lie; the store locks it, as RecordOwner, and never while it
// holds its own. `put`, `free` and `read` are called with the owner's mutex held and never wait. `reserve`, `drain` and
// the destructor wait for compaction, so they are called without it.
//
// Reads are numbered. The extent of a freed record is used again when no read that began before is under way, so a
// read that was begun with a place gets its record, whatever happens to that place meanwhile.
//
// On some file systems a write may find no room although the file has been given it. Its bytes then wait in memory,
// where they can be read, and the next `reserve` has it tried again.
//
// The child of a fork may use nothing of the store: each call throws ForkedChild there.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "disk_io.h"
#include "extents.h"

namespace hotbed {

// The disk has no room for what a caller is about to put; nothing has changed. `error`: ENOSPC, EDQUOT or EFBIG.
struct StorageFull : std::exception {
  StorageFull(const std::string& path, uint64_t needed, uint64_t free, int error);
  const char* what() const noexcept override { return message.c_str(); }
  uint64_t needed_bytes, free_bytes;
  std::string message;
};

// A write has failed. All records stay readable, and the store takes no more.
struct StorageFailed : std::exception {
  explicit StorageFailed(std::string message) : message(std::move(message)) {}
  const char* what() const noexcept override { return message.c_str(); }
  std::string message;
};

// A record could not be read, or is not what was written.
struct RecordLost : std::exception {
  RecordLost(const std::string& path, Place place, uint32_t block, uint32_t slot, const std::string& reason);
  RecordLost(const RecordLost& lost, const std::string& table, int64_t id);  // whose row it is
  const char* what() const noexcept override { return message.c_str(); }
  Place place;
  uint32_t slot;
  std::string message;
};

// Lockable, with `std::lock_guard<RecordOwner>`. The store locks it on its thread that compacts, for 256 records at a
// time; `unlock` may give way to those who wait.
class RecordOwner {
 public:
  virtual ~RecordOwner() = default;
  virtual void lock() = 0;
  virtual void unlock() = 0;
  // Both with the mutex held. Whether the owner's record of the slot lies at that place.
  virtual bool lies_at(uint32_t slot, Place place) const = 0;
  // It lies at another place from now on; the old one is freed.
  virtual void moved(uint32_t slot, Place from, Place to) = 0;
};

struct RecordRead {
  Place place;
  uint32_t slot;
  void *first, *second;  // where the pieces of the payload go
};

// Reads under way. Lives as long as somebody holds it, also after the store.
class ReadBatch {
 public:
  virtual ~ReadBatch() = default;
  // Waits until the records are there. Throws the RecordLost of the lowest place; the pieces of lost records are not
  // written, all others are. May be called with the owner's mutex.
  virtual void wait() = 0;
  virtual bool is_done() const = 0;
  // Once it is done: the bytes that were read from the disk; the records lost, by place.
  virtual uint64_t num_bytes() const = 0;
  const std::vector<RecordLost>& lost() const noexcept { return lost_; }

 protected:
  std::vector<RecordLost> lost_;
};

struct StoreConfig {
  std::string folder;
  EngineKind engine = EngineKind::kBest;
  int depth = 0;  // reads at once; 0: 32 of threads, 128 of io_uring
  // Of tests: another file than one in `folder`.
  std::unique_ptr<File> file;
};

struct StoreStats {
  uint64_t file_bytes = 0;     // room taken on the disk
  uint64_t live_bytes = 0;     // of live records, with their heads
  uint64_t put_bytes = 0;      // handed in so far, likewise
  uint64_t written_bytes = 0;  // to the disk so far
  uint64_t num_read = 0;       // reads of the disk so far, without those of compaction
  uint64_t num_compacted = 0;  // extents so far
  uint32_t num_waiting = 0;    // extents in memory that wait to be written
  uint32_t num_damaged = 0;    // extents with live records that cannot be read
  uint64_t memory_bytes = 0;   // beside extents in memory
};

class Store {
 public:
  // Throws std::system_error.
  explicit Store(StoreConfig config);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // An owner's number. Its records have a payload of two pieces of these sizes; `key` tells owners apart in checksums.
  uint32_t add_owner(RecordOwner& owner, uint64_t key, uint32_t first_bytes, uint32_t second_bytes);
  // Forgets the owner and all its records, before it ends: until then compaction asks it. Without its mutex; no read of
  // them is under way.
  void remove_owner(uint32_t owner);
  uint32_t add_span(uint32_t owner);  // while nothing is reserved for the owner

  // Makes room for `count` more puts of the owner, whatever their spans: those puts do not fail. Waits where writes or
  // compaction are behind. Throws StorageFull or StorageFailed; then nothing has changed.
  void reserve(uint32_t owner, uint64_t count);
  // Gives back what was reserved and is not needed.
  void give_back(uint32_t owner, uint64_t count);

  Place put(uint32_t span, uint32_t slot, const void* first, const void* second);
  void free(Place place);
  // `urgent`: somebody waits for it, so it goes before reads that were begun ahead.
  std::shared_ptr<ReadBatch> read(uint32_t owner, std::vector<RecordRead> records, bool urgent);

  // Waits until all full extents are written and no span is to be compacted. Throws StorageFull or StorageFailed.
  void drain();
  StoreStats stats() const;
  bool is_foreign() const noexcept;  // in the child of a fork
  bool has_failed() const;           // and takes no more
  const char* engine_name() const noexcept;
  const std::string& path() const noexcept;

 private:
  struct State;
  State& state() const;

  std::shared_ptr<State> state_;
};

}  // namespace hotbed
