# SPDX-License-Identifier: Apache-2.0
"""Windows are a function of the sequence of samples: batches, restarts and the clock do not move
them.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.errors import ConfigError, DataError
from hotbed.training.columns import columns, counters, rows_of, tables_of
from hotbed.training.watching.window_log import Window, WindowCuts, WindowLog


def numbers(cuts: WindowCuts, times: Any, sizes: list[int]) -> list[int]:
    """The window number of each sample, when the stream comes in batches of the given sizes."""
    found: list[int] = []
    for size in sizes:
        start = len(found)
        for number, rows in cuts.pieces(
            None if times is None else times[start : start + size], size
        ):
            assert rows.start == len(found) - start  # in order, nothing left out
            found += [number] * (rows.stop - rows.start)
    return found


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=60), st.data())
def test_the_window_of_a_sample_does_not_depend_on_batches(
    times: list[int], data: st.DataObject
) -> None:
    array = np.array(times, np.int64)
    at_once = numbers(WindowCuts(seconds=100.0), array, [len(times)])
    left, sizes = len(times), []
    while left:
        sizes.append(data.draw(st.integers(1, left)))
        left -= sizes[-1]
    assert numbers(WindowCuts(seconds=100.0), array, sizes) == at_once
    # of the newest time so far
    assert at_once == [max(times[: i + 1]) // 100_000_000 for i in range(len(times))]


def test_a_late_sample_falls_into_the_open_window() -> None:
    times = np.array([10, 25, 3, 31, 12], np.int64) * 1_000_000
    assert numbers(WindowCuts(seconds=10), times, [5]) == [1, 2, 2, 3, 3]
    assert WindowCuts(seconds=10).bounds(2) == (20_000_000, 30_000_000)


def test_times_before_1970_are_times() -> None:
    assert numbers(WindowCuts(seconds=1), np.array([-2_500_000, -1, 0], np.int64), [3]) == [
        -3,
        -1,
        0,
    ]


@given(st.lists(st.integers(0, 9), max_size=20))
def test_windows_of_samples_hold_exactly_so_many(sizes: list[int]) -> None:
    cuts = WindowCuts(samples=7)
    assert numbers(cuts, None, sizes) == [i // 7 for i in range(sum(sizes))]
    assert cuts.is_full(sum(sizes) // 7) is False
    assert sum(sizes) < 7 or cuts.is_full(sum(sizes) // 7 - 1)


@pytest.mark.parametrize(
    "arguments", [{}, {"seconds": 1, "samples": 1}, {"seconds": 0}, {"samples": 0}, {"samples": -1}]
)
def test_settings_that_cannot_work_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"Windows(\.\w+)?: "):
        WindowCuts(**arguments)


def test_windows_of_seconds_need_times() -> None:
    with pytest.raises(DataError, match="without a Time column"):
        list(WindowCuts(seconds=1).pieces(None, 3))


def window(number: int, rows: int = 10, **values: float) -> Window:
    return Window(
        number,
        number + 1,
        rows,
        (number + 1) * rows,
        values,
        {"user": {"rows": number}},
        {"bytes": 1.0},
    )


def test_a_log_stays_small_and_its_windows_of_one_length() -> None:
    log = WindowLog(most=8)
    for number in range(1000):
        log.append(window(number, auc=number / 1000))
        assert len(log.windows) <= 8
        assert sum(w.windows for w in log.windows) == number + 1
        assert sum(w.rows for w in log.windows) == (number + 1) * 10
    lengths = {w.windows for w in log.windows[:-1]}
    assert len(lengths) == 1
    assert [w.begin for w in log.windows[1:]] == [w.end for w in log.windows[:-1]]  # no gap
    assert np.average(
        [w.values["auc"] for w in log.windows], weights=[w.rows for w in log.windows]
    ) == pytest.approx(0.4995)
    assert log.windows[-1].tables == {"user": {"rows": 999}}


def test_joined_values_are_means_by_rows_and_undefined_ones_count_for_nothing() -> None:
    a, b = (
        window(0, 10, auc=0.5, only=1.0, never=math.nan),
        window(1, 30, auc=0.7, other=2.0, never=math.nan),
    )
    joined = a.joined(b)
    assert joined.values.pop("never") != joined.values
    assert joined.values == pytest.approx({"auc": 0.65, "only": 1.0, "other": 2.0})
    assert a.joined(window(1, 30, auc=math.nan)).values["auc"] == 0.5


@pytest.mark.parametrize("stop", [0, 1, 7, 8, 9, 30])
def test_a_log_goes_on_from_its_state(stop: int) -> None:
    whole, first = WindowLog(most=8), WindowLog(most=8)
    for number in range(stop):
        for log in (whole, first):
            log.append(window(number, auc=number / 7 if number % 3 else math.nan))
    second = WindowLog(most=8)
    second.load_state(through_json(first.state()))
    for number in range(stop, 50):
        for log in (whole, second):
            log.append(window(number, auc=number / 7))
    for a, b in zip(whole.windows, second.windows, strict=True):
        np.testing.assert_equal(vars(a), vars(b))


def test_what_the_machine_did_is_where_no_digest_looks() -> None:
    """Two machines, one stream: the same bits but for what is named wall_."""
    states = []
    for size in (1.0, 99.0):
        log = WindowLog()
        tables = {"user": {"rows": 3, "row_bytes": int(size)}}
        log.append(Window(0, 1, 5, 5, {"auc": 0.5}, tables, {"freshness_seconds": size}))
        states.append(log.state())
        other = WindowLog()
        other.load_state(through_json(log.state()))
        assert other.windows[0].observed == {"freshness_seconds": size}
    assert states[0].pop("wall_observed")["values"] == 1.0
    assert states[1].pop("wall_observed")["values"] == 99.0
    np.testing.assert_equal(states[0], states[1])


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.floats(), max_size=3), max_size=5))
def test_dicts_of_floats_survive_as_columns(rows: list[dict[str, float]]) -> None:
    np.testing.assert_equal(rows_of(through_json(columns(rows))), rows)


def test_counters_survive_as_columns_without_bytes() -> None:
    rows = [
        {"user": {"rows": 2**40, "row_bytes": 5}},
        {"user": {"rows": 1, "evicted": 0}, "item": {"rows": 4}},
    ]
    assert tables_of(through_json(counters(rows))) == [{"user": {"rows": 2**40}}, rows[1]]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """A state as a checkpoint gives it back."""
    plain = {}
    for name, value in state.items():
        if isinstance(value, dict):
            plain[name] = through_json(value)
        else:
            plain[name] = (
                value.copy()
                if isinstance(value, np.ndarray)
                else json.loads(json.dumps(value, allow_nan=False))
            )
    return plain
