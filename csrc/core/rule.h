// SPDX-License-Identifier: Apache-2.0
// How a row is updated, as data: a rule has the name and the fields of its class in hotbed/embedding/rule.py. The rules
// themselves are in rules.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hotbed {

enum class Scope : uint8_t { kTouched, kAll, kCatchUp };

struct RuleTraits {
  static constexpr int kMaxParameters = 6;

  const char* name;
  const char* parameters[kMaxParameters] = {};  // the fields that only this rule has; null after the last
  int num_accumulators = 0;                     // optimizer state: this number of runs of `dim` floats a row …
  bool rowwise = false;                         // … or of one float
  bool proximal = false;  // l1 and l2 are part of the rule's own step; else they are added to the gradient, as are
                          // parameters 3 and 4 of a proximal rule
};

struct Rule {
  // Throws std::invalid_argument where there is no such rule.
  explicit Rule(const std::string& name = "Sgd");

  int kind;  // place in AllRules
  Scope scope = Scope::kTouched;
  double lr = 0.01;
  double l1 = 0.0, l2 = 0.0;
  double clip = 0.0;                                   // 0 = off
  double parameters[RuleTraits::kMaxParameters] = {};  // as in the traits

  const RuleTraits& traits() const noexcept;
  // The value of a field; throws std::invalid_argument where the rule has no such field.
  double& operator[](const std::string& field);
  // Sets a field, so that rules can be written in one line.
  Rule& with(const std::string& field, double value);

  // Floats of optimizer state in a row of `dim` lanes.
  int state_width(int dim) const noexcept;
  // State of a new row: the first accumulator starts at `initial_accumulator`, where the rule has that field.
  std::vector<float> initial_state(int dim) const;
};

std::vector<std::string> rule_names();

// What one step needs, in the precision it is applied in.
struct RuleStep {
  int kind;
  float l1, l2;  // added to the gradient: l1 * sign(w) + l2 * w
  float clip;
  alignas(float) unsigned char constants[8 * sizeof(float)];  // the rule's struct of rules.h
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
