// SPDX-License-Identifier: Apache-2.0
// How a row is updated, as data. The arithmetic is in kernels.cpp; hotbed/embedding/rule.py holds the slow reference.
#pragma once

#include <cstdint>
#include <vector>

namespace hotbed {

enum class RuleKind : uint8_t { kSgd, kMomentum, kNesterov, kAdagrad, kRowwiseAdagrad, kRmsProp, kAdam, kFtrl };
enum class Scope : uint8_t { kTouched, kAll, kCatchUp };

struct Rule {
  RuleKind kind = RuleKind::kSgd;
  Scope scope = Scope::kTouched;
  double lr = 0.01;
  double beta1 = 0.0;  // Momentum, Nesterov: momentum · Adam: beta1
  double beta2 = 0.0;  // RmsProp: alpha · Adam: beta2
  double eps = 1e-8;
  double decay = 0.0;  // Adam, decoupled
  double beta = 0.0;   // Ftrl
  double l1 = 0.0, l2 = 0.0;
  double clip = 0.0;  // 0 = off
  double initial_accumulator = 0.0;

  // Floats of optimizer state in a row of `dim` lanes.
  int state_width(int dim) const noexcept {
    switch (kind) {
      case RuleKind::kSgd: return 0;
      case RuleKind::kRowwiseAdagrad: return 1;
      case RuleKind::kAdam:
      case RuleKind::kFtrl: return 2 * dim;
      default: return dim;
    }
  }
};

// Everything one step of the rule needs, in the precision it is applied in.
struct RuleStep {
  RuleKind kind;
  float lr, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, keep, beta, l1, l2, clip;
  float step_size, root_bias;  // Adam: lr / (1 - beta1^t), sqrt(1 - beta2^t)
};

RuleStep rule_step(const Rule& rule, double lr, uint64_t step) noexcept;

// Learning rates by step, run-length coded: what `catch_up` needs to replay the steps a row has missed.
class RateHistory {
 public:
  struct Run {
    uint64_t first_step;
    double lr;
  };
  void record(uint64_t step, double lr);
  double at(uint64_t step) const noexcept;
  const std::vector<Run>& runs() const noexcept { return runs_; }
  void assign(std::vector<Run> runs) { runs_ = std::move(runs); }

 private:
  std::vector<Run> runs_;
};

}  // namespace hotbed
