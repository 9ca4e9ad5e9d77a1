# SPDX-License-Identifier: Apache-2.0
"""Batch: what a Dataset yields and a network is called with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hotbed.connectors.base import Position
from hotbed.data.ids import Ids


@dataclass(frozen=True, eq=False)
class Batch:
    """n samples, column by column.

    `ids`: Ids by feature name. `dense`: float32 [n] or [n, k] by name. `labels`: float32 [n] by name (empty when
    encoded for prediction). `weight`: float32 [n] or None. `time`: int64 [n], microseconds UTC, or None. `position`:
    where the Dataset is after this batch. Arrays are NumPy's, or tensors after `map_arrays`.

    Example: `batch.map_arrays(torch.from_numpy)`, `batch[10:20]`, `batch.ids["user"].values`.
    """

    ids: Mapping[str, Ids] = field(default_factory=dict)
    dense: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, Any] = field(default_factory=dict)
    weight: Any = None
    time: Any = None
    position: Position | None = None
    num_samples: int = -1

    def __post_init__(self) -> None:
        if self.num_samples < 0:
            columns = [*self.labels.values(), *self.ids.values(), *self.dense.values(), self.time, self.weight]
            object.__setattr__(self, "num_samples", next((len(column) for column in columns if column is not None), 0))

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, rows: slice) -> Batch:
        start, stop, _ = rows.indices(self.num_samples)
        stop = max(start, stop)
        return Batch(
            {name: ids[start:stop] for name, ids in self.ids.items()},
            {name: values[start:stop] for name, values in self.dense.items()},
            {name: values[start:stop] for name, values in self.labels.items()},
            None if self.weight is None else self.weight[start:stop],
            None if self.time is None else self.time[start:stop],
            None,
            stop - start,
        )

    def at(self, position: Position) -> Batch:
        """The same samples, with `position`."""
        return replace(self, position=position)

    def map_arrays(self, fn: Callable[[Any], Any]) -> Batch:
        """A Batch of `fn(array)` for each array; `fn` keeps the first axis."""
        return Batch(
            {name: ids.map_arrays(fn) for name, ids in self.ids.items()},
            {name: fn(values) for name, values in self.dense.items()},
            {name: fn(values) for name, values in self.labels.items()},
            None if self.weight is None else fn(self.weight),
            None if self.time is None else fn(self.time),
            self.position,
            self.num_samples,
        )

    def take(self, rows: np.ndarray) -> Batch:
        """The given samples in the given order (NumPy only)."""
        return Batch(
            {name: ids.take(rows) for name, ids in self.ids.items()},
            {name: values[rows] for name, values in self.dense.items()},
            {name: values[rows] for name, values in self.labels.items()},
            None if self.weight is None else self.weight[rows],
            None if self.time is None else self.time[rows],
            None,
            len(rows),
        )

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """All samples of `parts` (of one schema), in order (NumPy only)."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        return Batch(
            {name: Ids.concat([part.ids[name] for part in parts]) for name in first.ids},
            {name: np.concatenate([part.dense[name] for part in parts]) for name in first.dense},
            {name: np.concatenate([part.labels[name] for part in parts]) for name in first.labels},
            None if first.weight is None else np.concatenate([part.weight for part in parts]),
            None if first.time is None else np.concatenate([part.time for part in parts]),
            None,
            sum(part.num_samples for part in parts),
        )
