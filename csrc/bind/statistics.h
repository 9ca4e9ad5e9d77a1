// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include "core/table.h"

inline nanobind::dict statistics_of(const hotbed::TableStats& s) {
  nanobind::dict out;
  out["rows"] = s.rows, out["admitted"] = s.admitted, out["refused"] = s.refused, out["evicted"] = s.evicted;
  out["evicted_expired"] = s.evicted_rows[0], out["evicted_over_cap"] = s.evicted_rows[1];
  out["evicted_removed"] = s.evicted_rows[2], out["evicted_restarted"] = s.evicted_rows[3];
  out["index_bytes"] = s.index_bytes, out["row_bytes"] = s.row_bytes, out["candidate_bytes"] = s.candidate_bytes;
  out["sketched_partitions"] = s.sketched_partitions;
  return out;
}
