# SPDX-License-Identifier: Apache-2.0
"""What a join of streams holds open is a part of its checkpoints: deltas, digests, restoring."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from schedule import in_soak

import hotbed as hb
from hotbed.cli import checkpoints
from hotbed.connectors.read_plan import JoinWishes, ReadPlan
from hotbed.connectors.status import status_of
from hotbed.errors import FormatError
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.container.row_files import arrow_batches, write_batches
from hotbed.persist.state.chain import compact
from hotbed.persist.state.digest import content_digest
from hotbed.persist.state.open_rows import read_open_rows
from hotbed.persist.upkeep.inspect import describe_checkpoint
from hotbed.persist.upkeep.rollback import roll_back
from hotbed.testing import FakeStream

COUNT = 900
RNG = np.random.default_rng(0)
CLICKED = RNG.random(COUNT) < 0.3
SHOWN = {
    "id": [f"i{number}" for number in range(COUNT)],
    "user": RNG.integers(0, 20, COUNT),
    "time": np.arange(COUNT),
    "tag": [None] * 300 + ["t"] * (COUNT - 300),
}
CLICKS = {
    "id": [f"i{number}" for number in np.flatnonzero(CLICKED)],
    "time": np.flatnonzero(CLICKED) + 40,
}


SCHEMA = hb.Schema([hb.Label("y"), hb.Time("time", unit="s"), hb.Id("user"), hb.Id("tag")])
TAGS = hb.sources.Memory({"user": range(20), "tag": ["t"] * 20})
BEFORE = {"y": [0.0, 1.0], "time": [-9, -8], "user": [1, 2], "tag": ["t", None]}
"""Rows before the streams begin."""


def joined(nesting: str = "alone") -> Any:
    """A join of streams; alone, or inside or over another source."""
    shown: Any = FakeStream(SHOWN, then=60, ends=True)
    clicks: Any = FakeStream(CLICKS, then=11, ends=True)
    if nesting == "inputs after files":
        first = {"id": ["x", "y"], **{name: BEFORE[name] for name in ("time", "user", "tag")}}
        shown = hb.sources.Concat([hb.sources.Memory(first), shown])
        clicks = hb.sources.Concat([hb.sources.Memory({"id": ["y"], "time": [0]}), clicks])
    if nesting == "with a side table":
        names = [name for name in SHOWN if name != "tag"]
        shown = FakeStream({name: SHOWN[name] for name in names}, then=60, ends=True)
    join = hb.sources.Join(shown, clicks, on="id", within=100, unit="s", label="y")
    if nesting == "with a side table":
        return join.join(TAGS, on="user")
    if nesting == "after files":
        return hb.sources.Concat([hb.sources.Memory(BEFORE), join])
    return join


NESTINGS = ("alone", "after files", "with a side table", "inputs after files")


def dataset(nesting: str = "alone", **settings: Any) -> hb.Dataset:
    return hb.Dataset(joined(nesting), SCHEMA, 32, **settings)


def follow(data: Any, callbacks: Any = (), stop: int | None = None) -> None:
    torch.manual_seed(0)
    network = hb.models.LR(SCHEMA, hb.make_tables(SCHEMA, 1))
    model = hb.RecModel(network, "bce", "adam", {"auc"})
    model.online_train(data, callbacks, max_steps=stop, progress=False)


def learn(
    folder: Path, *stops: int | None, ahead: int = 0, nesting: str = "alone", **keywords: Any
) -> str:
    """Learn a join of streams in several lives; return the digest of its last state."""
    for stop in stops:
        data: Any = dataset(nesting)
        if ahead:
            data = hb.Ahead(data, depth=ahead, torch_threads=1)
        arguments = {"every_steps": 3, "full_every": 3, "wait": True, **keywords}
        follow(data, [hb.callbacks.Checkpoint(folder, **arguments)], stop)
    return content_digest(open_checkpoint(folder))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    return learn(tmp_path_factory.mktemp("whole"), None)


def test_a_run_that_is_resumed_with_ids_mapped_ahead_learns_as_one_that_is_not(
    whole: str, tmp_path: Path
) -> None:
    """Without ids mapped ahead: see the test of compacted states."""
    assert learn(tmp_path, 7, 8, 16, None, ahead=8) == whole


def numbers(folder: Path, log: str) -> list[list[int]]:
    """The numbers of the rows in the files of a state: of its full, and of each delta."""
    reader = open_checkpoint(folder)
    files = []
    for link in reader.links:
        entry = link.manifest.open_rows
        has_rows = entry is not None and log in entry.files
        batches = [*link.batches(entry.files[log])] if has_rows else []  # type: ignore[union-attr]
        files.append([n for batch in batches for n in batch["\0number"].to_pylist()])
    return files


@pytest.mark.parametrize("stops", [(14,), (2, 7, 9, 14)])
def test_a_delta_holds_what_came_since_and_is_open(stops: tuple[int, ...], tmp_path: Path) -> None:
    """Also that of a run that was resumed: no row is saved twice, and no full is needed."""
    learn(tmp_path, *stops, keep=9, every_steps=4, full_every=9)
    full, *deltas = numbers(tmp_path, "impressions")
    assert full == []  # nothing was read yet
    assert len(deltas) > 2
    together = [number for delta in deltas for number in delta]
    assert together == sorted(set(together))
    rows = read_open_rows(open_checkpoint(tmp_path))
    assert rows is not None
    times = np.concatenate([batch["\0time"].to_numpy() for batch in rows.batches("impressions")])
    assert (times >= rows.oldest).all()
    assert 100 <= len(times) < 300
    assert sum(map(len, deltas[:-1])) > len(times)  # rows that closed are not written again
    found = [n for batch in rows.batches("outcomes") for n in batch["\0number"].to_pylist()]
    assert found == [n for delta in numbers(tmp_path, "outcomes") for n in delta][-len(found) :]


@pytest.mark.parametrize("nesting", in_soak(NESTINGS, quick={"alone"}))
def test_state_of_a_join_is_described_with_what_it_holds(
    nesting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learn(tmp_path, 14, nesting=nesting)
    facts = describe_checkpoint(tmp_path)
    join = facts["join"]
    rows = read_open_rows(open_checkpoint(tmp_path))
    assert rows is not None
    assert join["open_impressions"] == sum(b.num_rows for b in rows.batches("impressions")) > 99
    assert join["held_outcomes"] == sum(b.num_rows for b in rows.batches("outcomes")) > 0
    assert join["counts"]["impressions"] > join["open_impressions"]
    assert len(join["newest"]) == 2
    checkpoints.print_checkpoint(facts)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    text = ["│".join(line) for line in lines]
    for name in ("open_impressions", "held_outcomes"):
        assert any(name in line and f"{join[name]:,}" in line for line in text)
    for name in ("late", "unmatched", "repeated", "future", "watermark", "input│1"):
        assert any(name in line for line in text), name
    assert not any("positions" in line for line in text)


def test_a_compacted_state_and_an_earlier_one_lead_to_the_same_end(
    whole: str, tmp_path: Path
) -> None:
    digest = learn(tmp_path, 14, every_steps=4, full_every=9)
    assert compact(tmp_path) is not None
    assert content_digest(open_checkpoint(tmp_path)) == digest
    assert len(open_checkpoint(tmp_path).links) == 1
    assert learn(tmp_path, None, every_steps=4, full_every=9, keep=9) == whole
    folders = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    roll_back(tmp_path, int(folders[1].rpartition("-")[2]))
    assert learn(tmp_path, None) == whole


def test_published_versions_hold_nothing_that_is_open_and_a_changed_file_is_refused(
    tmp_path: Path,
) -> None:
    states = tmp_path / "states"
    learn(states, 8, keep=9)
    publisher = hb.PublishDirectory(tmp_path / "published")
    kinds = [
        publisher.publish(open_checkpoint(folder)).kind
        for folder in sorted(states.glob("checkpoint-*"))
    ]
    assert kinds == ["full", "delta", "delta", "full"]
    assert not list((tmp_path / "published").rglob("impressions.arrow"))
    for manifest in (tmp_path / "published").rglob("MANIFEST.json"):
        assert "open_rows" not in json.loads(manifest.read_text())
    file = max(states.glob("checkpoint-*/open_rows/impressions.arrow"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(FormatError, match=r"open_rows/impressions.arrow: changed since"):
        learn(states, None)


@pytest.mark.parametrize("nesting", in_soak(NESTINGS, quick={"after files"}))
def test_every_state_can_be_restored_and_leads_to_the_same_end(
    nesting: str, tmp_path: Path
) -> None:
    """A join alone in the quick suite: see the test of compacted states."""
    digest = learn(tmp_path, 5, 16, None, nesting=nesting, every_steps=13, full_every=9, keep=99)
    numbers = sorted(int(path.name[-8:]) for path in tmp_path.glob("checkpoint-*"))
    assert len(numbers) >= 3
    for number in reversed(numbers):
        roll_back(tmp_path, number)
        assert learn(tmp_path, None, nesting=nesting, every_steps=99, keep=99) == digest, number


def kept(data: hb.Dataset) -> int:
    """Impressions that a join holds after a run."""
    held: Any = data.status.open_rows
    return sum(map(len, held.impressions)) + held.returns_accepted


def test_runs_in_any_order_release_the_rows_that_first_runs_release(tmp_path: Path) -> None:
    def run(kind: str, data: hb.Dataset, name: str) -> int:
        callbacks: dict[str, list[Any]] = {
            "plain": [],
            "saved": [hb.callbacks.Checkpoint(tmp_path / name, every_steps=9, wait=True)],
            "shown": [hb.callbacks.Windows(samples=100, scored="shown")],
        }
        follow(data, callbacks[kind])
        return kept(data)

    first = {kind: run(kind, dataset(prefetch=0), kind) for kind in ("plain", "saved", "shown")}
    data = dataset(prefetch=0)
    for number, kind in enumerate(["plain", "saved", "shown", "plain", "shown", "saved", "plain"]):
        assert run(kind, data, str(number)) == first[kind], (number, kind)


@pytest.mark.parametrize("nesting", in_soak(NESTINGS, quick={"alone"}))
def test_runs_of_one_dataset_leave_nothing_to_each_other(nesting: str, tmp_path: Path) -> None:
    data = dataset(nesting)
    follow(data)
    fresh = kept(data)
    follow(data, [hb.callbacks.Checkpoint(tmp_path / "one", every_steps=5)], 8)
    follow(data, [hb.callbacks.Windows(samples=100, scored="shown")], 5)
    follow(data)
    assert kept(data) == fresh
    follow(data, [hb.callbacks.Checkpoint(tmp_path / "other")], 0)  # its first state is the start
    whole = learn(tmp_path / "whole", None, nesting=nesting)
    assert learn(tmp_path / "other", None, nesting=nesting) == whole
    follow(data, [hb.callbacks.Checkpoint(tmp_path / "one", every_steps=5)])
    assert content_digest(open_checkpoint(tmp_path / "one")) == whole


def test_the_first_state_of_a_second_pass_lies_before_it(tmp_path: Path) -> None:
    rows = {name: values[:200] for name, values in {**SHOWN, "y": CLICKED}.items()}
    data = hb.Dataset(hb.sources.Memory(rows), SCHEMA, 32)
    follow(data)
    follow(data, [hb.callbacks.Checkpoint(tmp_path)], 0)
    position = open_checkpoint(tmp_path).manifest.positions["stream"]
    assert (position["epoch"], position["source"], position["skip"]) == (1, None, 0)


def words(numbers: pa.Array) -> pa.Array:
    return pa.array([f"word {number}" for number in numbers.to_pylist()])


def narrow(values: pa.Array) -> pa.Array:
    """Values as a dictionary of their own, with indices of 8 bits."""
    coded = values.dictionary_encode()
    return pa.DictionaryArray.from_arrays(coded.indices.cast(pa.int8()), coded.dictionary)


def lists(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(range(len(values) + 1), pa.int32()), values)


TYPES: dict[str, Callable[[pa.Array], pa.Array]] = {
    "dictionary": lambda numbers: narrow(words(numbers)),
    "dictionary of numbers": narrow,
    "dictionary of large text": lambda numbers: narrow(words(numbers).cast(pa.large_string())),
    "ordered dictionary": lambda numbers: pa.DictionaryArray.from_arrays(
        pa.array(range(len(numbers)), pa.uint8()), words(numbers), ordered=True
    ),
    "list of dictionaries": lambda numbers: lists(narrow(words(numbers))),
    "struct of a dictionary": lambda numbers: pa.StructArray.from_arrays(
        [narrow(words(numbers))], ["inner"]
    ),
    "list": lambda numbers: lists(words(numbers)),
    "large list": lambda numbers: lists(words(numbers)).cast(pa.large_list(pa.string())),
    "large text": lambda numbers: words(numbers).cast(pa.large_string()),
    "view": lambda numbers: words(numbers).cast(pa.string_view()),
    "run ends": lambda numbers: pc.run_end_encode(words(numbers)),
    "bytes of one width": lambda numbers: pa.array(
        [number.to_bytes(4, "big") for number in numbers.to_pylist()], pa.binary(4)
    ),
    "null, then text": lambda numbers: (
        pa.nulls(len(numbers)) if numbers[0].as_py() < 40 else words(numbers)
    ),
    "extension": lambda numbers: pa.ExtensionArray.from_storage(
        pa.json_(), pa.array([f"[{number}]" for number in numbers.to_pylist()])
    ),
    "half float": lambda numbers: numbers.cast(pa.float16()),
    "times": lambda numbers: numbers.cast(pa.timestamp("ns", "UTC")),
}
"""Columns of every kind of Arrow type, as producers of messages may send them."""
KEYS = {"dictionary", "dictionary of numbers", "large text", "view", "bytes of one width"}


@dataclass(frozen=True)
class Typed(hb.sources.Source):
    """A stream whose batches hold a column of a type, each in an encoding of its own."""

    stream: FakeStream
    kind: str
    column: str

    endless = True

    def schema(self) -> pa.Schema:
        return self.stream.schema()

    def read(self, position: Any = None, batch_rows: int = 1, plan: Any = None) -> Iterator[Any]:
        for batch, after in self.stream.read(position, batch_rows, plan):
            if batch.num_rows:
                index = batch.schema.get_field_index(self.column)
                values = TYPES[self.kind](batch.column(index))
                batch = batch.set_column(index, self.column, values)
            yield batch, after


@dataclass
class FromFiles:
    """Open rows after they were written to files, and read back."""

    opened: Any
    files: dict[str, bytes]
    oldest: int = 0

    def batches(self, log: str) -> Iterator[pa.RecordBatch]:
        if log in self.files:
            yield from arrow_batches(partial(io.BytesIO, self.files[log]), log)


def saved(rows: Any) -> FromFiles:
    files: dict[str, bytes] = {}
    for log in rows.opened:
        batches = list(rows.batches(log))
        sink = io.BytesIO()
        if batches:
            write_batches(sink, batches)
            files[log] = sink.getvalue()
    return FromFiles(rows.opened, files)


@pytest.mark.parametrize("kind", TYPES)
def test_open_rows_are_saved_and_put_back_in_every_type(kind: str) -> None:
    count, column = 300, "id" if kind in KEYS else "value"
    shown = {"id": range(count), "value": range(count), "time": range(count)}
    clicks = {"id": range(0, count, 3), "time": range(2, count + 2, 3)}

    def join() -> hb.sources.Join:
        streams = [FakeStream(rows, then=50, ends=True) for rows in (shown, clicks)]
        inputs: list[Any] = [Typed(streams[0], kind, column), streams[1]]
        if column == "id":
            inputs[1] = Typed(streams[1], kind, column)
        return hb.sources.Join(*inputs, on="id", within=30, unit="s")

    live = hb.sources.Live()
    plan = ReadPlan(live=live, wishes=JoinWishes(keeps_open=True))
    reading = join().read(None, 64, plan)
    held: Any = status_of(reading).open_rows
    items = []
    for batch, position in reading:
        items.append((batch, position, held.saved_at(position.state, None)))
    labels = [row["label"] for batch, _, _ in items for row in values_of(batch)]
    assert labels == [float(number % 3 == 0) for number in range(len(labels))]
    assert len(labels) > 200
    for number in (len(items) // 3, 2 * len(items) // 3):
        _, position, held = items[number]
        again = ReadPlan(live=hb.sources.Live(), wishes=JoinWishes(saved=saved(held)))
        rest = [batch for batch, _ in join().read(position, 64, again) if batch.num_rows]
        expected = [row for batch, _, _ in items[number + 1 :] for row in values_of(batch)]
        assert [row for batch in rest for row in values_of(batch)] == expected


def values_of(batch: pa.RecordBatch) -> list[Any]:
    return batch.drop_columns(["\0place"]).to_pylist() if batch.num_rows else []
