# SPDX-License-Identifier: Apache-2.0
"""Inputs that change, bits that flip, and folders of other people: each is named, none is lost."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

import hotbed as hb
from hotbed.cli import commands as cli
from hotbed.connectors.prepared import sealed
from hotbed.errors import ConfigError, DataError
from hotbed.files import MARK_FILE
from hotbed.prepare import ByFold, Preparation, Workflow, prepare
from hotbed.prepare.stages import Work

pytestmark = pytest.mark.core

NUM_ROWS = 4000


def write_rows(folder: Path, num_rows: int = NUM_ROWS, first_user: int = 0) -> None:
    rows = np.arange(num_rows)
    frame = pl.DataFrame(
        {"y": rows % 2, "user": first_user + rows % 97, "x": rows * 0.25, "key": rows % 5}
    )
    for number in range(2):
        frame[number::2].write_csv(folder / f"{number}.csv")
    pl.DataFrame({"key": range(5), "city": list("abcde")}).write_csv(folder / "side.txt")


def job_of(folder: Path, **keys: Any) -> Preparation:
    side = hb.sources.Csv(str(folder / "side.txt"))
    return Preparation(
        hb.sources.Csv(str(folder / "*.csv")).join(side, on="key"),
        hb.Schema(
            [
                hb.Label("y"),
                hb.Id("user", transforms=[hb.transforms.Map()]),
                hb.Id("city"),
                hb.Dense("x", [hb.transforms.Normalize()]),
            ]
        ),
        output=str(folder / "out"),
        **{"split": ByFold(valid=0.3), **keys},
    )


@pytest.fixture
def disturb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes something happen before a stage runs a kind of task."""
    plain_map = Work.map

    def set_up(happen: Callable[[], object], kind: str = "Writing") -> None:
        def disturbed_map(self: Work, stage: str, task: Any, items: Sequence[Any]) -> Any:
            if type(task).__name__ == kind:
                happen()
            return plain_map(self, stage, task, items)

        monkeypatch.setattr(Work, "map", disturbed_map)

    return set_up


# --- inputs ---------------------------------------------------------------------------------------


def replaced(path: Path) -> None:
    os.replace(path.parent / "other", path)


def rewritten_in_place(path: Path) -> None:
    """Write other bytes of the same number, and put the times back."""
    facts = path.stat()
    path.write_bytes(path.read_bytes().replace(b"0", b"1"))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "replaced": replaced,
    "rewritten in place": rewritten_in_place,
    "appended": lambda path: path.write_bytes(path.read_bytes() + b"1,2,3,4\n"),
    "gone": Path.unlink,
    "gone, a side table": lambda path: (path.parent / "side.txt").unlink(),
}


@pytest.mark.parametrize("task", ["_Pass", "_Reducing", "Writing"])
@pytest.mark.parametrize("change", CHANGES)
def test_input_that_changes_while_it_is_prepared_is_named(
    tmp_path: Path, disturb: Any, change: str, task: str
) -> None:
    write_rows(tmp_path)
    (tmp_path / "other").write_bytes((tmp_path / "1.csv").read_bytes()[:-9])
    disturb(lambda: CHANGES[change](tmp_path / "1.csv"), task)
    name = "side.txt" if "side" in change else "1.csv"
    with pytest.raises(DataError, match=rf"{name}: the file changed while it was prepared, got "):
        prepare(job_of(tmp_path))
    assert not (tmp_path / "out").exists()


def test_inputs_whose_content_stays_and_files_that_arrive_do_not_disturb(
    tmp_path: Path, disturb: Any
) -> None:
    write_rows(tmp_path)

    def happen() -> None:
        os.link(tmp_path / "0.csv", tmp_path / "backup")
        (tmp_path / "9.csv").write_text("y,user,x,key\n1,2,3,4\n")

    disturb(happen)
    workflow = prepare(job_of(tmp_path))
    assert workflow.counts["train"] + workflow.counts["valid"] == NUM_ROWS


def in_memory(folder: Path, changed: bool) -> hb.sources.Source:
    frame = pl.read_csv(folder / "0.csv").with_columns(city=pl.lit("a"))
    if changed:
        frame = frame.with_columns(x=pl.when(pl.col("x") == 500).then(1).otherwise(pl.col("x")))
    return hb.sources.Memory(frame.to_arrow())


def test_training_rows_are_made_again_of_the_same_source_only(tmp_path: Path) -> None:
    write_rows(tmp_path)
    job = job_of(tmp_path)
    workflow = prepare(job)
    workflow.apply(job.source, str(tmp_path / "again"), training=True)
    name = "train/part-00000.parquet"
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()

    def refused(source: hb.sources.Source, found: str) -> None:
        with pytest.raises(DataError, match=f"needs the source that was prepared, got {found}"):
            workflow.apply(source, str(tmp_path / "other"), training=True)
        assert not (tmp_path / "other").exists()

    refused(replace(job.source, source=hb.sources.Csv(str(tmp_path / "0.csv"))), "2 files instead")
    refused(job.source.slice(0, NUM_ROWS - 1), "3 files instead of 3, or other options")
    rewritten_in_place(tmp_path / "1.csv")
    refused(job.source, "another content of '.*1.csv'")
    assert workflow.apply(job.source, str(tmp_path / "served")).counts["valid"] == NUM_ROWS

    memory = prepare(replace(job, source=in_memory(tmp_path, False), output=str(tmp_path / "m")))
    memory.apply(in_memory(tmp_path, False), str(tmp_path / "m again"), training=True)
    with pytest.raises(DataError, match="needs the source that was prepared"):
        memory.apply(in_memory(tmp_path, True), str(tmp_path / "m other"), training=True)


def as_format_1(folder: Path) -> None:
    """Make the workflow what versions before format 2 wrote."""
    workflow = json.loads((folder / "workflow.json").read_text())
    plain = {name: workflow[name] for name in workflow if name not in ("digest", "source")}
    (folder / "workflow.json").write_text(json.dumps({**plain, "format": 1}))


def test_folder_of_an_earlier_version_is_read_and_its_source_compared_by_rows(
    tmp_path: Path,
) -> None:
    write_rows(tmp_path)
    job = job_of(tmp_path)
    prepare(job)
    as_format_1(tmp_path / "out")
    workflow = Workflow(tmp_path / "out")
    assert workflow.verify()["digest"] == ""
    assert workflow.apply(job.source, str(tmp_path / "again"), training=True).counts["train"] > 0
    with pytest.raises(
        DataError, match=r"training=True needs .* got \{'train': .* rows instead of"
    ):
        workflow.apply(job.source.slice(0, 900), str(tmp_path / "other"), training=True)
    assert not (tmp_path / "other").exists()
    preparation = workflow._values["prepare"]
    values = {**workflow._values, "prepare": {**preparation, "negatives": {"user": "a"}}}
    (tmp_path / "out/workflow.json").write_text(json.dumps(values))
    assert Workflow(tmp_path / "out")._values["prepare"]["negatives"]["seen"] == "never"


# --- flipped bits ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output of two training parts."""
    folder = tmp_path_factory.mktemp("whole")
    write_rows(folder)
    prepare(job_of(folder))
    return folder / "out"


@pytest.fixture
def flip(whole: Path) -> Any:
    """Flips a bit of a file; the file is as before in the end."""
    contents: dict[Path, bytes] = {}

    def flipped(name: str, place: int, bit: int = 0) -> Path:
        path = whole / name
        content = bytearray(contents.setdefault(path, path.read_bytes()))
        content[place % len(content)] ^= 1 << bit
        path.write_bytes(content)
        return path

    yield flipped
    for path, content in contents.items():
        path.write_bytes(content)


@pytest.fixture(params=["xxh3", "sha256"])
def checked_by(request: pytest.FixtureRequest, whole: Path) -> Iterator[str]:
    """Digests by which readers check a part: those of before have only SHA-256."""
    path = whole / "workflow.json"
    content = path.read_text()
    if request.param == "sha256":
        values = json.loads(content)
        del values["digest"]
        for part in values["parts"].values():
            for entry in part["files"]:
                del entry["xxh3"]
        path.write_text(json.dumps(sealed(values)))
    yield request.param
    path.write_text(content)


def test_flipped_bit_of_a_part_is_refused_before_its_first_row(
    whole: Path, flip: Any, checked_by: str
) -> None:
    source = hb.sources.Prepared(str(whole))
    batches = list(source.read(batch_rows=500))
    first_rows = sum(b.num_rows for b, after in batches if after["file"] == 0)
    draw = random.Random(0)
    for _ in range(20):
        path = flip("train/part-00001.parquet", draw.randrange(10**9), draw.randrange(8))
        rows: list[int] = []
        with pytest.raises(DataError, match=rf"{path.name}: not the file .* got {checked_by} "):
            rows.extend(batch.num_rows for batch, _ in source.read(batch_rows=500))
        assert sum(rows) == first_rows
        inside = next(after for _, after in batches if after["file"] == 1)
        with pytest.raises(DataError, match=rf"{path.name}: not the file that was prepared"):
            next(source.read(inside, 500))


def test_training_on_a_flipped_part_ends_in_its_name(whole: Path, flip: Any) -> None:
    schema = hb.Schema.of_prepared(whole)
    flip("train/part-00000.parquet", 1000)
    dataset = hb.Dataset(hb.sources.Prepared(str(whole)), schema, 256, on_error="skip")
    with pytest.raises(DataError, match=r"part-00000\.parquet: not the file that was prepared"):
        list(dataset)


@pytest.mark.parametrize(
    "open_folder",
    [
        hb.Schema.of_prepared,
        lambda path: Workflow(path).schema,
        lambda path: hb.sources.Prepared(str(path)).schema(),
        lambda path: Workflow(path).verify(),
    ],
)
@pytest.mark.parametrize("name", ["maps/*", "workflow.json"])
def test_flipped_map_or_workflow_is_refused_when_the_folder_is_opened(
    whole: Path, flip: Any, open_folder: Any, name: str
) -> None:
    path = flip(next(whole.glob(name)).relative_to(whole), 300, 1)
    with pytest.raises(DataError, match=path.name):
        open_folder(whole)


def test_verify_knows_prepared_folders_and_names_each_flipped_file(whole: Path, flip: Any) -> None:
    command = CliRunner().invoke(cli.app, ["verify", str(whole)])
    assert command.exit_code == 0
    assert "is whole: prepared, train" in command.output
    assert Workflow(whole).verify()["rows"].keys() == {"train", "valid"}
    for path in sorted(whole.rglob("*")):
        if path.is_file():
            name = path.relative_to(whole)
            content = path.read_bytes()
            flip(name, len(content) // 2, 2)
            with pytest.raises(DataError, match=path.name):
                Workflow(whole).verify()
            path.write_bytes(content)
    assert Workflow(whole).verify()["files"] > 6


def test_workflow_is_sealed_by_the_digest_of_its_values(whole: Path) -> None:
    workflow = json.loads((whole / "workflow.json").read_text())
    values = {name: value for name, value in workflow.items() if name != "digest"}
    assert sealed(values) == workflow
    assert sealed({**values, "sizes": {}})["digest"] != workflow["digest"]


# --- folders of others ----------------------------------------------------------------------------


def test_partial_folder_that_no_preparation_made_is_refused_and_kept(tmp_path: Path) -> None:
    write_rows(tmp_path)
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"out\.partial would be emptied, .* got 'mine\.txt'"):
        prepare(job_of(tmp_path))
    assert (partial / "mine.txt").read_text() == "x"


@pytest.mark.parametrize("is_dangling", [False, True])
def test_partial_folder_that_is_a_link_is_refused_and_not_followed(
    tmp_path: Path, is_dangling: bool
) -> None:
    write_rows(tmp_path)
    home = tmp_path / "home"
    if not is_dangling:
        home.mkdir()
        (home / MARK_FILE).touch()
        (home / "thesis.txt").write_text("x")
    (tmp_path / "out.partial").symlink_to(home)
    with pytest.raises(ConfigError, match=r"out\.partial is a link, got a link to"):
        prepare(job_of(tmp_path))
    assert is_dangling or (home / "thesis.txt").exists()


def test_links_in_an_interrupted_output_are_removed_and_not_followed(tmp_path: Path) -> None:
    write_rows(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("x")
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / MARK_FILE).touch()
    (partial / "link").symlink_to(home)
    prepare(job_of(tmp_path))
    assert (home / "thesis.txt").exists()
    assert not partial.exists()


def test_output_that_is_a_dangling_link_is_refused_before_the_work(tmp_path: Path) -> None:
    write_rows(tmp_path)
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    stages: list[Any] = []
    for restart in (False, True):
        with pytest.raises(ConfigError, match=r"prepare\.output: a link that leads nowhere"):
            prepare(job_of(tmp_path), restart=restart, report=stages.append)
    assert not stages
