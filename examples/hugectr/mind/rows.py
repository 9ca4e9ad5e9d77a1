# SPDX-License-Identifier: Apache-2.0
"""One row for each news that was shown: was it clicked?

MIND logs impressions: a user, a time, the news clicked before, and the news shown with a 1 for a
click. The folder holds `behaviors.tsv` and `news.tsv`, itself or in folders below (MINDlarge_train,
MINDlarge_dev). News that `news.tsv` lacks have no category.

    python examples/hugectr/mind/rows.py FOLDER runs/hugectr/mind/rows.parquet
"""

from __future__ import annotations

import sys
from pathlib import Path

import polars as pl

HISTORY = 20  # newest news of a history
BEHAVIORS = ["impression", "user", "time", "history", "shown"]
NEWS = ["news", "category", "subcategory"]
TEXTS = ["title", "abstract", "url", "title_entities", "abstract_entities"]


def scan(folder: Path, name: str, columns: list[str]) -> pl.LazyFrame:
    """Return all files of the name, as text."""
    files = sorted(folder.rglob(name))
    if not files:
        sys.exit(f"{folder}: there is no {name}. Download MIND with download.py.")
    read = [
        pl.scan_csv(
            file,
            separator="\t",
            has_header=False,
            new_columns=columns,
            quote_char=None,
            infer_schema=False,
        )
        for file in files
    ]
    return pl.concat(read)


def rows(folder: Path) -> pl.LazyFrame:
    """Return a row for each news that was shown, in the order of time."""
    when = pl.col("time").str.to_datetime("%m/%d/%Y %I:%M:%S %p").dt.epoch("s")
    history = pl.col("history").str.split(" ").fill_null([])
    shown = pl.col("shown").str.split("-").list
    impressions = scan(folder, "behaviors.tsv", BEHAVIORS).select(
        "user",
        time=when,
        shown=pl.col("shown").str.split(" "),
        clicks=history.list.len(),
        history=history.list.tail(HISTORY),
    )
    candidates = (
        impressions.sort("time", "user")
        .explode("shown")
        .select(pl.exclude("shown"), news=shown.get(0), clicked=shown.get(1).cast(pl.Int8))
    )
    news = scan(folder, "news.tsv", NEWS + TEXTS).select(NEWS)
    known = news.unique("news", keep="first", maintain_order=True)
    return candidates.join(known, on="news", how="left", maintain_order="left")


def main(folder: str, output: str) -> None:
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows(Path(folder)).sink_parquet(path)
    print(f"{path}: {pl.scan_parquet(path).select(pl.len()).collect().item():,} rows")


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 3 else sys.exit(__doc__)
