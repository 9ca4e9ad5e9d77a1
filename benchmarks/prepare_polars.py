# SPDX-License-Identifier: Apache-2.0
"""Prepare a Criteo-like data set with Polars alone: the peer of `prepare.py`.

This is what an experienced user of Polars writes by hand: lazy scans, the streaming engine, one
pass that learns and one pass that writes. It gives the files that `hotbed prepare` gives for the
job in `prepare.py`, apart from the draw of parts and folds, which are Polars' hashes of row
numbers. Values, counts and vocabularies are learned from training rows only.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

NUMBERS = [f"i{number}" for number in range(1, 14)]
WORDS = [f"c{number}" for number in range(1, 27)]
KEY = "c3"
MIN_COUNT = 5
FOLDS = 5
SMOOTH = 20.0
VALID_PERCENT = 10
ALL = FOLDS  # rows for validation take the sums of all folds


def drawn(rows: pl.LazyFrame) -> pl.LazyFrame:
    """Add the columns `valid` and `fold`, from hashes of the row number."""
    place = pl.col("row").hash(seed=0)
    return rows.with_columns(
        valid=place % 100 < VALID_PERCENT, fold=(place // 100 % FOLDS).cast(pl.Int8)
    )


def vocabulary(train: pl.LazyFrame, name: str) -> pl.LazyFrame:
    """Return the frequent words of a column, by falling frequency."""
    counts = train.select(name).drop_nulls().group_by(name).len()
    frequent = counts.filter(pl.col("len") >= MIN_COUNT)
    return frequent.sort("len", name, descending=[True, False]).select(name)


def ids(name: str, words: pl.Series) -> pl.Expr:
    """Return 1 + the place of each word, 0 for rare words; missing words stay missing."""
    places = pl.col(name).cast(pl.Enum(words), strict=False).to_physical()
    known = (places.cast(pl.Int64) + 1).fill_null(0)
    return pl.when(pl.col(name).is_not_null()).then(known).alias(name)


def out_of_fold(groups: pl.DataFrame) -> tuple[pl.DataFrame, float]:
    """Return the encoding of each key for each fold and for all of them, and the prior."""
    prior = groups["clicks"].sum() / groups["rows"].sum()
    keyed = groups.drop_nulls(KEY)
    totals = keyed.group_by(KEY).agg(pl.col("clicks", "rows").sum())
    others = keyed.join(totals, on=KEY, suffix="_all").select(
        KEY,
        "fold",
        clicks=pl.col("clicks_all") - pl.col("clicks"),
        rows=pl.col("rows_all") - pl.col("rows"),
    )
    everything = totals.select(KEY, pl.lit(ALL, pl.Int8).alias("fold"), "clicks", "rows")
    sums = pl.concat([others, everything])
    mean = (pl.col("clicks") + SMOOTH * prior) / (pl.col("rows") + SMOOTH)
    return sums.select(KEY, "fold", rate=mean.cast(pl.Float32)), prior


def prepare(rows: pl.LazyFrame, output: Path) -> None:
    """Write `output/train` and `output/valid`; `rows` has the columns `valid` and `fold`."""
    train = rows.filter(~pl.col("valid"))
    logs = [pl.col(name).fill_null(0.0).log1p().alias(name) for name in NUMBERS]
    moments = train.select(logs).select(
        pl.all().mean().name.suffix("_mean"), pl.all().std(ddof=0).name.suffix("_std")
    )
    sums = train.group_by(KEY, "fold").agg(clicks=pl.col("label").sum(), rows=pl.len())
    words = [vocabulary(train, name) for name in WORDS]
    learned, groups, *vocabularies = pl.collect_all([moments, sums, *words], engine="streaming")
    rates, prior = out_of_fold(groups)
    scale = learned.row(0, named=True)
    fold = pl.when("valid").then(pl.lit(ALL, pl.Int8)).otherwise("fold")
    encoded = rows.with_columns(fold=fold)
    encoded = encoded.join(rates.lazy(), on=[KEY, "fold"], how="left")
    columns = [pl.col("label").cast(pl.Float32)]
    for name, log in zip(NUMBERS, logs, strict=True):
        std = scale[f"{name}_std"] or 1.0
        normal = (log - scale[f"{name}_mean"]) / std
        columns.append(normal.cast(pl.Float32))
    for name, table in zip(WORDS, vocabularies, strict=True):
        columns.append(ids(name, table[name]))
    columns.append(pl.col("rate").fill_null(prior).cast(pl.Float32))
    encoded = encoded.select("valid", *columns)
    sinks = []
    for part, chosen in (("train", ~pl.col("valid")), ("valid", pl.col("valid"))):
        (output / part).mkdir(parents=True)
        rows_of_part = encoded.filter(chosen).drop("valid")
        sinks.append(rows_of_part.sink_parquet(output / part / "part.parquet", lazy=True))
    pl.collect_all(sinks, engine="streaming")


def main(data: Path, output: Path) -> None:
    rows = pl.scan_parquet(data / "*.parquet", row_index_name="row")
    prepare(drawn(rows), output)
