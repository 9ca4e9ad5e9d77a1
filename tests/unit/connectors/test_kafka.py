# SPDX-License-Identifier: Apache-2.0
"""Kafka against a real broker: each message once, in one order, whatever dies; what cannot be is
said clearly.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from kafka_streams import SKEW, fill, hasty, make, message, rows, within

from hotbed.connectors import (
    Arrow,
    Concat,
    DeadLetters,
    Join,
    Journal,
    Json,
    Kafka,
    Live,
    Memory,
    Position,
    ReadPlan,
    Skips,
    Source,
)
from hotbed.connectors.kafka.topic import Bounds, KafkaTopic
from hotbed.connectors.position import PLACE, schema_from_text
from hotbed.data import Dataset, Id, Label, Schema
from hotbed.errors import ConfigError, DataError, DecodeError, SchemaError
from hotbed.testing import Broker


@pytest.fixture(scope="module")
def shared() -> Iterator[Broker]:
    """A broker for tests that leave it as it is; each has a topic of its own."""
    with Broker() as running:
        yield running


@pytest.fixture
def topic(shared: Broker, request: pytest.FixtureRequest) -> str:
    name = re.sub(r"\W", "-", request.node.name)[-60:]
    shared.create(name, 3)
    return name


def test_each_message_comes_once_in_the_order_of_timestamps_though_partitions_are_skewed(
    shared: Broker, topic: str
) -> None:
    fill(shared, topic, range(5000))
    dataset = make(Kafka(shared.servers, topic, block_rows=200))
    assert [row for batch in rows(within(dataset.stream(), 100)) for row in batch] == list(
        range(5000)
    )
    assert dataset.lag == 0


def test_a_run_that_dies_again_and_again_gets_the_batches_of_one_that_does_not(
    shared: Broker, topic: str, tmp_path: Path
) -> None:
    fill(shared, topic, range(4000))
    draw = random.Random(7)
    source = Kafka(shared.servers, topic, block_rows=150, linger_seconds=0.02)
    journal = Journal(tmp_path / "journal")
    position: dict[str, Any] = {}
    seen: dict[int, list[int]] = {}
    while len(seen) < 80:
        dataset = make(source, live=Live(journal), prefetch=draw.choice([0, 3])).resume(position)
        left = 80 - position.get("rows", 0) // 50
        for batch in within(dataset.stream(), min(left, draw.randint(1, 30))):
            assert batch.position is not None
            number = batch.position["rows"]
            batch_rows = batch.ids["row"].values.tolist()
            assert seen.setdefault(number, batch_rows) == batch_rows
            if draw.random() < 0.1:
                position = batch.position.to_json()
        journal.close()
        journal = Journal(tmp_path / "journal")
    assert [row for number in sorted(seen) for row in seen[number]] == list(range(4000))


def test_blocks_are_what_had_arrived_also_in_the_next_life(shared: Broker, topic: str) -> None:
    """The second half has earlier timestamps: whoever finds both there would read it first."""
    live = Live(Journal())
    items = make(Kafka(shared.servers, topic), 5, live).stream()
    shared.produce(topic, [message(row) for row in range(5)], times=1000)
    first = within(items, 1)
    shared.produce(topic, [message(row) for row in range(5, 10)], partition=1, times=1)
    assert rows([*first, *within(items, 1)]) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    again = make(Kafka(shared.servers, topic), 5, Live(live.journal))
    assert rows(within(again.stream(), 2)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert rows(within(make(Kafka(shared.servers, topic), 5).stream(), 1)) == [[5, 6, 7, 8, 9]]


@pytest.mark.parametrize("count", [1, 4])
def test_without_the_journal_a_position_loses_and_repeats_nothing(
    shared: Broker, topic: str, count: int
) -> None:
    """The position may lie within a block; the next life's clock would have made another."""
    fill(shared, topic, range(900))
    part = (1, 2)  # 300 of the messages
    first = within(
        make(Kafka(shared.servers, topic, partitions=part, block_rows=130)).stream(), count
    )
    fill(shared, topic, range(900))  # late: earlier by their timestamps than what waits
    resumed = make(Kafka(shared.servers, topic, partitions=part, block_rows=500))
    rest = within(
        resumed.resume(json.dumps((first[-1].position or Position({})).to_json())).stream(),
        12 - count,
    )
    found = sorted(row for batch in rows([*first, *rest]) for row in batch)
    assert found == sorted([row for row in range(900) if SKEW[row % 9]] * 2)


def test_a_block_of_few_messages_comes_after_the_linger_and_ticks_meanwhile(
    shared: Broker, topic: str
) -> None:
    items = make(Kafka(shared.servers, topic), 3).stream()
    assert list(islice(items, 3)) == [None] * 3
    shared.produce(topic, [message(0), message(1)], times=1)
    shared.produce(topic, [message(2)], partition=1, times=3)
    assert rows(within(items, 1)) == [[0, 1, 2]]


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_where_a_first_reading_begins_is_decided_once(shared: Broker, start: Any) -> None:
    topic = f"begins-{start}"
    shared.create(topic, 2)
    shared.produce(topic, [message(row) for row in range(10)])
    live = Live(Journal())
    items = make(Kafka(shared.servers, topic, start=start), 5, live).stream()
    if start == "earliest":
        assert rows(within(items, 2)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
        return
    assert list(islice(items, 5)) == [None] * 5
    shared.produce(topic, [message(row) for row in range(10, 15)])
    # died before the first batch
    again = make(Kafka(shared.servers, topic, start=start), 5, live).stream()
    assert rows(within(again, 1)) == [[10, 11, 12, 13, 14]]


def test_named_partitions_and_parts_divide_a_topic(shared: Broker, topic: str) -> None:
    fill(shared, topic, range(900))
    only = make(Kafka(shared.servers, topic, partitions=[1]), 200)
    assert all(SKEW[row % 9] == 1 for row in rows(within(only.stream(), 1))[0])
    first, second, third, none = [
        make(part, 50) for part in Kafka(shared.servers, topic, partitions=[0, 1, 2]).parts(4)
    ]
    even, odd = [make(part, 50) for part in Kafka(shared.servers, topic).parts(2)]
    batches = [*within(even.stream(), 14), *within(odd.stream(), 4)]
    assert sorted(row for batch in rows(batches) for row in batch) == list(range(900))
    for number, part in enumerate((first, second, third)):
        assert {SKEW[row % 9] for row in rows(within(part.stream(), 1))[0]} == {number}
    assert list(islice(none.stream(), 5)) == [None] * 5
    part = Kafka(shared.servers, topic).parts(2)[0]
    even = make(hasty(part, patience=0.2), 50)
    even.resume(batches[-1].position or {})
    with pytest.raises(DataError, match=r"partitions \[1\] are not there"):
        within(even.stream(), 1)


def test_poison_is_a_dead_letter_with_its_place_and_the_others_live(
    shared: Broker, topic: str, tmp_path: Path
) -> None:
    poison: list[bytes | None] = [
        b"{",
        b"",
        None,
        b"[]",
        b'{"row": 1} {"row": 2}',
        b'{"row": "one", "label": 1}',
        b"\xff",
    ]
    good: list[bytes | None] = [message(row) for row in range(50)]
    good[3] = b'{\n  "row": 3,\n  "label": 1\n}'
    shared.produce(topic, [*good[:20], *poison, *good[20:]])
    letters = DeadLetters(tmp_path / "dead.jsonl")
    dataset = make(Kafka(shared.servers, topic), live=Live(dead_letters=letters), on_error="skip")
    assert rows(within(dataset.stream(), 1)) == [list(range(50))]
    assert letters.counts == {"undecodable": len(poison)} == {"undecodable": dataset.skips.total}
    places = [
        json.loads(line)["place"] for line in (tmp_path / "dead.jsonl").read_text().splitlines()
    ]
    assert places == [
        {"topic": topic, "partition": 0, "offset": 20 + i} for i in range(len(poison))
    ]


def test_poison_is_an_error_with_its_place_where_nothing_may_be_skipped(
    shared: Broker, topic: str
) -> None:
    shared.produce(topic, [message(0), b"{"], partition=2)
    with pytest.raises(
        DecodeError, match=rf"topic {topic}, partition 2, offset 1: cannot be decoded"
    ):
        within(make(Kafka(shared.servers, topic)).stream(), 1)
    shared.produce(topic, [message(0), b'{"row": 1}'], partition=1)
    with pytest.raises(DecodeError, match=rf"topic {topic}, partition 1, offset 1: label 'label'"):
        within(make(Kafka(shared.servers, topic, partitions=[1])).stream(), 1)


def test_fields_may_come_and_go_and_a_column_keeps_its_type(shared: Broker, topic: str) -> None:
    schema = Schema([Label("label"), Id("row"), Id("tags")])
    shared.produce(
        topic, [message(0, tags=["a"]), message(1, tags=[], new={"deep": 1}), message(2)], times=1
    )
    shared.produce(topic, [message(3, tags=[5], old=1), message(4, tags=["b"])], times=10)
    dataset = Dataset(Kafka(shared.servers, topic), schema, 4, prefetch=0, on_error="skip")
    (batch,) = within(dataset.stream(), 1)
    assert rows([batch]) == [[0, 1, 2, 4]]
    assert batch.ids["tags"].lengths().tolist() == [1, 0, 0, 1]
    assert dataset.live.dead_letters.counts == {"undecodable": 1}


def test_types_met_first_are_in_the_journal_and_in_positions(shared: Broker, topic: str) -> None:
    shared.produce(topic, [message(0)] * 4)
    source = Kafka(shared.servers, topic, block_rows=4)
    dataset = make(source, 4)
    first = within(dataset.stream(), 1)
    types = dataset.live.journal.get("block", 0)["types"]  # type: ignore[index]  # it was decided
    assert types == first[0].position["source"]["schema"]  # type: ignore[index]  # a batch has one
    assert schema_from_text(types).field("row").type == pa.int64()
    shared.produce(topic, [b'{"row": "text", "label": 1}'] * 4)
    resumed = make(source, 4).resume(first[0].position or {})
    with pytest.raises(DecodeError, match="offset 4: cannot be decoded"):
        within(resumed.stream(), 1)


def test_a_column_that_no_message_has_is_an_error_unless_it_was_declared(
    shared: Broker, topic: str
) -> None:
    shared.produce(topic, [b'{"row": 1, "lable": 1}', b'{"row": 2}'])
    with pytest.raises(
        SchemaError, match=r"no message has columns \['label'\], got \['row', 'lable'\]"
    ):
        within(make(Kafka(shared.servers, topic)).stream(), 1)
    schema = Schema([Id("row"), Id("tags")])
    source = Kafka(shared.servers, topic, Json({"tags": "list<string>"}))
    (batch,) = within(Dataset(source, schema, 2, prefetch=0).stream(), 1)
    assert batch.ids["tags"].lengths().tolist() == [0, 0]
    with pytest.raises(ConfigError, match=r"columns.tags: unknown type, got 'text'"):
        Json({"tags": "text"})


def test_arrow_messages_hold_many_rows_each(shared: Broker, topic: str) -> None:
    def stream(values: list[Any], kind: pa.DataType) -> bytes:
        sink = pa.BufferOutputStream()
        batch = pa.record_batch({"row": pa.array(values, kind), "label": [0.0] * len(values)})
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return bytes(sink.getvalue())

    whole = stream(list(range(10)), pa.int64())
    text = stream(["007"], pa.string())  # never the number 7
    narrow = stream([10, 11], pa.int32())
    shared.produce(topic, [whole, whole[:-50], stream([], pa.int64()), text, narrow])
    dataset = make(Kafka(shared.servers, topic, Arrow()), 4, on_error="skip")
    batches = within(dataset.stream(), 3)
    assert [row for batch in rows(batches) for row in batch] == list(range(12))
    assert dataset.live.dead_letters.counts == {"undecodable": 2}
    resumed = make(Kafka(shared.servers, topic, Arrow()), 4, on_error="skip").resume(
        batches[0].position or {}
    )
    assert rows(within(resumed.stream(), 2)) == rows(batches[1:])


def test_raw_batches_know_where_each_row_came_from(shared: Broker, topic: str) -> None:
    shared.produce(topic, [message(7)], partition=2)
    for batch, position in Kafka(shared.servers, topic).read(
        plan=ReadPlan(("row",), skips=Skips())
    ):
        if batch.num_rows:
            assert batch.column(PLACE).to_pylist() == [
                {"topic": topic, "partition": 2, "offset": 0}
            ]
            assert position["now"] == pytest.approx(time.time() * 1e6, abs=60e6)
            assert Kafka(shared.servers, topic).schema().names == ["row", "label"]
            break


def test_commits_reach_the_brokers_group_only_when_told(shared: Broker, topic: str) -> None:
    import confluent_kafka as kafka

    fill(shared, topic, range(900))
    source = Kafka(shared.servers, topic, group="trainer", block_rows=90)
    places = [kafka.TopicPartition(topic, partition) for partition in range(3)]
    other = kafka.Consumer({"bootstrap.servers": shared.servers, "group.id": "trainer"})

    def committed() -> list[int]:
        return [place.offset for place in other.committed(places, timeout=10)]

    dataset = make(source, 90)
    items = dataset.stream()
    batches = within(items, 5)
    assert batches[1].position is not None
    assert batches[3].position is not None
    assert committed() == [-1001] * 3
    dataset.commit(batches[1].position)
    deadline = time.monotonic() + 20
    while committed() == [-1001] * 3 and time.monotonic() < deadline:
        next(items)
    assert committed() == list(batches[1].position["source"]["offsets"].values())
    items.close()
    dataset.commit(batches[3].position)  # the last checkpoint, when reading has ended
    assert committed() == list(batches[3].position["source"]["offsets"].values())
    other.close()


def test_a_commit_never_blocks_a_quiet_stream_nor_its_end(
    shared: Broker, topic: str, tmp_path: Path
) -> None:
    """A thread reads ahead, and nothing arrives any more; the client's lock is its own affair."""
    import confluent_kafka as kafka

    shared.produce(topic, [message(row) for row in range(30)])
    source = Kafka(shared.servers, topic, group=topic)
    dataset = Dataset(source, Schema([Label("label"), Id("row")]), 10)
    other = kafka.Consumer({"bootstrap.servers": shared.servers, "group.id": topic})
    items = dataset.stream()
    for batch in within(items, 3):
        dataset.commit(batch.position or Position({}))
    place = kafka.TopicPartition(topic, 0)
    while other.committed([place], timeout=10)[0].offset != 30:
        assert next(items) is None
    items.close()
    other.close()


def test_two_readers_of_one_source_commit_by_the_one_that_still_reads(
    shared: Broker, topic: str
) -> None:
    fill(shared, topic, range(90))
    source = Kafka(shared.servers, topic, group=topic)
    items = make(source, 30).stream()
    within(items, 1)
    other = make(source, 30).stream()
    within(other, 1)
    other.close()
    assert len(source._readings) == 1
    items.close()
    assert not source._readings


def test_a_topic_that_is_not_there_is_waited_for_and_then_named(shared: Broker) -> None:
    items = make(Kafka(shared.servers, "later"), 2).stream()
    assert list(islice(items, 3)) == [None] * 3
    shared.create("later")
    shared.produce("later", [message(0), message(1)])
    assert rows(within(items, 1)) == [[0, 1]]
    never = hasty(Kafka(shared.servers, "never"), patience=0.5)
    with pytest.raises(DataError, match=r"kafka topic 'never': the broker does not know it"):
        within(make(never).stream(), 1)


@pytest.mark.parametrize("resumed", [True, False])
def test_offsets_that_are_gone_are_an_error(
    shared: Broker, topic: str, resumed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(shared, topic, range(900))
    # small blocks: most messages are not fetched yet
    source = hasty(Kafka(shared.servers, topic, block_rows=10), look=0.1)
    items = make(source, 20).stream()
    first = within(items, 2)
    if resumed:
        items = make(Kafka(shared.servers, topic)).resume(first[-1].position or {}).stream()

    def bounds(self: KafkaTopic, partitions: Sequence[int]) -> Generator[bool, None, Bounds]:
        yield from ()
        return dict.fromkeys(partitions, (200, 900))  # retention took 0 to 199

    monkeypatch.setattr(KafkaTopic, "_bounds", bounds)
    with pytest.raises(
        DataError, match=r"messages \d+ to 199 of partition \d are gone, got 200 as the oldest"
    ):
        within(items, 1000)


def test_a_broker_that_refuses_us_is_an_error_at_the_start(shared: Broker) -> None:
    options = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "ann",
        "sasl.password": "hunter2",
    }
    source = Kafka(shared.servers, "clicks", options=options)
    with pytest.raises(
        ConfigError, match=r"options: the broker refuses the connection, got .*_AUTHENTICATION"
    ):
        within(make(source).stream(), 1)


@pytest.mark.parametrize("depth", ["files", "files of files"])
def test_a_history_before_a_topic_holds_no_window_of_a_join_open(
    shared: Broker, topic: str, depth: str
) -> None:
    for partition in range(3):
        part = range(100 + partition, 400, 3)
        shared.produce(topic, [message(row, at=row) for row in part], partition)

    def memory(*rows: int) -> Source:
        numbers = np.arange(*rows)
        return Memory({"row": numbers, "label": numbers % 2, "at": numbers})

    source: Source = Kafka(shared.servers, topic)
    if depth != "files":
        source = Concat([memory(50, 100), source])
    source = Concat([memory(0, 50 if depth != "files" else 100), source])
    clicks = memory(0, 400, 2)
    settings: dict[str, Any] = {"on": "row", "within": 10, "time": "at", "unit": "s"}
    join = Join(source, clicks, label="clicked", idle_seconds=1000, **settings)
    due = 397 - 10  # a partition ends at 397
    batches = within(make(join, 1).stream(), due)
    assert sorted(row for batch in rows(batches) for row in batch) == list(range(due))
