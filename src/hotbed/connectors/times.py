# SPDX-License-Identifier: Apache-2.0
"""Times as int64 microseconds UTC, and what tells that their unit or zone is wrong."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Context
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.connectors.types import is_text
from hotbed.errors import ConfigError, DataError, SchemaError

EARLIEST = -(2**63)
LATEST = 2**63 - 1
_FLOAT_BELOW_MAX = 2.0**63 - 1024
UNITS = {"s": 1_000_000, "ms": 1_000, "us": 1}
YEAR = 31_556_952_000_000
"""A mean year of the calendar, in microseconds."""
YEAR_1980 = 10 * YEAR
YEAR_2200 = 230 * YEAR
_DECIMAL_PLACES = {"s": 6, "ms": 3, "us": 0, "ns": -3}
_DIGITS = Context(prec=100)

_WORD = "[A-Z][a-z]{2}"
_YEAR = r"(?P<year>\d{4})"
_MONTH = f"(?P<month>{_WORD})"
_DAY = r"(?P<day>\d{1,2})"
_MINUTES = r"(?P<clock>\d\d:\d\d)"
_SECONDS = r"(?P<second>:[0-5]\d)"
_CLOCK = _MINUTES + _SECONDS
_OFFSET = r"[+-](?:[01]\d|2[0-3])(?::?[0-5]\d(?::?[0-5]\d)?)?"
_ZONE = f"(?P<zone>[Zz]|(?:UTC|GMT){_OFFSET}|UTC|GMT|{_OFFSET})"

# Patterns, each with the format of what it gives. ISO 8601, as PostgreSQL, pandas, Python and
# java.time print it; Date of JavaScript; ctime, and java.util.Date; RFC 1123.
_TEXTS = (
    (
        rf"^{_YEAR}-(?P<month>\d\d)-(?P<day>\d\d)(?:[Tt ]{_MINUTES}"
        rf"(?:{_SECONDS}(?:[.,](?P<fraction>\d+))?)?(?: ?{_ZONE}(?:\[[^\]]*\])?)?)?$",
        "%Y-%m-%dT%H:%M:%S",
    ),
    (
        rf"^{_WORD} {_MONTH} {_DAY} {_YEAR}(?: {_CLOCK}(?: {_ZONE}(?: \(.*\))?)?)?$",
        "%Y-%b-%dT%H:%M:%S",
    ),
    (rf"^{_WORD} {_MONTH} {{1,2}}{_DAY} {_CLOCK}(?: {_ZONE})? {_YEAR}$", "%Y-%b-%dT%H:%M:%S"),
    (rf"^(?:{_WORD}, )?{_DAY} {_MONTH} {_YEAR} {_CLOCK}?(?: {_ZONE})?$", "%Y-%b-%dT%H:%M:%S"),
)


def to_microseconds(values: pa.Array, unit: str, zones: set[str] | None = None) -> pa.Array:
    """Return a column of times as int64 microseconds UTC.

    Nulls stay null. Text that is not a time becomes null, and so does a time that int64
    microseconds cannot hold. Arrow timestamps and dates need no unit. Text without a zone is UTC.

    Args:
        values: the times.
        unit: "s", "ms", "us", "ns" for numbers, also as text; "iso" for text as ISO 8601, RFC 1123,
            databases and programming languages write it; or a strptime format such as "%y%m%d%H".
        zones: the zones of earlier batches of the column; those of this batch are added.

    Raises:
        DataError: some ISO text has a zone and some has none, also in earlier batches.
        SchemaError: the unit does not fit the type of the column.
    """
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind = values.type
    if pa.types.is_null(kind):
        return values.cast(pa.int64())
    if pa.types.is_timestamp(kind):
        return _scale(values.cast(pa.int64()), kind.unit)
    if pa.types.is_date(kind):
        milliseconds = values.cast(pa.date64())
        return _scale(milliseconds.cast(pa.int64()), "ms")
    if is_text(kind):
        return _from_text(values, unit, zones)
    if "%" in unit and pa.types.is_integer(kind):  # 14102100 read as a number
        return _from_format(values, unit)
    return _from_numbers(values, unit)


def unreadable(values: pa.Array, micros: pa.Array) -> pa.Array:
    """Return where a column holds a value that is not a time, as booleans.

    Args:
        values: the column. Nulls, NaN and empty text are missing, not unreadable.
        micros: what `to_microseconds` returned for it.
    """
    is_there = values.is_valid()
    if pa.types.is_floating(values.type):
        is_there = pc.and_(is_there, pc.invert(values.is_nan()))
    elif is_text(values.type):
        is_there = pc.and_(is_there, pc.not_equal(values.cast(pa.string()), ""))
    return pc.and_not(is_there.fill_null(False), micros.is_valid())


def check_unit(where: str, unit: str) -> None:
    """Raise ConfigError for a unit that `to_microseconds` does not know; `where`: for messages."""
    if unit not in (*UNITS, "ns", "iso") and "%" not in unit:
        raise ConfigError(
            f"{where}: unknown unit, got {unit!r}. Use s, ms, us, ns, iso or a format such as "
            "'%y%m%d%H'."
        )


def text_of_time(micros: int) -> str:
    """Return microseconds since 1970 as ISO text, for messages."""
    if micros <= EARLIEST:
        return "no time yet"
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
    except OverflowError:
        return f"{micros} microseconds since 1970"
    return moment.isoformat()


def check_median(where: str, times: np.ndarray, unit: str, first: Any) -> None:
    """Raise SchemaError if the median of the first times lies after the year 2200.

    Then the unit is wrong.

    Args:
        where: for messages.
        times: microseconds, [n].
        unit: by which they were read.
        first: the first one as it was written.
    """
    median = int(np.median(times))
    if median < YEAR_2200:
        return
    raise SchemaError(
        f"{where}: the median of the first {len(times):,} rows is the year "
        f"{1970 + median // YEAR:,}, got {first!r} with unit {unit!r}. {_better_unit(unit, median)}"
    )


def _better_unit(unit: str, micros: int) -> str:
    """Return the advice for times that are too far in the future."""
    factors: dict[str, float] = {**UNITS, "ns": 1e-3}
    for finer, smaller in factors.items():
        if unit in factors and smaller < factors[unit]:
            year = micros / factors[unit] * smaller
            if YEAR_1980 <= year < YEAR_2200:
                return f"Give unit={finer!r}."
    return "Correct the times, or give their unit: s, ms, us or ns."


def with_readable_times(values: pa.Array) -> pa.Array:
    """Return `values`, timestamps as text and dates of 32 bits as days.

    Python has no object for times after the year 9999.
    """
    if pa.types.is_timestamp(values.type):
        return values.cast(pa.string())
    if pa.types.is_date32(values.type):
        return values.cast(pa.int32())
    return values


def check_same_unit(
    where: str, column: str, kind: pa.DataType, unit: str, declared: tuple[str, str] | None
) -> None:
    """Raise ConfigError if a schema reads a column of times by another unit than a source does.

    Args:
        where: the source, for messages.
        column: its column of times.
        kind: the type of this column; Arrow's times need no unit.
        unit: by which the source reads it.
        declared: the column and the unit of the schema's `Time`; None = no `Time`.
    """
    if declared in (None, (column, unit)) or pa.types.is_temporal(kind):
        return
    name, other = declared
    if name == column:
        raise ConfigError(
            f"{where}.unit: column {column!r} has the unit {other!r} in the schema's time, got "
            f"{unit!r}. Give both the unit that the column has."
        )


def _from_text(values: pa.Array, unit: str, zones: set[str] | None) -> pa.Array:
    if unit in (*UNITS, "ns"):
        return _from_number_texts(values, unit)
    if unit != "iso":
        return _from_format(values, unit)
    if zones is None:
        zones = set()
    return _from_iso(values, zones)


def _from_number_texts(values: pa.Array, unit: str) -> pa.Array:
    text = pl.Series(values.cast(pa.string())).str.strip_chars()
    whole = text.cast(pl.Int64, strict=False)
    micros = _from_numbers(whole.to_arrow(), unit)
    if whole.null_count() == text.null_count():
        return micros
    fractions = text.str.extract(r"^([+-]?\d+\.\d+)$").cast(pl.Float64)
    return pc.coalesce(micros, _from_numbers(fractions.to_arrow(), unit))


def _from_numbers(values: pa.Array, unit: str) -> pa.Array:
    kind = values.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if unit not in (*UNITS, "ns") or not is_number:
        raise SchemaError(
            f"times: unit {unit!r} does not fit a column of {kind}. Declare the column's real unit."
        )
    if pa.types.is_decimal(kind):
        return _from_decimals(values, unit)
    if pa.types.is_floating(kind):
        factor = float(UNITS.get(unit, 1e-3))
        exact = pc.multiply(values.cast(pa.float64()), factor)
        micros = _within(pc.round(exact), -(2.0**63), _FLOAT_BELOW_MAX)
        return micros.cast(pa.int64())
    if pa.types.is_uint64(kind):
        values = _within(values, 0, LATEST)
    return _scale(values.cast(pa.int64()), unit)


def _from_decimals(values: pa.Array, unit: str) -> pa.Array:
    """Return decimals in microseconds, rounded to the nearest."""
    micros: list[int | None] = []
    for value in values.to_pylist():
        count = None
        if value is not None:
            exact = _DIGITS.scaleb(value, _DECIMAL_PLACES[unit])
            count = int(_DIGITS.to_integral_value(exact))
        is_held = count is not None and EARLIEST <= count <= LATEST
        micros.append(count if is_held else None)
    return pa.array(micros, pa.int64())


def _scale(whole: pa.Array, unit: str) -> pa.Array:
    """Return int64 counts of `unit` as microseconds, null where they do not fit int64."""
    if unit != "ns":
        limit = LATEST // UNITS[unit]
        return pc.multiply(_within(whole, -limit, limit), UNITS[unit])
    # Arrow divides towards zero; shifting keeps times before 1970 in order.
    limited = _within(whole, EARLIEST + 999, LATEST)
    is_before_1970 = pc.less(limited, 0)
    shift = pc.if_else(is_before_1970, 999, 0)
    return pc.divide(pc.subtract(limited, shift), 1_000)


def _within(values: pa.Array, least: float, most: float) -> pa.Array:
    """Return `values`, null where they are NaN or lie outside `least` to `most`."""
    kind = values.type
    is_above = pc.greater_equal(values, pa.scalar(least, kind))
    is_below = pc.less_equal(values, pa.scalar(most, kind))
    is_inside = pc.and_(is_above, is_below)
    return pc.if_else(is_inside, values, pa.scalar(None, kind))


def _from_format(values: pa.Array, form: str) -> pa.Array:
    text = pl.Series(values.cast(pa.string())).str.strip_chars()
    has_hours = "%H" in form or "%I" in form
    if has_hours and "%M" not in form:  # Polars needs minutes with hours
        text = text + " 00"
        form = f"{form} %M"
    zone = None
    if "%z" in form:
        zone = "UTC"
    parsed = text.str.to_datetime(form, time_unit="us", strict=False, time_zone=zone)
    return _microseconds(parsed)


def _microseconds(parsed: pl.Series) -> pa.Array:
    return parsed.to_physical().to_arrow().cast(pa.int64())


def _from_iso(values: pa.Array, zones: set[str]) -> pa.Array:
    text = pl.Series(values.cast(pa.string())).str.strip_chars()
    micros = pl.Series(dtype=pl.Int64).extend_constant(None, len(text))
    for pattern, form in _TEXTS:
        if micros.null_count() > text.null_count():
            parts = text.str.extract_groups(pattern).struct.unnest()
            micros = micros.fill_null(_from_parts(parts, form))
            zones.update(parts.filter(parts["day"].is_not_null())["zone"].fill_null("").unique())
    if "" in zones and len(zones) > 1:
        raise DataError(
            f"times: some have a zone and some have none, got {sorted(zones)} ('' = none). Write "
            "all times with a zone, or all without one."
        )
    return micros.to_arrow().cast(pa.int64())


def _from_parts(parts: pl.DataFrame, form: str) -> pl.Series:
    """Return the time of texts, in microseconds; null where a part does not exist."""
    clock = parts["clock"].fill_null("00:00") + parts["second"].fill_null(":00")
    local = parts["year"] + "-" + parts["month"] + "-" + parts["day"].str.zfill(2) + "T" + clock
    whole = local.str.to_datetime(form, time_unit="us", strict=False).to_physical()
    fraction = pl.Series([0])
    if "fraction" in parts.columns:
        digits = parts["fraction"].fill_null("").str.pad_end(6, "0").str.slice(0, 6)
        fraction = digits.cast(pl.Int64)
    zones = parts["zone"].fill_null("")
    offsets = {zone: _offset_microseconds(zone) for zone in zones.unique()}
    return whole + fraction - zones.replace_strict(offsets, return_dtype=pl.Int64)


def _offset_microseconds(zone: str) -> int:
    """Return the offset of a zone from UTC: "Z", "+02:00", "GMT+2", "" for no zone."""
    offset = re.sub(r"[A-Za-z:]", "", zone)
    digits = offset[1:].ljust(6, "0")
    seconds = int(digits[:2]) * 3600 + int(digits[2:4]) * 60 + int(digits[4:])
    if offset.startswith("-"):
        seconds = -seconds
    return seconds * 1_000_000
