// SPDX-License-Identifier: Apache-2.0
// All of the binary allocates by these operators, and so does the C++ library, which must see them: the address
// sanitizer wants what it has allocated back. No other file defines them, so that the compiler takes no allocation and
// its end apart.
#include "allocations.h"

#include <cstdint>
#include <cstdlib>
#include <new>

#pragma GCC visibility push(default)

std::atomic<size_t> refused_bytes{SIZE_MAX};

void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return bytes < refused_bytes.load(std::memory_order_relaxed) ? std::malloc(bytes) : nullptr;
}

void* operator new(size_t bytes) {
  void* memory = operator new(bytes, std::nothrow);
  if (!memory) throw std::bad_alloc();
  return memory;
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

#pragma GCC visibility pop
