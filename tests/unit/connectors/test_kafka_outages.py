# SPDX-License-Identifier: Apache-2.0
"""Kafka's broker dies, hangs, restarts, grows and forgets; each test has a broker of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from kafka_streams import fill, hasty, make, message, rows, within

from hotbed.connectors import Journal, Kafka, Live, Position, Source
from hotbed.errors import DataError
from hotbed.testing import Broker

pytestmark = pytest.mark.slow


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker() as running:
        running.create("clicks", 3)
        yield running


def clicks(broker: Broker, patience: float = 10.0, **settings: Any) -> Source:
    """Return the topic of the broker, which is checked often."""
    return hasty(Kafka(broker.servers, "clicks", **settings), look=0.2, patience=patience)


def test_a_broker_that_restarts_is_waited_for_and_nothing_is_lost(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    fill(broker, "clicks", range(900))
    items = make(clicks(broker, block_rows=100), 90).stream()
    first = within(items, 4)
    broker.kill()
    with caplog.at_level(logging.WARNING, "hotbed.kafka"):
        before = time.monotonic()
        while "is away" not in caplog.text and time.monotonic() < before + 20:
            first += [item for item in [next(items)] if item is not None]
        broker.restart()
        fill(broker, "clicks", range(900, 1800))
        rest = within(items, 20 - len(first), 60)
        while "is back" not in caplog.text:
            assert next(items) is None
    assert sorted(row for batch in rows([*first, *rest]) for row in batch) == list(range(1800))
    assert caplog.text.count("is away, reading waits") == 1
    assert caplog.text.count("is back") == 1


def test_a_broker_that_hangs_is_waited_for(broker: Broker) -> None:
    fill(broker, "clicks", range(900))
    dataset = make(clicks(broker, block_rows=90), 90)
    items = dataset.stream()
    first = within(items, 3)
    broker.pause()
    deadline = time.monotonic() + 6  # it is not taken to be idle
    while dataset.lag is not None and time.monotonic() < deadline:
        first += [item for item in islice(items, 1) if item is not None]
    assert dataset.lag is None
    assert dataset.status.is_reached is False
    broker.pause(False)
    rest = within(items, 10 - len(first))
    deadline = time.monotonic() + 20  # of the next check of the topic
    while not dataset.status.is_reached and time.monotonic() < deadline:
        next(items)
    assert dataset.status.is_reached
    assert sorted(row for batch in rows([*first, *rest]) for row in batch) == list(range(900))


def test_a_stream_may_begin_before_its_broker(broker: Broker) -> None:
    broker.kill()
    dataset = make(clicks(broker), 2)
    items = dataset.stream()
    assert list(islice(items, 3)) == [None] * 3
    deadline = time.monotonic() + 6
    while dataset.status.is_reached is None and time.monotonic() < deadline:
        assert next(items) is None
    assert dataset.status.is_reached is False
    assert dataset.lag is None  # not 0
    broker.restart()
    broker.produce("clicks", [message(0), message(1)])
    assert rows(within(items, 1)) == [[0, 1]]


def test_new_partitions_are_read_from_their_beginning_now_and_in_the_next_life(
    broker: Broker,
) -> None:
    fill(broker, "clicks", range(90))
    live = Live(Journal())
    source = clicks(broker, start="latest", linger_seconds=0.02)
    items = make(source, 30, live).stream()
    assert list(islice(items, 5)) == [None] * 5
    fill(broker, "clicks", range(90, 180))
    seen = within(items, 3)
    broker.restart({"clicks": 5})
    broker.produce("clicks", [message(row) for row in range(1000, 1030)], partition=3)
    broker.produce("clicks", [message(row) for row in range(1030, 1060)], partition=4)
    seen += within(items, 2)
    assert sorted(row for batch in rows(seen) for row in batch) == [
        *range(90, 180),
        *range(1000, 1060),
    ]
    for number in (0, 2, 3):
        again = make(source, 30, Live(live.journal)).resume(seen[number].position or {})
        assert rows(within(again.stream(), 4 - number)) == rows(seen[number + 1 :])


def test_a_topic_made_anew_or_with_fewer_partitions_is_refused(broker: Broker) -> None:
    fill(broker, "clicks", range(900))
    first = within(make(clicks(broker, block_rows=90), 90).stream(), 2)
    position = first[-1].position or Position({})
    source = clicks(broker, patience=0.5)
    broker.delete("clicks")
    with pytest.raises(DataError, match="the broker does not know it"):
        within(make(source).resume(position).stream(), 1)
    broker.create("clicks", 3)
    with pytest.raises(
        DataError, match=r"partition 0 ends before the position, got 0 messages, position \d+"
    ):
        within(make(source).resume(position).stream(), 1)
    broker.delete("clicks")
    broker.create("clicks", 2)
    with pytest.raises(DataError, match=r"partitions \[2\] are not there, got partitions \[0, 1\]"):
        within(make(source).resume(position).stream(), 1)


def test_a_topic_that_is_emptied_under_a_reader_is_an_error_not_a_jump(broker: Broker) -> None:
    fill(broker, "clicks", range(900))
    items = make(clicks(broker, block_rows=90, patience=1.0), 90).stream()
    within(items, 10)
    broker.kill()
    broker.start()
    broker.create("clicks", 3)
    with pytest.raises(DataError, match="ends before the position"):
        within(items, 1, 60)
