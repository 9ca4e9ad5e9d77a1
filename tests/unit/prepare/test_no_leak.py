# SPDX-License-Identifier: Apache-2.0
"""Nothing that a preparation makes tells the labels: neither encodings, nor negatives."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

import hotbed as hb
from hotbed.prepare import ByFold, Preparation, Workflow, prepare

NUM_ROWS = 120_000
NUM_USERS = 30_000  # two or three training rows each
TOLERANCE = 0.01

ENCODINGS = {
    "out of fold": hb.transforms.TargetEncode("clicked", smooth=1.0),
    "earlier": hb.transforms.TargetEncode("clicked", ordered_by="at", smooth=1.0),
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pl.DataFrame]:
    """Prepared rows with random labels; `served` has what servers would give training rows."""
    rng = np.random.default_rng(11)
    folder = tmp_path_factory.mktemp("leak")
    raw = pl.DataFrame(
        {
            "number": np.arange(NUM_ROWS),
            "user": rng.integers(0, NUM_USERS, NUM_ROWS),
            "at": rng.integers(0, 1_000_000, NUM_ROWS),
            "clicked": rng.integers(0, 2, NUM_ROWS),
        }
    )
    raw.write_parquet(folder / "raw.parquet", row_group_size=50_000)
    columns = [hb.Dense("number"), hb.Label("clicked")]
    for name, encode in ENCODINGS.items():
        columns.append(hb.Dense(name, [encode], column="user"))
    job = Preparation(
        hb.sources.Parquet(str(folder / "raw.parquet")),
        hb.Schema(columns),
        split=ByFold(valid=0.5),
        output=str(folder / "prepared"),
    )
    workflow = prepare(job)
    frames = {}
    for part in ("train", "valid"):
        frames[part] = pl.read_parquet(folder / "prepared" / part / "*.parquet")
    rows = raw[frames["train"]["number"].cast(pl.Int64)]
    batch = hb.data.Encoder(workflow.raw)(rows.to_arrow())
    frames["served"] = pl.DataFrame({"clicked": batch.labels["clicked"], **batch.dense})
    return frames


def auc(scores: NDArray[np.float64], labels: NDArray[np.float64]) -> float:
    """Return the share of pairs of a click and no click that the scores put in order."""
    ranks = pl.Series(scores).rank("average").to_numpy()
    clicks = labels > 0
    num_clicks = clicks.sum()
    above = ranks[clicks].sum() - num_clicks * (num_clicks + 1) / 2
    return float(above / (num_clicks * (~clicks).sum()))


@pytest.mark.parametrize("name", ENCODINGS)
def test_random_labels_cannot_be_told_from_their_encodings(
    parts: dict[str, pl.DataFrame], name: str
) -> None:
    for part in ("train", "valid"):
        rows = parts[part]
        assert rows[name].n_unique() > 5
        assert auc(rows[name].to_numpy(), rows["clicked"].to_numpy()) == pytest.approx(
            0.5, abs=TOLERANCE
        )
    served = parts["served"]  # the test would see a leak
    assert auc(served[name].to_numpy(), served["clicked"].to_numpy()) > 0.7


@pytest.mark.parametrize("name", ENCODINGS)
def test_encodings_do_not_take_the_place_of_a_signal_in_a_model(
    parts: dict[str, pl.DataFrame], name: str
) -> None:
    rng = np.random.default_rng(12)

    def valid_auc(training: pl.DataFrame) -> float:
        """Train logistic regression on a weak signal and the encoding; return the AUC."""
        rows = {}
        for part, frame in (("train", training), ("valid", parts["valid"])):
            labels = frame["clicked"].to_numpy()
            signal = 0.5 * labels + rng.normal(size=len(labels))
            ones = np.ones(len(labels))
            rows[part] = (np.column_stack([ones, signal, frame[name].to_numpy()]), labels)
        inputs, labels = rows["train"]
        weights = np.zeros(3)
        for _ in range(8):  # Newton's method
            scores = 1 / (1 + np.exp(-inputs @ weights))
            slopes = inputs * (scores * (1 - scores))[:, None]
            weights += np.linalg.solve(inputs.T @ slopes, inputs.T @ (labels - scores))
        inputs, labels = rows["valid"]
        assert auc(inputs[:, 1], labels) > 0.6
        return auc(inputs @ weights, labels) - auc(inputs[:, 1], labels)

    assert valid_auc(parts["train"]) == pytest.approx(0, abs=TOLERANCE)
    assert valid_auc(parts["served"]) < -2 * TOLERANCE


# --- negatives beside histories -------------------------------------------------------------------

NUM_EVENTS = 12_000
DERIVED: dict[str, Any] = {
    "history": {"kind": "previous", "column": "item"},
    "brands": {"kind": "previous", "column": "brand", "length": 5},
    "since": {"kind": "time_difference"},
    "place": {"kind": "session", "gives": "position", "gap_seconds": 3600},
}
SPLITS: dict[str, Any] = {
    "time": {"kind": "by_time", "valid": 0.3},
    "fold": {"kind": "by_fold", "valid": 0.3},
    "group": {"kind": "by_group", "column": "user", "valid": 0.3},
    "none": None,
}


def shuffled_events(path: Path, seed: int = 0) -> pl.DataFrame:
    """Write events whose items have nothing to do with users, times and earlier items."""
    rng = np.random.default_rng(seed)
    item = rng.integers(0, 60, NUM_EVENTS)
    at = np.sort(rng.integers(0, 500_000, NUM_EVENTS))
    frame = pl.DataFrame(
        {
            "row": np.arange(NUM_EVENTS),
            "user": rng.integers(0, 300, NUM_EVENTS),
            "item": item,
            "brand": item % 7,
            "price": item * 10 + at // 100_000,  # changes five times
            "at": at,
        }
    )
    frame.write_parquet(path, row_group_size=5000)
    return frame


def prepared_events(folder: Path, split: Any, **negatives: Any) -> tuple[Workflow, pl.DataFrame]:
    ids = [{"kind": "id", "name": name} for name in ("row", "user", "item", "brand", "price")]
    bags = [{"kind": "id", "name": name, "pooling": "mean"} for name in ("history", "brands")]
    dense = [
        {"kind": "dense", "name": name, "transforms": [{"kind": "fill_missing", "value": -1}]}
        for name in ("since", "place")
    ]
    roles = [{"kind": "label", "name": "chosen"}, {"kind": "time", "name": "at"}]
    derive = [{"name": name, "by": "user", "time": "at", **DERIVED[name]} for name in DERIVED]
    keys = {"user": "user", "item": "item", "item_columns": ["brand", "price"], **negatives}
    spec = {
        "source": {"kind": "parquet", "path": str(folder / "events.parquet")},
        "schema": {"columns": [*roles, *ids, *bags, *dense]},
        "derive": derive,
        "negatives": keys,
        "output": str(folder / "out"),
    }
    if split is not None:
        spec["split"] = split
    workflow = prepare(Preparation.from_json(spec))
    parts = [pl.read_parquet(path / "*.parquet") for path in (folder / "out").glob("[tv]*")]
    return workflow, pl.concat(parts)


def scores_of(rows: pl.DataFrame) -> dict[str, NDArray[np.float64]]:
    """Return numbers of each row that could tell its label, alone or as pairs of columns."""
    scores = rows.select(
        pl.col("item").is_in(pl.col("history")).alias("item in history"),
        (pl.col("history").list.last() == pl.col("item")).fill_null(False).alias("item is last"),
        pl.col("brand").is_in(pl.col("brands")).alias("brand in history"),
        pl.col("history").list.len().alias("length"),
        *(pl.col(name) for name in ("since", "place", "item", "brand", "price", "user", "row")),
        (pl.col("price") - 10 * pl.col("item")).alias("price of the time"),
    )
    times = [history.count(item) for history, item in rows.select("history", "item").iter_rows()]
    scores = scores.with_columns(pl.Series("times in history", times))
    return {name: scores[name].cast(pl.Float64).to_numpy() for name in scores.columns}


@pytest.mark.parametrize(
    ("split", "draw"),
    [("time", "popularity"), ("fold", "uniform"), ("group", "popularity"), ("none", "uniform")],
)
def test_negatives_of_shuffled_items_cannot_be_told_from_positives(
    tmp_path: Path, split: str, draw: str
) -> None:
    events = shuffled_events(tmp_path / "events.parquet", seed=len(split) + len(draw))
    workflow, rows = prepared_events(tmp_path, SPLITS[split], draw=draw, per_positive=2)
    labels = rows["chosen"].to_numpy()
    num_positives = int(labels.sum())
    assert num_positives + workflow.counts["positives_without_negatives"] == len(events)
    assert len(rows) == 3 * num_positives
    deviation = np.sqrt((len(rows) + 1) / (12 * num_positives * 2 * num_positives))
    for name, score in scores_of(rows).items():
        assert auc(score, labels) == pytest.approx(0.5, abs=4 * deviation), name
    share = rows.filter(pl.col("item").is_in(pl.col("history")))["chosen"].mean()
    assert share == pytest.approx(1 / 3, abs=0.02)
    prices = rows.select(
        now=pl.col("price") - 10 * pl.col("item"), then=pl.col("at").dt.epoch("s") // 100_000
    )
    # an item has a row in nearly each hour: its price is that of the time
    assert (prices["now"] == prices["then"]).mean() > 0.95


def revisits(path: Path) -> None:
    """Write events of users who mostly come back to what they saw, as on the pages of a shop."""
    rng = np.random.default_rng(5)
    user = rng.integers(0, 200, 6000)
    item = 10 * user + rng.integers(0, 4, 6000)
    frame = pl.DataFrame(
        {
            "row": np.arange(6000),
            "user": user,
            "item": item,
            "brand": item % 7,
            "price": item % 11,
            "at": np.arange(6000),
        }
    )
    frame.write_parquet(path)


def test_a_rule_that_hides_what_users_saw_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    revisits(tmp_path / "events.parquet")
    (tmp_path / "never").mkdir()
    revisits(tmp_path / "never" / "events.parquet")
    for seen, is_leak in (("matched", False), ("never", True)):
        folder = tmp_path if seen == "matched" else tmp_path / "never"
        with caplog.at_level(logging.WARNING, "hotbed.prepare"):
            caplog.clear()
            _, rows = prepared_events(folder, None, seen=seen)
        area = auc(scores_of(rows)["item in history"], rows["chosen"].to_numpy())
        text = "whether 'item' is in 'history' alone tells the label 'chosen', with an AUC of"
        assert (area > 0.9) is is_leak
        assert any(text in message for message in caplog.messages) is is_leak
        page = (folder / "out" / "report.html").read_text()
        assert ("Warning: columns that tell the label" in page) is is_leak
        if not is_leak:
            assert area == pytest.approx(0.5, abs=0.005)  # histories end after 20 rows
            assert not caplog.messages


@pytest.mark.parametrize("kind", ["number", "word", "missing"])
@pytest.mark.parametrize("num_rows", [999, 4000])
def test_a_column_that_tells_the_label_is_a_warning_from_a_thousand_rows_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, num_rows: int
) -> None:
    rng = np.random.default_rng(3)
    label = rng.integers(0, 2, num_rows)
    words = [f"{'yes' if one else 'no'} {number % 50}" for number, one in enumerate(label)]
    leaks = {
        "number": label + rng.normal(0, 0.3, num_rows),
        "word": words,
        "missing": [word if one else None for word, one in zip(words, label, strict=True)],
    }
    frame = pl.DataFrame(
        {"clicked": label, "user": rng.integers(0, num_rows, num_rows), "leak": leaks[kind]}
    )
    frame.write_parquet(tmp_path / "raw.parquet")
    role = hb.Dense("leak") if kind == "number" else hb.Id("leak")
    job = Preparation(
        hb.sources.Parquet(str(tmp_path / "raw.parquet")),
        hb.Schema([hb.Label("clicked"), hb.Id("user"), role]),
        output=str(tmp_path / "out"),
    )
    with caplog.at_level(logging.WARNING, "hotbed.prepare"):
        prepare(job)
    expected = 1 if num_rows >= 1000 else 0
    assert (
        sum("column 'leak' alone tells the label" in text for text in caplog.messages) == expected
    )
    assert len(caplog.messages) == expected
