// SPDX-License-Identifier: Apache-2.0
// Table: the steps of its rule, and replays of missed ones.
#include <algorithm>

#include "table.h"

namespace hotbed {
namespace {

constexpr size_t kCachedSteps = size_t{1} << 16;
constexpr size_t kSettled = size_t{1} << 14;  // rows brought up to date at a time
constexpr int64_t kRun = 256;                 // rows handed to a kernel at a time

}  // namespace

const RuleStep& Table::step_at(uint64_t step, RuleStep* scratch) const noexcept {
  if (step <= steps_.size()) return steps_[step - 1];
  *scratch = rule_step(config_.rule, rates_.at(step), step);
  return *scratch;
}

uint64_t Table::begin_update(double lr) {
  step_++;
  rates_.record(step_, lr);
  if (config_.rule.scope != Scope::kTouched && steps_.size() + 1 == step_ && step_ <= kCachedSteps)
    steps_.push_back(rule_step(config_.rule, lr, step_));
  return step_;
}

void Table::load_scalars(uint64_t step, int64_t watermark, uint64_t calls, std::vector<RateHistory::Run> rates) {
  if (layout().has_updated && step != step_)
    for (const IdMap& map : maps_)
      map.for_each([&](int64_t, uint32_t slot) {
        changing(slot);
        ledger_[slot].set_updated(static_cast<uint32_t>(step));
      });
  step_ = step, watermark_ = watermark, calls_ = calls;
  rates_.assign(std::move(rates));
  steps_.clear();
  if (config_.rule.scope != Scope::kTouched)
    for (uint64_t t = 1; t <= std::min<uint64_t>(step, kCachedSteps); t++)
      steps_.push_back(rule_step(config_.rule, rates_.at(t), t));
}

// A half-precision row is widened to `wide`, stepped in fp32, and rounded by noise that depends on (seed, table, id,
// step, lane) only.
void Table::update_half(const RuleStep& rule, uint64_t step, const Row& row, const float* grad, float* wide) const {
  row.read(wide);
  float* state = row.state();
  kernels().update(rule, &wide, &state, grad, 1, config_.dim);
  const uint64_t noise = mix64(mix64(key_ ^ mix64(static_cast<uint64_t>(row.id()) + kGolden)) + step * kGolden);
  row.write(wide, &noise);
}

void Table::update(const Uniques& uniques, const float* grads) {
  RuleStep scratch;
  const RuleStep step = step_at(step_, &scratch);
  const bool marks = layout().has_updated;
  std::vector<float> wide(static_cast<size_t>(layout().dtype == Dtype::kFloat32 ? 0 : config_.dim));
  float *values[kRun], *state[kRun];
  const uint32_t *slots = uniques.slots.data(), *frames = uniques.frames();
  const int64_t n = static_cast<int64_t>(uniques.slots.size());
  for (int64_t begin = 0; begin < n;) {
    if (frames[begin] == kNoFrame) {
      begin++;
      continue;
    }
    int64_t length = 0;
    for (; length < kRun && begin + length < n && frames[begin + length] != kNoFrame; length++) {
      const uint32_t slot = slots[begin + length], frame = frames[begin + length];
      changing(slot);
      frames_.changing(frame);
      const Row row = frames_[frame];
      values[length] = row.values(), state[length] = row.state();
      if (marks) {
        replay(slot, frame, step_ - 1);
        ledger_[slot].set_updated(static_cast<uint32_t>(step_));
      }
    }
    const float* grad = grads + begin * config_.dim;
    if (layout().dtype == Dtype::kFloat32) kernels().update(step, values, state, grad, length, config_.dim);
    else
      for (int64_t i = 0; i < length; i++)
        update_half(step, step_, frames_[frames[begin + i]], grad + i * config_.dim, wide.data());
    begin += length;
  }
}

void Table::replay(uint32_t slot, uint32_t frame, uint64_t to) {
  const LedgerEntry entry = ledger_[slot];
  const uint64_t from = entry.updated();
  if (from >= to) return;
  changing(slot);
  frames_.changing(frame);
  replay(frames_[frame], from, to);
  entry.set_updated(static_cast<uint32_t>(to));
}

void Table::replay(const Row& row, uint64_t from, uint64_t to) const {
  if (from >= to) return;
  RuleStep scratch;
  if (layout().dtype == Dtype::kFloat32) {
    float *values = row.values(), *state = row.state();
    for (uint64_t t = from + 1; t <= to; t++)
      kernels().update(step_at(t, &scratch), &values, &state, nullptr, 1, config_.dim);
  } else {
    std::vector<float> wide(static_cast<size_t>(config_.dim));
    for (uint64_t t = from + 1; t <= to; t++) update_half(step_at(t, &scratch), t, row, nullptr, wide.data());
  }
}

uint64_t Table::num_behind(int p) const noexcept {
  uint64_t n = 0;
  if (layout().has_updated) maps_[p].for_each([&](int64_t, uint32_t slot) { n += updated(slot) < step_; });
  return n;
}

void Table::settle(int p, Frames::Room* room) {
  frames_.finish_loads();
  ColdRows cold;
  cold.step = step_;
  const auto put_back = [&] {
    begin_read(cold, true);
    naming_lost([&] {
      finish(cold, [&](size_t slot, const Row& row) {
        changing(static_cast<uint32_t>(slot));
        frames_.put(static_cast<uint32_t>(slot), row, room);
        ledger_[static_cast<uint32_t>(slot)].set_updated(static_cast<uint32_t>(step_));
      });
    });
    cold = ColdRows();
    cold.step = step_;
  };
  maps_[p].for_each([&](int64_t, uint32_t slot) {
    if (const uint32_t frame = frames_.of(slot); frame < kColdFrame) replay(slot, frame, step_);
    else if (updated(slot) < step_) cold.rows.push_back({slot, slot, updated(slot)});
    if (cold.rows.size() == kSettled) put_back();
  });
  put_back();
}

void Table::catch_up(int first, int last) {
  if (config_.rule.scope == Scope::kTouched || !frames_.in_memory()) return;
  for (int p = first; p < last; p++) maps_[p].for_each([&](int64_t, uint32_t slot) { replay(slot, slot, step_); });
}

}  // namespace hotbed
