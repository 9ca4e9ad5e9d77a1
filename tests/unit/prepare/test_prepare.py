# SPDX-License-Identifier: Apache-2.0
"""Preparations: their files give the batches of raw rows, and their output is whole or absent."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import hotbed as hb
from hotbed.cli import commands as cli
from hotbed.connectors.hugectr.file_list import read_file_list
from hotbed.data import (
    Bucketize,
    Dense,
    FillMissing,
    Hash,
    Id,
    JoinGroupby,
    Label,
    Log,
    Map,
    Normalize,
    Schema,
    Split,
    Time,
    TimeOfDay,
    Weight,
)
from hotbed.errors import ConfigError, DataError, DecodeError, NotWritten, PersistError
from hotbed.files import MARK_FILE, HeldFolder
from hotbed.job.job import PreparedSchema
from hotbed.prepare import (
    ByFold,
    Local,
    Preparation,
    Previous,
    Stage,
    TimeDifference,
    Workflow,
    prepare,
)

NUM_ROWS = 300
SCHEMA = Schema(
    [
        Label("clicked"),
        Label("liked", column="stars", threshold=4),
        Time("at", unit="s"),
        Weight("importance", column="weight"),
        Id("user", transforms=[Map(min_count=2)], padding=0),
        Id("city", transforms=[Map(max_size=3)]),
        Id("tags", transforms=[Split("|"), Map()], pooling="mean", max_length=2),
        Id("device", transforms=[Hash(50)]),
        Id("hour", column="at", transforms=[TimeOfDay()]),
        Id("basket", weights="amounts", pooling="none"),
        Dense("price", transforms=[FillMissing(statistic="median"), Log(), Normalize()]),
        Dense("price_range", column="price", transforms=[FillMissing(0), Bucketize(bins=5)]),
        Dense("image", width=3),
        Id("history", table="user", transforms=[Map()], pooling="mean"),
    ]
)
HISTORY = Previous("history", by="city", time="at", column="device", length=3)


def raw_rows(seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    baskets = [rng.integers(0, 9, rng.integers(0, 4)).tolist() for _ in range(NUM_ROWS)]
    words = np.array(["a", "b", "c", "d", "", None], object)
    return pl.DataFrame(
        {
            "clicked": rng.integers(0, 2, NUM_ROWS),
            "stars": rng.integers(1, 6, NUM_ROWS),
            "at": 1_600_000_000 + rng.integers(0, 10**6, NUM_ROWS),
            "weight": rng.random(NUM_ROWS),
            "user": rng.integers(0, 200, NUM_ROWS),
            "city": rng.choice(words, NUM_ROWS).tolist(),
            "tags": ["|".join(rng.choice(list("xyz"), rng.integers(0, 4))) for _ in baskets],
            "device": rng.choice(["phone", "desk"], NUM_ROWS).tolist(),
            "basket": baskets,
            "amounts": [[float(id) + 0.5 for id in basket] for basket in baskets],
            "price": [None if number < 0.2 else number * 30 for number in rng.random(NUM_ROWS)],
            "image": rng.random((NUM_ROWS, 3)).astype(np.float32).tolist(),
        }
    )


@pytest.fixture
def source(tmp_path: Path) -> hb.sources.Parquet:
    """Two files with row groups of 60 rows."""
    for number, rows in enumerate(raw_rows().iter_slices(200)):
        rows.write_parquet(tmp_path / f"raw-{number}.parquet", row_group_size=60)
    return hb.sources.Parquet(str(tmp_path / "raw-*.parquet"))


@pytest.fixture
def job(source: hb.sources.Source, tmp_path: Path) -> Preparation:
    return Preparation(source, SCHEMA, derive=[HISTORY], output=str(tmp_path / "prepared"))


def batches(source: hb.sources.Source, schema: Schema) -> Iterator[hb.Batch]:
    return iter(hb.Dataset(source, schema, batch_size=64))


def assert_equal(one: hb.Batch, two: hb.Batch) -> None:
    """Compare all arrays of two batches, bit for bit."""
    arrays: list[list[bytes]] = []
    for batch in (one, two):
        own = [batch.weight, batch.time, *batch.labels.values(), *batch.dense.values()]
        for ids in batch.ids.values():
            own += [ids.values, ids.offsets, ids.weights]
        arrays.append([np.asarray(array).tobytes() for array in own])
    assert arrays[0] == arrays[1]


def with_history(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows with the column that `HISTORY` derives, by the definition."""
    histories: list[list[str]] = []
    for row in rows.iter_rows(named=True):
        city = row["city"] or None  # empty text is missing, as null is
        is_same = pl.col("city") == pl.lit(city, pl.String)
        same = rows.filter(is_same & (pl.col("at") < row["at"]))
        histories.append(same.sort("at", "device")["device"].to_list()[-3:])
    return rows.with_columns(pl.Series("history", histories, pl.List(pl.String)))


def test_prepared_rows_give_the_batches_of_raw_rows(job: Preparation) -> None:
    workflow = prepare(job, Local(2))
    raw = hb.sources.Memory(with_history(raw_rows()))
    prepared = hb.sources.Prepared(job.output)
    assert prepared.num_rows() == NUM_ROWS
    pairs = zip(batches(raw, workflow.raw), batches(prepared, workflow.schema), strict=True)
    for one, two in pairs:
        assert_equal(one, two)


def test_fits_are_those_of_the_schema_alone(job: Preparation) -> None:
    """`Schema.fit` over the same rows learns the same, up to the order of sums."""
    workflow = prepare(job)
    alone = SCHEMA.fit(hb.sources.Memory(with_history(raw_rows())))
    for column in alone.columns:
        for ours, theirs in zip(
            getattr(workflow.raw[column.name], "transforms", ()),
            getattr(column, "transforms", ()),
            strict=True,
        ):
            if isinstance(theirs, Map):
                assert theirs.vocabulary is not None
                assert workflow.sizes[column.name] == 1 + len(theirs.vocabulary)
            elif isinstance(theirs, Normalize):
                assert (ours.mean, ours.std) == pytest.approx((theirs.mean, theirs.std))
            else:
                assert ours == theirs


def test_files_have_the_types_that_are_promised(job: Preparation) -> None:
    prepare(replace(job, split=ByFold(0.3)))
    folder = Path(job.output)
    types = {}
    for field in pq.read_schema(folder / "train/part-00000.parquet"):
        types[field.name] = str(field.type)
    assert types["user"] == types["city"] == "int64"
    assert types["tags"] == types["basket"] == "list<element: int64>"
    assert types["basket_weights"] == "list<element: float>"
    assert types["image"] == "fixed_size_list<element: float>[3]"
    assert types["at"] == "timestamp[us, tz=UTC]"
    assert {types[name] for name in ("clicked", "price", "importance")} == {"float"}
    workflow = json.loads((folder / "workflow.json").read_text())
    assert workflow["counts"]["train"] + workflow["counts"]["valid"] == NUM_ROWS
    for part in ("train", "valid"):
        metadata = json.loads((folder / part / "_metadata.json").read_text())
        names = list(types)
        for column in [*metadata["cats"], *metadata["conts"], *metadata["labels"]]:
            assert names[column["index"]] == column["col_name"]
        for facts in metadata["file_stats"]:
            num_rows = pq.read_metadata(folder / part / facts["file_name"]).num_rows
            assert num_rows == facts["num_rows"]
        assert metadata["sizes"] == workflow["sizes"]
        files = [str(folder / part / facts["file_name"]) for facts in metadata["file_stats"]]
        assert read_file_list(folder / part / "_file_list.txt") == files
    assert workflow["sizes"]["device"] == 50
    assert workflow["sizes"]["hour"] == 24


def test_each_file_has_its_digest_in_the_workflow(job: Preparation) -> None:
    import hashlib

    import xxhash

    prepare(job)
    folder = Path(job.output)
    workflow = json.loads((folder / "workflow.json").read_text())
    digests = {name: facts["sha256"] for name, facts in workflow["files"].items()}
    for facts in workflow["parts"]["train"]["files"]:
        digests[facts["file"]] = facts["sha256"]
        content = (folder / facts["file"]).read_bytes()
        assert facts["xxh3"] == xxhash.xxh3_128_hexdigest(content)
    for name, digest in digests.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found - set(digests) == {"workflow.json"}


# --- the folder -----------------------------------------------------------------------------------


def test_nothing_is_left_of_a_preparation_that_fails(job: Preparation, tmp_path: Path) -> None:
    rows = raw_rows().with_columns(weight=pl.lit(-1.0))
    rows.write_parquet(tmp_path / "raw-9.parquet")
    with pytest.raises(DecodeError):
        prepare(job)
    partial = Path(job.output + ".partial")
    assert partial.exists()
    assert not Path(job.output).exists()
    for path in (job.output, partial):
        with pytest.raises(DataError, match="hotbed prepare"):
            hb.sources.Prepared(str(path)).schema()
        with pytest.raises(DataError, match="hotbed prepare"):
            Schema.of_prepared(path)
    (tmp_path / "raw-9.parquet").unlink()
    (partial / MARK_FILE).touch()
    (partial / "leftover").mkdir()
    prepare(job)
    assert not (Path(job.output) / MARK_FILE).exists()
    assert not partial.exists()
    assert not (Path(job.output) / "leftover").exists()


def test_full_disk_is_one_error_and_gets_its_room_back(job: Preparation) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        with pytest.raises(NotWritten, match=r"prepared\.partial: cannot be written"):
            prepare(job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(Path(job.output + ".partial").iterdir()) == []


def test_torn_file_behind_a_whole_one_is_named(job: Preparation, tmp_path: Path) -> None:
    torn = tmp_path / "raw-8.parquet"
    torn.write_bytes((tmp_path / "raw-0.parquet").read_bytes()[:-100])
    with pytest.raises(DecodeError, match=r"raw-8\.parquet: not a whole parquet file"):
        prepare(job)


def test_output_is_not_overwritten_but_moved_aside(job: Preparation) -> None:
    first = prepare(job)
    with pytest.raises(ConfigError, match=r"the folder exists .* --restart"):
        prepare(job)
    second = prepare(job, restart=True)
    assert second.counts == first.counts
    aside = Path(job.output).with_name("prepared.aside-1")
    assert Workflow(aside).counts == first.counts


def test_second_process_is_rejected(job: Preparation) -> None:
    partial = Path(job.output + ".partial")
    partial.mkdir()
    with HeldFolder(partial), pytest.raises(PersistError, match="another process prepares it"):
        prepare(job)


def test_changed_file_is_refused(job: Preparation) -> None:
    prepare(job)
    file = Path(job.output) / "train/part-00001.parquet"
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(DataError, match=r"part-00001.parquet: not the file that was prepared"):
        hb.sources.Prepared(job.output).schema()


def test_absent_part_is_named(job: Preparation) -> None:
    prepare(job)
    with pytest.raises(ConfigError, match=r"no such part, got 'valid'"):
        hb.sources.Prepared(job.output, "valid").num_rows()


# --- rows that cannot be used ---------------------------------------------------------------------

BAD_FILES = {
    "a.csv": "user,price,clicked,at\nann,1.5,1,10\nbob,oops,0,20\ncarl,2\ndan,2,,40\neve,3,1,50\n",
    "b.csv": "user,price,clicked,at\ngus,-9,1,60\nhal,2,0,70\n",
}
BAD_SCHEMA = Schema(
    [Label("clicked"), Time("at"), Id("user", transforms=[Map()]), Dense("price", [Log()])]
)


@pytest.fixture
def bad(tmp_path: Path) -> Preparation:
    for name, text in BAD_FILES.items():
        (tmp_path / name).write_text(text)
    source = hb.sources.Csv([str(tmp_path / name) for name in BAD_FILES])
    return Preparation(source, BAD_SCHEMA, output=str(tmp_path / "prepared"))


@pytest.mark.parametrize(
    ("file", "line", "text", "message"),
    [
        ("a.csv", 3, "bob,oops,0,20", "column 'price'.* 'oops'"),
        ("a.csv", 4, "carl,2", "Expected 4 columns, got 2"),
        ("a.csv", 5, "dan,2,,40", "label 'clicked': expected a value in every row"),
        ("b.csv", 2, "gus,-9,1,60", "column 'price': expected finite"),
    ],
)
def test_bad_row_is_named_by_file_line_and_column(
    bad: Preparation, tmp_path: Path, file: str, line: int, text: str, message: str
) -> None:
    for name, content in BAD_FILES.items():
        lines = content.splitlines()
        good = [own for own in lines if own == text or own.startswith(("user", "ann", "eve", "ha"))]
        blank = [own if own in good else "ann,1,1,1" for own in lines]
        (tmp_path / name).write_text("\n".join(blank) + "\n")
    with pytest.raises(DecodeError, match=rf"{file}, line {line}[:,].*{message}"):
        prepare(bad)


@pytest.mark.parametrize("group", [0, 2])
def test_damaged_row_group_is_a_dead_letter_and_the_other_groups_are_read(
    tmp_path: Path, group: int
) -> None:
    path = tmp_path / "raw.parquet"
    rows = pl.DataFrame({"y": np.arange(2000) % 2, "user": np.arange(2000)})
    rows.write_parquet(path, row_group_size=500, compression="uncompressed")
    content = bytearray(path.read_bytes())
    chunk = pq.read_metadata(path).row_group(group).column(1)
    first = chunk.dictionary_page_offset or chunk.data_page_offset
    content[first : first + 40] = b"\xff" * 40  # the head of the first page
    path.write_bytes(content)
    schema = Schema([Label("y"), Id("user")])
    job = Preparation(
        hb.sources.Parquet(str(path)), schema, on_error="skip", output=str(tmp_path / "out")
    )
    workflow = prepare(job)
    assert workflow.counts["train"] == 1500
    assert workflow.counts["skipped"] == {"file": 1}
    letters = [
        json.loads(line)
        for file in (tmp_path / "out/dead_letters").iterdir()
        for line in file.read_text().splitlines()
    ]
    first_row = 500 * group + 1
    assert [letter["place"] for letter in letters] == [{"file": str(path), "row": first_row}]
    place = f"the rest of the row group of rows {first_row:,} to {first_row + 499:,} is left out"
    assert place in letters[0]["payload"]


def test_skipped_rows_are_counted_and_written_to_dead_letters(bad: Preparation) -> None:
    workflow = prepare(replace(bad, on_error="skip"))
    assert workflow.counts["train"] == 3
    assert sum(workflow.counts["skipped"].values()) == 4
    letters = []
    for path in sorted(Path(bad.output).glob("dead_letters/*.jsonl")):
        letters += [json.loads(line) for line in path.read_text().splitlines()]
    payloads = " ".join(letter["payload"] for letter in letters)
    assert len(letters) == 4
    for word in ("bob", "carl", "dan", "gus"):
        assert word in payloads
    lines = {Path(letter["place"]["file"]).name: letter["place"] for letter in letters}
    assert set(lines) == set(BAD_FILES)
    train = pl.read_parquet(Path(bad.output) / "train/*.parquet")
    assert sorted(train["price"].to_list()) == pytest.approx(np.log([2.5, 3.0, 4.0]).tolist())


def test_broken_row_group_is_left_out_alone_and_is_a_dead_letter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.parquet"
    table = pa.table({"label": np.arange(300) % 2, "user": np.arange(300)})
    pq.write_table(table, file, row_group_size=100, use_dictionary=False)
    column = pq.ParquetFile(file).metadata.row_group(1).column(1)
    data = bytearray(file.read_bytes())
    data[column.data_page_offset : column.data_page_offset + 40] = b"\xff" * 40
    file.write_bytes(data)
    schema = Schema([Label("label"), Id("user")])
    output = str(tmp_path / "prepared")
    workflow = prepare(
        Preparation(hb.sources.Parquet(str(file)), schema, on_error="skip", output=output)
    )
    assert workflow.counts == {"train": 200, "skipped": {"file": 1}}
    said = "the rest of the row group of rows 101 to 200 is left out"
    assert said in caplog.text
    (letters,) = Path(output).glob("dead_letters/*.jsonl")
    letter = json.loads(letters.read_text())
    assert letter["place"] == {"file": str(file), "row": 101}
    assert said in letter["payload"]


def test_missing_column_is_named(job: Preparation) -> None:
    schema = Schema([Label("clicked"), Id("usr")])
    with pytest.raises(hb.errors.SchemaError, match=r"'usr'.* Did you mean 'user'"):
        prepare(replace(job, schema=schema, derive=()))


def test_source_without_rows_is_an_error_before_columns_are_derived(
    job: Preparation, tmp_path: Path
) -> None:
    raw_rows().clear().write_parquet(tmp_path / "nothing.parquet")
    empty = replace(job, source=hb.sources.Parquet(tmp_path / "nothing.parquet"))
    assert empty.derive
    with pytest.raises(DataError, match=r"prepare\.source: it has no rows"):
        prepare(empty)


def test_source_without_rows_is_an_error(tmp_path: Path) -> None:
    source = hb.sources.Memory({"clicked": np.zeros(0), "user": np.zeros(0, np.int64)})
    schema = Schema([Label("clicked"), Id("user", transforms=[Map()])])
    output = str(tmp_path / "prepared")
    with pytest.raises(DataError, match="it has no rows"):
        prepare(Preparation(source, schema, output=output))
    with pytest.raises(DataError, match=r"prepare.source: it has no rows"):
        prepare(Preparation(source, Schema([Label("clicked"), Id("user")]), output=output))


# --- a fitted workflow ----------------------------------------------------------------------------


def digests(folder: str | Path) -> dict[str, str]:
    workflow = json.loads((Path(folder) / "workflow.json").read_text())
    files = {}
    for part in workflow["parts"].values():
        files |= {facts["file"]: facts["sha256"] for facts in part["files"]}
    return files


ENCODED = Schema(
    [
        Label("clicked"),
        Time("at"),
        Id("user", transforms=[Map()]),
        Dense("rate", column="city", transforms=[hb.transforms.TargetEncode("clicked")]),
        Dense(
            "rate_before",
            column="device",
            transforms=[hb.transforms.TargetEncode("clicked", ordered_by="at"), Normalize()],
        ),
    ]
)


def test_workflow_over_the_training_rows_gives_the_prepared_files(
    job: Preparation, tmp_path: Path
) -> None:
    encoded = replace(job, schema=ENCODED, derive=(), split=ByFold(0.3))
    workflow = prepare(encoded)
    again = workflow.apply(encoded.source, str(tmp_path / "again"), training=True)
    assert digests(again.path) == digests(encoded.output)
    assert again.raw == workflow.raw


def test_workflow_over_other_rows_encodes_them_as_servers_do(
    job: Preparation, tmp_path: Path
) -> None:
    workflow = prepare(replace(job, schema=ENCODED, derive=()))
    others = hb.sources.Memory(raw_rows(1))
    applied = workflow.apply(others, str(tmp_path / "applied"))
    assert applied.counts["valid"] == NUM_ROWS
    prepared = hb.sources.Prepared(str(applied.path), "valid")
    pairs = zip(batches(others, workflow.raw), batches(prepared, applied.schema), strict=True)
    for one, two in pairs:
        assert_equal(one, two)


def test_derived_columns_are_described(job: Preparation) -> None:
    workflow = prepare(job)
    assert list(workflow.raw.derived) == ["history"]
    assert "city" in workflow.raw.derived["history"]
    assert workflow.schema.raw == workflow.raw
    assert Schema.from_json(workflow.schema.to_json()) == workflow.schema


def test_stages_are_reported(job: Preparation) -> None:
    stages: list[Stage] = []
    prepare(job, report=stages.append)
    last = {stage.name: stage for stage in stages}
    assert [name for name in last if "," not in name] == [
        *("inputs", "derive 1", "fit 1", "fit 2", "write")
    ]
    assert all(stage.done == stage.total for stage in last.values())


# --- jobs and the command line --------------------------------------------------------------------


def test_job_takes_the_schema_of_a_preparation(job: Preparation) -> None:
    workflow = prepare(replace(job, split=ByFold(0.3)))
    spec = {
        "schema": {"prepared": job.output},
        "train": {"kind": "prepared", "path": job.output},
        "valid": {"kind": "prepared", "path": job.output, "part": "valid"},
        "model": "lr",
    }
    training = hb.Job.from_json(spec)
    assert training.schema == PreparedSchema(job.output)
    assert training.fitted() == workflow.schema
    assert hb.Job.from_json(training.to_json()) == training
    raw = hb.Job.from_json(spec | {"schema": {"prepared": job.output, "rows": "raw"}})
    assert raw.declared == workflow.raw


def test_command_prepares_and_encodes_other_files(
    job: Preparation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = replace(job, output="prepared").to_json()
    Path("prepare.json").write_text(json.dumps(spec))
    done = CliRunner().invoke(cli.app, ["prepare", "prepare.json", "--workers", "1"])
    assert done.exit_code == 0, done.output
    assert "train: 300" in done.output
    assert "prepared: prepared" in done.output
    command = ["prepare", "prepare.json", "--workflow", "prepared", "--set", "output=more"]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert Workflow("more").counts["valid"] == NUM_ROWS


def test_wrong_keys_are_named() -> None:
    spec: dict[str, Any] = {"source": {"kind": "csv", "path": "x"}, "schema": {"columns": []}}
    with pytest.raises(ConfigError, match=r"prepare.splt: unknown key .* Did you mean 'split'"):
        Preparation.from_json(spec | {"splt": 1})
    with pytest.raises(ConfigError, match=r"prepare.memory: not a size, got 'much'"):
        Preparation.from_json(spec | {"memory": "much"})


def test_derived_columns_have_names_of_their_own(job: Preparation) -> None:
    again = Previous("again", by="city", time="at", column="history")
    with pytest.raises(ConfigError, match=r"'again' is derived twice, or reads a column"):
        replace(job, derive=[again, HISTORY])
    with pytest.raises(ConfigError, match=r"'history' is derived twice, or reads"):
        replace(job, derive=[HISTORY, HISTORY, again])
    with pytest.raises(ConfigError, match=r"the source has columns \['price'\] already"):
        prepare(replace(job, derive=[replace(HISTORY, name="price")]))


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("4GB", 4 * 10**9), ("512 mb", 512 * 10**6), (10**6, 10**6)]
)
def test_memory_is_read_with_its_unit(text: str | int, num_bytes: int) -> None:
    source = hb.sources.Memory(pa.table({"user": [1]}))
    assert Preparation(source, Schema([Id("user")]), memory=text).memory_bytes == num_bytes


UNREADABLE: dict[str, tuple[Any, dict[str, Any]]] = {
    "part of a time": (Dense("x", [TimeOfDay(), FillMissing(0.0), Normalize()]), {}),
    "number of a statistic": (
        Dense("mean", [JoinGroupby("x"), FillMissing(0.0)], column="user"),
        {},
    ),
    "time of a difference": (
        Dense("since", [FillMissing(0.0)]),
        {"derive": [TimeDifference("since", by="user", time="x")]},
    ),
}


@pytest.mark.parametrize("use", UNREADABLE)
def test_text_that_cannot_be_read_is_never_missing(tmp_path: Path, use: str) -> None:
    column, options = UNREADABLE[use]
    texts = ["1", "2", None, "4"]
    rows = pl.DataFrame({"y": [0, 1] * 4, "user": [1] * 8, "x": [*texts, *texts]})
    rows[5, "x"] = "soon"
    rows.write_parquet(tmp_path / "raw.parquet")
    schema = Schema([Label("y"), Id("user"), column])
    source = hb.sources.Parquet(str(tmp_path / "raw.parquet"))
    job = Preparation(source, schema, output=str(tmp_path / "out"), **options)
    with pytest.raises(DecodeError, match=r"raw.parquet, row 6\b.*column 'x': .*got 'soon'"):
        prepare(job)
    if not options:
        workflow = prepare(replace(job, on_error="skip"))
        assert workflow.counts == {"train": 7, "skipped": {"value": 1}}
