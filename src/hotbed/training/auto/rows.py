# SPDX-License-Identifier: Apache-2.0
"""A weight as the rows of a table: row i of the weight is the row of id i."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.embedding.snapshot import flat_rows
from hotbed.embedding.table import Table

CHUNK = 2**16
"""Rows that are loaded at a time."""


def fill(
    table: Table,
    weight: Tensor,
    state: Sequence[Tensor],
    step: int,
    ids: NDArray[np.int64] | None = None,
) -> None:
    """Load a weight into an empty table, with the optimizer state of its rows.

    Args:
        table: an empty table.
        weight: float32 [num rows, dim].
        state: the slots of its rule, each [num rows, its width]; empty = that of new rows.
        step: the number of updates so far.
        ids: of the rows; None = 0, 1, …
    """
    if ids is None:
        ids = np.arange(len(weight))
    rates = [[1, table.rule.lr]] if step else []
    table.load_scalars({**table.scalars(), "step": step, "rates": rates})
    for batch in _batches(table, weight, state, step, ids):
        table.load([batch])


def check_rows(table: Table, weight: Tensor, state: Sequence[Tensor]) -> None:
    """Raise RowShapeError if `fill` would reject a row of a weight. Change nothing."""
    for batch in _batches(table, weight, state, 0, np.arange(len(weight))):
        flat_rows(batch, table.dim, table.state_width, f"table {table.name!r}")


def _batches(
    table: Table, weight: Tensor, state: Sequence[Tensor], step: int, ids: NDArray[np.int64]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a weight as the table loads them."""
    has_state = bool(state) and table.state_width > 0
    for start in range(0, len(weight), CHUNK):
        stop = min(start + CHUNK, len(weight))
        columns = {"id": pa.array(ids[start:stop]), "value": _lists(weight[start:stop])}
        if has_state:
            slots = [slot[start:stop] for slot in state]
            columns["state"] = _lists(torch.cat(slots, 1))
        if table.clock == "steps":
            times = np.full(stop - start, step, np.int64)
            columns["last_seen"] = pa.array(times)
        yield pa.record_batch(columns)


def load_weight(table: Table, weight: Tensor) -> None:
    """Replace the values of the rows 0, 1, … by those of a weight; their state stays."""
    for start in range(0, len(weight), CHUNK):
        stop = min(start + CHUNK, len(weight))
        columns = {"id": pa.array(np.arange(start, stop)), "value": _lists(weight[start:stop])}
        table.load([pa.record_batch(columns)])


def _lists(rows: Tensor) -> pa.Array:
    values = rows.detach().to("cpu", torch.float32)
    flat = values.contiguous().view(-1).numpy()
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), rows.shape[1])
