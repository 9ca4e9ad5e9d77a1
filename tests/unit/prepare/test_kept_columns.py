# SPDX-License-Identifier: Apache-2.0
"""Prepared files have the histories and counts that a model keeps, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import hotbed as hb
from hotbed.embedding.histories import HistoryStore
from hotbed.errors import ConfigError
from hotbed.prepare.keyed import kept

pytest.importorskip("torch", reason="torch absent")


def make_events(rows: int, seed: int) -> pl.DataFrame:
    """Return events in the order of time, many at one time, some without an item."""
    draw = np.random.default_rng(seed)
    items = draw.integers(0, 30, rows)
    return pl.DataFrame(
        {
            "rating": draw.integers(1, 6, rows),
            "at": np.sort(draw.integers(0, rows * 20, rows) // 60 * 60),
            "user": draw.integers(0, 12, rows),
            "item": [f"item {item}" for item in items],
            "shop": items % 3,
        }
    )


def make_schema(kept_columns: list[Any]) -> hb.Schema:
    return hb.Schema(
        [
            hb.Label("liked", column="rating", threshold=4),
            hb.Time("time", column="at"),
            hb.Id("user"),
            hb.Id("item"),
            hb.Id("shop"),
            *kept_columns,
        ]
    )


LIKED = {"liked": 1}
KEPT = [
    hb.History("before", of=["item", "time", "shop"], by="user", where=LIKED, length=5),
    hb.History("lately", of=["shop"], by="user", length=40, within_seconds=1800),
    hb.Count("likes", by="item", where=LIKED, windows=[600, 3600], every=60),
    hb.Count(
        "rate", by="shop", where=LIKED, windows=[3600], every=60, half_life=900, values=["rate"]
    ),
]


def prepared(events: pl.DataFrame, schema: hb.Schema, folder: Path) -> hb.prepare.Workflow:
    """Prepare events that lie in two files."""
    folder.mkdir()
    middle = events.height // 3
    events.head(middle).write_parquet(folder / "1.parquet")
    events.slice(middle).write_parquet(folder / "2.parquet")
    source = hb.sources.Parquet(str(folder / "*.parquet"))
    job = hb.prepare.Preparation(source, schema, output=str(folder / "prepared"))
    return hb.prepare.prepare(job, hb.prepare.Local(workers=2))


@pytest.mark.parametrize("seed", [1, 2])
def test_prepared_files_have_what_a_model_keeps_that_reads_the_rows_in_order(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_PIECE", 100)  # some keys have more rows, most have fewer
    events = make_events(900, seed)
    schema = make_schema(KEPT)
    workflow = prepared(events, schema, tmp_path / "events")
    store = HistoryStore(schema, hb.make_tables(schema, dim=4))
    in_order = hb.Dataset(hb.sources.Memory(events), schema, batch_size=128)
    rows = hb.Dataset(hb.sources.Prepared(workflow.path), workflow.schema, batch_size=128)
    num_entries = 0
    for batch, expected in zip(rows, in_order, strict=True):
        expected = store.fill(expected, leaves=True)
        for name in ("before", "before_time", "before_shop", "lately"):
            ids = batch.ids[name].with_offsets()
            other = expected.ids[name]
            assert ids.offsets.tolist() == other.offsets.tolist(), name
            assert ids.values.tolist() == other.values.tolist(), name
            num_entries += len(ids.values)
        for name in ("likes", "rate"):
            assert np.array_equal(batch.dense[name], expected.dense[name]), name
    assert num_entries > 10_000


def test_previous_is_a_history_of_all_rows_whose_times_differ(tmp_path: Path) -> None:
    events = make_events(300, seed=3).with_columns(at=pl.int_range(300) * 7)
    schema = make_schema(
        [
            hb.History("kept", of=["shop"], by="user", length=5),
            hb.Id("derived", table="shop", pooling="none", max_length=5),
        ]
    )
    derive = [hb.prepare.Previous("derived", by="user", time="at", column="shop", length=5)]
    job = hb.prepare.Preparation(
        hb.sources.Memory(events), schema, derive, output=str(tmp_path / "prepared")
    )
    workflow = hb.prepare.prepare(job)
    for batch in hb.Dataset(hb.sources.Prepared(workflow.path), workflow.schema, batch_size=128):
        kept_ids, derived = batch.ids["kept"], batch.ids["derived"]
        assert kept_ids.values.tolist() == derived.values.tolist()
        assert kept_ids.offsets.tolist() == derived.offsets.tolist()


def test_a_model_of_shuffled_prepared_rows_is_served_by_key_after_one_pass(tmp_path: Path) -> None:
    events = make_events(600, seed=4)
    before = hb.History("before", of=["item"], by="user", where=LIKED, length=5)
    schema = make_schema([before, KEPT[2]])
    workflow = prepared(events, schema, tmp_path / "events")
    learned = make_model(workflow.schema)
    files = hb.sources.Prepared(workflow.path)
    learned.fit(hb.Dataset(files, workflow.schema, 64, shuffle=200), epochs=2, progress=False)
    learned.save(tmp_path / "run")

    served = make_model(schema)
    served.warm_start(tmp_path / "run")
    served.network.load_state_dict(learned.network.state_dict())
    assert served.histories is not None
    for batch in hb.Dataset(hb.sources.Memory(events.head(500)), schema, batch_size=64):
        served.histories.fill(batch, leaves=True)
    served.export(tmp_path / "export")
    session = hb.InferenceSession(tmp_path / "export")
    asked = events.slice(500, 1).drop("rating")
    expected = learned.predict(hb.Dataset(files, workflow.schema, 64))[500]
    assert len(session.ask(asked.to_arrow()).kept["before"].values) == 5
    assert session.predict(asked.to_arrow()) == pytest.approx([expected], abs=1e-6)


def make_model(schema: hb.Schema) -> hb.RecModel:
    network = hb.models.DIN(
        schema,
        hb.make_tables(schema, dim=4),
        histories={"before": "item"},
        hidden=(8,),
        attention="dot",
    )
    return hb.RecModel(network, "bce", "adam")


def test_ids_that_a_list_cannot_be_made_of_are_refused() -> None:
    word = hb.Id("word", column="item", transforms=[hb.transforms.Map()])
    schema = make_schema([word, hb.History("before", of=["word"], by="user")])
    with pytest.raises(ConfigError, match="Give `map` the key `joint`"):
        hb.prepare.Preparation(hb.sources.Memory(make_events(9, 1)), schema)
