# SPDX-License-Identifier: Apache-2.0
"""Kafka: a topic as an endless source, with its order in the journal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import pyarrow as pa

from hotbed import checks
from hotbed.connectors.kafka import options
from hotbed.connectors.kafka.reader import KafkaReader
from hotbed.connectors.kafka.topic import KafkaTopic
from hotbed.connectors.kafka.topic_source import Timings
from hotbed.connectors.live import Live
from hotbed.connectors.messages import Decoder, Json
from hotbed.connectors.position import TICK, Batches, Position
from hotbed.connectors.read_plan import READ_ALL, READ_ROWS, ReadPlan
from hotbed.connectors.source import Source, described
from hotbed.connectors.status import SourceReading
from hotbed.errors import ConfigError, DataError


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
        servers: bootstrap servers, such as "localhost:9092,localhost:9093".
        topic: name of the topic.
        decoder: turns messages into rows.
        group: consumer group for commits; None = no commits.
        start: where reading begins without a position, "earliest" or "latest".
        partitions: read only these; None = all.
        options: options for librdkafka (TLS, SASL); `"${NAME}"` stands for an environment variable.
        block_rows: messages of a full block.
        linger_seconds: how long a block waits for more messages after its first one.
        tombstones: messages without a value are bad messages ("refuse"), or passed over ("skip").

    Raises:
        DataError: offsets of the position are gone (retention), or messages of its block
            (compaction); the topic or a partition was deleted; or the topic was recreated (its id
            or the last message that was read differs).
        DecodeError: a message cannot be decoded.
        SchemaError: no message has a column of the schema.
        MissingExtra: confluent-kafka is not installed.

    Example: `hb.sources.Kafka("localhost:9092", "clicks", group="trainer")`
    """

    servers: str
    topic: str
    decoder: Decoder = field(default_factory=Json)
    group: str | None = None
    start: Literal["earliest", "latest"] = "earliest"
    partitions: Sequence[int] | None = None
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    block_rows: int = 8192
    linger_seconds: float = 0.1
    tombstones: Literal["refuse", "skip"] = "refuse"
    # (i, n): only every n-th partition from number i on; `parts` sets it
    _part: tuple[int, int] = field(default=(0, 1), init=False, repr=False)
    _timings: Timings = field(default=Timings(), init=False, repr=False)

    def __post_init__(self) -> None:
        checks.one_of("start", self.start, ("earliest", "latest"))
        checks.one_of("tombstones", self.tombstones, ("refuse", "skip"))
        checks.at_least("block_rows", self.block_rows, 1)
        checks.at_least("linger_seconds", self.linger_seconds, 0)
        options.check(self.options)

    @property
    def _described(self) -> dict[str, Any]:
        """The fields for a saved configuration, without secrets except as names of variables.

        Raises:
            ConfigError: this is a part of a topic.
        """
        number, count = self._part
        if count > 1:
            raise ConfigError(
                "kafka: a part of a topic cannot be written as configuration, got part "
                f"{number} of {count}. Write the topic, and call parts() where it is read."
            )
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        values["options"] = options.without_secrets(self.options)
        return values

    @property
    def endless(self) -> bool:
        return True

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"decoder": described(self.decoder), "tombstones": self.tombstones}

    @property
    def divisible(self) -> bool:
        return True

    def parts(self, count: int) -> list[Source]:
        """Return `count` sources that divide the partitions of the topic.

        Part i of n reads the partitions whose number modulo n is i; with `partitions`, every n-th
        of these.
        """
        checks.whole_number("parts.count", count, 1)
        number, total = self._part
        parts: list[Source] = []
        for index in range(count):
            part = replace(self)
            object.__setattr__(part, "_part", (number + index * total, count * total))
            parts.append(part)
        return parts

    def reads(self, partition: int) -> bool:
        """Return whether this source, which may be a part, reads a partition of the topic."""
        number = partition
        if self.partitions is not None:
            if partition not in self.partitions:
                return False
            number = sorted(self.partitions).index(partition)
        part, count = self._part
        return number % count == part

    def client_options(self) -> dict[str, Any]:
        """Return the options for librdkafka, with the values of environment variables."""
        return options.of_client(self.servers, self.group, self.options)

    def check_ready(self, patience: float | None = None) -> None:
        """Find the topic and its partitions at its broker.

        Args:
            patience: seconds to wait for them; None = as long as a reading does.

        Raises:
            ConfigError: a secret is missing, or the broker refuses it.
            DataError: there is no such topic or partition, or no broker answers.
        """
        timings = self._timings
        seconds = timings.patience
        if patience is not None:
            seconds = min(patience, seconds)
            timings = replace(timings, patience=seconds / 2)  # time left to say what is missing
        topic = KafkaTopic(self, Live(), {}, timings=timings)
        deadline = time.monotonic() + seconds
        try:
            while not topic.connect():
                if time.monotonic() >= deadline:
                    raise DataError(
                        f"kafka topic {self.topic!r}: no broker answers, got {self.servers} for "
                        f"{seconds:g} s. Check the address, and that they run."
                    )
        finally:
            topic.close()

    @cached_property
    def _readings(self) -> list[KafkaTopic]:
        """The topics that are being read, the oldest reading first."""
        return []

    def schema(self) -> pa.Schema:
        """Return the fields of the oldest messages; wait some seconds for the first message."""
        return self._schema

    @cached_property
    def _schema(self) -> pa.Schema:
        return _first_schema(self)

    def commit(self, position: Position) -> None:
        if self.group is None:
            return
        if self._readings:
            self._readings[0].commit(position["offsets"])
            return
        topic = KafkaTopic(self, Live(), {})
        topic.commit(position["offsets"])
        topic.close()

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        reader = KafkaReader(self, plan.live or Live(), position, self._timings, plan.grains)
        return SourceReading(self._batches(reader, batch_rows, plan), lambda: reader.status)

    def _batches(self, reader: KafkaReader, batch_rows: int, plan: ReadPlan) -> Batches:
        self._readings.append(reader.topic)
        try:
            while not reader.connect():
                yield TICK, reader.position()
            while True:
                messages = reader.next_block()
                if messages is None:
                    yield TICK, reader.position()
                    reader.topic.poll()
                    reader.topic.look()
                elif plan.grains > 1:
                    yield from reader.rows_by_grain(messages, plan)
                else:
                    yield from reader.rows(messages, batch_rows, plan)
        finally:
            self._readings.remove(reader.topic)
            reader.topic.close()


def _first_schema(source: Kafka) -> pa.Schema:
    """Return the declared fields of a topic, or those of its oldest messages.

    Raises:
        DataError: no message arrived in time.
    """
    try:
        return source.decoder.infer(())
    except ValueError:
        pass
    topic = KafkaTopic(replace(source, start="earliest"), Live(), {})
    patience = source._timings.patience
    deadline = time.monotonic() + patience
    try:
        while time.monotonic() < deadline:
            if topic.fetched or topic.connect():
                topic.poll()
            values: list[bytes] = []
            for messages in topic.pending.values():
                payloads = (payload for _, _, payload in messages if payload is not None)
                values += islice(payloads, 1000)
            if values:
                return source.decoder.infer(values)
    finally:
        topic.close()
    raise DataError(
        f"kafka topic {source.topic!r}: no message arrived in {patience:g} s. Declare the "
        "columns with Json(columns={...}), or produce a message."
    )
