// SPDX-License-Identifier: Apache-2.0
// Pages for rows and index blocks. Large areas ask for huge pages: random access over gigabytes lives or dies by the
// TLB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace hotbed {

inline constexpr size_t kHugePage = size_t{2} << 20;

// Zeroed pages, aligned to 2 MiB. Throws std::bad_alloc.
void* map_pages(size_t bytes, bool huge);
void unmap_pages(void* pages, size_t bytes) noexcept;
// Turns already touched small pages into huge ones where the kernel can; no effect elsewhere.
void collapse_pages(void* pages, size_t bytes) noexcept;

// Gives memory that is free but still held by malloc back to the system, where malloc can (glibc); takes milliseconds.
void return_free_memory() noexcept;

// For vectors that are resized and then written: resizing leaves new elements unset.
template <class T>
struct Unset : std::allocator<T> {
  using std::allocator<T>::allocator;
  template <class U>
  struct rebind {
    using other = Unset<U>;
  };
  template <class U>
  void construct(U* at) noexcept {
    ::new (static_cast<void*>(at)) U;
  }
  template <class U, class... Arguments>
  void construct(U* at, Arguments&&... arguments) {
    ::new (static_cast<void*>(at)) U(std::forward<Arguments>(arguments)...);
  }
};
template <class T>
using Column = std::vector<T, Unset<T>>;

// 64-byte aligned blocks; their contents are undefined. Blocks share 4 MiB slabs; a slab goes back when its last block
// does, so that only blocks that die together may share one: partitions of a growing table are rebuilt in a fixed
// cycle, also those of its waiting ids, and what a snapshot keeps aside goes when it ends. Blocks of 1 MiB and more
// have pages of their own.
enum class BlockUse { kIndex, kSnapshot, kAdmission };
void* allocate_block(size_t bytes, BlockUse use);
void release_block(void* block, size_t bytes, BlockUse use) noexcept;

}  // namespace hotbed
