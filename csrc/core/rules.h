// SPDX-License-Identifier: Apache-2.0
// The rules: of each its traits, the constants of a step, and the step over one row. A new rule is a struct here and a
// place in `AllRules`; hotbed/embedding/rule.py holds its slow reference.
//
// Included by rule.cpp, and by kernels.cpp once per instruction set. Everything here is local to the file that includes
// it, and uses C functions only: see kernels.cpp.
//
// A struct has
//   kTraits     what a table needs to know (RuleTraits in rule.h),
//   of(...)     the constants of step number `step`, computed in double precision and rounded once,
//   apply(...)  one step over the values `w` and the state `s` of a row, in the order of the reference.
#pragma once

#include <math.h>

#include "rule.h"

namespace hotbed {
namespace {

constexpr int kLanes = 16;
constexpr float kLargest = __FLT_MAX__;

// Optimizer state ends at the largest float: an infinite one would stop its lane for ever. The forms compile to one
// minimum and one maximum.
inline float below(float x) { return x < kLargest ? x : kLargest; }
inline float within(float x) { return below(x > -kLargest ? x : -kLargest); }

// Sum of products in sixteen fixed lanes, folded pairwise.
inline float dot(const float* a, const float* b, int dim) {
  float lane[kLanes] = {};
  int d = 0;
  for (; d + kLanes <= dim; d += kLanes)
    for (int l = 0; l < kLanes; l++) lane[l] += a[d + l] * b[d + l];
  for (int l = 0; d < dim; d++, l++) lane[l] += a[d] * b[d];
  for (int half = kLanes / 2; half; half /= 2)
    for (int l = 0; l < half; l++) lane[l] += lane[l + half];
  return lane[0];
}
inline float sum_of_squares(const float* g, int dim) { return dot(g, g, dim); }

inline float rounded(double x) { return static_cast<float>(x); }

struct Sgd {
  static constexpr RuleTraits kTraits = {.name = "Sgd"};
  float lr;

  static Sgd of(const Rule&, double lr, uint64_t) { return {rounded(lr)}; }
  void apply(float* __restrict w, float*, const float* __restrict g, int dim) const {
    for (int d = 0; d < dim; d++) w[d] -= lr * g[d];
  }
};

struct Momentum {
  static constexpr RuleTraits kTraits = {
      .name = "Momentum", .parameters = {"momentum", "lr_inside"}, .num_accumulators = 1};
  float inside, after, momentum;  // the learning rate is the first or the second, the other is 1

  static Momentum of(const Rule& rule, double lr, uint64_t) {
    const bool lr_inside = rule.parameters[1] != 0.0;
    return {rounded(lr_inside ? lr : 1.0), rounded(lr_inside ? 1.0 : lr), rounded(rule.parameters[0])};
  }
  void apply(float* __restrict w, float* __restrict s, const float* __restrict g, int dim) const {
    for (int d = 0; d < dim; d++) {
      s[d] = within(momentum * s[d] + inside * g[d]);
      w[d] -= after * s[d];
    }
  }
};

struct Nesterov {
  static constexpr RuleTraits kTraits = {
      .name = "Nesterov", .parameters = {"momentum", "lr_inside"}, .num_accumulators = 1};
  float inside, after, momentum;  // the learning rate is the first or the second, the other is 1

  static Nesterov of(const Rule& rule, double lr, uint64_t) {
    const bool lr_inside = rule.parameters[1] != 0.0;
    return {rounded(lr_inside ? lr : 1.0), rounded(lr_inside ? 1.0 : lr), rounded(rule.parameters[0])};
  }
  void apply(float* __restrict w, float* __restrict s, const float* __restrict g, int dim) const {
    for (int d = 0; d < dim; d++) {
      s[d] = within(momentum * s[d] + inside * g[d]);
      w[d] -= after * (inside * g[d] + momentum * s[d]);
    }
  }
};

struct Adagrad {
  static constexpr RuleTraits kTraits = {
      .name = "Adagrad", .parameters = {"eps", "initial_accumulator"}, .num_accumulators = 1};
  float lr, eps;

  static Adagrad of(const Rule& rule, double lr, uint64_t) { return {rounded(lr), rounded(rule.parameters[0])}; }
  void apply(float* __restrict w, float* __restrict s, const float* __restrict g, int dim) const {
    for (int d = 0; d < dim; d++) {
      s[d] = below(s[d] + g[d] * g[d]);
      w[d] -= lr * g[d] / (sqrtf(s[d]) + eps);
    }
  }
};

struct RowwiseAdagrad {
  static constexpr RuleTraits kTraits = {
      .name = "RowwiseAdagrad", .parameters = {"eps", "initial_accumulator"}, .num_accumulators = 1, .rowwise = true};
  float lr, eps;

  static RowwiseAdagrad of(const Rule& rule, double lr, uint64_t) { return {rounded(lr), rounded(rule.parameters[0])}; }
  void apply(float* __restrict w, float* __restrict s, const float* __restrict g, int dim) const {
    s[0] = below(s[0] + sum_of_squares(g, dim) / static_cast<float>(dim));
    const float rate = lr / (sqrtf(s[0]) + eps);
    for (int d = 0; d < dim; d++) w[d] -= rate * g[d];
  }
};

struct RmsProp {
  static constexpr RuleTraits kTraits = {.name = "RmsProp", .parameters = {"alpha", "eps"}, .num_accumulators = 1};
  float lr, alpha, one_minus_alpha, eps;

  static RmsProp of(const Rule& rule, double lr, uint64_t) {
    const double alpha = rule.parameters[0], eps = rule.parameters[1];
    return {rounded(lr), rounded(alpha), rounded(1.0 - alpha), rounded(eps)};
  }
  void apply(float* __restrict w, float* __restrict s, const float* __restrict g, int dim) const {
    for (int d = 0; d < dim; d++) {
      s[d] = below(alpha * s[d] + one_minus_alpha * (g[d] * g[d]));
      w[d] -= lr * g[d] / (sqrtf(s[d]) + eps);
    }
  }
};

struct Adam {
  static constexpr RuleTraits kTraits = {
      .name = "Adam", .parameters = {"beta1", "beta2", "eps", "decay", "eps_hat"}, .num_accumulators = 2};
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
  float keep;       // 1 - lr * decay
  float step_size;  // lr / (1 - beta1^step)
  float root_bias;  // sqrt(1 - beta2^step)

  static Adam of(const Rule& rule, double lr, uint64_t step) {
    const double beta1 = rule.parameters[0], beta2 = rule.parameters[1];
    const double eps = rule.parameters[2], decay = rule.parameters[3], t = static_cast<double>(step);
    const double root_bias = sqrt(1.0 - pow(beta2, t));
    const bool eps_hat = rule.parameters[4] != 0.0;
    return {rounded(beta1),
            rounded(1.0 - beta1),
            rounded(beta2),
            rounded(1.0 - beta2),
            rounded(eps_hat ? eps / root_bias : eps),
            rounded(1.0 - lr * decay),
            rounded(lr / (1.0 - pow(beta1, t))),
            rounded(root_bias)};
  }
  void apply(float* __restrict w, float* __restrict s, const float* __restrict g, int dim) const {
    float* __restrict m = s;
    float* __restrict v = s + dim;
    for (int d = 0; d < dim; d++) {
      const float kept = w[d] * keep;
      m[d] = within(beta1 * m[d] + one_minus_beta1 * g[d]);
      v[d] = below(beta2 * v[d] + one_minus_beta2 * (g[d] * g[d]));
      w[d] = kept - step_size * m[d] / (sqrtf(v[d]) / root_bias + eps);
    }
  }
};

// State: [n][z]. `power` is always -0.5; `eps` is added to n under each root.
struct Ftrl {
  static constexpr RuleTraits kTraits = {
      .name = "Ftrl",
      .parameters = {"beta", "power", "initial_accumulator", "gradient_l1", "gradient_l2", "eps"},
      .num_accumulators = 2,
      .proximal = true};
  float lr, beta, l1, l2, eps;

  static Ftrl of(const Rule& rule, double lr, uint64_t) {
    const double beta = rule.parameters[0], eps = rule.parameters[5];
    return {rounded(lr), rounded(beta), rounded(rule.l1), rounded(rule.l2), rounded(eps)};
  }
  void apply(float* __restrict w, float* __restrict s, const float* __restrict g, int dim) const {
    if (lr == 0.0f) return;  // a schedule's zero: no step, rather than a division by zero
    float* __restrict n = s;
    float* __restrict z = s + dim;
    for (int d = 0; d < dim; d++) {
      const float grown = below(n[d] + g[d] * g[d]);
      const float root = sqrtf(grown + eps);
      const float sigma = (root - sqrtf(n[d] + eps)) / lr;
      z[d] = within(z[d] + (g[d] - sigma * w[d]));
      n[d] = grown;
      const float shrunk = z[d] - copysignf(l1, z[d]);  // z = 0 falls under |z| <= l1
      const float moved = -shrunk / ((beta + root) / lr + l2);
      w[d] = fabsf(z[d]) <= l1 ? 0.0f : moved;
    }
  }
};

template <class... Rules>
struct RuleList {};
using AllRules = RuleList<Sgd, Momentum, Nesterov, Adagrad, RowwiseAdagrad, RmsProp, Adam, Ftrl>;

constexpr int state_width_of(const RuleTraits& traits, int dim) {
  return traits.num_accumulators * (traits.rowwise ? 1 : dim);
}

}  // namespace
}  // namespace hotbed
