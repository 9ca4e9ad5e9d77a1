# SPDX-License-Identifier: Apache-2.0
"""A topic that was made anew is told from the one that a position was written for; nothing is
skipped silently.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest
from kafka_streams import fill, hasty, make, message, rows, within

from hotbed.connectors import Arrow, Concat, Journal, Json, Kafka, Live, Memory, Position
from hotbed.connectors.kafka.identity import Mark, TopicIdentity
from hotbed.connectors.kafka.topic import Bounds, KafkaTopic
from hotbed.errors import DataError
from hotbed.testing import Broker

ids = pytest.mark.parametrize("with_id", [True, False], ids=["id", "no id"])


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as running:
        yield running


@pytest.fixture
def topic(broker: Broker, request: pytest.FixtureRequest) -> str:
    """A topic of three partitions with rows 0 to 89."""
    name = f"t{abs(hash(request.node.name))}"
    broker.create(name, 3)
    fill(broker, name, range(90))
    return name


@pytest.fixture(autouse=True)
def without_id(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers of old versions give topics no id."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("with_id") is False:
        monkeypatch.setattr(KafkaTopic, "_described_id", _no_id)


def _no_id(self: KafkaTopic) -> Generator[bool, None, None]:
    yield from ()


def read(source: Kafka, count: int = 1, after: dict[str, Any] | None = None) -> Any:
    """The last of `count` batches of 30 rows."""
    dataset = make(source, 30).resume(after or {})
    return within(dataset.stream(), count)[-1]


def at(batch: Any) -> dict[str, Any]:
    position: dict[str, Any] = json.loads(json.dumps(batch.position.to_json()))
    return position


@ids
def test_a_topic_made_anew_with_more_messages_is_named(
    broker: Broker, topic: str, with_id: bool
) -> None:
    source = Kafka(broker.servers, topic, block_rows=30)
    position = at(read(source, 2))
    assert (position["source"]["topic"]["id"] is not None) == with_id
    assert position["source"]["topic"]["last"]
    broker.delete(topic)
    broker.create(topic, 3)
    fill(broker, topic, range(1000, 1200))
    for _ in range(2):
        with pytest.raises(
            DataError, match=rf"kafka topic '{topic}': it is not the topic .* it was recreated"
        ):
            read(source, 1, position)
    assert rows([read(source)]) == [list(range(1000, 1030))]


@ids
def test_a_broker_that_comes_back_with_another_topic_is_named(with_id: bool) -> None:
    with Broker() as broker:
        broker.create("lost", 3)
        fill(broker, "lost", range(90))
        items = make(Kafka(broker.servers, "lost", block_rows=30), 30).stream()
        assert rows(within(items, 3))[-1] == list(range(60, 90))
        broker.kill()
        broker.start()
        broker.create("lost", 3)
        fill(broker, "lost", range(1000, 1200))
        with pytest.raises(DataError, match="it was recreated"):
            within(items, 1)


@ids
def test_a_topic_that_was_restored_goes_on(broker: Broker, topic: str, with_id: bool) -> None:
    """Another id, the same messages: a copy of the topic, or a broker whose disk was restored."""
    source = Kafka(broker.servers, topic, block_rows=30)
    position = at(read(source, 2))
    broker.delete(topic)
    broker.create(topic, 3)
    fill(broker, topic, range(120))
    after = read(source, 1, position)
    assert rows([after]) == [list(range(60, 90))]
    if with_id:
        assert at(after)["source"]["topic"]["id"] != position["source"]["topic"]["id"]


@ids
def test_a_last_message_that_retention_took_raises_nothing(
    broker: Broker, topic: str, with_id: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Kafka(broker.servers, topic, block_rows=30)
    batch = read(source, 2)
    begins = {int(p): offset for p, offset in batch.position["source"]["offsets"].items()}
    original = KafkaTopic._bounds

    def bounds(self: KafkaTopic, partitions: Sequence[int]) -> Generator[bool, None, Bounds]:
        all_bounds = yield from original(self, partitions)
        self._lows |= begins
        return {number: (begins[number], high) for number, (_, high) in all_bounds.items()}

    monkeypatch.setattr(KafkaTopic, "_bounds", bounds)
    assert rows([read(source, 1, at(batch))]) == [list(range(60, 90))]
    position = at(batch)
    # it is not looked at: the broker has it no more
    position["source"]["topic"]["last"]["0"][2] ^= 1
    assert rows([read(source, 1, position)]) == [list(range(60, 90))]


def test_a_position_of_an_older_version_is_completed(broker: Broker, topic: str) -> None:
    source = Kafka(broker.servers, topic, block_rows=30)
    position = at(read(source, 2))
    identity = position["source"].pop("topic")
    after = read(source, 1, position)
    assert rows([after]) == [list(range(60, 90))]
    assert at(after)["source"]["topic"]["id"] == identity["id"]
    assert set(at(after)["source"]["topic"]["last"]) <= {"0", "1", "2"}


def arrow(row: int) -> bytes:
    """An Arrow message of two rows, which have the same values."""
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"row": [row, row], "label": [0.0, 0.0]})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("count", "encode", "partitions", "group", "nested"),
    [
        (300, message, 1, None, False),
        (10, message, 1, "trainer", True),
        (300, arrow, 3, "trainer", False),
        (10, arrow, 3, None, False),
    ],
)
def test_a_topic_made_anew_is_named_where_the_position_lies_in_the_first_block(
    broker: Broker,
    count: int,
    encode: Callable[[int], bytes],
    partitions: int,
    group: str | None,
    nested: bool,
) -> None:
    name = f"first-{count}-{encode.__name__}"

    def produce(rows: range) -> None:
        for partition in range(partitions):
            values = [encode(row) for row in rows if row % partitions == partition]
            broker.produce(name, values, partition, times=rows.start + 1)

    broker.create(name, partitions)
    produce(range(80))
    decoder = Arrow() if encode is arrow else Json()
    source = hasty(Kafka(broker.servers, name, decoder, group=group), proof=0.5)
    if nested:
        source = Concat([Memory({"row": [7], "label": [0.0]}), source])
    dataset = make(source, 30)
    position = at(within(dataset.stream(), 1)[0])
    kafka = position["source"]["source"] if nested else position["source"]
    assert kafka["take"]
    assert not kafka["topic"]["last"]
    assert rows(within(make(source, 30).resume(position).stream(), 1))  # the same topic
    older = json.loads(json.dumps(position))
    del (older["source"]["source"] if nested else older["source"])["topic"]["block"]
    assert rows(within(make(source, 30).resume(older).stream(), 1))
    broker.delete(name)
    broker.create(name, partitions)
    produce(range(1000, 1000 + count))
    for written in (position, older):
        with pytest.raises(DataError, match=rf"kafka topic '{name}': .* it was recreated"):
            within(make(source, 30).resume(written).stream(), 1)


def test_a_topic_made_anew_is_named_where_nothing_was_read_of_it_yet(broker: Broker) -> None:
    """Reading began at its end; the new topic holds messages before that offset."""
    broker.create("idle")
    broker.produce("idle", [message(row) for row in range(10)])
    source = Kafka(broker.servers, "idle", start="latest")
    reading = source.read()
    position = next(after for _, after in reading if after["offsets"])
    reading.close()
    assert position["offsets"] == {"0": 10}
    broker.delete("idle")
    broker.create("idle")
    broker.produce("idle", [message(row) for row in range(100, 120)])
    with pytest.raises(DataError, match="it was recreated"):
        list(source.read(position))


def test_a_block_of_the_journal_that_can_never_be_whole_is_named(broker: Broker) -> None:
    """No checkpoint was written, so that only the journal knows of the topic before."""
    broker.create("shorter")
    broker.produce("shorter", [message(row) for row in range(80)])
    live = Live(Journal())
    source = hasty(Kafka(broker.servers, "shorter"), patience=0.5, look=0.1)
    within(make(source, 30, live).stream(), 1)
    broker.delete("shorter")
    broker.create("shorter")
    broker.produce("shorter", [message(row) for row in range(10)])
    with pytest.raises(DataError, match="partition 0 ends before the position, got 10 messages"):
        within(make(source, 30, Live(live.journal)).stream(), 1)


@pytest.mark.slow
def test_a_topic_made_anew_under_a_reader_is_named(broker: Broker) -> None:
    """The client library may crash there; the reader does not."""
    broker.create("anew", 2)
    broker.produce("anew", [message(row) for row in range(100)])
    cases = [(2, 100, 300), (2, 100, 130), (1, 100, 300), (2, 0, 300)]
    for partitions, first, stop in cases:
        source = hasty(Kafka(broker.servers, "anew", block_rows=50), proof=1.0)
        items = make(source, 10).stream()
        within(items, 3)
        broker.delete("anew")
        broker.create("anew", partitions)
        broker.produce("anew", [message(row) for row in range(first, stop)], times=1)
        with pytest.raises(DataError, match=r"was recreated"):
            within(items, 1000)  # those that were fetched before come first


def test_an_identity_goes_through_a_position_and_back() -> None:
    last = {2: Mark.of((5, 7, None)), 0: Mark.of((6, 8, message(1)))}
    identity = TopicIdentity("abc", last, {0: Mark.of((7, 9, message(2)))})
    position = Position({"topic": identity.to_json()})
    assert TopicIdentity.from_json(Position.from_json(position.to_json())["topic"]) == identity
    assert TopicIdentity.from_json({}) == TopicIdentity()
