# SPDX-License-Identifier: Apache-2.0
"""The order of a user's rows, and of an item's, by their times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.connectors.times import to_microseconds
from hotbed.data.arrays import as_numpy, nulls_of
from hotbed.data.columns import Columns
from hotbed.prepare.keyed.derive import single_values


@dataclass(frozen=True)
class Order:
    """The raw column that orders rows; without one, all rows are at one time.

    `unit`: of the times, as in `Time`.
    """

    column: str | None = None
    unit: str = "s"

    def times(self, rows: pa.RecordBatch) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the times of rows in microseconds, and which rows have none, [n]."""
        if self.column is None:
            return np.zeros(rows.num_rows, np.int64), np.zeros(rows.num_rows, bool)
        raw = single_values(Columns(rows).column(self.column), self.column)
        times = to_microseconds(raw, self.unit)
        return as_numpy(times.fill_null(0)).astype(np.int64), nulls_of(times)
