// SPDX-License-Identifier: Apache-2.0
// Compiled once per instruction set (HOTBED_ISA names the namespace). Nothing here may be inline code shared with other
// files: a copy compiled for a newer processor must never be the one that the linker keeps.
#include "kernels.h"

#include <math.h>
#include <string.h>

#ifndef HOTBED_ISA
#define HOTBED_ISA baseline
#endif

namespace hotbed::HOTBED_ISA {
namespace {

constexpr int kLanes = 16;
constexpr float kLargest = __FLT_MAX__;

// Optimizer state ends at the largest float: an infinite one would stop its lane for ever. The forms compile to one
// minimum and one maximum.
inline float below(float x) { return x < kLargest ? x : kLargest; }
inline float within(float x) { return below(x > -kLargest ? x : -kLargest); }

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
      __builtin_prefetch(ahead + 64);
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

bool finite(const float* values, int64_t n) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, values + i, 4);
    bad |= static_cast<uint32_t>((bits & 0x7f800000u) == 0x7f800000u);
  }
  return bad == 0;
}

// Sum of squares in sixteen fixed lanes, folded pairwise.
inline float sum_of_squares(const float* g, int dim) {
  float lane[kLanes] = {};
  int d = 0;
  for (; d + kLanes <= dim; d += kLanes)
    for (int l = 0; l < kLanes; l++) lane[l] += g[d + l] * g[d + l];
  for (int l = 0; d < dim; d++, l++) lane[l] += g[d] * g[d];
  for (int half = kLanes / 2; half; half /= 2)
    for (int l = 0; l < half; l++) lane[l] += lane[l + half];
  return lane[0];
}

inline float sign(float x) { return static_cast<float>(x > 0.0f) - static_cast<float>(x < 0.0f); }

template <RuleKind K>
inline void apply(const RuleStep& r, float* __restrict w, float* __restrict s, const float* __restrict g, int dim) {
  if constexpr (K == RuleKind::kSgd) {
    for (int d = 0; d < dim; d++) w[d] -= r.lr * g[d];
  } else if constexpr (K == RuleKind::kMomentum) {
    for (int d = 0; d < dim; d++) {
      s[d] = within(r.beta1 * s[d] + g[d]);
      w[d] -= r.lr * s[d];
    }
  } else if constexpr (K == RuleKind::kNesterov) {
    for (int d = 0; d < dim; d++) {
      s[d] = within(r.beta1 * s[d] + g[d]);
      w[d] -= r.lr * (g[d] + r.beta1 * s[d]);
    }
  } else if constexpr (K == RuleKind::kAdagrad) {
    for (int d = 0; d < dim; d++) {
      s[d] = below(s[d] + g[d] * g[d]);
      w[d] -= r.lr * g[d] / (sqrtf(s[d]) + r.eps);
    }
  } else if constexpr (K == RuleKind::kRowwiseAdagrad) {
    s[0] = below(s[0] + sum_of_squares(g, dim) / static_cast<float>(dim));
    const float rate = r.lr / (sqrtf(s[0]) + r.eps);
    for (int d = 0; d < dim; d++) w[d] -= rate * g[d];
  } else if constexpr (K == RuleKind::kRmsProp) {
    for (int d = 0; d < dim; d++) {
      s[d] = below(r.beta2 * s[d] + r.one_minus_beta2 * (g[d] * g[d]));
      w[d] -= r.lr * g[d] / (sqrtf(s[d]) + r.eps);
    }
  } else if constexpr (K == RuleKind::kAdam) {
    float* __restrict m = s, * __restrict v = s + dim;
    for (int d = 0; d < dim; d++) {
      const float kept = w[d] * r.keep;
      m[d] = within(r.beta1 * m[d] + r.one_minus_beta1 * g[d]);
      v[d] = below(r.beta2 * v[d] + r.one_minus_beta2 * (g[d] * g[d]));
      w[d] = kept - r.step_size * m[d] / (sqrtf(v[d]) / r.root_bias + r.eps);
    }
  } else {  // Ftrl: s = [n][z]; l1 and l2 are the proximal ones
    float* __restrict n = s, * __restrict z = s + dim;
    for (int d = 0; d < dim; d++) {
      const float grown = below(n[d] + g[d] * g[d]), root = sqrtf(grown);
      const float sigma = (root - sqrtf(n[d])) / r.lr;
      z[d] = within(z[d] + (g[d] - sigma * w[d]));
      n[d] = grown;
      const float shrunk = z[d] - copysignf(r.l1, z[d]);  // z = 0 falls under |z| <= l1
      const float moved = -shrunk / ((r.beta + root) / r.lr + r.l2);
      w[d] = fabsf(z[d]) <= r.l1 ? 0.0f : moved;
    }
  }
}

template <RuleKind K, int kDim>
void update_plain(const RuleStep& r, float* const* w, float* const* s, const float* grads, int64_t n, int dim) {
  const int width = kDim ? kDim : dim;
  // The state lies right behind the values, so one run of lines holds both.
  const int num_bytes = 4 * (width + (K == RuleKind::kSgd                            ? 0
                                      : K == RuleKind::kRowwiseAdagrad               ? 1
                                      : K == RuleKind::kAdam || K == RuleKind::kFtrl ? 2 * width
                                                                                     : width));
  for (int64_t i = 0; i < n; i++) {
    if (i + 8 < n) {
      const char* ahead = reinterpret_cast<const char*>(w[i + 8]);
      for (int line = 0; line < num_bytes; line += 64) __builtin_prefetch(ahead + line, 1);
    }
    apply<K>(r, w[i], s[i], grads + i * width, width);
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
template <RuleKind K>
void update_general(const RuleStep& r, float* const* w, float* const* s, const float* grads, int64_t n, int dim,
                    float* buffer) {
  for (int64_t i = 0; i < n; i++) {
    if (grads) memcpy(buffer, grads + i * dim, sizeof(float) * dim);
    else memset(buffer, 0, sizeof(float) * dim);
    if (r.clip > 0.0f) clip_norm(buffer, r.clip, dim);
    if constexpr (K != RuleKind::kFtrl) {
      if (r.l2 != 0.0f)
        for (int d = 0; d < dim; d++) buffer[d] += r.l2 * w[i][d];
      if (r.l1 != 0.0f)
        for (int d = 0; d < dim; d++) buffer[d] += r.l1 * sign(w[i][d]);
    }
    apply<K>(r, w[i], s[i], buffer, dim);
  }
}

template <RuleKind K>
void update_rule(const RuleStep& r, float* const* w, float* const* s, const float* grads, int64_t n, int dim) {
  const bool coupled = K != RuleKind::kFtrl && (r.l1 != 0.0f || r.l2 != 0.0f);
  if (!grads || coupled || r.clip > 0.0f) {
    float stack[256];
    float* buffer = dim <= 256 ? stack : new float[static_cast<size_t>(dim)];
    update_general<K>(r, w, s, grads, n, dim, buffer);
    if (buffer != stack) delete[] buffer;
  } else if (dim == 16) {
    update_plain<K, 16>(r, w, s, grads, n, dim);
  } else {
    update_plain<K, 0>(r, w, s, grads, n, dim);
  }
}

void update(const RuleStep& r, float* const* w, float* const* s, const float* grads, int64_t n, int dim) {
  switch (r.kind) {
    case RuleKind::kSgd: return update_rule<RuleKind::kSgd>(r, w, s, grads, n, dim);
    case RuleKind::kMomentum: return update_rule<RuleKind::kMomentum>(r, w, s, grads, n, dim);
    case RuleKind::kNesterov: return update_rule<RuleKind::kNesterov>(r, w, s, grads, n, dim);
    case RuleKind::kAdagrad: return update_rule<RuleKind::kAdagrad>(r, w, s, grads, n, dim);
    case RuleKind::kRowwiseAdagrad: return update_rule<RuleKind::kRowwiseAdagrad>(r, w, s, grads, n, dim);
    case RuleKind::kRmsProp: return update_rule<RuleKind::kRmsProp>(r, w, s, grads, n, dim);
    case RuleKind::kAdam: return update_rule<RuleKind::kAdam>(r, w, s, grads, n, dim);
    case RuleKind::kFtrl:
      if (r.lr == 0.0f) return;  // a schedule's zero: no step, rather than a division by zero
      return update_rule<RuleKind::kFtrl>(r, w, s, grads, n, dim);
  }
}

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels{pool, accumulate, finite, update};

}  // namespace hotbed::HOTBED_ISA
