// SPDX-License-Identifier: Apache-2.0
#include "rule.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "rules.h"

namespace hotbed {
namespace {

struct Entry {
  RuleTraits traits;
  RuleStep (*step)(const Rule& rule, double lr, uint64_t step);
};

template <class R>
RuleStep step_of(const Rule& rule, double lr, uint64_t step) {
  static_assert(sizeof(R) <= sizeof(RuleStep::constants));
  const R constants = R::of(rule, lr, step);
  double l1 = rule.l1, l2 = rule.l2;
  if (R::kTraits.proximal) l1 = rule.parameters[3], l2 = rule.parameters[4];  // gradient_l1, gradient_l2
  RuleStep s{rule.kind, rounded(l1), rounded(l2), rounded(rule.clip), {}};
  std::memcpy(s.constants, &constants, sizeof constants);
  return s;
}

template <class... Rules>
const std::vector<Entry>& entries_of(RuleList<Rules...>) {
  static const std::vector<Entry> entries = {{Rules::kTraits, step_of<Rules>}...};
  return entries;
}

const std::vector<Entry>& entries() { return entries_of(AllRules{}); }

std::string joined(const std::vector<std::string>& words) {
  std::string all;
  for (const std::string& word : words) all += (all.empty() ? "" : ", ") + word;
  return all;
}

}  // namespace

std::vector<std::string> rule_names() {
  std::vector<std::string> names;
  for (const Entry& entry : entries()) names.push_back(entry.traits.name);
  return names;
}

Rule::Rule(const std::string& name) {
  const std::vector<std::string> names = rule_names();
  const auto at = std::find(names.begin(), names.end(), name);
  if (at == names.end())
    throw std::invalid_argument("rule: unknown name, got '" + name + "'. Use one of " + joined(names) + ".");
  kind = static_cast<int>(at - names.begin());
}

const RuleTraits& Rule::traits() const noexcept { return entries()[static_cast<size_t>(kind)].traits; }

double& Rule::operator[](const std::string& field) {
  if (field == "lr") return lr;
  if (field == "l1") return l1;
  if (field == "l2") return l2;
  if (field == "clip") return clip;
  for (int i = 0; i < RuleTraits::kMaxParameters && traits().parameters[i]; i++)
    if (field == traits().parameters[i]) return parameters[i];
  throw std::invalid_argument(std::string("rule ") + traits().name + ": unknown field, got '" + field +
                              "'. Add it to the rule's traits.");
}

Rule& Rule::with(const std::string& field, double value) {
  (*this)[field] = value;
  return *this;
}

int Rule::state_width(int dim) const noexcept { return state_width_of(traits(), dim); }

std::vector<float> Rule::initial_state(int dim) const {
  std::vector<float> state(static_cast<size_t>(state_width(dim)), 0.0f);
  for (int i = 0; i < RuleTraits::kMaxParameters && traits().parameters[i]; i++)
    if (std::strcmp(traits().parameters[i], "initial_accumulator") == 0)
      std::fill_n(state.begin(), traits().rowwise ? 1 : dim, rounded(parameters[i]));
  return state;
}

RuleStep rule_step(const Rule& rule, double lr, uint64_t step) noexcept {
  return entries()[static_cast<size_t>(rule.kind)].step(rule, lr, step);
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
