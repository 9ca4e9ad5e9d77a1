# SPDX-License-Identifier: Apache-2.0
"""Ids: the only jagged type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.errors import RowShapeError


@dataclass(frozen=True, eq=False)
class Ids:
    """The ids of one feature for n samples.

    `values`: int64 [m], every 64-bit value is an ordinary id. `offsets`: int64 [n + 1], sample i owns
    `values[offsets[i]:offsets[i + 1]]`; None = exactly one id a sample (m = n). `weights`: float32 [m] or None (all 1).
    The arrays are NumPy's, or tensors after `Batch.map_arrays`.

    Example: `Ids(np.array([7, 8, 9]), np.array([0, 2, 3]))` holds [7, 8] and [9]; its `len` is 2.
    """

    values: Any
    offsets: Any = None
    weights: Any = None

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def __getitem__(self, rows: slice) -> Ids:
        start, stop, _ = rows.indices(len(self))
        if self.offsets is None:
            weights = None if self.weights is None else self.weights[start:stop]
            return Ids(self.values[start:stop], None, weights)
        stop = max(start, stop)
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        weights = None if self.weights is None else self.weights[first:last]
        return Ids(self.values[first:last], self.offsets[start : stop + 1] - first, weights)

    def lengths(self) -> Any:
        """Number of ids of each sample, [n]."""
        return np.ones(len(self), np.int64) if self.offsets is None else self.offsets[1:] - self.offsets[:-1]

    def with_offsets(self) -> Ids:
        """The same ids with explicit offsets (NumPy only)."""
        return (
            self
            if self.offsets is not None
            else Ids(self.values, np.arange(len(self) + 1, dtype=np.int64), self.weights)
        )

    def take(self, rows: np.ndarray) -> Ids:
        """The given samples in the given order (NumPy only)."""
        if self.offsets is None:
            return Ids(self.values[rows], None, None if self.weights is None else self.weights[rows])
        starts, lengths = self.offsets[:-1][rows], self.lengths()[rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        index = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Ids(self.values[index], offsets, None if self.weights is None else self.weights[index])

    def map_arrays(self, fn: Callable[[Any], Any]) -> Ids:
        """`fn` applied to each array."""
        return Ids(
            fn(self.values),
            None if self.offsets is None else fn(self.offsets),
            None if self.weights is None else fn(self.weights),
        )

    @staticmethod
    def concat(parts: Sequence[Ids]) -> Ids:
        """All samples of `parts`, in order (NumPy only)."""
        if len(parts) == 1:
            return parts[0]
        weights = None if parts[0].weights is None else np.concatenate([part.weights for part in parts])
        values = np.concatenate([part.values for part in parts])
        if all(part.offsets is None for part in parts):
            return Ids(values, None, weights)
        offsets = np.zeros(sum(map(len, parts)) + 1, np.int64)
        np.cumsum(np.concatenate([part.lengths() for part in parts]), out=offsets[1:])
        return Ids(values, offsets, weights)


def as_ids(ids: Any, what: str = "ids") -> NDArray[np.int64]:
    """Any int64 or uint64 buffer as a contiguous int64 array [n]; RowShapeError otherwise."""
    if isinstance(ids, (pa.Array, pa.ChunkedArray)):
        if ids.null_count:
            raise RowShapeError(f"{what}: nulls name nothing — received {ids.null_count} nulls — drop or fill them")
        ids = ids.to_numpy(zero_copy_only=False) if isinstance(ids, pa.Array) else ids.to_numpy()
    elif not isinstance(ids, (np.ndarray, list, tuple)) and hasattr(ids, "__dlpack__"):
        ids = np.from_dlpack(ids)
    array = np.asarray(ids, np.int64) if isinstance(ids, (list, tuple)) else np.asarray(ids)
    if array.dtype == np.uint64:
        array = array.view(np.int64)
    if array.dtype != np.int64 or array.ndim != 1:
        raise RowShapeError(
            f"{what}: expected int64 [n] — received {array.dtype} {list(array.shape)} — convert or flatten them"
        )
    return np.ascontiguousarray(array)
