# SPDX-License-Identifier: Apache-2.0
"""Histories and counts that a model keeps, over ratings in the order of time, beside a dict.

Every training sample and every served row is compared with a dict that replays all ratings. Rows
are served by versions of the state before them. `--shuffled` learns shuffled labels of a log of
`board.py`: the AUC says whether a column shows a label of its own row. `--users` prints the bytes of
that many users with 100 entries each. One JSON line each:

    python benchmarks/kept.py ../shared/data/ml1m_u2999/ratings_early.csv --rows 60000
    python benchmarks/kept.py --shuffled ML-1M MIND --data DIR
    python benchmarks/kept.py --users 1000000
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
from board import DOT, Entry, encoded, mean_before, measured_by, scores_of
from board_logs import LOGS

import hotbed as hb
from hotbed.data.batch import Ids
from hotbed.embedding.histories import HistoryStore
from hotbed.metrics import AUC
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.state.digest import content_digest
from hotbed.testing import ReplayedCount, ReplayedHistory

LENGTH = 100
WINDOWS = (86400, 7 * 86400)
EVERY = 3600
NAMES = {"user_id": "userId", "item_id": "movieId"}


def schema_of(*, keeps: bool = True) -> hb.Schema:
    """Return the columns of ratings, with or without those that the model keeps."""
    columns: list[Any] = [
        hb.Label("liked", column="rating", threshold=4),
        hb.Time("at", column="timestamp"),
        hb.Id("user", column="userId"),
        hb.Id("movie", column="movieId"),
    ]
    if keeps:
        liked = {"liked": 1}
        columns += [
            hb.History("before", of=["movie"], by="user", where=liked, length=LENGTH),
            hb.Count("likes", by="movie", where=liked, windows=WINDOWS, every=EVERY),
        ]
    return hb.Schema(columns)


class Replay:
    """The ratings that were learned, as dicts keep them."""

    def __init__(self) -> None:
        self.history = ReplayedHistory(LENGTH)
        self.count = ReplayedCount(EVERY, max(WINDOWS))

    def differs(self, row: dict[str, int], movies: list[int], numbers: list[float]) -> bool:
        """Return whether a row sees something else than what was learned before it."""
        time = row["timestamp"]
        expected = [movie for _, movie in self.history.see(row["userId"], time)]
        counts: list[float] = []
        for window in WINDOWS:
            matches, shown = self.count.see(row["movieId"], time, window)
            counts += [np.log1p(matches), np.log1p(shown), matches / (shown + 10)]
        return movies != expected or not np.allclose(numbers, counts, rtol=1e-6)

    def leave(self, row: dict[str, int]) -> None:
        """Learn a row."""
        time = row["timestamp"]
        if row["rating"] >= 4:
            self.history.leave(row["userId"], time, time, row["movieId"])
        self.count.leave(row["movieId"], time, time, int(row["rating"] >= 4))


def num_differences(replay: Replay, rows: list[dict[str, int]], ids: Ids, numbers: Any) -> int:
    """Return how many rows see something else than the dict says."""
    values = np.asarray(ids.values)
    offsets = np.asarray(ids.offsets)
    differing = 0
    for place, row in enumerate(rows):
        movies = values[offsets[place] : offsets[place + 1]].tolist()
        differing += replay.differs(row, movies, np.asarray(numbers)[place].tolist())
    return differing


def compared(ratings: pl.DataFrame, batch_size: int, every: int) -> dict[str, Any]:
    """Compare all training samples, and the rows behind each `every` steps as served rows."""
    model = small_model(schema_of())
    replay = Replay()
    rows = ratings.to_dicts()
    counts = {"samples": 0, "samples_differ": 0, "served": 0, "served_differ": 0}

    def check(run: Any) -> None:
        batch = run.example.batch
        part = rows[counts["samples"] : counts["samples"] + batch.num_samples]
        counts["samples"] += len(part)
        ids = batch.ids["before"]
        offsets = np.asarray(ids.offsets)
        values = np.asarray(ids.values)
        for place, row in enumerate(part):
            movies = values[offsets[place] : offsets[place + 1]].tolist()
            numbers = np.asarray(batch.dense["likes"])[place].tolist()
            counts["samples_differ"] += replay.differs(row, movies, numbers)
            replay.leave(row)

    def serve(run: Any) -> None:
        if run.step % every:
            return
        first = counts["samples"]
        later = ratings.slice(first, batch_size * every)
        with tempfile.TemporaryDirectory() as folder:
            model.export(folder)
            session = hb.InferenceSession(folder)
            asked = later.select("userId", "movieId", "timestamp").to_arrow()
            kept = session.ask(asked).kept
        counts["served"] += later.height
        counts["served_differ"] += num_differences(
            replay, later.to_dicts(), kept["before"], kept["likes"]
        )

    callback = SimpleNamespace(on_step_begin=check, on_step_end=serve)
    dataset = hb.Dataset(hb.sources.Memory(ratings), model.schema, batch_size=batch_size)
    model.online_train(dataset, [callback], progress=False, progressive=False)
    return {**counts, "tables": {name: len(table) for name, table in model.tables.items()}}


def shuffled(name: str, data: Path, seed: int, num_rows: int | None = None) -> dict[str, Any]:
    """Learn shuffled labels of a log of the board from all columns that a model may keep of it.

    Each row is scored before it is learned. `deviations`: how many standard errors the AUC lies
    from one half.
    """
    log = LOGS[name]
    label = log.columns[0].name
    rows = log.read(data)[:num_rows].with_columns(pl.col(label).shuffle(seed=seed))
    entry = Entry(DOT, kept=[column.name for column in log.kept])
    schema, batches = encoded(log, rows, entry)
    labels = rows[label].to_numpy().astype(np.float64)
    rate = mean_before(labels[: log.num_first])
    scores, _ = scores_of(entry, log, schema, batches, rate, seed)
    labels = labels[log.num_first :]
    auc = measured_by(AUC(), scores[log.num_first :], labels)
    positives = labels.sum()
    error = np.sqrt((len(labels) + 1) / (12 * positives * (len(labels) - positives)))
    return {
        "log": name,
        "seed": seed,
        "kept": list(entry.kept),
        "rows": len(labels),
        "auc": round(auc, 5),
        "standard_error": round(error, 5),
        "deviations": round((auc - 0.5) / error, 2),
    }


def users_of(batches: int, seed: int) -> pl.DataFrame:
    """Return later ratings of different users, in batches of 1,024."""
    draw = np.random.default_rng(seed)
    rows = 1024 * batches
    return pl.DataFrame(
        {
            "rating": np.full(rows, 5),
            "timestamp": 10_000 + np.arange(rows),
            "userId": draw.permutation(max(rows, 20_000))[:rows],
            "movieId": np.arange(rows),
        }
    )


def memory(num_users: int, folder: Path, entries: int = 100) -> dict[str, Any]:
    """Return the bytes that users take who have this many entries each, in memory and in states.

    Four batches of 1,024 ratings then make a whole state and three deltas. The last state is loaded
    by a second model.
    """
    schema = hb.Schema([*schema_of(keeps=False).columns, schema_of().kept[0]])
    model = small_model(schema)
    store = HistoryStore(schema, model.tables)
    began = time.perf_counter()
    for number in range(entries):
        for first in range(0, num_users, 20_000):
            users = np.arange(first, min(first + 20_000, num_users))
            batch = hb.Batch(
                ids={"user": Ids(users), "movie": Ids(users * 7 + number)},
                labels={"liked": np.ones(len(users), np.float32)},
                time=np.full(len(users), number * 1_000_000),
            )
            store.fill(batch, leaves=True)
    seconds = time.perf_counter() - began
    stats = [model.tables[name].stats for name in ("before.newest", "before.older")]
    rows = sum(each["row_bytes"] for each in stats)
    index = sum(each["index_bytes"] for each in stats)
    entry_bytes = 12 * entries
    ratings = users_of(batches=4, seed=1)
    checkpoint = hb.callbacks.Checkpoint(folder, every_steps=1, full_every=10, keep=10, wait=True)
    dataset = hb.Dataset(hb.sources.Memory(ratings), schema, batch_size=1024)
    model.online_train(dataset, [checkpoint], progress=False, progressive=False)
    saved = [of_histories(link) for link in open_checkpoint(folder).links]
    digest = content_digest(model.tables)
    return {
        "users": num_users,
        "row_bytes_a_user": rows / num_users,
        "index_bytes_a_user": index / num_users,
        "of_their_bytes": rows / num_users / entry_bytes,
        "microseconds_an_entry": seconds / (num_users * entries) * 1e6,
        "saved_bytes": saved,
        "resumes_to_equal_digest": content_digest(hb.load(folder).tables) == digest,
    }


def small_model(schema: hb.Schema) -> hb.RecModel:
    """Return a model that keeps the columns of a schema."""
    network = hb.models.DIN(
        schema,
        hb.make_tables(schema, dim=4),
        histories={"before": "movie"},
        hidden=(4,),
        attention="dot",
    )
    return hb.RecModel(network, "bce", "adam")


def of_histories(link: Any) -> int:
    """Return the bytes of the rows of histories in the files of a state or delta."""
    return sum(
        file.stat().st_size
        for file in Path(link.store.place(link.folder)).rglob("*")
        if file.is_file() and "before." in str(file)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ratings", type=Path, nargs="?")
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--shuffled", nargs="+", default=[], choices=list(LOGS))
    parser.add_argument("--data", type=Path, help="folder with a folder for each log")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, from 0 on")
    parser.add_argument("--users", type=int, default=0)
    asked = parser.parse_args()
    if asked.users:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(memory(asked.users, Path(folder))), flush=True)
    for seed in range(asked.seeds):
        for name in asked.shuffled:
            print(json.dumps(shuffled(name, asked.data, seed)), flush=True)
    if asked.ratings is None:
        return
    ratings = pl.read_csv(asked.ratings).rename(NAMES, strict=False).sort("timestamp")
    print(json.dumps(compared(ratings.head(asked.rows), 512, 10)), flush=True)


if __name__ == "__main__":
    main()
