# SPDX-License-Identifier: Apache-2.0
"""Going back to an earlier state, and completing the first one after a kill."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

from hotbed.connectors import Journal
from hotbed.connectors.position import decisions_of
from hotbed.errors import ConfigError
from hotbed.files import Where, append_bytes, sync_folder, truncate_file, writing
from hotbed.persist.container.format import Reader, open_folder
from hotbed.persist.container.retention import newest_good
from hotbed.persist.container.store import (
    JOURNAL,
    LETTERS,
    MANIFEST_FILE,
    CheckpointStore,
    LocalStore,
    aside_of,
    number_of,
    open_store,
)
from hotbed.persist.state.resume import DEAD_LETTER_BYTES, EPOCHS, STREAM
from hotbed.persist.upkeep.inspect import verify

log = logging.getLogger("hotbed.persist")


def finish_first(where: Where) -> None:
    """Write CURRENT if the writer of the first checkpoint was killed before it could.

    Call it under the lock of the folder.

    Raises:
        FormatError: that checkpoint is damaged.
    """
    store = open_store(where)
    if not isinstance(store, LocalStore):
        return
    folder = store.unpointed()
    if folder is not None:
        verify(store.path(folder))
        _point(store, folder)
        log.warning("%s: verified and made current; its writer was killed", store.place(folder))


def roll_back(where: Where, number: int | None) -> dict[str, Any]:
    """Make state `number` under `where` the newest one, so that a stream resumes there.

    The state is verified with its chain. Newer states move to the folder `aside`. The journal and
    the dead letters lose what came after the state. Later states get numbers above every number
    used before. After a kill on the way, call it again.

    Returns:
        `{"folder", "kind", "version", "aside"}`; `aside`: the names of the states that moved.

    Raises:
        ConfigError: there is no such state, or `where` is an object store.
        FormatError: the state or its chain is not complete.
        PersistError: another run holds the lock.
    """
    store = open_store(where)
    if not isinstance(store, LocalStore):
        raise ConfigError(
            f"rollback: works on local folders, got {where}. "
            f"In an object store, move newer states away: the last one with {MANIFEST_FILE} counts."
        )
    folder = _chosen(store, number)
    summary = verify(store.path(folder))
    reader = open_folder(store, folder)
    with _journal_of(store, reader) as journal:
        _point(store, folder)
        newer = [name for name in store.folders() if number_of(name) > number_of(folder)]
        for name in reversed(newer):  # deltas before what they rest on
            _set_aside(store, name)
        if journal is not None:
            journal.cut(_decided(reader, journal.topics))
            _cut_letters(store, reader)
    return {
        "folder": folder,
        "kind": summary["kind"],
        "version": summary["version"],
        "aside": newer,
    }


def number_of_good(where: Where) -> int:
    """Return the number of the newest state under `where` that no gate held.

    Raises:
        ConfigError: there is none.
    """
    return newest_good(open_store(where))


def open_state(where: Where, number: int) -> Reader:
    """Return state `number` under `where` with its chain.

    Raises:
        ConfigError: there is no such state.
        FormatError: the state or its chain is not complete.
    """
    store = open_store(where)
    return open_folder(store, _chosen(store, number))


def _chosen(store: CheckpointStore, number: int | None) -> str:
    """Return the folder of state `number`; ConfigError with all numbers for an unknown one."""
    numbers = [number_of(folder) for folder in store.folders()]
    if number in numbers:
        return store.folders()[numbers.index(number)]
    choice = ", ".join(str(number) for number in numbers) or "none"
    if number is None:
        raise ConfigError(
            f"--state: rollback needs the number of a state, got none. Choose one of: {choice}."
        )
    raise ConfigError(f"--state: not in {store.place('')}, got {number}. Choose one of: {choice}.")


def _point(store: LocalStore, folder: str) -> None:
    manifest = store.read(f"{folder}/{MANIFEST_FILE}")
    with writing(store.place("")):
        store.point(folder, hashlib.sha256(manifest).hexdigest())


def _set_aside(store: LocalStore, folder: str) -> None:
    aside = aside_of(store).root
    aside.mkdir(exist_ok=True)
    os.rename(store.root / folder, aside / folder)
    sync_folder(aside)
    sync_folder(store.root)


@contextlib.contextmanager
def _journal_of(store: LocalStore, reader: Reader) -> Iterator[Journal | None]:
    """Open the journal of a stream or a fit, the lock of its states; None for other states."""
    if not {STREAM, EPOCHS} & set(reader.manifest.positions):
        yield None
        return
    journal = Journal(store.root / JOURNAL)
    try:
        yield journal
    finally:
        journal.close()


def _decided(reader: Reader, topics: Iterable[str]) -> dict[str, int]:
    """Return by topic the number of the last decision that the state rests on."""
    positions = reader.manifest.positions
    position = positions[STREAM] if STREAM in positions else positions[EPOCHS]
    last = {"evict": int(reader.progress["run"]["step"])}
    if "rows" in position:
        last["cut"] = int(position["rows"])
        # of blocks that the position does not name nothing was read yet
        last |= {topic: -1 for topic in topics if topic.partition(".")[0] == "block"}
    source = position.get("source") or {}
    if "block" in source:
        last |= {topic: number - 1 for topic, number in decisions_of(source).items()}
    return last


def _cut_letters(store: LocalStore, reader: Reader) -> None:
    """Move the dead letters of rows that are read again aside; old states hold no length."""
    letters = store.root / LETTERS
    length = reader.progress.get(DEAD_LETTER_BYTES)
    if length is None or not letters.exists() or letters.stat().st_size <= length:
        return
    aside = aside_of(store).root
    aside.mkdir(exist_ok=True)
    append_bytes(aside / LETTERS, letters.read_bytes()[length:])
    truncate_file(letters, length)
    sync_folder(store.root)
