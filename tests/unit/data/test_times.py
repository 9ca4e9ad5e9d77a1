# SPDX-License-Identifier: Apache-2.0
"""Times: every unit and spelling to microseconds UTC; mixed zones are an error."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hotbed.connectors import Csv, Memory
from hotbed.data import Encoder, Schema, Time
from hotbed.errors import ConfigError, DataError

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
        (["2014-10-21T13:07:09.123456Z", "2014-10-21"], "iso", None),
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
        ([14102113], "%y%m%d%H", [at("2014-10-21T13:00+00:00")]),
        (["11/15/2019 9:05:58 AM"], "%m/%d/%Y %I:%M:%S %p", [at("2019-11-15T09:05:58+00:00")]),
    ],
)
def test_times_are_microseconds_utc(
    values: list[Any], unit: str, expected: list[int] | None
) -> None:
    if expected is None:
        with pytest.raises(DataError, match="mixes zones"):
            micros(values, unit)
    else:
        assert micros(values, unit) == expected


def test_arrow_times_need_no_unit() -> None:
    moment = dt.datetime(2014, 10, 21, 13, tzinfo=dt.UTC)
    for kind in (pa.timestamp("s"), pa.timestamp("ns", "UTC"), pa.timestamp("ms", "Europe/Paris")):
        array = pa.array([int(moment.timestamp())], pa.timestamp("s", kind.tz)).cast(kind)
        assert micros(array, "s") == [at(moment.isoformat())]
    assert micros(pa.array([dt.date(2014, 10, 21)]), "s") == [at("2014-10-21T00:00+00:00")]
    assert micros(pa.array([-1], pa.timestamp("ns")), "s") in ([-1], [0])


@pytest.mark.parametrize(
    "values",
    [
        ["2019-10-01T00:00:00Z", "2019-10-01T00:00:00"],
        ["2019-10-01T00:00:00+02:00", "2019-10-01T00:00:00+01:00"],
        ["2019-10-01T00:00:00Z", "2019-10-01T00:00:00-03:00"],
    ],
)
def test_mixed_zones_are_an_error_in_one_batch_and_between_batches(values: list[str]) -> None:
    with pytest.raises(DataError, match=r"column 't': times: a column mixes zones"):
        micros(values, "iso")
    encoder = Encoder(Schema([Time("t", unit="iso")]))
    encoder(Memory({"t": values[:1]}).table)
    with pytest.raises(DataError, match="mixes zones"):
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
