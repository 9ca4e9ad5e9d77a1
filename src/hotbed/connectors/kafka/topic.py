# SPDX-License-Identifier: Apache-2.0
"""A Kafka topic at its broker: find and fetch partitions, wait for brokers, check the position."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

from hotbed.connectors.kafka.client import (
    ClientEnded,
    ClientError,
    KafkaClient,
    KafkaFailure,
    PolledEntry,
)
from hotbed.connectors.kafka.identity import Mark, TopicIdentity
from hotbed.connectors.kafka.outages import Outages
from hotbed.connectors.kafka.sizes import AnswerSizes
from hotbed.connectors.kafka.topic_source import USUAL_TIMINGS, Timings, TopicSource
from hotbed.connectors.live import Live
from hotbed.errors import DataError

logger = logging.getLogger("hotbed.kafka")

ANSWER_SECONDS = 10.0
"""Limit for a broker to answer a check. Messages are read meanwhile."""
COMMIT_SECONDS = 10.0
"""How long the end of reading waits for the answers to commits."""
MAX_ENDS = 5
"""How often in a row the process of the client may end before it has fetched anything."""
HELD_BLOCKS = 16
"""Fetching pauses while about this number of blocks is pending in all partitions together."""

Message = tuple[int, int, bytes | None]
"""Timestamp in milliseconds, offset, payload."""

Bounds = Mapping[int, tuple[int, int]]
"""By partition the first offset that the broker still has, and the one after its last."""


class KafkaTopic:
    """The partitions of a topic that a source reads.

    `pending` holds the fetched messages that are not in a block yet, `fetched` the offset after the
    last fetched message, by partition.

    Args:
        source: the settings.
        live: journal and clock.
        begins: the offset to begin with, by partition.
        identity: the topic that the position was written for. Whenever reading begins or a broker
            is back, the last message of each partition is fetched again and compared with it.
        reached: the offset before which messages were read, by partition; None = `begins`.
        timings: how long it waits.
    """

    def __init__(
        self,
        source: TopicSource,
        live: Live,
        begins: Mapping[int, int],
        identity: TopicIdentity | None = None,
        reached: Mapping[int, int] | None = None,
        timings: Timings = USUAL_TIMINGS,
    ) -> None:
        self.source = source
        self._timings = timings
        self.live = live
        self.begins = dict(begins)
        self.pending: dict[int, list[Message]] = {}
        self.fetched: dict[int, int] = {}
        self.needed: dict[int, int] = {}
        """The ends of the block that is read again, by partition, until all of it is fetched."""
        self._identity = identity or TopicIdentity()
        self._reached = dict(begins)
        if reached is not None:
            self._reached = dict(reached)
        self._id = self._identity.id  # from the broker
        # of the last messages that were fetched
        self._marks = {**self._identity.last, **self._identity.block}
        self._newest: dict[int, Message] = {}  # last messages since the last assignment
        self._expected: dict[int, Mark] = {}  # marks to compare with the messages to come
        # the id differs: these partitions still have to yield the message of their mark
        self._unproven: set[int] = set()
        self._unproven_since: float | None = None
        self._lows: dict[int, int] = {}
        self._ended: dict[int, int] = {}  # ends of partitions, as the broker reported them
        self._paused: set[int] = set()
        self._doubts: dict[str, float] = {}
        self._next_look = 0.0
        self._turn = 0
        self._commits = deque[Mapping[str, int]](maxlen=1)  # of the thread that does not poll
        self._num_ends = 0  # of the client, in a row
        self._shaken = False
        self._outages = Outages(source.servers)
        self._check: Generator[bool, None, None] | None = None  # of the topic, under way
        self._sizes = AnswerSizes(source.topic, source.client_options())
        self.client = self._new_client({})

    def _new_client(self, more: Mapping[str, Any]) -> KafkaClient:
        options = {**self.source.client_options(), **more}
        return KafkaClient(options, self._on_error, self._on_commit, self._timings.hang)

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

    @property
    def is_reached(self) -> bool:
        """Whether the last check of the topic succeeded, and nothing has failed or hung since."""
        return self._outages.is_reached and not self._shaken

    def end(self, partition: int) -> int:
        """Return the offset after the last message, as of the last fetch; -1 = not known yet."""
        return max(-1, self.client.ends.get(partition, -1))

    def is_at_end(self, partition: int) -> bool:
        """Return whether all known messages of a partition were fetched."""
        offset = self.fetched[partition]
        if self._ended.get(partition, -1) >= offset:
            return True
        end = self.end(partition)
        return 0 <= end <= offset

    def num_waiting(self, partition: int) -> int | None:
        """Return the number of messages that are not in a block yet; None if it is not known.

        Fetched messages are counted. After them, offsets are counted, so that control
        records and removed messages count until they are passed over.
        """
        pending = self.pending.get(partition)
        if pending is None:
            return None
        passed = max(self.fetched[partition], self._ended.get(partition, -1))
        end = max(self.end(partition), self._ended.get(partition, -1))
        if end < 0:
            return None
        return len(pending) + max(0, end - passed)

    def reaches(self, partition: int, offset: int) -> bool:
        """Return whether all messages before `offset` were fetched.

        The last ones of a compacted topic may be gone; the end of the partition counts as well.
        """
        fetched = self.fetched.get(partition, -1)
        ended = self._ended.get(partition, -1)
        return max(fetched, ended) >= offset

    def connect(self) -> bool:
        """Return whether the topic was found and is being fetched; wait for that for a tick.

        Raises:
            DataError: the topic contradicts the position.
            ConfigError: the broker refuses the credentials.
        """
        deadline = time.monotonic() + self.live.tick_seconds
        while not self._goes_on(first=True):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            try:
                self.client.request("settle", remaining, seconds=remaining)
            except ClientEnded as ended:
                self._on_end(ended)
        return True

    def poll(self) -> None:
        """Fetch the messages that arrive within a tick, and send the offsets to commit."""
        linger_seconds = max(self.source.linger_seconds, 0.01)
        timeout = min(self.live.tick_seconds, linger_seconds)
        try:
            if options := self._sizes.options():
                self.client.close()
                self.client = self._new_client(options)
                self._shake()
            self._send_commit()
            entries = self.client.consume(self.source.block_rows, timeout)
            self._add(entries)
            self._sizes.check(self.pending)
            self._pause()
        except ClientEnded as ended:
            self._on_end(ended)
        except KafkaFailure as failure:
            logger.info("topic %r: %s", self.source.topic, failure)
            self._shake()

    def _add(self, entries: Iterable[PolledEntry]) -> None:
        """Add fetched messages to the pending ones."""
        pending = self.pending
        fetched = self.fetched
        takes_all = self._sizes.takes_all
        for partition, offset, timestamp, value, error in entries:
            if error is not None and error.name != "_PARTITION_EOF":
                self._failed(error, partition)
            if self._shaken:  # it is fetched again
                continue
            if error is not None:
                self._at_end(partition, offset)
                continue
            message = (timestamp, offset, value)
            if partition in self._expected:
                self._compare(partition, offset, message)
            # lower offsets were fetched before, and again after a new assignment
            is_new = offset >= fetched.get(partition, 0)
            if is_new and (takes_all or self._sizes.takes(partition, offset, value)):
                pending[partition].append(message)
                fetched[partition] = offset + 1
                self._newest[partition] = message
            self._num_ends = 0

    def commit(self, offsets: Mapping[str, int]) -> None:
        """Have the thread that polls commit offsets to the group; newer ones replace older ones."""
        self._commits.append(offsets)

    def _send_commit(self) -> None:
        """Send the offsets to commit, without waiting for the answer."""
        try:
            offsets = self._commits.pop()
        except IndexError:
            return
        places: dict[int, int] = {}
        for name, offset in offsets.items():
            partition = int(name)
            places[partition] = offset
            if self.fetched.get(partition) == offset:  # only control records may follow
                places[partition] = max(offset, self._ended.get(partition, -1))
        try:
            self.client.request("commit", self.source.topic, places)
        except KafkaFailure as failure:
            self._on_commit(str(failure))
            if isinstance(failure, ClientEnded):
                raise

    def close(self, wait_seconds: float = COMMIT_SECONDS) -> None:
        """End the client; wait up to `wait_seconds` for the answers to commits."""
        with contextlib.suppress(ClientEnded):
            self._send_commit()
        self.client.close(wait_seconds)

    def look(self) -> None:
        """Check the topic, at most once per interval, and begin to fetch new partitions.

        A check needs several answers of the broker. Messages are read while it waits for them.

        Raises:
            DataError: the topic contradicts the position.
        """
        self._goes_on(first=False)

    def _goes_on(self, *, first: bool) -> bool:
        """Go on with the check as far as answers are here; return whether one has succeeded."""
        now = time.monotonic()
        if self._check is None:
            if now < self._next_look:
                return False
            self._next_look = now + self._timings.look
            self._check = self._checked(first)
        try:
            is_waiting = next(self._check, False)
        except ClientEnded as ended:
            self._on_end(ended)
        except KafkaFailure as failure:
            self._check = None
            self._is_down(str(failure), first=first)
        except _Doubt:
            self._check = None
            self._next_look = min(self._next_look, now + self._timings.retry)
        else:
            if not is_waiting:
                self._check = None
                self._do_not_count(self._outages.end())
                self._check_proof(now)
                return True
            if self._outages.is_hopeless:
                self._is_down("", first=first)
        return False

    def _ask(self, name: str, *arguments: Any) -> Generator[bool, None, Any]:
        """Return the broker's answer to a request; yield while it is not here."""
        self._outages.ask()
        self.client.begin(name, self.source.topic, *arguments, ANSWER_SECONDS)
        while not self.client.is_answered:
            yield True
        answer = self.client.take_answer()
        self._outages.answer()
        return answer

    def _checked(self, first: bool) -> Generator[bool, None, None]:
        """Check the topic; yield while an answer is not here.

        Args:
            first: begin to fetch all partitions.
        """
        fetched = dict(self.fetched)
        partitions = yield from self._partitions()
        new = sorted(partitions - fetched.keys())
        again = list(fetched)
        if not self._shaken:
            again = self._next_in_turn()
        bounds = yield from self._bounds([*new, *again])
        if first or self._shaken:
            yield from self._check_id()
        elif (yield from self._has_other_id(self._id)):
            self._shake()
            return
        self._accept(bounds, new, fetched)

    def _partitions(self) -> Generator[bool, None, set[int]]:
        """Return the partitions of the topic that the source reads."""
        there, error = yield from self._ask("partitions")
        if error is not None:
            cause = ClientError(*error)
            if cause.name == "TOPIC_AUTHORIZATION_FAILED":
                advice = "Ask for the right to read it."
                raise self._error(cause.text, f"{self.source.servers}", advice)
            advice = "Create it or correct the name."
            self._doubt("topic", "the broker does not know it", cause.text, advice)
            raise _Doubt
        partitions = set(filter(self.source.reads, there))
        required = self.begins.keys() | self.fetched.keys()
        required |= set(filter(self.source.reads, self.source.partitions or ()))
        missing = sorted(required - partitions)
        if missing:
            ours = f"of which {sorted(partitions)} are to be read"
            received = f"partitions {there}, {ours}"
            advice = (
                "Begin without the position if the topic was recreated, or read other partitions."
            )
            patience = self._timings.patience
            if (yield from self._has_other_id(self._identity.id)):
                patience = min(patience, self._timings.proof)
            self._doubt("topic", f"partitions {missing} are not there", received, advice, patience)
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

    def _bounds(self, partitions: Sequence[int]) -> Generator[bool, None, Bounds]:
        """Return the first offset that the broker still has, and the one after its last."""
        bounds: Bounds = yield from self._ask("bounds", partitions)
        self._lows |= {partition: low for partition, (low, _) in bounds.items()}
        return bounds

    def _check_id(self) -> Generator[bool, None, None]:
        """Compare the topic's id with that of the position.

        If it differs, each partition has to yield the last message that was read.

        Raises:
            DataError: the broker no longer has one of these messages.
        """
        described_id = yield from self._described_id()
        self._id = described_id or self._identity.id
        self._keep_marks()
        self._unproven = set()
        if self._identity.id in (None, self._id):
            return
        self._unproven = set(self._marks)
        difference = f"id {self._id} instead of {self._identity.id}"
        for partition, mark in self._marks.items():
            if mark.offset < self._lows.get(partition, 0):
                raise self._other_topic(difference)
        # an older position has no mark in the first block
        for partition in self._lows:
            reached = max(self._reached.get(partition, 0), self.fetched.get(partition, 0))
            if not self._marks and reached > self._lows[partition]:
                raise self._other_topic(difference)

    def _has_other_id(self, topic_id: str | None) -> Generator[bool, None, bool]:
        """Return whether the broker gives the topic another id than `topic_id` now."""
        if topic_id is None:
            return False
        described_id = yield from self._described_id()
        return described_id not in (None, topic_id)

    def _check_proof(self, now: float) -> None:
        """Raise DataError if a topic with another id does not yield the last messages in time."""
        if not self._unproven:
            self._unproven_since = None
            return
        self._next_look = min(self._next_look, now + self._timings.retry)
        self._unproven_since = self._unproven_since or now
        if now - self._unproven_since >= self._timings.proof:
            self._must_be_proven(min(self._unproven))

    def _do_not_count(self, seconds: float) -> None:
        """Take an outage off the time in which the topic had to prove itself."""
        if self._unproven_since is not None:
            self._unproven_since += seconds

    def _described_id(self) -> Generator[bool, None, str | None]:
        """Return the id that the broker gives the topic now; None if it gives no id."""
        try:
            topic_id: str = yield from self._ask("topic_id")
        except ClientEnded:
            raise
        except KafkaFailure as failure:
            logger.debug("%s: no id: %s", self.source.topic, failure)
            return None
        return topic_id

    def _keep_marks(self) -> None:
        for partition, message in self._newest.items():
            if partition not in self._expected:
                self._marks[partition] = Mark.of(message)
        self._newest = {}

    def _compare(self, partition: int, offset: int, message: Message) -> None:
        """Raise DataError if another message was read at this offset before."""
        mark = self._expected[partition]
        if offset < mark.offset:
            return
        # compaction may have removed the message, but a different id needs it as proof
        if offset > mark.offset:
            self._must_be_proven(partition)
        elif Mark.of(message) != mark:
            place = f"message {offset} of partition {partition}"
            raise self._other_topic(f"{place} with {Mark.of(message)} instead of {mark}")
        del self._expected[partition]
        self._unproven.discard(partition)

    def _must_be_proven(self, partition: int) -> None:
        if partition in self._unproven:
            raise self._other_topic(f"id {self._id} instead of {self._identity.id}")

    def _other_topic(self, received: str) -> DataError:
        what = "it is not the topic that the position was written for: it was recreated"
        return self._error(what, received, "Begin without the position.")

    def _accept(self, bounds: Bounds, new: Sequence[int], before: Mapping[int, int]) -> None:
        """Check that partitions hold the messages of the position, and begin to fetch new ones.

        `before`: what was fetched when the check began.
        """
        if not self.begins:
            self._choose_start(bounds)
        begins: dict[int, int] = {}
        for partition in new:
            low, _ = bounds[partition]
            begins[partition] = self._begin_of(partition, low)
        for partition, (low, high) in bounds.items():
            offset = begins.get(partition, before.get(partition, 0))
            self._check_bounds(partition, offset, low, high)
        self.begins |= begins
        self.fetched |= begins
        self.pending |= {partition: [] for partition in new}
        if new or self._shaken:
            self._assign()

    def _check_bounds(self, partition: int, offset: int, low: int, high: int) -> None:
        """Check that a partition still has the message at `offset`.

        Raises:
            DataError: it is gone, or the partition has ended before it for a while.
        """
        if max(offset, self.fetched.get(partition, 0)) < low:
            raise self._error(
                f"messages {offset} to {low - 1} of partition {partition} are gone",
                f"{low} as the oldest",
                "Keep more on the broker (retention), or begin without the position and lose them.",
            )
        doubt = f"end of {partition}"
        needed = max(offset, self.needed.get(partition, 0))
        # Tansu reports too low an end, but fetches rightly
        end = max(high, self._ended.get(partition, -1))
        if end >= offset and max(end, self.fetched.get(partition, -1)) >= needed:
            self._doubts.pop(doubt, None)
            return
        self._doubt(
            doubt,
            f"partition {partition} ends before the position",
            f"{high} messages, position {needed}",
            "If the topic was recreated, begin without the position and its journal.",
        )

    def _choose_start(self, bounds: Bounds) -> None:
        """Decide once where reading without a position begins."""
        is_latest = self.source.start == "latest"
        starts = {str(number): high if is_latest else low for number, (low, high) in bounds.items()}
        begin = self.live.journal.decide("begin", 0, lambda: starts or None)
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
        offsets: dict[int, int] = {}
        self._expected = {}
        for partition, offset in self.fetched.items():
            offsets[partition] = offset
            mark = self._marks.get(partition)
            if mark is not None and mark.offset >= self._lows.get(partition, 0):
                offsets[partition] = min(offset, mark.offset)
                self._expected[partition] = mark
        self._ended = {}
        self._paused = set()
        self._shaken = False
        self.client.request("assign", self.source.topic, offsets)

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
            self.client.request("pause", self.source.topic, sorted(full))
        if light:
            self.client.request("resume", self.source.topic, sorted(light))
        self._paused = (self._paused | full) - light

    # --- errors and outages

    def _error(self, what: str, received: str, advice: str) -> DataError:
        topic = self.source.topic
        return DataError(f"kafka topic {topic!r}: {what}, got {received}. {advice}")

    def _doubt(
        self, key: str, what: str, received: str, advice: str, patience: float | None = None
    ) -> None:
        """Note a contradiction to the position, which may pass while a broker starts.

        Raises:
            DataError: it has lasted for `patience` seconds; None = as the timings say.
        """
        if patience is None:
            patience = self._timings.patience
        since = self._doubts.setdefault(key, time.monotonic())
        if time.monotonic() - since >= patience:
            raise self._error(what, received, advice)

    def _at_end(self, partition: int, offset: int) -> None:
        self._num_ends = 0
        self._ended[partition] = offset
        if partition in self._unproven and offset > self._marks[partition].offset:
            self._must_be_proven(partition)

    def _failed(self, error: ClientError, partition: int) -> None:
        if error.name == "TOPIC_AUTHORIZATION_FAILED" or error.fatal:
            raise self._error(
                error.text, error.name, "Ask for the right to read it, or start again."
            )
        # librdkafka stops to fetch such a partition; the next check finds the cause and assigns it
        # again
        logger.info("topic %r, partition %d: %s", self.source.topic, partition, error.text)
        self._shake()

    def _shake(self) -> None:
        """Drop messages until the next check, because they may come from another topic."""
        self._shaken = True
        self._next_look = min(self._next_look, time.monotonic() + self._timings.retry)

    def _is_down(self, cause: str, *, first: bool) -> None:
        """Note that the brokers do not answer, and when to look again."""
        self._outages.begin(cause, first=first)
        self._next_look = time.monotonic() + self._timings.retry

    def _on_error(self, error: ClientError) -> None:
        self._outages.error(error)
        self._sizes.note(error)
        self._shake()  # the broker that is back may be another one
        logger.debug("%s", error.text)

    def _on_commit(self, error: str | None) -> None:
        if error is not None:
            logger.warning("offsets were not committed to group %r: %s", self.source.group, error)

    def _on_end(self, ended: ClientEnded) -> None:
        """Log that the process of the client ended; the next check starts another one.

        Raises:
            DataError: it ended too often without having fetched anything.
        """
        self._check = None
        self._num_ends += 1
        if self._num_ends >= MAX_ENDS:
            raise self._error(
                f"the client library ended {MAX_ENDS} times in a row",
                str(ended),
                "Install another version of confluent-kafka, and report the topic's history.",
            )
        logger.warning(
            "topic %r: the process of the client ended (%s), it is started again",
            self.source.topic,
            ended,
        )
        self._shake()


class _Doubt(Exception):
    """The topic contradicts the position, but this may pass."""
