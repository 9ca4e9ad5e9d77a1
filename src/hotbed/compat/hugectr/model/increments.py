# SPDX-License-Identifier: Apache-2.0
"""The rows of a table that have changed, as keys and vectors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from hotbed.compat.hugectr.weights.rows import lists_of
from hotbed.embedding.hashing import partition
from hotbed.embedding.table import Table
from hotbed.parallel import Shard


def track(tables: Iterable[Table]) -> None:
    """Record which rows change from now on, where the optimizer moves those of a batch only.

    The rows that are there were loaded from files, which a reader of the changes can load, too.
    """
    for table in tables:
        if table.rule.scope == "touched":
            table.track(saved=True)


def changed_rows(tables: Iterable[Table], shard: Shard) -> list[tuple[Any, Any]]:
    """Return keys and vectors of the rows of all ranks changed since the last call, by table.

    Their order is that of one process.
    """
    every = shard.gathered([_changed_here(table) for table in tables])
    changed = []
    for of_ranks in zip(*every, strict=True):
        keys, vectors = (np.concatenate(parts) for parts in zip(*of_ranks, strict=True))
        order = np.argsort(partition(keys), kind="stable")
        changed.append((keys[order], vectors[order]))
    return changed


def _changed_here(table: Table) -> tuple[Any, Any]:
    """Return keys int64 [n] and vectors float32 [n, dim] of the changed rows of this process.

    Where the optimizer moves all rows at every step, these are all rows.
    """
    if table.rule.scope == "touched":
        with table.snapshot(changes=True) as snapshot:
            parts = list(snapshot.rows())
    else:
        parts = list(table.export())
    keys = [part.column("id").to_numpy() for part in parts]
    vectors = [lists_of(part.column("value"), table.dim) for part in parts]
    return (
        np.concatenate([np.empty(0, np.int64), *keys]),
        np.concatenate([np.empty((0, table.dim), np.float32), *vectors]),
    )
