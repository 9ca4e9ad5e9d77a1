# SPDX-License-Identifier: Apache-2.0
"""Classes of other packages take the places of kinds: a job names them by module and name."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed import config, plugins
from hotbed.errors import ConfigError, PersistError
from hotbed.job import run
from hotbed.persist.state.resume import refused_changes
from hotbed.persist.upkeep.inspect import diff

PARTS = """
import os
import signal
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import nn

import hotbed as hb
from own_layers import Gate


class GateNet(nn.Module):
    def __init__(self, schema: hb.Schema, tables: object, width: int = 4, gate: bool = True):
        super().__init__()
        self.inputs = hb.models.layers.FeatureInputs(schema, tables)
        self.gate = Gate(self.inputs.output_dim) if gate else nn.Identity()
        self.out = nn.Sequential(nn.Linear(self.inputs.output_dim, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, batch):
        return self.out(self.gate(self.inputs(batch))).squeeze(1)


class Hinge(hb.losses.Loss):
    def __init__(self, margin: float = 1.0):
        self.margin = margin

    def _mean(self, prediction, label, weight):
        return (self.margin - (2 * label - 1) * prediction).clamp_min(0).mean()


class Share(hb.metrics.Metric):
    def clear(self):
        self.sums = [0.0, 0.0]

    def add(self, samples):
        self.sums[0] += float(samples.label.sum())
        self.sums[1] += len(samples.label)

    def eval(self):
        return self.sums[0] / self.sums[1] if self.sums[1] else float("nan")

    def state(self):
        return {"sums": list(self.sums)}

    def load_state(self, state):
        self.sums = list(state["sums"])

    def merge(self, later):
        self.sums = [mine + other for mine, other in zip(self.sums, later.sums)]


@dataclass(frozen=True)
class Half(hb.transforms.Transform):
    by: float = 2.0

    def apply(self, values, context):
        return pc.divide(values.cast("float64"), self.by)


class Counter:
    def __init__(self, path: str):
        self.path = path
        self.steps = 0

    def on_step_end(self, run):
        self.steps += 1
        if os.environ.get("OWN_KILL") == f"{self.path} {self.steps}":
            os.kill(os.getpid(), signal.SIGKILL)
        with open(self.path, "a") as file:
            file.write("x")

    def barrier(self, step, now):
        return False


@dataclass(frozen=True)
class Column(hb.sources.Source):
    name: str
    rows: int = 3

    def schema(self):
        return pa.schema([(self.name, pa.int64())])

    def read(self, position=None, batch_rows=65_536, plan=hb.sources.ReadPlan()):
        yield from hb.sources.Memory({self.name: [*range(self.rows)]}).read(position, batch_rows, plan)


@dataclass(frozen=True)
class Patient(hb.sources.Wait):
    pass


class Open(nn.Module):
    def __init__(self, **settings):
        super().__init__()


class Unwilling(nn.Module):
    def __init__(self, key: str = "absent"):
        super().__init__()
        {}[key]


not_a_class = 3
"""

LAYERS = """
import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Linear(width, width)

    def forward(self, x):
        return x * torch.sigmoid(self.weight(x))
"""

JOB = """
schema:
  columns:
    - {kind: label, name: clicked}
    - {kind: id, name: user}
    - {kind: dense, name: price, transforms: [{kind: "own_parts:Half", by: 4.0}]}
model: {kind: "own_parts:GateNet", width: 8}
loss: own_parts:Hinge
metrics: [auc, "own_parts:Share"]
train: {kind: slice, stop: 200, source: &rows {kind: parquet, path: rows.parquet}}
valid: {kind: slice, start: 200, source: *rows}
stream: {kind: slice, start: 200, source: *rows}
callbacks: [{kind: "own_parts:Counter", path: steps}]
stream_callbacks: [{kind: "own_parts:Counter", path: stream_steps}]
tables: {dim: 4}
fit: {batch_size: 32, torch_threads: 1}
grains: 2
output: out
"""


@pytest.fixture(scope="module", autouse=True)
def _without_traces() -> Iterator[None]:
    """Leave no class in the process: it would be a kind in other files of tests."""
    yield
    config.parameters.cache_clear()
    gc.collect()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a job, its own classes beside it, and 300 rows."""
    user = np.arange(300) % 20
    rows = pa.table({"clicked": user % 2, "user": user, "price": user * 1.0})
    pq.write_table(rows, tmp_path / "rows.parquet")
    (tmp_path / "own_parts.py").write_text(PARTS)
    (tmp_path / "own_layers.py").write_text(LAYERS)
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    _forget()


def _forget() -> None:
    """Let the next import read the files again, as another process does."""
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]
    plugins._digest_of.cache_clear()


def test_job_of_own_classes_is_trained_evaluated_exported_and_loaded(folder: Path) -> None:
    job = hb.Job.read("job.yaml")
    learned = run.train(job)
    assert type(learned.model.network).__name__ == "GateNet"
    assert Path("steps").read_text() == "x" * 7
    written = json.loads(Path("out/job.json").read_text())
    assert written["model"] == {"kind": "own_parts:GateNet", "width": 8}
    assert set(written["classes"]) == {
        f"own_parts:{name}" for name in ("GateNet", "Hinge", "Share", "Half", "Counter")
    }
    assert hb.Job.read("out/job.json").to_json() == written
    scores = run.evaluate(job).metrics
    assert set(scores) == {"loss", "auc", "share"}
    assert run.inspect(job).settings["classes"] == written["classes"]

    exported = run.export(job)
    expected = pq.read_table(run.predict(job).path)["clicked"].to_numpy()
    predictions = run.predict_files(exported.path, ["rows.parquet"], "scores.parquet")
    served = pq.read_table(predictions.path).column(0).to_numpy()[200:]
    np.testing.assert_allclose(served, expected, atol=1e-6)
    loaded = hb.load("out/checkpoint")
    assert loaded.network.out[0].out_features == 8
    assert loaded.evaluate(job.dataset(job.valid, loaded.schema)) == dict(scores)


def test_changed_source_is_refused_by_name_at_a_resume_and_an_evaluation(folder: Path) -> None:
    run.online(hb.Job.read("job.yaml"), max_steps=8)
    Path("own_layers.py").write_text(LAYERS.replace("sigmoid", "tanh"))
    _forget()
    job = hb.Job.read("job.yaml")
    for command in (run.online, run.evaluate, run.export):
        with pytest.raises((ConfigError, PersistError), match=r"classes\.own_parts:GateNet"):
            command(job)
    with pytest.raises(PersistError, match=r"classes\.own_parts:GateNet.*allow="):
        hb.load("out/checkpoint")
    with pytest.raises(ConfigError, match=r"job\.classes: the source of own_parts:\w+ was sha256"):
        hb.Job.read("out/job.json")
    assert hb.load("out/checkpoint", allow=["classes.*"]).counters["samples"] > 0
    allowed = hb.Job.read("job.yaml", {"checkpoint": {"allow": ["classes.*"]}})
    assert run.online(allowed).model.counters["samples"] == 300


@pytest.mark.parametrize(
    ("key", "kind", "message"),
    [
        (
            "model",
            "own_absent:GateNet",
            r"model\.kind: cannot be .*ModuleNotFoundError.*PYTHONPATH",
        ),
        ("model", "own_broken:Net", r"model\.kind: .*ZeroDivisionError.*own_broken\.py, line 2"),
        ("model", "own_torn:Net", r"model\.kind: .*SyntaxError: .*own_torn\.py, line 1"),
        ("model", "own_needs:Net", r"model\.kind: .*No module named 'absent_package'.*line 1"),
        ("model", "own_exits:Net", r"model\.kind: cannot be imported.*SystemExit"),
        ("model", "own_parts:GateNets", r"model\.kind: there is no 'GateNets' in .*own_parts\.py"),
        ("model", "own_parts:not_a_class", r"model\.kind: not a class, got .* is int"),
        ("model", "own_parts:Half", r"model\.kind: must be a class below torch\.nn.*Module"),
        ("loss", "own_parts:GateNet", r"loss\.kind: must be a class below hotbed\.models\.losses"),
        ("metrics", ["own_parts:Half"], r"metrics\.0\.kind: must be a class below .*Metric"),
        ("callbacks", ["own_parts:Half"], r"callbacks\.0\.kind: .* a method such as on_step_end"),
        ("stream_callbacks", ["x:"], r"stream_callbacks\.0\.kind: unknown kind.* as module:name"),
        ("model", "own-parts:GateNet", r"model\.kind: unknown kind.* as module:name"),
        ("model", "own_parts:Open", r"model\.kind: Open: expected named parameters only"),
        ("loss", "hotbed.models.losses:Loss", r"loss\.kind: it lacks methods.* Define _mean"),
        (
            "tables.rule",
            {"kind": "own_parts:Half"},
            r"tables\.rule\.kind: .*whose core computes it",
        ),
        ("train", {"kind": "own_parts:Half"}, r"train\.kind: must be a class below .*Source"),
        (
            "schema.columns.user.transforms",
            ["own_parts:Gate"],
            r"must be a class below .*Transform",
        ),
        ("schema.columns.price.transforms.0.by", "x", r"by: wrong value, got 'x' .*Give float"),
        ("schema.columns.price.transforms.0.bi", 1, r"bi: unknown key of half, .*'by'"),
        ("loss", {"kind": "own_parts:Hinge", "margin": "wide"}, None),
    ],
)
def test_wrong_own_class_is_an_error_with_its_key(
    folder: Path, key: str, kind: Any, message: str | None
) -> None:
    (folder / "own_broken.py").write_text("\n1 / 0\n")
    (folder / "own_torn.py").write_text("class Net(:\n")
    (folder / "own_needs.py").write_text("import absent_package\n")
    (folder / "own_exits.py").write_text("raise SystemExit(3)\n")
    if message is None:  # keys of networks and losses are read where the model is built
        for changes, text in (
            ({key: kind}, r"^job\.loss\.margin: wrong value.*Give float"),
            ({"model": "own_parts:Unwilling"}, r"^job\.model: unwilling .* got KeyError: 'absent'"),
        ):
            job = hb.Job.read("job.yaml", changes)
            with pytest.raises(ConfigError, match=text):
                job.rec_model(job.fitted())
        return
    with pytest.raises(ConfigError, match=rf"^job\..*{message}"):
        hb.Job.read("job.yaml", {key: kind})


def test_error_names_the_line_of_the_job_unless_the_value_was_set(folder: Path) -> None:
    wrong = JOB.replace("own_parts:GateNet", "own_absent:GateNet")
    (folder / "wrong.yaml").write_text(wrong)
    line = 1 + [text[:6] for text in wrong.splitlines()].index("model:")
    with pytest.raises(ConfigError, match=rf"See line {line} of wrong\.yaml\.$"):
        hb.Job.read("wrong.yaml")
    plain = {**hb.Job.read("job.yaml").to_json(), "model": "own_absent:GateNet"}
    (folder / "tabs.json").write_text(json.dumps(plain, indent="\t"))
    with pytest.raises(ConfigError, match=r"^job\.model\.kind: cannot be imported"):
        hb.Job.read("tabs.json")
    with pytest.raises(ConfigError) as caught:
        hb.Job.read("job.yaml", {"model": "own_absent:GateNet"})
    assert "See line" not in str(caught.value)


def test_folder_of_a_job_hides_no_installed_module_and_is_not_searched_without_need(
    folder: Path,
) -> None:
    (folder / "yaml.py").write_text("raise AssertionError('imported')\n")
    (folder / "other.yaml").write_text(JOB.replace("own_parts:GateNet", "yaml:Loader"))
    with pytest.raises(ConfigError, match=r"model\.kind: must be a class below"):
        hb.Job.read("other.yaml")
    sys.path.remove(str(folder))
    _forget()
    plain = {"model": "lr", "loss": "bce", "metrics": ["auc"]}
    plain |= {"callbacks": [], "stream_callbacks": [], "schema.columns.price.transforms": []}
    hb.Job.read("job.yaml", plain)
    assert str(folder) not in sys.path
    with pytest.raises(ConfigError, match="cannot be imported"):  # a state is no reason to look
        hb.Schema.from_json({"columns": [{"kind": "own_parts:Column", "name": "x"}]})


def test_registered_short_name_is_a_kind(folder: Path) -> None:
    info = folder / "own-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    entries = "[hotbed.kinds]\ngate_net = own_parts:GateNet\nbroken = own_absent:X\n"
    (info / "entry_points.txt").write_text(entries)
    sys.path.append(str(folder))
    job = hb.Job.read("job.yaml", {"model": {"kind": "gate_net", "width": 2}})
    model = job.rec_model(job.fitted())
    assert model.network.out[0].out_features == 2
    assert model.state().model["network"] == {"kind": "own_parts:GateNet", "width": 2}
    with pytest.raises(ConfigError, match=r"job\.model\.kind: cannot be imported, got 'broken'"):
        hb.Job.read("job.yaml", {"model": "broken"})


def test_sources_and_rules_of_joins_may_be_own_classes_where_they_nest(folder: Path) -> None:
    column = {"kind": "own_parts:Column", "name": "user", "rows": 5}
    join = {
        "kind": "join",
        "on": "id",
        "rule": "own_parts:Patient",
        "impressions": {"kind": "kafka", "servers": "a:1", "topic": "views"},
        "outcomes": {
            "clicked": {"source": {"kind": "kafka", "servers": "a:1", "topic": "c"}, "within": 9}
        },
    }
    changes = {"train": {"kind": "slice", "stop": 2, "source": column}, "stream": join}
    job = hb.Job.read("job.yaml", changes)
    assert next(iter(job.train.read()))[0].to_pydict() == {"user": [0, 1]}
    plain = job.to_json()
    assert plain["train"]["source"] == column
    assert plain["stream"]["rule"] == {"kind": "own_parts:Patient"}
    assert hb.Job.from_json(plain) == job


def test_states_with_short_kinds_of_own_classes_resume(folder: Path) -> None:
    before = {"network": "gate_net", "schema.price.transforms": [{"kind": "half", "by": 4.0}]}
    now = {
        "network": "own_parts:GateNet",
        "schema.price.transforms": [{"kind": "own_parts:Half", "by": 4.0}],
    }
    assert not refused_changes(before, now)
    other = {**now, "network": "own_parts:Other"}
    assert refused_changes(before, other) == refused_changes(now, other) == ["network"]


@pytest.mark.soak
def test_two_ranks_and_a_killed_run_train_own_classes_to_the_bits_of_one_process(
    folder: Path,
) -> None:
    def hotbed(verb: str, output: str, *flags: str, kill: str = "") -> int:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "hotbed.cli",
                verb,
                "job.yaml",
                f"--set=output={output}",
                *flags,
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OWN_KILL": kill},
            timeout=300,
        )
        return done.returncode

    # ranks have no baselines of their own accord
    every_step = ("--set=checkpoint.every_steps=1", "--set=baselines=false")
    assert hotbed("online", "one", *every_step) == 0
    assert hotbed("online", "two", *every_step, "--ranks=2") == 0
    assert hotbed("online", "killed", *every_step, kill="stream_steps 3") == -9
    assert hotbed("online", "killed", *every_step) == 0
    assert diff("one/checkpoint", "two/checkpoint")["same"]
    assert diff("one/checkpoint", "killed/checkpoint")["same"]


def test_ranks_compare_the_sources_of_own_classes(folder: Path) -> None:
    job = hb.Job.read("job.yaml")
    assert set(job.with_classes().classes) > {"own_parts:GateNet", "own_parts:Share"}
    before = job.with_classes().classes["own_parts:GateNet"]
    Path("own_layers.py").write_text(LAYERS + "\n\nclass More(Gate):\n    pass\n")
    _forget()
    assert hb.Job.read("job.yaml").with_classes().classes["own_parts:GateNet"] != before
