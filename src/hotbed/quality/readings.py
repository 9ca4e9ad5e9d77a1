# SPDX-License-Identifier: Apache-2.0
"""The newest window as readings for Prometheus."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pyarrow as pa

from hotbed.quality.cells import METRICS
from hotbed.quality.results import Quality
from hotbed.training.watching.endpoint import Reading


def readings(newest: Quality) -> Iterator[Reading]:
    """Yield the figures of a window: values, and the ends of their intervals where there are some.

    Where all answered requests count, the label `route` is empty; where all values of the route
    do, `column` and `value` are; and `value` is for values that are too rare to be measured apart.
    """
    yield from _figures("quality", newest.windows)
    yield from _figures("quality_difference", newest.differences)
    for row in newest.windows.slice(0, 1).to_pylist():
        yield Reading("quality_window_end_seconds", row["end"].timestamp())


def _figures(name: str, table: pa.Table) -> Iterator[Reading]:
    cells = ("route", "column", "value", "against")
    for row in table.to_pylist():
        labels = {cell: row[cell] or "" for cell in cells if cell in row}
        yield Reading(f"{name}_samples", row["samples"], labels)
        for metric in METRICS:
            of_metric = {"metric": metric, **labels}
            for end in ("", "_low", "_high"):
                if not math.isnan(row[f"{metric}{end}"]):
                    yield Reading(f"{name}{end or '_value'}", row[f"{metric}{end}"], of_metric)
