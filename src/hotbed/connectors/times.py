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
        return _scale(values.cast(pa.date64()).cast(pa.int64()), "ms")
    if _is_text(kind):
        if unit in (*UNITS, "ns"):
            whole = pl.Series(values.cast(pa.string())).cast(pl.Int64, strict=False).to_arrow()
            return to_microseconds(whole, unit)
        if unit == "iso":
            return _from_iso(values, set() if zones is None else zones)
        return _from_format(values, unit)
    if "%" in unit and pa.types.is_integer(kind):  # 14102100 read as a number
        return _from_format(values, unit)
    if unit == "iso" or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise SchemaError(
            f"times: unit {unit!r} does not fit a column of {kind}. Declare the column's real unit."
        )
    if pa.types.is_floating(kind):
        factor = float(UNITS.get(unit, 1e-3))
        micros = pc.round(pc.multiply(values.cast(pa.float64()), factor))
        return _within(micros, -(2.0**63), _FLOAT_BELOW_MAX).cast(pa.int64())
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
    return pc.divide(pc.subtract(limited, pc.if_else(pc.less(limited, 0), 999, 0)), 1_000)


def _within(values: pa.Array, least: float, most: float) -> pa.Array:
    """Return `values`, null where they are NaN or lie outside `least` to `most`."""
    kind = values.type
    above = pc.greater_equal(values, pa.scalar(least, kind))
    inside = pc.and_(above, pc.less_equal(values, pa.scalar(most, kind)))
    return pc.if_else(inside, values, pa.scalar(None, kind))


def _is_text(kind: pa.DataType) -> bool:
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(kind) for check in checks)


def _from_format(values: pa.Array, form: str) -> pa.Array:
    text = pl.Series(values.cast(pa.string())).str.strip_chars()
    if ("%H" in form or "%I" in form) and "%M" not in form:  # Polars needs minutes with hours
        text = text + " 00"
        form = f"{form} %M"
    zone = "UTC" if "%z" in form else None
    parsed = text.str.to_datetime(
        form,
        time_unit="us",
        strict=False,
        time_zone=zone,
    )
    return parsed.to_physical().to_arrow().cast(pa.int64())


def _from_iso(values: pa.Array, zones: set[str]) -> pa.Array:
    text = pl.Series(values.cast(pa.string())).str.strip_chars()
    # A date alone ends like an offset ("2014-10-21"), so a zone needs a time of day before it.
    suffixes = text.str.extract(r"\d:\d.*?(Z|UTC|GMT|[+-]\d{2}:?\d{2})$").fill_null("")
    suffixes = suffixes.filter(text.is_not_null()).unique()
    zones.update(map(_canonical_zone, suffixes.to_list()))
    if len(zones) > 1:
        raise DataError(
            f"times: a column mixes zones, got {sorted(zones)} ('' = none). Write all its times "
            "with one zone."
        )
    zone = next(iter(zones), "")
    if zone:
        text = text.str.replace(r"\s*(Z|UTC|GMT|[+-]\d{2}:?\d{2})$", "")
    text = text.str.replace(" ", "T", literal=True)
    parsed = text.str.to_datetime(_FORMATS[0], time_unit="us", strict=False)
    for form in _FORMATS[1:]:
        if parsed.null_count() > text.null_count():
            parsed = parsed.fill_null(text.str.to_datetime(form, time_unit="us", strict=False))
    micros = parsed.to_physical().to_arrow().cast(pa.int64())
    shift = _offset_microseconds(zone)
    return pc.subtract(micros, shift) if shift else micros


def _canonical_zone(zone: str) -> str:
    """Return one spelling of a zone: "Z" for UTC, "+02:00" for an offset, "" for no zone."""
    if zone in ("Z", "UTC", "GMT") or (zone and set(zone[1:]) <= {"0", ":"}):
        return "Z"
    if not zone or ":" in zone:
        return zone
    return f"{zone[:3]}:{zone[3:]}"


def _offset_microseconds(zone: str) -> int:
    if not zone or zone[0] not in "+-":
        return 0
    seconds = int(zone[1:3]) * 3600 + int(zone[4:]) * 60
    if zone[0] == "-":
        seconds = -seconds
    return seconds * 1_000_000
