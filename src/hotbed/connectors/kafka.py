# SPDX-License-Identifier: Apache-2.0
"""Kafka: a topic as an endless source whose order is decided once, journalled, and read again after
a crash.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from hotbed.connectors.base import (
    OPENED,
    PLACE,
    READ_ALL,
    READ_ROWS,
    TICK,
    Position,
    ReadPlan,
    Source,
)
from hotbed.connectors.journal import Live
from hotbed.connectors.lines import Decoder, Json, decode, wanted_types
from hotbed.connectors.topic import PATIENCE_SECONDS, Message, Topic
from hotbed.connectors.topic_identity import Mark, TopicIdentity
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
    """The messages of a topic, for ever.

    What has arrived when `block_rows` messages wait, or `linger_seconds` after the first of fewer,
    is a block: which offsets it takes is journalled before its rows are handed out. Within a block
    messages are in the order of (broker timestamp, partition, offset). Offsets live in positions,
    never in the broker; if `group` is given, a position that is safe in a checkpoint is also
    committed there, for lag monitors.

    `start`: where reading begins without a position. `partitions`: only these; `shard` = (rank,
    ranks): those whose number modulo `ranks` is `rank`. New partitions are read from their
    beginning. `options`: passed on to librdkafka (TLS, SASL); `"${NAME}"` stands for an environment
    variable. With `on_error="skip"` a message that cannot be decoded is a dead letter, else a
    DecodeError.

    While brokers are away reading waits; gaps in offsets (compaction, markers of transactions) are
    passed over. Raises DataError when offsets of the position are gone (retention), or messages of
    the block that it lies in (compaction), the topic or a partition is deleted, or the topic was
    made anew (its id, or the last message that was read, is another one); SchemaError for a column
    that no message has; MissingExtra without confluent-kafka.

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
        if self.start not in ("earliest", "latest"):
            raise ConfigError(
                f"start: 'earliest' or 'latest' — received {self.start!r} — correct it"
            )
        if not (0 <= self.shard[0] < self.shard[1]):
            raise ConfigError(
                f"shard: (rank, ranks) with 0 <= rank < ranks — received {self.shard!r} — correct "
                "it"
            )
        if self.block_rows < 1 or self.linger_seconds < 0:
            wrong = self.block_rows if self.block_rows < 1 else self.linger_seconds
            raise ConfigError(
                f"block_rows >= 1 and linger_seconds >= 0 — received {wrong!r} — correct it"
            )
        if own := [name for name in self.options if name in _OWN]:
            raise ConfigError(
                f"options.{own[0]}: Hotbed sets it itself — received {own[0]!r} — leave it out"
            )

    @property
    def _described(self) -> dict[str, Any]:
        """What configuration says of it: no secret that is not the name of a variable."""
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        known["options"] = {
            key: HIDDEN if _SECRETS.search(key) and not str(value).startswith("${") else value
            for key, value in self.options.items()
        }
        return known

    @property
    def endless(self) -> bool:
        return True

    def client_options(self) -> dict[str, Any]:
        """What librdkafka is given, variables filled in."""
        options = {key: _expanded(key, value) for key, value in self.options.items()}
        own = (self.servers, self.group or "hotbed", False, "error", True)
        return {
            "reconnect.backoff.max.ms": 2000,
            "log_level": 0,
            **options,
            **dict(zip(_OWN, own, strict=True)),
        }

    def schema(self) -> pa.Schema:
        """The fields of the oldest messages; waits for the first for some seconds."""
        cached: pa.Schema | None = self.__dict__.get("_schema")
        if cached is None:
            cached = _first_schema(self)
            object.__setattr__(self, "_schema", cached)
        return cached

    def commit(self, position: Position) -> None:
        if self.group is None:
            return
        reading: Topic | None = self.__dict__.get("_reading")
        if reading is not None:  # its next poll tells what became of it
            reading.commit(position["offsets"])
            return
        topic = Topic(self, Live(), {})
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
                taken = reader.next_block()
                if taken is None:
                    yield TICK, reader.position()
                    reader.topic.poll()
                    reader.topic.look()
                else:
                    yield from reader.rows(taken, batch_rows, plan)
        finally:
            object.__setattr__(self, "_reading", None)
            reader.topic.close()


class _Reader:
    """One reading of a topic: which messages the block at hand takes, and their rows."""

    def __init__(self, source: Kafka, live: Live, position: Position | None) -> None:
        self.source = source
        self.live = live
        state = dict(position.state) if position else {}
        self.number: int = state.get("block", 0)
        self.offsets = {int(p): int(offset) for p, offset in state.get("offsets", {}).items()}
        self.take = {int(p): int(offset) for p, offset in state.get("take", {}).items()}
        self.row = state.get("row", 0)
        self.now = state.get("now", 0)
        self.types = state.get("schema", "")
        self.count: int = state.get("count", 0)  # messages of the block at hand; 0: not known
        self.identity = TopicIdentity.from_json(state.get("topic", {}))
        self.topic = Topic(source, live, self.offsets, self.identity)
        self._waiting_since: float | None = None
        self._marks: dict[int, Mark] = {}  # the last messages of the block at hand

    def position(self) -> Position:
        """After `row` rows of the block at hand."""
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
        """The messages of the next block in their order, or None where it is not here yet. It is on
        record when they are returned, and `take` holds it.
        """
        if not self.topic.is_proven:
            return None
        self.identity.id = self.topic.id
        if not self.offsets and self.number == 0:
            self.offsets = dict(self.topic.begins)
        known = (
            {"take": self.take, "now": self.now}
            if self.take
            else self.live.journal.get("block", self.number)
        )
        expected = self.count if self.take else 0
        taken = self._anew() if known is None else self._again(known)
        if taken is None:
            return None
        self.count = sum(map(len, taken.values()))
        # rows of it were handed out, and those that are left cannot be told from them
        if self.count < expected:
            raise DataError(
                f"kafka topic {self.source.topic!r}: messages of the block that the position lies "
                "in are gone — "
                f"received {self.count} of {expected} — let compaction wait "
                "(min.compaction.lag.ms) for longer "
                "than checkpoints are apart, or begin with another position"
            )
        for partition, messages in taken.items():
            del self.topic.pending[partition][: len(messages)]
        self._waiting_since = None
        self._marks = {p: Mark.of(messages[-1]) for p, messages in taken.items() if messages}
        at = {**self.offsets, **self.take}
        self.live.lag = sum(max(0, self.topic.end(p) - offset) for p, offset in at.items())
        return _in_order(taken)

    def _again(self, known: Mapping[str, Any]) -> dict[int, list[Message]] | None:
        """What the block on record takes, once all of it was fetched."""
        take = {int(p): int(offset) for p, offset in known["take"].items()}
        if not all(self.topic.reaches(p, offset) for p, offset in take.items()):
            return None
        self.offsets |= {int(p): int(offset) for p, offset in known.get("begin", {}).items()}
        self.take = take
        self.now = known["now"]
        return {
            p: [m for m in self.topic.pending[p] if m[1] < offset] for p, offset in take.items()
        }

    def _anew(self) -> dict[int, list[Message]] | None:
        """What has arrived, if that is due to be a block: put on record."""
        if not self._is_due():
            return None
        taken = self._earliest()
        begin = {p: offset for p, offset in self.topic.begins.items() if p not in self.offsets}
        self.offsets, self.now = {**self.offsets, **begin}, self.live.now()
        self.take = {p: messages[-1][1] + 1 for p, messages in taken.items()}
        value = {
            "take": _by_name(self.take),
            "now": self.now,
            **({"begin": _by_name(begin)} if begin else {}),
        }
        self.live.journal.append("block", self.number, value)
        return taken

    def _is_due(self) -> bool:
        pending = self.topic.pending
        count = self.topic.num_pending
        if not count:
            return False
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        waited = now - self._waiting_since
        if count < self.source.block_rows and waited < self.source.linger_seconds:
            return False
        # A partition that lags and has nothing here would be overtaken by the others' later events:
        # it gets a second.
        lagging = any(not held and not self.topic.is_at_end(p) for p, held in pending.items())
        return not lagging or waited >= max(1.0, self.source.linger_seconds)

    def _earliest(self) -> dict[int, list[Message]]:
        """The oldest `block_rows` messages at hand; none later than the last one at hand of a
        partition that goes on.
        """
        held = {
            p: messages[: self.source.block_rows]
            for p, messages in self.topic.pending.items()
            if messages
        }
        times = {p: _rising(messages) for p, messages in held.items()}
        horizon = min(
            (int(t[-1]) for p, t in times.items() if not self.topic.is_at_end(p)), default=None
        )
        flat = np.concatenate(list(times.values()))
        owner = np.repeat(list(times), [len(t) for t in times.values()])
        order = np.argsort(flat, kind="stable")[: self.source.block_rows]
        if horizon is not None:
            order = order[flat[order] <= horizon]
        return {p: held[p][:count] for p in held if (count := int((owner[order] == p).sum()))}

    def rows(
        self, taken: list[tuple[int, Message]], batch_rows: int, plan: ReadPlan
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        """The block decoded, from row `row` on; the last position is the one before the next block."""
        batch = self._decoded(taken, plan)
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

    def _decoded(self, taken: list[tuple[int, Message]], plan: ReadPlan) -> pa.RecordBatch:
        values = [message[2] or b"" for _, message in taken]
        schema, self.types = wanted_types(self.source.decoder, values, plan, self.types)
        parts, counts, bad = decode(self.source.decoder, values, schema)
        if bad:
            self._put_aside(taken, bad, plan)
        if not parts:
            return TICK
        topic = pa.DictionaryArray.from_arrays(
            pa.array(np.zeros(len(taken), np.int8)), [self.source.topic]
        )
        partition = pa.array(np.fromiter((p for p, _ in taken), np.int32, len(taken)))
        offset = pa.array(np.fromiter((message[1] for _, message in taken), np.int64, len(taken)))
        place = pa.StructArray.from_arrays(
            [topic, partition, offset], ["topic", "partition", "offset"]
        )
        table = pa.Table.from_batches(parts).combine_chunks()
        if bad or self.source.decoder.many:
            place = place.take(pa.array(np.repeat(np.arange(len(taken)), counts)))
        table = table.append_column(PLACE, place)
        return table.to_batches()[0] if table.num_rows else TICK

    def _put_aside(
        self, taken: list[tuple[int, Message]], bad: Mapping[int, Exception], plan: ReadPlan
    ) -> None:
        letters = []
        message = ""
        for index, error in bad.items():
            partition, (_, offset, value) = taken[index]
            cause = (str(error).splitlines() or [type(error).__name__])[0]
            message = f"topic {self.source.topic}, partition {partition}, offset {offset}: cannot be decoded — {cause}"
            if plan.skips is None:
                raise DecodeError(
                    f"{message} — received {(value or b'')[:80]!r} — correct its producer or use "
                    "on_error='skip'"
                )
            place = {"topic": self.source.topic, "partition": partition, "offset": offset}
            letters.append((place, "undecodable", value or b""))
        assert plan.skips is not None
        plan.skips.add("value", message, len(bad))
        self.live.dead_letters.add_all(letters)


def _expanded(key: str, value: Any) -> Any:
    """`${NAME}` filled in from the environment."""
    if value == HIDDEN:
        raise ConfigError(
            f"options.{key}: a secret is never written down — received {value!r} — give it as "
            f"'${{NAME}}'"
        )

    def look_up(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ConfigError(
                f"options.{key}: no environment variable {match[1]} — received {value!r} — set it"
            )
        return os.environ[match[1]]

    return re.sub(r"\$\{(\w+)\}", look_up, value) if isinstance(value, str) else value


def _by_name(offsets: Mapping[int, int]) -> dict[str, int]:
    return {str(partition): offsets[partition] for partition in sorted(offsets)}


def _rising(messages: Sequence[Message]) -> np.ndarray:
    """Timestamps that never fall, so that a partition keeps its order."""
    return np.maximum.accumulate(
        np.fromiter((message[0] for message in messages), np.int64, len(messages))
    )


def _in_order(taken: Mapping[int, list[Message]]) -> list[tuple[int, Message]]:
    """All messages by (timestamp, partition, offset), with their partition."""
    flat = [(p, message) for p in sorted(taken) for message in taken[p]]
    times = np.concatenate([_rising(taken[p]) for p in sorted(taken)])
    return [flat[i] for i in np.argsort(times, kind="stable").tolist()]


def _first_schema(source: Kafka) -> pa.Schema:
    """The fields of the oldest messages of a topic, or those that its decoder was told."""
    try:
        return source.decoder.infer(())
    except ValueError:
        pass
    topic = Topic(replace(source, start="earliest"), Live(), {})
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while time.monotonic() < deadline:
            if topic.fetched or topic.connect():
                topic.poll()
            if values := [
                message[2] or b"" for held in topic.pending.values() for message in held[:1000]
            ]:
                return source.decoder.infer(values)
    finally:
        topic.close()
    raise DataError(
        f"kafka topic {source.topic!r}: no message yet — waited {PATIENCE_SECONDS:g} s — declare "
        "the columns "
        "with Json(columns={...}), or produce one"
    )
