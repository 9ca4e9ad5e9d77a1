# SPDX-License-Identifier: Apache-2.0
"""Networks over the click histories of MIND: they learn, and a session gives the same scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import hotbed as hb

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMA = hb.Schema(
    [
        hb.Label("clicked"),
        hb.Id("news"),
        hb.Id(
            "history",
            table="news",
            pooling="none",
            max_length=5,
            transforms=[hb.transforms.Split(" ")],
        ),
    ]
)


@pytest.fixture
def rows(shared_data: Path) -> pl.DataFrame:
    """News that were shown in 100 impressions, 20 of them to users without a click before."""
    impressions = pl.read_csv(
        shared_data / "mind" / "behaviors.tsv",
        separator="\t",
        has_header=False,
        new_columns=["impression", "user", "time", "history", "shown"],
        quote_char=None,
    )
    empty = pl.col("history").is_null()
    impressions = pl.concat([impressions.filter(empty)[:20], impressions.filter(~empty)[:80]])
    pair = pl.col("shown").str.split("-").list
    return (
        impressions.with_columns(pl.col("shown").str.split(" "))
        .explode("shown")
        .select("history", news=pair.get(0), clicked=pair.get(1).cast(pl.Int64))
    )


def trained(kind: str, data: hb.Dataset) -> hb.RecModel:
    torch.manual_seed(0)
    tables = hb.make_tables(SCHEMA, dim=8, rule=hb.Adagrad(lr=0.1))
    network = getattr(hb.models, kind)(
        SCHEMA, tables, histories={"history": "news"}, hidden=[16], activation="relu"
    )
    model = hb.RecModel(network, "bce", hb.Adam(lr=3e-3), metrics=["auc"])
    torch.manual_seed(0)
    model.fit(data, epochs=3, progress=False)
    return model


@pytest.mark.parametrize("kind", ["DIN", "DIEN", "BST"])
def test_a_network_over_clicks_learns(kind: str, rows: pl.DataFrame) -> None:
    data = hb.Dataset(hb.sources.Memory(rows), SCHEMA, batch_size=256)
    assert trained(kind, data).evaluate(data)["auc"] > 0.7  # over the rows that it learned


def test_a_session_scores_clicks_and_empty_histories_as_the_model(
    rows: pl.DataFrame, tmp_path: Path
) -> None:
    model = trained("DIN", hb.Dataset(hb.sources.Memory(rows), SCHEMA, batch_size=256))
    model.export(tmp_path / "export")
    empty = rows.filter(pl.col("history").is_null())
    some = pl.concat([empty[:100], rows[-400:]])
    columns = some.select("news", "history").to_dict(as_series=False)
    scores = hb.InferenceSession(tmp_path / "export").predict(columns)
    expected = model.predict(hb.Dataset(hb.sources.Memory(some), SCHEMA, batch_size=512))
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6)
