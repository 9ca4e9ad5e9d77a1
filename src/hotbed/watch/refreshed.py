# SPDX-License-Identifier: Apache-2.0
"""What is read again and again, on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from hotbed.errors import HotbedError

T = TypeVar("T")
log = logging.getLogger("hotbed")


@dataclass(frozen=True)
class Look(Generic[T]):
    """What was read last.

    Attributes:
        value: None before the first success.
        read: when `value` was read, in Unix seconds; 0 before the first success.
        problem: why the last look failed; "" if it did not.
    """

    value: T | None = None
    read: float = 0.0
    problem: str = ""


class Refreshed(Generic[T]):
    """Calls `read` every `every_seconds` seconds on a thread, and keeps what it returned last.

    An error is kept as the problem of the last look, beside the value before it. While nobody asks
    for `look`, it is read less often: `IDLE` times less.

    Args:
        read: returns what is there now.
        every_seconds: seconds between two calls.
    """

    IDLE = 5
    _PATIENCE_SECONDS = 60.0  # after which nobody is looking

    def __init__(self, read: Callable[[], T], every_seconds: float) -> None:
        self._read = read
        self._every = every_seconds
        self._look = Look[T]()
        self._asked = time.monotonic()
        self._wake = threading.Event()
        self._is_closed = False
        self._has_looked = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="hotbed-look", daemon=True)

    @property
    def look(self) -> Look[T]:
        """What was read last."""
        self._asked = time.monotonic()
        return self._look

    def start(self) -> None:
        """Begin to read again and again."""
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait for the first look, but not longer than some seconds."""
        self._has_looked.wait(seconds)

    def refresh(self) -> None:
        """Read now."""
        try:
            self._look = Look(self._read(), time.time())
        except (HotbedError, OSError) as error:
            self._look = Look(self._look.value, self._look.read, str(error))
        except Exception as error:  # a page that shows the rest is worth more than none
            log.exception("hotbed watch: a look failed")
            self._look = Look(self._look.value, self._look.read, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End the thread, once a call under way has returned."""
        self._is_closed = True
        self._wake.set()

    def _repeat(self) -> None:
        while True:
            self.refresh()
            self._has_looked.set()
            is_watched = time.monotonic() - self._asked < self._PATIENCE_SECONDS
            if self._wake.wait(self._every * (1 if is_watched else self.IDLE)) or self._is_closed:
                return
