# SPDX-License-Identifier: Apache-2.0
"""Times: every unit and spelling to microseconds UTC; mixed zones are an error."""

from __future__ import annotations

import datetime as dt
import email.utils
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.connectors import Csv, Memory
from hotbed.connectors.times import to_microseconds
from hotbed.data import Encoder, Id, Schema, Time, TimeOfDay
from hotbed.errors import ConfigError, DataError, DecodeError, SchemaError

pytestmark = pytest.mark.core


def micros(values: Any, unit: str) -> list[int]:
    found: list[int] = Encoder(Schema([Time("t", unit=unit)]))(
        Memory({"t": values}).table
    ).time.tolist()
    return found


def at(text: str) -> int:
    return round(dt.datetime.fromisoformat(text).timestamp() * 1e6)


@pytest.mark.parametrize(
    ("values", "unit", "expected"),
    [
        ([5, -5], "s", [5_000_000, -5_000_000]),
        ([1.5], "s", [1_500_000]),
        ([5], "ms", [5_000]),
        ([5], "us", [5]),
        ([5_999, -1, -1000, 0], "ns", [5, -1, -1, 0]),
        (["1413896829"], "s", [1_413_896_829_000_000]),
        (["2014-10-21 13:07:09"], "iso", [at("2014-10-21T13:07:09+00:00")]),
        (["2014-10-21T13:07:09.123456Z"], "iso", [at("2014-10-21T13:07:09.123456+00:00")]),
        (
            ["2014-10-21", "2014-10-21 01:30"],
            "iso",
            [at("2014-10-21T00:00+00:00"), at("2014-10-21T01:30+00:00")],
        ),
        (["2019-10-01 00:00:00 UTC"], "iso", [at("2019-10-01T00:00:00+00:00")]),
        (
            ["2019-10-01 00:00:00 UTC", "2019-10-01T00:00:01+00:00"],
            "iso",
            [at("2019-10-01T00:00+00:00"), at("2019-10-01T00:00:01+00:00")],
        ),
        (
            ["2019-10-01T00:00:00+05:30", "2019-10-02T00:00:00+0530"],
            "iso",
            [at("2019-10-01T00:00+05:30"), at("2019-10-02T00:00+05:30")],
        ),
        (  # explicit offsets are instants: an end of summer time, and a spelling of UTC
            ["2019-10-27T02:30+02:00", "2019-10-27 02:30+01", "Sun, 27 Oct 2019 03:30:00 GMT"],
            "iso",
            [at(f"2019-10-27T0{hour}:30+00:00") for hour in (0, 1, 3)],
        ),
        ([14102113], "%y%m%d%H", [at("2014-10-21T13:00+00:00")]),
        (["11/15/2019 9:05:58 AM"], "%m/%d/%Y %I:%M:%S %p", [at("2019-11-15T09:05:58+00:00")]),
    ],
)
def test_times_are_microseconds_utc(values: list[Any], unit: str, expected: list[int]) -> None:
    assert micros(values, unit) == expected


def test_arrow_times_need_no_unit() -> None:
    moment = dt.datetime(2014, 10, 21, 13, tzinfo=dt.UTC)
    for kind in (pa.timestamp("s"), pa.timestamp("ns", "UTC"), pa.timestamp("ms", "Europe/Paris")):
        array = pa.array([int(moment.timestamp())], pa.timestamp("s", kind.tz)).cast(kind)
        assert micros(array, "s") == [at(moment.isoformat())]
    assert micros(pa.array([dt.date(2014, 10, 21)]), "s") == [at("2014-10-21T00:00+00:00")]
    assert micros(pa.array([-1], pa.timestamp("ns")), "s") in ([-1], [0])


@pytest.mark.parametrize("zone", ["Z", "+02:00", "+00:00", " UTC"])
def test_times_with_a_zone_and_without_one_are_an_error_in_one_batch_and_between(zone: str) -> None:
    values = [f"2019-10-01T00:00:00{zone}", "2019-10-01T00:00:00"]
    message = "some have a zone and some have none"
    with pytest.raises(DataError, match=rf"column 't': times: {message}"):
        micros(values, "iso")
    encoder = Encoder(Schema([Time("t", unit="iso")]))
    encoder(Memory({"t": values[:1]}).table)
    with pytest.raises(DataError, match=message):
        encoder(Memory({"t": values[1:]}).table)


def test_an_unknown_unit_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown unit, got 'minutes'"):
        Time("t", unit="minutes")


@pytest.mark.parametrize(
    ("path", "time", "first", "ordered"),
    [
        ("avazu/stream_20141021.csv", Time("hour", unit="iso"), "2014-10-21T00:00+00:00", True),
        (
            "rees46/2019-Oct.head.csv",
            Time("event_time", unit="iso"),
            "2019-10-01T00:00+00:00",
            True,
        ),
        ("obd/bts_men.csv", Time("timestamp", unit="iso"), None, False),
    ],
)
def test_real_times_are_read(
    shared_data: Path, path: str, time: Time, first: str | None, ordered: bool
) -> None:
    encoder = Encoder(Schema([time]))
    times = np.concatenate([encoder(batch).time for batch, _ in Csv(shared_data / path).read()])
    assert at("2014-01-01T00:00+00:00") < times.min() <= times.max() < at("2020-01-01T00:00+00:00")
    assert first is None or times[0] == at(first)
    assert not ordered or (np.diff(times) >= 0).all()


def offset(moment: dt.datetime, colon: str = ":") -> str:
    text = moment.strftime("%z")
    return f"{text[:3]}{colon}{text[3:]}"


# what prints a time -> the text of a datetime with a zone
PRINTED: dict[str, Callable[[dt.datetime], str]] = {
    "Python": str,
    "Python, isoformat": lambda at: at.isoformat(),
    "Python, logging": lambda at: at.strftime("%Y-%m-%d %H:%M:%S,%f")[:23],
    "Python, ctime": lambda at: at.ctime(),
    "Python, email": email.utils.format_datetime,
    "PostgreSQL": lambda at: str(at).removesuffix(":00"),
    "pandas": lambda at: str(at.replace(tzinfo=None)) + "000" * bool(at.microsecond) + offset(at),
    "Java, ZonedDateTime": lambda at: at.isoformat() + "[Europe/Berlin]",
    "Java, Instant": lambda at: at.astimezone(dt.UTC).isoformat()[:-6] + "Z",
    "Java, UTC": lambda at: at.astimezone(dt.UTC).isoformat()[:-6] + "Z[UTC]",
    "Java, LocalDateTime": lambda at: at.isoformat()[:16],
    "Java, Date": lambda at: at.astimezone(dt.UTC).strftime("%a %b %d %H:%M:%S UTC %Y"),
    "Java, RFC 1123": lambda at: f"{at:%a}, {at.day} {at:%b %Y %H:%M:%S} {offset(at, '')}",
    "JavaScript": lambda at: at.strftime("%a %b %d %Y %H:%M:%S GMT") + offset(at, "") + " (CET)",
    "JavaScript, JSON": lambda at: (
        at.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:23] + "Z"
    ),
    "JavaScript, UTC": lambda at: at.astimezone(dt.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"),
    "JavaScript, date": lambda at: at.strftime("%a %b %d %Y"),
}


def by_python(text: str) -> dt.datetime:
    """Return the time of a text by Python's own parsers; UTC without a zone."""
    text = text.partition("[")[0].partition(" (")[0].replace(" GMT+", " +").replace(" GMT-", " -")
    parsers: list[Callable[[str], dt.datetime]] = [
        dt.datetime.fromisoformat,
        lambda one: dt.datetime.strptime(one, "%a %b %d %Y %H:%M:%S %z"),
        lambda one: dt.datetime.strptime(one, "%a %b %d %Y"),
        lambda one: dt.datetime.strptime(one, "%a %b %d %H:%M:%S %Y"),
        lambda one: dt.datetime.strptime(one, "%a %b %d %H:%M:%S UTC %Y"),
        email.utils.parsedate_to_datetime,
    ]
    for parser in parsers:
        try:
            moment = parser(text)
        except ValueError:
            continue
        return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)
    raise AssertionError(text)


ZONES = [dt.timedelta(hours=hours) for hours in (0, 1, -5)] + [dt.timedelta(hours=5, minutes=30)]


@settings(max_examples=4)  # of each of 17 systems, in two types
@given(
    moments=st.lists(
        st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2199, 12, 31)), min_size=1, max_size=5
    ),
    zone=st.sampled_from(ZONES).map(dt.timezone),
)
def test_times_are_read_as_systems_print_them(
    moments: list[dt.datetime], zone: dt.timezone
) -> None:
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    for system, printed in PRINTED.items():
        texts = [printed(moment.replace(tzinfo=zone)) for moment in moments]
        expected = [(by_python(text) - epoch) // dt.timedelta(microseconds=1) for text in texts]
        for values in (
            pa.array(texts),
            pa.array([*texts, None], pa.large_string()).dictionary_encode(),
        ):
            micros = to_microseconds(values, "iso").drop_null()
            assert micros.to_pylist() == expected, (system, texts)


@pytest.mark.parametrize(
    "text",
    [
        "Tue Nov 14 23:13:20 CET 2023",  # a zone whose offset depends on who reads it
        "11/14/2023, 10:13:20 PM",
        "14.11.2023 22:13:20",
        "2023-02-30",
        "2023-11-14 22:13:60",
        "2023-11-14 24:00:00",
        "2023-11-14 22:13.5",
        "2023-11-14T22:13:20+25:00",
        "2023-11-14T22:13:20[Europe/Berlin]",
        "Tue Foo 14 2023",
        "infinity",
        "1700000000",
    ],
)
def test_a_text_that_may_mean_several_times_is_a_bad_row_of_its_name(text: str) -> None:
    with pytest.raises(DecodeError, match="time 't': expected times of unit 'iso', got "):
        micros([text], "iso")


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_are_numbers_of_every_type(unit: str) -> None:
    scale = {"s": Decimal(10**6), "ms": Decimal(10**3), "us": Decimal(1), "ns": Decimal("0.001")}
    exact = Decimal(1_700_000_000_123_456) / scale[unit]
    expected = [1_700_000_000_123_456]
    assert micros(pa.array([exact], pa.decimal128(38, 6)), unit) == expected
    assert micros(pa.array([exact], pa.decimal256(60, 9)), unit) == expected
    assert micros(pa.array([exact], pa.decimal128(38, 6)).dictionary_encode(), unit) == expected
    assert micros([f"{exact:f}"], unit) == micros([f" {exact:f} "], unit) == expected
    assert micros([float(exact)], unit) == expected
    whole = int(exact)
    kinds = (pa.int64(), pa.uint64(), pa.decimal128(20))
    assert len({tuple(micros(pa.array([whole], kind), unit)) for kind in kinds}) == 1
    for wrong in (
        pa.array([True]),
        pa.array([1], pa.duration("s")),
        pa.array([1], pa.time64("us")),
    ):
        with pytest.raises(SchemaError, match=f"times: unit '{unit}' does not fit a column of"):
            micros(wrong, unit)


def test_a_format_never_reads_floats_as_a_number_of_a_unit() -> None:
    with pytest.raises(SchemaError, match="unit '%Y%m%d' does not fit a column of double"):
        micros([20231114.0, None], "%Y%m%d")


def test_a_part_of_the_time_is_read_in_the_unit_of_the_time() -> None:
    hour = Id("hour", column="t", transforms=[TimeOfDay()])
    for unit, factor in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
        schema = Schema([Time("t", unit=unit), hour])
        rows = Memory({"t": [1_700_000_000 * factor]}).table  # 22:13:20
        assert Encoder(schema)(rows).ids["hour"].values.tolist() == [22]
        alone = Schema([Schema.from_json(schema.to_json())["hour"]])  # as a server encodes it
        assert Encoder(alone)(rows).ids["hour"].values.tolist() == [22]
    text = Schema([Time("t", unit="iso"), hour])
    batch = Encoder(text)(Memory({"t": ["2023-11-14 22:13:20"]}).table)
    assert batch.ids["hour"].values.tolist() == [22]
    with pytest.raises(ConfigError, match=r"'hour' of column 't' has the unit 's' .* got 'ms'"):
        Schema([Time("t"), Id("hour", column="t", transforms=[TimeOfDay(unit="ms")])])
    with pytest.raises(ConfigError, match=r"time_of_day\.unit: unknown unit, got 'hours'"):
        TimeOfDay(unit="hours")
    before = Schema.from_json(
        {"columns": Schema([Time("t", unit="ms"), hour], rules=1).to_json()["columns"]}
    )
    assert before["hour"].transforms == (TimeOfDay(unit="s"),)  # type: ignore[attr-defined]
