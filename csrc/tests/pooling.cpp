// SPDX-License-Identifier: Apache-2.0
// Pooling forward and backward against loops that are too simple to be wrong.
#include <doctest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/kernels.h"
#include "draw.h"

using namespace hotbed;

namespace {

struct Case {
  int dim;
  std::vector<float> table;  // [unique, dim]
  std::vector<const float*> rows;
  std::vector<uint32_t> inverse;
  std::vector<int64_t> offsets;
  std::vector<float> weights;
  std::vector<float> grad;  // [samples, dim]
  int64_t num_samples;

  Case(int dim, int num_unique, int64_t num_samples, uint64_t seed) : dim(dim), num_samples(num_samples) {
    Draw draw(seed);
    table.resize(static_cast<size_t>(num_unique * dim));
    for (float& x : table) x = std::round(draw.around() * 4.0f) / 4.0f;  // ties happen
    for (int u = 0; u < num_unique; u++) rows.push_back(table.data() + u * dim);
    offsets.push_back(0);
    for (int64_t i = 0; i < num_samples; i++)
      offsets.push_back(offsets.back() + static_cast<int64_t>(i == 3 ? 5000 : draw.below(5)));
    for (int64_t p = 0; p < offsets.back(); p++) {
      inverse.push_back(static_cast<uint32_t>(draw.below(static_cast<uint64_t>(num_unique))));
      weights.push_back(draw.around());
    }
    grad.resize(static_cast<size_t>(num_samples * dim));
    for (float& x : grad) x = draw.around();
  }
};

bool same(double a, double b) { return std::abs(a - b) <= 2e-4 * (1.0 + std::abs(b)); }

}  // namespace

TEST_CASE("sums, means and maxima of bags, with and without weights, empty bags included") {
  for (int dim : {1, 5, 16, 40})
    for (Pooling pooling : {Pooling::kSum, Pooling::kMean, Pooling::kMax})
      for (bool weighted : {false, true}) {
        if (weighted && pooling != Pooling::kSum) continue;
        const Case c(dim, 30, 200, static_cast<uint64_t>(dim));
        const Bags bags{c.inverse.data(), c.offsets.data(), weighted ? c.weights.data() : nullptr, c.num_samples,
                        pooling};
        const int64_t step = dim + 3;  // rows of a wider buffer
        std::vector<float> out(static_cast<size_t>(c.num_samples * step), 9.0f);
        kernels().pool(bags, c.rows.data(), out.data(), step, dim, 0, 120);
        kernels().pool(bags, c.rows.data(), out.data(), step, dim, 120, c.num_samples);
        for (int64_t i = 0; i < c.num_samples; i++) {
          for (int d = 0; d < dim; d++) {
            double expected = 0;
            for (int64_t p = c.offsets[static_cast<size_t>(i)]; p < c.offsets[static_cast<size_t>(i) + 1]; p++) {
              const double x =
                  c.rows[c.inverse[static_cast<size_t>(p)]][d] * (weighted ? c.weights[static_cast<size_t>(p)] : 1.0f);
              if (pooling == Pooling::kMax)
                expected = p == c.offsets[static_cast<size_t>(i)] ? x : std::max(expected, x);
              else expected += x;
            }
            const int64_t n = c.offsets[static_cast<size_t>(i) + 1] - c.offsets[static_cast<size_t>(i)];
            if (pooling == Pooling::kMean && n) expected /= static_cast<double>(n);
            REQUIRE(same(out[static_cast<size_t>(i * step + d)], expected));
          }
          for (int64_t d = dim; d < step; d++) REQUIRE(out[static_cast<size_t>(i * step + d)] == 9.0f);
        }
      }
}

TEST_CASE("gradients reach each id once for each use, and only ids of the asked range") {
  for (int dim : {1, 5, 16})
    for (Pooling pooling : {Pooling::kSum, Pooling::kMean, Pooling::kMax}) {
      const int num_unique = 30;
      const Case c(dim, num_unique, 200, 9);
      const Bags bags{c.inverse.data(), c.offsets.data(), nullptr, c.num_samples, pooling};
      std::vector<double> expected(static_cast<size_t>(num_unique * dim), 0.0);
      for (int64_t i = 0; i < c.num_samples; i++) {
        const int64_t begin = c.offsets[static_cast<size_t>(i)], end = c.offsets[static_cast<size_t>(i) + 1];
        for (int d = 0; d < dim; d++) {
          int64_t best = begin;
          for (int64_t p = begin; p < end; p++) {
            if (c.rows[c.inverse[static_cast<size_t>(p)]][d] > c.rows[c.inverse[static_cast<size_t>(best)]][d])
              best = p;
            const double g = c.grad[static_cast<size_t>(i * dim + d)];
            if (pooling != Pooling::kMax)
              expected[c.inverse[static_cast<size_t>(p)] * static_cast<size_t>(dim) + static_cast<size_t>(d)] +=
                  pooling == Pooling::kMean ? g / static_cast<double>(end - begin) : g;
          }
          if (pooling == Pooling::kMax && begin < end)
            expected[c.inverse[static_cast<size_t>(best)] * static_cast<size_t>(dim) + static_cast<size_t>(d)] +=
                c.grad[static_cast<size_t>(i * dim + d)];
        }
      }
      std::vector<float> whole(expected.size(), 0.0f), halves(expected.size(), 0.0f);
      kernels().accumulate(bags, c.rows.data(), c.grad.data(), dim, whole.data(), dim, 0, num_unique);
      for (size_t k = 0; k < expected.size(); k++) REQUIRE(same(whole[k], expected[k]));
      kernels().accumulate(bags, c.rows.data(), c.grad.data(), dim, halves.data(), dim, 0, 11);
      for (size_t k = 11 * static_cast<size_t>(dim); k < halves.size(); k++) REQUIRE(halves[k] == 0.0f);
      kernels().accumulate(bags, c.rows.data(), c.grad.data(), dim, halves.data(), dim, 11, num_unique);
      CHECK(halves == whole);  // bit for bit, however the ids are cut
    }
}

TEST_CASE("pooling and its backward give the same bits on every instruction set") {
  const std::string chosen = isa_name();
  for (int dim : {3, 16, 100})
    for (Pooling pooling : {Pooling::kSum, Pooling::kMean, Pooling::kMax}) {
      const Case c(dim, 50, 300, 21);
      std::vector<float> out, acc;
      for (const char* isa : {"baseline", "avx2", "avx512"}) {
        if (!set_isa(isa)) continue;
        const Bags bags{c.inverse.data(), c.offsets.data(), pooling == Pooling::kSum ? c.weights.data() : nullptr,
                        c.num_samples, pooling};
        std::vector<float> o(static_cast<size_t>(c.num_samples * dim)), a(static_cast<size_t>(50 * dim), 0.0f);
        kernels().pool(bags, c.rows.data(), o.data(), dim, dim, 0, c.num_samples);
        kernels().accumulate(bags, c.rows.data(), c.grad.data(), dim, a.data(), dim, 0, 50);
        if (out.empty()) out = o, acc = a;
        REQUIRE(std::memcmp(out.data(), o.data(), o.size() * 4) == 0);
        REQUIRE(std::memcmp(acc.data(), a.data(), a.size() * 4) == 0);
      }
    }
  set_isa(chosen.c_str());
}
