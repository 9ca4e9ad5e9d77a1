# SPDX-License-Identifier: Apache-2.0
"""What a preparation learns by key, against plain dicts over the rows that it wrote."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from schedule import in_soak

import hotbed as hb
from hotbed.errors import ConfigError, DecodeError, SchemaError
from hotbed.prepare import Preparation, prepare, stages
from hotbed.prepare.engine import Local
from hotbed.prepare.partitions import partitions_of
from hotbed.prepare.places import Purpose, folds_of, hash_places

NUM_ROWS = 400
ROWS_A_FILE = 150
SEED = 5


def raw_rows() -> pl.DataFrame:
    rng = np.random.default_rng(3)
    cities = np.array(["ulm", "köln", "rom", "nice", None], object)
    shops = rng.integers(0, 40, NUM_ROWS) * 10**17
    return pl.DataFrame(
        {
            "number": np.arange(NUM_ROWS),
            "city": rng.choice(cities, NUM_ROWS, p=[0.4, 0.3, 0.1, 0.1, 0.1]).tolist(),
            "home": rng.choice(cities, NUM_ROWS).tolist(),
            "shop": pl.Series(shops).set(pl.Series(rng.random(NUM_ROWS) < 0.1), None),
            "price": pl.Series(rng.normal(size=NUM_ROWS)).set(
                pl.Series(rng.random(NUM_ROWS) < 0.2), None
            ),
            "clicked": rng.integers(0, 2, NUM_ROWS),
            "at": rng.integers(0, 50, NUM_ROWS),
        }
    )


@pytest.fixture
def source(tmp_path: Path) -> hb.sources.Parquet:
    """Three files with row groups of 40 rows."""
    for number, part in enumerate(raw_rows().iter_slices(ROWS_A_FILE)):
        part.write_parquet(tmp_path / f"raw-{number}.parquet", row_group_size=40)
    return hb.sources.Parquet(str(tmp_path / "raw-*.parquet"))


@pytest.fixture(autouse=True, params=in_soak([1, 5], quick={5}))
def num_buckets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Small chunks, and one or more buckets."""
    small = partial(partitions_of, chunk_rows=17)
    monkeypatch.setattr("hotbed.prepare.run.partitions_of", small)
    monkeypatch.setattr(stages, "buckets_for", lambda *_: request.param)
    return int(request.param)


def prepared(
    source: hb.sources.Source, folder: Path, columns: list[Any], workers: int = 2
) -> tuple[hb.Schema, pl.DataFrame]:
    """Return the fitted schema over raw rows, and all rows with raw and prepared columns."""
    schema = hb.Schema([hb.Label("clicked"), hb.Dense("number"), *columns])
    job = Preparation(
        source,
        schema,
        split=hb.prepare.ByFold(valid=0.25),
        output=str(folder / "prepared"),
        seed=SEED,
    )
    workflow = prepare(job, Local(workers))
    parts = []
    for part in ("train", "valid"):
        rows = pl.read_parquet(folder / "prepared" / part / "*.parquet")
        parts.append(rows.with_columns(part=pl.lit(part)))
    raw = raw_rows().rename(
        {name: f"raw {name}" for name in raw_rows().columns if name != "number"}
    )
    rows = pl.concat(parts).with_columns(pl.col("number").cast(pl.Int64))
    joined = raw.join(rows, on="number", how="left", maintain_order="left")
    return workflow.raw, joined


@cache
def fold_of(number: int, num_folds: int) -> int:
    file, place = divmod(number, ROWS_A_FILE)
    hashes = hash_places(file, np.array([place]), SEED, Purpose.FOLDS)
    return int(folds_of(hashes, num_folds)[0])


def check_means(
    rows: pl.DataFrame,
    column: str,
    key: Callable[[dict[str, Any]], Any],
    counts_for: Callable[[dict[str, Any], dict[str, Any]], bool],
) -> None:
    """Check a smoothed mean of each row; `counts_for(row, other)`: of training rows."""
    everything = rows.to_dicts()
    training = [row for row in everything if row["part"] == "train"]
    prior = statistics.fmean(row["raw clicked"] for row in training)
    for row in everything:
        labels = [
            other["raw clicked"]
            for other in training
            if key(other) == key(row)
            and key(row) is not None
            and (row["part"] == "valid" or counts_for(row, other))
        ]
        expected = (sum(labels) + 2.0 * prior) / (len(labels) + 2.0)
        assert row[column] == pytest.approx(expected, abs=1e-6)


def test_target_encodings_of_training_rows_are_out_of_fold(
    source: hb.sources.Parquet, tmp_path: Path
) -> None:
    columns = [
        hb.Dense("rate", [hb.transforms.TargetEncode("clicked", 3, smooth=2.0)], column="city"),
        hb.Dense(
            "pair",
            [
                hb.transforms.Cross(["shop"]),
                hb.transforms.TargetEncode("clicked", smooth=2.0),
                hb.transforms.Log(),
            ],
            column="city",
        ),
    ]
    _, rows = prepared(source, tmp_path, columns)
    check_means(
        rows,
        "rate",
        lambda row: row["raw city"],
        lambda row, other: fold_of(row["number"], 3) != fold_of(other["number"], 3),
    )

    def pair(row: dict[str, Any]) -> Any:
        both = (row["raw city"], row["raw shop"])
        return None if None in both else both

    check_means(
        rows.with_columns(pl.col("pair").exp() - 1),
        "pair",
        pair,
        lambda row, other: fold_of(row["number"], 5) != fold_of(other["number"], 5),
    )


def test_ordered_target_encodings_know_only_earlier_rows(
    source: hb.sources.Parquet, tmp_path: Path
) -> None:
    encode = hb.transforms.TargetEncode("clicked", ordered_by="at", smooth=2.0)
    _, rows = prepared(source, tmp_path, [hb.Dense("rate", [encode], column="shop")])
    check_means(
        rows,
        "rate",
        lambda row: row["raw shop"],
        lambda row, other: other["raw at"] < row["raw at"],
    )


def test_group_statistics_are_those_of_the_training_rows(
    source: hb.sources.Parquet, tmp_path: Path
) -> None:
    fill = hb.transforms.FillMissing(-9.0)
    columns = [
        hb.Dense(statistic, [hb.transforms.JoinGroupby("price", statistic), fill], column="shop")
        for statistic in ("mean", "sum", "std", "min", "max", "count")
    ]
    _, rows = prepared(source, tmp_path, columns)
    by_hand: dict[str, Callable[[list[float]], float]] = {
        "mean": statistics.fmean,
        "sum": math.fsum,
        "std": statistics.stdev,
        "min": min,
        "max": max,
        "count": len,
    }
    training = rows.filter(pl.col("part") == "train").to_dicts()
    for row in rows.to_dicts():
        prices = [
            other["raw price"]
            for other in training
            if other["raw shop"] == row["raw shop"] is not None and other["raw price"] is not None
        ]
        for statistic, of in by_hand.items():
            expected = -9.0
            if statistic in ("sum", "count") or len(prices) > (statistic == "std"):
                expected = of(prices)
            assert row[statistic] == pytest.approx(expected, abs=1e-5), statistic


def test_joint_vocabulary_holds_the_words_of_all_its_columns(
    source: hb.sources.Parquet, tmp_path: Path
) -> None:
    joint = hb.transforms.Map(joint="place", min_count=3)
    columns = [hb.Id("city", transforms=[joint]), hb.Id("home", transforms=[joint])]
    _, rows = prepared(source, tmp_path, columns)
    training = rows.filter(pl.col("part") == "train")
    counts = Counter([*training["raw city"], *training["raw home"]])
    del counts[None]
    ranked = sorted((-count, word) for word, count in counts.items() if count >= 3)
    ids = {word: 1 + place for place, (_, word) in enumerate(ranked)}
    for name in ("city", "home"):
        expected = [None if word is None else ids.get(word, 0) for word in rows[f"raw {name}"]]
        assert rows[name].to_list() == expected
    (words_file,) = (tmp_path / "prepared" / "vocabularies").iterdir()
    words = pl.read_parquet(words_file)
    assert words["value"].to_list() == [word for _, word in ranked]
    assert words["count"].to_list() == [-count for count, _ in ranked]


def test_fitted_schema_encodes_validation_rows_as_they_were_written(
    source: hb.sources.Parquet, tmp_path: Path
) -> None:
    columns = [
        hb.Id("city", transforms=[hb.transforms.Map()]),
        hb.Id("shop", transforms=[hb.transforms.Map(max_size=7)]),
        hb.Dense("rate", [hb.transforms.TargetEncode("clicked")], column="shop"),
        hb.Dense("times", [hb.transforms.JoinGroupby("price", "count")], column="city"),
    ]
    schema, rows = prepared(source, tmp_path, columns)
    batch = hb.data.Encoder(schema)(raw_rows().to_arrow())
    is_valid = (rows["part"] == "valid").to_numpy()
    for name in ("rate", "times"):
        assert (batch.dense[name][is_valid] == rows[name].to_numpy()[is_valid]).all()
    assert batch.ids["shop"].values.tolist() == rows["shop"].drop_nulls().to_list()


def test_prepared_files_have_the_same_bytes_for_any_number_of_workers(
    source: hb.sources.Parquet, tmp_path: Path
) -> None:
    columns = [
        hb.Id("city", transforms=[hb.transforms.Map()]),
        hb.Dense("rate", [hb.transforms.TargetEncode("clicked")], column="shop"),
        hb.Dense(
            "std",
            [hb.transforms.JoinGroupby("price", "std"), hb.transforms.FillMissing(0.0)],
            column="shop",
        ),
    ]
    digests = []
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        folder.mkdir()
        schema, rows = prepared(source, folder, columns, workers)
        digests.append((schema, rows.to_dicts()))
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (["a", "b"], "expected one key a row, got lists"),
        (0.5, "expected keys that are integers or text, got double"),
    ],
)
def test_key_that_is_not_one_is_rejected_by_name(tmp_path: Path, key: Any, message: str) -> None:
    rows = pl.DataFrame({"number": [1], "clicked": [1], "tags": [key]})
    rows.write_parquet(tmp_path / "raw.parquet")
    source = hb.sources.Parquet(str(tmp_path / "raw.parquet"))
    encode = hb.transforms.TargetEncode("clicked")
    with pytest.raises(SchemaError, match=f"'tags': {message}"):
        prepared(source, tmp_path, [hb.Dense("tags", [encode])])


def test_target_of_an_unknown_label_is_rejected(source: hb.sources.Parquet, tmp_path: Path) -> None:
    encode = hb.transforms.TargetEncode("click")
    with pytest.raises(ConfigError, match=r"'click'.*Did you mean 'clicked'"):
        prepared(source, tmp_path, [hb.Dense("city", [encode])])


def test_row_without_the_label_of_an_encoding_is_named(tmp_path: Path) -> None:
    rows = pl.DataFrame({"number": range(9), "clicked": [0] * 7 + [None, 1], "city": "ulm"})
    rows.write_parquet(tmp_path / "raw.parquet")
    encode = hb.Dense("city", [hb.transforms.TargetEncode("clicked")])
    source = hb.sources.Parquet(str(tmp_path / "raw.parquet"))
    job = Preparation(
        source, hb.Schema([hb.Label("clicked"), encode]), output=str(tmp_path / "prepared")
    )
    with pytest.raises(DecodeError, match=r"raw\.parquet.*label 'clicked': expected a value") as at:
        prepare(job)
    assert at.value.row == 8


@pytest.mark.parametrize("num_buckets", [1], indirect=True)
def test_column_of_a_statistic_is_read_as_numbers_whatever_its_first_rows(tmp_path: Path) -> None:
    num_rows = 1000
    city = "a long name " * 200  # the first rows fill what types are inferred from
    prices = ["1"] * (num_rows - 1) + ["1.5"]
    rows = pl.DataFrame({"clicked": [1] * num_rows, "city": city, "price": prices})
    rows.write_csv(tmp_path / "raw.csv")
    statistic = hb.transforms.JoinGroupby("price", "max")
    columns = [
        hb.Label("clicked"),
        hb.Dense("most", [statistic, hb.transforms.FillMissing(0.0)], column="city"),
    ]
    job = Preparation(
        hb.sources.Csv(str(tmp_path / "raw.csv")),
        hb.Schema(columns),
        output=str(tmp_path / "prepared"),
    )
    prepare(job)
    assert pl.read_parquet(tmp_path / "prepared/train/*.parquet")["most"].unique().to_list() == [
        1.5
    ]
