// SPDX-License-Identifier: Apache-2.0
// The inner loops over rows. kernels.cpp is compiled once per instruction set and one set is chosen at run time; lane
// order and operations are fixed in the source (no contraction, no reassociation), so every set gives the same bits.
#pragma once

#include <cstdint>

#include "rule.h"

namespace hotbed {

enum class Pooling : uint8_t { kSum, kMean, kMax, kNone };

// One feature of a batch: sample i owns positions offsets[i] .. offsets[i+1] (position i alone where offsets is null).
struct Bags {
  const uint32_t* inverse;  // [positions] -> unique id
  const int64_t* offsets;
  const float* weights;  // [positions], null = 1
  int64_t num_samples;
  Pooling pooling;
};

// Histories of samples: sample i has the rows offsets[i] .. offsets[i+1] of `dim` floats, oldest first, of which the
// newest `length` are read.
struct PackedRows {
  const float* rows;
  const int64_t* offsets;
  int64_t length;
  int dim;
};

// Attention of one query a sample over its history: weights = softmax(query . row), pooled = sum of weight * row. Rows
// that are not read have weight 0; a sample without rows gives zeros.
struct Attention {
  const float* queries;  // [samples, dim]
  float* weights;        // [rows]
  float* pooled;         // [samples, dim]
};

struct AttentionGrads {
  const float* pooled;  // of the result, [samples, dim]
  float* queries;       // [samples, dim]
  float* rows;          // [rows, dim]
};

struct Kernels {
  // out[sample] = pooled rows; `rows` maps a unique id to its fp32 row, `step` is the distance of output rows in
  // floats.
  void (*pool)(const Bags&, const float* const* rows, float* out, int64_t step, int dim, int64_t first, int64_t last);
  // acc[unique] += gradient of each position, in order; only for low <= unique < high. `rows` is read by max pooling.
  void (*accumulate)(const Bags&, const float* const* rows, const float* grad, int64_t step, float* acc, int dim,
                     uint32_t low, uint32_t high);
  // Fills the weights and results of samples first .. last.
  void (*attend)(const PackedRows&, const Attention&, int64_t first, int64_t last);
  // Fills the gradients of their queries and rows, from what `attend` filled.
  void (*attend_backward)(const PackedRows&, const Attention&, const AttentionGrads&, int64_t first, int64_t last);
  bool (*finite)(const float* values, int64_t n);
  // A row of numbers in [-scale, scale): a pure function of `key`.
  void (*uniform)(uint64_t key, float scale, float* out, int dim);
  // Applies one step to each of n rows (w[i], s[i]); grads has rows of `dim` floats, null = zero gradient.
  void (*update)(const RuleStep&, float* const* w, float* const* s, const float* grads, int64_t n, int dim);
};

const Kernels& kernels() noexcept;
// The name of the chosen set: "baseline", "avx2", "avx512".
const char* isa_name() noexcept;
// Forces a set by name (tests); false if this processor or build lacks it.
bool set_isa(const char* name) noexcept;

// bf16 / fp16 storage. Rounding adds `noise` (uniform bits) below the kept mantissa: stochastic rounding.
enum class Dtype : uint8_t { kFloat32, kBfloat16, kFloat16 };
float decode_half(Dtype, uint16_t bits) noexcept;
uint16_t encode_half(Dtype, float value, uint32_t noise) noexcept;
inline constexpr uint32_t kNearest = 0xffffffffu;  // as `noise`: round to nearest even instead

}  // namespace hotbed
