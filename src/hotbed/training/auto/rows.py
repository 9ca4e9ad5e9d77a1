# SPDX-License-Identifier: Apache-2.0
"""A weight as the rows of a table: row i of the weight is the row of id i."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from torch import Tensor

from hotbed.embedding.table import NEVER, Table

CHUNK = 2**16
"""Rows that are loaded at a time."""


def fill(
    table: Table,
    weight: Tensor,
    state: NDArray[np.float32] | None,
    step: int,
) -> None:
    """Load a weight into an empty table, with the optimizer state of its rows.

    Args:
        table: an empty table.
        weight: float32 [num rows, dim].
        state: [num rows, state width]; None = that of new rows.
        step: the number of updates so far.
    """
    rates = [[1, table.rule.lr]] if step else []
    table.load_scalars({**table.scalars(), "step": step, "rates": rates})
    values = weight.detach().cpu().contiguous().numpy()
    for start in range(0, len(values), CHUNK):
        ids = np.arange(start, min(start + CHUNK, len(values)))
        columns = {"id": pa.array(ids), "value": _lists(values[ids])}
        if state is not None and table.state_width:
            columns["state"] = _lists(state[ids])
        if table.clock == "steps":
            columns["last_seen"] = pa.array(np.full(len(ids), step, np.int64))
        table.load([pa.record_batch(columns)])


def load_weight(table: Table, weight: Tensor) -> None:
    """Replace the values of the rows 0, 1, … by those of a weight; their state stays."""
    table.native.catch_up()
    values = weight.detach().cpu().float().contiguous().numpy()
    for start in range(0, len(values), CHUNK):
        ids = np.arange(start, min(start + CHUNK, len(values)))
        table.load([pa.record_batch({"id": pa.array(ids), "value": _lists(values[ids])})])


def date_rows(table: Table, now: int) -> None:
    """Let the rows that were never seen be seen at `now`, in microseconds.

    A weight says nothing about when its rows were used last; without this, the first eviction by
    age would remove them all.
    """
    for batch in table.export():
        undated = batch.filter(pc.equal(batch.column("last_seen"), NEVER))
        if undated.num_rows:
            number = undated.schema.get_field_index("last_seen")
            times = pa.array(np.full(undated.num_rows, now, np.int64))
            table.load([undated.set_column(number, "last_seen", times)])


def _lists(values: NDArray[np.float32]) -> pa.Array:
    flat = np.ascontiguousarray(values).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), values.shape[1])
