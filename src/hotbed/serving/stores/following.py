# SPDX-License-Identifier: Apache-2.0
"""Threads that look for new versions: where trainers publish them, or where another process loads
them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from hotbed.errors import ConfigError
from hotbed.persist.format import Reader
from hotbed.persist.publish import Follower, Topic
from hotbed.serving.stores.writing import TemporaryFolder

log = logging.getLogger("hotbed.serving")
_CLOSE_SECONDS = 5.0
_KAFKA = "kafka://"
_LONGEST_PAUSE = 32  # polls between tries of a version that cannot be taken


class Following:
    """What is new of each model, handed on until `close`.

    `failed`: told, by model, of what could not be read or taken; of the same several times running
    once.
    """

    def __init__(self, failed: Callable[[str, Exception], None]) -> None:
        self._failed = failed
        self._stop = threading.Event()
        self._threads = list[threading.Thread]()
        self._followed = dict[str, _Followed]()

    def follow(
        self,
        name: str,
        make: Callable[[], Follower],
        take: Callable[[Reader], None],
        poll_seconds: float = 1.0,
    ) -> None:
        """Hand on what a trainer publishes. `make` is called on the thread, again after an error.

        What `take` raises for is tried again, after pauses that double up to 32 polls, until
        something newer comes.
        """
        followed = self._followed[name] = _Followed(
            make, take, lambda error: self._failed(name, error)
        )
        self._start(self._follow, followed, poll_seconds)

    def again(self, name: str) -> None:
        """Hand on at the next poll what came last, where the model of this name follows a trainer."""
        if name in self._followed:
            self._followed[name].again.set()

    def repeat(self, name: str, step: Callable[[], None], poll_seconds: float = 1.0) -> None:
        """Call `step` again and again; an error that it raises several times running is told once."""
        self._start(self._repeat, name, step, poll_seconds)

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Stop, and wait so long for what is being taken; what hangs is left to its thread, which
        ends with the process.
        """
        self._stop.set()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if left := sum(thread.is_alive() for thread in self._threads):
            log.warning("%d threads still wait for what they follow; they are left", left)

    def _start(self, work: Callable[..., None], *given: object) -> None:
        thread = threading.Thread(target=work, args=given, daemon=True, name="hotbed-follow")
        self._threads.append(thread)
        thread.start()

    def _follow(self, followed: _Followed, poll_seconds: float) -> None:
        while not self._stop.is_set():
            followed.step()
            self._stop.wait(poll_seconds)
        followed.close()

    def _repeat(self, name: str, step: Callable[[], None], poll_seconds: float) -> None:
        once = _Once(lambda error: self._failed(name, error))
        while not self._stop.is_set():
            try:
                step()
                once.passed()
            except Exception as error:
                once.tell(error)
            self._stop.wait(poll_seconds)


class _Once:
    """Tells an error that comes several times running once."""

    def __init__(self, tell: Callable[[Exception], None]) -> None:
        self._tell = tell
        self._told = ""

    def tell(self, error: Exception) -> None:
        if str(error) != self._told:
            self._tell(error)
        self._told = str(error)

    def passed(self) -> None:
        self._told = ""


class _Followed:
    """What one trainer published last, until it is taken. `again`: set to have it taken once more."""

    def __init__(
        self,
        make: Callable[[], Follower],
        take: Callable[[Reader], None],
        tell: Callable[[Exception], None],
    ) -> None:
        self.again = threading.Event()
        self._make = make
        self._take = take
        self._tell = tell
        self._polling = _Once(tell)
        self._taking = _Once(tell)
        self._follower: Follower | None = None
        self._newest: Reader | None = None
        self._told: Exception | None = None
        self._polls = math.inf  # until the newest is to be taken; between tries
        self._pause = 1

    def step(self) -> None:
        """Look for versions, and take the newest of those that came, or the one that could not be
        taken before.
        """
        readers = list[Reader]()
        wrong = self._poll(readers)
        again = self.again.is_set()
        if again:
            self.again.clear()
            self._polling.passed()
            self._taking.passed()
        if readers or again:
            self._polls = 0
            self._pause = 1
        if readers:
            self._newest = readers[-1]
        if self._polls <= 0 and self._newest is not None:
            self._hand_on(readers or [self._newest])
        self._polls -= 1
        if wrong is None:
            self._polling.passed()
        else:
            self._polling.tell(wrong)

    def close(self) -> None:
        """Let go of connections."""
        if self._follower is not None:
            self._follower.close()

    def _poll(self, readers: list[Reader]) -> Exception | None:
        """Gather what came; returns what went wrong then."""
        wrong: Exception | None = None
        try:
            self._follower = self._follower or self._make()
            for reader in self._follower.poll():
                readers.append(reader)
        except Exception as error:
            wrong = error
        if (
            self._follower is not None
            and self._follower.told
            and self._follower.told[-1] is not self._told
        ):
            self._told = self._follower.told[-1]
            self._tell(self._told)
        return wrong

    def _hand_on(self, readers: list[Reader]) -> None:
        """The newest that can be taken; the newest of all is tried again later if that is another."""
        failed: Exception | None = None
        for reader in reversed(readers):
            try:
                self._take(reader)
                break
            except Exception as error:
                failed = failed or error
        if failed is None:
            self._polls = math.inf
            self._taking.passed()
        else:
            self._polls, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
            self._taking.tell(failed)


def collecting(sources: Iterable[str]) -> AbstractContextManager[Path]:
    """A folder for what followers of topics collect, until it is left; none where no source is a
    topic.
    """
    if any(source.startswith(_KAFKA) for source in sources):
        return TemporaryFolder("hotbed-follow-")
    return nullcontext(Path())


def open_follower(source: str, cache: Path) -> Follower:
    """Of a directory, a URL, or kafka://HOST:PORT[,…]/TOPIC, which is collected in `cache`."""
    if not source.startswith(_KAFKA):
        return Follower(source)
    servers, _, topic = source.removeprefix(_KAFKA).partition("/")
    if not servers or not topic:
        raise ConfigError(
            f"--watch: no topic — received {source!r} — write kafka://HOST:PORT/TOPIC"
        )
    return Follower(Topic(servers, topic, cache))
