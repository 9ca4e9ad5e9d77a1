# SPDX-License-Identifier: Apache-2.0
"""Derived columns against plain Python dicts: any chunks, any number of buckets."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.errors import SchemaError
from hotbed.prepare.keyed.derive import (
    Derivation,
    Histories,
    Previous,
    Session,
    TimeDifference,
    rows_with_key,
)
from hotbed.prepare.shuffle import BucketShuffle, Side

Row = tuple[int | None, int | None, int | None]
"""User, time in seconds, item."""

row = st.tuples(
    st.none() | st.integers(0, 2), st.none() | st.integers(-4, 12), st.none() | st.integers(0, 9)
)
chunks = st.lists(st.lists(row, max_size=12), max_size=4)


def derived(
    chunks_of_rows: list[list[Row]],
    derivations: list[Derivation],
    num_buckets: int,
    user_type: pa.DataType,
) -> list[dict[str, Any]]:
    """Return the derived values of all rows, through files."""
    values: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        shuffle = BucketShuffle(Path(folder) / "shuffle", num_buckets)
        with shuffle.writer(0) as writer:
            for rows in chunks_of_rows:
                users, times, items = ([row[place] for row in rows] for place in range(3))
                batch = pa.record_batch(
                    {
                        "user": pa.array(users, pa.int64()).cast(user_type),
                        "time": pa.array(times, pa.int64()),
                        "item": pa.array(items, pa.int64()).cast(pa.string()),
                    }
                )
                writer.write(*rows_with_key(batch, derivations, "s"))
        side = Side(Path(folder) / "side", num_buckets)
        for number in shuffle.buckets():
            bucket = shuffle.read(number)
            columns = {}
            if bucket.rows.num_columns:
                histories = Histories.of(bucket.rows)
                for derivation in derivations:
                    columns[derivation.name] = derivation.values(bucket.rows, histories)
            side.write(number, bucket, columns)
        reader = side.reader(0)
        for number, rows in enumerate(chunks_of_rows):
            values += reader.read(number, len(rows)).to_pylist()
    return values


def by_hand(chunks_of_rows: list[list[Row]], gap: float, length: int) -> list[dict[str, Any]]:
    """Return the derived values of all rows; for each row, look at all others."""
    everything = [row for rows in chunks_of_rows for row in rows]
    values: list[dict[str, Any]] = []
    for user, time, _ in everything:
        if user is None or time is None:
            values.append(dict.fromkeys(["since", "position", "seconds", "history", "begin"]))
            continue
        earlier = sorted(
            (t, str(item))
            for u, t, item in everything
            if u == user and t is not None and t < time and item is not None
        )
        times = sorted(t for u, t, _ in everything if u == user and t is not None and t < time)
        begin = time
        position = 0
        for before in reversed(times):
            if begin - before > gap:
                break
            position += 1
            begin = before
        values.append(
            {
                "since": time - times[-1] if times else None,
                "position": position,
                "seconds": time - begin,
                "history": [item for _, item in earlier][-length:],
                "begin": begin,
            }
        )
    return values


@given(
    chunks,
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([pa.int64(), pa.string()]),
)
def test_derived_columns_equal_those_of_a_dict(
    chunks_of_rows: list[list[Row]], num_buckets: int, gap: int, length: int, user_type: pa.DataType
) -> None:
    keys: dict[str, Any] = {"by": "user", "time": "time"}
    derivations = [
        TimeDifference("since", **keys),
        Session("session", **keys, gap_seconds=gap),
        Session("position", **keys, gap_seconds=gap, gives="position"),
        Session("seconds", **keys, gap_seconds=gap, gives="seconds"),
        Previous("history", **keys, column="item", length=length),
    ]
    values = derived(chunks_of_rows, derivations, num_buckets, user_type)
    expected = by_hand(chunks_of_rows, gap, length)
    users = [row[0] for rows in chunks_of_rows for row in rows]
    sessions: dict[Any, Any] = {None: (None, None)}
    for user, value, by_hand_value in zip(users, values, expected, strict=True):
        session = value.pop("session")
        begin = by_hand_value.pop("begin")
        assert value == by_hand_value
        owner = (None, None) if begin is None else (user, begin)
        assert sessions.setdefault(session, owner) == owner
    assert len(set(sessions.values())) == len(sessions)


def test_a_column_of_lists_is_rejected_by_name() -> None:
    rows = pa.record_batch({"user": [1], "time": [1], "tags": [["a"]]})
    previous = Previous("history", by="user", time="time", column="tags")
    with pytest.raises(SchemaError, match=r"derive: expected single values, got .* 'tags'"):
        rows_with_key(rows, [previous], "s")
