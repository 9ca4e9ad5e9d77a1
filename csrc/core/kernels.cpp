// SPDX-License-Identifier: Apache-2.0
// Compiled once per instruction set (HOTBED_ISA names the namespace). Nothing here may be inline code shared with other
// files: a copy compiled for a newer processor must never be the one that the linker keeps.
#include "kernels.h"

#include <math.h>
#include <string.h>

#include "hash.h"
#include "rules.h"

#ifndef HOTBED_ISA
#define HOTBED_ISA baseline
#endif

namespace hotbed::HOTBED_ISA {
namespace {

inline void copy_row(float* __restrict out, const float* __restrict row, int dim) {
  memcpy(out, row, sizeof(float) * dim);
}
inline void add_row(float* __restrict out, const float* __restrict row, int dim) {
  for (int d = 0; d < dim; d++) out[d] += row[d];
}
inline void add_scaled(float* __restrict out, const float* __restrict row, float scale, int dim) {
  for (int d = 0; d < dim; d++) out[d] += row[d] * scale;
}

template <int kDim>
void pool_single(const Bags& bags, const float* const* rows, float* out, int64_t step, int dim, int64_t first,
                 int64_t last) {
  const int n = kDim ? kDim : dim;
  for (int64_t i = first; i < last; i++) {
    if (i + 8 < last) {
      const char* ahead = reinterpret_cast<const char*>(rows[bags.inverse[i + 8]]);
      __builtin_prefetch(ahead);
      if (n > 16) __builtin_prefetch(ahead + 64);
      __builtin_prefetch(out + (i + 8) * step, 1);
    }
    copy_row(out + i * step, rows[bags.inverse[i]], n);
  }
}

void max_row(float* out, const float* row, int dim) {
  for (int d = 0; d < dim; d++) out[d] = row[d] > out[d] ? row[d] : out[d];
}

void pool(const Bags& bags, const float* const* rows, float* out, int64_t step, int dim, int64_t first, int64_t last) {
  if (!bags.offsets && !bags.weights) {
    if (dim == 16) return pool_single<16>(bags, rows, out, step, dim, first, last);
    return pool_single<0>(bags, rows, out, step, dim, first, last);
  }
  for (int64_t i = first; i < last; i++) {
    const int64_t begin = bags.offsets ? bags.offsets[i] : i, end = bags.offsets ? bags.offsets[i + 1] : i + 1;
    float* to = out + i * step;
    if (bags.pooling == Pooling::kMax && begin < end) {
      copy_row(to, rows[bags.inverse[begin]], dim);
      for (int64_t p = begin + 1; p < end; p++) max_row(to, rows[bags.inverse[p]], dim);
      continue;
    }
    for (int d = 0; d < dim; d++) to[d] = 0.0f;
    for (int64_t p = begin; p < end; p++) {
      if (bags.weights) add_scaled(to, rows[bags.inverse[p]], bags.weights[p], dim);
      else add_row(to, rows[bags.inverse[p]], dim);
    }
    if (bags.pooling == Pooling::kMean && end > begin) {
      const float scale = 1.0f / static_cast<float>(end - begin);
      for (int d = 0; d < dim; d++) to[d] *= scale;
    }
  }
}

// The gradient of a lane of a max goes to the first position that holds the maximum, as in torch.
void accumulate_max(const Bags& bags, const float* const* rows, const float* grad, int64_t begin, int64_t end,
                    float* acc, int dim, uint32_t low, uint32_t high) {
  for (int d = 0; d < dim; d++) {
    int64_t best = begin;
    for (int64_t p = begin + 1; p < end; p++)
      if (rows[bags.inverse[p]][d] > rows[bags.inverse[best]][d]) best = p;
    const uint32_t u = bags.inverse[best];
    if (u >= low && u < high) acc[static_cast<int64_t>(u) * dim + d] += grad[d];
  }
}

template <int kDim>
void accumulate_single(const Bags& bags, const float* grad, int64_t step, float* acc, int dim, uint32_t low,
                       uint32_t high) {
  const int n = kDim ? kDim : dim;
  for (int64_t i = 0; i < bags.num_samples; i++) {
    __builtin_prefetch(grad + (i + 16) * step);
    const uint32_t u = bags.inverse[i];
    if (u - low < high - low) add_row(acc + static_cast<int64_t>(u) * n, grad + i * step, n);
  }
}

void accumulate(const Bags& bags, const float* const* rows, const float* grad, int64_t step, float* acc, int dim,
                uint32_t low, uint32_t high) {
  if (!bags.offsets && !bags.weights) {
    if (dim == 16) return accumulate_single<16>(bags, grad, step, acc, dim, low, high);
    return accumulate_single<0>(bags, grad, step, acc, dim, low, high);
  }
  for (int64_t i = 0; i < bags.num_samples; i++) {
    const int64_t begin = bags.offsets ? bags.offsets[i] : i, end = bags.offsets ? bags.offsets[i + 1] : i + 1;
    const float* from = grad + i * step;
    if (bags.pooling == Pooling::kMax) {
      if (begin < end) accumulate_max(bags, rows, from, begin, end, acc, dim, low, high);
      continue;
    }
    const float mean = bags.pooling == Pooling::kMean && end > begin ? 1.0f / static_cast<float>(end - begin) : 1.0f;
    for (int64_t p = begin; p < end; p++) {
      const uint32_t u = bags.inverse[p];
      if (u - low >= high - low) continue;
      const float scale = bags.weights ? bags.weights[p] * mean : mean;
      add_scaled(acc + static_cast<int64_t>(u) * dim, from, scale, dim);
    }
  }
}

inline float larger(float a, float b) { return a > b ? a : b; }

float largest_of(const float* values, int64_t n) {
  float lane[kLanes];
  for (float& largest : lane) largest = values[0];
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes)
    for (int l = 0; l < kLanes; l++) lane[l] = larger(values[k + l], lane[l]);
  for (; k < n; k++) lane[0] = larger(values[k], lane[0]);
  for (int l = 1; l < kLanes; l++) lane[0] = larger(lane[l], lane[0]);
  return lane[0];
}

// e^x for x <= 0, within 2 units of the last place down to -87, and e^-87 below: 2^whole * e^rest, where |rest| is at
// most ln(2) / 2 (the polynomial of Cephes' expf). A call of the library would not be the same on all processors.
inline float exp_below(float x) {
  constexpr float kToWhole = 12582912.0f;  // 1.5 * 2^23: the last bits of a sum with it are a whole number
  x = x < -87.0f ? -87.0f : x;
  const float shifted = x * 1.44269504f + kToWhole;
  const float whole = shifted - kToWhole;
  const float rest = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  float sum = 1.9875691500e-4f;
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * (rest * rest) + rest + 1.0f;
  uint32_t bits;
  memcpy(&bits, &shifted, 4);
  bits = (bits + 127) << 23;
  float power;
  memcpy(&power, &bits, 4);
  return sum * power;
}

// Replaces scores by e^(score - largest); returns their sum.
float exponentials(float* scores, int64_t n) {
  const float largest = largest_of(scores, n);
  float lane[kLanes] = {};
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes)
    for (int l = 0; l < kLanes; l++) {
      scores[k + l] = exp_below(scores[k + l] - largest);
      lane[l] += scores[k + l];
    }
  for (int l = 0; k < n; k++, l++) {
    scores[k] = exp_below(scores[k] - largest);
    lane[l] += scores[k];
  }
  for (int half = kLanes / 2; half; half /= 2)
    for (int l = 0; l < half; l++) lane[l] += lane[l + half];
  return lane[0];
}

inline int64_t first_read(const PackedRows& history, int64_t sample) {
  const int64_t begin = history.offsets[sample], end = history.offsets[sample + 1];
  return end - begin > history.length ? end - history.length : begin;
}

template <int kDim>
void attend_rows(const PackedRows& history, const Attention& attention, int64_t first, int64_t last) {
  const int dim = kDim ? kDim : history.dim;
  for (int64_t i = first; i < last; i++) {
    const int64_t begin = first_read(history, i), n = history.offsets[i + 1] - begin;
    const float *query = attention.queries + i * dim, *rows = history.rows + begin * dim;
    float *weights = attention.weights + begin, *pooled = attention.pooled + i * dim;
    for (int64_t k = history.offsets[i]; k < begin; k++) attention.weights[k] = 0.0f;
    for (int d = 0; d < dim; d++) pooled[d] = 0.0f;
    if (n == 0) continue;
    for (int64_t k = 0; k < n; k++) weights[k] = dot(query, rows + k * dim, dim);
    const float scale = 1.0f / exponentials(weights, n);
    for (int64_t k = 0; k < n; k++) weights[k] *= scale;
    for (int64_t k = 0; k < n; k++) add_scaled(pooled, rows + k * dim, weights[k], dim);
  }
}

void attend(const PackedRows& history, const Attention& attention, int64_t first, int64_t last) {
  if (history.dim == 16) return attend_rows<16>(history, attention, first, last);
  return attend_rows<0>(history, attention, first, last);
}

template <int kDim>
void attend_rows_backward(const PackedRows& history, const Attention& attention, const AttentionGrads& grads,
                          int64_t first, int64_t last) {
  const int dim = kDim ? kDim : history.dim;
  for (int64_t i = first; i < last; i++) {
    const int64_t begin = first_read(history, i);
    const float *grad = grads.pooled + i * dim, *query = attention.queries + i * dim;
    float* query_grad = grads.queries + i * dim;
    memset(grads.rows + history.offsets[i] * dim, 0, sizeof(float) * (begin - history.offsets[i]) * dim);
    for (int d = 0; d < dim; d++) query_grad[d] = 0.0f;
    const float mean = dot(grad, attention.pooled + i * dim, dim);
    for (int64_t k = begin; k < history.offsets[i + 1]; k++) {
      const float* row = history.rows + k * dim;
      float* row_grad = grads.rows + k * dim;
      const float weight = attention.weights[k], score_grad = weight * (dot(grad, row, dim) - mean);
      for (int d = 0; d < dim; d++) row_grad[d] = weight * grad[d] + score_grad * query[d];
      add_scaled(query_grad, row, score_grad, dim);
    }
  }
}

void attend_backward(const PackedRows& history, const Attention& attention, const AttentionGrads& grads, int64_t first,
                     int64_t last) {
  if (history.dim == 16) return attend_rows_backward<16>(history, attention, grads, first, last);
  return attend_rows_backward<0>(history, attention, grads, first, last);
}

bool finite(const float* values, int64_t n) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, values + i, 4);
    bad |= static_cast<uint32_t>((bits & 0x7f800000u) == 0x7f800000u);
  }
  return bad == 0;
}

// Two numbers of 24 bits from each draw of 64 bits: its upper half, then its lower half.
void uniform(uint64_t key, float scale, float* out, int dim) {
  constexpr int kPairs = 8;
  for (int begin = 0; begin < dim; begin += 2 * kPairs) {
    uint64_t draws[kPairs];
    for (uint64_t pair = 0; pair < kPairs; pair++) {
      const uint64_t draw = mix64(key + (static_cast<uint64_t>(begin) / 2 + pair + 1) * kGolden);
      draws[pair] = draw >> 32 | draw << 32;
    }
    uint32_t words[2 * kPairs];
    memcpy(words, draws, sizeof(draws));
    float numbers[2 * kPairs];
    for (int i = 0; i < 2 * kPairs; i++) {
      const float unit = static_cast<float>(static_cast<int32_t>(words[i] >> 8)) * 0x1p-24f;
      numbers[i] = (unit + unit - 1.0f) * scale;
    }
    const int rest = dim - begin;
    if (rest >= 2 * kPairs) memcpy(out + begin, numbers, sizeof(numbers));
    else memcpy(out + begin, numbers, sizeof(float) * static_cast<size_t>(rest));
  }
}

inline float sign(float x) { return static_cast<float>(x > 0.0f) - static_cast<float>(x < 0.0f); }

template <class R, int kDim>
void update_plain(const R& rule, float* const* w, float* const* s, const float* grads, int64_t n, int dim) {
  const int width = kDim ? kDim : dim;
  const int value_bytes = 4 * width, state_bytes = 4 * state_width_of(R::kTraits, width);
  for (int64_t i = 0; i < n; i++) {
    if (i + 8 < n) {
      const char *values = reinterpret_cast<const char*>(w[i + 8]), *state = reinterpret_cast<const char*>(s[i + 8]);
      for (int line = 0; line < value_bytes; line += 64) __builtin_prefetch(values + line, 1);
      for (int line = 0; line < state_bytes; line += 64) __builtin_prefetch(state + line, 1);
    }
    rule.apply(w[i], s[i], grads + i * width, width);
  }
}

// Scales a row's gradient down to the norm `clip`. Where the squares overflow, lanes are taken as parts of the largest.
inline void clip_norm(float* g, float clip, int dim) {
  float norm = sqrtf(sum_of_squares(g, dim)), largest = kLargest;
  if (norm > kLargest) {
    largest = 0.0f;
    for (int d = 0; d < dim; d++) largest = fabsf(g[d]) > largest ? fabsf(g[d]) : largest;
    for (int d = 0; d < dim; d++) g[d] /= largest;
    norm = sqrtf(sum_of_squares(g, dim));
  } else if (norm <= clip) {
    return;
  }
  const float ratio = clip / norm, scale = ratio < largest ? ratio : largest;
  for (int d = 0; d < dim; d++) g[d] *= scale;
}

// With clipping, coupled l1/l2 or no gradient at all, the effective gradient is formed in `buffer` first.
template <class R>
void update_general(const R& rule, const RuleStep& r, float* const* w, float* const* s, const float* grads, int64_t n,
                    int dim, float* buffer) {
  for (int64_t i = 0; i < n; i++) {
    if (grads) memcpy(buffer, grads + i * dim, sizeof(float) * dim);
    else memset(buffer, 0, sizeof(float) * dim);
    if (r.clip > 0.0f) clip_norm(buffer, r.clip, dim);
    if (r.l2 != 0.0f)
      for (int d = 0; d < dim; d++) buffer[d] += r.l2 * w[i][d];
    if (r.l1 != 0.0f)
      for (int d = 0; d < dim; d++) buffer[d] += r.l1 * sign(w[i][d]);
    rule.apply(w[i], s[i], buffer, dim);
  }
}

template <class R>
void update_rule(const RuleStep& r, float* const* w, float* const* s, const float* grads, int64_t n, int dim) {
  const R& rule = *reinterpret_cast<const R*>(r.constants);  // rule_step has put one there
  const bool coupled = r.l1 != 0.0f || r.l2 != 0.0f;
  if (!grads || coupled || r.clip > 0.0f) {
    float stack[256];
    float* buffer = dim <= 256 ? stack : new float[static_cast<size_t>(dim)];
    update_general(rule, r, w, s, grads, n, dim, buffer);
    if (buffer != stack) delete[] buffer;
  } else if (dim == 16) {
    update_plain<R, 16>(rule, w, s, grads, n, dim);
  } else {
    update_plain<R, 0>(rule, w, s, grads, n, dim);
  }
}

using Update = void (*)(const RuleStep&, float* const* w, float* const* s, const float* grads, int64_t n, int dim);

template <class... Rules>
Update update_of(RuleList<Rules...>, int kind) {
  static constexpr Update kUpdates[] = {update_rule<Rules>...};
  return kUpdates[kind];
}

void update(const RuleStep& r, float* const* w, float* const* s, const float* grads, int64_t n, int dim) {
  update_of(AllRules{}, r.kind)(r, w, s, grads, n, dim);
}

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels{pool, accumulate, attend, attend_backward, finite, uniform, update};

}  // namespace hotbed::HOTBED_ISA
