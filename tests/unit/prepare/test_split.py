# SPDX-License-Identifier: Apache-2.0
"""Splits put each row into one part, keep groups together, and never turn time back."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.connectors import Memory
from hotbed.data import Id, Schema, Time
from hotbed.data.columns import Columns
from hotbed.errors import ConfigError, DataError
from hotbed.prepare.partitions import Chunk, Partition
from hotbed.prepare.sampling.split import ByFold, ByGroup, ByTime, Holdout

pytestmark = pytest.mark.core

SCHEMA = Schema([Time("time", unit="us"), Id("user")])


def chunk(
    users: list[str | int | None] | None = None,
    times: list[int] | None = None,
    file: int = 0,
    first_row: int = 0,
) -> Chunk:
    rows = len(users or times or [])
    batch = pa.record_batch({"user": users or [0] * rows, "time": times or [0] * rows})
    return Chunk.of(Partition(0, Memory({"user": [0]}), file), 0, first_row, batch)


def by_time(valid: float, chunks: list[Chunk]) -> Holdout:
    """The split that has learned from the times of all chunks."""
    split = ByTime(valid)
    learner = split.learner()
    assert learner is not None
    for part in chunks:
        learner.add(part.rows.column("time"), Columns(part.rows))
    return split.learned(learner.learned())


@settings(deadline=None)
@given(
    times=st.lists(st.integers(-(10**15), 4 * 10**15), min_size=1, max_size=60),
    repeats=st.integers(1, 4),
    valid=st.sampled_from([0.1, 0.25, 0.5, 0.9]),
)
def test_time_never_runs_back_from_train_to_valid(
    times: list[int], repeats: int, valid: float
) -> None:
    rows = chunk(times=times * repeats)
    is_valid = by_time(valid, [rows]).valid_rows(rows, SCHEMA, 0)
    ordered = np.array(times * repeats)
    latest = ordered[~is_valid].max(initial=-(10**16))
    assert (ordered[is_valid] > latest).all()
    _, ties = np.unique(ordered, return_counts=True)
    assert abs(is_valid.sum() - valid * len(ordered)) <= ties.max()


def test_a_share_of_many_rows_is_met_to_one_in_4096() -> None:
    generator = np.random.default_rng(0)
    chunks = [chunk(times=generator.integers(0, 10**15, 100_000).tolist()) for _ in range(8)]
    split = by_time(0.1, chunks)
    share = np.mean([split.valid_rows(part, SCHEMA, 0).mean() for part in chunks])
    assert share == pytest.approx(0.1, abs=1 / 4096)


def test_times_since_a_date_are_valid() -> None:
    first = int(datetime(2020, 1, 1, tzinfo=UTC).timestamp() * 1e6)
    rows = chunk(times=[first - 1, first, first + 1])
    is_valid = ByTime(from_="2020-01-01").valid_rows(rows, SCHEMA, 0)
    assert is_valid.tolist() == [False, True, True]


def test_a_learned_time_is_written_as_it_is() -> None:
    assert by_time(0.5, [chunk(times=[1, 1_577_836_800_000_001])]) == ByTime(
        from_="1995-01-01T00:00:00.000001"
    )


@settings(deadline=None)
@given(
    users=st.lists(st.text(max_size=2) | st.none(), min_size=1, max_size=50),
    cut=st.integers(0, 50),
    seed=st.integers(0, 5),
)
def test_a_group_is_in_one_part_wherever_its_rows_are(
    users: list[str | int | None], cut: int, seed: int
) -> None:
    split = ByGroup("user", 0.5)
    parts = defaultdict(set)
    for file, some in enumerate((users[:cut], users[cut:])):
        if not some:
            continue
        is_valid = split.valid_rows(chunk(users=some, file=file), SCHEMA, seed)
        for user, part in zip(some, is_valid.tolist(), strict=True):
            parts[user].add(part)
    for missing in (None, ""):
        parts.pop(missing, None)
    assert all(len(part) == 1 for part in parts.values())


@pytest.mark.parametrize(
    "users", [list(range(100_000)), [f"user {n}" for n in range(100_000)], [None] * 100_000]
)
def test_a_share_of_the_groups_is_valid(users: list[str | int | None]) -> None:
    is_valid = ByGroup("user", 0.1).valid_rows(chunk(users=users), SCHEMA, 0)
    # five standard deviations of a share of 100,000
    assert is_valid.mean() == pytest.approx(0.1, abs=0.005)


def test_folds_depend_on_place_and_seed_alone() -> None:
    users = list(range(100_000))
    split = ByFold(0.2)
    is_valid = split.valid_rows(chunk(users=users), SCHEMA, 7)
    assert is_valid.mean() == pytest.approx(0.2, abs=0.007)
    later = chunk(users=users[60_000:], first_row=60_000)
    assert (split.valid_rows(later, SCHEMA, 7) == is_valid[60_000:]).all()
    for other, seed in ((chunk(users=users, file=1), 7), (chunk(users=users), 8)):
        both = is_valid & split.valid_rows(other, SCHEMA, seed)
        assert both.mean() == pytest.approx(0.04, abs=0.004)  # independent of the first


def test_a_split_by_time_needs_times() -> None:
    with pytest.raises(ConfigError, match="without a time column"):
        ByTime(from_="2020-01-01").valid_rows(chunk(times=[1]), Schema([Id("user")]), 0)
    with pytest.raises(ConfigError, match="has not learned"):
        ByTime(0.1).valid_rows(chunk(times=[1]), SCHEMA, 0)
    with pytest.raises(DataError, match="no rows"):
        ByTime(0.1).learned([])


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        (ByTime, {}, "by_time: expected one of valid and from"),
        (ByTime, {"valid": 0.1, "from_": "2020-01-01"}, "by_time: expected one of valid and from"),
        (ByTime, {"from_": "new year"}, "by_time.from_: not a date or a time, got 'new year'"),
        (ByTime, {"valid": 1.0}, "by_time.valid: must be a finite number > 0 and < 1"),
        (ByFold, {"valid": 0.0}, "by_fold.valid: must be a finite number > 0 and < 1"),
        (ByGroup, {"column": "user", "valid": 2}, "by_group.valid: must be a finite number"),
    ],
)
def test_a_wrong_split_is_an_error(
    kind: type[Holdout], keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**keys)
