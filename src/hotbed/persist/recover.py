# SPDX-License-Identifier: Apache-2.0
"""Completing a first state after a kill, and going back to an earlier state."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hotbed.connectors import Journal
from hotbed.errors import ConfigError
from hotbed.files import Where, sync_folder
from hotbed.persist.chain import verify
from hotbed.persist.format import Reader, open_folder
from hotbed.persist.store import JOURNAL, LETTERS, MANIFEST, LocalStore, number_of, open_store

STREAM = "stream"
"""The name of a stream's position in a state."""

EPOCHS = "fit"
"""The name of a fit's position in a state: inside an epoch, or empty before the first."""

DEAD_LETTER_BYTES = "wall_dead_letter_bytes"
"""The name of the dead letters' length in a state: it is no part of the content digest."""

log = logging.getLogger("hotbed.persist")


def finish_first(where: Where) -> None:
    """Write CURRENT where the writer of the first checkpoint was killed before it could.

    Call it under the lock of the folder. Raises FormatError where that checkpoint is damaged.
    """
    store = open_store(where)
    folder = store.unpointed() if isinstance(store, LocalStore) else None
    if isinstance(store, LocalStore) and folder is not None:
        verify(store.path(folder))
        _point(store, folder)
        log.warning("%s: verified and made current; its writer was killed", store.place(folder))


def go_back(where: Where, number: int | None) -> dict[str, Any]:
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
            f"restore: works on local folders, got {where}. "
            f"In an object store, move newer states away: the last one with {MANIFEST} counts."
        )
    folder = f"checkpoint-{0 if number is None else number:08d}"
    if folder not in store.folders():
        choice = ", ".join(str(number_of(name)) for name in store.folders()) or "none"
        raise ConfigError(f"--state: not in {store.root}, got {number}. Choose one of: {choice}.")
    summary = verify(store.path(folder))
    reader = open_folder(store, folder)
    with _journal_of(store, reader) as journal:
        _point(store, folder)
        newer = [name for name in store.folders() if number_of(name) > number_of(folder)]
        for name in reversed(newer):  # deltas before what they rest on
            _set_aside(store, name)
        if journal is not None:
            journal.cut(_decided(reader))
            _cut_letters(store, reader)
    return {
        "folder": folder,
        "kind": summary["kind"],
        "version": summary["version"],
        "aside": newer,
    }


def _point(store: LocalStore, folder: str) -> None:
    manifest = bytes(store.read(f"{folder}/{MANIFEST}"))
    store.point(folder, hashlib.sha256(manifest).hexdigest())


def _set_aside(store: LocalStore, folder: str) -> None:
    aside = store.aside().root
    aside.mkdir(exist_ok=True)
    os.rename(store.root / folder, aside / folder)
    sync_folder(aside)
    sync_folder(store.root)


@contextlib.contextmanager
def _journal_of(store: LocalStore, reader: Reader) -> Iterator[Journal | None]:
    """The journal of a stream or a fit, which is the lock of its states; None for other states."""
    if not {STREAM, EPOCHS} & set(reader.manifest["positions"]):
        yield None
        return
    journal = Journal(store.root / JOURNAL)
    try:
        yield journal
    finally:
        journal.close()


def _decided(reader: Reader) -> dict[str, int]:
    """By topic, the number of the last decision that the state rests on."""
    positions = reader.manifest["positions"]
    position = positions[STREAM] if STREAM in positions else positions[EPOCHS]
    last = {"evict": int(reader.progress["run"]["step"])}
    if "rows" in position:
        last["cut"] = int(position["rows"])
    if "block" in (position.get("source") or {}):
        last["block"] = int(position["source"]["block"]) - 1
    elif "rows" in position:
        last["block"] = -1  # nothing was read yet
    return last


def _cut_letters(store: LocalStore, reader: Reader) -> None:
    """Move the dead letters of rows that are read again aside; old states hold no length."""
    letters = store.root / LETTERS
    length = reader.progress.get(DEAD_LETTER_BYTES)
    if length is None or not letters.exists() or letters.stat().st_size <= length:
        return
    later = letters.read_bytes()[length:]
    store.aside().root.mkdir(exist_ok=True)
    with open(store.aside().root / LETTERS, "ab") as file:
        file.write(later)
        file.flush()
        os.fsync(file.fileno())
    _truncate(letters, length)
    sync_folder(store.root)


def _truncate(path: Path, length: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(length)
        os.fsync(file.fileno())
