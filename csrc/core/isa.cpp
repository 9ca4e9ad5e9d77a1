// SPDX-License-Identifier: Apache-2.0
// Chooses the kernels for this processor, and holds the half-precision conversions (integer code, the same everywhere).
#include <atomic>
#include <cstring>

#include "kernels.h"

namespace hotbed {

namespace baseline {
extern const Kernels kKernels;
}
#ifdef HOTBED_X86
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#endif

namespace {

struct Choice {
  const char* name;
  const Kernels* kernels;
  bool usable;
};

const Choice* choices(int* count) noexcept {
#ifdef HOTBED_X86
  static const Choice all[] = {
      {"avx512", &avx512::kKernels, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")},
      {"avx2", &avx2::kKernels, static_cast<bool>(__builtin_cpu_supports("avx2"))},
      {"baseline", &baseline::kKernels, true}};
#else
  static const Choice all[] = {{"baseline", &baseline::kKernels, true}};
#endif
  *count = static_cast<int>(sizeof(all) / sizeof(all[0]));
  return all;
}

const Choice* best() noexcept {
  int count;
  const Choice* all = choices(&count);
  for (int i = 0; i < count; i++)
    if (all[i].usable) return &all[i];
  return &all[count - 1];
}

std::atomic<const Choice*> g_choice{nullptr};

const Choice& chosen() noexcept {
  const Choice* choice = g_choice.load(std::memory_order_relaxed);
  if (!choice) g_choice.store(choice = best(), std::memory_order_relaxed);
  return *choice;
}

uint32_t bits_of(float value) noexcept {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

float float_of(uint32_t bits) noexcept {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Drops the low `shift` bits of `bits`, rounding by noise or to nearest even.
uint32_t drop_bits(uint32_t bits, int shift, uint32_t noise) noexcept {
  const uint32_t low = (1u << shift) - 1;
  const uint32_t add = noise == kNearest ? (low >> 1) + ((bits >> shift) & 1) : noise & low;
  return (bits + add) >> shift;
}

}  // namespace

const Kernels& kernels() noexcept { return *chosen().kernels; }
const char* isa_name() noexcept { return chosen().name; }

bool set_isa(const char* name) noexcept {
  int count;
  const Choice* all = choices(&count);
  for (int i = 0; i < count; i++)
    if (std::strcmp(all[i].name, name) == 0 && all[i].usable) return g_choice.store(&all[i]), true;
  return false;
}

float decode_half(Dtype dtype, uint16_t half) noexcept {
  if (dtype == Dtype::kBfloat16) return float_of(static_cast<uint32_t>(half) << 16);
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest >= 0x0400u) return float_of(sign | ((rest << 13) + (112u << 23)));
  const float tiny = static_cast<float>(rest) * 0x1p-24f;  // subnormal
  return sign ? -tiny : tiny;
}

uint16_t encode_half(Dtype dtype, float value, uint32_t noise) noexcept {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | (dtype == Dtype::kBfloat16 ? 0x7fc0u : 0x7e00u));
  if (dtype == Dtype::kBfloat16) {
    if (magnitude == 0x7f800000u) return static_cast<uint16_t>(sign | 0x7f80u);
    const uint32_t rounded = drop_bits(magnitude, 16, noise);
    return static_cast<uint16_t>(sign | (rounded > 0x7f7fu ? 0x7f7fu : rounded));  // saturate: no row becomes infinite
  }
  if (magnitude == 0x7f800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  uint32_t rounded;
  if (magnitude >= 0x38800000u) {
    rounded = drop_bits(magnitude - (112u << 23), 13, noise);
  } else {  // subnormal in fp16: a multiple of 2^-24 with 13 more bits for the rounding
    const float scaled = float_of(magnitude) * 0x1p37f;
    uint32_t whole = static_cast<uint32_t>(scaled);
    if (noise == kNearest) whole |= static_cast<float>(whole) != scaled;  // what was cut still breaks a tie
    rounded = drop_bits(whole, 13, noise);
  }
  return static_cast<uint16_t>(sign | (rounded > 0x7bffu ? 0x7bffu : rounded));
}

}  // namespace hotbed
