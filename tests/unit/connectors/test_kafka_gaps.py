# SPDX-License-Identifier: Apache-2.0
"""Offsets with gaps: markers of transactions, and messages that compaction took. Nothing waits for
them or trips over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import confluent_kafka as kafka
import pytest
from kafka_streams import make, message, rows, within

from hotbed.connectors import Journal, Json, Kafka, Live, Position
from hotbed.connectors.kafka.client import ClientError, KafkaClient, PolledEntry
from hotbed.connectors.kafka.identity import Mark, TopicIdentity
from hotbed.connectors.kafka.topic import KafkaTopic
from hotbed.errors import DataError, DecodeError
from hotbed.testing import Broker


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as running:
        yield running


def transactions(broker: Broker, topic: str, num_transactions: int, size: int) -> None:
    """Each ends with a marker of its own, an offset without a message; two partitions in turn."""
    producer = kafka.Producer(
        {"bootstrap.servers": broker.servers, "transactional.id": topic, "log_level": 0}
    )
    producer.init_transactions(20)
    for number in range(num_transactions):
        producer.begin_transaction()
        for row in range(number * size, (number + 1) * size):
            producer.produce(topic, message(row), partition=number % 2, timestamp=row + 1)
        producer.flush(20)
        producer.commit_transaction(20)


@pytest.fixture
def compacted(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Messages (partition, offset) that compaction took: the consumer gets them no more, as from a
    broker that compacts.

    The broker of these tests does not; that offsets stay and messages go is all that a consumer
    sees of it.
    """
    gone: set[tuple[int, int]] = set()
    consume = KafkaClient.consume

    def compacted(self: KafkaClient, count: int, seconds: float) -> Iterator[PolledEntry]:
        for entry in consume(self, count, seconds):
            if entry.error is not None or (entry.partition, entry.offset) not in gone:
                yield entry

    monkeypatch.setattr(KafkaClient, "consume", compacted)
    return gone


def test_markers_of_transactions_are_passed_over_also_in_the_next_life(broker: Broker) -> None:
    broker.create("transactions", 2)
    transactions(broker, "transactions", 12, 10)
    live = Live(Journal())
    source = Kafka(broker.servers, "transactions", group="g", block_rows=25)
    dataset = make(source, 10, live)
    items = dataset.stream()
    batches = within(items, 12)
    assert [row for batch in rows(batches) for row in batch] == list(range(120))
    for _ in range(5):
        next(items)
    assert dataset.lag == 0  # the marker at the end of each partition is not counted
    for at in (0, 3, 10):
        position = batches[at].position
        assert position is not None
        for journal in (live.journal, Journal()):
            again = make(source, 10, Live(journal)).resume(position)
            assert rows(within(again.stream(), 11 - at)) == rows(batches[at + 1 :])
    dataset.commit(batches[-1].position or Position({}))
    next(items)
    places = [kafka.TopicPartition("transactions", partition) for partition in range(2)]
    monitor = kafka.Consumer({"bootstrap.servers": broker.servers, "group.id": "g"})
    # 60 messages and 6 markers each: a monitor of the group sees no lag
    while [place.offset for place in monitor.committed(places, timeout=10)] != [66, 66]:
        next(items)
    monitor.close()
    transactions(broker, "transactions", 2, 10)  # numbers begin again: times do, too
    assert sorted(row for batch in rows(within(items, 2)) for row in batch) == list(range(20))


@pytest.mark.parametrize(
    ("isolation", "expected"), [(None, 10), ("read_committed", 10), ("read_uncommitted", 15)]
)
def test_messages_of_an_open_transaction_wait_unless_the_isolation_says_otherwise(
    broker: Broker, isolation: str | None, expected: int
) -> None:
    topic = f"open-{isolation}"
    broker.create(topic)
    broker.produce(topic, [message(row) for row in range(10)], times=1)
    client = {"bootstrap.servers": broker.servers, "transactional.id": topic, "log_level": 0}
    producer = kafka.Producer(client)
    producer.init_transactions(20)
    producer.begin_transaction()
    for row in range(10, 15):
        producer.produce(topic, message(row), partition=0)
    producer.flush(20)
    options = {} if isolation is None else {"isolation.level": isolation}
    dataset = make(Kafka(broker.servers, topic, options=options), 5)
    items = dataset.stream()
    assert rows(within(items, expected // 5))[-1][-1] == expected - 1
    for _ in range(3):
        assert next(items) is None
    assert dataset.lag == 15 - expected
    if expected == 10:
        producer.commit_transaction(20)
        assert rows(within(items, 1)) == [[10, 11, 12, 13, 14]]


def test_the_lag_counts_what_is_fetched_and_the_offsets_after_it() -> None:
    """Aborted messages and markers are passed over without being fetched."""
    topic = KafkaTopic(Kafka("localhost:1", "clicks"), Live(), {})
    assert topic.num_waiting(0) is None
    topic.fetched[0] = 10
    topic.pending[0] = []
    assert topic.num_waiting(0) is None
    topic.client.ends[0] = 30
    assert topic.num_waiting(0) == 20
    topic.pending[0] = [(0, 12, b""), (0, 17, b"")]
    topic.fetched[0] = 18
    assert topic.num_waiting(0) == 2 + 12
    topic._ended[0] = 30
    assert topic.num_waiting(0) == 2


def test_an_end_does_not_prove_another_topic_where_messages_were_dropped_before_it() -> None:
    """A broker fails while it fills a topic again: what was fetched before the failure is dropped."""
    mark = Mark.of((1, 0, message(0)))
    identity = TopicIdentity("before", {0: mark})
    topic = KafkaTopic(Kafka("localhost:1", "clicks"), Live(), {0: 0}, identity)
    topic._id = "now"
    topic._unproven = {0}
    topic.fetched[0] = 1
    end = PolledEntry(0, 1, 0, None, ClientError("_PARTITION_EOF", "the end", False))
    failure = PolledEntry(0, 0, 0, None, ClientError("_TRANSPORT", "no answer", False))
    topic._add([failure, PolledEntry(0, 0, 1, message(0), None), end])
    assert not topic.is_reached
    topic._shaken = False
    with pytest.raises(DataError, match="it was recreated, got id now instead of before"):
        topic._add([end])


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_tombstones_are_named_or_passed_over_where_that_is_asked_for(
    broker: Broker, on_error: str
) -> None:
    topic = f"tombstones-{on_error}"
    broker.create(topic)
    broker.produce(topic, [None, message(0), None, message(1), None, None, message(2)])
    source = Kafka(broker.servers, topic, block_rows=2, tombstones="skip")
    dataset = make(source, 1, on_error=on_error)
    batches = within(dataset.stream(), 3)
    assert rows(batches) == [[0], [1], [2]]
    assert dataset.skips.total == 0
    assert source.schema().names == ["row", "label"]
    for number, batch in enumerate(batches):
        resumed = make(source, 1, on_error=on_error).resume(batch.position or {})
        assert rows(within(resumed.stream(), 2 - number)) == rows(batches[number + 1 :])
    refused = make(Kafka(broker.servers, topic), 1, on_error=on_error)
    if on_error == "skip":
        assert rows(within(refused.stream(), 3)) == [[0], [1], [2]]
        assert refused.live.dead_letters.counts == {"undecodable": 4}
    else:
        with pytest.raises(DecodeError, match=r"offset 0: it is a tombstone.*tombstones='skip'"):
            within(refused.stream(), 1)


def test_a_compacted_topic_is_read_and_its_blocks_are_the_same_in_the_next_life(
    broker: Broker, compacted: set[tuple[int, int]]
) -> None:
    broker.create("compacted", 2)
    for partition in (0, 1):
        broker.produce(
            "compacted", [message(row) for row in range(partition, 200, 2)], partition, times=1
        )
    compacted |= {
        (p, offset) for p in (0, 1) for offset in range(100) if offset % 5 != 2
    }  # also the first and the last
    live = Live(Journal())
    source = Kafka(broker.servers, "compacted", block_rows=7)
    dataset = make(source, 10, live)
    batches = within(dataset.stream(), 4)
    found = [row for batch in rows(batches) for row in batch]
    assert found == [row for row in range(200) if (row // 2) % 5 == 2]
    for at in (0, 2):
        again = make(source, 10, Live(live.journal)).resume(batches[at].position or {})
        assert rows(within(again.stream(), 3 - at)) == rows(batches[at + 1 :])
    broker.produce("compacted", [message(row) for row in range(1000, 1010)], times=1000)
    resumed = make(source, 10, Live(live.journal)).resume(batches[-1].position or {})
    assert rows(within(resumed.stream(), 1)) == [list(range(1000, 1010))]


@pytest.mark.parametrize("journalled", [True, False])
def test_compaction_between_two_lives_takes_its_messages_and_no_others(
    broker: Broker, compacted: set[tuple[int, int]], journalled: bool
) -> None:
    topic = f"later-{journalled}"
    broker.create(topic, 2)
    for partition in (0, 1):
        broker.produce(
            topic, [message(row) for row in range(partition, 120, 2)], partition, times=1
        )
    source = Kafka(broker.servers, topic, block_rows=40)
    # what has arrived when a block is cut is the clock's: until the first one holds 40
    for _ in range(20):
        live = Live(Journal())
        batches = within(make(source, 8, live).stream(), 15)
        if (live.journal.get("block", 0) or {})["take"] == {"0": 20, "1": 20}:
            break
    compacted |= {(p, offset) for p in (0, 1) for offset in range(60) if offset % 4 in (0, 3)}

    def resumed(at: int) -> Any:
        return (
            make(source, 4, Live(live.journal if journalled else Journal()))
            .resume(batches[at].position or {})
            .stream()
        )

    left = [row for row in range(40, 120) if (row // 2) % 4 in (1, 2)]
    assert [row for batch in rows(within(resumed(4), len(left) // 4)) for row in batch] == left
    with pytest.raises(DataError, match=r"block that the position lies in are gone, got 20 of 40"):
        within(resumed(1), 1)


@pytest.mark.parametrize("topic_id", ["the same", None, "another"])
def test_a_last_message_that_compaction_took_is_no_other_topic_unless_the_id_says_so(
    broker: Broker, compacted: set[tuple[int, int]], topic_id: str | None
) -> None:
    topic = f"last-{topic_id}".replace(" ", "-")
    broker.create(topic)
    broker.produce(topic, [message(row) for row in range(20)])
    source = Kafka(broker.servers, topic, block_rows=10)
    position = within(make(source, 10).stream(), 1)[0].position
    assert position is not None
    state = position.to_json()
    if topic_id != "the same":
        state["source"]["topic"]["id"] = topic_id
    compacted.add((0, 9))
    items = make(source, 10).resume(state).stream()
    if topic_id == "another":
        with pytest.raises(DataError, match=r"it was recreated, got id .* instead of another"):
            within(items, 1)
    else:
        assert rows(within(items, 1)) == [list(range(10, 20))]


@pytest.mark.parametrize("declared", [True, False])
def test_a_message_that_is_too_large_stops_reading_after_those_before_it(
    broker: Broker, declared: bool
) -> None:
    """The limit of librdkafka is 100 MB; the broker puts all messages into one answer."""
    topic = f"large-{declared}"
    broker.create(topic)
    broker.produce(topic, [message(row) for row in range(30)])
    broker.produce(topic, [message(30, text="x" * 60_000)])
    broker.produce(topic, [message(row) for row in range(31, 40)])
    limits = ("message.max.bytes", "fetch.max.bytes", "fetch.message.max.bytes")
    options = {**dict.fromkeys(limits, 20_000), "receive.message.max.bytes": 20_512}
    columns = {"row": "int64", "label": "int64"} if declared else {}
    source = Kafka(broker.servers, topic, Json(columns=columns), options=options)
    items = make(source, 10).stream()
    assert rows(within(items, 3)) == [[*range(10)], [*range(10, 20)], [*range(20, 30)]]
    with pytest.raises(DataError, match=r"got 60\d+ bytes at offset 30 .*20512.*Raise rec"):
        within(items, 1)
    larger = {**options, "receive.message.max.bytes": 100_000}
    source = Kafka(broker.servers, topic, Json(columns=columns), options=larger)
    assert rows(within(make(source, 40).stream(), 1)) == [[*range(40)]]
