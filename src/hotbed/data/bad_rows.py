# SPDX-License-Identifier: Apache-2.0
"""Rows that cannot be encoded: where they came from, and what is kept of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from hotbed.connectors.position import PLACE, Position
from hotbed.connectors.source import Source
from hotbed.data.numbers import with_readable_times
from hotbed.errors import DecodeError


def dead_letters(rows: pa.RecordBatch, reason: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield place, reason and content of rows of an endless source that were left out."""
    columns = [with_readable_times(column) for column in rows.columns]
    readable = pa.RecordBatch.from_arrays(columns, names=rows.schema.names)
    for letter in readable.to_pylist():
        place = letter.pop(PLACE)
        yield place, reason, json.dumps(letter, default=str, ensure_ascii=False)


def located(
    error: DecodeError,
    source: Source,
    raw: pa.RecordBatch,
    after: Position,
) -> DecodeError:
    """Return `error`, whose row counts within `raw`, with the place of the row in `source`.

    `after` is the position after `raw`.
    """
    row = error.row or 1
    if source.endless:
        place = raw.column(PLACE)[row - 1].as_py()
        where = ", ".join(f"{key} {value}" for key, value in place.items())
        message = f"{where}: {error}"
        return DecodeError(message, row=error.row, column=error.column)
    origin = source.locate(after, raw.num_rows - row + 1)
    message = str(error)
    if origin.file:
        message = f"{origin}: {error}"
    return DecodeError(
        message,
        origin.file,
        origin.number,
        error.column,
    )
