# SPDX-License-Identifier: Apache-2.0
"""What the tests of Kafka share: messages of three skewed partitions, and streams of them."""

from __future__ import annotations

import json
import time
from typing import Any

from hotbed.connectors import Kafka, Live, Source
from hotbed.connectors.kafka.topic_source import Timings
from hotbed.data import Batch, Dataset, Id, Label, Schema
from hotbed.testing import Broker

SCHEMA = Schema([Label("label"), Id("row")])
SKEW = (0, 0, 0, 0, 0, 0, 1, 1, 2)


def message(row: int, **more: Any) -> bytes:
    return json.dumps({"row": row, "label": row % 2, **more}).encode()


def fill(broker: Broker, topic: str, rows: range) -> None:
    """Three skewed partitions; timestamps rise with row numbers."""
    for partition in range(3):
        part = [row for row in rows if SKEW[row % 9] == partition]
        broker.produce(topic, [message(row) for row in part], partition, [row + 1 for row in part])


def hasty(source: Source, **seconds: float) -> Source:
    """Return a topic to be read with other timings."""
    assert isinstance(source, Kafka)
    object.__setattr__(source, "_timings", Timings(**seconds))
    return source


def make(
    source: Source, batch_size: int = 50, live: Live | None = None, **arguments: Any
) -> Dataset:
    dataset = Dataset(source, SCHEMA, batch_size, **{"prefetch": 0, **arguments})
    dataset.live = live or Live()
    return dataset


def rows(batches: Any) -> list[list[int]]:
    return [batch.ids["row"].values.tolist() for batch in batches]


def within(items: Any, count: int, seconds: float = 30.0) -> list[Batch]:
    """The first `count` batches of a stream."""
    found: list[Batch] = []
    deadline = time.monotonic() + seconds
    for item in items:
        if item is not None:
            found.append(item)
        if len(found) == count:
            break
        assert time.monotonic() < deadline, f"{len(found)} of {count} batches in {seconds} s"
    return found
