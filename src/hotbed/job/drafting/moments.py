# SPDX-License-Identifier: Apache-2.0
"""Find the time of events among columns, and the columns that say the same moment again."""

from __future__ import annotations

import re

import numpy as np
import polars as pl

from hotbed.connectors.times import UNITS, to_microseconds, unreadable
from hotbed.errors import HotbedError
from hotbed.job.drafting.line import Line, left_out, quoted, share_of
from hotbed.plugins import snake_case

_TIME = re.compile(
    r"(.*_)?(time(_?stamp)?|ts|at|date|datetime|created|hour|epoch)"
    r"(_?(utc|gmt|iso|s|secs?|seconds|ms|millis|milliseconds|us|micros|ns|nanos))?"
)
_ISO_DATE = r"^\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}.*)?$"
_OTHER_DATE = r"^\d{1,4}[/.]\d{1,2}[/.]\d{1,4}([T ,].*)?$"

# Unit of a time since 1970, and the smallest and largest value that is a time of our days.
_EPOCHS = (("s", 1e8, 1e10), ("ms", 1e11, 1e13), ("us", 1e14, 1e16), ("ns", 1e17, 1e19))
# What times may be rounded to, in microseconds.
_STEPS = (1, UNITS["ms"], UNITS["s"], 60 * UNITS["s"], 3600 * UNITS["s"], 86_400 * UNITS["s"])


def is_time(values: pl.Series) -> bool:
    """Return whether a column holds moments: by its type, or by its name and its values."""
    if values.dtype in (pl.Date, pl.Datetime):
        return True
    return bool(_TIME.fullmatch(snake_case(values.name)) and _unit(values))


def find_time(frame: pl.DataFrame, label: str) -> str | None:
    """Return the name of the column with the time of events, else None.

    Times of outcomes are missing where there was none, and rounded times or those of a user come
    again: of the columns with hardly a missing value, it is the first with the most different ones.
    """
    names = [name for name in frame.columns if name != label and is_time(frame[name])]
    if not names:
        return None
    least = min(frame[name].null_count() for name in names)
    full = [name for name in names if frame[name].null_count() <= least + len(frame) // 100]
    return max(full, key=lambda name: frame[name].n_unique())


def time_line(values: pl.Series) -> Line:
    """Return the line of the time of events, with the first and the last one in UTC."""
    option = "" if values.dtype.is_temporal() else f", unit: {_unit(values)}"
    text = f"{{kind: time, name: {quoted(values.name)}{option}}}"
    micros = _microseconds(values)
    if micros is None:
        return Line("time", text, "times of which some cannot be read")
    moments = micros.drop_nulls().sort().cast(pl.Datetime("us"))
    return Line("time", text, f"{moments[0]} to {moments[-1]}, UTC")


def span_seconds(values: pl.Series) -> float:
    """Return the seconds from the first to the last moment of a column; 0 if none can be read."""
    micros = _microseconds(values)
    if micros is None or not micros.drop_nulls().len():
        return 0.0
    moments = micros.drop_nulls().to_numpy()
    return float(np.ptp(moments)) / UNITS["s"]


def other_time_line(values: pl.Series, time: pl.Series | None) -> Line | None:
    """Return the line of a column of moments that is not the time of events; None: it has none.

    A moment does not come again, so it is left out. `time`: the time of events, if there is one.
    """
    name = values.name
    if time is not None and repeats(values, time):
        return left_out(name, f"the same moment as {time.name}")
    if is_time(values):
        reason = (
            "a moment, which does not come again; time_of_day makes hours of it, in UTC or a zone"
        )
        return left_out(name, reason)
    if values.dtype == pl.String and _share_like(values, _OTHER_DATE) == 1:
        example = values.drop_nulls()[0]
        return left_out(name, f"a date in a form that is not known, such as {example}; write ISO")
    return None


def repeats(values: pl.Series, time: pl.Series) -> bool:
    """Return whether a column holds the moments of `time` again: in another unit, form or zone, or
    rounded.
    """
    moments = _microseconds(values)
    events = _microseconds(time)
    if moments is None or events is None:
        return False
    both = pl.DataFrame({"moment": moments, "event": events}).drop_nulls()
    moments = both["moment"]
    events = both["event"]
    if moments.n_unique() < 2 or events.n_unique() < 2:
        return False
    coarsest = max(_step(moments), _step(events))
    difference = (moments - events).to_numpy()
    return int(np.ptp(difference)) < max(coarsest, 2)


def _step(moments: pl.Series) -> int:
    """Return the largest step that all moments are whole multiples of, up to a day."""
    numbers = moments.to_numpy()
    return max(step for step in _STEPS if not (numbers % step).any())


def _microseconds(values: pl.Series) -> pl.Series | None:
    """Return moments as microseconds since 1970; None where a column cannot be moments."""
    unit = _unit(values)
    if unit is None:
        return None
    entries = values.to_arrow()
    try:
        micros = to_microseconds(entries, unit)
    except HotbedError:
        return None
    if unreadable(entries, micros).true_count:
        return None
    return pl.Series(micros)


def _unit(values: pl.Series) -> str | None:
    """Return the unit that makes these numbers or texts times of our days, else None."""
    if values.dtype in (pl.Date, pl.Datetime):
        return "us"
    entries = values.drop_nulls()
    if not len(entries):
        return None
    if values.dtype.is_numeric():
        numbers = entries.cast(pl.Float64).to_numpy()
        low = float(numbers.min())
        high = float(numbers.max())
        for unit, least, most in _EPOCHS:
            if least <= low and high < most:
                return unit
    elif values.dtype == pl.String and _share_like(entries.head(100), _ISO_DATE) == 1:
        return "iso"
    return None


def _share_like(values: pl.Series, pattern: str) -> float:
    """Return the share of texts that a pattern matches, without those that are missing."""
    return share_of(values.drop_nulls().str.contains(pattern))
