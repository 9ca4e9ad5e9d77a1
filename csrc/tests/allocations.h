// SPDX-License-Identifier: Apache-2.0
// Memory that is short on purpose.
#pragma once

#include <atomic>
#include <cstddef>

extern std::atomic<size_t> refused_bytes;  // allocations of this size and above throw std::bad_alloc
