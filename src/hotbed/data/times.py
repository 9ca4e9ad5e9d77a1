# SPDX-License-Identifier: Apache-2.0
"""Times: any column of times to int64 microseconds UTC."""

from __future__ import annotations

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.errors import DataError, SchemaError

UNITS = {"s": 1_000_000, "ms": 1_000, "us": 1}
_FORMATS = ("%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%dT%H:%M", "%Y-%m-%d")


def to_microseconds(values: pa.Array, unit: str, zones: set[str] | None = None) -> pa.Array:
    """Int64 microseconds UTC; nulls stay, and text that is no time becomes null.

    `unit`: "s", "ms", "us", "ns" for numbers, "iso" for ISO 8601 text, or a strptime format such as "%y%m%d%H". Arrow
    timestamps and dates need no unit. Text without a zone is UTC; text that mixes zones raises DataError. `zones`: the
    zones of earlier batches, which this one may not mix with; its own is added.
    """
    kind = values.type
    if pa.types.is_timestamp(kind):
        return values.cast(pa.timestamp("us", kind.tz), safe=False).cast(pa.int64())
    if pa.types.is_date(kind):
        return values.cast(pa.timestamp("us")).cast(pa.int64())
    if _is_text(kind):
        if unit in (*UNITS, "ns"):
            whole = pl.Series(values.cast(pa.string())).cast(pl.Int64, strict=False).to_arrow()
            return to_microseconds(whole, unit)
        return _from_iso(values, set() if zones is None else zones) if unit == "iso" else _from_format(values, unit)
    if "%" in unit and pa.types.is_integer(kind):  # 14102100 read as a number
        return _from_format(values, unit)
    if unit == "iso" or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise SchemaError(
            f"times: unit {unit!r} does not fit a column of {kind} — received {kind} — declare the column's real unit"
        )
    if pa.types.is_floating(kind):
        factor = UNITS.get(unit, 1e-3)
        return pc.round(pc.multiply(values.cast(pa.float64()), float(factor))).cast(pa.int64())
    whole = values.cast(pa.int64())
    return _scale(whole, unit)


def _scale(whole: pa.Array, unit: str) -> pa.Array:
    if unit != "ns":
        return pc.multiply_checked(whole, UNITS[unit])
    # Arrow divides towards zero; shifting keeps times before 1970 in order.
    return pc.divide(pc.subtract(whole, pc.if_else(pc.less(whole, 0), 999, 0)), 1_000)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _from_format(values: pa.Array, form: str) -> pa.Array:
    text = pl.Series(values.cast(pa.string())).str.strip_chars()
    if ("%H" in form or "%I" in form) and "%M" not in form:  # Polars wants minutes with hours
        text, form = text + " 00", f"{form} %M"
    parsed = text.str.to_datetime(form, time_unit="us", strict=False, time_zone="UTC" if "%z" in form else None)
    return parsed.to_physical().to_arrow().cast(pa.int64())


def _from_iso(values: pa.Array, zones: set[str]) -> pa.Array:
    text = pl.Series(values.cast(pa.string())).str.strip_chars()
    # A date alone ends like an offset ("2014-10-21"), so a zone needs a time of day before it.
    found = text.str.extract(r"\d:\d.*?(Z|UTC|GMT|[+-]\d{2}:?\d{2})$").fill_null("").filter(text.is_not_null())
    zones.update(map(_one_name, found.unique().to_list()))
    if len(zones) > 1:
        raise DataError(
            f"times: a column mixes zones — received {sorted(zones)} ('' = none) — write all its times with one zone"
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


def _one_name(zone: str) -> str:
    """UTC has many spellings."""
    if zone in ("Z", "UTC", "GMT") or (zone and set(zone[1:]) <= {"0", ":"}):
        return "Z"
    return zone if not zone or ":" in zone else f"{zone[:3]}:{zone[3:]}"


def _offset_microseconds(zone: str) -> int:
    if not zone or zone[0] not in "+-":
        return 0
    return (1 if zone[0] == "+" else -1) * (int(zone[1:3]) * 3600 + int(zone[4:]) * 60) * 1_000_000
