# SPDX-License-Identifier: Apache-2.0
"""A broker that is far away: each byte takes a while, and nothing is a limit of the network."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from kafka_streams import hasty, message

from hotbed.connectors import Join, Json, Kafka, Source
from hotbed.data import Dataset, Id, Label, Schema
from hotbed.testing import Broker

COLUMNS = {"row": "int64", "label": "int64", "at": "int64"}


class FarBroker:
    """A broker behind a relay on a thread, which delays each byte by `delay` seconds each way."""

    def __init__(self) -> None:
        self.delay = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.broker = Broker(advertised=self.address)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> FarBroker:
        self.broker.start()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.broker.kill()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._relay, sock=self._listener)
        )
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0))  # transports close in the next turn
        self._loop.close()

    async def _relay(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        host, port = self.broker.servers.split(":")
        far, there = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await asyncio.gather(self._carry(near, there), self._carry(far, back))
        there.transport.abort()
        back.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while received := await reader.read(1 << 16):
            self._loop.call_later(self.delay, writer.write, received)
        writer.close()


@pytest.fixture(scope="module")
def far() -> Iterator[FarBroker]:
    with FarBroker() as running:
        for topic in ("shown", "clicks"):
            running.broker.create(topic)
            rows = range(200)
            running.broker.produce(topic, [message(row, at=1_700_000_000 + row) for row in rows])
        yield running
        running.delay = 0.0


def topics(far: FarBroker, joined: bool) -> Source:
    """Return a topic, or two that are joined; they are checked often."""
    shown, clicks = (
        hasty(Kafka(far.address, name, Json(columns=COLUMNS)), look=0.5)
        for name in ("shown", "clicks")
    )
    if not joined:
        return clicks
    return Join(shown, clicks, on="row", within=20, time="at", unit="s")


@pytest.mark.parametrize(("delay", "joined"), [(0.12, False), (0.06, True), (0.4, True)])
def test_a_far_broker_is_read_and_is_never_taken_to_be_away(
    far: FarBroker, delay: float, joined: bool, caplog: pytest.LogCaptureFixture
) -> None:
    far.delay = delay
    schema = Schema([Label("label"), Id("row")])
    data = Dataset(topics(far, joined), schema, 8, prefetch=0)
    begin = time.monotonic()
    longest = 0.0
    num_rows = 0
    with caplog.at_level(logging.WARNING, "hotbed.kafka"):
        before = begin
        for batch in data.stream():
            longest = max(longest, time.monotonic() - before)
            if batch is not None:
                num_rows += len(batch)
            if num_rows >= 160 and time.monotonic() - begin > 2 + 8 * delay:
                break
            assert time.monotonic() - begin < 30, num_rows
            before = time.monotonic()
    assert not caplog.text
    assert longest < 2.0, "the reader may stop at every tick"
