// SPDX-License-Identifier: Apache-2.0
// Enums cross from Python by name.
#pragma once

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/disk_io.h"
#include "core/frozen.h"
#include "core/row_cache.h"
#include "core/table.h"

template <class Enum>
struct Named {
  std::string_view name;
  Enum value;
};

inline constexpr Named<hotbed::Pooling> kPoolings[] = {{"sum", hotbed::Pooling::kSum},
                                                       {"mean", hotbed::Pooling::kMean},
                                                       {"max", hotbed::Pooling::kMax},
                                                       {"none", hotbed::Pooling::kNone}};
inline constexpr Named<hotbed::Dtype> kDtypes[] = {
    {"float32", hotbed::Dtype::kFloat32}, {"bfloat16", hotbed::Dtype::kBfloat16}, {"float16", hotbed::Dtype::kFloat16}};
inline constexpr Named<hotbed::Tier> kTiers[] = {{"Ram", hotbed::Tier::kRam}, {"Ssd", hotbed::Tier::kSsd}};
inline constexpr Named<hotbed::EngineKind> kEngines[] = {{"best", hotbed::EngineKind::kBest},
                                                         {"io_uring", hotbed::EngineKind::kUring},
                                                         {"threads", hotbed::EngineKind::kThreads}};
inline constexpr Named<hotbed::FrozenDtype> kFrozenDtypes[] = {{"float32", hotbed::FrozenDtype::kFloat32},
                                                               {"float16", hotbed::FrozenDtype::kFloat16},
                                                               {"int8", hotbed::FrozenDtype::kInt8}};
inline constexpr Named<hotbed::Scope> kScopes[] = {
    {"touched", hotbed::Scope::kTouched}, {"all", hotbed::Scope::kAll}, {"catch_up", hotbed::Scope::kCatchUp}};
inline constexpr Named<hotbed::InitKind> kInits[] = {{"Uniform", hotbed::InitKind::kUniform},
                                                     {"Normal", hotbed::InitKind::kNormal},
                                                     {"Constant", hotbed::InitKind::kConstant}};
inline constexpr Named<hotbed::AdmitKind> kAdmissions[] = {{"all", hotbed::AdmitKind::kAll},
                                                           {"min_count", hotbed::AdmitKind::kMinCount},
                                                           {"probability", hotbed::AdmitKind::kProbability}};
inline constexpr Named<hotbed::Frozen> kFrozen[] = {
    {"nothing", hotbed::Frozen::kNothing}, {"rows", hotbed::Frozen::kRows}, {"all", hotbed::Frozen::kAll}};
inline constexpr Named<hotbed::CachePolicy> kCachePolicies[] = {{"lru", hotbed::CachePolicy::kLru},
                                                                {"lfu", hotbed::CachePolicy::kLfu}};

// The value of a name; `what`: the noun of the message.
template <class Enum, size_t n>
Enum value_of(const Named<Enum> (&names)[n], const char* what, std::string_view name) {
  for (const Named<Enum>& entry : names)
    if (entry.name == name) return entry.value;
  std::string all;
  for (const Named<Enum>& entry : names) all.append(all.empty() ? "" : ", ").append(entry.name);
  throw std::invalid_argument(std::string(what) + ": unknown name, got '" + std::string(name) + "'. Use one of " + all +
                              ".");
}

template <class Enum, size_t n>
std::string_view name_of(const Named<Enum> (&names)[n], Enum value) {
  return std::find_if(std::begin(names), std::end(names), [&](const auto& entry) { return entry.value == value; })
      ->name;
}
