# SPDX-License-Identifier: Apache-2.0
"""One row for each product that a session touched: was it bought in that session?

REES46 logs events: a view, a cart, a purchase. The row stands at the time of the first of them, so
that it holds nothing from later. The log may be one file or a folder of months, as text or packed.

    python examples/hugectr/rees46/rows.py PATH runs/hugectr/rees46/rows.parquet
"""

from __future__ import annotations

import sys
from pathlib import Path

import polars as pl

UNIT = ["user_session", "product_id"]


def rows(log: Path) -> pl.LazyFrame:
    """Return the rows of the log, in the order of time."""
    files = sorted(log.glob("*.csv*")) if log.is_dir() else [log]
    events = pl.concat([pl.scan_csv(file) for file in files])
    when = pl.col("event_time").str.strptime(pl.Datetime, "%Y-%m-%d %H:%M:%S UTC")
    categories = pl.col("category_code").str.split(".").list
    of_first = {
        "time": when.dt.epoch("s"),
        "user_id": pl.col("user_id"),
        "brand": pl.col("brand"),
        "category_id": pl.col("category_id"),
        "cat_0": categories.get(0, null_on_oob=True),
        "cat_1": categories.get(1, null_on_oob=True),
        "price": pl.col("price"),
    }
    touched = (
        events.sort("event_time")
        .group_by(UNIT)
        .agg(
            (pl.col("event_type") == "purchase").any().cast(pl.Int8).alias("bought"),
            *(value.first().alias(name) for name, value in of_first.items()),
        )
    )
    return touched.sort("time", *UNIT)


def main(log: str, output: str) -> None:
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows(Path(log)).sink_parquet(path)
    print(f"{path}: {pl.scan_parquet(path).select(pl.len()).collect().item():,} rows")


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 3 else sys.exit(__doc__)
