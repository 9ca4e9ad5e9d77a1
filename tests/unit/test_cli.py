# SPDX-License-Identifier: Apache-2.0
"""The command line is thin and its verbs are frozen: new knobs are keys of a job."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

import hotbed as hb
from hotbed import _core
from hotbed.cli import commands as cli
from hotbed.cli import disk, doctor
from hotbed.errors import ConfigError, NotWritten, SchemaError
from hotbed.files import Lock
from hotbed.job.drafting.draft import draft
from hotbed.job.job import Job
from hotbed.memory_limit import MemoryLimit
from hotbed.persist.container.manifest import HeldEntry
from hotbed.persist.state import checkpoint
from hotbed.persist.upkeep.inspect import describe_checkpoint
from hotbed.prepare import Stage
from hotbed.training.gate.gatekeeper import Gatekeeper
from hotbed.yaml_files import parse_value

ROOT = Path(__file__).parents[2]

JOB = """
schema:
  columns:
    - {kind: label, name: clicked}
    - {kind: time, name: at}
    - {kind: id, name: user}
    - {kind: dense, name: price, transforms: [normalize]}
train: {kind: slice, stop: 0.6, source: &rows {kind: parquet, path: rows.parquet}}
valid: {kind: slice, start: 0.6, stop: 0.8, source: *rows}
stream: {kind: slice, start: 0.8, source: *rows}
model: {kind: dnn, hidden: [4]}
tables: {dim: 2, evict: {kind: ttl, days: 1}}
callbacks: [evict]
fit: {batch_size: 32, torch_threads: 1}
output: out
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a job and 500 rows of data."""
    rng = np.random.default_rng(0)
    user = rng.integers(0, 50, 500)
    rows = pa.table(
        {
            "clicked": (user % 2 == rng.integers(0, 4, 500) % 2).astype(np.int64),
            "at": 1_600_000_000 + np.arange(500) * 3600,
            "user": user,
            "price": rng.normal(size=500),
        }
    )
    pq.write_table(rows, tmp_path / "rows.parquet")
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `hotbed arguments`."""
    monkeypatch.setattr(sys, "argv", ["hotbed", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_verbs_and_flags_are_frozen() -> None:
    group = typer.main.get_command(cli.app)
    flags = {
        name: sorted(
            option
            for parameter in command.params
            for option in parameter.opts
            if option != "--help"
        )
        for name, command in group.commands.items()
    }
    job = ["--set", "job_file"]
    assert flags == {
        "train": ["--ranks", "--restart", *job],
        "check": job,
        "online": ["--max-seconds", "--max-steps", "--ranks", *job],
        "evaluate": ["--by", "--ranks", *job],
        "predict": ["--keep", "--out", "--ranks", "--set", "files", "what"],
        "rescore": ["log", "model"],
        "measure": ["--set", "file"],
        "watch": ["--host", "--port", "--published", "--quality", "--token-file", "run", "servers"],
        "replay": ["--base", "--job", "--place", "--set", "--start", "--warm-up", "log"],
        "export": ["--out", "--set", "--tower", "what"],
        "serve": [
            "--grpc-port",
            "--host",
            "--http-port",
            "--routes",
            "--set",
            "--token-file",
            "--watch",
            "models",
        ],
        "route": [
            "--by",
            "--canary",
            "--routes",
            "--salt",
            "--shadow",
            "--show",
            "--stable",
            "--token-file",
            "model",
        ],
        "parameter-server": [
            "--host",
            "--port",
            "--routes",
            "--rows",
            "--set",
            "--token-file",
            "--watch",
            "models",
        ],
        "inspect": ["--set", "what"],
        "verify": ["checkpoint"],
        "publish": ["--force", "--keep", "--set", "--state", "--to", "what"],
        "restore": ["arguments"],  # refused: its name is rollback
        "rows": ["--history", "model"],
        "rollback": ["--good", "--routes", "--state", "--to", "path"],
        "diff": ["one", "two"],
        "prepare": ["--engine", "--restart", "--set", "--workers", "--workflow", "job_file"],
        "init": [
            "--columns",
            "--from",
            "--item",
            "--label",
            "--out",
            "--prepare",
            "--user",
            "data_file",
        ],
        "schema": [],
        "doctor": ["--device", "--disk", "--ranks"],
        "plan": [
            "--bandwidth",
            "--cores",
            "--disk-reads",
            "--host-ranks",
            "--latency",
            "--ram",
            "--ranks",
            "--rows",
            *job,
        ],
    }


def test_train_evaluate_predict_inspect(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, before, _ = call(capsys, monkeypatch, "inspect", "job.yaml")
    assert code == 0
    assert "not trained yet" in before

    changes = ("--set", "fit.epochs=2", "--set", "tables.capacity=10")
    code, trained, _ = call(capsys, monkeypatch, "train", "job.yaml", *changes)
    assert code == 0
    assert "validation auc" in trained
    assert "stream: progressive auc" in trained
    assert "rows after stream" in trained
    assert Job.read("out/job.json").fit.epochs == 2
    assert "<svg" in (folder / "out" / "report.html").read_text()
    code, state, _ = call(capsys, monkeypatch, "inspect", "out/checkpoint")
    num_rows = len(hb.load("out").tables["user"])
    for printed in (trained, state):
        assert f"10 ({num_rows / 10:.0%})" in printed  # of the capacity

    code, evaluated, _ = call(capsys, monkeypatch, "evaluate", "job.yaml")
    assert code == 0
    assert "evaluation: auc" in evaluated
    for printed in (trained, evaluated):
        assert "  constant: " in printed
        assert "  linear: " in printed
    by = (
        "--set",
        "callbacks=[{kind: by_segment, columns: [at]}]",
        "--by",
        "user=25",
        "--by",
        "price",
    )
    code, divided, _ = call(capsys, monkeypatch, "evaluate", "job.yaml", *by)
    assert code == 0
    assert re.search(r"below 25 +│ \d+ +│ \d+ +│ 0\.\d{4}", divided)
    assert re.search(r"price +┃ rows ┃", divided)
    assert not re.search(r"at +┃ rows ┃", divided)  # `--by` takes the place of the callback
    code, divided, _ = call(capsys, monkeypatch, "evaluate", "job.yaml", *by[:2])
    assert re.search(r"at +┃ rows ┃", divided)
    code, _, errors = call(capsys, monkeypatch, "serve", "out/export", "--set", "http_port=1")
    assert "unknown key, got 'http_port' with the value 1. Give the flag --http-port" in errors
    code, _, errors = call(capsys, monkeypatch, "evaluate", "job.yaml", "--by", "user=a")
    assert "--by: bounds are numbers between commas, got 'user=a'. Give" in errors

    code, _, _ = call(
        capsys,
        monkeypatch,
        "predict",
        "job.yaml",
        "--set",
        "predict={kind: parquet, path: rows.parquet}",
    )
    assert code == 0
    predictions = pq.read_table("out/predictions.parquet")
    assert predictions.column_names == ["clicked"]
    assert predictions.num_rows == 500

    code, after, _ = call(capsys, monkeypatch, "inspect", "job.yaml")
    assert code == 0
    assert "user" in after
    assert "not trained yet" not in after


JOIN_JOB = """
metrics: [log_loss]
schema: {columns: [{kind: label, name: clicked}, {kind: id, name: user}]}
model: {kind: lr}
stream:
  kind: join
  impressions: {kind: follow, directory: shown, settle_seconds: 0.01}
  outcomes: {kind: follow, directory: clicks, settle_seconds: 0.01}
  "on": id
  within: 20
  time: at
  label: clicked
fit: {stream_batch_size: 32}
checkpoint: {every_steps: 1}
output: joined
"""


def test_inspect_of_a_job_shows_what_its_join_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("join.yaml").write_text(JOIN_JOB)
    for name, late in (("shown", 0), ("clicks", 4)):
        Path(name).mkdir()
        events = [
            {"id": row, "user": row % 7, "at": 1_700_000_000 + row + late} for row in range(200)
        ]
        file = Path(name, "a.jsonl")
        file.write_text("".join(json.dumps(event) + "\n" for event in events))
        os.utime(file, (1_700_000_000, 1_700_000_000))  # it has settled
    code, before, error = call(capsys, monkeypatch, "inspect", "join.yaml")
    assert code == 0, error
    assert "not trained yet" in before
    assert "open_impressions" not in before
    code, _, error = call(capsys, monkeypatch, "online", "join.yaml", "--max-steps", "5")
    assert code == 0, error
    join = describe_checkpoint("joined/checkpoint")["join"]
    assert join["open_impressions"] > 0
    for changes in ([], ["--set", "loss=mse"]):
        code, printed, _ = call(capsys, monkeypatch, "inspect", "join.yaml", *changes)
        assert code == 0
        lines = [re.sub(r"[^\w: -]+", " ", line).split() for line in printed.splitlines()]
        assert ["open_impressions", f"{join['open_impressions']}"] in lines
        assert ["impressions", "200"] in lines
        assert ["newest", "of", "input", "0", "2023-11-14", "22:16:39", "UTC"] in lines
        assert ("not the trained model" in printed) == bool(changes)


def test_exported_model_scores_files_as_the_job_does(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, error = call(capsys, monkeypatch, "export", "job.yaml")
    assert code == 2
    assert "not trained yet" in error
    call(capsys, monkeypatch, "train", "job.yaml")
    code, printed, error = call(capsys, monkeypatch, "export", "job.yaml")
    assert code == 0, error
    manifest = json.loads(next((folder / "out/export").glob("*/MANIFEST.json")).read_text())
    rows = sum(table["rows"] for table in manifest["tables"])
    size = sum(file["bytes"] for file in manifest["files"].values())
    assert f"1 tables, {rows:,} rows, {size:,} bytes, learned until 2020-10-" in printed
    assert f"digest {manifest['digest']}" in printed
    assert "serve it: hotbed serve model=out/export" in printed
    asked = printed.partition("ask it: ")[2]
    address, data = shlex.split(asked)[2:5:2]
    assert address == "localhost:8000/v2/models/model/infer"
    inputs = {each["name"]: each["data"] for each in json.loads(data)["inputs"]}
    assert hb.InferenceSession("out/export").predict(inputs).shape == (1,)
    # the stream's last event: it is the newest state
    assert manifest["learned"] == 1_600_000_000 + 499 * 3600

    call(
        capsys,
        monkeypatch,
        "predict",
        "job.yaml",
        "--set",
        "predict={kind: parquet, path: rows.parquet}",
    )
    table = pq.read_table("rows.parquet").drop_columns(["clicked"])
    pq.write_table(table[:300], "a.parquet")
    pq.write_table(table[300:], "b.parquet")
    code, printed, error = call(
        capsys,
        monkeypatch,
        "predict",
        "out/export",
        "a.parquet",
        "b.parquet",
        "--out",
        "scores.parquet",
    )
    assert code == 0, error
    assert "500 predictions" in printed
    call(
        capsys,
        monkeypatch,
        "predict",
        "job.yaml",
        "--set",
        "predict={kind: parquet, path: [a.parquet, b.parquet]}",
        "--out",
        "unlabelled.parquet",
    )
    assert pq.read_table("unlabelled.parquet").equals(pq.read_table("out/predictions.parquet"))
    ours, theirs = pq.read_table("out/predictions.parquet"), pq.read_table("scores.parquet")
    assert np.abs(ours["clicked"].to_numpy() - theirs["prediction"].to_numpy()).max() < 1e-6
    pyarrow.csv.write_csv(table, "rows.csv")
    code, _, error = call(
        capsys, monkeypatch, "predict", "out/export", "rows.csv", "--keep", "at,user"
    )
    assert code == 0, error
    kept = pq.read_table("predictions.parquet")
    assert kept.select(["at", "user"]).equals(table.select(["at", "user"]))
    assert kept.drop_columns(["at", "user"]).equals(theirs)
    whole = pq.read_table("rows.parquet")
    source = "predict={kind: parquet, path: rows.parquet}"
    call(capsys, monkeypatch, "predict", "job.yaml", "--set", source, "--keep", "user,clicked")
    kept = pq.read_table("out/predictions.parquet")
    assert kept.column_names == ["user", "clicked", "predicted_clicked"]
    assert kept.select(["user", "clicked"]).equals(whole.select(["user", "clicked"]))
    assert kept["predicted_clicked"].equals(ours["clicked"])
    pq.write_table(whole.slice(0, 0), "none.parquet")
    source = "predict={kind: parquet, path: none.parquet}"
    code, _, error = call(
        capsys, monkeypatch, "predict", "job.yaml", "--set", source, "--keep", "user"
    )
    assert code == 0, error
    assert pq.read_table("out/predictions.parquet").column_names == ["user", "clicked"]
    code, _, error = call(
        capsys, monkeypatch, "predict", "out/export", "rows.csv", "--keep", "colour"
    )
    assert code == 2
    assert "colour" in error


def test_wrong_exports_and_scorings_are_errors(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call(capsys, monkeypatch, "train", "job.yaml")
    call(capsys, monkeypatch, "export", "out", "--out", "model")
    (folder / "text.csv").write_text("user,price\nann,1\n")
    (folder / "bad.csv").write_text("user,price\n1,1\n2,\n")
    (folder / "none.csv").write_text("user,price\n")
    checkpoint.save(folder / "own", checkpoint.State(torch.nn.Linear(2, 1)))
    for arguments, message in [
        (["export", "out"], "--out: missing"),
        (["export", "own", "--out", "x"], "Give the job"),
        (["export", "model", "--out", "x"], "expected a state, got published values"),
        (["predict", "job.yaml", "rows.parquet"], "a job scores the files it names"),
        (["predict", "model"], "an exported model scores files"),
        (["predict", "out", "rows.parquet"], "Export the model first"),
        (["predict", "model", "rows.xls"], "unknown kind of file"),
        (["predict", "model", "rows.parquet", "bad.csv"], "several kinds"),
        (["predict", "model", "text.csv"], "it held integer values in training"),
        (["predict", "model", "bad.csv"], "bad.csv, line 3"),
        (["predict", "model", "none.csv"], "no rows"),
    ]:
        code, _, error = call(capsys, monkeypatch, *arguments)
        assert code == 2, arguments
        assert message in error, arguments
    assert not [path for path in folder.iterdir() if "predictions" in path.name]


def test_online_learns_the_past_once_and_then_resumes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, first, _ = call(capsys, monkeypatch, "online", "job.yaml", "--max-steps", "1")
    assert code == 0
    assert "training dnn" in first
    assert "rows after train" in first
    code, second, _ = call(capsys, monkeypatch, "online", "job.yaml")
    assert code == 0
    assert "training dnn" not in second
    assert "stream: progressive auc" in second
    publish = "checkpoint.publish={kind: publish_directory, path: served}"
    call(capsys, monkeypatch, "online", "job.yaml", "--set", "output=whole", "--set", publish)
    assert (folder / "served" / "CURRENT").exists()

    code, same, _ = call(capsys, monkeypatch, "diff", "out/checkpoint", "whole/checkpoint")
    assert code == 0, same
    assert "the same content" in same
    code, verified, _ = call(capsys, monkeypatch, "verify", "out/checkpoint")
    assert code == 0
    assert "is whole" in verified
    code, shown, _ = call(capsys, monkeypatch, "inspect", "out/checkpoint")
    assert code == 0
    assert "version 14" in shown  # 10 steps of train, 4 of the stream
    assert "norms of rows" in shown
    code, evaluated, _ = call(capsys, monkeypatch, "evaluate", "job.yaml")
    assert code == 0
    assert "evaluation: auc" in evaluated


@pytest.mark.parametrize("scheme", [pytest.param("file://", marks=pytest.mark.soak), "memory://"])
def test_output_of_a_job_may_be_a_url(
    scheme: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command finds what the one before wrote, and nothing lands in a folder named after the
    scheme.
    """
    output = f"{scheme}{folder}/urls/out"
    to = ("--set", f"output={output}")
    for command in (
        ["online", "job.yaml", *to, "--max-steps", "1"],
        ["online", "job.yaml", *to],
        ["evaluate", "job.yaml", *to],
        ["predict", "job.yaml", *to],
        ["export", "job.yaml", *to],
        ["inspect", f"{output}/checkpoint"],
        ["predict", f"{output}/export", "rows.parquet", "--out", f"{output}/scored.parquet"],
    ):
        code, printed, errors = call(capsys, monkeypatch, *command)
        assert code == 0, errors
        assert ("training dnn" in printed) == ("--max-steps" in command)
    code, _, errors = call(capsys, monkeypatch, "train", "job.yaml", *to)
    assert code == 2
    assert "`hotbed online`" in errors
    code, _, errors = call(capsys, monkeypatch, "train", "job.yaml", *to, "--restart")
    assert code == (0 if scheme == "file://" else 2)
    filesystem, root = fsspec.core.url_to_fs(output)
    names = {path.rpartition("/")[2] for path in filesystem.ls(root, detail=False)}
    assert {
        "job.json",
        "report.html",
        "predictions.parquet",
        "scored.parquet",
        "export",
        "checkpoint",
    } <= names
    table = pq.read_table(filesystem.open(f"{root}/scored.parquet"))
    assert table.num_rows == 500
    strays = [path.name for path in folder.iterdir() if ":" in path.name]
    assert strays == []


def test_rollback_returns_to_an_earlier_state_and_its_old_name_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps in ("1", "2"):
        call(capsys, monkeypatch, "online", "job.yaml", "--max-steps", steps)
    code, _, errors = call(capsys, monkeypatch, "restore", "out/checkpoint", "--state", "2")
    assert code == 2
    assert "Run 'hotbed rollback out/checkpoint --state 2'" in " ".join(errors.split())
    code, _, errors = call(capsys, monkeypatch, "rollback", "out/checkpoint")
    assert code == 2
    assert "Choose one of: 1, 2, 3" in " ".join(errors.split())
    code, printed, _ = call(capsys, monkeypatch, "rollback", "out/checkpoint", "--state", "2")
    assert code == 0
    assert "resumes from checkpoint-00000002: delta" in printed
    assert "aside: checkpoint-00000003" in printed
    assert hb.load("out/checkpoint").counters["steps"] == 11


def test_earlier_state_is_published_from_states_and_from_a_job(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps in ("1", "2"):
        call(capsys, monkeypatch, "online", "job.yaml", "--max-steps", steps)
    numbers = []
    for what in ("out/checkpoint", "job.yaml"):
        for state in (["--state", "2"], []):
            code, printed, _ = call(capsys, monkeypatch, "publish", what, "--to", "served", *state)
            assert code == 0
            assert "is version" in printed
            published = hb.checkpoints.open_checkpoint("served")
            assert published.links[0].manifest.graph is not None  # a server needs nothing else
            version = published.manifest
            numbers.append((version.version, version.counters["steps"]))
    assert [steps for _, steps in numbers] == [11, 12, 11, 12]
    assert [number for number, _ in numbers] == [11, 12, 13, 14]
    code, printed, _ = call(capsys, monkeypatch, "publish", "job.yaml", "--to", "served")
    assert "is the newest version there already" in printed
    code, _, errors = call(capsys, monkeypatch, "publish", "job.yaml", "--to", "x", "--state", "9")
    assert code == 2
    assert "Choose one of: 1, 2, 3" in " ".join(errors.split())


def test_held_state_is_published_by_force_and_rolled_back(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = (HeldEntry(rule="loss", reason="loss is 2, usual is at most 1"),)
    monkeypatch.setattr(Gatekeeper, "decide", lambda _, run: reasons if run.step > 1 else ())
    gate = "checkpoint={publish: {kind: publish_directory, path: served}, gate: {}}"
    for steps in ("1", "2"):
        call(capsys, monkeypatch, "online", "job.yaml", "--max-steps", steps, "--set", gate)
    assert hb.checkpoints.open_checkpoint("served").manifest.counters["steps"] == 11
    code, shown, _ = call(capsys, monkeypatch, "inspect", "out/checkpoint")
    assert "held      loss is 2" in shown
    publish = ["publish", "job.yaml", "--to", "served"]
    code, _, errors = call(capsys, monkeypatch, *publish)
    assert code == 2
    assert "a gate held this state, got loss is 2" in " ".join(errors.split())
    code, _, _ = call(capsys, monkeypatch, *publish, "--force", "the labels are right")
    assert code == 0
    code, shown, _ = call(capsys, monkeypatch, "inspect", "served")
    assert "forced    the labels are right" in shown
    code, _, errors = call(capsys, monkeypatch, "rollback", "out/checkpoint", "--good", "--to", "1")
    assert code == 2
    assert "expected --good or a number" in " ".join(errors.split())
    code, printed, _ = call(capsys, monkeypatch, "rollback", "out/checkpoint", "--good")
    assert code == 0
    assert "resumes from checkpoint-00000002" in printed


def test_a_difference_is_shown_and_a_torn_checkpoint_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for output, steps in (("one", "1"), ("two", "2")):
        call(
            capsys,
            monkeypatch,
            "online",
            "job.yaml",
            "--max-steps",
            steps,
            "--set",
            f"output={output}",
        )
    code, shown, _ = call(capsys, monkeypatch, "diff", "one/checkpoint", "two/checkpoint")
    assert code == 1
    assert "user" in shown
    assert "network/" in shown
    assert "counters" in shown
    part = next(Path("two/checkpoint").rglob("rows-*.arrow"))
    part.write_bytes(part.read_bytes()[:-1])
    code, _, errors = call(capsys, monkeypatch, "verify", "two/checkpoint")
    assert code == 2
    assert part.name in errors


def test_a_job_starts_from_the_rows_of_another(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call(capsys, monkeypatch, "train", "job.yaml", "--set", "output=old")
    renamed = (
        "--set",
        "schema.columns.user.table=member",
        "--set",
        "output=new",
        "--set",
        "train=null",
        "--set",
        "schema.columns.price.transforms=[]",
        "--max-steps",
        "0",
    )
    start = ("--set", "warm_start={path: old/checkpoint, rename: {user: member}}")
    code, printed, _ = call(capsys, monkeypatch, "online", "job.yaml", *renamed, *start)
    assert code == 0
    assert "of user in old/checkpoint" in printed
    there, here = hb.load("old").tables["user"], hb.load("new/checkpoint").tables["member"]
    assert len(here) == len(there) > 0
    ids = np.concatenate([batch.column("id").to_numpy() for batch in there.export()])
    np.testing.assert_array_equal(here.lookup(ids), there.lookup(ids))


def test_train_keeps_the_state_of_a_stream_without_restart(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = folder / "out" / "checkpoint"
    _, first, _ = call(capsys, monkeypatch, "train", "job.yaml")
    before = {path: path.stat().st_mtime_ns for path in states.rglob("*")}
    # a model that is trained anew would not be the newest
    for sets in ((), ("--set", "stream=null")):
        code, printed, errors = call(capsys, monkeypatch, "train", "job.yaml", *sets)
        assert code == 2
        assert "training" not in printed
        assert "`hotbed online`" in errors
        assert "`hotbed train --restart`" in errors
    with Lock(states / "journal"):  # as a live `hotbed online` has it
        for command in (
            ["train", "job.yaml"],
            ["train", "job.yaml", "--restart"],
            ["online", "job.yaml"],
        ):
            code, printed, errors = call(capsys, monkeypatch, *command)
            assert code == 2
            assert "training" not in printed
            assert "another run" in errors
    assert {path: path.stat().st_mtime_ns for path in states.rglob("*")} == before

    code, again, _ = call(capsys, monkeypatch, "train", "job.yaml", "--restart")
    assert code == 0
    tables = [
        next(line for line in text.splitlines() if "│ user" in line) for text in (first, again)
    ]
    assert tables[0] == tables[1]
    code, same, _ = call(capsys, monkeypatch, "diff", "out/checkpoint", "out/checkpoint.aside-1")
    assert code == 0, same


def test_a_job_of_a_stream_alone_is_followed_but_not_trained(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Path("job.yaml").read_text().replace(", transforms: [normalize]", "")
    Path("alone.yaml").write_text(text)
    sets = ("--set", "train=null", "--set", "stream.start=0.0")
    code, _, errors = call(capsys, monkeypatch, "train", "alone.yaml", *sets)
    assert code == 2
    assert "use `hotbed online`" in " ".join(errors.split())
    code, followed, _ = call(capsys, monkeypatch, "online", "alone.yaml", *sets)
    assert code == 0
    assert "rows after stream" in followed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nothing.yaml"], "ConfigError nothing.yaml: cannot be read"),
        (
            ["train", "job.yaml", "--set", "modle.kind=lr"],
            "ConfigError job.modle: unknown key of job",
        ),
        (
            ["train", "job.yaml", "--set", "model.hiden=[3]"],
            "ConfigError job.model.hiden: unknown key of dnn",
        ),
        (
            ["train", "job.yaml", "--set", "metrics=[acu]"],
            "ConfigError job.metrics.0.kind: unknown kind, got 'acu'",
        ),
        (
            ["train", "job.yaml", "--set", "callbacks=[evikt]"],
            "ConfigError job.callbacks.0.kind: unknown kind",
        ),
        (
            ["train", "job.yaml", "--set", "loss=bec"],
            "ConfigError job.loss.kind: unknown kind, got 'bec'",
        ),
        (["train", "job.yaml", "--set", "fit.epochs"], "ConfigError --set: no '='"),
        (["online", "job.yaml", "--set", "stream=null"], "ConfigError job.stream: missing key"),
        (
            ["train", "job.yaml", "--set", "checkpoint.every_step=3"],
            "ConfigError job.checkpoint.every_step: unknown key of checkpoint",
        ),
        (
            ["train", "job.yaml", "--set", "stream=null", "--set", "train=null"],
            "ConfigError job.train: missing key",
        ),
        (["verify", "nowhere"], "FormatError nowhere: there is no checkpoint"),
        (
            ["train", "job.yaml", "--set", "warm_start={path: a, renam: {}}"],
            "ConfigError job.warm_start.renam: unknown key of warm_start",
        ),
        (["evaluate", "job.yaml", "--set", "valid=null"], "ConfigError job.valid: missing key"),
        (["evaluate", "job.yaml"], "ConfigError job: not trained yet"),
        (["predict", "job.yaml"], "ConfigError job: not trained yet"),
        (
            ["evaluate", "."],
            "ConfigError .: not a job file, got a folder or URL. Give the job file",
        ),
        (["predict", "job.yaml", "--set", "valid=null"], "ConfigError job.predict: missing key"),
        (["init", "rows.parquet", "--out", "job.yaml"], "ConfigError job.yaml: the file exists"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    code, _, errors = call(capsys, monkeypatch, *arguments)
    assert code == 2
    assert " ".join(errors.split()).startswith(message)


def test_init_writes_a_job_that_trains(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, errors = call(capsys, monkeypatch, "init", "rows.parquet", "--out", "drafted.yaml")
    assert code == 0, errors
    assert [type(column).__name__ for column in Job.read("drafted.yaml").schema.columns] == [
        "Label",
        "Time",
        "Id",
        "Dense",
    ]
    code, printed, errors = call(capsys, monkeypatch, "train", "drafted.yaml")
    assert code == 0, errors
    assert "validation auc" in printed


def test_a_draft_guesses_roles_from_names_types_and_values(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    rows = [
        f"{i},{i % 7},{'a|b' if i % 2 else 'c'},{i * 1.5},{1_600_000_000_000 - i},{i % 5 / 2},same,{i % 3}"
        for i in range(300)
    ]
    path.write_text("\n".join(["row_id,shop_id,tags,price,time,rating,constant,kind", *rows]))
    text = draft(str(path))
    job = Job.from_json(yaml.safe_load(text.replace("1e-3", "0.001")))
    columns = {column.name: column for column in job.schema.columns}
    assert columns["rating"] == hb.Label("rating", threshold=1.5)
    assert columns["time"] == hb.Time("time", unit="ms")
    assert columns["tags"] == hb.Id("tags", pooling="mean", transforms=[hb.transforms.Split("|")])
    assert isinstance(columns["price"], hb.Dense)
    assert isinstance(columns["shop_id"], hb.Id)
    assert isinstance(columns["kind"], hb.Id)
    assert {"constant", "row_id"}.isdisjoint(columns)
    assert "left out: always the same value" in text
    assert isinstance(job.train.source, hb.sources.Sort)  # the file is not in time order
    assert draft(str(path), label="kind").count("kind: label, name: kind") == 1


def test_a_draft_of_the_shipped_data_needs_no_correction() -> None:
    text = draft(str(ROOT / "data" / "ml_latest_small" / "ratings.csv"))
    assert "{kind: label, name: rating, threshold: 4}" in text
    assert parse_value(text)["base_rate"] == 0.48
    assert "{kind: time, name: timestamp, unit: s}" in text
    assert {"kind": "early_stopping", "metric": "log_loss", "patience": 1} in parse_value(text)[
        "callbacks"
    ]
    assert {"kind": "best_weights", "metric": "log_loss"} in parse_value(text)["callbacks"]


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("a.csv", "a,b,c\n1,2,3\n4,5,6\n7,8,9\n", SchemaError, "no column looks like a label"),
        (
            "a.csv",
            "user,item\n1,2\n4,5\n7,8\n",
            SchemaError,
            "If every row is something that happened .* --prepare drafts",
        ),
        (
            "a.csv",
            "1,55135,x\n0,3,y\n",
            SchemaError,
            r"the first line is data and not a header, got '1', '55135', 'x'. .*--columns c1,c2,c3",
        ),
        ("a.csv", "1,1,x\n0,3,y\n", SchemaError, "the first line is data and not a header"),
        (
            "a.csv",
            "user,user,label\n1,1,0\n",
            SchemaError,
            r"columns \['user'\] appear twice in the header. Name all 3 columns with --columns",
        ),
        ("a.csv", "x,label\n", SchemaError, "no rows"),
        ("a.csv", "label\n1\n0\n", SchemaError, "no column to predict from"),
        ("a.xml", "<a/>", ConfigError, "unknown kind of file"),
    ],
)
def test_draft_of_an_unusable_file_is_an_error_that_says_why(
    tmp_path: Path, name: str, text: str, error: type[Exception], message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        draft(str(tmp_path / name))


def test_a_draft_names_the_columns_of_a_file_without_a_header(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "\n".join(f"{row % 2}\t{row % 7}\tshop {row % 3}" for row in range(60))
    (tmp_path / "a.tsv").write_text(rows)
    code, _, errors = call(capsys, monkeypatch, "init", "a.tsv", "--columns", "clicked, user,shop")
    assert code == 0, errors
    job = Job.read("job.yaml")
    assert job.train == hb.sources.Csv(
        "a.tsv", "\t", header=False, columns=("clicked", "user", "shop")
    ).slice(stop=0.8)
    assert [column.name for column in job.schema.columns] == ["clicked", "user", "shop"]
    (tmp_path / "b.tsv").write_text("x\tx\ty\n" + rows)
    source = draft("b.tsv", columns=["clicked", "user", "shop"])
    assert "columns: [clicked, user, shop]}" in source
    assert "header" not in source
    with pytest.raises(ConfigError, match="the first line has 3 fields, got 2 names in --columns"):
        draft("a.tsv", columns=["clicked", "user"])


def test_draft_distinguishes_ids_from_amounts(tmp_path: Path) -> None:
    """Also where a name says nothing: neighbours are about equally frequent in counts, not in
    codes.
    """
    rng = np.random.default_rng(0)
    codes = rng.permutation(60_000)[np.minimum(rng.zipf(1.3, 5000), 59_999)]
    columns = {
        "label": rng.integers(0, 2, 5000),
        "C3": rng.poisson(300, 5000),
        "x1": codes,
        "x2": rng.poisson(300, 5000),
        "x3": np.where(rng.random(5000) < 0.9, 0, codes),
        "total_price": codes,
    }
    pl.DataFrame(columns).write_parquet(tmp_path / "a.parquet")
    roles = {
        line["name"]: line["kind"]
        for line in parse_value(draft(str(tmp_path / "a.parquet")))["schema"]["columns"]
    }
    assert roles == {
        "label": "label",
        "C3": "id",
        "x1": "id",
        "x2": "dense",
        "x3": "dense",
        "x3_bucket": "id",  # with a long tail: an id for each quantile, too
        "total_price": "dense",
    }


def test_a_drafted_dense_column_lies_within_ten_deviations(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    flag = np.where(np.arange(5000) % 1000 == 0, 1.0, 0.0)
    columns = {
        "label": rng.integers(0, 2, 5000),
        "flag": flag,
        "rare": 500.5 * flag,
        "plain": rng.normal(size=5000),
    }
    pl.DataFrame(columns).write_parquet(tmp_path / "a.parquet")
    spec = parse_value(draft(str(tmp_path / "a.parquet")))
    job = Job.from_json(spec)
    schema = job.fitted()
    assert schema["flag"].transforms == ()
    (batch,) = hb.Dataset(hb.sources.Parquet(tmp_path / "a.parquet"), schema, 5000)
    assert {name: bool(np.abs(values).max() <= 10) for name, values in batch.dense.items()} == {
        "flag": True,
        "rare": True,
        "plain": True,
    }
    assert spec["fit"]["batch_size"] == 128


def test_doctor_names_every_part() -> None:
    result = CliRunner().invoke(cli.app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    parts = (
        "hotbed python core torch kafka device memory fsspec onnxruntime grpcio uvicorn httptools"
    )
    for part in parts.split():
        assert part in result.output


def test_doctor_shows_the_limit_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [MemoryLimit(900 << 20, 1, "the container"), MemoryLimit(24 << 30, 1, "this machine")]
    monkeypatch.setattr(doctor, "memory_limits", lambda: limits)
    (memory,) = (part for part in doctor.diagnose() if part.name == "memory")
    assert memory.state == "0.9 GiB of the container, 24.0 GiB of this machine"


def test_doctor_measures_a_disk_and_leaves_nothing_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages: list[Stage] = []
    speed = disk.measure(str(tmp_path), stages.append, file_bytes=32 << 20, round_seconds=0.02)
    assert not list(tmp_path.iterdir())
    assert {stage.name for stage in stages if stage.done == stage.total} == {
        "write",
        "read",
        "sync",
    }
    engines = ["io_uring", "threads"] if _core.can_use_uring() else ["threads"]
    assert list(speed.reads) == [(engine, depth) for engine in engines for depth in (1, 32)]
    assert min(*speed.reads.values(), speed.write_bytes, *speed.sync_seconds) > 0
    disk.print_disk(speed)
    printed = capsys.readouterr().out
    assert f"{speed.reads['threads', 32]:,.0f}" in printed
    assert f"fdatasync of a block: {1e3 * speed.sync_seconds[0]:.2f} ms" in printed


def test_doctor_does_all_that_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(disk, "measure", lambda folder, update: folder)
    monkeypatch.setattr(disk, "print_disk", done.append)
    monkeypatch.setattr("hotbed.cli.device.print_checks", lambda name: not done.append(name))
    monkeypatch.setattr(cli, "_run_on_ranks", lambda ranks, arguments: done.append(ranks))
    arguments = ["doctor", "--ranks", "2", "--disk", "here", "--device", "cuda"]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    assert done == ["here", "cuda", 2]


def test_doctor_names_a_disk_that_it_cannot_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, problem = call(capsys, monkeypatch, "doctor", "--disk", str(tmp_path / "none"))
    assert code == 2
    assert "--disk: does not exist" in problem
    with pytest.raises(ConfigError, match=r"--disk: .* bytes free in"):
        disk.measure(str(tmp_path), print, file_bytes=2**60)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))  # as a quota
    try:
        with pytest.raises(NotWritten, match=r"--disk: .*cannot be written: File too large"):
            disk.measure(str(tmp_path), print, file_bytes=32 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_serve_says_that_a_model_may_lie_at_a_parameter_server() -> None:
    assert (
        "grpc://HOST:PORT"
        in CliRunner().invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    )


@pytest.mark.parametrize(
    ("verb", "words"),
    [("serve", "of the server"), ("parameter-server", "of the server"), ("train", "of the job")],
)
def test_help_of_set_says_whose_values_they_are(verb: str, words: str) -> None:
    text = CliRunner().invoke(cli.app, [verb, "--help"], env={"COLUMNS": "200"}).output
    assert f"Set one value {words}" in text


def test_options_that_messages_and_pages_name_are_there() -> None:
    commands = typer.main.get_command(cli.app).commands
    options = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in commands.items()
    }
    wrong = []
    for file in (*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"):
        named = re.findall(r"\bhotbed ([a-z]+)(?: [\w.=/]+)* (--[a-z-]+)", file.read_text())
        for verb, option in named:
            if option not in options.get(verb, option):
                wrong.append(f"{file.relative_to(ROOT)}: hotbed {verb} {option}")
    assert wrong == []


def test_schema_prints_the_json_schema() -> None:
    result = CliRunner().invoke(cli.app, ["schema"])
    assert json.loads(result.output) == json.loads((ROOT / "docs" / "job.schema.json").read_text())


def test_a_command_that_native_code_crashes_prints_what_each_thread_did() -> None:
    code = (
        "import os, signal\n"
        "from hotbed.cli import commands\n"
        "commands.app = lambda: os.kill(os.getpid(), signal.SIGSEGV)\n"
        "commands.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert "in main" in done.stderr
