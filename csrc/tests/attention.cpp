// SPDX-License-Identifier: Apache-2.0
// Attention over packed histories against loops in double precision that are too simple to be wrong.
#include "core/attention.h"

#include <doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/thread_pool.h"
#include "draw.h"

using namespace hotbed;

namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

struct Case {
  int64_t dim, length;
  std::vector<int64_t> offsets{0};
  Floats queries, rows, grad;

  Case(int64_t dim, int64_t length, uint64_t seed) : dim(dim), length(length) {
    Draw draw(seed);
    for (int64_t size : {0, 1, 15, 16, 17, 0, 333, 2, 1000, 0}) offsets.push_back(offsets.back() + size);
    for (auto* values : {&queries, &grad}) values->resize(static_cast<size_t>(num_samples() * dim));
    rows.resize(static_cast<size_t>(offsets.back() * dim));
    for (auto* values : {&queries, &grad, &rows})
      for (float& x : *values) x = draw.around();
  }

  int64_t num_samples() const { return static_cast<int64_t>(offsets.size()) - 1; }
  PackedRows history() const { return {rows.data(), offsets.data(), length, static_cast<int>(dim)}; }
};

double product(const float* a, const float* b, int64_t dim) {
  double sum = 0;
  for (int64_t d = 0; d < dim; d++) sum += double{a[d]} * b[d];
  return sum;
}

struct Expected {
  Doubles weights, pooled, query_grads, row_grads;
};

Expected loops(const Case& c) {
  Expected out{Doubles(static_cast<size_t>(c.offsets.back())), Doubles(c.queries.size()), Doubles(c.queries.size()),
               Doubles(c.rows.size())};
  for (int64_t i = 0; i < c.num_samples(); i++) {
    const int64_t end = c.offsets[static_cast<size_t>(i) + 1];
    const int64_t begin = std::max(c.offsets[static_cast<size_t>(i)], end - c.length);
    const float *query = c.queries.data() + i * c.dim, *grad = c.grad.data() + i * c.dim;
    double total = 0, mean = 0;
    for (int64_t k = begin; k < end; k++) total += std::exp(product(query, c.rows.data() + k * c.dim, c.dim));
    for (int64_t k = begin; k < end; k++) {
      const float* row = c.rows.data() + k * c.dim;
      double& weight = out.weights[static_cast<size_t>(k)];
      weight = std::exp(product(query, row, c.dim)) / total;
      mean += weight * product(grad, row, c.dim);
      for (int64_t d = 0; d < c.dim; d++) out.pooled[static_cast<size_t>(i * c.dim + d)] += weight * row[d];
    }
    for (int64_t k = begin; k < end; k++) {
      const float* row = c.rows.data() + k * c.dim;
      const double weight = out.weights[static_cast<size_t>(k)];
      const double score_grad = weight * (product(grad, row, c.dim) - mean);
      for (int64_t d = 0; d < c.dim; d++) {
        out.row_grads[static_cast<size_t>(k * c.dim + d)] = weight * grad[d] + score_grad * query[d];
        out.query_grads[static_cast<size_t>(i * c.dim + d)] += score_grad * row[d];
      }
    }
  }
  return out;
}

double farthest(const Floats& values, const Doubles& expected) {
  double distance = values.size() == expected.size() ? 0 : INFINITY;
  for (size_t i = 0; i < values.size(); i++) {
    const double here = std::abs(values[i] - expected[i]);
    if (!(here <= distance)) distance = here;
  }
  return distance;
}

}  // namespace

TEST_CASE("attention over histories of any length, forward and backward, on several threads") {
  ThreadPool::set_num_threads(4);
  for (int64_t dim : {1, 5, 16, 40})
    for (int64_t length : {int64_t{1}, int64_t{16}, int64_t{20}, INT64_MAX}) {
      const Case c(dim, length, static_cast<uint64_t>(dim));
      const Floats unset(c.queries.size(), 9.0f);
      Floats weights(static_cast<size_t>(c.offsets.back()), 9.0f), pooled = unset;
      Floats query_grads = unset, row_grads(c.rows.size(), 9.0f);
      const Attention attention{c.queries.data(), weights.data(), pooled.data()};
      attend(c.history(), attention, c.num_samples());
      attend_backward(c.history(), attention, {c.grad.data(), query_grads.data(), row_grads.data()}, c.num_samples());
      const Expected expected = loops(c);
      CHECK(farthest(weights, expected.weights) < 1e-6);
      CHECK(farthest(pooled, expected.pooled) < 1e-6);
      CHECK(farthest(query_grads, expected.query_grads) < 3e-6);
      CHECK(farthest(row_grads, expected.row_grads) < 3e-6);
    }
}

TEST_CASE("weights are the exponentials of the library, however far scores lie apart") {
  for (float score = 0; score > -120; score -= 0.37f) {
    const Floats rows{score, 0.0f};
    const std::vector<int64_t> offsets{0, 2};
    const float query = 1.0f;
    Floats weights(2), pooled(1);
    kernels().attend({rows.data(), offsets.data(), 2, 1}, {&query, weights.data(), pooled.data()}, 0, 1);
    const double power = std::exp(double{score});
    CHECK(std::abs(weights[0] - power / (1 + power)) <= 4e-7 * power + 1e-37);
  }
}
