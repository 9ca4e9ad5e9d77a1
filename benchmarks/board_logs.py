# SPDX-License-Identifier: Apache-2.0
"""The logs of the board: rows in the order of time, and the columns that every model reads."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

import hotbed as hb

Column = hb.Label | hb.Id | hb.Dense
Kept = hb.History | hb.Count

NEWEST = 20
"""Entries of a history that are read."""

LONG = 200
"""Entries of a long one."""

DAY = 86400


@dataclass(frozen=True)
class Log:
    """One log.

    Attributes:
        read: from the folder of the data to all rows in the order of time.
        columns: the label, then the features without the history.
        item: the Id column of what is chosen; popularity is its rate.
        history: the Id column of earlier choices, which shares the table of `item`; None: without.
        num_first: rows that are learned before the first one is counted.
        kept: the columns that a model may keep itself. The rows then have the column `moment`, in
            seconds.
    """

    read: Callable[[Path], pl.DataFrame]
    columns: Sequence[Column]
    item: str
    history: hb.Id | None = None
    num_first: int = 1000
    kept: Sequence[Kept] = ()

    def schema(self, pooling: str | None = None, kept: Collection[str] = ()) -> hb.Schema:
        """Return the columns; with `pooling`, the history of the rows too, pooled in that way.

        `kept`: the names of those that the model keeps.
        """
        columns: list[Column | hb.Time | Kept] = list(self.columns)
        if kept:
            columns.append(hb.Time("moment"))
            columns += [column for column in self.kept if column.name in kept]
        if pooling is not None and self.history is not None:
            history = self.history
            columns.append(
                hb.Id(
                    history.name,
                    table=self.item,
                    pooling=pooling,
                    max_length=NEWEST,
                    transforms=history.transforms,
                )
            )
        return hb.Schema(columns)


def kept_by(
    user: str, item: str, where: dict[str, int], counted: dict[str, int], windows: Sequence[int]
) -> list[Kept]:
    """Return what a model may keep: histories of the user, and counts of item and user.

    Args:
        user: the column of who chooses.
        item: the column of what is chosen.
        where: the labels of a row that enters the histories.
        counted: the labels of a row that counts as a match.
        windows: of the counts in seconds, the last one is a tile.
    """
    *lengths, tile = windows
    return [
        hb.History("before", of=[item], by=user, where=where, length=NEWEST),
        hb.History("long_before", of=[item], by=user, where=where, length=LONG),
        hb.Count("counts", item, counted, lengths, every=tile),
        hb.Count("user_counts", user, counted, lengths, every=tile),
    ]


def ids(names: str) -> list[hb.Id]:
    """Return an Id column of each name."""
    return [hb.Id(name) for name in names.split()]


def with_earlier(rows: pl.DataFrame, user: str, item: str, time: str, chosen: str) -> pl.DataFrame:
    """Add the column `earlier`: the user's newest chosen items of earlier moments, oldest first.

    Choices of the same moment are left out, because nobody knows which of them came first.
    """
    known: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=NEWEST))
    waiting: dict[int, tuple[int, list[int]]] = {}
    earlier = []
    for key, thing, moment, is_chosen in rows.select(user, item, time, chosen).iter_rows():
        since, things = waiting.get(key, (moment, []))
        if moment > since:
            known[key].extend(things)
            since, things = moment, []
        earlier.append(list(known[key]))
        waiting[key] = (since, [*things, thing] if is_chosen else things)
    return rows.with_columns(pl.Series("earlier", earlier, dtype=pl.List(pl.Int64)))


def movielens(data: Path) -> pl.DataFrame:
    """Return the ratings of ML-1M's users up to 2999 with the columns of user and movie."""
    folder = data / "ml1m_u2999"
    ratings = pl.read_csv(folder / "ratings_early.csv").sort("timestamp", maintain_order=True)
    users = table_of(folder / "users.dat", "::", ["user_id", "gender", "age", "job", "zip"])
    movies = table_of(folder / "movies.dat", ";", ["item_id", "title", "genres"])
    rows = ratings.join(users, "user_id", "left", maintain_order="left")
    rows = rows.join(movies, "item_id", "left", maintain_order="left")
    rows = rows.with_columns(liked=(pl.col("rating") >= 4).cast(pl.Int8), moment="timestamp")
    return with_earlier(rows, "user_id", "item_id", "timestamp", "liked")


def table_of(path: Path, separator: str, names: list[str]) -> pl.DataFrame:
    """Return a file of MovieLens without a header; its first column is a number."""
    lines = path.read_text("latin-1").splitlines()
    rows = pl.DataFrame([line.split(separator) for line in lines], names, orient="row")
    return rows.with_columns(pl.col(names[0]).cast(pl.Int64))


def small_movielens(data: Path) -> pl.DataFrame:
    """Return the ratings of ml-latest-small, which is shipped with Hotbed."""
    ratings = pl.read_csv(data / "ml_latest_small/ratings.csv")
    rows = ratings.rename({"userId": "user_id", "movieId": "item_id"})
    rows = rows.sort("timestamp", maintain_order=True)
    rows = rows.with_columns(liked=(pl.col("rating") >= 4).cast(pl.Int8), moment="timestamp")
    return with_earlier(rows, "user_id", "item_id", "timestamp", "liked")


def avazu(data: Path) -> pl.DataFrame:
    """Return a sample of one day of Avazu, with the hour of the day."""
    rows = pl.read_csv(data / "avazu/stream_20141021.csv").drop("id")
    return rows.with_columns(hour=pl.col("hour").str.slice(11, 2).cast(pl.Int64))


def open_bandit(data: Path) -> pl.DataFrame:
    """Return the men's impressions of both policies of Open Bandit, with the item's columns."""
    files = [data / f"obd/{policy}_men.csv" for policy in ("bts", "random")]
    rows = pl.concat([pl.read_csv(file) for file in files]).sort("timestamp", maintain_order=True)
    items = pl.read_csv(data / "obd/item_context_men.csv")
    named = [name for name in items.columns if name]
    return rows.join(items.select(named), "item_id", "left", maintain_order="left")


def rees46(data: Path) -> pl.DataFrame:
    """Return the views of REES46; `chosen`: carted or bought by the user within 30 minutes.

    `bought`: bought within them.
    """
    events = pl.read_csv(data / "rees46/2019-Oct.head.csv").with_columns(
        moment=pl.col("event_time").str.to_datetime("%Y-%m-%d %H:%M:%S UTC").dt.epoch("s")
    )
    views = events.filter(pl.col("event_type") == "view").with_row_index("view")
    chosen = events.filter(pl.col("event_type") != "view")
    pairs = views.join(chosen, ["user_id", "product_id"], suffix="_chosen").filter(
        (pl.col("moment_chosen") - pl.col("moment")).is_between(0, 1800)
    )
    bought = pairs.filter(pl.col("event_type_chosen") == "purchase")
    labels = {
        name: pl.col("view").is_in(chosen["view"].unique().to_list()).cast(pl.Int8)
        for name, chosen in (("chosen", pairs), ("bought", bought))
    }
    rows = views.with_columns(seen=pl.lit(1), **labels)
    return with_earlier(rows, "user_id", "product_id", "moment", "seen")


def mind(data: Path) -> pl.DataFrame:
    """Return a row for each news that MIND showed, with the user's clicks before."""
    names = ["impression", "user", "time", "history", "shown"]
    rows = pl.read_csv(
        data / "mind/behaviors.tsv",
        separator="\t",
        has_header=False,
        new_columns=names,
        quote_char=None,
    )
    when = pl.col("time").str.to_datetime("%m/%d/%Y %I:%M:%S %p")
    rows = rows.sort(when, maintain_order=True).with_columns(
        hour=when.dt.hour().cast(pl.Int64),
        moment=when.dt.epoch("s"),
        shown=pl.col("shown").str.split(" "),
    )
    pair = pl.col("shown").str.split("-").list
    rows = rows.explode("shown")
    return rows.with_columns(news=pair.get(0), clicked=pair.get(1).cast(pl.Int8))


AVAZU = (
    "hour C1 banner_pos site_id site_domain site_category app_id app_domain app_category "
    "device_id device_ip device_model device_type device_conn_type C14 C15 C16 C17 C18 C19 C20 C21"
)
USER_ITEM = [f"user-item_affinity_{number}" for number in range(34)]
NORMALIZED = [hb.transforms.Normalize()]
EARLIER = hb.Id("earlier")

LOGS = {
    "Avazu": Log(avazu, [hb.Label("click"), *ids(AVAZU)], "site_id"),
    "OBD": Log(
        open_bandit,
        [
            hb.Label("click"),
            *ids("item_id position user_feature_0 user_feature_1 user_feature_2 user_feature_3"),
            *ids("item_feature_1 item_feature_2 item_feature_3"),
            *(hb.Dense(name, NORMALIZED) for name in ["item_feature_0", *USER_ITEM]),
        ],
        "item_id",
    ),
    "REES46": Log(
        rees46,
        [
            hb.Label("chosen"),
            *ids("user_id product_id category_id category_code brand"),
            hb.Dense("price", [hb.transforms.Log(), *NORMALIZED]),
        ],
        "product_id",
        EARLIER,
        kept=kept_by("user_id", "product_id", {}, {"chosen": 1}, (1800, 10800, 60)),
    ),
    "MIND": Log(
        mind,
        [hb.Label("clicked"), *ids("user news hour")],
        "news",
        hb.Id("history", transforms=[hb.transforms.Split(" ")]),
        kept=kept_by("user", "news", {"clicked": 1}, {"clicked": 1}, (DAY, 7 * DAY, 3600)),
    ),
    "ML-1M": Log(
        movielens,
        [
            hb.Label("liked"),
            *ids("user_id item_id gender age job zip"),
            hb.Id("genres", transforms=[hb.transforms.Split("|")], pooling="mean"),
        ],
        "item_id",
        EARLIER,
        kept=kept_by("user_id", "item_id", {"liked": 1}, {"liked": 1}, (DAY, 7 * DAY, 3600)),
    ),
    "ml-latest-small": Log(
        small_movielens,
        [hb.Label("liked"), *ids("user_id item_id")],
        "item_id",
        EARLIER,
        num_first=50,
        kept=kept_by("user_id", "item_id", {"liked": 1}, {"liked": 1}, (DAY, 7 * DAY, 3600)),
    ),
}
"""The logs of the page, from the quickest to the slowest, and a shipped one for the test."""
