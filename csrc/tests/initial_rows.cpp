// SPDX-License-Identifier: Apache-2.0
#include <doctest.h>

#include <bit>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "core/hash_bytes.h"
#include "core/init.h"
#include "core/kernels.h"
#include "draw.h"

using namespace hotbed;

namespace {

uint64_t key_of(uint64_t seed, std::string_view name) { return table_key(seed, hash_bytes(name.data(), name.size())); }

std::vector<float> row(const Init& init, uint64_t key, int64_t id, int dim) {
  std::vector<float> out(static_cast<size_t>(dim), NAN);
  initial_row(init, key, id, out.data(), dim);
  return out;
}

}  // namespace

TEST_CASE("initial rows are those of the golden file") {
  const Init uniform{InitKind::kUniform, 0.05}, normal{InitKind::kNormal, 0.01};
  const std::pair<int64_t, uint32_t> uniform_bits[] = {
      {-1, 0xba45099au}, {-2, 0x3b0ca74du}, {0, 0xbd2cf107u}, {INT64_MIN, 0xbd180eb3u}};
  for (const auto& [id, bits] : uniform_bits)
    CHECK(std::bit_cast<uint32_t>(row(uniform, key_of(0, "user"), id, 1)[0]) == bits);
  const uint32_t five[] = {0xba45099au, 0xbd18c3cdu, 0x3c8b9433u, 0xbcb525d0u, 0x3d365ddfu};
  for (size_t d = 0; d < 5; d++) CHECK(std::bit_cast<uint32_t>(row(uniform, key_of(0, "user"), -1, 5)[d]) == five[d]);
  const std::pair<int64_t, uint32_t> normal_bits[] = {{-1, 0x3c081c3du}, {-2, 0x3c3013c2u}, {0, 0xbcb3d4d8u}};
  for (const auto& [id, bits] : normal_bits)
    CHECK(std::bit_cast<uint32_t>(row(normal, key_of(0, "user"), id, 1)[0]) == bits);
}

TEST_CASE("lanes do not depend on how many there are") {
  for (InitKind kind : {InitKind::kUniform, InitKind::kNormal}) {
    const std::vector<float> wide = row({kind, 0.1}, 99, -7, 1000);
    for (int dim : {1, 2, 3, 16, 33}) {
      const std::vector<float> narrow = row({kind, 0.1}, 99, -7, dim);
      for (size_t d = 0; d < narrow.size(); d++) REQUIRE(narrow[d] == wide[d]);
    }
  }
}

TEST_CASE("uniform rows are those of the plain formula on every instruction set") {
  const std::string chosen = isa_name();
  for (const char* isa : {"baseline", "avx2", "avx512"}) {
    if (!set_isa(isa)) continue;
    for (const uint64_t key : {0ull, 1ull, ~0ull, 0x123456789abcdefull})
      for (int dim = 1; dim <= 50; dim++) {
        std::vector<float> numbers(static_cast<size_t>(dim));
        kernels().uniform(key, 0.05f, numbers.data(), dim);
        for (int i = 0; i < dim; i++) {
          const uint64_t draw = mix64(key + static_cast<uint64_t>(i / 2 + 1) * kGolden);
          const uint32_t half = static_cast<uint32_t>(i % 2 ? draw : draw >> 32);
          const float unit = static_cast<float>(half >> 8) / 16777216.0f;
          REQUIRE(numbers[static_cast<size_t>(i)] == (2.0f * unit - 1.0f) * 0.05f);
        }
      }
  }
  set_isa(chosen.c_str());
}

TEST_CASE("uniform rows lie in [-scale, scale) and are even") {
  double sum = 0, squares = 0;
  int64_t n = 0;
  for (int64_t id = -5000; id < 5000; id++)
    for (float x : row({InitKind::kUniform, 0.5}, key_of(1, "t"), id, 16)) {
      REQUIRE(x >= -0.5f);
      REQUIRE(x < 0.5f);
      sum += x, squares += double{x} * x, n++;
    }
  CHECK(std::abs(sum / n) < 0.003);
  CHECK(squares / n == doctest::Approx(1.0 / 12).epsilon(0.02));
}

TEST_CASE("normal rows have the asked standard deviation and are finite") {
  double sum = 0, squares = 0, fourth = 0;
  int64_t n = 0;
  for (int64_t id = -5000; id < 5000; id++)
    for (float x : row({InitKind::kNormal, 2.0}, key_of(1, "t"), id, 16)) {
      REQUIRE(std::isfinite(x));
      const double z = x / 2.0;
      sum += z, squares += z * z, fourth += z * z * z * z, n++;
    }
  CHECK(std::abs(sum / n) < 0.01);
  CHECK(squares / n == doctest::Approx(1.0).epsilon(0.02));
  CHECK(fourth / n == doctest::Approx(3.0).epsilon(0.06));
}

TEST_CASE("a constant is a constant") {
  for (float x : row({InitKind::kConstant, 0.25}, 1, 2, 7)) CHECK(x == 0.25f);
}

TEST_CASE("the own logarithm and power are as good as the library's") {
  Draw draw(3);
  for (int i = 0; i < 2000; i++) {
    const double x = std::ldexp(draw.unit() + 1e-9, static_cast<int>(draw.below(200)) - 100);
    REQUIRE(exact_log(x) == doctest::Approx(std::log(x)).epsilon(1e-12));
    const double e = draw.around() * 900.0;
    REQUIRE(exact_exp2(e) == doctest::Approx(std::exp2(e)).epsilon(1e-12));
  }
  CHECK(exact_exp2(0.0) == 1.0);
  CHECK(exact_exp2(10.0) == 1024.0);
}

TEST_CASE("occurrence draws are even and a function of their arguments") {
  int below = 0;
  for (int64_t id = 0; id < 20000; id++) {
    const double x = occurrence_draw(5, id, 1);
    REQUIRE(x >= 0.0);
    REQUIRE(x < 1.0);
    REQUIRE(x == occurrence_draw(5, id, 1));
    below += x < 0.3;
  }
  CHECK(std::abs(below - 6000) < 300);
}
