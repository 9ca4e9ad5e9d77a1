# SPDX-License-Identifier: Apache-2.0
"""Transforms of times."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed import checks
from hotbed.connectors.times import check_unit, to_microseconds, unreadable
from hotbed.data.arrays import as_numpy, first_of, nulls_of
from hotbed.data.context import BadRows, Context
from hotbed.data.transforms.base import Transform
from hotbed.errors import ConfigError

_UTC = "UTC"


@dataclass(frozen=True)
class TimeOfDay(Transform):
    """An integer part of a time.

    `part`: "hour" 0..23, "minute" of the day 0..1439, "weekday" 0 (Monday)..6, or "hour_of_week"
    0..167. `unit`: as in `Time`; where the schema has a `Time` of the same raw column, its unit.
    `zone`: the time zone of the part, such as "Asia/Shanghai", with its summer time. It does not
    change how times are read: text without a zone is UTC. A value that is not a time makes a bad
    row.

    Example: `Id("hour", column="timestamp", transforms=[TimeOfDay()])`
    """

    part: str = "hour"
    unit: str = "s"
    zone: str = _UTC

    def __post_init__(self) -> None:
        parts = ("hour", "minute", "weekday", "hour_of_week")
        checks.one_of("time_of_day.part", self.part, parts)
        check_unit("time_of_day.unit", self.unit)
        try:
            _local(pa.array([0]), self.zone)
        except pa.ArrowInvalid as error:
            raise ConfigError(
                f"time_of_day.zone: unknown time zone, got {self.zone!r}. Write a name of the "
                "tz database, such as Europe/Berlin; the system must have it (package tzdata)."
            ) from error

    def in_unit(self, unit: str, place: str) -> TimeOfDay:
        """Return this transform with the unit of the schema's time; `place`: for messages.

        Raises:
            ConfigError: it has another unit than the default one and this one.
        """
        if self.unit not in ("s", unit):
            raise ConfigError(
                f"time_of_day.unit: {place} has the unit {unit!r} in the schema's time, got "
                f"{self.unit!r}. Leave it out."
            )
        return replace(self, unit=unit)

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        micros = readable_times(values, self.unit)
        times = as_numpy(_local(micros.fill_null(0), self.zone))
        hours = np.floor_divide(times, 3_600_000_000)
        minutes = np.floor_divide(times, 60_000_000)
        weekday = (hours // 24 + 3) % 7  # 1970-01-01 was a Thursday
        parts = {
            "hour": hours % 24,
            "minute": minutes % 1440,
            "weekday": weekday,
            "hour_of_week": weekday * 24 + hours % 24,
        }
        return pa.array(parts[self.part], mask=nulls_of(micros))


def _local(micros: pa.Array, zone: str) -> pa.Array:
    """Return int64 microseconds UTC as those of the clocks of a time zone."""
    if zone == _UTC:
        return micros
    return pc.local_timestamp(micros.cast(pa.timestamp("us", zone))).cast(pa.int64())


def readable_times(values: pa.Array, unit: str) -> pa.Array:
    """Return times as int64 microseconds UTC, null where they are missing.

    Raises BadRows for values that are not times.
    """
    micros = to_microseconds(values, unit)
    is_bad = as_numpy(unreadable(values, micros))
    if is_bad.any():
        wrong = first_of(values, is_bad)
        message = f"expected times of unit {unit!r}, got {wrong!r}. Correct the row or the unit."
        raise BadRows("", is_bad, message)
    return micros
