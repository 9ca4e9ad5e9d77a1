# SPDX-License-Identifier: Apache-2.0
"""Drafted preparations: `hotbed init --prepare` guesses, and what it writes prepares and trains."""

from __future__ import annotations

import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed.cli import commands as cli
from hotbed.errors import SchemaError
from hotbed.job.drafting.draft import Sample, draft
from hotbed.job.drafting.preparation import draft_preparation
from hotbed.prepare import Preparation
from hotbed.yaml_files import parse_value


def preparation_of(path: Path, **names: Any) -> tuple[Preparation, str]:
    drafts = draft_preparation(Sample.of(str(path)), **names)
    return Preparation.from_json(parse_value(drafts.preparation)), drafts.preparation


def plays(path: Path, num_rows: int = 600, seed: int = 0) -> Path:
    """Write events without a label: films, their studio and length follow from the film."""
    rng = np.random.default_rng(seed)
    film = rng.integers(0, 40, num_rows)
    device = rng.integers(0, 3, num_rows)
    frame = pl.DataFrame(
        {
            "userId": rng.integers(0, 50, num_rows),
            "film": [f"film {number}" for number in film],
            "studio": [f"studio {number % 7}" for number in film],
            "minutes": 60.5 + film,
            "device": [f"device {number}" for number in device],
            "timestamp": 1_600_000_000 + np.arange(num_rows) * 60,
        }
    )
    frame.write_csv(path)
    return path


def test_events_without_a_label_get_negatives_whose_columns_follow_the_item(tmp_path: Path) -> None:
    job, text = preparation_of(plays(tmp_path / "plays.csv"))
    assert job.negatives == hb.prepare.Negatives(
        "userId", "film", per_positive=4, item_columns=["studio", "minutes"]
    )
    assert job.schema.labels == (hb.Label("chosen"),)
    assert job.schema.time == hb.Time("timestamp", unit="s")
    assert [derivation.name for derivation in job.derive] == ["seconds_since_last", "earlier_items"]
    assert job.schema["earlier_items"] == hb.Id("earlier_items", table="film", pooling="mean")
    assert job.split == hb.prepare.ByTime(valid=0.1)
    assert "for each, 4 rows" in text.lower()
    assert "# Guessed from names and types: user userId, item film." in text
    drafted = parse_value(draft_preparation(Sample.of(str(tmp_path / "plays.csv"))).job)
    assert drafted["metrics"] == ["auc", "gauc@userId", "log_loss"]
    assert {callback["metric"] for callback in drafted["callbacks"]} == {"auc"}


def test_columns_of_an_item_that_change_over_time_follow_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    day = np.sort(rng.integers(0, 60, 20_000))
    user = rng.integers(0, 900, 20_000)
    sku = np.minimum(rng.zipf(1.3, 20_000), 300)
    rates = rng.random((301, 9)).round(4)
    columns = {
        "user_id": user,
        "sku_id": sku,
        "time": 1_456_000_000 + day * 86_400,
        "brand": sku % 31,
        "comment_num": 1 + sku % 4 + day // 7 % 4,
        "bad_comment_rate": rates[sku, day // 7],
        "age": user % 6,
        "model_id": rng.integers(0, 9, 20_000),
        "weekday": day % 7,
    }
    pl.DataFrame(columns).write_csv(tmp_path / "views.csv")
    job, _ = preparation_of(tmp_path / "views.csv")
    assert job.negatives is not None
    assert job.negatives.item_columns == ("brand", "comment_num", "bad_comment_rate")


def test_labels_without_times_are_split_by_fold_and_outcomes_are_left_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    clicked = (rng.random(400) < 0.04).astype(np.int64)
    age = [None if row % 9 == 0 else row % 60 + 0.5 for row in range(400)]
    columns = {
        "member_id": rng.integers(0, 90, 400),
        "shop": rng.integers(0, 9, 400),
        "age": age,
        "not_clicked": 1 - clicked,
        "clicked": clicked,
    }
    pl.DataFrame(columns).write_parquet(tmp_path / "a.parquet")
    job, text = preparation_of(tmp_path / "a.parquet")
    assert job.negatives is None
    assert job.derive == ()
    assert job.split == hb.prepare.ByFold(valid=0.1)
    assert [column.name for column in job.schema.columns] == ["clicked", "member_id", "shop", "age"]
    fill, *_ = job.schema["age"].transforms
    assert fill == hb.transforms.FillMissing(statistic="median")
    assert "name: not_clicked}" in text
    assert "left out: it decides clicked" in text
    assert "# split: {kind: by_group, column: member_id, valid: 0.1}" in text
    assert "# down_sample: {label: clicked, keep: 0.1, weight: sample_weight}" in text
    assert "left out: it decides clicked" in draft(str(tmp_path / "a.parquet"))


def test_columns_that_are_named_take_the_place_of_guesses(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    rows = [f"{row % 17},{row % 5},{row}.5" for row in range(300)]
    path.write_text("\n".join(["who,what,much", *rows]))
    with pytest.raises(SchemaError, match=r"none like a user or an item, .*--user and --item"):
        preparation_of(path)
    with pytest.raises(SchemaError, match=r"got --item whit\. Name one of who, what, much"):
        preparation_of(path, item="whit")
    job, _ = preparation_of(path, user="who", item="what")
    assert job.negatives == hb.prepare.Negatives("who", "what", per_positive=4)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run `hotbed arguments`."""
    monkeypatch.setattr(sys, "argv", ["hotbed", *arguments])
    with suppress(SystemExit):
        cli.main()


def test_init_writes_a_preparation_and_a_job_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plays(tmp_path / "plays.csv")
    run(monkeypatch, "init", "plays.csv", "--prepare")
    run(monkeypatch, "prepare", "prepare.yaml")
    run(monkeypatch, "train", "job.yaml", "--set", "fit.epochs=1")
    workflow = hb.prepare.Workflow("prepared")
    num_without = workflow.counts["positives_without_negatives"]
    assert 5 * (540 - num_without) <= workflow.counts["train"] <= 5 * 540
    assert "Share of positives, chosen" in Path("prepared/report.html").read_text()
    assert hb.load("runs/job").schema.raw == workflow.raw


@pytest.mark.parametrize(
    ("file", "num_rows"),
    [
        ("amazon_grocery/train.tsv", 800),
        ("rees46/2019-Oct.head.csv", 800),
        ("taobao_ad/raw_sample_10k.csv", 1500),
        ("ml_latest_small/ratings.csv", 1500),
        ("obd/bts_men.csv", 1500),
        ("criteo/deepctr_sample_200.csv", 201),
        ("frappe_x1r/train.csv", 1500),
    ],
)
def test_drafts_of_real_files_prepare_rows_that_train(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, num_rows: int
) -> None:
    head = tmp_path / Path(file).name
    with (shared_data / file).open() as lines:
        head.write_text("".join(islice(lines, num_rows)))
    monkeypatch.chdir(tmp_path)
    run(monkeypatch, "init", head.name, "--prepare")
    run(monkeypatch, "prepare", "prepare.yaml")
    job = hb.Job.read("job.yaml")
    schema = job.fitted()
    for source in (job.train, job.valid):
        batch = next(iter(job.dataset(source, schema)))
        assert 0 < sum(batch.labels[schema.labels[0].name]) <= batch.num_samples
