# SPDX-License-Identifier: Apache-2.0
"""examples/prepare: raw ratings are prepared, trained on, evaluated, exported and served."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections import defaultdict
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import hotbed as hb
from hotbed.cli.commands import app

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "prepare"
NUM_RATINGS = 20_000
# the first ratings of the file, which are those of every user below 140
SOME = (
    f"source.source={{kind: slice, stop: {NUM_RATINGS}, "
    "source: {kind: csv, path: data/ml_latest_small/ratings.csv}}"
)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory that has the shipped data and nothing else."""
    folder = tmp_path_factory.mktemp("prepare")
    (folder / "data").symlink_to(ROOT / "data")
    return folder


def hotbed(folder: Path, command: str, *arguments: str) -> str:
    """Return what `hotbed command arguments` prints in a folder."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        app([command, *arguments], standalone_mode=False)
    return printed.getvalue()


@pytest.fixture(scope="module")
def ratings(folder: Path) -> dict[str, str]:
    """What each command on the ratings printed."""
    prepare = str(EXAMPLES / "ratings.yaml")
    train = str(EXAMPLES / "train.yaml")
    return {
        "prepare": hotbed(folder, "prepare", prepare),
        "train": hotbed(folder, "train", train),
        "evaluate": hotbed(folder, "evaluate", train),
        "predict": hotbed(folder, "predict", train),
        "export": hotbed(folder, "export", train),
    }


def requests() -> pl.DataFrame:
    """Return the ratings with the columns that a client knows: those of the user's past."""
    rows = pl.read_csv(ROOT / "data/ml_latest_small/ratings.csv")
    rows = rows.join(pl.read_csv(ROOT / "data/ml_latest_small/movies.csv"), "movieId", "left")
    past: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for user, movie, time in rows.select("userId", "movieId", "timestamp").iter_rows():
        past[user].append((time, movie))
    for events in past.values():
        events.sort()
    histories = []
    seconds = []
    for user, time in rows.select("userId", "timestamp").iter_rows():
        earlier = [event for event in past[user] if event[0] < time]
        histories.append([movie for _, movie in earlier][-10:])
        seconds.append(float(time - earlier[-1][0]) if earlier else None)
    kinds = {"history": pl.List(pl.Int64), "since_last": pl.Float64}
    columns = pl.DataFrame({"history": histories, "since_last": seconds}, schema=kinds)
    return rows.hstack(columns)


def auc(text: str) -> float:
    found = re.search(r"auc ([\d.]+)", text)
    assert found, text
    return float(found.group(1))


def test_the_commands_say_what_they_did(ratings: dict[str, str]) -> None:
    assert "train: 90,752" in ratings["prepare"]
    assert "valid: 10,084" in ratings["prepare"]
    assert auc(ratings["train"]) == auc(ratings["evaluate"]) > 0.65
    assert "exported: runs/ratings/export" in ratings["export"]


def test_a_server_scores_raw_requests_as_prepared_rows(
    folder: Path, ratings: dict[str, str]
) -> None:
    prepared = hb.prepare.Workflow(folder / "runs/ratings/prepared")
    valid = pl.read_parquet(folder / "runs/ratings/prepared/valid/*.parquet")
    first = int(valid["timestamp"].dt.epoch("s").min())  # type: ignore[arg-type]
    raw = requests().filter(pl.col("timestamp") >= first)
    assert len(raw) == len(valid) == prepared.counts["valid"]
    scores = pl.read_parquet(folder / "runs/ratings/predictions.parquet")["liked"]
    has_history = raw["history"].list.len() == 10  # a tensor holds lists of one length
    asked = raw.filter(has_history).head(200)
    columns = {name: asked[name].to_list() for name in ("userId", "movieId", "genres", "history")}
    columns["since_last"] = asked["since_last"].to_list()
    serve = ["serve", "ratings=runs/ratings/export", "--http-port", "0", "--grpc-port", "-1"]
    with subprocess.Popen(
        [sys.executable, "-m", "hotbed.cli", *serve, "--set", "drain_seconds=0"],
        cwd=folder,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            ports = (re.search(r"listening on port (\d+)", line) for line in process.stderr)
            port = next(found for found in ports if found)[1]
            with hb.Client(f"http://127.0.0.1:{port}") as client:
                served = client.predict("ratings", columns)
        finally:
            process.terminate()
            process.communicate(timeout=60)
    expected = scores.filter(has_history).head(200).to_numpy()
    assert np.abs(served - expected).max() < 1e-6


def test_films_that_were_watched_are_told_from_others(folder: Path) -> None:
    hotbed(folder, "prepare", str(EXAMPLES / "watched.yaml"), "--set", SOME)
    counts = hb.prepare.Workflow(folder / "runs/watched/prepared").counts
    assert counts["negatives"] == 4 * NUM_RATINGS
    valid = pl.read_parquet(folder / "runs/watched/prepared/valid/*.parquet")
    assert valid["watched"].mean() == pytest.approx(0.2)
    assert valid["importance"].unique().to_list() == [1.0]
    trained = hotbed(folder, "train", str(EXAMPLES / "train_watched.yaml"))
    assert auc(trained) > 0.6
