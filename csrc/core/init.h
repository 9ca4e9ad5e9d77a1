// SPDX-License-Identifier: Apache-2.0
// The initial row: a pure function of (seed, hash of the table's name, id). Pinned by golden files.
#pragma once

#include <cstdint>

namespace hotbed {

enum class InitKind : uint8_t { kUniform, kNormal, kConstant };

struct Init {
  InitKind kind = InitKind::kUniform;
  double scale = 0.05;  // half-width, standard deviation, or the constant
};

// Natural and binary logarithm, and 2^x, from arithmetic alone: the same bits on every libm.
double exact_log(double x) noexcept;
double exact_exp2(double x) noexcept;
// log2(2^a + 2^b): occurrences aged by a half-life are summed in the logarithm, where ageing is the same shift for all.
double log2_sum(double a, double b) noexcept;

void initial_row(const Init& init, uint64_t table_key, int64_t id, float* out, int dim) noexcept;

// Occurrence `count` (1-based) of an id draws this number in [0, 1) (admission by probability).
double occurrence_draw(uint64_t table_key, int64_t id, uint64_t count) noexcept;

}  // namespace hotbed
