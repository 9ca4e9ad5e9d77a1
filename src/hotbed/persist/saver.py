# SPDX-License-Identifier: Apache-2.0
"""Saver: writes captures on one thread while training goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from hotbed.errors import PersistError
from hotbed.persist.checkpoint import Capture, Saved, write
from hotbed.persist.store import Where


class Saver:
    """Writes captures under one path, one at a time, each on a thread of its own.

    `submit` hands a capture over and returns; `busy` tells whether one is being written; `wait` returns the last
    checkpoint on disk. A save that failed raises PersistError at the next `submit` or `wait`; the last good
    state stays newest, and the next capture has to be a full (`needs_full`).

    Example:
        >>> saver = Saver("model", keep=2)
        >>> if not saver.busy:
        ...     saver.submit(capture(state, changes=not saver.needs_full))
        >>> saved = saver.wait()
    """

    def __init__(self, where: Where, keep: int = 1) -> None:
        self._where, self._keep = where, keep
        self._writing: Future[Saved] | None = None
        self._last: Saved | None = None
        self._failed = False

    @property
    def busy(self) -> bool:
        """Whether a capture is being written."""
        return self._writing is not None and not self._writing.done()

    @property
    def needs_full(self) -> bool:
        """Whether the next capture has to be a full: nothing was saved yet, or the last save failed."""
        failed = self._writing is not None and self._writing.done() and self._writing.exception() is not None
        return self._failed or failed or (self._last is None and self._writing is None)

    def submit(self, captured: Capture) -> None:
        """Write `captured` on the thread; waits where another is still being written.

        Raises PersistError for a failure of the save before, or for changes where a full is needed; `captured` is closed.
        """
        try:
            self.wait()
            if captured.changes and self.needs_full:
                raise PersistError(f"{self._where}: a full is needed first — received a capture of changes — "
                                   "capture with changes=not saver.needs_full")  # fmt: skip
        except BaseException:
            captured.close(saved=False)
            raise
        thread = ThreadPoolExecutor(1, thread_name_prefix="hotbed-saver")
        self._writing = thread.submit(write, self._where, captured, self._keep, self._last)
        thread.shutdown(wait=False)  # it ends with the save

    def wait(self) -> Saved | None:
        """The last checkpoint on disk, once nothing is being written; None before the first. Raises what a save raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            self._failed = True  # until the result says otherwise
            try:
                self._last = writing.result()
            except PersistError:
                raise
            except Exception as error:
                raise PersistError(
                    f"{self._where}: not saved — {error!r} — the last good state stays newest"
                ) from error
            self._failed = False
        return self._last
