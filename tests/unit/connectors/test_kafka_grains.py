# SPDX-License-Identifier: Apache-2.0
"""Grains of a topic: each message belongs to one grain, by its partition, in every life."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka_streams import SKEW, fill, make, message, within

from hotbed.connectors import DeadLetters, Journal, Kafka, Live, Memory
from hotbed.data import Batch, Dataset
from hotbed.errors import ConfigError
from hotbed.testing import Broker

ROWS = 1800
BLOCK = 150


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as running:
        running.create("clicks", 3)
        fill(running, "clicks", range(ROWS))
        yield running


def divided(source: Any, grains: int, size: int = 50, **arguments: Any) -> Dataset:
    dataset = make(source, size, **arguments)
    dataset.divide(grains)
    return dataset


def runs(batch: Batch) -> list[list[int]]:
    rows = batch.ids["row"].values.tolist()
    begins = [0, *batch.grain_ends]
    assert batch.grain_ends[-1] == len(rows)
    return [rows[begin:end] for begin, end in zip(begins, batch.grain_ends, strict=False)]


def grains_of(blocks: list[dict[int, list[int]]], partitions: int, grains: int) -> list[Any]:
    """The rows of each grain of each block, from the rows of each partition, in order."""
    expected = []
    for block in blocks:
        by_grain: list[list[int]] = [[] for _ in range(grains)]
        for partition, rows in block.items():
            owners = [partition % grains]
            if partitions < grains:
                owners = [grain for grain in range(grains) if grain % partitions == partition]
            for number, grain in enumerate(owners):
                begin, end = (k * len(rows) // len(owners) for k in (number, number + 1))
                by_grain[grain] += rows[begin:end]
        expected.append([sorted(rows) for rows in by_grain])  # timestamps rise with rows
    return expected


def blocks_of(journal: Journal, partitions: list[list[int]]) -> list[dict[int, list[int]]]:
    """The rows of each partition in each block of the journal."""
    blocks: list[dict[int, list[int]]] = []
    reached = dict.fromkeys(map(str, range(len(partitions))), 0)
    for _, decision in journal.after("block", -1):
        block: dict[int, list[int]] = {}
        for partition, end in decision["take"].items():
            block[int(partition)] = partitions[int(partition)][reached[partition] : end]
            reached[partition] = end
        blocks.append(block)
    return blocks


@pytest.mark.parametrize("grains", [2, 4, 8])
def test_messages_of_a_partition_belong_to_grains_of_its_own(broker: Broker, grains: int) -> None:
    """Two, four and eight grains of three partitions, of which one has most of the messages."""
    source = Kafka(broker.servers, "clicks", block_rows=BLOCK)
    live = Live()
    dataset = divided(source, grains, live=live)
    items = dataset.stream()
    batches: list[Batch] = []
    while sum(batch.num_samples for batch in batches) < ROWS:
        batches += within(items, 1)
    partitions = [[row for row in range(ROWS) if SKEW[row % 9] == number] for number in range(3)]
    expected = grains_of(blocks_of(live.journal, partitions), 3, grains)
    assert sum(len(rows) for block in expected for rows in block) == ROWS
    read = iter(batches)
    for block in expected:
        num_rows = sum(map(len, block))
        joined: list[list[int]] = [[] for _ in range(grains)]
        sizes = []
        while sum(map(len, joined)) < num_rows:
            parts = runs(next(read))
            joined = [[*rows, *part] for rows, part in zip(joined, parts, strict=True)]
            sizes.append(sum(map(len, parts)))
        assert joined == block
        assert len(sizes) == -(-num_rows // 50)
        assert max(sizes) <= num_rows / len(sizes) + grains / 2
    positions = [batch.position.state for batch in batches if batch.position is not None]
    number = max(place for place in range(20) if positions[place]["emitted"])  # inside a block
    text = json.dumps(positions[number])
    for journal in (live.journal, Journal()):  # a position is complete without the journal
        again = divided(source, grains, live=Live(journal)).resume(text)
        rest = [runs(batch) for batch in batches[number + 1 :]]
        in_block = rest if journal is live.journal else rest[:1]
        assert [runs(batch) for batch in within(again.stream(), len(in_block))] == in_block
    again = divided(source, grains, live=Live(live.journal), prefetch=3)
    assert [runs(batch) for batch in within(again.stream(), 9)] == [runs(b) for b in batches[:9]]
    with pytest.raises(ConfigError, match=f"written with grains={grains}, got 1"):
        make(source).resume(text)


def test_partitions_that_come_later_do_not_change_blocks_that_were_decided() -> None:
    with Broker() as broker:
        broker.create("clicks", 2)
        for partition in (0, 1):
            rows = range(partition, 200, 2)
            broker.produce("clicks", [message(row) for row in rows], partition, times=1000)
        live = Live()
        source = Kafka(broker.servers, "clicks", block_rows=100, linger_seconds=2)
        first = within(divided(source, 4, live=live).stream(), 4)
        assert all(all(runs(batch)) for batch in first)  # two partitions, dealt to four grains
        broker.restart({"clicks": 4})
        later = [message(row) for row in range(200, 300)]
        broker.produce("clicks", later, 3, times=9000)
        again = within(divided(source, 4, live=Live(live.journal)).stream(), 6)
        assert [runs(batch) for batch in again[:4]] == [runs(batch) for batch in first]
        assert [runs(batch)[:3] for batch in again[4:]] == [[[]] * 3] * 2
        assert [row for batch in again[4:] for row in runs(batch)[3]] == list(range(200, 300))


def test_bad_messages_are_dead_letters_grain_by_grain(broker: Broker, tmp_path: Path) -> None:
    """In a grain: those that are no JSON, then rows that cannot be encoded, each in order."""
    broker.create("poison", 4)
    kinds = {5: b"{", 7: b'{"row": 1, "label": "x"}', 8: b'{"row": 1, "label": null}'}
    places: list[tuple[int, int, int]] = []  # partition, offset, kind
    for partition in range(4):
        values = [kinds.get((row + partition) % 11, message(row)) for row in range(60)]
        broker.produce("poison", values, partition, times=partition + 1)
        places += [(partition, row, (row + partition) % 11) for row in range(60)]
    source = Kafka(broker.servers, "poison", block_rows=240, linger_seconds=2).join(
        Memory({"row": [0, 1], "more": [1, 2]}), on="row"
    )
    contents = []
    for name in ("whole", "again"):
        live = Live(dead_letters=DeadLetters(tmp_path / name))
        dataset = divided(source, 4, 240, live=live, on_error="skip")
        (batch,) = within(dataset.stream(), 1)
        assert batch.num_samples == sum(kind not in kinds for _, _, kind in places)
        contents.append((tmp_path / name).read_bytes())
    assert contents[0] == contents[1]
    letters = [json.loads(line)["place"] for line in contents[0].splitlines()]
    bad = [(partition, row, kind) for partition, row, kind in places if kind in kinds]
    bad.sort(key=lambda place: (place[0], place[2] == 8, place[1]))
    expected = [(partition, offset) for partition, offset, _ in bad]
    assert [(place["partition"], place["offset"]) for place in letters] == expected
