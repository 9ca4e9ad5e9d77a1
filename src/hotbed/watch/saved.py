# SPDX-License-Identifier: Apache-2.0
"""Which states were saved, held and published, as their manifests say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hotbed.errors import FormatError
from hotbed.persist.container.format import open_link
from hotbed.persist.container.store import MANIFEST_FILE, LocalStore

MOST = 20
"""States that are shown, the newest ones."""


@dataclass(frozen=True)
class SavedVersion:
    """A state of a run, or a published version.

    Attributes:
        folder: its name.
        version: its number; None = its manifest is damaged.
        kind: full or delta.
        bytes: of its own files.
        written: when it was saved or published, in Unix seconds.
        rows: of all tables.
        source: of a published version, the digest of the state that it was made of.
        digest: of its manifest.
        held: why a gate did not publish it; empty = no gate held it.
        forced: why it was published all the same; "" = it was not.
        problem: why its manifest cannot be read.
    """

    folder: str
    version: int | None = None
    kind: str = ""
    bytes: int = 0
    written: float | None = None
    rows: int = 0
    source: str | None = None
    digest: str = ""
    held: Sequence[str] = ()
    forced: str = ""
    problem: str = ""


@dataclass(frozen=True)
class SavedState:
    """A state of a run and the version that was published of it; None = it was not published."""

    state: SavedVersion
    published: SavedVersion | None = None


class VersionList:
    """The versions in a folder; a manifest is read once.

    Args:
        root: the folder of states or of published versions.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._store = LocalStore(root)
        self._read: dict[tuple[str, int], SavedVersion] = {}  # by folder and time of its manifest

    def versions(self) -> list[SavedVersion]:
        """Return the newest versions, newest first."""
        current = {}
        for folder in reversed(self._store.folders()[-MOST:]):
            try:
                stat = (self.root / folder / MANIFEST_FILE).stat()
            except FileNotFoundError:  # retention has just removed it
                continue
            key = (folder, stat.st_mtime_ns)
            current[key] = self._read.get(key) or self._version(folder, stat.st_mtime)
        self._read = current
        return list(current.values())

    def _version(self, folder: str, written: float) -> SavedVersion:
        try:
            manifest = open_link(self._store, folder).manifest
        except FormatError as error:
            return SavedVersion(folder, written=written, problem=str(error))
        return SavedVersion(
            folder,
            manifest.version,
            manifest.kind,
            sum(entry.bytes for entry in manifest.files.values()),
            manifest.published or written,
            sum(table.rows for table in manifest.tables),
            manifest.source,
            manifest.digest,
            [entry.reason for entry in manifest.held or ()],
            manifest.forced or "",
        )


def paired(states: Sequence[SavedVersion], published: Sequence[SavedVersion]) -> list[SavedState]:
    """Return states with the versions that were published of them, newest first.

    Then follow versions whose state is gone: theirs has no folder.
    """
    by_source = {version.source: version for version in reversed(published)}  # the newest counts
    pairs = [SavedState(state, by_source.pop(state.digest, None)) for state in states]
    for version in reversed(by_source.values()):
        gone = replace(version, folder="", source=None, bytes=0, held=())
        pairs.append(SavedState(gone, version))
    return pairs[:MOST]
