// SPDX-License-Identifier: Apache-2.0
#include "attention.h"

#include <algorithm>

#include "thread_pool.h"

namespace hotbed {
namespace {

constexpr int64_t kTaskFloats = 1 << 16;  // of rows, about

// Calls work(first, last) for ranges of samples with about equal numbers of rows, from several threads.
template <class Work>
void each_range_of_samples(const PackedRows& history, int64_t num_samples, const Work& work) {
  const int64_t task_rows = std::max<int64_t>(1, kTaskFloats / history.dim);
  const int64_t* begins = history.offsets;
  const auto first_from = [&](int64_t row) { return std::lower_bound(begins, begins + num_samples, row) - begins; };
  const int64_t num_tasks = begins[num_samples] / task_rows + 1;
  ThreadPool::instance().run(static_cast<int>(num_tasks),
                             [&](int task) { work(first_from(task * task_rows), first_from((task + 1) * task_rows)); });
}

}  // namespace

void attend(const PackedRows& history, const Attention& attention, int64_t num_samples) {
  each_range_of_samples(history, num_samples,
                        [&](int64_t first, int64_t last) { kernels().attend(history, attention, first, last); });
}

void attend_backward(const PackedRows& history, const Attention& attention, const AttentionGrads& grads,
                     int64_t num_samples) {
  each_range_of_samples(history, num_samples, [&](int64_t first, int64_t last) {
    kernels().attend_backward(history, attention, grads, first, last);
  });
}

}  // namespace hotbed
