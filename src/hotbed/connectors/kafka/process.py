# SPDX-License-Identifier: Apache-2.0
"""The process of a Kafka client: a script that answers the requests of `KafkaClient`, one by one.

It imports nothing of Hotbed, so that it starts within 0.1 s. Answers hold plain values only.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

NO_VALUE = -1
"""The size of a message without a value (a tombstone)."""
IS_ERROR = -2
"""The size of an entry that is an error of a partition instead of a message."""
PARENT_SECONDS = 5.0
CONSUMER_OPTIONS = (
    "group.id",
    "enable.auto.commit",
    "auto.offset.reset",
    "enable.partition.eof",
    "isolation.level",
)

ErrorAnswer = tuple[str, str, bool]
"""Name, text, and whether the client cannot continue after it."""


class ClientProcess:
    """A consumer, and the events that its callbacks reported since the last answer."""

    def __init__(self) -> None:
        self._kafka: Any = None
        self._consumer: Any = None
        self._questions: Questions | None = None
        self._assigned: list[Any] = []
        self._num_commits = 0  # under way
        self._events = deque[tuple[str, Any]]()
        self._beside: threading.Thread | None = None
        self._logger = logging.getLogger("client")
        self._logger.setLevel(logging.DEBUG)
        self._logger.addHandler(_Collected(self._events))

    def answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the value of a request, its error, and the events until now."""
        value, failure = self._call(name, arguments)
        events = [self._events.popleft() for _ in range(len(self._events))]
        return value, failure, events

    def _call(self, name: str, arguments: Sequence[Any]) -> tuple[Any, ErrorAnswer | None]:
        try:
            return getattr(self, name)(*arguments), None
        except Exception as error:
            return None, self._plain(error)

    def begin(self, name: str, arguments: Sequence[Any]) -> None:
        """Ask the brokers on a thread of its own; the answer, or its error, is an event."""

        def work() -> None:
            self._events.append(("answer", self._call("ask", (name, arguments))))

        self._beside = threading.Thread(target=work, daemon=True)
        self._beside.start()

    def ask(self, name: str, arguments: Sequence[Any]) -> Any:
        """Return the value of a method of `Questions`."""
        assert self._questions is not None
        return getattr(self._questions, name)(*arguments)

    def settle(self, seconds: float) -> None:
        """Wait for the answer to the question that `begin` asked, and for events."""
        if self._beside is not None and self._beside.is_alive():
            self._beside.join(seconds)
        else:
            time.sleep(seconds)
        self._consumer.poll(0)

    def open(self, path: list[str], options: bytes) -> None:
        """Connect; `path` is that of imports, `options` a pickled mapping."""
        sys.path[:] = path
        import confluent_kafka
        import confluent_kafka.admin

        self._kafka = confluent_kafka
        settings = {**pickle.loads(options), "error_cb": self._on_error}
        self._questions = Questions(confluent_kafka, settings, self._logger)
        self._consumer = confluent_kafka.Consumer(
            {**settings, "on_commit": self._on_commit}, logger=self._logger
        )

    def consume(self, count: int, seconds: float) -> tuple[Any, ...]:
        """Return up to `count` messages that arrive within `seconds`, column by column.

        Returns:
            Partitions, offsets, timestamps, sizes, all values in one, the errors, and the known
            ends of partitions.
        """
        partitions = array("q")
        offsets = array("q")
        timestamps = array("q")
        sizes = array("q")
        values: list[bytes] = []
        errors: list[ErrorAnswer] = []
        for message in self._consumer.consume(count, seconds):
            error = message.error()
            if error is not None:
                # errors of the client as a whole have neither
                partitions.append(_number(message.partition()))
                offsets.append(_number(message.offset()))
                timestamps.append(0)
                sizes.append(IS_ERROR)
                errors.append(_of_error(error))
                continue
            partitions.append(message.partition())
            offsets.append(message.offset())
            timestamps.append(message.timestamp()[1])
            value = message.value()
            if value is None:
                sizes.append(NO_VALUE)
            else:
                sizes.append(len(value))
                values.append(value)
        ends: dict[int, int] = {}
        for place in self._assigned:
            ends[place.partition] = self._consumer.get_watermark_offsets(place, cached=True)[1]
        return partitions, offsets, timestamps, sizes, b"".join(values), errors, ends

    def assign(self, topic: str, offsets: Mapping[int, int]) -> None:
        """Fetch these partitions from these offsets on, and no others."""
        self._assigned = self._places(topic, offsets)
        self._consumer.assign(self._assigned)
        self._consumer.resume(self._assigned)

    def pause(self, topic: str, partitions: list[int]) -> None:
        self._consumer.pause(self._places(topic, dict.fromkeys(partitions, -1001)))

    def resume(self, topic: str, partitions: list[int]) -> None:
        self._consumer.resume(self._places(topic, dict.fromkeys(partitions, -1001)))

    def commit(self, topic: str, offsets: Mapping[int, int]) -> None:
        """Commit offsets to the group; the answer of the broker is an event."""
        places = self._places(topic, offsets)
        self._consumer.commit(offsets=places, asynchronous=True)
        self._num_commits += 1

    def wait(self, seconds: float) -> None:
        """Wait for events, and for the answers to commits."""
        deadline = time.monotonic() + seconds
        self._consumer.poll(0)
        while self._num_commits and time.monotonic() < deadline:
            self._consumer.poll(0.05)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()

    def _places(self, topic: str, offsets: Mapping[int, int]) -> list[Any]:
        make = self._kafka.TopicPartition
        return [make(topic, partition, offset) for partition, offset in offsets.items()]

    def _plain(self, error: Exception) -> ErrorAnswer:
        if self._kafka is not None and isinstance(error, self._kafka.KafkaException):
            return _of_error(error.args[0])
        return type(error).__name__, str(error), False

    def _on_error(self, error: Any) -> None:
        self._events.append(("error", _of_error(error)))

    def _on_commit(self, error: Any, places: Any) -> None:
        self._num_commits -= 1
        text = None
        if error is not None:
            text = str(error)
        self._events.append(("commit", text))


class Questions:
    """What is asked of the brokers, on a consumer that does nothing else.

    A call on a consumer holds up all others on it.
    """

    def __init__(self, kafka: Any, options: Mapping[str, Any], logger: logging.Logger) -> None:
        self._kafka = kafka
        self._options = options
        self._logger = logger
        self._consumer: Any = None
        self._admin: Any = None

    def partitions(self, topic: str, seconds: float) -> tuple[list[int], ErrorAnswer | None]:
        """Return the partitions of a topic, and its error."""
        metadata = self._connected().list_topics(topic, timeout=seconds).topics[topic]
        error: ErrorAnswer | None = None
        if metadata.error is not None:
            error = _of_error(metadata.error)
        return sorted(metadata.partitions), error

    def bounds(
        self, topic: str, partitions: Sequence[int], seconds: float
    ) -> dict[int, tuple[int, int]]:
        """Return by partition the first offset, and the one after its last."""
        bounds: dict[int, tuple[int, int]] = {}
        for partition in partitions:
            place = self._kafka.TopicPartition(topic, partition)
            low, high = self._connected().get_watermark_offsets(place, timeout=seconds)
            bounds[partition] = (int(low), int(high))
        return bounds

    def topic_id(self, topic: str, seconds: float) -> str:
        """Return the id that the broker gives a topic; old brokers give none, which is an error."""
        if self._admin is None:
            options = {k: value for k, value in self._options.items() if k not in CONSUMER_OPTIONS}
            self._admin = self._kafka.admin.AdminClient(options, logger=self._logger)
        topics = self._kafka.TopicCollection([topic])
        try:
            answers = self._admin.describe_topics(topics, request_timeout=seconds)
            return str(answers[topic].result(2 * seconds).topic_id)
        except Exception:
            self._admin = None
            raise

    def _connected(self) -> Any:
        """Return the consumer, after its callbacks."""
        if self._consumer is None:
            self._consumer = self._kafka.Consumer(self._options, logger=self._logger)
        self._consumer.poll(0)
        return self._consumer


class _Collected(logging.Handler):
    """Adds log lines to the events."""

    def __init__(self, events: deque[tuple[str, Any]]) -> None:
        super().__init__()
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        self._events.append(("log", (record.levelno, record.getMessage())))


def _number(value: int | None) -> int:
    return -1 if value is None else value


def _of_error(error: Any) -> ErrorAnswer:
    return error.name(), error.str(), bool(error.fatal())


def main(descriptor: int, parent: int) -> None:
    """Answer until the other end closes, or the process `parent` has ended."""
    # the parent decides when to stop: a signal to all processes must not break its last commit
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(descriptor)
    client = ClientProcess()
    try:
        while True:
            # a fork of the parent may hold its end open
            while not connection.poll(PARENT_SECONDS):
                if os.getppid() != parent:
                    return
            name, arguments = connection.recv()
            connection.send(client.answer(name, arguments))
            if name == "close":
                return
    except (EOFError, ConnectionError):
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # a thread may be in the client library, which must not be torn down under it
