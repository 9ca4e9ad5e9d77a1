# SPDX-License-Identifier: Apache-2.0
"""Saver: captures are written on another thread while training continues."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from hotbed.errors import PersistError, RankLost
from hotbed.files import Where
from hotbed.persist.container.format import Saved
from hotbed.persist.state.checkpoint import Capture, write, write_merged


class Saver:
    """Writes captures under one path, one at a time, each on a thread of its own.

    A save that fails raises PersistError at the next `submit` or `wait`. The last good state stays
    the newest, and the next capture has to be a full.

    Args:
        where: a path or URL.
        keep: number of fulls that are kept, each with the deltas on it.
        last: the newest state there, if the tables were restored from it and have tracked their
            changes since (`Table.track(saved=True)`): the next capture may be one of changes. See
            `hb.checkpoints.continues`.

    Example:
        >>> saver = Saver("model", keep=2)
        >>> if not saver.busy:
        ...     saver.submit(capture(state, changes=not saver.needs_full))
        >>> saved = saver.wait()
    """

    def __init__(self, where: Where, keep: int = 1, last: Saved | None = None) -> None:
        self._where = where
        self._keep = keep
        self._writing: Future[Saved] | None = None
        self._last = last
        self._failed = False

    @property
    def busy(self) -> bool:
        """Whether a capture is being written."""
        return self._writing is not None and not self._writing.done()

    @property
    def needs_full(self) -> bool:
        """Whether the next capture has to be a full: it is the first, or the last save failed."""
        writing = self._writing
        if writing is None:
            return self._failed or self._last is None
        has_failed = writing.done() and writing.exception() is not None
        return self._failed or has_failed

    def submit(self, captured: Capture, *, merges: bool = False) -> None:
        """Write `captured` on a thread; wait first if another capture is still being written.

        `merges`: make a full of changes and of the files before them.

        Raises:
            PersistError: the save before failed, or a full is needed and this is a capture of
                changes. `captured` is closed.
        """
        try:
            self.wait()
            if captured.changes and self.needs_full:
                raise PersistError(
                    f"{self._where}: a full is needed first, got a capture of changes. "
                    "Capture with changes=not saver.needs_full."
                )
        except BaseException:
            captured.close(saved=False)
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hotbed-saver")
        work = write_merged if merges else write
        self._writing = self._thread.submit(work, self._where, captured, self._keep, self._last)
        self._thread.shutdown(wait=False)  # it ends with the save

    def wait(self) -> Saved | None:
        """Return the last checkpoint once nothing is being written; None before the first.

        Raises:
            PersistError: the save failed.
            RankLost: another process is gone, or stands still.
        """
        writing = self._writing
        self._writing = None
        if writing is not None:
            self._failed = True  # until there is a result
            try:
                self._last = writing.result()
            except (PersistError, RankLost):
                raise
            except Exception as error:
                raise PersistError(
                    f"{self._where}: not saved, got {error!r}. The last good state stays newest."
                ) from error
            finally:
                self._thread.shutdown()
            self._failed = False
        return self._last
