// SPDX-License-Identifier: Apache-2.0
// The kernels against a slow reference in double precision, and against each other bit for bit.
#include <doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/kernels.h"
#include "draw.h"

using namespace hotbed;

namespace {

Rule rule_of(const std::string& name, bool extras) {
  Rule rule(name);
  rule.lr = 0.05;
  const std::map<std::string, double> fields = {{"momentum", 0.9},
                                                {"alpha", 0.99},
                                                {"beta1", 0.9},
                                                {"beta2", 0.99},
                                                {"eps", name == "Ftrl" && extras ? 0.05 : 1e-8},
                                                {"decay", 0.0},
                                                {"eps_hat", 0.0},
                                                {"beta", 0.5},
                                                {"power", -0.5},
                                                {"initial_accumulator", name == "Ftrl" ? 0.1 : 0.0},
                                                {"lr_inside", extras ? 1.0 : 0.0},
                                                {"gradient_l1", extras ? 0.01 : 0.0},
                                                {"gradient_l2", extras ? 0.02 : 0.0}};
  for (int i = 0; i < RuleTraits::kMaxParameters && rule.traits().parameters[i]; i++)
    rule.parameters[i] = fields.at(rule.traits().parameters[i]);
  if (extras) rule.l1 = 0.01, rule.l2 = 0.02, rule.clip = 1.5;
  if (extras && name == "Adam") rule["decay"] = 0.1;
  return rule;
}

double sign(double x) { return (x > 0) - (x < 0); }

// One step as the papers have it.
void reference(Rule r, double lr, int t, std::vector<double>& w, std::vector<double>& s, std::vector<double> g) {
  const std::string name = r.traits().name;
  const size_t dim = w.size();
  double squares = 0;
  for (double x : g) squares += x * x;
  if (r.clip > 0 && std::sqrt(squares) > r.clip)
    for (double& x : g) x *= r.clip / std::sqrt(squares);
  const double l1 = name == "Ftrl" ? r["gradient_l1"] : r.l1, l2 = name == "Ftrl" ? r["gradient_l2"] : r.l2;
  for (size_t d = 0; d < dim; d++) g[d] += l2 * w[d] + l1 * sign(w[d]);
  squares = 0;
  for (double x : g) squares += x * x;
  if (name == "RowwiseAdagrad") s[0] += squares / static_cast<double>(dim);
  for (size_t d = 0; d < dim; d++) {
    if (name == "Sgd") {
      w[d] -= lr * g[d];
    } else if (name == "Momentum") {
      const bool inside = r["lr_inside"] != 0;
      s[d] = r["momentum"] * s[d] + (inside ? lr : 1) * g[d], w[d] -= (inside ? 1 : lr) * s[d];
    } else if (name == "Nesterov") {
      const double a = s[d], mu = r["momentum"];
      if (r["lr_inside"] == 0) s[d] = mu * a + g[d], w[d] -= lr * (g[d] + mu * s[d]);
      else  // as HugeCTR writes it, of the accumulator -a
        s[d] = mu * a + lr * g[d], w[d] -= (1 + mu) * s[d] - mu * a;
    } else if (name == "Adagrad") {
      s[d] += g[d] * g[d], w[d] -= lr * g[d] / (std::sqrt(s[d]) + r["eps"]);
    } else if (name == "RowwiseAdagrad") {
      w[d] -= lr / (std::sqrt(s[0]) + r["eps"]) * g[d];
    } else if (name == "RmsProp") {
      s[d] = r["alpha"] * s[d] + (1 - r["alpha"]) * g[d] * g[d], w[d] -= lr * g[d] / (std::sqrt(s[d]) + r["eps"]);
    } else if (name == "Adam") {
      const double beta1 = r["beta1"], beta2 = r["beta2"];
      double &m = s[d], &v = s[dim + d];
      w[d] *= 1 - lr * r["decay"];
      m = beta1 * m + (1 - beta1) * g[d], v = beta2 * v + (1 - beta2) * g[d] * g[d];
      w[d] -= lr / (1 - std::pow(beta1, t)) * m / (std::sqrt(v) / std::sqrt(1 - std::pow(beta2, t)) + r["eps"]);
    } else {
      REQUIRE(name == "Ftrl");
      double &n = s[d], &z = s[dim + d];
      const double grown = n + g[d] * g[d];
      z += g[d] - (std::sqrt(grown + r["eps"]) - std::sqrt(n + r["eps"])) / lr * w[d], n = grown;
      w[d] = std::abs(z) <= r.l1 ? 0 : -(z - sign(z) * r.l1) / ((r["beta"] + std::sqrt(n + r["eps"])) / lr + r.l2);
    }
  }
}

struct Batch {
  Batch(const Rule& rule, int dim, int n) : dim(dim), width(rule.state_width(dim)) {
    Draw draw(static_cast<uint64_t>(dim) * 31 + static_cast<uint64_t>(rule.kind));
    values.resize(static_cast<size_t>(n * dim));
    for (float& x : values) x = draw.around() * 0.1f;
    const std::vector<float> initial = rule.initial_state(dim);
    for (int i = 0; i < n; i++) state.insert(state.end(), initial.begin(), initial.end());
    for (int i = 0; i < n; i++) w.push_back(values.data() + i * dim), s.push_back(state.data() + i * width);
  }
  int dim, width;
  std::vector<float> values, state;
  std::vector<float*> w, s;
};

}  // namespace

TEST_CASE("every rule follows its paper within float precision over 100 steps") {
  for (const std::string& name : rule_names())
    for (bool extras : {false, true})
      for (int dim : {1, 3, 16, 33}) {
        CAPTURE(name);
        CAPTURE(extras);
        CAPTURE(dim);
        const Rule rule = rule_of(name, extras);
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
  for (const std::string& name : rule_names())
    for (bool extras : {false, true})
      for (int dim : {1, 2, 7, 16, 17, 64, 300, 1000}) {
        const Rule rule = rule_of(name, extras);
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

TEST_CASE("a rule starts its first accumulator where its field says, the others at zero") {
  CHECK(rule_names() == std::vector<std::string>{"Sgd", "Momentum", "Nesterov", "Adagrad", "RowwiseAdagrad", "RmsProp",
                                                 "Adam", "Ftrl"});
  const std::map<std::string, std::vector<float>> expected = {{"Sgd", {}},
                                                              {"Momentum", {0, 0}},
                                                              {"Nesterov", {0, 0}},
                                                              {"Adagrad", {0.5f, 0.5f}},
                                                              {"RowwiseAdagrad", {0.5f}},
                                                              {"RmsProp", {0, 0}},
                                                              {"Adam", {0, 0, 0, 0}},
                                                              {"Ftrl", {0.5f, 0.5f, 0, 0}}};
  for (const auto& [name, state] : expected) {
    CAPTURE(name);
    Rule rule(name);
    if (name == "Adagrad" || name == "RowwiseAdagrad" || name == "Ftrl") rule["initial_accumulator"] = 0.5;
    CHECK(rule.initial_state(2) == state);
    CHECK(rule.state_width(2) == static_cast<int>(state.size()));
  }
}

TEST_CASE("names and fields that no rule has are refused") {
  CHECK_THROWS_WITH_AS(Rule("Lion"),
                       "rule: unknown name, got 'Lion'. Use one of Sgd, Momentum, Nesterov, Adagrad, RowwiseAdagrad, "
                       "RmsProp, Adam, Ftrl.",
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(Rule("Sgd").with("momentum", 0.9),
                       "rule Sgd: unknown field, got 'momentum'. Add it to the rule's traits.", std::invalid_argument);
}

TEST_CASE("no gradient is the same as a gradient of zeros") {
  for (const std::string& name : rule_names())
    for (bool extras : {false, true}) {
      const Rule rule = rule_of(name, extras);
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
