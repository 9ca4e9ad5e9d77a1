# SPDX-License-Identifier: Apache-2.0
"""Lock served folders for the one process that writes them, and make temporary ones."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

from hotbed.errors import PersistError
from hotbed.files import FolderLock, SharedLock, folder_lock_file

log = logging.getLogger("hotbed.serving")


class TemporaryFolder:
    """A folder that is removed with this object, or when the process that made it ends.

    A forked child does not remove it. Folders that killed processes left are removed when the
    next folder with the same `prefix` is made.
    """

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        remove_abandoned(self.path.parent.glob(f"{prefix}*"))
        self._lock = SharedLock.of(self.path)  # a locked folder is not abandoned
        self._finalizer = weakref.finalize(self, _remove, self.path, os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder now."""
        self._finalizer()


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(folders: Iterable[Path]) -> None:
    """Remove the folders of this user whose writer was killed; other folders stay."""
    for folder in folders:
        with contextlib.suppress(OSError, PersistError):
            if _had_writer(folder):
                lock = FolderLock(folder)
                shutil.rmtree(folder, ignore_errors=True)
                lock.release()
                log.info("%s: removed; its writer ended without removing it", folder)


def _had_writer(folder: Path) -> bool:
    """Return whether a process of this user locked the folder; OSError without a lock file."""
    entry = folder.lstat()
    lock_entry = folder_lock_file(folder).lstat()
    is_own = stat.S_ISDIR(entry.st_mode) and entry.st_uid == os.geteuid()
    # a writer that starts has the lock before it writes its number into the file
    return is_own and stat.S_ISREG(lock_entry.st_mode) and lock_entry.st_size > 0
