// SPDX-License-Identifier: Apache-2.0
// All of the binary allocates by these operators. No other file sees them, so that the compiler takes no allocation
// and its end apart.
#include "allocations.h"

#include <cstdint>
#include <cstdlib>
#include <new>

std::atomic<size_t> refused_bytes{SIZE_MAX};

void* operator new(size_t bytes) {
  void* memory = bytes < refused_bytes.load(std::memory_order_relaxed) ? std::malloc(bytes) : nullptr;
  if (!memory) throw std::bad_alloc();
  return memory;
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
