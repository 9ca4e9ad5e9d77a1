# SPDX-License-Identifier: Apache-2.0
"""One job that keeps a history and a count, through the commands; and who refuses such columns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from kept_ratings import Replay, dataset_of, make_model, read_ratings
from typer.testing import CliRunner

import hotbed as hb
from hotbed.cli.commands import app
from hotbed.errors import ConfigError, HotbedError, RowShapeError
from hotbed.job import run
from hotbed.job import workload as of_job
from hotbed.job.drafting.draft import draft
from hotbed.job.job import Job
from hotbed.job.planning import Wishes, plan
from hotbed.persist.upkeep.inspect import describe_checkpoint
from hotbed.yaml_files import parse_value

ROWS = 640
PLAIN = hb.Schema([hb.Label("liked", column="rating", threshold=4), hb.Id("user", column="userId")])


@pytest.fixture(scope="module")
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that was trained: on the first 640 ratings, of which the last 160 validate."""
    folder = tmp_path_factory.mktemp("kept")
    read_ratings(request.config.rootpath, ROWS).write_csv(folder / "ratings.csv")
    source = {"kind": "csv", "path": str(folder / "ratings.csv")}
    spec: dict[str, Any] = {
        "schema": make_model().schema.to_json(),
        "train": {"kind": "slice", "stop": 480, "source": source},
        "valid": {"kind": "slice", "start": 480, "source": source},
        "model": {"kind": "din", "histories": {"before": "movie"}, "hidden": [8]},
        "tables": {"dim": 4},
        "metrics": ["auc"],
        "callbacks": [],
        "fit": {"batch_size": 64},
        "output": str(folder / "run"),
    }
    (folder / "job.json").write_text(json.dumps(spec))
    job = Job.read(folder / "job.json")
    run.train(job)
    return job


def command(*words: str) -> str:
    """Return what a command prints."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_commands_know_what_a_trained_job_keeps(job: Job) -> None:
    folder = Path(job.output).parent
    path = str(folder / "job.json")
    assert "480 of the first 480 rows fit the schema" in command("check", path)
    assert "kept by the model" in command("inspect", path)
    command("verify", job.output)
    tables = describe_checkpoint(job.output)["tables"]
    has_norms = {table["name"]: bool(table["norms"]) for table in tables}
    assert [name for name in has_norms if has_norms[name]] == ["movie", "user"]
    model = hb.load(job.output)
    auc = model.evaluate(hb.Dataset(job.valid, model.schema, batch_size=64))["auc"]
    assert f"auc {auc:.4f}" in command("evaluate", path)
    command("export", path, "--out", str(folder / "exported"))
    command(
        "predict",
        str(folder / "exported"),
        str(folder / "ratings.csv"),
        "--out",
        str(folder / "scores.parquet"),
    )
    ratings = pl.read_csv(folder / "ratings.csv")
    expected = model.predict(dataset_of(ratings, model))
    scores = pl.read_parquet(folder / "scores.parquet")
    np.testing.assert_allclose(scores[scores.columns[-1]], expected, atol=1e-5)
    replay = Replay()
    for row in ratings.head(480).to_dicts():
        replay.leave(row)
    user = int(ratings["userId"][0])
    movies, _ = replay.see({**ratings.row(0, named=True), "timestamp": 2**31})
    for place in (job.output, str(folder / "exported")):
        shown = command("rows", place, "--history", f"user={user}")
        assert f"before of user={user}: " in shown
        assert f"│ {movies[-1]} │" in shown


def with_kept(text: str) -> str:
    """Return a draft after its advice was followed: with the columns that the model may keep."""
    removed = tuple(f"{name}:" for name in ("model", "fit") if f"#kept {name}:" in text)
    lines = [line for line in text.splitlines() if not line.startswith(removed)]
    return "\n".join(line.replace("#kept ", "") for line in lines)


def test_a_draft_proposes_kept_columns_that_run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ratings = read_ratings(request.config.rootpath, ROWS)
    ratings.write_csv("ratings.csv")
    command("init", "ratings.csv", "--label", "rating")
    text = Path("job.yaml").read_text()
    assert not Job.read("job.yaml").schema.kept
    Path("job.yaml").write_text(with_kept(text))
    assert "rows fit the schema" in command("check", "job.yaml")
    drafted = Job.read("job.yaml")
    history, count = drafted.schema.kept
    assert (history.of, history.by, history.where) == (("movieId",), "userId", {"rating": 1})
    assert (count.by, count.where) == ("movieId", {"rating": 1})
    model = run.train(drafted).model
    assert len(model.tables["earlier_movieId.newest"]) > 5
    assert len(model.tables["movieId_counts.newest"]) > 100


@pytest.mark.parametrize(
    ("columns", "kinds"),
    [
        (["userId", "movieId", "timestamp"], ["history", "count"]),
        (["movieId", "timestamp"], ["count"]),
        (["userId", "movieId"], []),
        (["userId", "timestamp"], []),
    ],
)
def test_a_draft_proposes_what_can_be_kept_of_its_columns(
    request: pytest.FixtureRequest, tmp_path: Path, columns: list[str], kinds: list[str]
) -> None:
    path = tmp_path / "ratings.parquet"
    read_ratings(request.config.rootpath, ROWS).select("rating", *columns).write_parquet(path)
    text = draft(str(path), "rating")
    assert re.findall(r"#kept - {kind: (\w+)", text) == kinds
    assert ("#kept model:" in text) == ("history" in kinds)
    Job.from_json(parse_value(with_kept(text)))


def test_a_plan_has_the_rows_that_training_keeps(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_job, "SECONDS", 0.05)
    monkeypatch.setattr(of_job, "_alone", lambda call, *arguments: call(*arguments))
    of_two = [of_job.RankSteps({8: 1e-4, 4 << 20: 5e-3}, 0.02, 0.01, 1.0)] * 2
    monkeypatch.setattr("hotbed.parallel.probe.on_two_ranks", lambda *arguments: of_two)
    planned = plan(job, Wishes(ranks=2))
    trained = hb.load(job.output)
    rows = {table.name: float(table.rows.sum()) for table in planned.work.tables}
    # entries that one read of many rows drops at once may never become an older row
    assert rows == pytest.approx(
        {name: len(table) for name, table in trained.tables.items()}, abs=1.5
    )
    assert rows["before.older"] > 5
    alone, of_ranks = planned.plans
    assert alone.rows.sum() == of_ranks.rows.sum() == pytest.approx(sum(rows.values()))
    assert alone.rows.max() > of_ranks.rows.max()
    keys = rows["before.newest"]
    assert any(f"'before' is kept of {keys:.0f} keys by 'user'" in note for note in planned.notes)


def learn(network: torch.nn.Module, ratings: pl.DataFrame) -> None:
    hb.RecModel(network, "bce", "adam").fit(dataset_of(ratings, make_model()), progress=False)


def with_column(column: Any) -> None:
    schema = make_model().schema
    hb.Schema([*schema.columns, hb.History("b", of=["movie", "at"], by="user"), column])


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (
            lambda ratings: make_model().network(next(iter(dataset_of(ratings, make_model())))),
            RowShapeError,
            "train with hb.RecModel, or give the network collection.histories.fill",
        ),
        (
            lambda ratings: learn(hb.models.LR(PLAIN, hb.make_tables(PLAIN, dim=1)), ratings),
            ConfigError,
            "no part of the network keeps what the schema declares",
        ),
        (lambda ratings: with_column(hb.Id("b_at")), ConfigError, "feature 'b_at', got the column"),
        (
            lambda ratings: with_column(hb.Id("other", column="b")),
            ConfigError,
            "feature 'b', got the raw column of 'other'",
        ),
        (
            lambda ratings: with_column(hb.Count("b_at", by="movie", where={}, windows=[60])),
            ConfigError,
            "feature 'b_at', got a feature of 'b_at'",
        ),
    ],
)
def test_kept_columns_are_refused_by_name(
    use: Callable[[pl.DataFrame], None],
    error: type[HotbedError],
    words: str,
    request: pytest.FixtureRequest,
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        use(read_ratings(request.config.rootpath, 100))


@pytest.mark.parametrize("setting", ["fit.epochs=2", "fit.shuffle=100"])
def test_a_check_names_an_order_in_which_nothing_is_kept(job: Job, setting: str) -> None:
    path = str(Path(job.output).parent / "job.json")
    result = CliRunner().invoke(app, ["check", path, "--set", setting])
    assert result.exit_code == 1
    assert "is kept of rows that come once" in " ".join(result.output.split())
