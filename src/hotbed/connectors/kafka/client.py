# SPDX-License-Identifier: Apache-2.0
"""The client of Kafka: a consumer of confluent_kafka in a process of its own."""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from hotbed.connectors.kafka import process
from hotbed.connectors.kafka.process import IS_ERROR, NO_VALUE
from hotbed.errors import ConfigError, MissingExtra

logger = logging.getLogger("hotbed.kafka")

HANG_SECONDS = 20.0
"""How much longer than a request allows its answer may take before the process is killed."""
CLOSE_SECONDS = 2.0


def kafka_library() -> Any:
    """Return the module confluent_kafka.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as error:
        raise _missing() from error
    return confluent_kafka


def _missing() -> MissingExtra:
    return MissingExtra(
        "kafka: confluent_kafka is not installed. Install it: pip install hotbed[kafka]"
    )


class ClientError(NamedTuple):
    """An error of librdkafka: its name, such as "_PARTITION_EOF", and its text."""

    name: str
    text: str
    fatal: bool


class KafkaFailure(Exception):
    """A request to the client failed."""


class ClientEnded(KafkaFailure):
    """The process of the client ended, or was killed because it did not answer."""


class PolledEntry(NamedTuple):
    """A message, or an error of its partition. `timestamp` is in milliseconds."""

    partition: int
    offset: int
    timestamp: int
    value: bytes | None
    error: ClientError | None


class KafkaClient:
    """A consumer of confluent_kafka in a process of its own, which starts with the first request.

    librdkafka from 2.5.0 on may crash when a topic that it fetches is deleted and created again
    (confluentinc/librdkafka#5280). Then the request raises `ClientEnded`, and the next request
    starts a new process, without partitions. A process that does not answer is killed. It ends with
    this process.

    Use one object from one thread at a time.

    Args:
        options: options of librdkafka. Functions among them must be importable.
        on_error: called with errors of the client as a whole.
        on_commit: called with the error of each commit, or None.
        hang_seconds: how long an answer may be overdue before the process is killed.

    Raises:
        ConfigError: the client refuses the options.
        MissingExtra: confluent-kafka is not installed.

    Example:
        >>> client = KafkaClient({"bootstrap.servers": "localhost:9092", "group.id": "g"})
        >>> client.request("assign", "clicks", {0: 0})
        >>> entries = list(client.consume(100, 0.5))
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        on_error: Callable[[ClientError], None] | None = None,
        on_commit: Callable[[str | None], None] | None = None,
        hang_seconds: float = HANG_SECONDS,
    ) -> None:
        if importlib.util.find_spec("confluent_kafka") is None:
            raise _missing()
        self._options = _pickled(options)
        self._on_error = on_error or (lambda error: None)
        self._on_commit = on_commit or (lambda error: None)
        self._hang_seconds = hang_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._end: weakref.finalize[..., KafkaClient] | None = None
        self._asked: tuple[int, float] | None = None  # count and seconds of a consume under way
        self._answer_until = 0.0
        self._ready: tuple[Any, ...] | None = None  # an answer to consume that is not used yet
        self._answer: tuple[Any, Any] | None = None  # to the question of `begin`
        self.ends: dict[int, int] = {}
        """The offset after the last known message, by partition; negative = not known yet."""

    @property
    def pid(self) -> int | None:
        """The id of the process; None if it does not run."""
        if self._process is None:
            return None
        return self._process.pid

    def request(self, name: str, *arguments: Any, seconds: float = 0.0) -> Any:
        """Return the value of a method of `ClientProcess`, which may take `seconds`.

        Raises:
            KafkaFailure: the client or the broker refuses.
            ClientEnded: the process ended.
        """
        if self._asked is not None:
            self._ready = self._receive()
            self._asked = None
        if name == "assign":
            self._ready = None  # its messages belong to the partitions before
        self._send(name, arguments, seconds)
        return self._receive()

    def begin(self, name: str, *arguments: Any) -> None:
        """Ask the brokers, with a method of `Questions`; `take_answer` returns the answer later.

        Requests are answered meanwhile. One question may be under way.
        """
        self._answer = None
        self.request("begin", name, arguments)

    @property
    def is_answered(self) -> bool:
        """Whether the answer to the question of `begin` came with that to a request."""
        return self._answer is not None

    def take_answer(self) -> Any:
        """Return the answer to the question of `begin`.

        Raises:
            KafkaFailure: the client or the broker refuses.
        """
        assert self._answer is not None
        value, failure = self._answer
        self._answer = None
        return _checked(value, failure)

    def consume(self, count: int, seconds: float) -> Iterator[PolledEntry]:
        """Return up to `count` messages and errors that arrive within `seconds`.

        The process then fetches the next ones, while the caller uses these.
        """
        answer = self._ready
        self._ready = None
        if answer is None:
            if self._asked is None:
                self._ask(count, seconds)
            if not self._has_answer(seconds):
                return iter(())
            answer = self._receive()
        self._ask(count, seconds)
        *columns, ends = answer
        self.ends = ends
        return _entries(*columns)

    def close(self, wait_seconds: float = 0.0) -> None:
        """End the process; wait up to `wait_seconds` for the answers to commits before."""
        if self._process is None:
            return
        try:
            self.request("wait", wait_seconds, seconds=wait_seconds)
            self._send("close", (), CLOSE_SECONDS)
            self._process.wait(CLOSE_SECONDS)
        except (KafkaFailure, subprocess.TimeoutExpired):
            pass
        self._clear()

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        arguments = [str(theirs.fileno()), str(os.getpid())]
        with theirs:
            # a session of its own: Ctrl-C in a terminal is for the trainer alone
            self._process = subprocess.Popen(
                [sys.executable, "-P", process.__file__, *arguments],
                stdin=subprocess.DEVNULL,
                # a reader of the trainer's output then does not wait for the client
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._end = weakref.finalize(self, _kill, self._process, self._connection)
        self.ends = {}
        self._send("open", (sys.path, self._options), 0.0)
        try:
            self._receive()
        except ClientEnded:
            raise
        except KafkaFailure as failure:
            self._clear()
            raise ConfigError(
                f"options: the client of Kafka refuses them, got {failure}. Correct them."
            ) from failure
        return self._connection

    def _ask(self, count: int, seconds: float) -> None:
        self._send("consume", (count, seconds), seconds)
        self._asked = (count, seconds)

    def _send(self, name: str, arguments: Sequence[Any], seconds: float) -> None:
        connection = self._connection or self._start()
        self._answer_until = time.monotonic() + seconds + self._hang_seconds
        try:
            connection.send((name, arguments))
        except OSError as error:
            raise self._ended() from error

    def _has_answer(self, seconds: float) -> bool:
        """Return whether the answer arrives within `seconds`.

        Raises:
            ClientEnded: it is overdue.
        """
        assert self._connection is not None
        try:
            if self._connection.poll(seconds):
                return True
        except OSError as error:  # the interpreter ends, or collected both in one cycle
            raise self._ended() from error
        if time.monotonic() >= self._answer_until:
            raise self._ended()
        return False

    def _receive(self) -> Any:
        """Return the value of the answer to the request under way, once it is here."""
        assert self._connection is not None
        while not self._has_answer(1.0):
            pass
        try:
            value, failure, events = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        self._asked = None
        for kind, event in events:
            if kind == "error":
                self._on_error(ClientError(*event))
            elif kind == "commit":
                self._on_commit(event)
            elif kind == "answer":
                self._answer = event
            else:
                logger.log(*event)
        return _checked(value, failure)

    def _ended(self) -> ClientEnded:
        """Return the error that says how the process ended; kill it if it still runs."""
        assert self._process is not None
        try:
            code = self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._clear()
            return ClientEnded(f"no answer within {self._hang_seconds:g} s, so it was killed")
        self._clear()
        if code < 0:
            return ClientEnded(signal.Signals(-code).name)
        return ClientEnded(f"exit code {code}")

    def _clear(self) -> None:
        """Kill the process if it still runs, and forget it."""
        if self._end is not None:
            self._end()
        self._process = None
        self._connection = None
        self._asked = None
        self._ready = None
        self._answer = None


def _checked(value: Any, failure: Sequence[Any] | None) -> Any:
    if failure is not None:
        name, text, _ = failure
        raise KafkaFailure(f"{text} ({name})")
    return value


def _kill(process: subprocess.Popen[bytes], connection: Connection) -> None:
    process.kill()
    process.wait()
    connection.close()


def _entries(
    partitions: Sequence[int],
    offsets: Sequence[int],
    timestamps: Sequence[int],
    sizes: Sequence[int],
    values: bytes,
    errors: Sequence[Sequence[Any]],
) -> Iterator[PolledEntry]:
    remaining = iter(errors)
    begin = 0
    columns = zip(partitions, offsets, timestamps, sizes, strict=True)
    for partition, offset, timestamp, size in columns:
        if size >= 0:
            end = begin + size
            yield PolledEntry(partition, offset, timestamp, values[begin:end], None)
            begin = end
        elif size == NO_VALUE:
            yield PolledEntry(partition, offset, timestamp, None, None)
        else:
            assert size == IS_ERROR
            yield PolledEntry(partition, offset, timestamp, None, ClientError(*next(remaining)))


def _pickled(options: Mapping[str, Any]) -> bytes:
    """Return the options for the process of the client.

    Raises:
        ConfigError: a function cannot be imported there.
    """
    for name, value in options.items():
        module = getattr(value, "__module__", "")
        try:
            pickle.dumps(value)
        except Exception as error:
            raise ConfigError(_not_importable(name, value)) from error
        if callable(value) and module == "__main__":
            raise ConfigError(_not_importable(name, value))
    return pickle.dumps(dict(options))


def _not_importable(name: str, value: Any) -> str:
    return (
        f"options.{name}: the client of Kafka runs in a process of its own, which cannot import "
        f"the value, got {value!r}. Define the function in a module, at its top level."
    )
