// SPDX-License-Identifier: Apache-2.0
#include "init.h"

#include <cmath>
#include <utility>

#include "hash.h"
#include "kernels.h"

namespace hotbed {
namespace {

constexpr double kLn2 = 0.6931471805599453, kTwoPi = 6.283185307179586;

struct Direction {
  double cosine, sine;
};

// Cosine and sine of 2*pi*turn for turn in [0, 1): reduced to an eighth of a turn, then Taylor.
Direction direction(double turn) noexcept {
  const double quarter = std::floor(4.0 * turn + 0.5);
  const double x = (turn - quarter * 0.25) * kTwoPi, x2 = x * x;
  const double s =
      x * (1.0 - x2 / 6.0 * (1.0 - x2 / 20.0 * (1.0 - x2 / 42.0 * (1.0 - x2 / 72.0 * (1.0 - x2 / 110.0)))));
  const double c =
      1.0 -
      x2 / 2.0 * (1.0 - x2 / 12.0 * (1.0 - x2 / 30.0 * (1.0 - x2 / 56.0 * (1.0 - x2 / 90.0 * (1.0 - x2 / 132.0)))));
  switch (static_cast<int>(quarter) & 3) {
    case 0: return {c, s};
    case 1: return {-s, c};
    case 2: return {-c, -s};
    default: return {s, -c};
  }
}

}  // namespace

double exact_log(double x) noexcept {
  int exponent;
  double m = std::frexp(x, &exponent);  // [1/2, 1)
  if (m < 0.7071067811865476) m *= 2.0, exponent--;
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  const double series =
      1.0 +
      z * (1.0 / 3.0 +
           z * (1.0 / 5.0 +
                z * (1.0 / 7.0 + z * (1.0 / 9.0 + z * (1.0 / 11.0 + z * (1.0 / 13.0 + z * (1.0 / 15.0 + z / 17.0)))))));
  return exponent * kLn2 + 2.0 * s * series;
}

double exact_exp2(double x) noexcept {
  const double whole = std::floor(x), t = (x - whole) * kLn2;
  double term = 1.0, sum = 1.0;
  for (int i = 1; i <= 20; i++) term = term * t / i, sum += term;
  return std::ldexp(sum, static_cast<int>(whole < -1000.0 ? -1000.0 : whole > 1000.0 ? 1000.0 : whole));
}

double log2_sum(double a, double b) noexcept {
  if (a < b) std::swap(a, b);
  return std::isinf(b) ? a : a + exact_log(1.0 + exact_exp2(b - a)) / kLn2;
}

void initial_row(const Init& init, uint64_t key, int64_t id, float* out, int dim) noexcept {
  if (init.kind == InitKind::kConstant) {
    for (int i = 0; i < dim; i++) out[i] = static_cast<float>(init.scale);
    return;
  }
  const uint64_t k = mix64(key ^ mix64(static_cast<uint64_t>(id) + kGolden));
  if (init.kind == InitKind::kUniform) {
    kernels().uniform(k, static_cast<float>(init.scale), out, dim);
    return;
  }
  for (int i = 0, pair = 1; i < dim; i += 2, pair++) {  // Box-Muller
    const uint64_t u = mix64(k + static_cast<uint64_t>(pair) * kGolden);
    const uint32_t high = static_cast<uint32_t>(u >> 32) >> 8, low = static_cast<uint32_t>(u) >> 8;
    const double radius = std::sqrt(-2.0 * exact_log((high + 1.0) * 0x1p-24));
    const Direction to = direction(low * 0x1p-24);
    out[i] = static_cast<float>(radius * to.cosine * init.scale);
    if (i + 1 < dim) out[i + 1] = static_cast<float>(radius * to.sine * init.scale);
  }
}

double occurrence_draw(uint64_t key, int64_t id, uint64_t count) noexcept {
  return static_cast<double>(mix64(mix64(key ^ mix64(static_cast<uint64_t>(id))) + count) >> 11) * 0x1p-53;
}

}  // namespace hotbed
