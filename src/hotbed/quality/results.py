# SPDX-License-Identifier: Apache-2.0
"""Quality: what was measured, as two tables, and as files of a folder, one a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hotbed.errors import FormatError
from hotbed.files import new_file, writing
from hotbed.quality.cells import METRICS

WINDOWS = "windows"
DIFFERENCES = "differences"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BOUND = pa.timestamp("us", "UTC")
_CELL = [(name, pa.string()) for name in ("route", "column", "value")]
_FIGURES = [(f"{name}{end}", pa.float64()) for name in METRICS for end in ("", "_low", "_high")]
_BOUNDS = [("begin", _BOUND), ("end", _BOUND)]
_NUMBERS = ("users", "lists", "samples", "positives", "without_score")
QUALITY_COLUMNS = pa.schema(
    [*_BOUNDS, *_CELL, *((name, pa.int64()) for name in _NUMBERS), *_FIGURES]
)
DIFFERENCE_COLUMNS = pa.schema(
    [
        *_BOUNDS,
        *_CELL,
        ("against", pa.string()),
        ("samples", pa.int64()),
        ("against_samples", pa.int64()),
        *_FIGURES,
    ]
)


@dataclass(frozen=True)
class Quality:
    """The quality of what was served, by window.

    Attributes:
        windows: a row for each window, route and value of a column. `route` is null where all
            answered requests count, `column` where all values do, and `value` where it is too rare
            to be measured apart. `users`, `lists`, `samples`, `positives` and `without_score` are
            numbers; each metric has its value and, as `NAME_low` and `NAME_high`, the ends of its
            interval, which are nan for fewer than 20 users.
        differences: the same for differences: a row for each route against the baseline, for each
            version `against` the one with most samples, and for each shadow against the answers.
    """

    windows: pa.Table
    differences: pa.Table

    @classmethod
    def of_rows(
        cls, windows: Sequence[Mapping[str, Any]], differences: Sequence[Mapping[str, Any]]
    ) -> Quality:
        """Return the quality of rows; their bounds are microseconds."""
        return cls(_table(windows, QUALITY_COLUMNS), _table(differences, DIFFERENCE_COLUMNS))

    @classmethod
    def concat(cls, parts: Sequence[Quality]) -> Quality:
        """Return the quality of all windows of some parts, in their order."""
        windows = [QUALITY_COLUMNS.empty_table(), *(part.windows for part in parts)]
        differences = [DIFFERENCE_COLUMNS.empty_table(), *(part.differences for part in parts)]
        return cls(pa.concat_tables(windows), pa.concat_tables(differences))

    @classmethod
    def read(cls, folder: str | Path, most: int | None = None) -> Quality:
        """Return what was measured into a folder: all windows, or the newest `most`.

        Raises:
            FormatError: a file is torn, or is not of a measurement; the message names it.
        """
        tables = []
        for name, columns in ((WINDOWS, QUALITY_COLUMNS), (DIFFERENCES, DIFFERENCE_COLUMNS)):
            files = sorted((Path(folder) / name).glob("*.parquet"))
            if most is not None:
                files = files[-most:]
            parts = [_read(file, columns) for file in files]
            tables.append(pa.concat_tables([columns.empty_table(), *parts]))
        return cls(*tables)

    def write(self, folder: Path) -> None:
        """Write the windows into a folder, a file each, which replace those of before."""
        for name, table in ((WINDOWS, self.windows), (DIFFERENCES, self.differences)):
            with writing(folder):
                (folder / name).mkdir(parents=True, exist_ok=True)
            for begin in table["begin"].unique():
                is_own = pa.compute.equal(table["begin"], begin)
                file = folder / name / f"{_stem(begin.as_py())}.parquet"
                with writing(file), new_file(file) as sink:
                    pq.write_table(table.filter(is_own), sink)


def _read(file: Path, columns: pa.Schema) -> pa.Table:
    try:
        return pq.ParquetFile(file).read().select(columns.names).cast(columns)
    except (LookupError, ValueError) as error:  # errors of Arrow are such
        raise FormatError(
            f"{file}: not a window of a measurement, got {error}. Remove the file, or measure into "
            "an empty folder with the newest version of `hotbed measure`."
        ) from error


def _stem(begin: datetime) -> str:
    """Return the name of the file of a window: names sort as their times do."""
    text = begin.astimezone(UTC).strftime("%Y-%m-%dT%H.%M.%S")
    return text if not begin.microsecond else f"{text}.{begin.microsecond:06d}"


def _table(rows: Sequence[Mapping[str, Any]], columns: pa.Schema) -> pa.Table:
    timed = []
    for row in rows:
        bounds = {name: _EPOCH + timedelta(microseconds=row[name]) for name in ("begin", "end")}
        timed.append({**row, **bounds})
    return pa.Table.from_pylist(timed, columns)
