# SPDX-License-Identifier: Apache-2.0
"""A Kafka topic at its broker: find and fetch partitions, wait for brokers, check the position."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hotbed.connectors.kafka_client import kafka_library
from hotbed.connectors.kafka_identity import Mark, TopicIdentity
from hotbed.connectors.live import Live
from hotbed.errors import ConfigError, DataError

if TYPE_CHECKING:
    from hotbed.connectors.kafka import Kafka

logger = logging.getLogger("hotbed.kafka")

LOOK_SECONDS = 3.0
"""Interval between two checks of the topic: its partitions, and the bounds of one of them."""
PATIENCE_SECONDS = 10.0
"""How long a topic may contradict the position before DataError is raised.

A missing topic, missing partitions or too few messages may come from a broker that is starting.
"""
LOOK_TIMEOUT = 1.0
RETRY_SECONDS = 0.5
AWAY_SECONDS = 2.0
CONSUMER_OPTIONS = ("group.id", "enable.auto.commit", "auto.offset.reset", "enable.partition.eof")
HELD_BLOCKS = 16
"""Fetching pauses while about so many blocks of messages are pending in all partitions together."""

Message = tuple[int, int, bytes | None]
"""Timestamp in milliseconds, offset, payload."""


class KafkaTopic:
    """The partitions of a topic that a source reads.

    `pending` holds the fetched messages that are not in a block yet, `fetched` the offset after the
    last fetched message, by partition.

    Args:
        source: The settings.
        live: Journal and clock.
        begins: The offset to begin with, by partition.
        identity: The topic that the position was written for. Whenever reading begins or a broker
            is back, the last message of each partition is fetched again and compared with it.
    """

    def __init__(
        self,
        source: Kafka,
        live: Live,
        begins: Mapping[int, int],
        identity: TopicIdentity | None = None,
    ) -> None:
        self.source = source
        self.live = live
        self.kafka = kafka_library()
        self.begins = dict(begins)
        self.pending: dict[int, list[Message]] = {}
        self.fetched: dict[int, int] = {}
        self._identity = identity or TopicIdentity()
        self._id = self._identity.id  # from the broker
        self._marks = dict(self._identity.last)  # of the last messages that were fetched
        self._newest: dict[int, Message] = {}  # last messages since the last assignment
        # the id differs: these partitions still have to yield the message of their mark
        self._unproven: set[int] = set()
        self._lows: dict[int, int] = {}
        self._ended: dict[int, int] = {}  # ends of partitions, as the broker reported them
        self._paused: set[int] = set()
        self._doubts: dict[str, float] = {}
        self._next_look = 0.0
        self._turn = 0
        self._committing = 0
        self._refused = ""
        self._down = False
        self._shaken = False
        self._failing_since: float | None = None
        options = {
            **source.client_options(),
            "error_cb": self._on_error,
            "on_commit": self._on_commit,
        }
        self._consumer = self.kafka.Consumer(options, logger=logger)

    @property
    def num_pending(self) -> int:
        """Number of pending messages."""
        return sum(map(len, self.pending.values()))

    @property
    def id(self) -> str | None:
        """The topic's id; None if the broker gives no id."""
        if self._unproven:
            return self._identity.id
        return self._id

    @property
    def is_proven(self) -> bool:
        """Whether the topic is known to be the one that the position was written for."""
        return not self._unproven

    def end(self, partition: int) -> int:
        """Return the offset after the last message, as of the last fetch; -1 = not known yet."""
        _, high = self._consumer.get_watermark_offsets(self._place(partition), cached=True)
        return max(-1, int(high))

    def is_at_end(self, partition: int) -> bool:
        """Return whether all known messages of a partition were fetched."""
        offset = self.fetched[partition]
        if self._ended.get(partition, -1) >= offset:
            return True
        end = self.end(partition)
        return 0 <= end <= offset

    def reaches(self, partition: int, offset: int) -> bool:
        """Return whether all messages before `offset` were fetched.

        The last ones of a compacted topic may be gone; the end of the partition counts as well.
        """
        fetched = self.fetched.get(partition, -1)
        ended = self._ended.get(partition, -1)
        return max(fetched, ended) >= offset

    def connect(self) -> bool:
        """Return whether the topic was found and is being fetched; call again if not."""
        return self.look(first=True)

    def poll(self) -> None:
        """Fetch the messages that arrive within a tick."""
        linger_seconds = max(self.source.linger_seconds, 0.01)
        timeout = min(self.live.tick_seconds, linger_seconds)
        pending = self.pending
        fetched = self.fetched
        for message in self._consumer.consume(self.source.block_rows, timeout):
            partition = message.partition()
            offset = message.offset()
            error = message.error()
            if error is not None:
                self._failed(error, partition, offset)
            if error is not None or self._shaken:  # it is fetched again
                continue
            _, timestamp = message.timestamp()
            entry = (timestamp, offset, message.value())
            if partition in self._unproven or offset < fetched.get(partition, 0):
                self._compare(partition, offset, entry)
            # lower offsets were fetched before, and again after a new assignment
            if offset >= fetched.get(partition, 0):
                pending[partition].append(entry)
                fetched[partition] = offset + 1
                self._newest[partition] = entry
        self._pause()

    def commit(self, offsets: Mapping[str, int]) -> None:
        """Commit offsets to the group, without waiting for the answer."""
        if not offsets:
            return
        places = []
        for partition, offset in offsets.items():
            places.append(self._place(int(partition), offset))
        self._committing += 1
        try:
            self._consumer.commit(offsets=places, asynchronous=True)
        except (self.kafka.KafkaException, RuntimeError) as error:
            self._on_commit(error, [])

    def close(self, wait_seconds: float = 0.0) -> None:
        """Close the consumer; wait up to `wait_seconds` for the answers to commits."""
        deadline = time.monotonic() + wait_seconds
        while self._committing and time.monotonic() < deadline:
            self._consumer.poll(0.1)
        self._consumer.close()

    def look(self, first: bool = False) -> bool:
        """Check the topic, at most once per interval, and begin to fetch new partitions.

        Args:
            first: Check now, and begin to fetch all partitions.

        Returns:
            Whether the topic is being fetched; False after a check that failed.

        Raises:
            DataError: The topic contradicts the position.
            ConfigError: The broker refuses the credentials at the first check.
        """
        now = time.monotonic()
        if not first and now < self._next_look:
            return True
        self._next_look = now + LOOK_SECONDS
        try:
            partitions = self._partitions()
            new = sorted(partitions - self.fetched.keys())
            again = list(self.fetched)
            if not self._shaken:
                again = self._next_in_turn()
            bounds = {partition: self._bounds(partition) for partition in [*new, *again]}
            if first or self._shaken:
                self._check_id()
        except self.kafka.KafkaException as error:
            self._is_down(error, first)
        except _Doubt:
            pass
        else:
            if self._down:
                logger.warning("kafka at %s is back, reading resumes", self.source.servers)
            self._down = False
            self._failing_since = None
            return self._accept(bounds, new)
        if first:
            self._consumer.poll(self.live.tick_seconds)  # waits, and gets the errors
        return False

    def _partitions(self) -> set[int]:
        """Return the partitions of the topic that the source reads."""
        tick_seconds = max(self.live.tick_seconds, 0.1)
        timeout = min(LOOK_TIMEOUT, tick_seconds)
        name = self.source.topic
        cluster = self._consumer.list_topics(name, timeout=timeout)
        topic = cluster.topics[name]
        if topic.error is not None:
            cause = topic.error.str()
            if topic.error.code() == topic.error.TOPIC_AUTHORIZATION_FAILED:
                raise self._error(cause, f"{self.source.servers}", "Ask for the right to read it.")
            advice = "Create it or correct the name."
            self._doubt("topic", "the broker does not know it", cause, advice)
            raise _Doubt
        rank, ranks = self.source.shard
        partitions = {int(p) for p in topic.partitions if p % ranks == rank}
        required = self.begins.keys() | self.fetched.keys()
        if self.source.partitions is not None:
            own = {p for p in self.source.partitions if p % ranks == rank}
            partitions &= own
            required |= own
        missing = sorted(required - partitions)
        if missing:
            ours = f"of which {sorted(partitions)} are to be read"
            there = f"partitions {sorted(topic.partitions)}, {ours}"
            advice = (
                "Begin without the position if the topic was recreated, or read other partitions."
            )
            self._doubt("topic", f"partitions {missing} are not there", there, advice)
            raise _Doubt
        self._doubts.pop("topic", None)
        return partitions

    def _next_in_turn(self) -> list[int]:
        """Return one partition to check: one with a doubt, else the next in turn."""
        partitions = sorted(self.fetched)
        self._turn += 1
        if not partitions:
            return []
        for partition in partitions:
            if f"end of {partition}" in self._doubts:
                return [partition]
        return [partitions[self._turn % len(partitions)]]

    def _bounds(self, partition: int) -> tuple[int, int]:
        """Return the first offset that the broker still has, and the one after its last."""
        low, high = self._consumer.get_watermark_offsets(
            self._place(partition), timeout=LOOK_TIMEOUT
        )
        self._lows[partition] = int(low)
        return int(low), int(high)

    def _check_id(self) -> None:
        """Compare the topic's id with that of the position.

        If it differs, each partition has to yield the last message that was read.

        Raises:
            DataError: The broker no longer has one of these messages.
        """
        self._id = self._described_id() or self._identity.id
        self._keep_marks()
        self._unproven = set()
        if self._identity.id not in (None, self._id):
            self._unproven = set(self._marks)
            for partition, mark in self._marks.items():
                if mark.offset < self._lows.get(partition, 0):
                    raise self._other_topic(f"id {self._id} instead of {self._identity.id}")

    def _described_id(self) -> str | None:
        """Return the id that the broker gives the topic now; None if it gives no id."""
        options = self.source.client_options()
        own = {name: value for name, value in options.items() if name not in CONSUMER_OPTIONS}
        admin = self.kafka.admin.AdminClient(own)
        topics = self.kafka.TopicCollection([self.source.topic])
        try:
            answers = admin.describe_topics(topics, request_timeout=LOOK_TIMEOUT)
            described = answers[self.source.topic].result(2 * LOOK_TIMEOUT)
            return str(described.topic_id)
        except (self.kafka.KafkaException, TimeoutError) as error:
            logger.debug("%s: no id: %s", self.source.topic, error)
            return None

    def _keep_marks(self) -> None:
        for partition, message in self._newest.items():
            self._marks[partition] = Mark.of(message)
        self._newest = {}

    def _compare(self, partition: int, offset: int, message: Message) -> None:
        """Raise DataError if another message was read at this offset before."""
        mark = self._marks.get(partition)
        if mark is None or offset < mark.offset:
            return
        # compaction may have removed the message, but a different id needs it as proof
        if offset > mark.offset:
            self._must_be_proven(partition)
        elif Mark.of(message) != mark:
            place = f"message {offset} of partition {partition}"
            raise self._other_topic(f"{place} with {Mark.of(message)} instead of {mark}")
        self._unproven.discard(partition)

    def _must_be_proven(self, partition: int) -> None:
        if partition in self._unproven:
            raise self._other_topic(f"id {self._id} instead of {self._identity.id}")

    def _other_topic(self, received: str) -> DataError:
        what = "it is not the topic that the position was written for: it was recreated"
        return self._error(what, received, "Begin without the position.")

    def _accept(self, bounds: Mapping[int, tuple[int, int]], new: Sequence[int]) -> bool:
        """Check that partitions hold the messages of the position, and begin to fetch new ones."""
        if not self.begins:
            self._choose_start(bounds)
        begins: dict[int, int] = {}
        for partition in new:
            low, _ = bounds[partition]
            begins[partition] = self._begin_of(partition, low)
        offsets = {**self.fetched, **begins}
        for partition, (low, high) in bounds.items():
            self._check_bounds(partition, offsets[partition], low, high)
        self.begins |= begins
        self.fetched |= begins
        self.pending |= {partition: [] for partition in new}
        if new or self._shaken:
            self._assign()
        return True

    def _check_bounds(self, partition: int, offset: int, low: int, high: int) -> None:
        """Check that a partition still has the message at `offset`.

        Raises:
            DataError: It is gone, or the partition has ended before it for a while.
        """
        if offset < low:
            raise self._error(
                f"messages {offset} to {low - 1} of partition {partition} are gone",
                f"{low} as the oldest",
                "Keep more on the broker (retention), or begin without the position and lose them.",
            )
        doubt = f"end of {partition}"
        # Tansu reports too low an end, but fetches rightly
        if offset <= high or self._ended.get(partition, -1) >= offset:
            self._doubts.pop(doubt, None)
            return
        self._doubt(
            doubt,
            f"partition {partition} ends before the position",
            f"{high} messages, position {offset}",
            "If the topic was recreated, begin without the position.",
        )

    def _choose_start(self, bounds: Mapping[int, tuple[int, int]]) -> None:
        """Decide once where reading without a position begins."""
        begin = self.live.journal.get("begin", 0)
        if begin is None and bounds:
            begin = {}
            for partition, (low, high) in bounds.items():
                begin[str(partition)] = low
                if self.source.start == "latest":
                    begin[str(partition)] = high
            self.live.journal.append("begin", 0, begin)
        for name, offset in (begin or {}).items():
            self.begins[int(name)] = int(offset)

    def _begin_of(self, partition: int, low: int) -> int:
        """Return the offset to begin a new partition with.

        It is that of the position, or of a block in the journal, which may have to be read again,
        else `low`.
        """
        if partition in self.begins:
            return self.begins[partition]
        for _, block in self.live.journal.after("block", -1):
            begin = block.get("begin", {})
            if str(partition) in begin:
                return int(begin[str(partition)])
        return low

    def _assign(self) -> None:
        """Fetch all partitions from the last message that was read on.

        If the broker still has this message, it is compared; else fetching begins after it.
        """
        self._keep_marks()
        places = []
        for partition, offset in self.fetched.items():
            mark = self._marks.get(partition)
            begin = offset
            low = self._lows.get(partition, 0)
            if mark is not None and low <= mark.offset < offset:
                begin = mark.offset
            places.append(self._place(partition, begin))
        self._ended = {}
        self._paused = set()
        self._shaken = False
        self._consumer.assign(places)
        self._consumer.resume(places)

    def _pause(self) -> None:
        """Pause partitions with many pending messages until most of these are used."""
        limit = max(
            self.source.block_rows // 2,
            HELD_BLOCKS * self.source.block_rows // max(1, len(self.pending)),
        )
        full: set[int] = set()
        light: set[int] = set()
        for partition, messages in self.pending.items():
            is_paused = partition in self._paused
            if not is_paused and len(messages) >= limit:
                full.add(partition)
            if is_paused and len(messages) < limit // 4:
                light.add(partition)
        if full:
            self._consumer.pause([self._place(partition) for partition in full])
        if light:
            self._consumer.resume([self._place(partition) for partition in light])
        self._paused = (self._paused | full) - light

    def _place(self, partition: int, offset: int = -1001) -> Any:
        return self.kafka.TopicPartition(self.source.topic, partition, offset)

    # --- errors and outages

    def _error(self, what: str, received: str, advice: str) -> DataError:
        topic = self.source.topic
        return DataError(f"kafka topic {topic!r}: {what}, got {received}. {advice}")

    def _doubt(self, key: str, what: str, received: str, advice: str) -> None:
        """Note a contradiction to the position, which may pass while a broker starts.

        Raises:
            DataError: It has lasted for `PATIENCE_SECONDS`.
        """
        since = self._doubts.setdefault(key, time.monotonic())
        if time.monotonic() - since >= PATIENCE_SECONDS:
            raise self._error(what, received, advice)

    def _failed(self, error: Any, partition: int, offset: int) -> None:
        if error.code() == error._PARTITION_EOF:
            self._ended[partition] = offset
            if partition in self._unproven and offset > self._marks[partition].offset:
                self._must_be_proven(partition)
        elif error.code() == error.TOPIC_AUTHORIZATION_FAILED or error.fatal():
            advice = "Ask for the right to read it, or start again."
            raise self._error(error.str(), error.name(), advice)
        # librdkafka stops to fetch such a partition; the next check finds the cause and assigns it
        # again
        else:
            logger.info("topic %r, partition %d: %s", self.source.topic, partition, error)
            self._shake()

    def _shake(self) -> None:
        """Drop messages until the next check, because they may come from another topic."""
        self._shaken = True
        self._next_look = min(self._next_look, time.monotonic() + RETRY_SECONDS)

    def _is_down(self, error: Exception, first: bool) -> None:
        if self._refused and first:
            raise ConfigError(
                f"options: the broker refuses the connection, got {self._refused}. Check user, "
                "password and certificates."
            ) from error
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        self._next_look = now + RETRY_SECONDS
        # one slow answer is not an outage
        if not self._down and now - self._failing_since >= AWAY_SECONDS:
            logger.warning("kafka at %s is away, reading waits: %s", self.source.servers, error)
            self._down = True

    def _on_error(self, error: Any) -> None:
        refusals = (error._AUTHENTICATION, error.SASL_AUTHENTICATION_FAILED, error._SSL)
        # in TLS 1.3 a broker checks the client's certificate after the handshake, and librdkafka
        # reports its alert as an error of transport
        if error.code() in refusals or "SSL alert number" in error.str():
            self._refused = str(error)
        self._shake()  # the broker that is back may be another one
        logger.debug("%s", error)

    def _on_commit(self, error: Any, _places: Any) -> None:
        self._committing -= 1
        if error is not None:
            logger.warning("offsets were not committed to group %r: %s", self.source.group, error)


class _Doubt(Exception):
    """The topic contradicts the position, but this may pass."""
