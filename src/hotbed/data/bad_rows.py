# SPDX-License-Identifier: Apache-2.0
"""Rows that are not as they should be.

Those that cannot be encoded: where they came from, and what is kept of them. Those whose ids exceed
what was declared: how many.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.connectors.position import PLACE, Position
from hotbed.connectors.source import Source
from hotbed.connectors.times import with_readable_times
from hotbed.data.batch import Batch, Ids
from hotbed.errors import DataError, DecodeError

log = logging.getLogger("hotbed")


def dead_letters(rows: pa.RecordBatch, reason: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield place, reason and content of rows of an endless source that were left out.

    Raises:
        DataError: the rows have no places.
    """
    _require_places(rows)
    columns = [with_readable_times(column) for column in rows.columns]
    readable = pa.RecordBatch.from_arrays(columns, names=rows.schema.names)
    for letter in readable.to_pylist():
        place = letter.pop(PLACE)
        yield place, reason, json.dumps(letter, default=str, ensure_ascii=False)


def located(
    error: DecodeError, source: Source, raw: pa.RecordBatch, after: Position
) -> DecodeError:
    """Return `error`, whose row counts within `raw`, with the place of the row in `source`.

    `after` is the position after `raw`.

    Raises:
        DataError: the source is endless, and its rows have no places.
    """
    row = error.row or 1
    if source.endless:
        _require_places(raw)
        place = raw.column(PLACE)[row - 1].as_py()
        message = f"{source.words_for(place)}: {error}"
        return DecodeError(message, row=error.row, column=error.column)
    origin = source.locate(after, raw.num_rows - row + 1)
    message = str(error)
    if origin.file:
        message = f"{origin}: {error}"
    return DecodeError(message, origin.file, origin.number, error.column)


def _require_places(rows: pa.RecordBatch) -> None:
    """Raise DataError if rows of an endless source do not say where they come from."""
    if PLACE not in rows.schema.names:
        raise DataError(
            "dataset: a row of an endless source cannot be decoded, and there is no column "
            f"{PLACE!r} that says where it is, got {rows.schema.names}. Add the column to the rows "
            "of the source, as hb.testing.FakeStream does."
        )


@dataclass(frozen=True)
class IdLimits:
    """What was declared of the ids of a column.

    Attributes:
        first: the smallest id.
        size: number of ids from `first` on; 0 = any.
        length: most ids of a sample; 0 = any.
    """

    first: int = 0
    size: int = 0
    length: int = 0


class LimitCheck:
    """Counts what exceeds its limits in the batches that it is called with, and changes nothing.

    The first batch with an excess is logged as a warning, one line for each column.

    Args:
        limits: by the name of the column.

    Attributes:
        outside: ids outside of the range of their column, by its name, of all batches so far.
        too_long: samples with more ids than declared, by the name of the column.

    Example:
        >>> check = LimitCheck({"item": IdLimits(0, 1000)})
        >>> data = dataset.map(check)
    """

    def __init__(self, limits: Mapping[str, IdLimits]) -> None:
        self._limits = dict(limits)
        self.outside: dict[str, int] = {}
        self.too_long: dict[str, int] = {}

    def __call__(self, batch: Batch) -> Batch:
        is_first = not (self.outside or self.too_long)
        lines = []
        for name, limits in self._limits.items():
            ids = batch.ids[name]
            if limits.size and len(ids.values):
                lines += self._count_outside(name, ids, limits)
            if limits.length and ids.offsets is not None:
                lines += self._count_too_long(name, ids, limits)
        if is_first:
            for line in lines:
                log.warning("%s. Nothing is dropped; later ones are counted, not logged.", line)
        return batch

    def _count_outside(self, name: str, ids: Ids, limits: IdLimits) -> list[str]:
        last = limits.first + limits.size - 1
        if ids.values.min() >= limits.first and ids.values.max() <= last:
            return []
        outside = (ids.values < limits.first) | (ids.values > last)
        count = int(np.count_nonzero(outside))
        self.outside[name] = self.outside.get(name, 0) + count
        example = int(ids.values[outside][0])
        return [
            f"column {name!r}: {count} ids of a batch lie outside of {limits.first} to {last}, "
            f"which were declared, such as {example}"
        ]

    def _count_too_long(self, name: str, ids: Ids, limits: IdLimits) -> list[str]:
        longest = ids.lengths().max(initial=0)
        if longest <= limits.length:
            return []
        count = int(np.count_nonzero(ids.lengths() > limits.length))
        self.too_long[name] = self.too_long.get(name, 0) + count
        return [
            f"column {name!r}: {count} samples of a batch have more ids than {limits.length}, "
            f"which was declared, the longest {longest}"
        ]
