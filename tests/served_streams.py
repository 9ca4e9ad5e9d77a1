# SPDX-License-Identifier: Apache-2.0
"""Recorded streams as request logs with two planted versions, and what happened after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

import hotbed as hb

REQUEST_ROWS = 5
WITHIN = 1800
COLUMNS = ("item", "user", "segment")
OF_REQUEST = ("user", "segment")
"""The columns whose values hold for all candidates of a request."""


@dataclass(frozen=True)
class ServedStream:
    """Candidates that were served, one a row, and their outcomes.

    Attributes:
        shown: `request_id`, `position`, `item`, `user`, `segment`, `served_at` in microseconds,
            `rate` (of the item, smoothed), `label`.
        outcomes: `request_id`, `item`, `served_at`: the time of the outcome.
    """

    shown: pl.DataFrame
    outcomes: pl.DataFrame

    def served(self, scores: dict[str, np.ndarray], seed: int = 0) -> pl.DataFrame:
        """Return the rows with scores of the versions that a random half of the users got."""
        names = list(scores)
        users = self.shown["user"].to_numpy()
        _, codes = np.unique(users, return_inverse=True)
        sides = np.random.default_rng(seed).integers(0, len(names), codes.max() + 1)[codes]
        chosen = np.stack([scores[name] for name in names])[sides, np.arange(len(users))]
        versions = np.array([int(name) for name in names])[sides]
        return self.shown.with_columns(
            score=pl.Series(chosen.astype(np.float32)),
            version=pl.Series(versions),
            digest=pl.lit("d1"),
            route=pl.Series(np.where(sides == 0, "stable", "canary")),
        )

    def versions(self) -> dict[str, np.ndarray]:
        """Return the scores of two planted versions, the second of which is worse."""
        rate = self.shown["rate"].to_numpy()
        noise = np.random.default_rng(1).normal(0, 1, len(rate))
        logit = np.log(rate / (1 - rate))
        return {"41": _sigmoid(logit + 0.3 * noise), "42": _sigmoid(logit + 1.5 * noise + 0.4)}


def join(log: Path, outcomes: Path, *, follow: bool = False) -> hb.sources.Join:
    """Return the join of a folder of logged requests and one of outcomes."""
    clicks: hb.sources.Source = hb.sources.Parquet(str(outcomes / "*.parquet"))
    if follow:
        clicks = hb.sources.Follow(outcomes, "*.parquet")
    return hb.sources.Join(
        hb.sources.RequestLog(log, follow=follow, shadows=True),
        clicks,
        on=["request_id", "item"],
        within=WITHIN,
        time="served_at",
        unit="us",
        idle_seconds=0.3,
    )


def write_log(
    folder: Path, rows: pl.DataFrame, part: int = 0, columns: Sequence[str] = COLUMNS
) -> None:
    """Write rows as a part of a server's log: a row a request, with lists of candidates."""
    folder.mkdir(parents=True, exist_ok=True)
    own = ["version", "digest", "route", "served_at"]
    requests = rows.group_by("request_id", *own, maintain_order=True).agg(
        pl.len().cast(pl.Int64).alias("candidates"),
        *(pl.col(name).head(1) if name in OF_REQUEST else pl.col(name) for name in columns),
        pl.col("score"),
    )
    requests = requests.with_columns(
        pl.col("served_at").cast(pl.Datetime("us")), latency=pl.lit(0.001), dropped=pl.lit(0)
    )
    table = requests.to_arrow()
    types = []
    for column in table.schema:
        kind = column.type
        if pa.types.is_large_list(kind):  # a server writes lists
            kind = pa.list_(kind.value_type)
        types.append(pa.field(column.name, kind))
    pq.write_table(table.cast(pa.schema(types)), folder / f"part-{part:03d}.parquet")


def write_outcomes(folder: Path, outcomes: pl.DataFrame, part: int = 0) -> None:
    """Write outcomes in the order of their times."""
    folder.mkdir(parents=True, exist_ok=True)
    ordered = outcomes.sort("served_at", "request_id", "item")
    ordered.write_parquet(folder / f"part-{part:03d}.parquet")


def write(
    folder: Path, stream: ServedStream, rows: pl.DataFrame, columns: Sequence[str] = ()
) -> None:
    """Write the log of served rows, with further columns, and the outcomes of the stream."""
    write_log(folder / "log", rows, columns=(*COLUMNS, *columns))
    write_outcomes(folder / "outcomes", stream.outcomes)


def write_parts(
    folder: Path, stream: ServedStream, rows: pl.DataFrame, count: int
) -> Iterator[int]:
    """Write log and outcomes in parts of equal event time; yield the number of each."""
    first = int(rows["served_at"].min())
    width = (int(rows["served_at"].max()) - first) // count + 1
    for part in range(count):
        number = pl.min_horizontal((pl.col("served_at") - first) // width, count - 1)
        write_log(folder / "log", rows.filter(number == part), part)
        micros = stream.outcomes.with_columns(pl.col("served_at").dt.timestamp("us"))
        outcomes = stream.outcomes.filter(micros.select(number == part).to_series())
        write_outcomes(folder / "outcomes", outcomes, part)
        yield part


def drawn(num_requests: int = 600, hours: float = 4.0, seed: int = 0) -> ServedStream:
    """Return a small stream of drawn requests; a user's requests resemble each other."""
    random = np.random.default_rng(seed)
    start = 1_760_000_400_000_000
    times = start + np.sort(random.integers(0, int(hours * 3.6e9), num_requests))
    users = random.integers(0, num_requests // 6, num_requests)
    taste = random.normal(0, 1, num_requests // 6)[users]
    rows = np.repeat(np.arange(num_requests), REQUEST_ROWS)
    rate = _sigmoid(random.normal(-1, 1, len(rows)) + taste[rows])
    positions = np.tile(np.arange(REQUEST_ROWS), num_requests)
    shown = pl.DataFrame(
        {
            "request_id": [f"r{row}" for row in rows],
            "position": positions,
            "item": rows % 97 * REQUEST_ROWS + positions,
            "user": users[rows],
            "segment": np.array(["de", "cn", "fr"])[users[rows] % 3],
            "served_at": times[rows],
            "rate": rate,
        }
    )
    return with_outcomes(shown, random.random(len(rows)) < rate, random)


def obd(shared: Path) -> ServedStream:
    """Return impressions and clicks of Open Bandit Dataset; each impression is a request."""
    rows = pl.concat(
        [pl.read_csv(shared / "obd" / f"{name}.csv") for name in ("random_men", "bts_men")],
        how="diagonal_relaxed",
    )
    users = rows.select(pl.concat_str([f"user_feature_{number}" for number in range(4)]))
    shown = rows.select(
        served_at=pl.col("timestamp").str.to_datetime(time_zone="UTC").dt.timestamp("us"),
        item=pl.col("item_id").cast(pl.Int64),
        user=users.to_series(),
        segment=pl.col("position").cast(pl.String),
        label=pl.col("click").cast(pl.Boolean),
    )
    return _recorded(shown, 1)


def movielens(shared: Path) -> ServedStream:
    """Return the first 20 ratings of each user of MovieLens; those of 4 and 5 are outcomes."""
    rows = pl.read_csv(shared / "ml1m_u2999" / "ratings_early.csv")
    rows = rows.group_by("user_id", maintain_order=True).head(20)
    shown = rows.select(
        served_at=pl.col("timestamp") * 1_000_000,
        item="item_id",
        user="user_id",
        segment=(pl.col("user_id") % 3).cast(pl.String),
        label=pl.col("rating") >= 4,
    )
    return _recorded(shown, REQUEST_ROWS)


def rees46(shared: Path) -> ServedStream:
    """Return views of REES46; a purchase of the viewed product within half an hour counts."""
    events = pl.read_csv(shared / "rees46" / "2019-Oct.head.csv").with_columns(
        served_at=pl.col("event_time").str.to_datetime("%Y-%m-%d %H:%M:%S UTC").dt.timestamp("us"),
        item=pl.col("product_id"),
        user=pl.col("user_id").cast(pl.String),
        segment=pl.col("brand").fill_null(""),
    )
    shown = events.filter(pl.col("event_type") == "view").select(
        "served_at", "item", "user", "segment"
    )
    bought = events.filter(pl.col("event_type") == "purchase").select(
        "user", "item", when="served_at"
    )
    pairs = shown.with_row_index("row").join(bought, on=["user", "item"])
    waits = pl.col("when") - pl.col("served_at")
    rows = pairs.filter(waits.is_between(0, WITHIN * 1_000_000))["row"].unique()
    labels = np.zeros(shown.height, bool)
    labels[rows.to_numpy()] = True
    return _recorded(shown.with_columns(label=pl.Series(labels)), 1)


STREAMS: dict[str, Callable[[Path], ServedStream]] = {
    "movielens": movielens,
    "obd": obd,
    "rees46": rees46,
}


def _recorded(shown: pl.DataFrame, request_rows: int) -> ServedStream:
    """Make requests of recorded rows: of consecutive ones of a user, with the rate of each item."""
    shown = shown.sort("served_at", maintain_order=True)
    order = pl.int_range(pl.len()).over("user")
    shown = shown.with_columns(session=order // request_rows, position=order % request_rows)
    shown = shown.with_columns(
        request_id=pl.format("{}-{}", "user", "session"),
        served_at=pl.col("served_at").first().over("user", "session"),
        rate=(pl.col("label").sum().over("item") + 1) / (pl.len().over("item") + 4),
    )
    shown = shown.sort("served_at", "request_id", "position", maintain_order=True)
    return with_outcomes(shown, shown["label"].to_numpy(), np.random.default_rng(2))


def with_outcomes(
    shown: pl.DataFrame, positive: np.ndarray, random: np.random.Generator
) -> ServedStream:
    """Return rows with labels, and their outcomes up to half an hour later."""
    shown = shown.with_columns(label=pl.Series(positive.astype(np.float64)))
    waits = pl.Series(random.integers(0, WITHIN * 1_000_000, shown.height))
    late = shown.with_columns(served_at=pl.col("served_at") + waits)
    outcomes = late.filter(pl.col("label") > 0).select("request_id", "item", "served_at")
    return ServedStream(shown, outcomes.with_columns(pl.col("served_at").cast(pl.Datetime("us"))))


def _sigmoid(logit: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logit))
