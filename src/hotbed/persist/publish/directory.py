# SPDX-License-Identifier: Apache-2.0
"""Publishing versions in a directory or under a URL."""

from __future__ import annotations

import logging
from pathlib import Path

from hotbed.config import described
from hotbed.errors import FormatError
from hotbed.files import SharedLock, check_folder
from hotbed.persist.container.format import (
    CheckpointWriter,
    Link,
    Reader,
    Saved,
    highest_version,
    newest_link,
    refuse_states,
)
from hotbed.persist.container.retention import retain
from hotbed.persist.container.store import CheckpointStore, LocalStore, open_store
from hotbed.persist.publish.version import Publisher, opened, write_published

log = logging.getLogger("hotbed.persist")


@described
class PublishDirectory(Publisher):
    """Publish versions in a directory or under a URL, in the container of docs/format.md.

    A local folder is locked from the first version on, until the publisher is gone or the process
    ends: a publisher in another process gets a PersistError that names the folder. `keep`: number
    of fulls that are kept, with their deltas.

    Example: `hb.callbacks.Checkpoint("runs/clicks", publish=PublishDirectory("published/clicks"))`
    """

    def __init__(self, path: str | Path, keep: int = 2) -> None:
        self._path = path
        self._keep = keep
        self._lock: SharedLock | None = None

    def check_ready(self) -> None:
        """Raise an error if nothing can be published there."""
        check_folder(self._path, "PublishDirectory.path")
        open_store(self._path).newest_state()

    def newest_source(self) -> str | None:
        last = _last_version(open_store(self._path))
        return None if last is None else last.manifest.source

    def publish(self, saved: Saved | Reader, *, forced: str | None = None) -> Saved | None:
        reader = opened(saved, forced)
        store = open_store(self._path)
        last = _last_version(store)
        if self._lock is None and isinstance(store, LocalStore):
            self._lock = SharedLock.of(store.root)
            last = _last_version(store)  # another process may have published before the lock
        if last is not None and last.manifest.source == reader.manifest.digest:
            return None
        with CheckpointWriter(store) as writer:
            highest = highest_version(store)
            version = write_published(
                writer, reader, last, self.graph, highest=highest, forced=forced
            )
        if version.kind == "full":
            retain(store, self._keep)
        return version


def _last_version(store: CheckpointStore) -> Link | None:
    """Return the version published last; None, logged, if it is damaged: a new full recovers."""
    try:
        link = newest_link(store)
    except FormatError as error:
        log.warning("%s; publishing a full", error)
        return None
    refuse_states(link)
    return link
