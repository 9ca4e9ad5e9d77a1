# SPDX-License-Identifier: Apache-2.0
"""Sources one after another: types, epochs, positions, a stream after its history, and faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from hotbed import config
from hotbed.connectors import Concat, Csv, Join, Journal, Live, Memory, Parquet, Position, Source
from hotbed.data import Dataset, Dense, Id, Label, Schema, Time
from hotbed.errors import ConfigError, DataError, DecodeError, SchemaError
from hotbed.testing import FakeStream

pytestmark = pytest.mark.core
SCHEMA = Schema([Label("label"), Id("row"), Dense("x")])


def log(start: int, stop: int) -> pa.Table:
    rows = range(start, stop)
    return pa.table({"row": rows, "label": [i % 2 for i in rows], "x": [i / 2 for i in rows]})


@pytest.fixture
def mixed(tmp_path: Path) -> Concat:
    """300 rows: csv, then Parquet with its columns in another order, then memory."""
    pacsv.write_csv(log(0, 100), tmp_path / "old.csv")
    pq.write_table(log(100, 220).select(["x", "label", "row"]), tmp_path / "new.parquet")
    old, new = Csv(tmp_path / "old.csv"), Parquet(tmp_path / "new.parquet")
    return Concat([old, new, Memory(log(220, 300))])


def ids(batches: Any) -> list[list[int]]:
    return [batch.ids["row"].values.tolist() for batch in batches]


def column(source: Source, name: str) -> list[Any]:
    batches = [batch for batch, _ in source.read(batch_rows=64)]
    return [value for batch in batches for value in batch.column(name).to_pylist()]


def test_rows_of_all_formats_follow_each_other(mixed: Concat) -> None:
    assert column(mixed, "row") == list(range(300))
    assert column(mixed, "x") == [row / 2 for row in range(300)]
    assert column(mixed.slice(90, 230), "row") == list(range(90, 230))
    assert column(mixed.slice(0.5, 1.0), "row") == list(range(150, 300))
    assert mixed.num_rows() is None  # a csv file does not tell
    known = Concat(mixed.sources[1:])
    assert known.num_rows() == known.count_rows() == 200
    dataset = Dataset(known, SCHEMA, 64)
    assert dataset.num_batches == len(list(dataset)) == 4


@pytest.mark.parametrize("shuffle", [0, 70])
def test_epochs_resume_after_any_batch(mixed: Concat, shuffle: int) -> None:
    def dataset() -> Dataset:
        return Dataset(mixed, SCHEMA, 32, shuffle=shuffle, seed=3, prefetch=0)

    whole = dataset()
    epochs = [list(whole), list(whole)]
    orders = [ids(epoch) for epoch in epochs]
    for order in orders:
        assert sorted(row for batch in order for row in batch) == list(range(300))
    assert (orders[0] == orders[1]) == (not shuffle)
    for number, epoch in enumerate(epochs):
        for step, batch in enumerate(epoch):
            text = json.dumps(batch.position.to_json())
            resumed = dataset().resume(Position.from_json(text))
            assert ids(resumed) == orders[number][step + 1 :]


def test_types_are_those_that_hold_the_values_of_all() -> None:
    whole = pa.table({"a": pa.array([1], pa.int32()), "t": ["x"], "v": pa.array([[1]])})
    words = pa.array(["y"]).dictionary_encode()
    other = pa.table({"v": pa.array([[0.5]]), "t": words, "a": pa.array([None], pa.null())})
    source = Concat([Memory(whole), Memory(other)])
    assert source.schema() == pa.schema(
        [("a", pa.int32()), ("t", pa.string()), ("v", pa.list_(pa.float64()))]
    )
    assert column(source, "t") == ["x", "y"]
    assert column(source, "v") == [[1.0], [0.5]]


def test_history_and_then_its_stream_are_one_endless_source() -> None:
    """Batches cross the border, and resume in the history, at the border and in the stream."""

    def dataset(journal: Journal, takes: list[int]) -> Dataset:
        history = Memory(log(0, 30))
        commits: list[Position] = []
        stream = FakeStream(log(30, 60), takes, then=4, ends=True, commits=commits)
        made = Dataset(Concat([history, stream]), SCHEMA, 8, prefetch=0)
        made.live = Live(journal)
        return made

    journal = Journal()
    whole = dataset(journal, [3, 0, 5])
    batches = list(whole)
    order = ids(batches)
    assert [row for batch in order for row in batch] == list(range(60))
    assert [len(batch) for batch in order] == [8] * 7 + [4]
    for number, batch in enumerate(batches):
        for kept in (journal, Journal()):
            resumed = dataset(kept, [1, 0, 7]).resume(batch.position)
            assert ids(resumed) == order[number + 1 :]
    stream: Any = whole.source.sources[1]  # type: ignore[attr-defined]
    whole.commit(batches[0].position)
    assert stream.commits == []
    whole.commit(batches[-1].position)
    assert [position["start"] for position in stream.commits] == [30]


@pytest.mark.parametrize("limit", [60, None])
@pytest.mark.parametrize("joined", [False, True])
def test_history_has_the_clock_of_the_first_reading(limit: float | None, joined: bool) -> None:
    times = [4 * 10**9, 10**9, 3 * 10**9, 2 * 10**9]
    events = {"row": [1, 2, 3, 4], "label": [0, 1, 1, 0], "x": [0.0] * 4, "t": times}
    schema = Schema([*SCHEMA.columns, Time("t", unit="s")])
    history: Source = Memory(events)
    if joined:
        shown = {name: values[1:2] for name, values in events.items() if name != "label"}
        clicks = {"row": [2, 2], "t": [10**9, 10**9 + 9]}
        history = Join(Memory(shown), Memory(clicks), on="row", within=1, time="t")
    source = Concat([history, FakeStream(events, [1, 0], ends=True)])

    def read(now: float, position: Any = None) -> list[Any]:
        dataset = Dataset(source, schema, 1, prefetch=0, max_ahead_seconds=limit)
        dataset.live = Live(clock=lambda: now)
        if position is not None:
            dataset.resume(position)
        return list(dataset.stream())

    items = read(2e9)
    assert None in items  # a tick
    batches = [item for item in items if item is not None]
    assert ids(batches) == ([[2], [2], [4]] if joined else [[2], [4], [2], [4]])
    again = [item for item in read(3e9, batches[0].position) if item is not None]
    before_the_stream = [] if joined else [[4]]
    assert ids(again) == [*before_the_stream, [2], [3], [4]]


def test_bad_row_of_a_history_is_a_dead_letter_with_its_source() -> None:
    history = {"row": [1, 2], "label": [0, 1], "x": ["0.5", "many"]}
    stream = FakeStream({"row": [3], "label": [0], "x": ["2.5"]}, ends=True)
    source = Concat([Memory(history), stream])
    dataset = Dataset(source, SCHEMA, 1, prefetch=0)
    with pytest.raises(DecodeError, match=r"source sources\[0\], row 2: .*'many'"):
        list(dataset)
    dataset = Dataset(source, SCHEMA, 1, prefetch=0, on_error="skip")
    assert ids(dataset) == [[1], [3]]


def test_errors_name_the_source(mixed: Concat, tmp_path: Path) -> None:
    text = log(0, 2).set_column(0, "row", pa.array(["a", "b"]))
    with pytest.raises(
        SchemaError, match=r"sources\[3\]: column 'row' must be int64, .* got string"
    ):
        column(Concat([*mixed.sources, Memory(text)]), "row")
    with pytest.raises(SchemaError, match=r"sources\[1\]: columns \['row'\] of the first source"):
        Concat([mixed, Memory(text.drop_columns(["row"]))]).schema()
    large = {"row": [2**60 + 1], "label": [0], "x": [0.0]}
    floats = {"row": [0.5], "label": [0], "x": [0.0]}
    with pytest.raises(
        SchemaError, match=r"sources\[0\]: column 'row' must be double, .* got int64"
    ):
        column(Concat([Memory(large), Memory(floats)]), "row")
    bad = Memory({"row": [1], "label": [0], "x": ["many"]})
    with pytest.raises(DecodeError, match=r"sources\[1\]: memory, row 1: .*'many'"):
        list(Dataset(Concat([Memory(log(0, 3).set_column(2, "x", [["1"] * 3])), bad]), SCHEMA))
    pq.write_table(log(0, 3), tmp_path / "torn.parquet")
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "torn.parquet").read_bytes()[:-20])
    with pytest.raises(DecodeError, match=r"torn\.parquet: not a whole parquet file"):
        column(Concat([mixed, Parquet(tmp_path / "torn.parquet")]), "row")


def test_mistakes_are_found_before_reading(mixed: Concat) -> None:
    with pytest.raises(ConfigError, match=r"concat\.sources: must not be empty, got \[\]"):
        Concat([])
    stream = FakeStream(log(0, 3))
    with pytest.raises(ConfigError, match=r"concat\.sources\.0: nothing can follow an endless"):
        Concat([stream, mixed])
    with pytest.raises(ConfigError, match=r"sources\.1: not a source, got 'a\.parquet'.*Parquet"):
        Concat([mixed, "a.parquet"])  # type: ignore[list-item]
    position = Position({"part": 3, "row": 0, "source": None})
    with pytest.raises(DataError, match=r"it lies in sources\[3\], got 3 sources"):
        list(mixed.read(position))


def test_a_job_names_its_sources() -> None:
    parts = [{"kind": "csv", "path": "old.csv"}, {"kind": "parquet", "path": "new.parquet"}]
    source = config.build({"kind": "concat", "sources": parts}, Source, "train")
    assert source == Concat([Csv("old.csv"), Parquet("new.parquet")])
    assert config.describe(source) == {"kind": "concat", "sources": parts}
