# SPDX-License-Identifier: Apache-2.0
"""Batches by grains: positions, functions of a batch, and sources that are read whole."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from schedule import in_soak

from hotbed.connectors import (
    Concat,
    Csv,
    Generated,
    Live,
    Memory,
    Norm,
    Parquet,
    Position,
    Raw,
    Replay,
    Source,
    parquet,
)
from hotbed.connectors.row_groups import Decoded, RowGroup, RowGroups
from hotbed.data import Batch, Dataset, Dense, Id, Label, Schema, Time
from hotbed.data.batch import changed
from hotbed.data.grains import Cut
from hotbed.data.order import place_at
from hotbed.data.stream import Block, StreamCuts
from hotbed.data.transforms import Hash
from hotbed.errors import ConfigError, DecodeError

pytestmark = pytest.mark.core
SCHEMA = Schema([Label("label"), Id("row")])


def columns(num_rows: int) -> dict[str, Any]:
    return {"label": [row % 2 for row in range(num_rows)], "row": list(range(num_rows))}


def make(source: Source | None = None, grains: int = 4, size: int = 8, **arguments: Any) -> Dataset:
    dataset = Dataset(source or Memory(columns(40)), SCHEMA, size, **arguments)
    dataset.divide(grains)
    return dataset


def runs(batch: Batch) -> list[list[int]]:
    rows = batch.ids["row"].values.tolist()
    begins = [0, *batch.grain_ends]
    return [rows[begin:end] for begin, end in zip(begins, batch.grain_ends, strict=False)]


def test_positions_of_one_grain_are_those_of_before() -> None:
    """They hold the start of the source; those of older versions, without it, are read, too."""
    for shuffle, text in (
        (0, '{"epoch": 0, "source": null, "skip": 16, "buffer": 0, "emitted": 0, "order": {}}'),
        (
            30,
            '{"epoch": 0, "source": null, "skip": 0, "buffer": 0, "emitted": 16, '
            '"order": {"shuffle": 30, "seed": 0, "cache": false}}',
        ),
    ):
        batches = list(make(grains=1, shuffle=shuffle))
        assert batches[1].position is not None
        state = batches[1].position.to_json()
        assert json.dumps(state) == text.replace("null", '{"row": 0, "settings": {}}')
        older = make(grains=1, shuffle=shuffle).resume(text)
        assert [runs(batch) for batch in older] == [runs(batch) for batch in batches[2:]]


@pytest.mark.parametrize("written, grains", [(1, 4), (4, 1), (4, 8)])
def test_a_position_of_another_number_of_grains_is_refused(written: int, grains: int) -> None:
    position = next(iter(make(grains=written))).position
    assert position is not None
    message = f"written with grains={written}, got {grains}. Give the model the number"
    with pytest.raises(ConfigError, match=message):
        make(grains=grains).resume(position)
    resumed = make(grains=written).resume(position)
    with pytest.raises(ConfigError, match=message):
        resumed.divide(grains)
    resumed.divide(written)
    assert len(list(resumed)) == 4


def test_a_position_of_a_fit_is_refused_by_a_stream_and_the_other_way() -> None:
    by_grains = next(iter(make())).position
    in_order = next(item for item in make().stream() if item is not None).position
    assert by_grains is not None
    assert in_order is not None
    with pytest.raises(ConfigError, match="written while rows were read by grains, as fit does"):
        next(make().resume(by_grains).stream())
    with pytest.raises(ConfigError, match="in the order of the source, as online_train does"):
        make().resume(in_order).epoch(0)
    unread = make().position
    assert len(list(make().resume(unread).epoch(0))) == 5


def test_functions_of_a_batch_are_called_with_the_samples_of_a_grain() -> None:
    sizes: list[int] = []

    def drop_threes(batch: Batch) -> Batch:
        sizes.append(batch.num_samples)
        return batch.take(np.flatnonzero(batch.ids["row"].values % 3 > 0))

    batches = list(make(grains=4, size=16).map(drop_threes))
    assert [runs(batch) for batch in batches] == [
        [[1, 2], [10, 11, 13], [20, 22, 23], [31, 32]],
        [[4, 5, 7], [14, 16, 17], [25, 26], [34, 35, 37]],
        [[8], [19], [28, 29], [38]],
    ]
    assert sizes == [4] * 8 + [2] * 4


def test_a_grain_whose_rows_end_early_has_none_in_the_batches_that_follow(tmp_path: Path) -> None:
    """The second of two files is torn: the grains that it holds lose their rows of it."""
    for name in ("a", "b"):
        pq.write_table(pa.table(columns(20)), tmp_path / f"{name}.parquet", row_group_size=5)
    source = Parquet(str(tmp_path / "*.parquet"))
    expected = [runs(batch) for batch in make(source)]
    with (tmp_path / "b.parquet").open("r+b") as file:
        file.seek(4)
        file.write(b"\xff" * 40)
    with pytest.raises(DecodeError, match=r"b\.parquet: torn or damaged parquet after row 0"):
        next(iter(make(source)))
    batches = list(make(source, on_error="skip"))
    assert [runs(batch)[:2] for batch in batches] == [batch[:2] for batch in expected]
    assert all(runs(batch)[2] == [] for batch in batches)


def test_sources_without_ranges_are_read_in_their_order(tmp_path: Path) -> None:
    table = pa.table(columns(40)).append_column("time", pa.array(range(40)))
    pacsv.write_csv(table, tmp_path / "rows.csv")
    text = Csv(str(tmp_path / "rows.csv"))
    memory = Memory(table)
    assert not Generated(40).divisible
    for source in (text, memory.sort("row"), Replay([memory], "time"), Concat([memory, text])):
        batches = list(make(source, size=20))
        whole = list(make(source, grains=1, size=20))
        for batch, same in zip(batches, whole, strict=True):
            assert batch.grain_ends == ()
            assert (batch.ids["row"].values == same.ids["row"].values).all()
            position, other = batch.position, same.position
            assert position is not None
            assert other is not None
            assert position.state == {**other.state, "order": {"grains": 4}}


@pytest.mark.parametrize(
    "sizes, batch_size, expected",
    [
        ([1] * 8, 2, [2, 2, 2, 2]),
        ([3, 0, 0, 1], 2, [2, 2]),
        ([0, 0, 1, 1], 1, [2]),  # one of the two batches has no rows
        ([40, 8, 0, 2], 10, [10, 10, 10, 10, 10]),
        ([0, 0, 0, 0], 10, []),
    ],
)
def test_batches_of_a_block_share_the_rows_of_each_grain(
    sizes: list[int], batch_size: int, expected: list[int]
) -> None:
    grains = [Batch(labels={"label": np.arange(size)}, num_samples=size) for size in sizes]
    before, after = Position({"block": 1}), Position({"block": 2})
    start = Position({**place_at(None, 0), "rows": 0})
    stream = StreamCuts(batch_size, None, Live())

    def cuts(start: Position) -> list[Cut]:
        blocks = iter([None, Block(grains, before, after)])
        return [cut for cut in stream.by_blocks(blocks, start) if cut is not None]

    whole = cuts(start)
    assert [sum(part.num_samples for run in cut.runs for part in run) for cut in whole] == expected
    for grain, size in enumerate(sizes):
        parts = [run.batch.labels["label"][run.rows] for cut in whole for run in cut.runs[grain]]
        assert np.concatenate([np.arange(0), *parts]).tolist() == list(range(size))
    for number, cut in enumerate(whole[:-1], 1):
        assert [c.place for c in cuts(Position(cut.place))] == [c.place for c in whole[number:]]
    assert all(cut.place["source"] == after.state for cut in whole[-1:])


RANKS = Schema(
    [Label("label"), Time("time", unit="s"), Id("row"), Id("bag"), Dense("pair", width=2)]
)


def rows_by_ranges(folder: Path, kind: str) -> Source:
    """51 rows: a source of each kind whose grains have ranges of their own."""
    bags = pa.array([[row] * (row % 3) for row in range(51)], pa.list_(pa.int64()))
    pairs = pa.array([[float(row), 0.5] for row in range(51)], pa.list_(pa.float32(), 2))
    rows = {**columns(51), "time": list(range(51)), "bag": bags, "pair": pairs}
    memory = Memory(rows)
    if kind in ("Norm", "Raw"):
        times = Memory({"row": rows["row"], "time": rows.pop("time")})
        two = pa.array([[row, row] for row in range(51)], pa.list_(pa.int64(), 2))
        slots = {"row": 1, "bag": 2}
        norm = Norm(folder / "rows", ["label"], list(slots), dense="pair")
        raw = Raw(folder / "rows", ["label"], 2, slots, dense_type="float32", dense="pair")
        file = raw if kind == "Raw" else norm
        file.write(Memory({**rows, "bag": two}))
        return file.join(times, on="row") if kind == "Raw" else file
    if kind == "Parquet":
        pq.write_table(memory.table, folder / "rows.parquet", row_group_size=7)
        return Parquet(folder / "rows.parquet")
    if kind == "Concat":
        return Concat([memory.slice(0, 20), memory.slice(20, 51)])
    return memory


@pytest.mark.parametrize("kind", ["Memory", "Parquet", "Concat", "Raw", "Norm"])
@pytest.mark.parametrize("options", [{}, {"shuffle": 20, "seed": 3}, {"drop_last": True}])
def test_a_rank_reads_the_features_of_its_grains_and_the_labels_of_all(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    source = rows_by_ranges(tmp_path, kind)
    present = source.schema().names  # a slot of Norm holds lists, which no time can be joined by
    schema = Schema([column for column in RANKS.columns if column.source in present])
    data = Dataset(source, schema, 8, **options)
    data.divide(4)
    assert data.can_share_out
    whole = list(data.epoch(0))
    begins = whole[2].position
    for own in (range(1), range(1, 4), range(4)):
        batches = list(data.epoch(0, own))
        assert len(batches) == len(whole)
        for batch, expected in zip(batches, whole, strict=True):
            first, *_, last = [0, *expected.grain_ends][own.start : own.stop + 1]
            assert_same(batch, expected[first:last])
            assert batch.whole is not None
            assert_same(batch.whole, changed(expected, {"ids": {}, "dense": {}}))
            assert batch.whole.grain_ends == expected.grain_ends
            assert [len(run) for run in runs(batch)] == [
                len(run) * (grain in own) for grain, run in enumerate(runs(expected))
            ]
        assert begins is not None
        rest = list(data.resume(begins).epoch(0, own))
        assert [batch.num_samples for batch in rest] == [b.num_samples for b in batches[3:]]


@pytest.mark.parametrize(
    "sizes",
    in_soak(
        product([300, 97, 40, 10], [1 << 28, 20_000, 0]),
        quick={(300, 1 << 28), (300, 20_000), (97, 0), (40, 20_000), (10, 1 << 28), (10, 0)},
    ),
)
def test_a_row_group_of_several_grains_is_decoded_once(
    sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are those of rows in memory, also of a resumed epoch and where groups are large.

    `sizes`: the rows of a group, and the bytes that grains may share.
    """
    group_rows, shared_bytes = sizes
    bags = pa.array([[row] * (row % 3) for row in range(960)], pa.list_(pa.int64()))
    words = pa.array([f"word {row % 50}" for row in range(960)])
    pairs = pa.array([[float(row), 0.5] for row in range(960)], pa.list_(pa.float32(), 2))
    memory = Memory({**columns(960), "bag": bags, "word": words, "pair": pairs})
    pq.write_table(memory.table, tmp_path / "rows.parquet", row_group_size=group_rows)
    decoded: Counter[int] = Counter()

    def counted(file: Any, rows: int, groups: list[int], *arguments: Any) -> Any:
        decoded.update(groups)
        yield from read(file, rows, groups, *arguments)

    read = parquet._batches
    monkeypatch.setattr(parquet, "_batches", counted)
    monkeypatch.setattr("hotbed.data.dataset.READ_ROWS", 256)  # of all 16 grains together
    held: list[Any] = []

    def watched(self: RowGroups, group: RowGroup, batches: Any) -> Decoded | None:
        self.most_bytes = shared_bytes
        result = share(self, group, batches)
        held.extend([] if result is None else [weakref.ref(result)])
        return result

    share = RowGroups.decoded
    monkeypatch.setattr(RowGroups, "decoded", watched)
    schema = Schema(
        [
            Label("label"),
            Id("row"),
            Id("bag"),
            Id("word", transforms=[Hash()]),
            Dense("pair", width=2),
        ]
    )
    whole: list[Batch] = []
    for source in (memory, Parquet(tmp_path / "rows.parquet")):
        data = Dataset(source, schema, 64, prefetch=0)
        data.divide(16)
        batches = list(data.epoch(0))
        for batch, expected in zip(batches, whole, strict=True) if whole else ():
            assert_same(batch, expected)
        whole = batches
    if shared_bytes == 1 << 28:  # twice where one grain ends with a group, and one begins with it
        assert max(decoded.values()) == (2 if group_rows == 40 else 1)
    assert not any(decoded_group() for decoded_group in held)
    position = whole[4].position
    assert position is not None
    for batch, expected in zip(data.resume(position).epoch(0), whole[5:], strict=True):
        assert_same(batch, expected)


def test_a_damaged_row_group_costs_grains_what_it_costs_each_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.parquet"
    layout = {"use_dictionary": False, "data_page_size": 400, "write_batch_size": 50}
    pq.write_table(pa.table(columns(1000)), file, row_group_size=500, **layout)
    column = pq.ParquetFile(file).metadata.row_group(0).column(1)
    data = bytearray(file.read_bytes())
    begin = column.data_page_offset + column.total_compressed_size // 2
    data[begin : begin + 300] = b"\xff" * 300
    file.write_bytes(data)
    monkeypatch.setattr("hotbed.data.dataset.READ_ROWS", 256)
    together = [runs(batch) for batch in make(Parquet(file), grains=8, on_error="skip")]
    monkeypatch.setattr(RowGroups, "decoded", lambda *_: None)
    assert [runs(batch) for batch in make(Parquet(file), grains=8, on_error="skip")] == together
    lengths = [sum(len(batch[grain]) for batch in together) for grain in range(8)]
    assert lengths[0] == 125 > lengths[3]
    assert lengths[4:] == [125] * 4


def assert_same(batch: Batch, expected: Batch) -> None:
    """Compare the samples of two batches, column by column."""
    assert batch.num_samples == expected.num_samples
    assert batch.ids.keys() == expected.ids.keys()
    for name, ids in expected.ids.items():
        assert batch.ids[name].values.tolist() == ids.values.tolist()
        assert batch.ids[name].lengths().tolist() == ids.lengths().tolist()
    for name, values in expected.dense.items():
        assert batch.dense[name].tolist() == values.tolist()
    if expected.num_samples:
        assert batch.labels["label"].tolist() == expected.labels["label"].tolist()
        assert (batch.time is None) == (expected.time is None)
        assert np.array_equal(batch.time, expected.time)
