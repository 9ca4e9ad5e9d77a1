# SPDX-License-Identifier: Apache-2.0
"""Which ranks are gone, or have left a call by an error; they say so where all of them look."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

GRACE_SECONDS = 3.0
"""How long a rank waits for the answers of the others; each finds the loss in its next call."""
PAUSE_SECONDS = 0.05
WATCH_SECONDS = 0.5
"""How long a call waits before it is looked whether another rank has left it."""


def absent_ranks(rank: int, size: int) -> list[int]:
    """Answer the others, and return the ranks that do not; [] if that is not known.

    The answers lie in the store in which the ranks have met, since gloo names no rank.

    Args:
        rank: of this process.
        size: number of ranks.
    """
    if size == 2:
        return [1 - rank]
    absent: list[list[int]] = []
    _limited(lambda: _call(rank, size, absent))
    if absent:
        return absent[0]
    is_with_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return [] if is_with_launcher or rank == 0 else [0]  # which keeps the store


def _call(rank: int, size: int, absent: list[list[int]]) -> None:
    """Put the ranks that do not answer into `absent`; nothing if the store cannot be asked."""
    keys = {number: _key("lost", number) for number in range(size)}
    with _unreached_ignored():
        store = _get_default_store()
        store.set(keys.pop(rank), "here")
        until = time.monotonic() + GRACE_SECONDS
        while keys and time.monotonic() < until:
            keys = {number: key for number, key in keys.items() if not store.check([key])}
            time.sleep(PAUSE_SECONDS)
        absent.append(list(keys))


def _key(kind: str, rank: int) -> str:
    started = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"hotbed-{kind}/{started}/{rank}"


def _limited(ask: Callable[[], None]) -> None:
    """Ask the store, which may answer after minutes if its host cannot be reached."""
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(GRACE_SECONDS + 1.0)


# --- ranks that have left a call ------------------------------------------------------------------


@dataclass(frozen=True)
class Departure:
    """A call of the program that an error has ended on one rank.

    Attributes:
        number: of the call, as that of `Place`; None = the error has ended the program.
        failures: calls that have ended so since the ranks met last, this one included; 0 = they had
            met in this call.
        call: its name.
        error: which has ended it.
    """

    number: int | None
    failures: int
    call: str
    error: str

    def leaves(self, number: int, failures: int) -> bool:
        """Return whether a rank in a call of this number waits in vain for the one that left.

        Where the ranks had not met, another rank may have had an error of its own as often, and be
        in the next call, to which the first will come.
        """
        if self.number is None:
            return True
        if self.failures:
            return self.number == number and self.failures > failures
        return self.number >= number

    def __str__(self) -> str:
        return f"has left {self.call} by an error, got {self.error.rstrip('.')}"


def report_departure(departure: Departure | None) -> None:
    """Report to the other ranks that an error has ended a call here; None: take that back."""
    if not dist.is_initialized():
        return
    key = _key("left", dist.get_rank())
    text = "" if departure is None else json.dumps(astuple(departure))

    def report() -> None:
        with _unreached_ignored():
            _get_default_store().set(key, text)

    _limited(report)


def departures(rank: int, size: int) -> dict[int, Departure] | None:
    """Return the calls that other ranks have left, by rank.

    None: the process that keeps the store is gone.
    """
    answers: list[dict[int, Departure] | None] = []
    _limited(lambda: _find_departures(rank, size, answers))
    return answers[0] if answers else {}


def _find_departures(rank: int, size: int, answers: list[dict[int, Departure] | None]) -> None:
    every: dict[int, Departure] = {}
    with _unreached_ignored():
        store = _get_default_store()
        for other in range(size):
            key = _key("left", other)
            if other != rank and store.check([key]) and (text := store.get(key)):
                every[other] = Departure(*json.loads(text))
        answers.append(every)
    if not answers:
        answers.append(None)


@contextmanager
def _unreached_ignored() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError):  # the store is gone, or torch's default group is
        return


@dataclass(eq=False)
class WatchedCall:
    """A call that waits for other ranks.

    Attributes:
        find: returns which ranks have left this call by an error; None: the process that keeps
            that is gone.
        end: ends the wait.
        began: when it began, by the monotonic clock.
        left: what `find` has returned.
    """

    find: Callable[[], dict[int, Departure] | None]
    end: Callable[[], None]
    began: float = field(default_factory=time.monotonic)
    left: dict[int, Departure] | None = field(default_factory=dict)


class Watch:
    """Ends waits for ranks that have left the call by an error: gloo waits for the whole timeout.

    A wait has half a second more before it is ended: an error that all ranks raise together may be
    known to some of them a moment earlier.
    """

    def __init__(self) -> None:
        self._wait: WatchedCall | None = None
        self._thread: threading.Thread | None = None

    def begin(self, wait: WatchedCall) -> None:
        """Watch a wait from now on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="hotbed-watch", daemon=True)
            self._thread.start()
        self._wait = wait

    def end(self, wait: WatchedCall) -> None:
        """Watch this wait no more, if it was watched."""
        if self._wait is wait:
            self._wait = None

    def _look(self) -> None:
        while True:
            time.sleep(WATCH_SECONDS)
            wait = self._wait
            if wait is None or time.monotonic() - wait.began < WATCH_SECONDS:
                continue
            if wait.left == {}:
                wait.left = wait.find()
            elif self._wait is wait:
                wait.end()


WATCH = Watch()
"""Of the main thread of this process."""
