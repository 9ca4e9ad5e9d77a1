// SPDX-License-Identifier: Apache-2.0
// The kernels against a slow reference in double precision, and against each other bit for bit.
#include <doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/kernels.h"
#include "draw.h"

using namespace hotbed;

namespace {

const RuleKind kAll[] = {
    RuleKind::kSgd,     RuleKind::kMomentum, RuleKind::kNesterov, RuleKind::kAdagrad, RuleKind::kRowwiseAdagrad,
    RuleKind::kRmsProp, RuleKind::kAdam,     RuleKind::kFtrl};

Rule rule_of(RuleKind kind, bool extras) {
  Rule rule;
  rule.kind = kind, rule.lr = 0.05, rule.eps = 1e-8;
  rule.beta1 = 0.9, rule.beta2 = 0.99;
  if (kind == RuleKind::kFtrl) rule.beta = 0.5, rule.initial_accumulator = 0.1;
  if (extras) rule.l1 = 0.01, rule.l2 = 0.02, rule.clip = 1.5;
  if (extras && kind == RuleKind::kAdam) rule.decay = 0.1;
  return rule;
}

double sign(double x) { return (x > 0) - (x < 0); }

// One step as the papers have it.
void reference(const Rule& r, double lr, int t, std::vector<double>& w, std::vector<double>& s, std::vector<double> g) {
  const size_t dim = w.size();
  double squares = 0;
  for (double x : g) squares += x * x;
  if (r.clip > 0 && std::sqrt(squares) > r.clip)
    for (double& x : g) x *= r.clip / std::sqrt(squares);
  if (r.kind != RuleKind::kFtrl)
    for (size_t d = 0; d < dim; d++) g[d] += r.l2 * w[d] + r.l1 * sign(w[d]);
  squares = 0;
  for (double x : g) squares += x * x;
  if (r.kind == RuleKind::kRowwiseAdagrad) s[0] += squares / static_cast<double>(dim);
  for (size_t d = 0; d < dim; d++) switch (r.kind) {
      case RuleKind::kSgd: w[d] -= lr * g[d]; break;
      case RuleKind::kMomentum: s[d] = r.beta1 * s[d] + g[d], w[d] -= lr * s[d]; break;
      case RuleKind::kNesterov: s[d] = r.beta1 * s[d] + g[d], w[d] -= lr * (g[d] + r.beta1 * s[d]); break;
      case RuleKind::kAdagrad: s[d] += g[d] * g[d], w[d] -= lr * g[d] / (std::sqrt(s[d]) + r.eps); break;
      case RuleKind::kRowwiseAdagrad: w[d] -= lr / (std::sqrt(s[0]) + r.eps) * g[d]; break;
      case RuleKind::kRmsProp:
        s[d] = r.beta2 * s[d] + (1 - r.beta2) * g[d] * g[d], w[d] -= lr * g[d] / (std::sqrt(s[d]) + r.eps);
        break;
      case RuleKind::kAdam: {
        double &m = s[d], &v = s[dim + d];
        w[d] *= 1 - lr * r.decay;
        m = r.beta1 * m + (1 - r.beta1) * g[d], v = r.beta2 * v + (1 - r.beta2) * g[d] * g[d];
        w[d] -= lr / (1 - std::pow(r.beta1, t)) * m / (std::sqrt(v) / std::sqrt(1 - std::pow(r.beta2, t)) + r.eps);
        break;
      }
      case RuleKind::kFtrl: {
        double &n = s[d], &z = s[dim + d];
        const double grown = n + g[d] * g[d];
        z += g[d] - (std::sqrt(grown) - std::sqrt(n)) / lr * w[d], n = grown;
        w[d] = std::abs(z) <= r.l1 ? 0 : -(z - sign(z) * r.l1) / ((r.beta + std::sqrt(n)) / lr + r.l2);
        break;
      }
    }
}

struct Batch {
  Batch(const Rule& rule, int dim, int n) : dim(dim), width(rule.state_width(dim)) {
    Draw draw(static_cast<uint64_t>(dim) * 31 + static_cast<uint64_t>(rule.kind));
    values.resize(static_cast<size_t>(n * dim)), state.assign(static_cast<size_t>(n * width), 0.0f);
    for (float& x : values) x = draw.around() * 0.1f;
    if (rule.kind == RuleKind::kFtrl)
      for (int i = 0; i < n; i++)
        std::fill_n(state.begin() + i * width, dim, static_cast<float>(rule.initial_accumulator));
    for (int i = 0; i < n; i++) w.push_back(values.data() + i * dim), s.push_back(state.data() + i * width);
  }
  int dim, width;
  std::vector<float> values, state;
  std::vector<float*> w, s;
};

}  // namespace

TEST_CASE("every rule follows its paper within float precision over 100 steps") {
  for (RuleKind kind : kAll)
    for (bool extras : {false, true})
      for (int dim : {1, 3, 16, 33}) {
        CAPTURE(static_cast<int>(kind));
        CAPTURE(extras);
        CAPTURE(dim);
        const Rule rule = rule_of(kind, extras);
        const int n = 5;
        Batch batch(rule, dim, n);
        std::vector<std::vector<double>> w, s;
        for (int i = 0; i < n; i++) {
          w.emplace_back(batch.w[static_cast<size_t>(i)], batch.w[static_cast<size_t>(i)] + dim);
          s.emplace_back(batch.s[static_cast<size_t>(i)], batch.s[static_cast<size_t>(i)] + batch.width);
        }
        Draw draw(77);
        std::vector<float> grads(static_cast<size_t>(n * dim));
        for (int t = 1; t <= 100; t++) {
          const double lr = t < 50 ? rule.lr : rule.lr / 2;
          for (float& g : grads) g = draw.around();
          kernels().update(rule_step(rule, lr, static_cast<uint64_t>(t)), batch.w.data(), batch.s.data(), grads.data(),
                           n, dim);
          for (int i = 0; i < n; i++)
            reference(rule, lr, t, w[static_cast<size_t>(i)], s[static_cast<size_t>(i)],
                      {grads.begin() + i * dim, grads.begin() + (i + 1) * dim});
        }
        // Adagrad's w grows with lr * sum; l1's sign may flip one step apart near zero.
        const double tolerance = extras ? 2e-3 : 1e-5;
        for (int i = 0; i < n; i++)
          for (int d = 0; d < dim; d++)
            REQUIRE(std::abs(batch.w[static_cast<size_t>(i)][d] - w[static_cast<size_t>(i)][static_cast<size_t>(d)]) <
                    tolerance);
      }
}

TEST_CASE("every instruction set gives the same bits") {
  const std::string chosen = isa_name();
  for (RuleKind kind : kAll)
    for (bool extras : {false, true})
      for (int dim : {1, 2, 7, 16, 17, 64, 300, 1000}) {
        const Rule rule = rule_of(kind, extras);
        const int n = 20;
        std::vector<float> values, state, grads(static_cast<size_t>(n * dim));
        Draw draw(5);
        for (float& g : grads) g = draw.around() * 3.0f;
        for (const char* isa : {"baseline", "avx2", "avx512"}) {
          if (!set_isa(isa)) continue;
          Batch batch(rule, dim, n);
          for (uint64_t t = 1; t <= 3; t++)
            kernels().update(rule_step(rule, 0.03, t), batch.w.data(), batch.s.data(), grads.data(), n, dim);
          kernels().update(rule_step(rule, 0.03, 4), batch.w.data(), batch.s.data(), nullptr, n, dim);
          if (values.empty()) values = batch.values, state = batch.state;
          REQUIRE(std::memcmp(values.data(), batch.values.data(), values.size() * sizeof(float)) == 0);
          REQUIRE((state.empty() || std::memcmp(state.data(), batch.state.data(), state.size() * sizeof(float)) == 0));
        }
      }
  REQUIRE(set_isa(chosen.c_str()));
  CHECK_FALSE(set_isa("abacus"));
}

TEST_CASE("no gradient is the same as a gradient of zeros") {
  for (RuleKind kind : kAll)
    for (bool extras : {false, true}) {
      const Rule rule = rule_of(kind, extras);
      Batch with(rule, 16, 4), without(rule, 16, 4);
      const std::vector<float> zeros(4 * 16, 0.0f);
      for (uint64_t t = 1; t <= 5; t++) {
        kernels().update(rule_step(rule, 0.1, t), with.w.data(), with.s.data(), zeros.data(), 4, 16);
        kernels().update(rule_step(rule, 0.1, t), without.w.data(), without.s.data(), nullptr, 4, 16);
      }
      CHECK(with.values == without.values);
      CHECK(with.state == without.state);
    }
}

TEST_CASE("an infinity or NaN anywhere is found") {
  std::vector<float> values(1000, 1.0f);
  CHECK(kernels().finite(values.data(), 1000));
  CHECK(kernels().finite(values.data(), 0));
  for (size_t at : {size_t{0}, size_t{15}, size_t{16}, size_t{511}, size_t{999}})
    for (float bad : {INFINITY, -INFINITY, NAN}) {
      values[at] = bad;
      CHECK_FALSE(kernels().finite(values.data(), 1000));
      values[at] = 3.4e38f;
      CHECK(kernels().finite(values.data(), 1000));
    }
}

TEST_CASE("the history of learning rates answers for every step") {
  RateHistory history;
  const double rates[] = {0.1, 0.1, 0.05, 0.05, 0.05, 0.2, 0.1};
  for (uint64_t t = 1; t <= 7; t++) history.record(t, rates[t - 1]);
  for (uint64_t t = 1; t <= 7; t++) CHECK(history.at(t) == rates[t - 1]);
  CHECK(history.at(1000) == 0.1);
  CHECK(history.runs().size() == 4);
}
