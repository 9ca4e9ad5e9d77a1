# SPDX-License-Identifier: Apache-2.0
"""The promises of every source: any position resumes without repeating or losing a row, however
reading is cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from hotbed import config
from hotbed.connectors import (
    Concat,
    Csv,
    Follow,
    Generated,
    Jsonl,
    Kafka,
    Keys,
    Libsvm,
    Live,
    Memory,
    Norm,
    Parquet,
    Position,
    Prepared,
    Raw,
    ReadPlan,
    Replay,
    RequestLog,
    Source,
    write_file_list,
)
from hotbed.connectors.generated import BLOCK_ROWS
from hotbed.connectors.kafka.reader import KafkaReader
from hotbed.connectors.kafka.topic_source import Timings
from hotbed.connectors.prepared import WORKFLOW_FILE, sealed
from hotbed.connectors.read_plan import READ_ROWS
from hotbed.data import Dataset, Id, Label, Schema
from hotbed.errors import ConfigError, DataError
from hotbed.files import digest_of
from hotbed.testing import FakeStream

pytestmark = pytest.mark.core

ROWS = 1000


def table(start: int = 0, stop: int = ROWS) -> pa.Table:
    rows = range(start, stop)
    return pa.table(
        {
            "number": pa.array([i * 10**12 - 5 for i in rows], pa.int64()),
            "price": pa.array([None if i % 7 == 0 else i / 8 for i in rows], pa.float64()),
            "word": pa.array([None if i % 5 == 0 else f"w{i % 13}" for i in rows], pa.string()),
        }
    )


def write_csv(folder: Path) -> Source:
    for part, (start, stop) in enumerate([(0, 300), (300, 301), (301, ROWS)]):
        pacsv.write_csv(table(start, stop), folder / f"part-{part}.csv")
    return Csv(str(folder / "part-*.csv"))


def write_tsv(folder: Path) -> Source:
    lines = [
        "\t".join("" if value is None else str(value) for value in row.values()) + "\r\n"
        for row in table().to_pylist()
    ]
    (folder / "all.tsv").write_text("".join(lines), newline="")
    columns = ["number", "price", "word"]
    return Csv(folder / "all.tsv", delimiter="\t", header=False, columns=columns, quote=None)


def write_parquet(folder: Path) -> Source:
    pq.write_table(table(0, 450), folder / "a.parquet", row_group_size=100)
    pq.write_table(table(450, ROWS), folder / "b.parquet", row_group_size=64)
    return Parquet([folder / "a.parquet", folder / "b.parquet"])


def write_jsonl(folder: Path) -> Source:
    lines = [
        json.dumps({k: v for k, v in row.items() if v is not None}) for row in table().to_pylist()
    ]
    (folder / "a.jsonl").write_text(
        "\n".join(lines[:10]) + "\n\n" + "\r\n".join(lines[10:600]) + "\n", newline=""
    )
    (folder / "b.jsonl").write_text("\n".join(lines[600:]))
    return Jsonl(str(folder / "*.jsonl"))


def write_libsvm(folder: Path) -> Source:
    lines = [
        f"{i % 2} " + " ".join(f"{i + k}:{k / 4}" for k in range(1, 1 + i % 4)) for i in range(ROWS)
    ]
    (folder / "a.libsvm").write_text("\r\n".join(lines) + "\r\n", newline="")
    return Libsvm(folder / "a.libsvm")


def sliced(folder: Path) -> Source:
    return write_csv(folder).slice(0.05, 0.93)


def sliced_twice(folder: Path) -> Source:
    return write_parquet(folder).slice(100, 900).slice(33, 700)


def sorted_by(folder: Path) -> Source:
    return write_csv(folder).sort("price")


def joined(folder: Path) -> Source:
    side = Memory({"word": [f"w{i}" for i in range(0, 13, 2)], "rank": list(range(7))})
    return write_csv(folder).join(side, on="word")


def replayed(folder: Path) -> Source:
    return Replay(
        [write_csv(folder).slice(0, 400), write_parquet(folder).slice(300, ROWS)],
        "number",
        unit="us",
    )


def concatenated(folder: Path) -> Source:
    """Several formats, and parts without rows; the whole numbers of some are floats of all."""
    numbers = pa.array([i * 8.0 for i in range(300)])
    new = table(700, ROWS).set_column(0, "number", numbers).select(["word", "number", "price"])
    pq.write_table(new.append_column("more", numbers), folder / "new.parquet")
    small = table(450, 700).set_column(0, "number", pa.array(range(250)))
    old = write_csv(folder)
    some = write_jsonl(folder).slice(0, 30)
    parts = [Memory(table(0, 0)), Memory(small), some, Parquet(folder / "new.parquet")]
    return Concat([old.slice(0, 450), *parts, old.slice(0, 0)])


def prepared(folder: Path) -> Source:
    """What `hotbed prepare` leaves, made by hand."""
    source = write_parquet(folder)
    assert isinstance(source, Parquet)
    files = []
    for file in source.files():
        name = Path(file).name
        size = Path(file).stat().st_size
        files.append({"file": name, "bytes": size, "sha256": digest_of(file)})
    workflow = {"parts": {"train": {"rows": ROWS, "files": files}}}
    (folder / WORKFLOW_FILE).write_text(json.dumps(sealed(workflow)))
    return Prepared(str(folder))


def samples(start: int, stop: int) -> Memory:
    """Rows of labels, dense values and slots, one of which holds no key or several."""
    rows = range(start, stop)
    return Memory(
        {
            "label": pa.array([i % 2 for i in rows], pa.float32()),
            "dense": pa.array([[i, i / 2] for i in rows], pa.list_(pa.float32(), 2)),
            "one": pa.array([i * 7 for i in rows], pa.int64()),
            "bag": pa.array([list(range(i % 4)) for i in rows], pa.list_(pa.int64())),
            "pair": pa.array([[i, 2 * i] for i in rows], pa.list_(pa.int64())),
        }
    )


def write_norm(folder: Path) -> Source:
    layout = {"labels": ["label"], "slots": ["one", "bag"], "key_bits": 64}
    files = [str(folder / f"{part}.norm") for part in range(3)]
    for file, (start, stop) in zip(files, [(0, 300), (300, 301), (301, ROWS)], strict=True):
        Norm(file, **layout).write(samples(start, stop))
    write_file_list(folder / "files.txt", files)
    return Norm(folder / "files.txt", **layout)


def write_raw(folder: Path) -> Source:
    layout = {"num_dense": 2, "slots": {"one": 1, "pair": 2}, "dense_type": "float32"}
    Raw(folder / "a.raw", **layout).write(samples(0, 450))
    Raw(folder / "b.raw", **layout).write(samples(450, ROWS))
    return Raw(str(folder / "*.raw"), **layout)


def write_request_log(folder: Path) -> Source:
    """Requests of up to six candidates in two parts, as a server writes them."""
    for part, (start, stop) in enumerate([(0, 450), (450, ROWS)]):
        counts = [1 + number % 6 for number in range(start, stop)]
        ends = np.cumsum([0, *counts])
        last = int(np.searchsorted(ends, stop - start, "right"))
        ends = [*ends[:last].tolist(), stop - start]
        inputs = table(start, stop)
        columns = {"candidates": pa.array(np.diff(ends)), "user": pa.array([[n] for n in ends[1:]])}
        for name in inputs.schema.names:
            values = inputs[name].combine_chunks()
            columns[name] = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values)
        pq.write_table(pa.table(columns), folder / f"{part}.parquet", row_group_size=50)
    return RequestLog(folder, follow=False)


def generated(folder: Path) -> Source:
    """More than one block, and a slot of lists."""
    slots = {"one": Keys(50), "bag": Keys(9, count=3, varies=True)}
    return Generated(BLOCK_ROWS + ROWS, dense={"d": 2}, slots=slots).slice(BLOCK_ROWS - 300)


def generated_whole(folder: Path) -> Source:
    return Generated(ROWS, dense={"d": 1}, slots={"one": Keys(50)}, dense_type="int32")


MAKERS: list[Callable[[Path], Source]] = [
    lambda folder: Memory(table()),
    write_csv,
    write_tsv,
    write_parquet,
    write_jsonl,
    write_libsvm,
    sliced,
    sliced_twice,
    sorted_by,
    joined,
    replayed,
    concatenated,
    prepared,
    write_norm,
    write_raw,
    write_request_log,
    generated,
    generated_whole,
]


# Kinds of endless sources -> the tests of their promises, which need a clock or a broker.
ENDLESS = {
    "join": "tests/property/test_join.py",
    "follow": "tests/unit/connectors/test_follow.py",
    "kafka": "tests/unit/connectors/test_kafka.py",
}


def test_every_kind_of_source_is_held_to_its_promises(tmp_path: Path) -> None:
    """A new kind of source that has no maker above, or no tests in `ENDLESS`, fails by its name."""
    kinds = {
        kind: cls
        for kind, cls in config.kinds(Source).items()
        if cls.__module__.startswith("hotbed.connectors.")
    }
    made = set()
    for number, maker in enumerate(MAKERS):
        folder = tmp_path / str(number)
        folder.mkdir()
        made.add(type(maker(folder)))
    missing = {kind for kind, cls in kinds.items() if cls not in made} - ENDLESS.keys()
    assert not missing, f"sources without a contract: {sorted(missing)}"
    assert ENDLESS.keys() <= kinds.keys()
    root = Path(__file__).parents[2]
    assert [file for file in ENDLESS.values() if not (root / file).exists()] == []


@pytest.fixture(params=MAKERS, ids=lambda maker: maker.__name__.replace("<lambda>", "memory"))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    made: Source = request.param(tmp_path)
    return made


def rows(
    source: Source, position: Position | None = None, batch_rows: int = 128
) -> list[dict[str, object]]:
    return [row for batch, _ in source.read(position, batch_rows) for row in batch.to_pylist()]


def test_reading_twice_gives_the_same_rows(source: Source) -> None:
    assert rows(source) == rows(source)


def test_batches_are_never_empty_nor_longer_than_asked(source: Source) -> None:
    sizes = [batch.num_rows for batch, _ in source.read(batch_rows=77)]
    assert sizes
    assert min(sizes) > 0
    assert max(sizes) <= 77


def test_the_rows_do_not_depend_on_how_reading_is_cut(source: Source) -> None:
    assert rows(source, batch_rows=7) == rows(source, batch_rows=10_000)


def test_batches_have_the_types_of_the_schema(source: Source) -> None:
    for batch, _ in source.read(batch_rows=300):
        assert batch.schema.equals(source.schema())


def test_resuming_from_any_position_repeats_nothing_and_loses_nothing(source: Source) -> None:
    whole, done = rows(source), 0
    for number, (batch, position) in enumerate(source.read(batch_rows=90)):
        done += batch.num_rows
        if number % 3 == 0:
            text = json.dumps(position.to_json())
            assert rows(source, Position.from_json(text), batch_rows=51) == whole[done:]
    assert rows(source, position) == []


def test_a_position_of_another_source_reads_the_same_rows_or_is_refused(tmp_path: Path) -> None:
    """All pairs: a position is a number of rows that both count alike, or an error."""
    finite: list[Source] = []
    for number, maker in enumerate(MAKERS):
        folder = tmp_path / str(number)
        folder.mkdir()
        finite.append(maker(folder))
    paced = Replay([finite[0]], "number", unit="us", speed=1e12)
    stream = FakeStream({"number": list(range(9))}, takes=[5, 4], ends=True)
    follow = Follow(tmp_path / "1", "part-*.csv")
    kafka = Kafka("localhost:1", "clicks")
    all_rows = [rows(source) for source in finite]
    positions: list[tuple[Source, Position, int]] = []
    for source in [*finite, paced, stream, follow]:
        done = 0
        for batch, position in source.read(batch_rows=90):
            done += batch.num_rows
            if batch.num_rows:
                positions.append((source, position, done))
                break
    positions.append((kafka, KafkaReader(kafka, Live(), None, Timings()).position(), 0))
    for writer, position, done in positions:
        for reader, whole in zip(finite, all_rows, strict=True):
            try:
                assert rows(reader, position) == whole[done:], (writer, reader)
            except DataError:
                assert reader is not writer
        for endless in (paced, stream, follow, kafka):
            if endless is not writer and not (endless is paced and isinstance(writer, Replay)):
                with pytest.raises(DataError, match=r"it was written by|in a replay of"):
                    next(iter(endless.read(position)))


def test_a_resume_with_another_kind_of_source_names_both() -> None:
    memory = Memory({"row": list(range(READ_ROWS + 1)), "label": [0] * (READ_ROWS + 1)})
    schema = Schema([Label("label"), Id("row")])
    batch, _ = Dataset(memory, schema, READ_ROWS, prefetch=0)
    other = Dataset(Concat([memory, memory]), schema, 2, prefetch=0).resume(batch.position or {})
    with pytest.raises(DataError, match="written by Memory, Sort or Generated, got Concat"):
        next(iter(other))
    endless = Dataset(Kafka("localhost:1", "clicks"), schema, 2)
    with pytest.raises(ConfigError, match=r"a source that ends \(Memory, .*got Kafka"):
        endless.resume(batch.position or {})
    short = Memory({"row": [1], "label": [0]})
    with pytest.raises(DataError, match=r"it lies after row .*, got a source of rows 0 to 1"):
        next(iter(Dataset(short, schema, 2, prefetch=0).resume(batch.position or {})))


def test_a_resumed_reader_gives_the_same_positions(source: Source) -> None:
    pairs = list(source.read(batch_rows=64))
    middle = pairs[len(pairs) // 2][1]
    resumed = list(source.read(middle, batch_rows=64))
    assert resumed[-1][1] == pairs[-1][1]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_parts_together_are_the_whole_and_resume_from_their_own_positions(
    source: Source, count: int
) -> None:
    parts = source.parts(count)
    assert parts == source.parts(count)
    contents = [rows(part) for part in parts]
    assert [row for content in contents for row in content] == rows(source)
    places: list[tuple[Source, Position]] = []
    for part, content in zip(parts, contents, strict=True):
        assert part.schema().equals(source.schema())
        assert part.num_rows() in (None, len(content))
        done = 0
        for batch, position in part.read(batch_rows=30):
            assert batch.schema.equals(source.schema())
            first = done == 0
            done += batch.num_rows
            if first or done == len(content):
                text = json.dumps(position.to_json())
                assert rows(part, Position.from_json(text), batch_rows=51) == content[done:]
            if first and done < len(content):
                places.append((part, position))
    assert len(places) > 1
    refused: list[str] = []
    for writer, position in places:
        for part, content in zip(parts, contents, strict=True):
            if part is writer:
                continue
            try:
                assert rows(part, position) == content  # it lies between the two parts
            except DataError as error:
                refused.append(str(error))
    assert len(refused) >= len(places)
    assert all(message.startswith("position: it lies") for message in refused)


def test_only_asked_columns_are_read(source: Source) -> None:
    name = source.schema().names[-1]
    for batch, _ in source.read(plan=ReadPlan(columns=(name,))):
        assert batch.schema.names == [name]


def test_counting_tells_the_number_of_rows(source: Source) -> None:
    assert source.count_rows() == len(rows(source))
    assert source.num_rows() in (None, len(rows(source)))


def test_reading_leaves_no_trace_in_the_value(source: Source) -> None:
    before = repr(source)
    rows(source)
    assert repr(source) == before


def test_parts_of_few_rows_are_empty_and_have_the_types_of_the_whole(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([1], pa.int32())}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": pa.array([2], pa.int64())}), tmp_path / "2.parquet")
    (tmp_path / "few.csv").write_text("a\n1\n2\n")
    files = Parquet(str(tmp_path / "*.parquet"))
    for source in (files, Csv(tmp_path / "few.csv"), Memory({"a": [1, 2]}), files.sort("a")):
        parts = source.parts(5)
        assert [len(rows(part)) for part in parts].count(0) == 3
        assert {part.schema() for part in parts} == {pa.schema([("a", pa.int64())])}
        assert rows(Concat(parts)) == [{"a": 1}, {"a": 2}]
    assert files.parts(1) == [files]
    with pytest.raises(ConfigError, match=r"parts\.count: .* got 0"):
        files.parts(0)


def test_sources_without_an_end_have_no_parts(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    side = Memory({"a": [1]})
    follow = Follow(tmp_path, "*.csv")
    paced = Replay([side], time="a", speed=2.0)
    for source, name in [
        (follow, "Follow"),
        (paced, "Replay"),
        (FakeStream({"a": [1]}), "FakeStream"),
        (follow.join(side, on="a"), "Follow"),
        (Concat([side, follow]), "Follow"),
    ]:
        with pytest.raises(ConfigError, match=f"without an end has no parts, got {name}. Cut"):
            source.parts(2)
    kafka = Kafka("localhost:1", "clicks")
    parts = Concat([Memory({"a": [1, 2]}), kafka]).join(side, on="a").parts(2)
    assert [part.source.sources[1] for part in parts] == kafka.parts(2)


def test_empty_files_and_tables_are_read_as_no_rows(tmp_path: Path) -> None:
    pq.write_table(table(0, 0), tmp_path / "empty.parquet")
    (tmp_path / "empty.csv").write_text("a,b\n")
    (tmp_path / "full.csv").write_text("a,b\n1,2\n")
    assert rows(Parquet(tmp_path / "empty.parquet")) == []
    assert rows(Csv([tmp_path / "full.csv", tmp_path / "empty.csv"])) == [{"a": 1, "b": 2}]
    assert rows(Csv(tmp_path / "empty.csv")) == []
    assert rows(Memory(table(0, 0))) == []


def test_memory_takes_the_frames_of_other_libraries_and_refuses_the_rest() -> None:
    frame = pl.DataFrame({"number": [1, 2], "word": ["a", "b"]})
    assert rows(Memory(frame)) == frame.to_dicts()
    words = {"c": pl.Categorical, "e": pl.Enum(["a", "b"]), "v": pl.String}
    frame = pl.DataFrame({name: pl.Series(["b", "a"], dtype=kind) for name, kind in words.items()})
    assert rows(Memory(frame).sort("c")) == frame.to_dicts()[::-1]
    lists = pl.DataFrame({"c": pl.Series([["b"], []], dtype=pl.List(pl.Categorical))})
    assert rows(Memory(lists).slice(0, 1)) == [{"c": ["b"]}]
    wide = pl.DataFrame({"i": [1], "wide": pl.Series([1], dtype=pl.Int128)})
    with pytest.raises(DataError, match=r"column 'wide' cannot become an Arrow array, got Int128"):
        Memory(wide)
    with pytest.raises(DataError, match="neither a table nor a mapping of columns, got list"):
        Memory([1, 2])
    with pytest.raises(DataError, match="columns differ in length"):
        Memory({"a": [1], "b": [1, 2]})
