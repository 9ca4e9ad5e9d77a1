# SPDX-License-Identifier: Apache-2.0
"""Learners: parts of a column, however they are cut, give what the whole column gives."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.connectors import Memory
from hotbed.data import Dense, Id, Schema
from hotbed.data.columns import Columns
from hotbed.data.learners import MOST_POINTS, Learner, Moments, Quantiles, ValueCounts
from hotbed.data.transforms import Bucketize, FillMissing, Map, Normalize, Transform
from hotbed.errors import ConfigError, SchemaError

NO_ROWS = Columns(pa.record_batch({"x": pa.array([], pa.int64())}))
SMALLEST_NORMAL = np.finfo(np.float64).tiny
numbers = st.none() | st.floats(-1e9, 1e9) | st.sampled_from([0.0, 1.0, 1e100, -2.5])


def learn(learner: Learner, values: Sequence[Any], cuts: Sequence[int]) -> Any:
    """Return what copies of `learner` learn from the parts between `cuts`, merged in order."""
    bounds = sorted({0, len(values), *(cut % (len(values) + 1) for cut in cuts)})
    kind = pa.string() if any(isinstance(value, str) for value in values) else pa.float64()
    blank = pickle.dumps(learner)
    for begin, end in pairwise(bounds):
        part: Learner = pickle.loads(blank)
        part.add(pa.array(values[begin:end], kind), NO_ROWS)
        learner.merge(pickle.loads(pickle.dumps(part)))
    return learner.learned()


@given(values=st.lists(numbers, max_size=60), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_mean_and_deviation_are_those_of_the_whole_column(
    values: list[float | None], cuts: list[int]
) -> None:
    mean, std = learn(Moments(), values, cuts)
    present = [value for value in values if value is not None]
    with np.errstate(over="ignore"):
        right = np.array([np.mean(present), np.std(present)] if present else [0.0, 0.0])
    scale = max(map(abs, present), default=0.0)
    close = max(1e-12 * scale, SMALLEST_NORMAL)
    assert mean == pytest.approx(right[0], rel=1e-12, abs=close)
    assert std == pytest.approx(right[1], rel=1e-9, abs=close)


@given(
    value=st.floats(-1e9, 1e9) | st.sampled_from([0.1, 0.7, 1e100]),
    count=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_a_constant_column_is_zero_and_stays_zero(
    value: float, count: int, cuts: list[int]
) -> None:
    assert learn(Moments(), [value, None] * count, cuts) == (value, 0.0)
    normalize = Normalize().learned(learn(Moments(), [value] * count, cuts))
    later = normalize.apply(pa.array([value, 2 * value + 1, None]), NO_ROWS)
    assert later.to_pylist() == [0.0, 0.0, None]


@given(values=st.lists(numbers, max_size=60), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_quantiles_of_few_values_are_exactly_those_of_polars(
    values: list[float | None], cuts: list[int]
) -> None:
    shares = [0.0, 0.1, 0.25, 1 / 3, 0.5, 0.9, 1.0]
    column = pl.Series(values, dtype=pl.Float64).drop_nulls()  # nulls round its ranks
    right = [column.quantile(share, "linear") for share in shares]
    learned = learn(Quantiles(shares), values, cuts)
    assert learned == [value for value in right if value is not None]
    if learned:
        assert learned[4] == column.median()


@pytest.mark.parametrize("kind", ["normal", "sorted", "power", "few values"])
def test_quantiles_of_many_values_err_by_at_most_a_4096th_of_the_rows(kind: str) -> None:
    # Levels of a 16th of the size, so that 600,000 values fill three of them: 16 times the error.
    most_points = MOST_POINTS // 16
    rng = np.random.default_rng(3)
    values = {
        "normal": rng.normal(size=600_000),
        "sorted": np.sort(rng.normal(size=600_000)),
        "power": rng.pareto(0.5, 600_000),
        "few values": rng.integers(0, 5, 600_000).astype(np.float64),
    }[kind]
    shares = list(np.linspace(0, 1, 101))
    whole = Quantiles(shares, most_points)
    for part in np.split(values, [7, 70_000, 70_100, 200_000, 350_000]):
        learner = Quantiles(shares, most_points)
        for chunk in np.array_split(part, max(1, len(part) // 5000)):
            learner.add(pa.array(chunk), NO_ROWS)
        whole.merge(learner)
    assert len(whole._levels) >= 3
    ordered = np.sort(values)
    worst = 0.0
    for share, value in zip(shares, whole.learned(), strict=True):
        rank = share * (len(values) - 1)
        first = np.searchsorted(ordered, value, side="left")
        last = np.searchsorted(ordered, value, side="right")
        worst = max(worst, first - rank, rank - last)
    shrunk = (len(whole._levels) - 1) / (2 * most_points // 8)
    assert shrunk < 16 / 4096
    assert worst <= shrunk * len(values) + 1


@given(
    words=st.lists(st.none() | st.sampled_from(["a", "b", "ä", "aa", ""]), max_size=80),
    cuts=st.lists(st.integers(0, 80), max_size=6),
)
def test_counts_are_those_of_a_counter_and_ties_go_by_value(
    words: list[str | None], cuts: list[int]
) -> None:
    learned = learn(ValueCounts(), words, cuts)
    counts = Counter(word for word in words if word is not None)
    right = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    assert list(learned.select("value", "count").iter_rows()) == right


def test_counts_are_summed_up_on_the_way() -> None:
    learner = ValueCounts(pending_values=3)
    for _ in range(1000):
        learner.add(pa.array(["a", "b"]), NO_ROWS)
    assert sum(len(part) for part in learner._parts) < 10
    assert learner.learned()["count"].to_list() == [1000, 1000]


def test_text_and_numbers_in_one_vocabulary_are_refused() -> None:
    learner = ValueCounts()
    learner.add(pa.array(["1"]), NO_ROWS)
    learner.add(pa.array([1]), NO_ROWS)
    with pytest.raises(SchemaError, match=r"one type, got Int64, String.* Declare one type"):
        learner.learned()


def test_joint_transforms_learn_from_the_values_of_all_their_columns() -> None:
    source = Memory({"from": ["a", "b", "b"], "to": ["c", "b", None], "other": ["z", "z", "y"]})
    schema = Schema(
        [
            Id("from", transforms=[Map(joint="city")]),
            Id("to", transforms=[Map(joint="city")]),
            Id("other", transforms=[Map()]),
        ]
    )
    fitted = schema.fit(source)
    words = {column.name: column.transforms[0].vocabulary for column in fitted.ids}
    assert words == {"from": ("b", "a", "c"), "to": ("b", "a", "c"), "other": ("z", "y")}


def test_joint_transforms_that_wait_for_each_other_are_refused() -> None:
    one: list[Transform] = [Map(joint="x"), Map(joint="y")]
    schema = Schema([Id("a", transforms=one), Id("b", transforms=one[::-1])])
    with pytest.raises(ConfigError, match=r"wait for each other, got \['x', 'y'\]"):
        schema.fit(Memory({"a": ["1"], "b": ["2"]}))


@given(
    x=st.lists(st.none() | st.floats(-100, 100) | st.just(float("nan")), min_size=1, max_size=50)
)
def test_fitted_transforms_are_what_polars_computes_over_the_whole_column(
    x: list[float | None],
) -> None:
    words = [
        None if value is None else str(int(abs(value or 0)) % 4) for value in x if value == value
    ]
    words = (words + [None] * len(x))[: len(x)]
    schema = Schema(
        [
            Dense("mean", [FillMissing(statistic="mean"), Normalize()], column="x"),
            Dense("median", [FillMissing(statistic="median")], column="x"),
            Id("bucket", transforms=[Bucketize(bins=4)], column="x"),
            Id("word", transforms=[Map(min_count=2, max_size=3)]),
        ]
    )
    source = Memory({"x": pa.array(x, pa.float64()), "word": pa.array(words, pa.string())})
    fitted = schema.fit(source)
    column = pl.Series("x", x, dtype=pl.Float64).fill_nan(None)
    present = column.drop_nulls()
    fill, normalize = fitted["mean"].transforms
    filled = column.fill_null(fill.value)
    assert fill.value == pytest.approx(column.mean() or 0.0, rel=1e-12, abs=1e-12)
    assert normalize.mean == pytest.approx(filled.mean(), rel=1e-12, abs=1e-12)
    assert normalize.std == pytest.approx(filled.std(ddof=0), rel=1e-12, abs=1e-12)
    assert fitted["median"].transforms[0].value == (column.median() or 0.0)
    quartiles = {present.quantile(share, "linear") for share in (0.25, 0.5, 0.75)} - {None}
    assert set(fitted["bucket"].transforms[0].boundaries) == quartiles
    counts = Counter(word for word in words if word is not None)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    kept = tuple(word for word in frequent if counts[word] >= 2)[:3]
    assert fitted["word"].transforms[0].vocabulary == kept
