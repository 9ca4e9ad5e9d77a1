# SPDX-License-Identifier: Apache-2.0
"""Online training from a real broker: events as JSON messages in a topic of three partitions, 70,
25 and 5 % of them.

Prints one JSON line a data set: events/s of reading and encoding alone, and of predict-then-learn
with a checkpoint every ten seconds; progressive AUC. MovieLens' events ship with the repository;
`--avazu` takes a csv of Avazu's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hotbed as hb
from hotbed.connectors.source import Source
from hotbed.testing import Broker

ROOT = Path(__file__).resolve().parent.parent
SHARES = (0.70, 0.25, 0.05)


def movielens() -> tuple[Source, hb.Schema]:
    """Ratings with their films' genres, in the order of time."""
    data = ROOT / "data" / "ml_latest_small"
    events = (
        hb.sources.Csv(data / "ratings.csv")
        .join(hb.sources.Csv(data / "movies.csv"), on="movieId")
        .sort("timestamp")
    )
    split = hb.transforms.Split("|")
    ids = [
        hb.Id("user", column="userId"),
        hb.Id("movie", column="movieId"),
        hb.Id("genres", transforms=[split], pooling="mean"),
    ]
    return events, hb.Schema(
        [hb.Label("liked", column="rating", threshold=4), hb.Time("timestamp", unit="s"), *ids]
    )


def avazu(path: str) -> tuple[Source, hb.Schema]:
    """Clicks with all their categorical columns."""
    events = hb.sources.Csv(path)
    names = [name for name in events.schema().names if name not in ("id", "click", "hour")]
    return events, hb.Schema(
        [hb.Label("click"), *(hb.Id(name, transforms=[hb.transforms.Hash()]) for name in names)]
    )


def messages(source: Source, schema: hb.Schema) -> list[bytes]:
    """Every event as the JSON that a producer would send."""
    wanted = schema.raw_columns()
    return [
        json.dumps({name: row[name] for name in wanted}).encode()
        for batch, _ in source.read()
        for row in batch.to_pylist()
    ]


def measure(name: str, source: Source, schema: hb.Schema, batch: int) -> dict[str, Any]:
    sent, draw = messages(source, schema), np.random.default_rng(0)
    partition = draw.choice(len(SHARES), len(sent), p=SHARES)
    with Broker() as broker, tempfile.TemporaryDirectory() as folder:
        broker.create(name, len(SHARES))
        for number in range(len(SHARES)):
            broker.produce(name, [sent[i] for i in np.flatnonzero(partition == number)], number)
        kafka = hb.sources.Kafka(broker.servers, name)
        begin, rows = time.perf_counter(), 0
        for one in hb.Dataset(kafka, schema, batch):
            rows += len(one)
            if rows + batch > len(sent):
                break
        reading = rows / (time.perf_counter() - begin)
        torch.manual_seed(0)
        tables = hb.make_tables(schema, dim=8, rule=hb.Adagrad(lr=0.02))
        network = hb.models.DCNv2(schema, tables, hidden=(64, 32))
        model = hb.RecModel(network, "bce", hb.Adam(lr=1e-3), {"auc"})
        begin = time.perf_counter()
        saved = hb.callbacks.Checkpoint(Path(folder) / "run", every_seconds=10)
        history = model.online_train(
            hb.Dataset(kafka, schema, batch), [saved], max_steps=len(sent) // batch, progress=False
        )
        seconds = time.perf_counter() - begin
    learned = len(sent) // batch * batch
    return {
        "data": name,
        "events": len(sent),
        "batch": batch,
        "read_events_s": round(reading),
        "online_events_s": round(learned / seconds),
        "progressive_auc": round(history.metrics["auc"], 4),
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--avazu", default=None, help="a csv of Avazu's events, in the order of time")
    p.add_argument("--batch", type=int, default=256)
    p.add_argument("--threads", type=int, default=1)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    print(json.dumps(measure("movielens", *movielens(), a.batch)), flush=True)
    if a.avazu:
        print(json.dumps(measure("avazu", *avazu(a.avazu), a.batch)), flush=True)


if __name__ == "__main__":
    main()
