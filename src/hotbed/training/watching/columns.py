# SPDX-License-Identifier: Apache-2.0
"""Many small dicts as a few arrays, for the state of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Tables = dict[str, dict[str, int]]


def columns(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return dicts of floats as names and float64 [n, names].

    A missing name is nan in `values` and 0 in `held`.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    values = np.array([[row.get(name, math.nan) for name in names] for row in rows], np.float64)
    held = np.array([[name in row for name in names] for row in rows], np.bool_)
    shape = (len(rows), len(names))
    return {
        "names": names,
        "values": values.reshape(shape),
        "held": held.reshape(shape).astype(np.uint8),
    }


def rows_of(state: Mapping[str, Any]) -> list[dict[str, float]]:
    """Inverse of `columns`."""
    values = np.asarray(state["values"]).tolist()
    held = np.asarray(state["held"]).tolist()
    return [
        {name: value for name, value, there in zip(state["names"], row, mask, strict=True) if there}
        for row, mask in zip(values, held, strict=True)
    ]


def counters(rows: Sequence[Tables]) -> dict[str, Any]:
    """Return counters of tables as pairs of names and int64 [n, pairs]; -1 where one is missing.

    Bytes are left out, because they depend on the machine.
    """
    pairs = list(
        dict.fromkeys(
            (t, key) for row in rows for t, stats in row.items() for key in stats if is_counter(key)
        )
    )
    values = [[row.get(table, {}).get(key, -1) for table, key in pairs] for row in rows]
    return {
        "names": [list(pair) for pair in pairs],
        "values": np.array(values, np.int64).reshape(len(rows), len(pairs)),
    }


def tables_of(state: Mapping[str, Any]) -> list[Tables]:
    """Inverse of `counters`."""
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

    Rows and admissions do; bytes do not.
    """
    return "bytes" not in key
