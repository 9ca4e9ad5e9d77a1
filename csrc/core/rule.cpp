// SPDX-License-Identifier: Apache-2.0
#include "rule.h"

#include <algorithm>
#include <cmath>

namespace hotbed {

RuleStep rule_step(const Rule& rule, double lr, uint64_t step) noexcept {
  RuleStep s{};
  s.kind = rule.kind;
  s.lr = static_cast<float>(lr);
  s.beta1 = static_cast<float>(rule.beta1);
  s.one_minus_beta1 = static_cast<float>(1.0 - rule.beta1);
  s.beta2 = static_cast<float>(rule.beta2);
  s.one_minus_beta2 = static_cast<float>(1.0 - rule.beta2);
  s.eps = static_cast<float>(rule.eps);
  s.keep = static_cast<float>(1.0 - lr * rule.decay);
  s.beta = static_cast<float>(rule.beta);
  s.l1 = static_cast<float>(rule.l1);
  s.l2 = static_cast<float>(rule.l2);
  s.clip = static_cast<float>(rule.clip);
  if (rule.kind == RuleKind::kAdam) {
    const double t = static_cast<double>(step);
    s.step_size = static_cast<float>(lr / (1.0 - std::pow(rule.beta1, t)));
    s.root_bias = static_cast<float>(std::sqrt(1.0 - std::pow(rule.beta2, t)));
  }
  return s;
}

void RateHistory::record(uint64_t step, double lr) {
  if (runs_.empty() || runs_.back().lr != lr) runs_.push_back({step, lr});
}

double RateHistory::at(uint64_t step) const noexcept {
  auto after =
      std::upper_bound(runs_.begin(), runs_.end(), step, [](uint64_t s, const Run& run) { return s < run.first_step; });
  return after == runs_.begin() ? 0.0 : std::prev(after)->lr;
}

}  // namespace hotbed
