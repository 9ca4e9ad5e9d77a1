# SPDX-License-Identifier: Apache-2.0
"""Threads that look for new versions: where trainers publish them, or where another process loads them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from hotbed.errors import ConfigError
from hotbed.persist.format import Reader
from hotbed.persist.publish import Follower, Topic


class Following:
    """What is new of each model, handed on until `close`.

    `failed`: told, by model, of what could not be read or taken.
    """

    def __init__(self, failed: Callable[[str, Exception], None]) -> None:
        self._failed, self._stop, self._threads = failed, threading.Event(), list[threading.Thread]()

    def follow(
        self, name: str, make: Callable[[], Follower], take: Callable[[Reader], None], poll_seconds: float = 1.0
    ) -> None:
        """Hand on what a trainer publishes. `make` is called on the thread, again after an error."""
        self._start(self._follow, name, make, take, poll_seconds)

    def repeat(self, name: str, step: Callable[[], None], poll_seconds: float = 1.0) -> None:
        """Call `step` again and again; an error that it raises several times running is told once."""
        self._start(self._repeat, name, step, poll_seconds)

    def close(self) -> None:
        """Stop, and wait for what is being taken."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _start(self, work: Callable[..., None], *given: object) -> None:
        thread = threading.Thread(target=work, args=given, daemon=True, name="hotbed-follow")
        self._threads.append(thread)
        thread.start()

    def _follow(
        self, name: str, make: Callable[[], Follower], take: Callable[[Reader], None], poll_seconds: float
    ) -> None:
        follower, told = None, None
        while not self._stop.is_set():
            readers = list[Reader]()
            try:
                follower = follower or make()
                for reader in follower.poll():
                    readers.append(reader)
            except Exception as error:
                self._failed(name, error)
            if follower is not None and follower.told and follower.told[-1] is not told:
                self._failed(name, told := follower.told[-1])
            for reader in reversed(readers):  # the newest of what came that can be loaded
                try:
                    take(reader)
                    break
                except Exception as error:
                    self._failed(name, error)
            self._stop.wait(poll_seconds)
        if follower is not None:
            follower.close()

    def _repeat(self, name: str, step: Callable[[], None], poll_seconds: float) -> None:
        told = ""
        while not self._stop.is_set():
            try:
                step()
                told = ""
            except Exception as error:
                if str(error) != told:
                    self._failed(name, error)
                told = str(error)
            self._stop.wait(poll_seconds)


def open_follower(source: str, cache: Path) -> Follower:
    """Of a directory, a URL, or kafka://HOST:PORT[,…]/TOPIC, which is collected in `cache`."""
    if not source.startswith("kafka://"):
        return Follower(source)
    servers, _, topic = source.removeprefix("kafka://").partition("/")
    if not servers or not topic:
        raise ConfigError(f"--watch: no topic — received {source!r} — write kafka://HOST:PORT/TOPIC")
    return Follower(Topic(servers, topic, cache))
