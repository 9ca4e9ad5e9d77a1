# SPDX-License-Identifier: Apache-2.0
"""Poll for new versions that trainers publish or that another process loads, in threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TypeAlias

from hotbed.errors import ConfigError, NotServed, StoreAway
from hotbed.files import Where
from hotbed.persist.container.format import Reader, holds_nothing, open_checkpoint
from hotbed.persist.publish import Follower, TopicFeed
from hotbed.serving.stores.backoff import Backoff
from hotbed.serving.stores.locking import TemporaryFolder

log = logging.getLogger("hotbed.serving")
_CLOSE_SECONDS = 5.0
_KAFKA = "kafka://"
_LONGEST_PAUSE = 8  # polls between two attempts to load a version
_HANG_SECONDS = 10.0  # after which a read of a source is reported
START_SECONDS = 10.0  # for a source to be read at a start, while kept rows can be served
LOAD_SECONDS = 60.0  # for a load that a client requests, and at a start without kept rows
_PIECE_SECONDS = 0.04  # between two pieces of files that are checked, 4 MiB each
KeepsOn: TypeAlias = Callable[[], bool]


class Following:
    """Deliver new versions of each model until `close`.

    Args:
        failed: called with the model and the error when a version cannot be read or taken; once
            for an error that repeats.
        returned: called with the model and the error of a source that could not be read, once it
            can be read again.
    """

    def __init__(
        self,
        failed: Callable[[str, Exception], None],
        returned: Callable[[str, Exception], None] = lambda name, error: None,
    ) -> None:
        self._failed = failed
        self._returned = returned
        self._stop = threading.Event()
        self._threads = list[threading.Thread]()
        self._subscriptions = dict[str, _Subscription]()

    def follow(
        self,
        name: str,
        make: Callable[[], Follower],
        take: Callable[[Reader], None],
        poll_seconds: float = 1.0,
    ) -> None:
        """Deliver the versions that a trainer publishes to `take`.

        A version for which `take` raises is retried, after pauses that double up to 8 polls,
        until a newer one arrives.

        Args:
            name: name of the model.
            make: opens the follower. It is called in the thread, and again after an error.
            take: takes a version, for example loads it.
            poll_seconds: time between polls.
        """
        subscription = _Subscription(
            make, take, partial(self._failed, name), partial(self._returned, name)
        )
        self._subscriptions[name] = subscription
        self._start(self._follow, subscription, poll_seconds)
        self._start(self._watch, subscription)

    def again(self, name: str) -> bool:
        """Deliver the last version again at the next poll, if this model follows a trainer.

        Return whether there is one.
        """
        subscription = self._subscriptions.get(name)
        if subscription is None:
            return False
        subscription.again.set()
        return subscription.has_version

    def repeat(
        self,
        name: str,
        step: Callable[[], None],
        poll_seconds: float = 1.0,
        *,
        at_once: bool = True,
    ) -> None:
        """Call `step` at every poll; an error that repeats is reported once.

        `at_once`: whether the first call comes now, and not after `poll_seconds`.
        """
        self._start(self._repeat, name, step, poll_seconds, at_once)

    def check_kept(self, name: str, check: Callable[[KeepsOn], None], seconds: float) -> None:
        """Check the kept files of a model every `seconds`, at most 100 MB of them a second.

        `check` is given a function that paces the check, and returns False once it shall end.
        """
        self.repeat(name, partial(check, self._paced), seconds, at_once=False)

    def _paced(self) -> bool:
        return not self._stop.wait(_PIECE_SECONDS)

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Stop, and wait up to `seconds` for versions that are being taken.

        A thread that hangs is abandoned; it ends with the process.
        """
        self._stop.set()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        num_alive = sum(thread.is_alive() for thread in self._threads)
        if num_alive:
            log.warning("%d threads still wait for their sources; they are abandoned", num_alive)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True, name="hotbed-follow")
        self._threads.append(thread)
        thread.start()

    def _follow(self, subscription: _Subscription, poll_seconds: float) -> None:
        while not self._stop.is_set():
            subscription.step()
            self._stop.wait(poll_seconds)
        subscription.close()

    def _watch(self, subscription: _Subscription) -> None:
        """Report steps that take long; the thread that takes them may hang."""
        while not self._stop.wait(_HANG_SECONDS / 4):
            subscription.report_hang(_HANG_SECONDS)

    def _repeat(
        self, name: str, step: Callable[[], None], poll_seconds: float, at_once: bool
    ) -> None:
        reports = _RepeatFilter(lambda error: self._failed(name, error))
        if not at_once:
            self._stop.wait(poll_seconds)
        while not self._stop.is_set():
            try:
                step()
                reports.reset()
            except Exception as error:
                reports.report(error)
            self._stop.wait(poll_seconds)


class _RepeatFilter:
    """Report an error once while it repeats."""

    def __init__(self, report: Callable[[Exception], None]) -> None:
        self._report = report
        self._last = ""

    def report(self, error: Exception) -> None:
        if str(error) != self._last:
            self._report(error)
        self._last = str(error)

    def reset(self) -> None:
        self._last = ""


class _Subscription:
    """Hold the newest version of one trainer until it is taken.

    Setting `again` has the newest version taken once more.
    """

    def __init__(
        self,
        make: Callable[[], Follower],
        take: Callable[[Reader], None],
        report: Callable[[Exception], None],
        returned: Callable[[Exception], None],
    ) -> None:
        self.again = threading.Event()
        self._make = make
        self._take = take
        self._report = report
        self._returned = returned
        self._away: Exception | None = None
        self._problem: Exception | None = None  # of the source's newest version
        self._poll_error: Exception | None = None
        self._poll_errors = _RepeatFilter(report)
        self._take_errors = _RepeatFilter(report)
        self._follower: Follower | None = None
        self._newest: Reader | None = None
        self._is_taken = False  # the newest version
        self._reported: Exception | None = None
        self._began: float | None = None  # the step under way
        self._hang: StoreAway | None = None
        self._num_polls = 0
        self._backoff = Backoff(1, _LONGEST_PAUSE)  # of attempts to take it, in polls

    @property
    def has_version(self) -> bool:
        """Whether a version has arrived."""
        return self._newest is not None

    def step(self) -> None:
        """Poll once, and take the newest version that arrived or that could not be taken before."""
        self._began = time.monotonic()
        self._poll_and_take()
        self._began = None
        if self._hang is not None:
            self._returned(self._hang)
            self._hang = None

    def report_hang(self, seconds: float) -> None:
        """Report once that the step under way has taken `seconds`."""
        began = self._began
        if began is not None and self._hang is None and time.monotonic() - began > seconds:
            self._hang = hanging("what is followed", seconds)
            self._report(self._hang)

    def _poll_and_take(self) -> None:
        self._num_polls += 1
        readers = list[Reader]()
        error = self._poll(readers)
        if self.again.is_set():
            self.again.clear()
            self._poll_errors.reset()
            self._take_errors.reset()
            self._take_at_once()
        if readers:
            self._newest = readers[-1]
            self._take_at_once()
        is_due = not self._is_taken and self._backoff.is_due(self._num_polls)
        if is_due and self._newest is not None:
            self._deliver(readers or [self._newest])
        if error is None:
            self._poll_errors.reset()
            if self._poll_error is not None:
                self._returned(self._poll_error)
        else:
            self._poll_errors.report(error)
        self._poll_error = error

    def _take_at_once(self) -> None:
        """Have the newest version taken in this step, whatever failed before."""
        self._is_taken = False
        self._backoff.reset()

    def close(self) -> None:
        """Close the connections of the follower."""
        if self._follower is not None:
            self._follower.close()

    def _poll(self, readers: list[Reader]) -> Exception | None:
        """Append the versions that arrived to `readers`; return the error that ended the poll."""
        failure: Exception | None = None
        try:
            self._follower = self._follower or self._make()
            for reader in self._follower.poll():
                readers.append(reader)
        except Exception as error:
            failure = error
        if self._follower is not None:
            self._report_problems(self._follower)
        return failure

    def _report_problems(self, follower: Follower) -> None:
        """Report what the follower could not read, and a source that it can read again."""
        if follower.errors and follower.errors[-1] is not self._reported:
            self._reported = follower.errors[-1]
            self._report(self._reported)
        if self._away is not None and follower.away is None:
            self._returned(self._away)
        if self._problem is not None and follower.problem is None:
            self._returned(self._problem)
        self._away = follower.away
        self._problem = follower.problem

    def _deliver(self, readers: list[Reader]) -> None:
        """Take the newest version that can be taken.

        If a newer one failed, the newest of all is retried later.
        """
        failure: Exception | None = None
        for reader in reversed(readers):
            try:
                self._take(reader)
                break
            except Exception as error:
                failure = failure or error
        if failure is None:
            self._is_taken = True
            self._take_errors.reset()
        else:
            self._backoff.failed(self._num_polls)
            self._take_errors.report(failure)


def hanging(place: str, seconds: float) -> StoreAway:
    """Return why a version is not served whose read does not end."""
    return StoreAway(
        f"{place}: the read of a version has not ended, got {seconds:g} s so far. If it does not "
        "end, look at the mount or the store; the version is served once it is read."
    )


def open_newest(source: Where) -> Reader:
    """Open the newest version at a source that is followed.

    Raises NotServed where none is published yet, FormatError for a torn one.
    """
    if holds_nothing(source):
        raise NotServed(
            f"{source}: no version is published yet, got an empty or missing folder. It is served "
            "once its trainer publishes the first."
        )
    return open_checkpoint(source)


def collecting(sources: Iterable[str]) -> AbstractContextManager[Path]:
    """Make a temporary folder for the messages of topics; nothing where no source is a topic.

    The folder is removed on exit.
    """
    if any(map(is_topic, sources)):
        return TemporaryFolder("hotbed-follow-")
    return nullcontext(Path())


def is_topic(source: str) -> bool:
    """Return whether a source is a topic of Kafka."""
    return source.startswith(_KAFKA)


def open_follower(source: str, cache: Path) -> Follower:
    """Open a follower of a directory, a URL or kafka://HOST:PORT[,…]/TOPIC, collected in `cache`."""
    if not is_topic(source):
        return Follower(source)
    servers, _, topic = source.removeprefix(_KAFKA).partition("/")
    if not servers or not topic:
        raise ConfigError(
            f"--watch: expected a server and a topic, got {source!r}. "
            "Write kafka://HOST:PORT/TOPIC."
        )
    return Follower(TopicFeed(servers, topic, cache))
