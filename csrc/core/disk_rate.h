// SPDX-License-Identifier: Apache-2.0
// How fast a disk is, by the engines that tables use.
#pragma once

#include <cstdint>

#include "disk_io.h"

namespace hotbed {

// Writes to the first `bytes` of a file what no disk can compress, from `offset` on. Throws std::system_error.
void fill_blocks(File& file, uint64_t offset, uint64_t bytes);
// Reads random blocks among the first `num_blocks` for so long, and returns their number. Throws std::system_error.
uint64_t read_random_blocks(File& file, EngineKind kind, int depth, uint64_t num_blocks, double seconds);
// Writes a random block and waits until the disk has it; returns the seconds. Throws std::system_error.
double sync_block(File& file, uint64_t num_blocks);

}  // namespace hotbed
