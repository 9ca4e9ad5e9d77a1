# SPDX-License-Identifier: Apache-2.0
"""A world whose click probabilities are known: its request log, and what a policy would earn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from served_streams import WITHIN, join, write_log, write_outcomes

import hotbed as hb

START = 1_760_000_400_000_000  # microseconds
CANDIDATES = 8
USERS = 400
ITEMS = 150
SEGMENTS = 4
CATEGORIES = 6
EXPLORED = 0.15
"""The share of users that a version with random scores answers."""
EXAMINATION = 1.0 / (1.0 + np.arange(CANDIDATES)) ** 0.8
"""The share of users who look at each place."""
GOES_ON = 0.8
"""The share of users of a `StoppingWorld` who go on to the next place without a click."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """Users, items, and how much they attract each other.

    Attributes:
        quality: of each item, [items].
        taste: of a segment of users for a category of items, [segments, categories].
        category: of each item, [items].
    """

    quality: Floats
    taste: Floats
    category: NDArray[np.int64]

    @classmethod
    def drawn(cls, seed: int = 0) -> World:
        """Return a world of a seed."""
        random = np.random.default_rng(seed)
        return cls(
            random.normal(0, 0.7, ITEMS),
            random.normal(0, 1.0, (SEGMENTS, CATEGORIES)),
            random.integers(0, CATEGORIES, ITEMS),
        )

    def attraction(self, user: NDArray[np.int64], item: NDArray[np.int64]) -> Floats:
        """Return the probability of a click at a place that everyone examines."""
        logit = -1.6 + self.quality[item] + self.taste[user % SEGMENTS, self.category[item]]
        return 1 / (1 + np.exp(-logit))

    def requests(self, count: int, seed: int, hours: float = 48.0) -> pl.DataFrame:
        """Return candidates of drawn requests, which no version has scored yet."""
        random = np.random.default_rng(seed)
        users = random.integers(0, USERS, count)
        items = np.argsort(random.random((count, ITEMS)), axis=1)[:, :CANDIDATES].ravel()
        user = np.repeat(users, CANDIDATES)
        times = START + np.sort(random.integers(0, int(hours * 3.6e9), count))
        return pl.DataFrame(
            {
                "request_id": [f"r{row}" for row in np.repeat(np.arange(count), CANDIDATES)],
                "position": np.tile(np.arange(CANDIDATES), count),
                "item": items,
                "user": user,
                "segment": np.array(["a", "b", "c", "d"])[user % SEGMENTS],
                "category": self.category[items],
                "noise": random.integers(0, 50, len(items)),
                "served_at": np.repeat(times, CANDIDATES),
                "attraction": self.attraction(user, items),
            }
        )

    def served(self, requests: pl.DataFrame, seed: int = 0) -> pl.DataFrame:
        """Return requests as a version answered them that knows the items but not the segments.

        A version with random scores answers some users. Candidates are shown by falling scores.
        """
        random = np.random.default_rng(seed)
        bias = random.normal(0, 0.3, ITEMS)
        item = requests["item"].to_numpy()
        usual = 1 / (1 + np.exp(2.2 - 0.8 * self.quality[item] - bias[item]))
        is_explored = (requests["user"].to_numpy() * 7919 % 1000) < 1000 * EXPLORED
        score = np.where(is_explored, random.random(len(item)), usual).astype(np.float32)
        place = places(score)
        label = self.clicked(requests["attraction"].to_numpy(), place, random)
        return requests.with_columns(
            score=pl.Series(score),
            place=pl.Series(place),
            version=pl.Series(np.where(is_explored, 2, 1)),
            digest=pl.lit("d1"),
            route=pl.Series(np.where(is_explored, "canary", "stable")),
            label=pl.Series(label.astype(np.float64)),
        )

    def clicked(
        self, attraction: Floats, place: NDArray[np.int64], random: np.random.Generator
    ) -> NDArray[np.bool_]:
        """Return which candidates are clicked: each by what it attracts, if it is examined."""
        return random.random(len(place)) < attraction * EXAMINATION[place]

    def rate(self, attraction: Floats, place: NDArray[np.int64]) -> float:
        """Return the expected click rate of candidates at some places."""
        return float(np.mean(attraction * EXAMINATION[place]))

    def true_rate(self, requests: pl.DataFrame, score: NDArray[np.floating]) -> float:
        """Return the click rate of a policy that shows the candidates by falling score."""
        return self.rate(requests["attraction"].to_numpy(), places(score))


class StoppingWorld(World):
    """A world whose users go from place to place, and stop after a click or for other reasons.

    What a click earns depends on the candidates above, so the click model of replays is wrong here.
    """

    def clicked(
        self, attraction: Floats, place: NDArray[np.int64], random: np.random.Generator
    ) -> NDArray[np.bool_]:
        by_place = _by_place(attraction, place)
        is_drawn = random.random(by_place.shape) < by_place
        goes_on = ~is_drawn & (random.random(by_place.shape) < GOES_ON)
        is_reached = np.ones(by_place.shape, bool)
        is_reached[:, 1:] = np.cumprod(goes_on[:, :-1], axis=1).astype(bool)
        clicks = is_drawn & is_reached
        return np.take_along_axis(clicks, place.reshape(-1, CANDIDATES), axis=1).ravel()

    def rate(self, attraction: Floats, place: NDArray[np.int64]) -> float:
        by_place = _by_place(attraction, place)
        reached = np.ones(by_place.shape)
        reached[:, 1:] = np.cumprod((1 - by_place[:, :-1]) * GOES_ON, axis=1)
        return float(np.mean(by_place * reached))


def _by_place(values: Floats, place: NDArray[np.int64]) -> Floats:
    """Return values of candidates in the order of their places, a row a request."""
    order = np.argsort(place.reshape(-1, CANDIDATES), axis=1)
    return np.take_along_axis(values.reshape(-1, CANDIDATES), order, axis=1)


def places(score: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the place of each candidate of consecutive requests, by falling score."""
    order = np.argsort(-score.reshape(-1, CANDIDATES), axis=1, kind="stable")
    ranks = np.argsort(order, axis=1)
    return ranks.ravel()


def write_world(folder: Path, served: pl.DataFrame, columns: Sequence[str] = ()) -> None:
    """Write the log of served requests, with further columns, and clicks up to half an hour later."""
    columns = ["item", "user", "segment", "category", "noise", *columns]
    write_log(folder / "log", served, columns=columns)
    waits = np.random.default_rng(0).integers(0, WITHIN * 1_000_000, served.height)
    late = served.with_columns(served_at=pl.col("served_at") + pl.Series(waits))
    clicks = late.filter(pl.col("label") > 0).select("request_id", "item", "served_at")
    clicks = clicks.with_columns(pl.col("served_at").cast(pl.Datetime("us")))
    write_outcomes(folder / "outcomes", clicks)


def _id(name: str, **settings: Any) -> dict[str, Any]:
    return {"kind": "id", "name": name, **settings}


TASTE = _id("taste", column="segment", transforms=[{"kind": "cross", "with": ["category"]}])
COARSE = _id("coarse", column="item", transforms=[{"kind": "hash", "bins": 6}])
NETWORK = {"kind": "dnn", "hidden": [16]}
JOBS: dict[str, dict[str, Any]] = {
    "crossed": {"columns": [_id("item"), TASTE]},
    "fm": {"columns": [_id("item"), _id("segment"), _id("category")], "model": "fm"},
    "network": {"columns": [_id("item"), TASTE], "model": NETWORK},
    "item": {"columns": [_id("item")]},
    "item and noise": {"columns": [_id("item"), _id("noise")]},
    "item as network": {"columns": [_id("item")], "model": NETWORK},
    "taste": {"columns": [TASTE]},
    "category": {"columns": [_id("category")]},
    "noise": {"columns": [_id("noise")]},
    "coarse item": {"columns": [COARSE]},
    "slow": {"columns": [_id("item"), TASTE], "tables": {"rule": {"kind": "sgd", "lr": 1e-5}}},
    "wild": {"columns": [_id("item"), TASTE], "tables": {"rule": {"kind": "sgd", "lr": 300.0}}},
    "few rows": {
        "columns": [_id("item"), TASTE],
        "tables": {"admit": {"kind": "min_count", "count": 3500}},
    },
    "few items": {
        "columns": [_id("item"), TASTE],
        "tables": {"overrides": {"item": {"admit": {"kind": "min_count", "count": 10**6}}}},
    },
}
"""Jobs by what is special about them; each learns the joined log of a world."""


def job(name: str, output: Path, seed: int = 0) -> hb.Job:
    """Return one of the jobs."""
    spec = dict(JOBS[name])
    columns = [{"kind": "label", "name": "label"}, *spec.pop("columns")]
    tables = {"dim": 8, "rule": {"kind": "adagrad", "lr": 0.1}, **spec.pop("tables", {})}
    return hb.Job.from_json(
        {
            "schema": {"columns": columns},
            "model": "lr",
            "stream": {"kind": "parquet", "path": "unused.parquet"},
            "fit": {"batch_size": 256, "torch_threads": 1},
            "base_rate": 0.1,
            "output": str(output),
            "seed": seed,
            "tables": tables,
            **spec,
        }
    )


def replay(folder: Path, names: tuple[str, ...], output: Path, **settings: Any) -> hb.JobReplay:
    """Return the replay of a job over the log in a folder, against its base if there are two."""
    measure = hb.ServingQuality(
        join(folder / "log", folder / "outcomes"), user="user", seconds=None, output=str(output)
    )
    base = job(names[1], output) if len(names) > 1 else None
    return hb.JobReplay(measure, job(names[0], output), base, **settings)


def scores_of(output: Path, requests: pl.DataFrame) -> NDArray[np.float32]:
    """Return how the newest state of a job scores requests."""
    model = hb.load(output / "checkpoint")
    rows = hb.sources.Memory(requests.drop("attraction", "served_at"))
    predictions: NDArray[np.float32] = model.predict(hb.Dataset(rows, model.schema, 4096))
    return predictions
