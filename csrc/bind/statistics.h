// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include "core/table.h"

inline nanobind::dict statistics_of(const hotbed::TableStats& s) {
  nanobind::dict out;
  out["rows"] = s.rows, out["admitted"] = s.admitted, out["refused"] = s.refused, out["evicted"] = s.evicted;
  out["index_bytes"] = s.index_bytes, out["row_bytes"] = s.row_bytes, out["candidate_bytes"] = s.candidate_bytes;
  out["sketched_partitions"] = s.sketched_partitions;
  return out;
}
