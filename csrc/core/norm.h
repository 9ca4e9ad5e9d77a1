// SPDX-License-Identifier: Apache-2.0
// Samples of varying length, as HugeCTR's Norm files hold them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hotbed {

// A sample: `num_floats` floats, then for each slot an int32 count and that number of keys. With `checksum`, an int32
// length stands before it and the sum of its bytes after it. All numbers are little-endian and not aligned.
struct NormLayout {
  std::size_t num_floats;
  std::vector<bool> wanted;  // by slot: whether its keys are returned
  int key_bytes;             // 4 (unsigned) or 8
  bool checksum;
};

struct NormSlot {
  std::vector<std::int32_t> offsets;  // [good samples + 1]
  std::vector<std::int64_t> keys;
};

struct NormBlock {
  std::size_t bytes = 0;                // of the samples that were read, good and bad
  std::vector<std::int64_t> good;       // their numbers among the samples that were read
  std::vector<std::int64_t> wrong_sum;  // samples whose checksum is another one
  std::vector<std::int64_t> misshapen;  // samples whose length is not that of their slots
  bool lost = false;                    // the sample after them has an impossible length: nothing can be read after it
  std::vector<float> floats;            // [good samples, num_floats]
  std::vector<NormSlot> slots;          // by slot, empty for slots that are not wanted

  std::size_t num_samples() const noexcept { return good.size() + wrong_sum.size() + misshapen.size(); }
};

// Reads at most `max_samples` of the whole samples that `data` begins with.
NormBlock read_norm(const std::uint8_t* data, std::size_t size, const NormLayout& layout, std::size_t max_samples);

}  // namespace hotbed
