# SPDX-License-Identifier: Apache-2.0
"""Histories and counts of any rows, cut into any batches, are those of a dict that replays them:
also of rows that are later than every window, and wherever rows of tables are evicted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hotbed as hb
from hotbed.embedding.histories import HistoryStore
from hotbed.testing import ReplayedCount, ReplayedHistory

KEYS = [0, 1, -1, 2**63 - 1, -(2**63)]


class Row(NamedTuple):
    key: int
    time: int
    delay: int
    item: int
    liked: int


rows_of = st.lists(
    st.builds(
        Row,
        st.sampled_from(KEYS[:3]) | st.sampled_from(KEYS),
        st.integers(0, 60) | st.integers(0, 400),
        st.sampled_from([0, 0, 1, 20]),
        st.integers(-(2**63), 2**63 - 1),
        st.integers(0, 1),
    ),
    max_size=150,
)


def schema_of(unit: str, length: int, within: int | None) -> hb.Schema:
    return hb.Schema(
        [
            hb.Label("liked"),
            hb.Time("at", unit=unit),
            hb.Id("user"),
            hb.Id("item"),
            hb.History(
                "before",
                of=["item", "at"],
                by="user",
                where={"liked": 1},
                length=length,
                within_seconds=within,
            ),
            hb.Count("likes", by="user", where={"liked": 1}, windows=[20, 60], every=10),
        ]
    )


def batch_of(rows: list[Row]) -> hb.Batch:
    columns = {name: np.array([getattr(row, name) for row in rows]) for name in Row._fields}
    micros = columns["time"] * 1_000_000
    return hb.Batch(
        ids={"user": hb.Ids(columns["key"]), "item": hb.Ids(columns["item"])},
        labels={"liked": columns["liked"].astype(np.float32)},
        time=micros,
        known=micros + columns["delay"] * 1_000_000,
    )


def replayed(rows: list[Row], length: int, within: int | None) -> list[tuple[list, list[float]]]:
    """Return what each row sees: (age, item) of each entry, and its counts."""
    history = ReplayedHistory(length, float("inf") if within is None else within)
    count = ReplayedCount(every=10, longest=60)
    seen = []
    for row in rows:
        entries = [(row.time - known, item) for known, item in history.see(row.key, row.time)]
        counts = []
        for window in (20, 60):
            matches, shown = count.see(row.key, row.time, window)
            counts += [np.log1p(matches), np.log1p(shown), matches / (shown + 10)]
        seen.append((entries, counts))
        known = row.time + row.delay
        history.learn(row.time)
        if row.liked:
            history.leave(row.key, row.time, known, row.item)
        count.leave(row.key, row.time, known, row.liked)
    return seen


def entries_of(*times: int) -> list[Row]:
    """Return rows of the first key that leave an entry."""
    return [Row(KEYS[0], time, 0, 7, 1) for time in times]


def newest_of(time: int) -> list[Row]:
    """Return a row of another key."""
    return [Row(KEYS[1], time, 0, 7, 0)]


EACH = {"sizes": [1], "evicts": [True], "unit": "s", "within": 30}
"""Rows are evicted after each row."""


@settings(max_examples=5 * settings.default.max_examples, deadline=None)
# A count is late by a whole window, and the tile of the newest row is not over.
@example(rows=[*entries_of(0), *newest_of(129), *entries_of(69)], length=20, **EACH)
# The entry that arrived first is newer than those that arrived after it.
@example(rows=[*entries_of(60, *[35] * 16), *newest_of(96), *entries_of(80)], length=20, **EACH)
# The rows of the first 16 entries have expired when one of the others is dropped.
@example(
    rows=[*entries_of(*[0] * 16, *[50] * 17), *newest_of(62), *entries_of(55, 55, 55, 55, 57, 52)],
    length=20,
    **EACH,
)
@given(
    rows=rows_of,
    sizes=st.lists(st.integers(1, 60), min_size=1),
    unit=st.sampled_from(["s", "us"]),
    length=st.sampled_from([1, 3, 20, 100]),
    within=st.sampled_from([None, 7, 30]),
    evicts=st.lists(st.booleans(), min_size=1),
)
def test_histories_equal_those_of_a_dict_for_any_cut(
    rows: list[Row],
    sizes: list[int],
    unit: str,
    length: int,
    within: int | None,
    evicts: list[bool],
) -> None:
    schema = schema_of(unit, length, within)
    histories = HistoryStore(schema, hb.make_tables(schema, dim=4))
    begin = 0
    number = 0
    expected = replayed(rows, length, within)
    while begin < len(rows):
        part = rows[begin : begin + sizes[number % len(sizes)]]
        batch = histories.fill(batch_of(part), leaves=True)
        ids = batch.ids["before"]
        assert ids.values.flags.aligned
        for place, (entries, counts) in enumerate(expected[begin : begin + len(part)]):
            own = slice(ids.offsets[place], ids.offsets[place + 1])
            assert ids.values[own].tolist() == [item for _, item in entries]
            ages = [int(age).bit_length() for age, _ in entries]
            assert batch.ids["before_at"].values[own].tolist() == ages
            assert batch.dense["likes"][place].tolist() == pytest.approx(counts, rel=1e-6)
        begin += len(part)
        newest = max(row.time for row in rows[:begin]) * 1_000_000
        for table in histories.tables.values():
            if evicts[number % len(evicts)]:
                table.evict(newest)
        number += 1
