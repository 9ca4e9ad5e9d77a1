// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <pthread.h>
#include <sys/mman.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

namespace hotbed {
namespace {

constexpr size_t kSlab = size_t{4} << 20;
constexpr size_t kLargeBlock = kSlab / 4;

struct Slab {
  size_t used, live;
};

struct Slabs {  // of one use
  std::mutex mutex;
  Slab* open = nullptr;
  std::vector<Slab*> spare;  // a fresh page costs more than everything else in growing: dead slabs wait for reuse
};
constexpr size_t kMaxSpare = 16;
using SlabsByUse = std::array<Slabs, 3>;

// The child of a fork may find the lock held by a thread it does not have: it starts a state of its own.
std::atomic<SlabsByUse*> g_slabs{nullptr};

Slabs& slabs(BlockUse use) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { g_slabs.store(new SlabsByUse); });
  static_cast<void>(registered);
  SlabsByUse* known = g_slabs.load();
  if (!known) {
    SlabsByUse* fresh = new SlabsByUse;
    if (g_slabs.compare_exchange_strong(known, fresh)) known = fresh;
    else delete fresh;
  }
  return (*known)[static_cast<size_t>(use)];
}

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

void* map_aligned(size_t bytes, size_t align) {
  char* raw =
      static_cast<char*>(mmap(nullptr, bytes + align, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (raw == MAP_FAILED) throw std::bad_alloc();
  char* base = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(raw), align));
  if (base != raw) munmap(raw, static_cast<size_t>(base - raw));
  char *end = base + bytes, *raw_end = raw + bytes + align;
  if (end != raw_end) munmap(end, static_cast<size_t>(raw_end - end));
  return base;
}

void advise_huge([[maybe_unused]] void* pages, [[maybe_unused]] size_t bytes) {
#ifdef MADV_HUGEPAGE
  madvise(pages, bytes, MADV_HUGEPAGE);
#endif
}

}  // namespace

void* map_pages(size_t bytes, bool huge) {
  bytes = round_up(bytes, 4096);
  void* pages = map_aligned(bytes, kHugePage);
  if (huge) advise_huge(pages, bytes);
  return pages;
}

void unmap_pages(void* pages, size_t bytes) noexcept { munmap(pages, round_up(bytes, 4096)); }

void collapse_pages([[maybe_unused]] void* pages, [[maybe_unused]] size_t bytes) noexcept {
#ifdef MADV_HUGEPAGE
  madvise(pages, bytes, MADV_HUGEPAGE);
  constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1; older kernels answer EINVAL
  madvise(pages, bytes / kHugePage * kHugePage, kCollapse);
#endif
}

void return_free_memory() noexcept {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

void* allocate_block(size_t bytes, BlockUse use) {
  bytes = round_up(bytes, 64);
  if (bytes >= kLargeBlock) return map_pages(bytes, bytes >= kHugePage);
  Slabs& state = slabs(use);
  std::lock_guard lock(state.mutex);
  if (!state.open || state.open->used + bytes > kSlab) {
    if (state.open && state.open->live == 0) state.spare.push_back(state.open);
    if (state.spare.empty()) {
      state.open = static_cast<Slab*>(map_aligned(kSlab, kSlab));
      advise_huge(state.open, kSlab);
    } else {
      state.open = state.spare.back();
      state.spare.pop_back();
    }
    state.open->used = 64, state.open->live = 0;
  }
  void* block = reinterpret_cast<char*>(state.open) + state.open->used;
  state.open->used += bytes, state.open->live += bytes;
  return block;
}

void release_block(void* block, size_t bytes, BlockUse use) noexcept {
  if (!block) return;
  bytes = round_up(bytes, 64);
  if (bytes >= kLargeBlock) return unmap_pages(block, bytes);
  Slabs& state = slabs(use);
  std::lock_guard lock(state.mutex);
  Slab* slab = reinterpret_cast<Slab*>(reinterpret_cast<size_t>(block) / kSlab * kSlab);
  slab->live -= bytes;
  if (slab->live != 0 || slab == state.open) return;
  if (state.spare.size() < kMaxSpare) state.spare.push_back(slab);
  else munmap(slab, kSlab);
}

}  // namespace hotbed
