# SPDX-License-Identifier: Apache-2.0
"""Rows of tables as arrays, and arrays as rows of tables."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.compat.hugectr.weights.gathered import Rows
from hotbed.errors import FormatError

log = logging.getLogger("hotbed.compat.hugectr")

_BATCH_ROWS = 65_536


def rows_of(table: Rows) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Yield ids [n] and vectors [n, dim]."""
    for batch in table.export():
        yield batch.column("id").to_numpy(), lists_of(batch.column("value"), table.dim)


def lists_of(column: pa.Array, width: int) -> NDArray[np.float32]:
    """Return a column of lists as a matrix [n, width]."""
    values: NDArray[np.float32] = column.flatten().to_numpy()
    return values.reshape(-1, width)


def batches(
    keys: NDArray[Any],
    vectors: NDArray[Any],
    states: NDArray[Any] | None = None,
    missed: NDArray[Any] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield rows for `Table.load`.

    Args:
        keys: [n].
        vectors: [n, dim].
        states: [kinds of state, at least n, dim].
        missed: the steps that each row has still to catch up with, [n].
    """
    for first in range(0, len(keys), _BATCH_ROWS):
        end = min(first + _BATCH_ROWS, len(keys))
        part = slice(first, end)
        ids = np.ascontiguousarray(keys[part]).astype(np.int64)
        columns = {"id": pa.array(ids), "value": _list_column(vectors[part])}
        if states is not None:
            by_row = states[:, part].swapaxes(0, 1)
            columns["state"] = _list_column(by_row.reshape(end - first, -1))
        if missed is not None:
            columns["missed"] = pa.array(missed[part].astype(np.uint32))
        yield pa.record_batch(columns)


def _list_column(matrix: NDArray[Any]) -> pa.Array:
    flat = np.ascontiguousarray(matrix, np.float32).reshape(-1)
    values = pa.array(flat)
    return pa.FixedSizeListArray.from_arrays(values, matrix.shape[1])


def check_read(path: Path, keys: NDArray[Any], valid: range | None = None) -> None:
    """Raise FormatError if a key comes twice; warn of keys that the slots do not have.

    Such keys are ordinary ones in training, so that files of a trained model may hold them.

    Args:
        path: of the rows, in messages.
        keys: [n].
        valid: the keys by `slot_size_array`; None = any.
    """
    if valid is not None:
        is_outside = (keys < valid.start) | (keys >= valid.stop)
        if is_outside.any():
            row = int(np.argmax(is_outside))
            log.warning(
                "%s: row %d: expected a key from %d to %d, as slot_size_array says, got %d, and "
                "%d such keys of %d. Correct slot_size_array, unless training had these keys, too.",
                path,
                row,
                valid.start,
                valid.stop - 1,
                int(keys[row]),
                np.count_nonzero(is_outside),
                len(keys),
            )
    if len(np.unique(keys)) == len(keys):
        return
    order = np.argsort(keys, kind="stable")
    place = int(np.argmax(keys[order[1:]] == keys[order[:-1]]))
    first = order[place]
    second = order[place + 1]
    raise FormatError(
        f"{path}: row {second}: expected each key once, got {keys[first]} of row {first} again. "
        "Check the type of keys and the vector size, or write the file anew."
    )


def check_finite(path: Path, vectors: NDArray[Any]) -> None:
    """Raise FormatError with the row of a number that is NaN or infinite.

    Args:
        path: of the file, in messages.
        vectors: [n, dim], which may be mapped.
    """
    for first in range(0, len(vectors), _BATCH_ROWS):
        is_wrong = ~np.isfinite(vectors[first : first + _BATCH_ROWS])
        if is_wrong.any():
            row, lane = divmod(int(np.argmax(is_wrong)), is_wrong.shape[1])
            raise FormatError(
                f"{path}: row {first + row}: expected finite numbers, got "
                f"{vectors[first + row, lane]}. Give the file of an earlier save."
            )


def check_squares(path: Path, sums: NDArray[Any]) -> None:
    """Raise FormatError if a state that sums squares has a negative number."""
    if not (sums < 0).any():
        return
    place = int(np.argmax(sums < 0))
    raise FormatError(
        f"{path}: expected sums of squares, got {sums.flat[place]} at number {place} of them. Give "
        "the state of this optimizer: that of another one may have the same size."
    )


def warn_of_sums(path: Path, momentum: NDArray[Any]) -> None:
    """Warn of a state that is to be momentum and has no negative number.

    A file of states does not say whose they are, and sums of squares may have its size.
    """
    if momentum.size > 1 and momentum.min() >= 0 and momentum.any():
        log.warning(
            "%s: it is taken as momentum, and has no negative number, as the sums of AdaGrad have "
            "none. Give the state of this very optimizer, or leave it out.",
            path,
        )


def check_keys(path: Path, ids: NDArray[np.int64], *, i64: bool) -> None:
    """Raise FormatError if a file with keys of 32 bits cannot hold an id."""
    if i64 or not len(ids):
        return
    smallest = int(ids.min())
    largest = int(ids.max())
    if smallest < 0 or largest >= 2**32:
        wrong = smallest if smallest < 0 else largest
        raise FormatError(
            f"{path}: a key of 32 bits cannot hold this id, got {wrong}. Set i64_input_key=True."
        )
