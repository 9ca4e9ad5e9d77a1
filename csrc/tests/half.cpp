// SPDX-License-Identifier: Apache-2.0
// bf16 and fp16 storage, over every bit pattern.
#include <doctest.h>

#include <cmath>
#include <limits>

#include "core/kernels.h"
#include "draw.h"

using namespace hotbed;

namespace {

const Dtype kHalves[] = {Dtype::kBfloat16, Dtype::kFloat16};

double value_of(Dtype dtype, uint16_t bits) {  // from the definition of the formats
  const int mantissa_bits = dtype == Dtype::kBfloat16 ? 7 : 10, bias = dtype == Dtype::kBfloat16 ? 127 : 15;
  const int exponent_bits = 15 - mantissa_bits, top = (1 << exponent_bits) - 1;
  const int exponent = bits >> mantissa_bits & top, mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == top) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

bool finite_bits(Dtype dtype, uint32_t bits) { return std::isfinite(value_of(dtype, static_cast<uint16_t>(bits))); }

}  // namespace

TEST_CASE("every half decodes to its value and encodes back to itself") {
  for (Dtype dtype : kHalves)
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
      const float x = decode_half(dtype, static_cast<uint16_t>(bits));
      if (std::isnan(value_of(dtype, static_cast<uint16_t>(bits)))) {
        REQUIRE(std::isnan(x));
        REQUIRE(std::isnan(decode_half(dtype, encode_half(dtype, x, kNearest))));
        continue;
      }
      REQUIRE(static_cast<double>(x) == value_of(dtype, static_cast<uint16_t>(bits)));
      REQUIRE(encode_half(dtype, x, kNearest) == bits);
      if (std::isfinite(x)) REQUIRE(encode_half(dtype, x, 0) == bits);  // exact values take no noise
      if (std::isfinite(x)) REQUIRE(encode_half(dtype, x, 0xffff) == bits);
    }
}

TEST_CASE("rounding to nearest takes the closer half, and the even one of two equally close") {
  for (Dtype dtype : kHalves)
    for (uint32_t bits = 0; finite_bits(dtype, bits + 1); bits++) {
      const double low = value_of(dtype, static_cast<uint16_t>(bits)),
                   high = value_of(dtype, static_cast<uint16_t>(bits + 1));
      const float middle = static_cast<float>((low + high) / 2);
      if (static_cast<double>(middle) != (low + high) / 2) continue;
      REQUIRE(encode_half(dtype, middle, kNearest) == (bits % 2 ? bits + 1 : bits));
      REQUIRE(encode_half(dtype, std::nextafter(middle, 0.0f), kNearest) == bits);
      REQUIRE(encode_half(dtype, std::nextafter(middle, INFINITY), kNearest) == bits + 1);
      REQUIRE(encode_half(dtype, -middle, kNearest) == (0x8000u | (bits % 2 ? bits + 1 : bits)));
    }
}

TEST_CASE("what is too large for a half stays finite") {
  CHECK(std::isfinite(decode_half(Dtype::kFloat16, encode_half(Dtype::kFloat16, 1e30f, kNearest))));
  CHECK(std::isfinite(
      decode_half(Dtype::kBfloat16, encode_half(Dtype::kBfloat16, std::numeric_limits<float>::max(), kNearest))));
  CHECK(std::isfinite(decode_half(Dtype::kFloat16, encode_half(Dtype::kFloat16, -65519.9f, 0xffff))));
}

TEST_CASE("stochastic rounding is right on average") {
  for (Dtype dtype : kHalves)
    for (float x : {0.1f, -0.3f, 1.2345f, 3e-6f, -700.123f}) {
      Draw draw(17);
      double sum = 0, spacing = 0;
      const int n = 40000;
      for (int i = 0; i < n; i++) {
        const float rounded = decode_half(dtype, encode_half(dtype, x, static_cast<uint32_t>(draw.next() & 0xffff)));
        spacing = std::max(spacing, std::abs(static_cast<double>(rounded) - x));
        sum += rounded;
      }
      CAPTURE(x);
      CHECK(std::abs(sum / n - x) < spacing * 0.02 + 1e-30);
    }
}
