# SPDX-License-Identifier: Apache-2.0
"""Parts, negatives and samples of whole preparations: from files to files."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from schedule import in_soak

from hotbed.connectors import Csv
from hotbed.prepare import Local, Preparation, Workflow, prepare
from hotbed.prepare.partitions import partitions_of

pytestmark = pytest.mark.core

USERS = 60
FILMS = 40


@pytest.fixture(scope="module")
def events() -> pl.DataFrame:
    """Clicks of users on films; film `f` is of the genre `g{f % 7}`."""
    generator = np.random.default_rng(0)
    films = np.minimum(generator.geometric(0.1, 6000), FILMS - 1)
    return pl.DataFrame(
        {
            "row": np.arange(6000),
            "user": generator.integers(0, USERS, 6000),
            "film": [f"f{film}" for film in films],
            "genre": [f"g{film % 7}" for film in films],
            "time": generator.integers(0, 500, 6000),
            "clicked": (generator.random(6000) < 0.1).astype(int),
        }
    )


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory, events: pl.DataFrame) -> Path:
    """The events in three CSV files."""
    folder = tmp_path_factory.mktemp("raw")
    for number in range(3):
        events[number * 2000 : (number + 1) * 2000].write_csv(folder / f"{number}.csv")
    return folder


def columns(*roles: str) -> dict[str, Any]:
    return {"columns": [dict(zip(("kind", "name"), role.split(), strict=True)) for role in roles]}


SCHEMA = columns("label clicked", "time time", "id user", "id row")


def prepared(
    raw: Path, output: Path, schema: dict[str, Any] = SCHEMA, workers: int = 2, **keys: Any
) -> tuple[Workflow, dict[str, pl.DataFrame]]:
    """Return the workflow, and the rows of each part."""
    source = {"kind": "csv", "path": str(raw / "*.csv")}
    spec = {"source": source, "schema": schema, "output": str(output), **keys}
    workflow = prepare(Preparation.from_json(spec), Local(workers))
    parts = {
        part.name: pl.read_parquet(part / "*.parquet")
        for part in (output / "train", output / "valid")
        if part.exists()
    }
    return workflow, parts


SPLITS = [
    {"kind": "by_time", "valid": 0.2},
    {"kind": "by_time", "from": "1970-01-01T00:06:40"},
    {"kind": "by_fold", "valid": 0.2},
    {"kind": "by_group", "column": "user", "valid": 0.2},
]


@pytest.mark.parametrize("split", SPLITS)
def test_each_row_is_in_one_part(raw: Path, tmp_path: Path, split: dict[str, Any]) -> None:
    _, parts = prepared(raw, tmp_path / "out", split=split)
    train = parts["train"]
    valid = parts["valid"]
    rows = train["row"].to_list() + valid["row"].to_list()
    assert sorted(rows) == list(range(6000))
    assert len(valid) / 6000 == pytest.approx(0.2, abs=0.1)
    if split["kind"] == "by_time":
        assert train["time"].max() < valid["time"].min()  # type: ignore[operator]
    if split["kind"] == "by_group":
        assert not set(train["user"]) & set(valid["user"])


@pytest.mark.parametrize("split", SPLITS[2:])
def test_down_sampling_is_independent_of_the_split(
    raw: Path, tmp_path: Path, events: pl.DataFrame, split: dict[str, Any]
) -> None:
    sample = {"label": "clicked", "keep": 0.25, "weight": "importance"}
    _, parts = prepared(raw, tmp_path / "out", split=split, down_sample=sample)
    _, whole = prepared(raw, tmp_path / "whole", split=split)
    assert parts["valid"].drop("importance").equals(whole["valid"])
    assert parts["valid"]["importance"].unique().to_list() == [1.0]
    train = parts["train"]
    positives = whole["train"].filter(pl.col("clicked") == 1)
    negatives = whole["train"].filter(pl.col("clicked") == 0)
    kept = train.filter(pl.col("clicked") == 0)
    assert train.filter(pl.col("clicked") == 1).drop("importance").equals(positives)
    assert len(kept) / len(negatives) == pytest.approx(0.25, abs=0.03)
    assert kept["importance"].unique().to_list() == [4.0]
    rate = (train["clicked"] * train["importance"]).sum() / train["importance"].sum()
    assert rate == pytest.approx(whole["train"]["clicked"].mean(), rel=0.1)


def test_a_weight_of_the_schema_is_multiplied(raw: Path, tmp_path: Path) -> None:
    schema = {"columns": [*SCHEMA["columns"], {"kind": "weight", "name": "w", "column": "time"}]}
    sample = {"label": "clicked", "keep": 0.5, "weight": "w"}
    _, parts = prepared(raw, tmp_path / "out", schema, down_sample=sample)
    train = parts["train"].with_columns(seconds=pl.col("time").dt.epoch("s"))
    factor = pl.when(pl.col("clicked") == 0).then(2.0).otherwise(1.0)
    assert train.select((pl.col("w") == pl.col("seconds") * factor).all()).item()


IMPLICIT = columns("label watched", "time time", "id user", "id film", "id genre", "id row")


@pytest.mark.parametrize(
    "rules",
    in_soak(
        product(["matched", "never"], SPLITS),
        quick=[*zip(["matched", "never", "never", "matched"], SPLITS, strict=True)],
    ),
)
def test_negatives_are_in_the_part_of_their_positive(
    raw: Path, tmp_path: Path, rules: tuple[str, dict[str, Any]]
) -> None:
    """`rules`: which items that a user saw may be drawn, and how rows are split."""
    seen, split = rules
    negatives = {"user": "user", "item": "film", "per_positive": 3, "item_columns": ["genre"]}
    negatives["seen"] = seen
    workflow, parts = prepared(raw, tmp_path / "out", IMPLICIT, negatives=negatives, split=split)
    _, plain = prepared(
        raw, tmp_path / "plain", columns("id film", "id row", "time time"), split=split
    )
    own = pl.concat(frame.select("film", "time", "row") for frame in plain.values())
    users = pl.concat(parts.values()).select("row", "user").unique()
    known = set(own.join(users, on="row").select("user", "film", "time").iter_rows())
    genres = dict(pl.concat(parts.values()).select("film", "genre").iter_rows())
    num_negatives = 0
    num_positives = 0
    for name, part in parts.items():
        positives = part.filter(pl.col("watched") == 1)
        drawn = part.filter(pl.col("watched") == 0)
        num_negatives += len(drawn)
        num_positives += len(positives)
        of_part = plain[name].select("row", "film")
        kept = of_part.filter(pl.col("row").is_in(positives["row"].implode()))
        assert positives.select("row", "film").equals(kept)
        assert set(drawn["film"]) <= set(of_part["film"])
        assert not known & set(drawn.select("user", "film", "time").iter_rows())
        if seen == "never":
            pairs = {(user, film) for user, film, _ in known}
            assert not pairs & set(drawn.select("user", "film").iter_rows())
        assert dict(drawn.select("film", "genre").iter_rows()).items() <= genres.items()
        copied = drawn.join(positives, on="row", suffix="_own")
        assert len(copied) == len(drawn)
        for column in ("user", "time"):
            assert copied[column].equals(copied[f"{column}_own"], null_equal=False)
        assert set(Counter(drawn["row"].to_list()).values()) == {3}
    assert workflow.counts["negatives"] == num_negatives
    without = workflow.counts["positives_without_negatives"]
    assert num_positives == 6000 - (without if seen == "matched" else 0)


def test_target_encodings_of_users_do_not_tell_negatives_from_their_positive(
    raw: Path, tmp_path: Path
) -> None:
    encode = {"kind": "target_encode", "label": "watched", "folds": 3}
    rate = {"kind": "dense", "name": "rate", "column": "user", "transforms": [encode]}
    schema = {"columns": [*IMPLICIT["columns"], rate]}
    negatives = {"user": "user", "item": "film"}
    _, parts = prepared(raw, tmp_path / "out", schema, negatives=negatives)
    # one of five rows is positive: in each fold, since a positive takes its negatives along
    np.testing.assert_allclose(parts["train"]["rate"], 0.2, rtol=1e-6)


def test_nothing_depends_on_memory_and_workers(raw: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "negatives": {"user": "user", "item": "film", "draw": "popularity"},
        "split": {"kind": "by_time", "valid": 0.1},
        "down_sample": {"label": "watched", "keep": 0.5, "weight": "w"},
    }
    outputs = []
    for workers, memory in ((1, "4GB"), (3, "1MB")):
        workflow, _ = prepared(raw, tmp_path / memory, IMPLICIT, workers, memory=memory, **keys)
        files = sorted((tmp_path / memory).rglob("part-*"))
        outputs.append((workflow.counts, [file.read_bytes() for file in files]))
    without = outputs[0][0]["positives_without_negatives"]
    assert outputs[0][0]["negatives"] == 4 * (6000 - without)
    assert outputs[0] == outputs[1]


def test_the_workflow_samples_the_training_rows_as_before(raw: Path, tmp_path: Path) -> None:
    workflow, parts = prepared(
        raw,
        tmp_path / "out",
        IMPLICIT,
        negatives={"user": "user", "item": "film", "item_columns": ["genre"]},
        split={"kind": "by_time", "valid": 0.1},
        down_sample={"label": "watched", "keep": 0.5, "weight": "w"},
    )
    source = Csv(str(raw / "*.csv"))
    workflow.apply(source, str(tmp_path / "again"), training=True)
    for name, part in parts.items():
        assert pl.read_parquet(tmp_path / "again" / name / "*.parquet").equals(part)
    workflow.apply(source, str(tmp_path / "as served"))
    rows = pl.read_parquet(tmp_path / "as served/valid/*.parquet")
    assert rows["row"].to_list() == list(range(6000))  # none is left out where none is drawn
    assert rows["w"].unique().to_list() == [1.0]


def test_large_expansions_come_in_pieces(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {
        "negatives": {"user": "user", "item": "film", "per_positive": 9},
        "split": {"kind": "by_fold", "valid": 0.3},
        "down_sample": {"label": "watched", "keep": 0.5},
    }
    _, whole = prepared(raw, tmp_path / "whole", IMPLICIT, **keys)
    small = partial(partitions_of, chunk_rows=1000)
    monkeypatch.setattr("hotbed.prepare.run.partitions_of", small)
    _, pieces = prepared(raw, tmp_path / "pieces", IMPLICIT, **keys)
    for part in ("train", "valid"):
        assert pieces[part].equals(whole[part])
