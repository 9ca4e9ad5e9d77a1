# SPDX-License-Identifier: Apache-2.0
"""The first times of events that are read together: they tell a wrong unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.connectors.times import EARLIEST, LATEST, UNITS, YEAR, check_median, with_readable_times
from hotbed.connectors.types import is_number
from hotbed.errors import SchemaError

FIRST_ROWS = 8
"""Events whose median is compared: one wrong clock among them changes nothing."""


@dataclass
class FirstTimes:
    """The first times of several kinds of events that are read together.

    Attributes:
        where: the source that reads them, for messages.
        most_apart: how far their medians may lie from each other, in microseconds.
        before: compare them only if the earliest one lies before this time.
    """

    where: str
    most_apart: int = 2 * YEAR
    before: int = LATEST

    _times: dict[str, np.ndarray] = field(default_factory=dict)  # approximate microseconds
    _firsts: dict[str, Any] = field(default_factory=dict)  # as they were written
    _known: set[str] = field(default_factory=set)  # kinds that have enough of them
    _reached: dict[str, int] = field(default_factory=dict)  # how far each kind has come

    def wants(self, kind: str) -> bool:
        """Return whether a kind has too few events yet."""
        return kind not in self._known

    def reach(self, newest: Mapping[str, int]) -> None:
        """Note the newest times of kinds; a kind that first comes now is compared with them."""
        for kind, time in newest.items():
            self._reached[kind] = max(time, self._reached.get(kind, time))

    def add(
        self, kind: str, values: pa.Array, unit: str, micros: pa.Array, *, last: bool = False
    ) -> None:
        """Add times of a kind of events, until there are enough of them.

        Args:
            kind: the name of the kind, for messages.
            values: the times as they were written.
            unit: by which they were read.
            micros: the times in microseconds, null where they could not be read.
            last: whether no more follow.

        Raises:
            SchemaError: the median lies after the year 2200.
        """
        new = _approximate(values, unit, micros)
        if kind in self._known or not (last or len(new)):
            return
        if kind not in self._times and len(new):
            self._firsts[kind] = with_readable_times(values.drop_null())[0].as_py()
        times = np.append(self._times.get(kind, ()), new)
        self._times[kind] = times
        if len(times) and (last or len(times) >= FIRST_ROWS):
            where = f"{self.where}: the times of {kind}"
            check_median(where, times, unit, self._firsts.pop(kind))
            self._known.add(kind)

    def check_apart(self, latest: int, *, last: bool = False) -> None:
        """Compare the earliest kind with the others, once it has enough events.

        Args:
            latest: times after it do not count.
            last: whether no more events follow.

        Raises:
            SchemaError: two kinds lie years apart.
        """
        medians: dict[str, int] = {}
        for kind, times in self._times.items():
            if (times <= latest).any():
                medians[kind] = int(np.median(times[times <= latest]))
        rising = sorted(medians, key=lambda kind: medians[kind])
        if not rising:
            return
        early = rising[0]
        late = rising[-1]
        if medians[early] >= self.before or not (last or early in self._known):
            return
        reached = max(medians[early], self._reached.get(early, EARLIEST))
        if medians[late] - reached > self.most_apart:
            raise SchemaError(
                f"{self.where}: event times lie years apart, got a median of "
                f"{_date(medians[early])} in the first rows of {early}, and of "
                f"{_date(medians[late])} in those of {late}. Give each the unit that its column "
                "has."
            )


def _approximate(values: pa.Array, unit: str, micros: pa.Array) -> np.ndarray:
    """Return the times that are there in microseconds, also those that int64 cannot hold."""
    if is_number(values.type) and (unit in UNITS or unit == "ns"):
        factor = float(UNITS.get(unit, 1e-3))
        numbers = pc.multiply(values.drop_null().cast(pa.float64(), safe=False), factor)
        times = numbers.to_numpy(zero_copy_only=False)
        return np.asarray(times[np.isfinite(times)])
    times = micros.drop_null().to_numpy(zero_copy_only=False)
    return np.asarray(times, np.float64)


def _date(micros: int) -> str:
    return str(np.datetime64(micros, "us").astype("datetime64[s]"))
