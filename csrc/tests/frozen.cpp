// SPDX-License-Identifier: Apache-2.0
// A file of rows gives the slots of ids as a plain map does.
#include "core/frozen.h"

#include <doctest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <numeric>
#include <random>
#include <string>
#include <unordered_map>

using namespace hotbed;

namespace {

// A file that is removed at the end of its test.
class RowsFile {
 public:
  RowsFile(const std::vector<int64_t>& ids, const std::vector<int64_t>& removed, int dim) {
    std::vector<float> values(ids.size() * static_cast<size_t>(dim));
    std::iota(values.begin(), values.end(), 0.0f);
    write(frozen_rows(values.data(), ids.size(), dim, FrozenDtype::kFloat32));
    write(std::vector<uint8_t>(-written_ % 64));
    write(frozen_index(ids.data(), ids.size(), removed.data(), removed.size()));
    const FrozenFooter footer = frozen_footer(ids.size(), removed.size(), dim, FrozenDtype::kFloat32);
    std::fwrite(&footer, sizeof footer, 1, file_);
    std::fclose(file_);
  }
  ~RowsFile() { std::filesystem::remove(path); }

  const std::string path = std::filesystem::temp_directory_path() / ("hotbed-" + std::to_string(::getpid()) + ".rows");

 private:
  template <class T>
  void write(const std::vector<T>& items) {
    if (!items.empty()) written_ += sizeof(T) * std::fwrite(items.data(), sizeof(T), items.size(), file_);
  }

  std::FILE* file_ = std::fopen(path.c_str(), "wb");
  size_t written_ = 0;
};

std::vector<int64_t> slots_of(const RowsFile& file, const std::vector<int64_t>& ids) {
  std::vector<int64_t> slots(ids.size());
  FrozenRows(file.path).slots(ids.data(), ids.size(), slots.data());
  return slots;
}

}  // namespace

TEST_CASE("slots are those of a plain map, for any number of ids and lanes") {
  std::mt19937_64 random(1);
  for (const size_t n : {0u, 1u, 4u, 5u, 6u, 300u, 5000u}) {
    for (const int dim : {0, 1, 3}) {
      std::unordered_map<int64_t, int64_t> expected;
      std::vector<int64_t> ids, asked;
      while (ids.size() < n) {
        const int64_t id = static_cast<int64_t>(random() % 2 ? random() : random() % (4 * n));
        if (!expected.emplace(id, static_cast<int64_t>(ids.size())).second) continue;
        ids.push_back(id);
      }
      asked = ids;
      for (size_t i = 0; i < 200; i++) asked.push_back(static_cast<int64_t>(random() % 10000));
      const std::vector<int64_t> slots = slots_of(RowsFile(ids, {}, dim), asked);
      for (size_t i = 0; i < asked.size(); i++) {
        const auto found = expected.find(asked[i]);
        REQUIRE(slots[i] == (found == expected.end() ? -1 : found->second));
      }
    }
  }
}

TEST_CASE("removed ids have no slot") {
  CHECK(slots_of(RowsFile({7, 8}, {9}, 1), {9, 8, 7, 6}) == std::vector<int64_t>{-1, 1, 0, -1});
}

TEST_CASE("rows of slots are read in any order, and negative slots leave their place as it was") {
  std::vector<int64_t> ids(500), slots;
  std::iota(ids.begin(), ids.end(), -250);
  std::mt19937_64 random(2);
  for (size_t i = 0; i < 2000; i++) slots.push_back(static_cast<int64_t>(random() % 501) - 1);
  const RowsFile file(ids, {}, 3);
  std::vector<float> out(slots.size() * 3, -1.0f);
  FrozenRows(file.path).read_all(slots.data(), slots.size(), out.data());
  for (size_t i = 0; i < slots.size(); i++)
    for (size_t lane = 0; lane < 3; lane++)
      REQUIRE(out[3 * i + lane] ==
              (slots[i] < 0 ? -1.0f : static_cast<float>(3 * slots[i]) + static_cast<float>(lane)));
}
