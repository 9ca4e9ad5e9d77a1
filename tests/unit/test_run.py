# SPDX-License-Identifier: Apache-2.0
"""What the commands do is there for Python too: values and events, and nothing is printed."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch", reason="torch absent")

import pyarrow as pa

import hotbed as hb
from hotbed.connectors.kafka.topic_source import Timings
from hotbed.errors import ConfigError, DataError
from hotbed.job import run
from hotbed.job.events import Began, Event, Finished, MovedAside, Scored, WarmStarted
from hotbed.job.file import override
from hotbed.persist.upkeep.inspect import describe_checkpoint, diff, verify


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hb.Job:
    """A job on 300 rows: two thirds to train on, the rest a stream."""
    user = np.arange(300) % 20
    rows = pa.table({"clicked": user % 2, "user": user})
    pq.write_table(rows, tmp_path / "rows.parquet")
    monkeypatch.chdir(tmp_path)
    source = hb.sources.Parquet("rows.parquet")
    return hb.Job(
        schema=hb.Schema([hb.Label("clicked"), hb.Id("user")]),
        model="lr",
        train=source.slice(stop=200),
        valid=source.slice(start=200),
        stream=source.slice(start=200),
        output="out",
    )


def test_reports_and_evaluations_compare_with_the_same_simple_models(job: hb.Job) -> None:
    """As `train` learned them, then as the stream went on, and none where the job wants none."""
    without_stream = dataclasses.replace(job, stream=None)
    history = run.train(without_stream).histories["train"]
    figures = run.evaluate(without_stream).baselines
    assert set(figures) == {"constant", "linear", "popularity of user"}
    for name, values in figures.items():
        assert values == {k.removeprefix("valid."): v for k, v in history.baselines[name].items()}
    assert history.baselines["linear"]["valid.auc"] == 1.0
    later = run.online(job).histories["stream"].baselines
    assert later["popularity of user"]["auc"] == 1.0  # begins with what `train` learned
    assert run.evaluate(job).baselines["linear"]["log_loss"] < figures["linear"]["log_loss"]
    alone = dataclasses.replace(without_stream, baselines=False, output="alone")
    assert run.train(alone).histories["train"].baselines == {}
    assert run.evaluate(alone).baselines == {}


def test_states_with_and_without_baselines_have_one_digest(job: hb.Job) -> None:
    """Of the model and of its stream: several ranks, which have none, write the same state."""
    windows = [{"kind": "windows", "samples": 40}]
    digests = []
    for is_wanted in (True, False):
        own = dataclasses.replace(
            job, baselines=is_wanted, output=f"out-{is_wanted}", stream_callbacks=windows
        )
        run.train(own)
        states = [hb.checkpoints.open_checkpoint(path) for path in (own.output, own.state_path)]
        digests.append([hb.checkpoints.content_digest(state) for state in states])
    assert digests[0] == digests[1]


def test_a_job_begins_with_its_base_rate(job: hb.Job) -> None:
    model = dataclasses.replace(job, base_rate=0.02).rec_model(job.fitted())
    assert model.predict(job.dataset(job.valid, job.fitted())) == pytest.approx(0.02, rel=0.05)


def test_run_returns_values_reports_events_and_prints_nothing(
    job: hb.Job, capfd: pytest.CaptureFixture[str]
) -> None:
    events: list[Event] = []
    learned = run.train(job, report=events.append)
    assert set(learned.histories) == {"train", "stream"}
    assert Path(learned.report).exists()
    assert [type(event) for event in events] == [Began, Began, Finished]
    assert events[:2] == [Began("train", "lr", 1, 0), Began("stream", "lr", 1, 0)]
    metrics = run.evaluate(job).metrics
    assert metrics["auc"] == 1.0
    assert run.predict(job).num_rows == 100

    exported = run.export(job)
    assert exported.manifest.tables[0].rows == 20
    scored: list[Event] = []
    predictions = run.predict_files(
        exported.path, ["rows.parquet"], "scores.parquet", report=scored.append
    )
    assert scored[-1] == Scored(300, 300)
    assert predictions.num_rows == pq.read_table("scores.parquet").num_rows == 300

    facts = run.inspect(job)
    assert [(column.name, column.role, column.type) for column in facts.columns] == [
        ("clicked", "label", "int64"),
        ("user", "id", "int64"),
    ]
    assert facts.model is not None
    verified = verify(job.state_path)
    assert verified["digest"] == describe_checkpoint(job.state_path)["digest"]
    assert diff(job.state_path, job.state_path)["same"]
    assert capfd.readouterr().out == ""


@pytest.fixture
def amounts_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hb.Job:
    """A trained job with a transform that learns, which `train` has split off a stream."""
    number = np.arange(300)
    rows = pa.table({"y": number % 5, "user": number % 20, "shop": number % 7, "sum": number % 3})
    pq.write_table(rows, tmp_path / "rows.parquet")
    monkeypatch.chdir(tmp_path)
    columns = [
        {"kind": "label", "name": "y", "threshold": 2},
        {"kind": "id", "name": "user"},
        {"kind": "id", "name": "bin", "column": "sum", "transforms": [{"kind": "map"}]},
        {"kind": "dense", "name": "sum", "transforms": ["normalize", {"kind": "clip", "low": -1}]},
    ]
    source = {"kind": "parquet", "path": "rows.parquet"}
    spec = {
        "schema": {"columns": columns},
        "model": {"kind": "dcnv2", "hidden": [4], "num_cross_layers": 1},
        "train": source,
        "valid": source,
        "tables": {"dim": 4},
        "output": "out",
    }
    job = hb.Job.from_json(spec)
    run.train(job)
    return job


CHANGED = {
    "model": ({"model": {"kind": "lr"}}, r"job\.model: .* trained with 'dcnv2' .*got 'lr'"),
    "layers": (
        {"model.num_cross_layers": 2},
        r"job\.model\.num_cross_layers: .* trained with 1, got 2",
    ),
    "dim": ({"tables.dim": 3}, r"job\.tables\.dim of table '\w+': .* with 4 .*got 3"),
    "rule": ({"tables.rule": "sgd"}, r"job\.tables\.rule of .* 'adagrad' .*got 'sgd'"),
    "threshold": ({"schema.columns.y.threshold": 4}, r"columns\.y\.threshold: .* 2, got 4"),
    "column": ({"schema.columns.user.column": "shop"}, r"user\.column: .*'user', got 'shop'"),
    "table": ({"schema.columns.bin.table": "user"}, r"bin\.table: .*'bin', got 'user'"),
    "pooling": ({"schema.columns.user.pooling": "mean"}, r"user\.pooling: .*'sum', got 'mean'"),
    "transform": (
        {"schema.columns.bin.transforms": ["hash"]},
        r"bin\.transforms: .*\['map'\], got \['hash'\]",
    ),
    "argument": (
        {"schema.columns.sum.transforms": ["normalize", {"kind": "clip", "low": 0}]},
        r"sum\.transforms\.1\.low: .* -1, got 0",
    ),
    "learned": (
        {"schema.columns.sum.transforms": [{"kind": "normalize", "mean": 7}, "clip"]},
        r"sum\.transforms\.0\.mean: .*got 7",
    ),
    "loss": ({"loss": "mse"}, r"job\.loss: .* trained with 'bce', got 'mse'"),
    "seed": ({"seed": 1}, r"job\.tables\.seed of .* with \S+ .*got 1"),
}


def test_commands_refuse_a_job_that_says_another_model_than_was_trained(
    amounts_job: hb.Job,
) -> None:
    commands = [run.evaluate, run.predict, run.export, lambda job: run.publish(job, "published")]
    for name, (assignments, message) in CHANGED.items():
        changed = hb.Job.from_json(override(amounts_job.to_json(), assignments))
        for command in commands:
            with pytest.raises(ConfigError, match=message):
                command(changed)
        facts = run.inspect(changed)
        assert facts.model is None, name
        assert re.search(message, facts.misfit), name


def test_commands_compute_what_the_job_says_now(amounts_job: hb.Job) -> None:
    rows = pq.read_table("rows.parquet")
    pq.write_table(rows.slice(0, 40), "few.parquet")
    assignments: dict[str, object] = {
        "metrics": ["calibration", "gauc@bin"],
        "valid": {"kind": "parquet", "path": "few.parquet"},
        "fit.batch_size": 7,
        "tables.rule": {"kind": "adagrad", "lr": 0.5},
        "tables.capacity": 1000,
    }
    changed = hb.Job.from_json(override(amounts_job.to_json(), assignments))
    metrics = run.evaluate(changed).metrics
    assert {"calibration", "gauc@bin"} <= set(metrics)
    assert "auc" not in metrics
    assert run.predict(changed).num_rows == 40
    assert "dim" in (run.inspect(changed).model or "")


def test_restart_and_warm_start_are_reported(job: hb.Job) -> None:
    run.online(job)
    events: list[Event] = []
    run.train(job, restart=True, report=events.append)
    assert events[0] == MovedAside(Path("out/checkpoint.aside-1"))
    start = {"path": "out", "rename": {}}
    plain = job.to_json() | {"output": "new", "warm_start": start}
    events.clear()
    run.train(hb.Job.from_json(plain), report=events.append)
    assert events[0] == WarmStarted("user.linear", 20, "user.linear", "out")


def test_job_measures_errors_of_amounts(job: hb.Job) -> None:
    """In evaluation and of the windows of a stream, equal to NumPy over its predictions."""
    names = ["rmse", "mae", "smape"]
    amounts = hb.Job.from_json(job.to_json() | {"loss": "mse", "metrics": names})
    learned = run.train(amounts)
    history = learned.histories["stream"]
    assert {name for name in names if history.metrics[name] >= 0} == set(names)
    metrics = run.evaluate(amounts).metrics
    file = pq.read_table(str(run.predict(amounts).path))
    prediction = file[0].to_numpy().astype(np.float64)
    label = np.arange(200, 300) % 20 % 2
    error = prediction - label
    half = (np.abs(prediction) + np.abs(label)) / 2
    assert metrics["rmse"] == pytest.approx(np.sqrt(np.mean(error**2)), abs=1e-6)
    assert metrics["mae"] == pytest.approx(np.mean(np.abs(error)), abs=1e-6)
    assert metrics["smape"] == pytest.approx(np.mean(np.abs(error) / half), abs=1e-6)


def test_grains_of_a_trained_job_are_those_of_its_state(job: hb.Job) -> None:
    """A job without a number of its own was trained with one, as by several ranks."""
    batches = dataclasses.replace(job.fit, batch_size=1024)
    trained = dataclasses.replace(job, stream=None, grains="auto", fit=batches)
    run.train(trained)
    assert json.loads(Path("out/job.json").read_text())["grains"] == 2
    assert hb.load("out").grains == 2
    later = dataclasses.replace(trained, grains=None)
    assert run.export(later).manifest.tables[0].rows == 20
    assert run.publish(later, "published").version is not None


SECRET = {"sasl.password": "${HOTBED_NOT_SET}"}
TOPIC = hb.sources.Kafka("localhost:1", "clicks", options=SECRET)
AWAY = hb.sources.Kafka("localhost:1", "clicks")
object.__setattr__(AWAY, "_timings", Timings(patience=0.3))
PAST = hb.sources.Parquet("rows.parquet")
TO_TOPIC = {"kind": "publish_topic", "servers": "localhost:1", "topic": "t", "options": SECRET}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"stream": TOPIC}, "no environment variable HOTBED_NOT_SET"),
        ({"stream": hb.sources.Concat([PAST, TOPIC])}, "no environment variable HOTBED_NOT_SET"),
        (
            {"stream": hb.sources.Join(PAST, {"clicked": hb.sources.Outcome(TOPIC, 1)}, on="user")},
            "no environment variable HOTBED_NOT_SET",
        ),
        ({"stream": AWAY}, "kafka topic 'clicks': no broker answers, got localhost:1 for 0.3 s"),
        ({"stream": hb.sources.Follow("absent")}, "'absent': cannot follow it"),
        ({"valid": hb.sources.Parquet("absent.parquet")}, "absent.parquet"),
        ({"checkpoint": {"publish": TO_TOPIC}}, "no environment variable HOTBED_NOT_SET"),
        (
            {"checkpoint": {"publish": {"kind": "publish_directory", "path": "rows.parquet/x"}}},
            "PublishDirectory.path: is not a folder",
        ),
        (
            {"stream_callbacks": [{"kind": "tensor_board", "log_dir": "rows.parquet/x"}]},
            "TensorBoard.log_dir: is not a folder",
        ),
        (
            {"callbacks": [{"kind": "best_weights", "path": "rows.parquet/x"}]},
            "BestWeights.path: is not a folder",
        ),
        ({"stream": None, "output": "rows.parquet/x"}, "job.output: is not a folder"),
    ],
)
def test_what_a_job_reads_and_writes_is_checked_before_a_row_is_learned(
    job: hb.Job, part: dict[str, Any], message: str
) -> None:
    events: list[Event] = []
    with pytest.raises((ConfigError, DataError), match=message):
        run.train(dataclasses.replace(job, **part), report=events.append)
    assert not events


def test_what_was_learned_is_kept_where_the_stream_fails_at_its_beginning(
    job: hb.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(dataset: hb.Dataset) -> None:
        raise ConfigError("the broker was here a moment ago")

    with monkeypatch.context() as patched:
        patched.setattr(hb.Dataset, "raw_types", lost)
        with pytest.raises(ConfigError, match="a moment ago"):
            run.train(dataclasses.replace(job, valid=None))
    assert hb.load("out").counters["samples"] == 200
    events: list[Event] = []
    learned = run.online(job, report=events.append)
    assert [event.part for event in events if isinstance(event, Began)] == ["stream"]
    assert learned.model.counters["samples"] == 300
