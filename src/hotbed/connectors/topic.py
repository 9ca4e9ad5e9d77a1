# SPDX-License-Identifier: Apache-2.0
"""A Kafka topic as its broker shows it: partitions found and fetched, outages waited for,
contradictions told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hotbed.connectors.journal import Live
from hotbed.connectors.topic_identity import Mark, TopicIdentity
from hotbed.errors import ConfigError, DataError, MissingExtra

if TYPE_CHECKING:
    from hotbed.connectors.kafka import Kafka

logger = logging.getLogger("hotbed.kafka")

LOOK_SECONDS = 3.0
"""Between two looks at the topic: its partitions, and where one of them begins and ends."""
PATIENCE_SECONDS = 10.0
"""What contradicts the position (no such topic, fewer partitions, too few messages) may be a broker
that is still starting; after so long it is an error.
"""
LOOK_TIMEOUT = 1.0
RETRY_SECONDS = 0.5
AWAY_SECONDS = 2.0
CONSUMER_OPTIONS = ("group.id", "enable.auto.commit", "auto.offset.reset", "enable.partition.eof")
HELD_BLOCKS = 16
"""Partitions are fetched no further while about so many blocks of them wait together."""

Message = tuple[int, int, bytes | None]
"""Timestamp in milliseconds, offset, payload."""


class Topic:
    """The partitions of a topic that a source reads, and their messages that are in no block yet
    (`pending`).

    `begins`: where each partition begins; `fetched`: the offset after its last message here.
    `identity`: the topic that the position was written for; whenever reading begins or a broker
    comes back, the last message is fetched again, and is compared with it.
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
        self.kafka = client()
        self.begins = dict(begins)
        self.pending: dict[int, list[Message]] = {}
        self.fetched: dict[int, int] = {}
        self._identity = identity or TopicIdentity()
        self._id = self._identity.id  # as the broker tells it
        self._marks = dict(self._identity.last)  # the last message that was fetched
        self._newest: dict[int, Message] = {}  # the same, since the last assignment
        # partitions that have to show their mark: the id is another one
        self._unproven: set[int] = set()
        self._lows: dict[int, int] = {}
        self._ended: dict[int, int] = {}  # where the broker said that a partition ends, for now
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
        """Messages at hand."""
        return sum(map(len, self.pending.values()))

    @property
    def id(self) -> str | None:
        """The topic's id, None where the broker gives none."""
        return self._identity.id if self._unproven else self._id

    @property
    def is_proven(self) -> bool:
        """Whether the topic is the one that the position was written for, as far as can be told."""
        return not self._unproven

    def end(self, partition: int) -> int:
        """The offset after the last message, as of the last fetch; -1 = not known yet."""
        return max(
            -1, int(self._consumer.get_watermark_offsets(self._place(partition), cached=True)[1])
        )

    def is_at_end(self, partition: int) -> bool:
        """Whether all messages of a partition were fetched, as far as is known."""
        at = self.fetched[partition]
        return self._ended.get(partition, -1) >= at or at >= self.end(partition) >= 0

    def reaches(self, partition: int, offset: int) -> bool:
        """Whether all messages before `offset` were fetched; the last ones of a compacted topic may
        be gone.
        """
        return max(self.fetched.get(partition, -1), self._ended.get(partition, -1)) >= offset

    def connect(self) -> bool:
        """Whether the topic was found and is fetched from where it begins; call again if not."""
        return self.look(first=True)

    def poll(self) -> None:
        """Takes what comes within a tick."""
        timeout = min(self.live.tick_seconds, max(self.source.linger_seconds, 0.01))
        pending = self.pending
        fetched = self.fetched
        for message in self._consumer.consume(self.source.block_rows, timeout):
            partition = message.partition()
            offset = message.offset()
            if (error := message.error()) is not None:
                self._failed(error, partition, offset)
            if error is not None or self._shaken:  # what is not taken now is fetched again
                continue
            found = (message.timestamp()[1], offset, message.value())
            if partition in self._unproven or offset < fetched.get(partition, 0):
                self._compare(partition, offset, found)
            # else: fetched before, and again after a new assignment
            if offset >= fetched.get(partition, 0):
                pending[partition].append(found)
                fetched[partition] = offset + 1
                self._newest[partition] = found
        self._pause()

    def commit(self, offsets: Mapping[str, int]) -> None:
        """Tells the group, without waiting for the answer."""
        if not offsets:
            return
        places = [self._place(int(partition), offset) for partition, offset in offsets.items()]
        self._committing += 1
        try:
            self._consumer.commit(offsets=places, asynchronous=True)
        except (self.kafka.KafkaException, RuntimeError) as error:
            self._on_commit(error, [])

    def close(self, wait_seconds: float = 0.0) -> None:
        """Ends reading; waits so long for commits to be answered."""
        deadline = time.monotonic() + wait_seconds
        while self._committing and time.monotonic() < deadline:
            self._consumer.poll(0.1)
        self._consumer.close()

    def look(self, first: bool = False) -> bool:
        """Looks at the topic from time to time: new partitions are read, what contradicts the
        position is an error.
        """
        now = time.monotonic()
        if not first and now < self._next_look:
            return True
        self._next_look = now + LOOK_SECONDS
        try:
            found = self._partitions()
            new = sorted(found - self.fetched.keys())
            again = self.fetched if self._shaken else self._next_in_turn()
            bounds = {p: self._bounds(p) for p in [*new, *again]}
            if first or self._shaken:
                self._check_id()
        except self.kafka.KafkaException as error:
            self._is_down(error, first)
        except _Doubt:
            pass
        else:
            if self._down:
                logger.warning("kafka at %s is back", self.source.servers)
            self._down = False
            self._failing_since = None
            return self._accept(bounds, new)
        if first:
            self._consumer.poll(self.live.tick_seconds)  # hears why, and waits
        return False

    def _partitions(self) -> set[int]:
        """Ours among the topic's partitions."""
        timeout = min(LOOK_TIMEOUT, max(self.live.tick_seconds, 0.1))
        topic = self._consumer.list_topics(self.source.topic, timeout=timeout).topics[
            self.source.topic
        ]
        if topic.error is not None:
            if topic.error.code() == topic.error.TOPIC_AUTHORIZATION_FAILED:
                raise self._error(
                    topic.error.str(), f"{self.source.servers}", "ask for the right to read it"
                )
            self._doubt(
                "topic",
                "the broker does not know it",
                topic.error.str(),
                "create it or correct the name",
            )
            raise _Doubt
        rank, ranks = self.source.shard
        asked = topic.partitions if self.source.partitions is None else self.source.partitions
        found = {int(p) for p in asked if p in topic.partitions and p % ranks == rank}
        named = {p for p in self.source.partitions or () if p % ranks == rank}
        if lost := sorted((self.begins.keys() | self.fetched.keys() | named) - found):
            there = f"partitions {sorted(topic.partitions)}, of which {sorted(found)} are asked for"
            self._doubt(
                "topic",
                f"partitions {lost} are not there",
                there,
                "was the topic made anew? begin without the position, or ask for other partitions",
            )
            raise _Doubt
        self._doubts.pop("topic", None)
        return found

    def _next_in_turn(self) -> list[int]:
        """One partition to look at: a doubtful one, else the next."""
        known = sorted(self.fetched)
        self._turn += 1
        doubtful = [p for p in known if f"end of {p}" in self._doubts]
        return (doubtful or known[self._turn % len(known) :] if known else [])[:1]

    def _bounds(self, partition: int) -> tuple[int, int]:
        """The first offset that the broker still has and the one after its last."""
        low, high = self._consumer.get_watermark_offsets(
            self._place(partition), timeout=LOOK_TIMEOUT
        )
        self._lows[partition] = int(low)
        return int(low), int(high)

    def _check_id(self) -> None:
        """Another id: each partition has to show the last message that was read, or this is another
        topic.
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
        """What the broker calls the topic now; None where it does not tell."""
        options = self.source.client_options()
        own = {name: value for name, value in options.items() if name not in CONSUMER_OPTIONS}
        admin = self.kafka.admin.AdminClient(own)
        topics = self.kafka.TopicCollection([self.source.topic])
        try:
            described = admin.describe_topics(topics, request_timeout=LOOK_TIMEOUT)
            return str(described[self.source.topic].result(2 * LOOK_TIMEOUT).topic_id)
        except (self.kafka.KafkaException, TimeoutError) as error:
            logger.debug("%s: no id: %s", self.source.topic, error)
            return None

    def _keep_marks(self) -> None:
        self._marks |= {partition: Mark.of(message) for partition, message in self._newest.items()}
        self._newest = {}

    def _compare(self, partition: int, offset: int, message: Message) -> None:
        """Raises DataError if a message is another than the one that was read at its offset."""
        mark = self._marks.get(partition)
        if mark is None or offset < mark.offset:
            return
        # compaction may have taken it, but the id says that this is another topic
        if offset > mark.offset:
            self._must_be_proven(partition)
        elif Mark.of(message) != mark:
            what = f"message {offset} of partition {partition} with {Mark.of(message)}, not {mark}"
            raise self._other_topic(what)
        self._unproven.discard(partition)

    def _must_be_proven(self, partition: int) -> None:
        if partition in self._unproven:
            raise self._other_topic(f"id {self._id} instead of {self._identity.id}")

    def _other_topic(self, received: str) -> DataError:
        what = "it is not the topic that the position was written for: it was made anew"
        return self._error(what, received, "begin without the position")

    def _accept(self, bounds: Mapping[int, tuple[int, int]], new: Sequence[int]) -> bool:
        """Checks that partitions hold what the position says they do, and fetches the new ones as
        well.
        """
        if not self.begins:
            self._choose_start(bounds)
        begins = {p: self.begins.get(p, self._begin_on_record(p, bounds[p][0])) for p in new}
        for p, (low, high) in bounds.items():
            at = {**self.fetched, **begins}[p]
            if at < low:
                raise self._error(
                    f"messages {at} to {low - 1} of partition {p} are gone",
                    f"{low} as the oldest",
                    "keep more on the broker (retention), or begin without the position and lose "
                    "them",
                )
            # Tansu tells the end too low, but fetches rightly
            if at <= high or self._ended.get(p, -1) >= at:
                self._doubts.pop(f"end of {p}", None)
            else:
                self._doubt(
                    f"end of {p}",
                    f"partition {p} ends before the position",
                    f"{high} messages, position {at}",
                    "was the topic made anew? begin without the position",
                )
        self.begins |= begins
        self.fetched |= begins
        self.pending |= {p: [] for p in new}
        if new or self._shaken:
            self._assign()
        return True

    def _choose_start(self, bounds: Mapping[int, tuple[int, int]]) -> None:
        """Where reading without a position begins: decided once."""
        begin = self.live.journal.get("begin", 0)
        if begin is None and bounds:
            side = 0 if self.source.start == "earliest" else 1
            begin = {str(p): found[side] for p, found in bounds.items()}
            self.live.journal.append("begin", 0, begin)
        self.begins = {int(p): int(offset) for p, offset in (begin or {}).items()}

    def _begin_on_record(self, partition: int, low: int) -> int:
        """Where a new partition begins: a block still to be read again may tell, else at its oldest
        message.
        """
        blocks = (block.get("begin", {}) for _, block in self.live.journal.after("block", -1))
        return int(
            next((begin[str(partition)] for begin in blocks if str(partition) in begin), low)
        )

    def _assign(self) -> None:
        """Fetches all partitions from their last message on, which is compared, if the broker still
        has it.
        """
        self._keep_marks()
        places = []
        for partition, offset in self.fetched.items():
            mark = self._marks.get(partition)
            has_mark = mark is not None and self._lows.get(partition, 0) <= mark.offset < offset
            places.append(
                self._place(partition, mark.offset if mark is not None and has_mark else offset)
            )
        self._ended = {}
        self._paused = set()
        self._shaken = False
        self._consumer.assign(places)
        self._consumer.resume(places)

    def _pause(self) -> None:
        """Fetches no more of partitions that hold much, until most of it is used."""
        limit = max(
            self.source.block_rows // 2,
            HELD_BLOCKS * self.source.block_rows // max(1, len(self.pending)),
        )
        full = {p for p, held in self.pending.items() if len(held) >= limit}
        light = {p for p in self._paused if len(self.pending[p]) < limit // 4}
        for change, call in (
            (full - self._paused, self._consumer.pause),
            (light, self._consumer.resume),
        ):
            if change:
                call([self._place(p) for p in change])
                self._paused ^= change

    def _place(self, partition: int, offset: int = -1001) -> Any:
        return self.kafka.TopicPartition(self.source.topic, partition, offset)

    # --- troubles ---------------------------------------------------------------------------------

    def _error(self, what: str, received: str, remedy: str) -> DataError:
        return DataError(
            f"kafka topic {self.source.topic!r}: {what} — received {received} — {remedy}"
        )

    def _doubt(self, key: str, what: str, received: str, remedy: str) -> None:
        """What contradicts the position: raises DataError when it has lasted too long to be a
        broker that starts.
        """
        since = self._doubts.setdefault(key, time.monotonic())
        if time.monotonic() - since >= PATIENCE_SECONDS:
            raise self._error(what, received, remedy)

    def _failed(self, error: Any, partition: int, offset: int) -> None:
        if error.code() == error._PARTITION_EOF:
            self._ended[partition] = offset
            if partition in self._unproven and offset > self._marks[partition].offset:
                self._must_be_proven(partition)
        elif error.code() == error.TOPIC_AUTHORIZATION_FAILED or error.fatal():
            raise self._error(
                error.str(), error.name(), "ask for the right to read it, or start again"
            )
        # such a partition is fetched no more; the next look tells what it means and
        # begins anew
        else:
            logger.info("topic %r, partition %d: %s", self.source.topic, partition, error)
            self._shake()

    def _shake(self) -> None:
        """What is fetched from here on may come from another topic: it counts when the next look
        has compared it.
        """
        self._shaken = True
        self._next_look = min(self._next_look, time.monotonic() + RETRY_SECONDS)

    def _is_down(self, error: Exception, first: bool) -> None:
        if self._refused and first:
            raise ConfigError(
                f"options: the broker refuses us — received {self._refused} — check user, "
                "password and certificates"
            ) from error
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        self._next_look = now + RETRY_SECONDS
        # one slow answer is no outage
        if not self._down and now - self._failing_since >= AWAY_SECONDS:
            logger.warning("kafka at %s is away, reading waits: %s", self.source.servers, error)
            self._down = True

    def _on_error(self, error: Any) -> None:
        refusals = (error._AUTHENTICATION, error.SASL_AUTHENTICATION_FAILED, error._SSL)
        # in TLS 1.3 a broker looks at our certificate after the handshake: what it then says counts
        # as transport
        if error.code() in refusals or "SSL alert number" in error.str():
            self._refused = str(error)
        self._shake()  # a broker that comes back may not be the same
        logger.debug("%s", error)

    def _on_commit(self, error: Any, _places: Any) -> None:
        self._committing -= 1
        if error is not None:
            logger.warning("offsets were not committed to group %r: %s", self.source.group, error)


class _Doubt(Exception):
    """Something cannot be, but may not last."""


def client() -> Any:
    """confluent_kafka, which the extra installs."""
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as error:
        raise MissingExtra(
            "Kafka needs confluent_kafka — it is not installed — pip install hotbed[kafka]"
        ) from error
    return confluent_kafka
