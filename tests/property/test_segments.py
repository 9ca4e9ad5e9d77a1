# SPDX-License-Identifier: Apache-2.0
"""Figures by segment against sums over the rows of each value, and pairs of rows for the AUC."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.data.columns import Columns, SegmentColumn
from hotbed.metrics import segments
from hotbed.metrics.segments import OTHER, SegmentFigures

pytestmark = pytest.mark.core

SAMPLES = st.lists(
    st.tuples(
        st.sampled_from("abcdef"),
        st.sampled_from([0.1, 0.2, 0.5, 0.7, 0.99]),
        st.booleans(),
        st.sampled_from([0.0, 1.0, 2.5]),
    ),
    min_size=1,
    max_size=60,
)


def reference(rows: list[tuple[str, float, bool, float]]) -> dict[str, float]:
    """AUC, log loss and calibration of some rows, by their definitions."""
    pairs = won = 0.0
    for _, high, label, weight in rows:
        for _, low, other, other_weight in rows:
            if label and not other:
                pairs += weight * other_weight
                won += weight * other_weight * ((high > low) + 0.5 * (high == low))
    total = sum(weight for *_, weight in rows)
    losses = sum(-w * math.log(p if label else 1 - p) for _, p, label, w in rows)
    observed = sum(weight for *_, label, weight in rows if label)
    return {
        "auc": won / pairs if pairs else math.nan,
        "log_loss": losses / total if total else math.nan,
        "calibration": sum(p * w for _, p, _, w in rows) / observed if observed else math.nan,
    }


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(SAMPLES, st.integers(1, 4), st.booleans(), st.data())
def test_figures_are_those_of_the_rows_of_each_value(
    samples: list[Any], most: int, endless: bool, data: st.DataObject
) -> None:
    """Whatever the batches are, and wherever a state is saved and loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "BLOCK", data.draw(st.integers(1, 20)))
        patch.setattr(segments, "MOST_VALUES_OF_STREAM", 4)
        whole, resumed = (SegmentFigures("any", most, endless=endless) for _ in range(2))
        first = 0
        while first < len(samples):
            part = samples[first : first + data.draw(st.integers(1, 20))]
            names, scores, labels, weights = zip(*part, strict=True)
            for counts in (whole, resumed):
                counts.update(scores, labels, weights, names)
            if data.draw(st.booleans()):
                state = resumed.state()
                resumed = SegmentFigures("any", most, endless=endless)
                resumed.load_state(state)
            first += len(part)
    assert repr(resumed.figures()) == repr(whole.figures())  # nan is not equal to itself
    by_value: dict[str, list[Any]] = {}
    for row in samples:  # of a stream, the first four values are counted apart
        is_late = endless and row[0] not in by_value and len(by_value.keys() - {OTHER}) == 4
        by_value.setdefault(OTHER if is_late else row[0], []).append(row)
    names = sorted(by_value.keys() - {OTHER}, key=lambda name: (-len(by_value[name]), name))
    for name in names[most:]:
        by_value.setdefault(OTHER, []).extend(by_value[name])
    wanted = names[:most] + [OTHER] * (OTHER in by_value)
    assert [figures.value for figures in whole.figures()] == wanted
    for figures in whole.figures():
        rows = by_value[figures.value]
        assert figures.rows == len(rows)
        assert figures.positives == sum(label for *_, label, _ in rows)
        assert figures.metrics == pytest.approx(reference(rows), rel=1e-9, nan_ok=True)


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(
    st.lists(
        st.none() | st.integers(-30, 30) | st.sampled_from([-(2**63), 2**63 - 1]),
        min_size=1,
        max_size=30,
    ),
    st.lists(st.integers(-30, 30), min_size=1, max_size=4, unique=True).map(sorted),
    st.sampled_from(["int64", "float64", "string", "dictionary"]),
)
def test_a_number_is_in_the_range_that_it_names(
    numbers: list[int | None], bounds: list[int], kind: str
) -> None:
    values = pa.array(numbers, pa.int64())
    if kind == "dictionary":
        values = values.cast("string").dictionary_encode()
    else:
        values = values.cast(kind, safe=False)
    column = Columns(pa.record_batch({"a": values})).column("a")
    apart = SegmentColumn("a").names(column)
    ranges = SegmentColumn("a", tuple(map(float, bounds))).names(column)
    for number, value, name in zip(numbers, apart, ranges, strict=True):
        if number is None:
            assert value == name == "(missing)"
            continue
        assert kind == "float64" or value == str(number)
        low, high = -math.inf, math.inf
        if name.startswith("below "):
            high = float(name.removeprefix("below "))
        elif name.startswith("from "):
            low = float(name.removeprefix("from "))
        else:
            low, high = map(float, name.split(" to "))
        assert low <= number < high
        assert not np.isin(bounds, [bound for bound in bounds if low < bound < high]).any()
