# SPDX-License-Identifier: Apache-2.0
"""A job is one value: the same from Python, YAML, JSON and `--set`, and every mistake names its
dotted path.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import hotbed as hb
from hotbed.errors import ConfigError
from hotbed.job.file import override, read_mapping
from hotbed.job.job import Fit, Job
from hotbed.job.json_schema import json_schema
from hotbed.job.tables import Tables
from hotbed.yaml_files import parse_value

REPOSITORY = Path(__file__).parents[2]

YAML = """
schema:
  columns:
    - {kind: label, name: liked, column: rating, threshold: 4}
    - {kind: time, name: timestamp}
    - {kind: id, name: user}
    - {kind: id, name: genres, pooling: mean, transforms: [split]}
    - {kind: dense, name: price, transforms: [{kind: fill_missing, value: 0}, log]}
train: {kind: slice, stop: 0.8, source: &events {kind: csv, path: events.csv}}
stream: {kind: slice, start: 0.8, source: *events}
model: {kind: dcnv2, hidden: [8]}
tables:
  dim: 4
  rule: {kind: adagrad, lr: 1e-1}
  admit: {kind: min_count, count: 2}
  evict: [{kind: ttl, days: 30}, {kind: lru, max_rows: 1e6}]
  overrides:
    genres: {dim: 2, admit: null, evict: null}
    user: {evict: {kind: ttl, steps: 1e3}, capacity: 5e4}
optimizer: {kind: adam, lr: 2e-3}
fit: {epochs: 2, batch_size: 64}
"""


def in_python() -> Job:
    events = hb.sources.Csv("events.csv")
    return Job(
        schema=hb.Schema(
            [
                hb.Label("liked", column="rating", threshold=4.0),
                hb.Time("timestamp"),
                hb.Id("user"),
                hb.Id("genres", pooling="mean", transforms=[hb.transforms.Split()]),
                hb.Dense("price", transforms=[hb.transforms.FillMissing(0), hb.transforms.Log()]),
            ]
        ),
        train=hb.sources.Slice(events, stop=0.8),
        stream=hb.sources.Slice(events, start=0.8),
        model={"kind": "dcnv2", "hidden": [8]},
        tables=Tables(
            dim=4,
            rule=hb.Adagrad(lr=0.1),
            admit=hb.MinCount(2),
            evict=[hb.Ttl(days=30), hb.Lru(1_000_000)],
            overrides={
                "genres": {"dim": 2, "admit": None, "evict": None},
                "user": {"evict": hb.Ttl(steps=1000), "capacity": 50_000},
            },
        ),
        optimizer=hb.Adam(lr=2e-3),
        fit=Fit(epochs=2, batch_size=64),
    )


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(YAML)
    return path


def test_yaml_json_and_python_make_the_same_job(job_file: Path, tmp_path: Path) -> None:
    job = Job.read(job_file)
    assert job == in_python()
    plain = json.dumps(job.to_json())
    (tmp_path / "job.json").write_text(plain)
    assert Job.read(tmp_path / "job.json") == job
    assert Job.from_json(json.loads(plain)).to_json() == job.to_json()
    assert list(job.to_json()["tables"]) == ["dim", "rule", "admit", "evict", "overrides"]


def test_parts_of_one_source_share_it(job_file: Path) -> None:
    job = Job.read(job_file)
    assert job.train.source is job.stream.source


def test_set_changes_one_value(job_file: Path) -> None:
    changes = {
        "tables.rule.lr": 0.3,
        "schema.columns.user.table": "people",
        "train.source.path": "other.csv",
    }
    job = Job.read(job_file, changes)
    assert job.tables.rule == hb.Adagrad(lr=0.3)
    assert list(job.schema.tables) == ["people", "genres"]
    assert job.train.source.path == "other.csv"
    assert job.stream.source.path == "events.csv"  # an anchor is a copy


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "modl",
            1,
            r"^job\.modl: unknown key of job, got 'modl' with the value 1\. Did you mean 'model'\?",
        ),
        (
            "fit.epoch",
            1,
            r"^job\.fit\.epoch: unknown key of fit, got 'epoch' with the value 1\. Did you mean 'epochs'\?",
        ),
        ("fit.epochs", 0, r"^job\.fit\.epochs: must be at least 1, got 0"),
        ("tables.rule.rate", 1, r"^job\.tables\.rule\.rate: unknown key of adagrad"),
        ("tables.rule.lr", -1, r"^job\.tables\.rule\.lr: "),
        ("tables.evict.0.day", 1, r"^job\.tables\.evict\.0\.day: unknown key of ttl, .*'days'"),
        (
            "tables.overrides.genres.dmi",
            2,
            r"^job\.tables\.overrides\.genres\.dmi: unknown key, .*'dim'",
        ),
        (
            "tables.overrides.genres.rule",
            {"kind": "sgdd"},
            r"^job\.tables\.overrides\.genres\.rule\.kind: .*'sgd'",
        ),
        (
            "schema.columns.user.tabel",
            "x",
            r"^job\.schema\.columns\.2\.tabel: unknown key of id, .*'table'",
        ),
        (
            "train.source.delimeter",
            ";",
            r"^job\.train\.source\.delimeter: unknown key of csv, .*'delimiter'",
        ),
        (
            "train.kind",
            "slise",
            r"^job\.train\.kind: unknown kind, got 'slise'\. Did you mean 'slice'",
        ),
    ],
)
def test_a_wrong_key_is_an_error_with_its_dotted_path(
    job_file: Path, path: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Job.read(job_file, {path: value})


def test_a_missing_key_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^job\.schema: missing key of job"):
        Job.from_json({"model": "dcnv2"})


def test_metrics_within_groups_are_named_as_in_python() -> None:
    pytest.importorskip("torch", reason="torch absent")
    spec = {
        "schema": {"columns": [{"kind": "label", "name": "y"}, {"kind": "id", "name": "user"}]},
        "model": "lr",
        "train": {"kind": "csv", "path": "a.csv"},
    }
    metrics = [
        "auc",
        "gauc@user",
        {"kind": "ndcg@user", "k": 5},
        {"kind": "hit_rate", "k": 3, "group": "user"},
    ]
    job = Job.from_json({**spec, "metrics": metrics})
    model = job.rec_model(job.schema)
    assert {name: getattr(metric, "group", None) for name, metric in model.metrics.items()} == {
        "auc": None,
        "gauc@user": "user",
        "ndcg@user": "user",
        "hit_rate": "user",
    }
    assert model.metrics["ndcg@user"].k == 5
    for wrong in ("auc@user", "gauc@"):
        with pytest.raises(ConfigError, match=r"^job\.metrics\.0: not a metric within groups"):
            Job.from_json({**spec, "metrics": [wrong]}).rec_model(job.schema)
    assert {"type": "string", "pattern": "^(gauc|hit_rate|ndcg)@."} in json_schema()["$defs"][
        "job.job"
    ]["properties"]["metrics"]["anyOf"][0]["items"]["anyOf"]


@pytest.mark.parametrize("name", ["train", "valid", "predict"])
def test_only_a_stream_may_be_endless(name: str) -> None:
    follow = {"kind": "follow", "directory": "incoming"}
    spec = {"schema": {"columns": [{"kind": "label", "name": "y"}]}, "model": "dcnv2"}
    assert Job.from_json({**spec, "stream": follow}).stream == hb.sources.Follow("incoming")
    with pytest.raises(ConfigError, match=rf"^job\.{name}: it never ends"):
        Job.from_json({**spec, "train": {"kind": "csv", "path": "a.csv"}, name: follow})


def test_override_sets_by_dotted_path_and_leaves_the_original() -> None:
    spec: dict[str, Any] = {
        "rule": "adagrad",
        "columns": [{"name": "user"}, {"name": "film"}],
        "fit": {"epochs": 1},
    }
    changes = {
        "rule.lr": 0.1,
        "columns.1.x": 2,
        "columns.user.x": 3,
        "fit.epochs": 2,
        "new.deep": 1,
    }
    assert override(spec, changes) == {
        "rule": {"kind": "adagrad", "lr": 0.1},
        "columns": [{"name": "user", "x": 3}, {"name": "film", "x": 2}],
        "fit": {"epochs": 2},
        "new": {"deep": 1},
    }
    assert spec["rule"] == "adagrad"
    assert spec["columns"][0] == {"name": "user"}


@pytest.mark.parametrize("path", ["columns.7.x", "columns.nobody.x", "a..b", ""])
def test_override_refuses_a_path_that_leads_nowhere(path: str) -> None:
    with pytest.raises(ConfigError):
        override({"columns": [{"name": "user"}]}, {path: 1})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1e6", 1e6),
        ("3", 3),
        ("010", 10),
        ("0x1F", 31),
        ("-1.5", -1.5),
        ("true", True),
        ("no", "no"),
        ("2014-10-21", "2014-10-21"),
        ("null", None),
        ("12:30", "12:30"),
        ("[1, a]", [1, "a"]),
        ("{kind: sgd}", {"kind": "sgd"}),
        ("'3'", "3"),
        ("a.csv", "a.csv"),
    ],
)
def test_values_read_as_people_mean_them(text: str, value: Any) -> None:
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "a: 1\nb: [", r"a\.yaml: cannot be parsed \(line 2"),
        ("a.yaml", "a: 1\na: 2", r"a\.yaml: cannot be parsed \(line 1: the key 'a' is given twice"),
        ("a.yaml", "- 1", r"a\.yaml: not a job, got list"),
        ("a.json", "{'a': 1}", r"a\.json: cannot be parsed \(.*line 1 column 2"),
        ("a.yaml", "!!python/object:os.system {}", r"a\.yaml: cannot be parsed"),
        ("a.yaml", "a: 1\nb: !!bool abc", r"line 2: not a value of the type bool\). Correct"),
        ("a.yaml", f"a: 1\nb: {'1' * 5000}", r"line 2: not a value of the type int\). Correct"),
        ("a.json", f"[{'1' * 5000}]", r"a\.json: cannot be parsed \(Exceeds the limit"),
    ],
)
def test_file_that_is_not_a_job_is_an_error_with_its_name(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_mapping(tmp_path / name)


def test_missing_job_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read"):
        Job.read(tmp_path / "nothing.yaml")


def test_the_json_schema_for_editors_is_up_to_date() -> None:
    assert hb.testing.FakeStream  # the classes of tests are not kinds of jobs
    shipped = json.loads((REPOSITORY / "docs" / "job.schema.json").read_text())
    assert shipped == json_schema(), "run: hotbed schema > docs/job.schema.json"


def test_a_class_of_a_user_takes_no_kind_away() -> None:
    class Own(hb.callbacks.Checkpoint):
        """A callback of a user."""

    assert Own in hb.callbacks.Checkpoint.__subclasses__()
    assert "checkpoint" in json_schema()["$defs"]["job.job"]["properties"]


def test_json_schema_has_every_key_and_kind() -> None:
    schema = json_schema()
    job = schema["$defs"]["job.job"]
    assert set(job["properties"]) == {"kind", *Job.__dataclass_fields__}
    assert job["required"] == ["schema", "model"]
    assert "models.dcnv2" in schema["$defs"]
    assert schema["$defs"]["embedding.adagrad"]["properties"]["lr"] == {"type": "number"}
    assert not schema["$defs"]["embedding.adagrad"]["additionalProperties"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "model",
            "xyzzy",
            r"job\.model\.kind: unknown kind, got 'xyzzy'. Use one of aitm, auto_int",
        ),
        ("model", {"kind": "dcn_v2"}, r"job\.model\.kind: .*Did you mean 'dcnv2'"),
        ("loss", "bse", r"job\.loss\.kind: .*Did you mean 'bce' or 'mse'"),
        ("metrics", ["acu"], r"job\.metrics\.0.*: .*Did you mean 'auc'"),
        ("metrics", {"y": ["acu"]}, r"job\.metrics\.y\.0.*: .*Did you mean 'auc'"),
        ("callbacks", ["early_stop"], r"job\.callbacks\.0\.kind: .*'early_stopping'"),
    ],
)
def test_an_unknown_kind_is_refused_when_the_job_is_read(
    key: str, value: object, message: str
) -> None:
    pytest.importorskip("torch", reason="torch absent")
    spec = {
        "schema": {"columns": [{"kind": "label", "name": "y"}, {"kind": "id", "name": "u"}]},
        "model": "dcnv2",
        "train": {"kind": "csv", "path": "a.csv"},
    }
    with pytest.raises(ConfigError, match=message):
        Job.from_json({**spec, key: value})


@pytest.mark.parametrize("name", ["job.json", "job.yaml"])
def test_a_job_that_is_nested_too_deeply_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"train": ' + "[" * 20_000 + "]" * 20_000 + "}")
    with pytest.raises(ConfigError, match=f"{name}: cannot be parsed .nested too deeply"):
        read_mapping(tmp_path / name)


@pytest.mark.parametrize(
    ("grains", "batch_size", "ranks", "expected"),
    [
        (None, 65_536, 1, 1),
        (None, 4096, 2, 8),
        (None, 4095, 2, 4),
        (None, 1024, 2, 2),
        (None, 65_536, 8, 8),
        ("auto", 65_536, 1, 8),
        ("auto", 511, 1, 1),
        (16, 64, 9, 16),
    ],
)
def test_grains_of_a_job_are_a_number_where_it_runs(
    job_file: Path, grains: Any, batch_size: int, ranks: int, expected: int
) -> None:
    changes = {"grains": grains, "fit.batch_size": batch_size, "fit.stream_batch_size": None}
    assert Job.read(job_file, changes).num_grains(ranks) == expected


def test_the_smaller_batches_of_a_stream_count_for_its_grains(job_file: Path) -> None:
    job = Job.read(
        job_file, {"grains": "auto", "fit.batch_size": 4096, "fit.stream_batch_size": 1024}
    )
    assert job.num_grains(1) == 2


@pytest.mark.parametrize(
    ("grains", "batch_size", "ranks", "advice"),
    [
        (None, 512, 2, "Give fit.batch_size: 1024 or more, or grains: 2; or start one process."),
        (
            None,
            2047,
            3,
            "Give fit.batch_size: 2048 or more, or grains: 4; or start at most 2 ranks.",
        ),
        (None, 65_536, 9, "Give grains: 16; or start at most 8 ranks."),
        (2, 4096, 3, "Give grains: 4, or start at most 2 ranks."),
    ],
)
def test_too_few_grains_for_the_ranks_say_what_works(
    job_file: Path, grains: Any, batch_size: int, ranks: int, advice: str
) -> None:
    changes = {"grains": grains, "fit.batch_size": batch_size, "fit.stream_batch_size": None}
    with pytest.raises(ConfigError, match=re.escape(advice)):
        Job.read(job_file, changes).num_grains(ranks)


def test_more_ranks_than_partitions_of_a_table_are_refused(job_file: Path) -> None:
    job = Job.read(job_file, {"grains": 512})
    assert job.num_grains(256) == 512
    with pytest.raises(ConfigError, match="a table lie on at most 256 ranks, got 257"):
        job.num_grains(257)
