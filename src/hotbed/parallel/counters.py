# SPDX-License-Identifier: Apache-2.0
"""The counters of tables, added over ranks."""

from __future__ import annotations

from collections.abc import Sequence

Counters = dict[str, dict[str, int]]
"""Of each table by name, its counters by name."""


def sum_counters(every: Sequence[Sequence[Counters]]) -> list[Counters]:
    """Return the counters at some moments, of all ranks; `every`: those of each rank."""
    totals: list[Counters] = []
    for of_ranks in zip(*every, strict=True):
        total: Counters = {}
        for name, counts in ((name, c) for of_rank in of_ranks for name, c in of_rank.items()):
            sums = total.setdefault(name, {})
            for key, count in counts.items():
                # what was expected of a table is a number for all ranks
                sums[key] = count if key == "capacity" else sums.get(key, 0) + count
        totals.append(total)
    return totals
