# SPDX-License-Identifier: Apache-2.0
"""Many small dicts as a few arrays, for the state of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

Tables = dict[str, dict[str, int]]


def columns(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return dicts of floats as names and float64 [n, names].

    A missing name is nan in `values` and 0 in `held`.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    values = np.full((len(rows), len(names)), math.nan)
    present = np.zeros((len(rows), len(names)), np.uint8)
    for number, row in enumerate(rows):
        for column, name in enumerate(names):
            if name in row:
                values[number, column] = row[name]
                present[number, column] = 1
    return {"names": names, "values": values, "held": present}


def rows_of(state: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the dicts that `columns` described."""
    rows = []
    values = np.asarray(state["values"]).tolist()
    for row, present in zip(values, np.asarray(state["held"]).tolist(), strict=True):
        named = zip(state["names"], row, present, strict=True)
        rows.append({name: value for name, value, is_present in named if is_present})
    return rows


def counters(rows: Sequence[Tables]) -> dict[str, Any]:
    """Return counters of tables as pairs of names and int64 [n, pairs]; -1 where one is missing.

    Bytes and the reasons of evictions are left out, see `is_counter`.
    """
    pairs: dict[tuple[str, str], None] = {}  # ordered
    for row in rows:
        for table, stats in row.items():
            pairs |= dict.fromkeys((table, key) for key in stats if is_counter(key))
    values = np.full((len(rows), len(pairs)), -1, np.int64)
    for number, row in enumerate(rows):
        for column, (table, key) in enumerate(pairs):
            values[number, column] = row.get(table, {}).get(key, -1)
    return {"names": [list(pair) for pair in pairs], "values": values}


def tables_of(state: Mapping[str, Any]) -> list[Tables]:
    """Return the counters that `counters` described."""
    counters_by_row: list[Tables] = []
    for row in np.asarray(state["values"]).tolist():
        tables: Tables = {}
        for (table, key), value in zip(state["names"], row, strict=True):
            if value >= 0:
                tables.setdefault(table, {})[key] = value
        counters_by_row.append(tables)
    return counters_by_row


def is_counter(key: str) -> bool:
    """Return whether a statistic of a table follows from the stream alone.

    Rows and admissions do. Bytes do not, nor the reasons of evictions: when expired rows are swept
    may depend on checkpoints.
    """
    return "bytes" not in key and not is_reason(key)


@cache  # asked of each statistic at each point; there are few names
def is_reason(key: str) -> bool:
    """Return whether a statistic of a table counts evicted rows of one reason."""
    return key.startswith("evicted_")
