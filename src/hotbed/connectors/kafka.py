# SPDX-License-Identifier: Apache-2.0
"""Kafka: a topic as an endless source, with its order in the journal."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from hotbed import checks
from hotbed.connectors.kafka_identity import Mark, TopicIdentity
from hotbed.connectors.kafka_topic import PATIENCE_SECONDS, KafkaTopic, Message
from hotbed.connectors.live import Live
from hotbed.connectors.messages import Decoder, Json, decode_messages, wanted_types
from hotbed.connectors.plan import READ_ALL, READ_ROWS, ReadPlan
from hotbed.connectors.position import OPENED, PLACE, TICK, Position
from hotbed.connectors.source import Source
from hotbed.errors import ConfigError, DataError, DecodeError

HIDDEN = "***"
_OWN = (
    "bootstrap.servers",
    "group.id",
    "enable.auto.commit",
    "auto.offset.reset",
    "enable.partition.eof",
)
_SECRETS = re.compile(r"password|secret|token|\.pem$|oauthbearer\.config")


@dataclass(frozen=True)
class Kafka(Source):
    """The messages of a topic, without end.

    A block is formed when `block_rows` messages wait, or `linger_seconds` after the first of fewer.
    The journal holds its offsets before its rows are yielded. Within a block messages are in the
    order of (broker timestamp, partition, offset).

    Offsets are kept in positions, never in the broker. If `group` is given, a position that is safe
    in a checkpoint is also committed to this group, for lag monitors.

    Reading waits while brokers are away. Gaps in offsets (compaction, markers of transactions) are
    passed over. New partitions are read from their beginning. With `on_error="skip"` a message that
    cannot be decoded becomes a dead letter.

    Args:
        servers: Bootstrap servers, such as "localhost:9092,localhost:9093".
        topic: Name of the topic.
        decoder: Turns messages into rows.
        group: Consumer group for commits; None = no commits.
        start: Where reading begins without a position, "earliest" or "latest".
        partitions: Read only these; None = all.
        shard: (rank, ranks): read only partitions whose number modulo `ranks` is `rank`.
        options: Options for librdkafka (TLS, SASL); `"${NAME}"` stands for an environment variable.
        block_rows: Messages of a full block.
        linger_seconds: How long a block waits for more messages after its first one.

    Raises:
        DataError: Offsets of the position are gone (retention), or messages of its block
            (compaction); the topic or a partition was deleted; or the topic was recreated (its id
            or the last message that was read differs).
        DecodeError: A message cannot be decoded.
        SchemaError: No message has a column of the schema.
        MissingExtra: confluent-kafka is not installed.

    Example: `hb.sources.Kafka("localhost:9092", "clicks", group="trainer")`
    """

    servers: str
    topic: str
    decoder: Decoder = field(default_factory=Json)
    group: str | None = None
    start: Literal["earliest", "latest"] = "earliest"
    partitions: Sequence[int] | None = None
    shard: tuple[int, int] = (0, 1)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    block_rows: int = 8192
    linger_seconds: float = 0.1

    def __post_init__(self) -> None:
        checks.one_of("start", self.start, ("earliest", "latest"))
        if not (0 <= self.shard[0] < self.shard[1]):
            raise ConfigError(
                f"shard: must be (rank, ranks) with 0 <= rank < ranks, got {self.shard!r}. "
                "Correct it."
            )
        checks.at_least("block_rows", self.block_rows, 1)
        checks.at_least("linger_seconds", self.linger_seconds, 0)
        if own := [name for name in self.options if name in _OWN]:
            raise ConfigError(
                f"options.{own[0]}: Hotbed sets it itself, got {own[0]!r}. Leave it out."
            )

    @property
    def _described(self) -> dict[str, Any]:
        """The fields for a saved configuration, without secrets except as names of variables."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        options = dict(self.options)
        for key, value in options.items():
            if _SECRETS.search(key) and not str(value).startswith("${"):
                options[key] = HIDDEN
        values["options"] = options
        return values

    @property
    def endless(self) -> bool:
        return True

    def client_options(self) -> dict[str, Any]:
        """Return the options for librdkafka, with the values of environment variables."""
        options = {key: _expanded(key, value) for key, value in self.options.items()}
        own = (self.servers, self.group or "hotbed", False, "error", True)
        return {
            "reconnect.backoff.max.ms": 2000,
            "log_level": 0,
            **options,
            **dict(zip(_OWN, own, strict=True)),
        }

    def schema(self) -> pa.Schema:
        """Return the fields of the oldest messages; wait some seconds for the first message."""
        return self._schema

    @cached_property
    def _schema(self) -> pa.Schema:
        return _first_schema(self)

    def commit(self, position: Position) -> None:
        if self.group is None:
            return
        reading: KafkaTopic | None = self.__dict__.get("_reading")
        if reading is not None:  # its next poll handles the answer
            reading.commit(position["offsets"])
            return
        topic = KafkaTopic(self, Live(), {})
        topic.commit(position["offsets"])
        topic.close(wait_seconds=5.0)

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        reader = _Reader(self, plan.live or Live(), position)
        object.__setattr__(self, "_reading", reader.topic)
        try:
            while not reader.topic.connect():
                yield TICK, reader.position()
            while True:
                messages = reader.next_block()
                if messages is None:
                    yield TICK, reader.position()
                    reader.topic.poll()
                    reader.topic.look()
                else:
                    yield from reader.rows(messages, batch_rows, plan)
        finally:
            object.__setattr__(self, "_reading", None)
            reader.topic.close()


class _Reader:
    """One reading of a topic: the offsets of the current block, and its rows."""

    def __init__(
        self,
        source: Kafka,
        live: Live,
        position: Position | None,
    ) -> None:
        self.source = source
        self.live = live
        state = dict(position.state) if position else {}
        self.number: int = state.get("block", 0)
        self.offsets = {int(p): int(offset) for p, offset in state.get("offsets", {}).items()}
        self.take = {int(p): int(offset) for p, offset in state.get("take", {}).items()}
        self.row = state.get("row", 0)
        self.now = state.get("now", 0)
        self.types = state.get("schema", "")
        self.count: int = state.get("count", 0)  # messages of the current block; 0 = unknown
        self.identity = TopicIdentity.from_json(state.get("topic", {}))
        self.topic = KafkaTopic(
            source,
            live,
            self.offsets,
            self.identity,
        )
        self._waiting_since: float | None = None
        self._marks: dict[int, Mark] = {}  # the last messages of the current block

    def position(self) -> Position:
        """Return the position after `row` rows of the current block."""
        offsets = _by_name(self.offsets)
        take = _by_name(self.take)
        return Position(
            {
                "block": self.number,
                "offsets": offsets,
                "take": take,
                "row": self.row,
                "now": self.now,
                "count": self.count if take else 0,
                "schema": self.types,
                "topic": self.identity.to_json(),
            }
        )

    def next_block(self) -> list[tuple[int, Message]] | None:
        """Return the messages of the next block in their order, or None if it is not complete yet.

        The decision about a returned block is in the journal and in `take`.

        Raises:
            DataError: The position lies in the block, and some of its messages are gone.
        """
        if not self.topic.is_proven:
            return None
        self.identity.id = self.topic.id
        if not self.offsets and self.number == 0:
            self.offsets = dict(self.topic.begins)
        decision: Mapping[str, Any] | None = {"take": self.take, "now": self.now}
        expected = self.count
        if not self.take:
            decision = self.live.journal.get("block", self.number)
            expected = 0
        by_partition = self._decide() if decision is None else self._replayed(decision)
        if by_partition is None:
            return None
        self.count = sum(map(len, by_partition.values()))
        # a position counts rows of the block, so that all of its messages are needed to resume
        if self.count < expected:
            raise DataError(
                f"kafka topic {self.source.topic!r}: messages of the block that the position lies "
                f"in are gone, got {self.count} of {expected}. Let compaction wait "
                "(min.compaction.lag.ms) for longer than checkpoints are apart, or begin with "
                "another position."
            )
        for partition, messages in by_partition.items():
            del self.topic.pending[partition][: len(messages)]
        self._waiting_since = None
        self._marks = {p: Mark.of(messages[-1]) for p, messages in by_partition.items() if messages}
        next_offsets = {**self.offsets, **self.take}
        self.live.lag = sum(max(0, self.topic.end(p) - n) for p, n in next_offsets.items())
        return _in_order(by_partition)

    def _replayed(self, decision: Mapping[str, Any]) -> dict[int, list[Message]] | None:
        """Return the messages of a block that was decided before; None until all are fetched."""
        take = {int(p): int(offset) for p, offset in decision["take"].items()}
        if not all(self.topic.reaches(p, offset) for p, offset in take.items()):
            return None
        self.offsets |= {int(p): int(offset) for p, offset in decision.get("begin", {}).items()}
        self.take = take
        self.now = decision["now"]
        return {
            p: [m for m in self.topic.pending[p] if m[1] < offset] for p, offset in take.items()
        }

    def _decide(self) -> dict[int, list[Message]] | None:
        """Return the messages of a new block, which is written to the journal; None if not due."""
        if not self._is_due():
            return None
        by_partition = self._earliest()
        begin = {p: offset for p, offset in self.topic.begins.items() if p not in self.offsets}
        self.offsets = {**self.offsets, **begin}
        self.now = self.live.now()
        self.take = {p: messages[-1][1] + 1 for p, messages in by_partition.items()}
        value = {"take": _by_name(self.take), "now": self.now}
        if begin:
            value["begin"] = _by_name(begin)
        self.live.journal.append("block", self.number, value)
        return by_partition

    def _is_due(self) -> bool:
        """Return whether the pending messages form a block now."""
        pending = self.topic.pending
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
        lagging = any(not queue and not self.topic.is_at_end(p) for p, queue in pending.items())
        return not lagging or waited >= max(1.0, self.source.linger_seconds)

    def _earliest(self) -> dict[int, list[Message]]:
        """Return the oldest `block_rows` pending messages by partition.

        None of them is later than the last pending message of a partition that has more to fetch.
        """
        limit = self.source.block_rows
        heads = {p: queue[:limit] for p, queue in self.topic.pending.items() if queue}
        times = {p: _rising(messages) for p, messages in heads.items()}
        ends = [int(t[-1]) for p, t in times.items() if not self.topic.is_at_end(p)]
        horizon = min(ends, default=None)
        flat = np.concatenate(list(times.values()))
        owner = np.repeat(list(times), [len(t) for t in times.values()])
        order = np.argsort(flat, kind="stable")[:limit]
        if horizon is not None:
            order = order[flat[order] <= horizon]
        counts = {p: int((owner[order] == p).sum()) for p in heads}
        return {p: heads[p][:count] for p, count in counts.items() if count}

    def rows(
        self,
        messages: list[tuple[int, Message]],
        batch_rows: int,
        plan: ReadPlan,
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        """Yield the decoded rows of the block from row `row` on.

        The last position is the one before the next block.
        """
        batch = self._decoded(messages, plan)
        yield OPENED, self.position()
        while self.row + batch_rows < batch.num_rows:
            part = batch.slice(self.row, batch_rows)
            self.row += batch_rows
            yield part, self.position()
        last = batch.slice(self.row)
        self.number = self.number + 1
        self.row = 0
        self.offsets = {**self.offsets, **self.take}
        self.take = {}
        self.identity.last |= self._marks
        yield last, self.position()

    def _decoded(self, messages: list[tuple[int, Message]], plan: ReadPlan) -> pa.RecordBatch:
        """Return the rows of some messages, each with its place; bad messages are put aside."""
        values = [message[2] or b"" for _, message in messages]
        schema, self.types = wanted_types(
            self.source.decoder,
            values,
            plan,
            self.types,
        )
        parts, counts, bad = decode_messages(self.source.decoder, values, schema)
        if bad:
            self._put_aside(messages, bad, plan)
        if not parts:
            return TICK
        place = _places(self.source.topic, messages)
        table = pa.Table.from_batches(parts).combine_chunks()
        if bad or self.source.decoder.many:
            place = place.take(pa.array(np.repeat(np.arange(len(messages)), counts)))
        table = table.append_column(PLACE, place)
        if not table.num_rows:
            return TICK
        return table.to_batches()[0]

    def _put_aside(
        self,
        messages: list[tuple[int, Message]],
        bad: Mapping[int, Exception],
        plan: ReadPlan,
    ) -> None:
        """Write bad messages to the dead letters, or raise if the plan has no `skips`."""
        letters = []
        message = ""
        for index, error in bad.items():
            partition, (_, offset, value) = messages[index]
            cause = (str(error).splitlines() or [type(error).__name__])[0]
            where = f"topic {self.source.topic}, partition {partition}, offset {offset}"
            message = f"{where}: cannot be decoded ({cause})"
            if plan.skips is None:
                raise DecodeError(
                    f"{message}, got {(value or b'')[:80]!r}. Correct its producer or use "
                    "on_error='skip'."
                )
            place = {"topic": self.source.topic, "partition": partition, "offset": offset}
            letters.append((place, "undecodable", value or b""))
        assert plan.skips is not None
        plan.skips.add("value", message, len(bad))
        self.live.dead_letters.add_all(letters)


def _expanded(key: str, value: Any) -> Any:
    """Return `value` with each `${NAME}` replaced by the environment variable of this name."""
    if value == HIDDEN:
        raise ConfigError(
            f"options.{key}: a secret is never written down, got {value!r}. Give it as '${{NAME}}'."
        )

    def look_up(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ConfigError(
                f"options.{key}: no environment variable {match[1]}, got {value!r}. Set it."
            )
        return os.environ[match[1]]

    if not isinstance(value, str):
        return value
    return re.sub(r"\$\{(\w+)\}", look_up, value)


def _places(topic: str, messages: Sequence[tuple[int, Message]]) -> pa.StructArray:
    """Return topic, partition and offset of each message."""
    count = len(messages)
    topics = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int8)), [topic])
    partitions = np.fromiter((partition for partition, _ in messages), np.int32, count)
    offsets = np.fromiter((message[1] for _, message in messages), np.int64, count)
    return pa.StructArray.from_arrays(
        [topics, pa.array(partitions), pa.array(offsets)], ["topic", "partition", "offset"]
    )


def _by_name(offsets: Mapping[int, int]) -> dict[str, int]:
    """Return offsets with partitions as text, rising, for JSON."""
    return {str(partition): offsets[partition] for partition in sorted(offsets)}


def _rising(messages: Sequence[Message]) -> np.ndarray:
    """Return timestamps that never fall: each is raised to the latest before it."""
    return np.maximum.accumulate(
        np.fromiter((message[0] for message in messages), np.int64, len(messages))
    )


def _in_order(by_partition: Mapping[int, list[Message]]) -> list[tuple[int, Message]]:
    """Return all messages by (timestamp, partition, offset), each with its partition."""
    partitions = sorted(by_partition)
    flat = [(p, message) for p in partitions for message in by_partition[p]]
    times = np.concatenate([_rising(by_partition[p]) for p in partitions])
    return [flat[i] for i in np.argsort(times, kind="stable").tolist()]


def _first_schema(source: Kafka) -> pa.Schema:
    """Return the declared fields of a topic, or those of its oldest messages.

    Raises:
        DataError: No message arrived in time.
    """
    try:
        return source.decoder.infer(())
    except ValueError:
        pass
    topic = KafkaTopic(replace(source, start="earliest"), Live(), {})
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while time.monotonic() < deadline:
            if topic.fetched or topic.connect():
                topic.poll()
            heads = [queue[:1000] for queue in topic.pending.values()]
            if values := [message[2] or b"" for head in heads for message in head]:
                return source.decoder.infer(values)
    finally:
        topic.close()
    raise DataError(
        f"kafka topic {source.topic!r}: no message arrived in {PATIENCE_SECONDS:g} s. Declare the "
        "columns with Json(columns={...}), or produce a message."
    )
