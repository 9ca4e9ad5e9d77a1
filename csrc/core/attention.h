// SPDX-License-Identifier: Apache-2.0
// Attention over packed histories on all threads. Each sample is computed alone, so that no bit depends on threads.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace hotbed {

void attend(const PackedRows& history, const Attention& attention, int64_t num_samples);
void attend_backward(const PackedRows& history, const Attention& attention, const AttentionGrads& grads,
                     int64_t num_samples);

}  // namespace hotbed
