# SPDX-License-Identifier: Apache-2.0
"""Target encodings do not tell a model the labels of its training rows."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

import hotbed as hb
from hotbed.prepare import ByFold, Preparation, prepare

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
