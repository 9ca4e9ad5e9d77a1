# SPDX-License-Identifier: Apache-2.0
"""One reading of a Kafka topic: blocks of messages, and their rows."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.connectors.files import first_line
from hotbed.connectors.kafka.identity import Mark, TopicIdentity
from hotbed.connectors.kafka.topic import KafkaTopic, Message
from hotbed.connectors.kafka.topic_source import Timings, TopicSource
from hotbed.connectors.live import Live
from hotbed.connectors.messages import Decoded, decode_messages, wanted_types
from hotbed.connectors.position import OPENED, PLACE, TICK, Batches, Position
from hotbed.connectors.read_plan import ReadPlan
from hotbed.connectors.status import SourceStatus
from hotbed.connectors.times import LATEST
from hotbed.errors import DataError, DecodeError

MessagesByPartition = dict[int, list[Message]]
PlacedMessages = list[tuple[int, Message]]
"""Messages, each with its partition."""


class KafkaReader:
    """One reading of a topic: the offsets of the current block, and its rows.

    With more than one of `grains`, decisions and positions say among how many partitions the
    messages of a block were dealt: more of them may be known when it is read again.
    """

    def __init__(
        self,
        source: TopicSource,
        live: Live,
        position: Position | None,
        timings: Timings,
        grains: int = 1,
    ) -> None:
        self.source = source
        self.live = live
        state: Mapping[str, Any] = {}
        if position is not None and position.state:
            position.require("Kafka", source)
            position.require_types(source.decoder.declared_types)
            state = position.state
        self.number: int = state.get("block", 0)
        self.offsets = _by_partition(state.get("offsets", {}))
        self.take = _by_partition(state.get("take", {}))
        self.row = state.get("row", 0)
        self.now = state.get("now", 0)
        self.types = state.get("schema", "")
        self.count: int = state.get("count", 0)  # messages of the current block; 0 = unknown
        self.grains = grains
        self.num_partitions: int = state.get("partitions", 0)  # when the block was decided
        self.identity = TopicIdentity.from_json(state.get("topic", {}))
        reached = {**self.offsets, **self.take}
        self.topic = KafkaTopic(source, live, self.offsets, self.identity, reached, timings)
        self.status = SourceStatus()
        self._waiting_since: float | None = None

    def position(self) -> Position:
        """Return the position after `row` rows of the current block."""
        count = 0
        if self.take:
            count = self.count
        state = {
            "block": self.number,
            "offsets": _by_name(self.offsets),
            "take": _by_name(self.take),
            "row": self.row,
            "now": self.now,
            "count": count,
            "schema": self.types,
            "topic": self.identity.to_json(),
        }
        if self.grains > 1:
            state["partitions"] = self.num_partitions
        if not self.take:  # any decoder may read the blocks to come
            return Position(state)
        return Position.of(self.source, state)

    def connect(self) -> bool:
        """Return whether the topic can be read now."""
        is_connected = self.topic.connect()
        if not is_connected:
            self.status = self._status_before_reading()
        return is_connected

    def _status_before_reading(self) -> SourceStatus:
        """Return a status without a lag; the topic may be reached and not proven."""
        return SourceStatus(is_reached=None if self.topic.is_reached else False)

    def next_block(self) -> PlacedMessages | None:
        """Return the messages of the next block in their order, or None if it is not complete yet.

        The decision about a returned block is in the journal and in `take`.

        Raises:
            DataError: the position lies in the block, and some of its messages are gone.
        """
        if not self.topic.is_proven:
            self.status = self._status_before_reading()
            return None
        self.identity.id = self.topic.id
        if not self.offsets and self.number == 0:
            self.offsets = dict(self.topic.begins)
        by_partition, expected = self._next_messages()
        if by_partition is None:
            self.status = self._status()
            return None
        self.count = 0
        for messages in by_partition.values():
            self.count += len(messages)
        # a position counts rows of the block, so that all of its messages are needed to resume
        if self.count < expected:
            raise DataError(
                f"kafka topic {self.source.topic!r}: messages of the block that the position lies "
                f"in are gone, got {self.count} of {expected}. Set "
                "min.compaction.lag.ms above the time between checkpoints, or begin with another "
                "position."
            )
        self.identity.block = {}
        for partition, messages in by_partition.items():
            del self.topic.pending[partition][: len(messages)]
            if messages:
                self.identity.block[partition] = Mark.of(messages[-1])
        self._waiting_since = None
        self.topic.needed = {}
        self.status = self._status()
        return _by_time(by_partition)

    def _next_messages(self) -> tuple[MessagesByPartition | None, int]:
        """Return the messages of the next block, None if they are not complete yet.

        Also return the number of its messages that a position expects.
        """
        if self.take:
            decision = {"take": self.take, "now": self.now, "partitions": self.num_partitions}
            return self._fetched(decision), self.count
        decided = self.live.journal.decide("block", self.number, self._proposed, dense=True)
        return (None if decided is None else self._fetched(decided)), 0

    def _status(self) -> SourceStatus:
        """Return the number of messages behind the current block, as far as it is known."""
        waiting: dict[str, int] = {}
        if not self.topic.is_reached:
            return SourceStatus(None, waiting, is_reached=False)
        for partition in {**self.offsets, **self.take}:
            count = self.topic.num_waiting(partition)
            if count is None:
                return SourceStatus(None, waiting, is_reached=True)
            waiting[str(partition)] = count
        return SourceStatus(sum(waiting.values()), waiting, is_reached=True)

    def _fetched(self, decision: Mapping[str, Any]) -> MessagesByPartition | None:
        """Return the messages of a block that is decided; None until all are fetched."""
        take = _by_partition(decision["take"])
        self.topic.needed = take
        for partition, end in take.items():
            if not self.topic.reaches(partition, end):
                return None
        self.offsets |= _by_partition(decision.get("begin", {}))
        self.take = take
        self.now = decision["now"]
        self.types = decision.get("types", self.types)
        self.num_partitions = decision.get("partitions", len(self.offsets))
        by_partition: MessagesByPartition = {}
        for partition, end in take.items():
            pending = self.topic.pending[partition]
            by_partition[partition] = pending[: bisect_left(pending, end, key=_offset_of)]
        return by_partition

    def _proposed(self) -> dict[str, Any] | None:
        """Return the decision on a new block; None if none is due."""
        if not self._is_due():
            return None
        take: dict[int, int] = {}
        for partition, messages in self._earliest().items():
            take[partition] = _offset_of(messages[-1]) + 1
        decision: dict[str, Any] = {"take": _by_name(take), "now": self.live.now()}
        begin = dict(self.topic.begins)
        for partition in self.offsets:
            begin.pop(partition, None)
        if begin:
            decision["begin"] = _by_name(begin)
        if self.grains > 1:
            decision["partitions"] = len({**self.offsets, **begin})
        return decision

    def _is_due(self) -> bool:
        """Return whether the pending messages form a block now."""
        count = self.topic.num_pending
        if not count:
            return False
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        waited = now - self._waiting_since
        if count < self.source.block_rows and waited < self.source.linger_seconds:
            return False
        # Later events of other partitions would overtake a partition that lags and has no message
        # pending: wait a second for it.
        is_lagging = False
        for partition, messages in self.topic.pending.items():
            if not messages and not self.topic.is_at_end(partition):
                is_lagging = True
        if not is_lagging:
            return True
        return waited >= max(1.0, self.source.linger_seconds)

    def _earliest(self) -> MessagesByPartition:
        """Return the oldest `block_rows` pending messages by partition.

        None of them is later than the last pending message of a partition that has more to fetch.
        """
        limit = self.source.block_rows
        heads: MessagesByPartition = {}
        times: list[np.ndarray] = []
        owners: list[np.ndarray] = []
        horizon = LATEST
        for partition, messages in self.topic.pending.items():
            if not messages:
                continue
            heads[partition] = messages[:limit]
            own_times = _rising(heads[partition])
            times.append(own_times)
            owners.append(np.full(len(own_times), partition))
            if not self.topic.is_at_end(partition):
                horizon = min(horizon, int(own_times[-1]))
        flat = np.concatenate(times)
        order = np.argsort(flat, kind="stable")[:limit]
        order = order[flat[order] <= horizon]
        chosen = np.concatenate(owners)[order]
        earliest: MessagesByPartition = {}
        for partition, messages in heads.items():
            count = int((chosen == partition).sum())
            if count:
                earliest[partition] = messages[:count]
        return earliest

    def rows(self, messages: PlacedMessages, batch_rows: int, plan: ReadPlan) -> Batches:
        """Yield the decoded rows of the block from row `row` on.

        The last position is the one before the next block.
        """
        (batch,) = self._rows_of([messages], self._types_of(messages, plan), plan)
        yield OPENED, self.position()
        while self.row + batch_rows < batch.num_rows:
            part = batch.slice(self.row, batch_rows)
            self.row += batch_rows
            yield part, self.position()
        last = batch.slice(self.row)
        self._end_block()
        yield last, self.position()

    def rows_by_grain(self, messages: PlacedMessages, plan: ReadPlan) -> Batches:
        """Yield the decoded rows of each grain of the block, also where there are none.

        Messages that cannot be decoded become dead letters grain by grain, too.
        """
        schema = self._types_of(messages, plan)
        opened = self.position()
        yield OPENED, opened
        partitions = sorted({**self.offsets, **self.take})[: self.num_partitions]
        parts = self._rows_of(dealt(messages, partitions, self.grains), schema, plan)
        for rows in islice(parts, self.grains - 1):
            yield rows, opened
        rows = next(parts)
        self._end_block()
        yield rows, self.position()

    def _end_block(self) -> None:
        self.number = self.number + 1
        self.row = 0
        self.offsets = {**self.offsets, **self.take}
        self.take = {}
        self.identity.last |= self.identity.block
        self.identity.block = {}

    def _types_of(self, messages: PlacedMessages, plan: ReadPlan) -> pa.Schema:
        """Return the columns to decode from the messages of a block, with their types."""
        values = _values_of(self._with_values(messages))
        if not values:
            return pa.schema([])
        schema, types = wanted_types(self.source.decoder, values, plan, self.types)
        if types != self.types:
            self.types = types
            self.live.journal.amend("block", self.number, {"types": self.types})
        return schema

    def _with_values(self, messages: PlacedMessages) -> PlacedMessages:
        """Return the messages without tombstones, where these are passed over."""
        if self.source.tombstones == "skip":
            return [place for place in messages if place[1][2] is not None]
        return messages

    def _rows_of(
        self, parts: Sequence[PlacedMessages], schema: pa.Schema, plan: ReadPlan
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of each part of some messages; all are decoded together.

        Bad messages of a part are put aside before its rows are yielded.
        """
        parts = [self._with_values(part) for part in parts]
        messages = list(chain.from_iterable(parts))
        decode = self.live.decode or decode_messages
        decoded: Decoded = ([], [], {})
        if messages:
            decoded = decode(self.source.decoder, _values_of(messages), schema)
        batches, counts, bad = decoded
        batch = self._placed(batches, counts, messages)
        ends = np.cumsum([0, *counts])
        last = 0
        for part in parts:
            first = last
            last = first + len(part)
            bad_here = {number - first: bad[number] for number in bad if first <= number < last}
            if bad_here:
                self._put_aside(part, bad_here, plan)
            num_rows = int(ends[last] - ends[first])
            yield batch.slice(int(ends[first]), num_rows) if num_rows else TICK

    def _placed(
        self, batches: Sequence[pa.RecordBatch], counts: Sequence[int], messages: PlacedMessages
    ) -> pa.RecordBatch:
        """Return the rows of messages, each with its place; `counts`: rows of each message."""
        if not sum(counts):
            return TICK
        places = _places(self.source.topic, messages)
        if min(counts) != 1 or max(counts) != 1:
            places = places.take(pa.array(np.repeat(np.arange(len(messages)), counts)))
        table = pa.Table.from_batches(batches).combine_chunks().append_column(PLACE, places)
        return table.to_batches()[0]

    def _put_aside(
        self, messages: PlacedMessages, bad: Mapping[int, Exception], plan: ReadPlan
    ) -> None:
        """Write bad messages to the dead letters, or raise if the plan has no `skips`."""
        letters = []
        message = ""
        for index, error in bad.items():
            partition, (_, offset, value) = messages[index]
            payload = value or b""
            where = f"topic {self.source.topic}, partition {partition}, offset {offset}"
            message = f"{where}: cannot be decoded ({first_line(error)})"
            advice = "Correct its producer or use on_error='skip'."
            if value is None:
                message = f"{where}: it is a tombstone, a message without a value"
                advice = "Use Kafka(tombstones='skip') to pass over tombstones."
            if plan.skips is None:
                raise DecodeError(f"{message}, got {payload[:80]!r}. {advice}")
            place = {"topic": self.source.topic, "partition": partition, "offset": offset}
            letters.append((place, "undecodable", payload))
        assert plan.skips is not None
        plan.skips.add("value", message, len(bad))
        self.live.dead_letters.add_all(letters)


def _offset_of(message: Message) -> int:
    _, offset, _ = message
    return offset


def dealt(messages: PlacedMessages, partitions: Sequence[int], grains: int) -> list[PlacedMessages]:
    """Return the messages of each grain, in their order.

    Partition number p of those that are read belongs to grain p modulo `grains`. Where they are
    fewer than the grains, p belongs to all grains that are p modulo their number: its messages are
    dealt to these in runs, which differ by a message at most.
    """
    count = len(partitions)
    by_grain: list[PlacedMessages] = [[] for _ in range(grains)]
    totals = Counter(partition for partition, _ in messages)
    before: Counter[int] = Counter()  # messages of each partition that were dealt
    numbers = {partition: number for number, partition in enumerate(partitions)}
    for placed in messages:
        partition, _ = placed
        grain = numbers[partition] % grains
        if count < grains:
            num_runs = -(-(grains - grain) // count)
            before[partition] += 1
            run = (before[partition] * num_runs - 1) // totals[partition]
            grain += run * count
        by_grain[grain].append(placed)
    return by_grain


def _values_of(messages: PlacedMessages) -> list[bytes]:
    return [message[2] or b"" for _, message in messages]


def _places(topic: str, messages: PlacedMessages) -> pa.StructArray:
    """Return topic, partition and offset of each message."""
    count = len(messages)
    all_partitions = (partition for partition, _ in messages)
    partitions = np.fromiter(all_partitions, np.int32, count)
    all_offsets = (offset for _, (_, offset, _) in messages)
    offsets = np.fromiter(all_offsets, np.int64, count)
    zeros = pa.array(np.zeros(count, np.int8))
    columns = {
        "topic": pa.DictionaryArray.from_arrays(zeros, [topic]),
        "partition": pa.array(partitions),
        "offset": pa.array(offsets),
    }
    return pa.StructArray.from_arrays(list(columns.values()), list(columns))


def _by_partition(offsets: Mapping[Any, Any]) -> dict[int, int]:
    """Return offsets by partition from JSON, where the names of partitions are text."""
    return {int(partition): int(offset) for partition, offset in offsets.items()}


def _by_name(offsets: Mapping[int, int]) -> dict[str, int]:
    """Return offsets with partitions as text, rising, for JSON."""
    return {str(partition): offsets[partition] for partition in sorted(offsets)}


def _rising(messages: Sequence[Message]) -> np.ndarray:
    """Return timestamps that never fall: each is raised to the latest before it."""
    timestamps = (timestamp for timestamp, _, _ in messages)
    times = np.fromiter(timestamps, np.int64, len(messages))
    return np.maximum.accumulate(times)


def _by_time(by_partition: MessagesByPartition) -> PlacedMessages:
    """Return all messages by (timestamp, partition, offset), each with its partition."""
    flat: PlacedMessages = []
    times: list[np.ndarray] = []
    for partition in sorted(by_partition):
        messages = by_partition[partition]
        flat += [(partition, message) for message in messages]
        times.append(_rising(messages))
    order = np.argsort(np.concatenate(times), kind="stable")
    return [flat[place] for place in order.tolist()]
