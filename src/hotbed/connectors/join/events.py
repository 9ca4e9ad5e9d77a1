# SPDX-License-Identifier: Apache-2.0
"""Events of a turn: their columns, keys and times, and which of them come twice."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from hotbed.connectors.join.keys import EventKeys
from hotbed.connectors.join.spill import rows_of


@dataclass
class TurnEvents:
    """Events of one input in a turn: columns, keys, times, and the labels of outcomes."""

    table: pa.Table
    keys: EventKeys
    times: np.ndarray
    kinds: np.ndarray | None = None

    def take(self, rows: np.ndarray) -> TurnEvents:
        """Return some of the events."""
        kinds = None
        if self.kinds is not None:
            kinds = self.kinds[rows]
        table = rows_of(self.table, rows)
        return TurnEvents(table, self.keys.take(rows), self.times[rows], kinds)


def repeated(events: TurnEvents, order: np.ndarray) -> np.ndarray:
    """Return which events are equal to one before them; `order` sorts their first keys."""
    is_repeated = np.zeros(len(order), bool)
    ordered = events.keys.first[order]
    is_same = ordered[1:] == ordered[:-1]
    if not is_same.any():
        return is_repeated
    has_equal = np.zeros(len(order), bool)
    has_equal[1:] = is_same
    has_equal[:-1] |= is_same
    rows = np.sort(order[has_equal])
    fields = [events.keys.first[rows], events.keys.second[rows], events.times[rows]]
    if events.kinds is not None:
        fields.append(events.kinds[rows])
    places = np.lexsort([rows, *fields])
    is_equal = np.ones(len(rows) - 1, bool)
    for values in fields:
        is_equal &= values[places][1:] == values[places][:-1]
    is_repeated[rows[places[1:][is_equal]]] = True
    return is_repeated
