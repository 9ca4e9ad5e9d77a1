# SPDX-License-Identifier: Apache-2.0
"""Times as int64 microseconds UTC; and Replay, which reads recorded events in their order."""

from __future__ import annotations

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.errors import DataError, SchemaError

EARLIEST = -(2**63)
LATEST = 2**63 - 1
_FLOAT_BELOW_MAX = 2.0**63 - 1024
UNITS = {"s": 1_000_000, "ms": 1_000, "us": 1}
_FORMATS = ("%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%dT%H:%M", "%Y-%m-%d")


def to_microseconds(values: pa.Array, unit: str, zones: set[str] | None = None) -> pa.Array:
    """Return a column of times as int64 microseconds UTC.

    Nulls stay null. Text that is not a time becomes null, and so does a time that int64
    microseconds cannot hold. Arrow timestamps and dates need no unit. Text without a zone is UTC.

    Args:
        values: The times.
        unit: "s", "ms", "us", "ns" for numbers, "iso" for ISO 8601 text, or a strptime format such
            as "%y%m%d%H".
        zones: The zones of earlier batches of the column; those of this batch are added.

    Raises:
        DataError: ISO text mixes zones, also with those of earlier batches.
        SchemaError: The unit does not fit the type of the column.
    """
    kind = values.type
    if pa.types.is_null(kind):
        return values.cast(pa.int64())
    if pa.types.is_timestamp(kind):
        return _scale(values.cast(pa.int64()), kind.unit)
    if pa.types.is_date(kind):
        milliseconds = values.cast(pa.date64())
        return _scale(milliseconds.cast(pa.int64()), "ms")
    if _is_text(kind):
        return _from_text(values, unit, zones)
    if "%" in unit and pa.types.is_integer(kind):  # 14102100 read as a number
        return _from_format(values, unit)
    return _from_numbers(values, unit)


def _from_text(values: pa.Array, unit: str, zones: set[str] | None) -> pa.Array:
    if unit in (*UNITS, "ns"):
        text = pl.Series(values.cast(pa.string()))
        whole = text.cast(pl.Int64, strict=False)
        return _from_numbers(whole.to_arrow(), unit)
    if unit != "iso":
        return _from_format(values, unit)
    if zones is None:
        zones = set()
    return _from_iso(values, zones)


def _from_numbers(values: pa.Array, unit: str) -> pa.Array:
    kind = values.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if unit == "iso" or not is_number:
        raise SchemaError(
            f"times: unit {unit!r} does not fit a column of {kind}. Declare the column's real unit."
        )
    if pa.types.is_floating(kind):
        factor = float(UNITS.get(unit, 1e-3))
        exact = pc.multiply(values.cast(pa.float64()), factor)
        micros = _within(pc.round(exact), -(2.0**63), _FLOAT_BELOW_MAX)
        return micros.cast(pa.int64())
    if pa.types.is_uint64(kind):
        values = _within(values, 0, LATEST)
    return _scale(values.cast(pa.int64()), unit)


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


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return True
    return bool(pa.types.is_string_view(kind))


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
    # A date alone ends like an offset ("2014-10-21"), so a zone needs a time of day before it.
    suffixes = text.str.extract(r"\d:\d.*?(Z|UTC|GMT|[+-]\d{2}:?\d{2})$")
    suffixes = suffixes.fill_null("")
    suffixes = suffixes.filter(text.is_not_null()).unique()
    for suffix in suffixes.to_list():
        zones.add(_canonical_zone(suffix))
    if len(zones) > 1:
        raise DataError(
            f"times: a column mixes zones, got {sorted(zones)} ('' = none). Write all its times "
            "with one zone."
        )
    zone = next(iter(zones), "")
    if zone:
        text = text.str.replace(r"\s*(Z|UTC|GMT|[+-]\d{2}:?\d{2})$", "")
    text = text.str.replace(" ", "T", literal=True)
    first, *others = _FORMATS
    parsed = text.str.to_datetime(first, time_unit="us", strict=False)
    for form in others:
        if parsed.null_count() > text.null_count():
            missing = text.str.to_datetime(form, time_unit="us", strict=False)
            parsed = parsed.fill_null(missing)
    micros = _microseconds(parsed)
    shift = _offset_microseconds(zone)
    if shift:
        return pc.subtract(micros, shift)
    return micros


def _canonical_zone(zone: str) -> str:
    """Return one spelling of a zone: "Z" for UTC, "+02:00" for an offset, "" for no zone."""
    if zone in ("Z", "UTC", "GMT"):
        return "Z"
    if zone and set(zone[1:]) <= {"0", ":"}:
        return "Z"
    if not zone or ":" in zone:
        return zone
    hours = zone[:3]
    minutes = zone[3:]
    return f"{hours}:{minutes}"


def _offset_microseconds(zone: str) -> int:
    if not zone or zone[0] not in "+-":
        return 0
    hours = int(zone[1:3])
    minutes = int(zone[4:])
    seconds = hours * 3600 + minutes * 60
    if zone[0] == "-":
        seconds = -seconds
    return seconds * 1_000_000
