# SPDX-License-Identifier: Apache-2.0
"""`hotbed check` says within seconds whether a job can run here."""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed.cli.commands import app
from hotbed.connectors.kafka.topic_source import Timings
from hotbed.job import check as questions
from hotbed.job import run
from hotbed.job.check import JobAnswer, check, check_resume
from hotbed.memory_limit import MemoryLimit

SECONDS = 60.0  # a busy machine


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hb.Job:
    """A job on 300 rows: two thirds to train on, the rest a stream."""
    user = np.arange(300) % 20
    rows = {"clicked": user % 2, "user": user, "price": user / 2, "kind": [f"k{n}" for n in user]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
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


def answers(job: hb.Job, **part: Any) -> dict[str, JobAnswer]:
    job = dataclasses.replace(job, **part)
    return {answer.question: answer for answer in check(job, SECONDS)}


def test_job_that_can_run_has_an_answer_to_each_question(job: hb.Job) -> None:
    found = answers(job)
    assert {answer.outcome for answer in found.values()} == {"ok"}
    assert found["secrets"].text == "none"
    assert "are free" in found["output"].text
    assert found["source train"].text == "1 file"
    assert "200 of the first 200 rows fit the schema" in found["rows of train"].text
    assert "largest tables: user.linear" in found["memory"].text
    assert found["state"].text == "none: training begins anew"
    assert found["changes"].text == "no job.json in the output"
    assert not Path("out").exists()


def source(**columns: Any) -> hb.sources.Source:
    rows = {"clicked": [0, 1, 0, 1], "user": [1, 2, 3, 4], **columns}
    return hb.sources.Memory({name: values for name, values in rows.items() if values})


SECRET = {"sasl.password": "${HOTBED_NOT_SET}"}
TOPIC = hb.sources.Kafka("localhost:1", "clicks", options=SECRET)
AWAY = hb.sources.Kafka("localhost:1", "clicks")
object.__setattr__(AWAY, "_timings", Timings(patience=0.3))
FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "secret": ({"stream": TOPIC}, "secrets", "no environment variable HOTBED_NOT_SET"),
    "broker": ({"stream": AWAY}, "source stream", "no broker answers, got localhost:1"),
    "files": ({"predict": hb.sources.Csv("no/*.csv")}, "source predict", r"no/\*\.csv"),
    "folder": ({"stream": hb.sources.Follow("absent")}, "source stream", "cannot follow it"),
    "rights": ({"output": "rows.parquet/x"}, "output", "job.output: is not a folder"),
    "publish": (
        {"checkpoint": {"publish": {"kind": "publish_directory", "path": "rows.parquet/x"}}},
        "callbacks of the stream",
        "PublishDirectory.path: is not a folder",
    ),
    "column": ({"valid": source(user=None)}, "rows of valid", "job.valid: no column 'user'"),
    "label": ({"train": source(clicked=["x", "y"], user=[1, 2])}, "rows of train", "clicked"),
    "float": ({"valid": source(user=[1.5, 2.5, 3.5, 4.5])}, "rows of valid", "user"),
    "segment": (
        {"stream_callbacks": [{"kind": "by_segment", "columns": ["country"]}]},
        "rows of stream",
        r"columns \['country'\] are missing",
    ),
    "callback": ({"callbacks": [{"kind": "evict", "every": 1}]}, "callbacks", "unknown key"),
    "warm": ({"warm_start": hb.job.job.WarmStart("nowhere")}, "warm start", "nowhere"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_an_error_of_its_question(job: hb.Job, fault: str) -> None:
    part, question, message = FAULTS[fault]
    answer = answers(job, **part)[question]
    assert answer.outcome == "error"
    assert re.search(message, answer.text)


def test_error_that_several_questions_meet_is_told_once(job: hb.Job) -> None:
    found = answers(job, predict=hb.sources.Csv("none.csv"))
    assert "none.csv" in found["source predict"].text
    assert found["rows of predict"].text == "see source predict"


def test_output_in_an_object_store_takes_an_object_and_is_left_empty(job: hb.Job) -> None:
    store = pytest.importorskip("fsspec", reason="fsspec absent").filesystem("memory")
    found = answers(job, output="memory://checked/out")
    assert found["output"] == JobAnswer("output", "ok", "memory://checked/out takes objects")
    assert not store.find("/checked")


def test_state_and_what_changed_since_are_said(job: hb.Job) -> None:
    run.train(job)
    before = answers(job)
    assert re.search(r"resumes from out/checkpoint/checkpoint-\d+: step \d", before["state"].text)
    assert before["changes"].text == "none since the job.json of the output"
    tables = dataclasses.replace(job.tables, rule=hb.Adagrad(lr=0.5))
    after = answers(job, tables=tables, fit=dataclasses.replace(job.fit, epochs=3))
    assert after["changed: fit.epochs"].text == "was the default, is 3"
    assert after["changed: tables.rule.lr"] == JobAnswer(
        "changed: tables.rule.lr", "warning", "was the default, is 0.5"
    )
    assert after["state"].outcome == "ok"
    other = answers(job, tables=dataclasses.replace(job.tables, rule=hb.Sgd(lr=0.5)))
    assert other["state"].outcome == "error"
    assert "was trained with 'adagrad'" in other["state"].text


def test_little_memory_and_room_are_warnings(job: hb.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = MemoryLimit(100 << 20, 0, "the container")
    monkeypatch.setattr(questions, "memory_limits", lambda: [limit])
    full = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr(questions.shutil, "disk_usage", lambda path: full)
    found = answers(job)
    assert found["memory"].outcome == found["output"].outcome == "warning"
    assert "of 100.0 MiB of the container" in found["memory"].text
    assert "1.0 MiB free" in found["output"].text


@dataclasses.dataclass(frozen=True)
class Slow(hb.sources.Source):
    """A source that answers when the test has ended."""

    ended: ClassVar = threading.Event()

    def check_ready(self) -> None:
        self.ended.wait(100)

    def schema(self) -> pa.Schema:
        self.ended.wait(100)
        return pa.schema([])

    def read(self, *arguments: Any) -> Any:
        raise AssertionError


def test_question_without_an_answer_ends_and_says_so(job: hb.Job) -> None:
    found = {a.question: a for a in check(dataclasses.replace(job, predict=Slow()), 0.5)}
    Slow.ended.set()
    assert found["source predict"].outcome == "error"
    assert found["rows of predict"].outcome == "warning"
    assert "no answer within 0.5 s, got none from Slow()" in found["rows of predict"].text


def test_stream_that_resumes_logs_what_is_away(
    job: hb.Job, caplog: pytest.LogCaptureFixture
) -> None:
    run.online(dataclasses.replace(job, train=None, valid=None), max_steps=1)
    with caplog.at_level(logging.WARNING, "hotbed"):
        check_resume(dataclasses.replace(job, stream=AWAY))
    assert "job: source stream: kafka topic 'clicks': no broker answers" in caplog.text


@pytest.mark.soak
def test_topic_and_its_partitions_are_looked_for_and_its_first_rows_read(job: hb.Job) -> None:
    pytest.importorskip("confluent_kafka", reason="confluent-kafka absent")
    with hb.testing.Broker() as broker:
        broker.create("clicks", 2)
        for partition in range(2):
            rows = [f'{{"clicked": {n % 2}, "user": {n}}}'.encode() for n in range(20)]
            broker.produce("clicks", rows, partition, [*range(1, 21)])
        found = answers(job, stream=hb.sources.Kafka(broker.servers, "clicks"))
        assert found["source stream"].outcome == "ok"
        assert re.match("[24]0 of the first [24]0 rows fit", found["rows of stream"].text)
        for source, message in (
            (hb.sources.Kafka(broker.servers, "clicks", partitions=[0, 7]), r"partitions \[7\]"),
            (hb.sources.Kafka(broker.servers, "nothing"), "nothing"),
        ):
            answer = answers(job, stream=source)["source stream"]
            assert answer.outcome == "error"
            assert re.search(message, answer.text)


def test_command_exits_with_1_for_an_error_and_2_for_a_job_that_cannot_be_read(job: hb.Job) -> None:
    text = """
schema: {columns: [{kind: label, name: clicked}, {kind: id, name: user}]}
model: lr
train: {kind: parquet, path: rows.parquet}
"""
    Path("job.yaml").write_text(text)
    runner = CliRunner()
    fine = runner.invoke(app, ["check", "job.yaml"], env={"COLUMNS": "200"})
    assert fine.exit_code == 0, fine.output
    assert "rows of train" in fine.output
    assert "predict" not in fine.output
    wrong = runner.invoke(app, ["check", "job.yaml", "--set", "train.path=none.parquet"])
    assert wrong.exit_code == 1
    with pytest.raises(hb.errors.ConfigError, match="unknown kind"):
        runner.invoke(app, ["check", "job.yaml", "--set", "model=none"], catch_exceptions=False)
