# SPDX-License-Identifier: Apache-2.0
"""Fulls and the deltas on them: which follows which, and one full from a chain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hotbed.config import build
from hotbed.embedding.table import Table
from hotbed.errors import DeltaGap, ForkedLineage, FormatError, PersistError
from hotbed.files import Where
from hotbed.persist.container.format import CheckpointWriter, Link, Reader, Saved, open_checkpoint
from hotbed.persist.container.manifest import Manifest
from hotbed.persist.state.open_rows import read_open_rows, write_open_rows
from hotbed.persist.state.tables import check_rows, load_changes, write_merged

_REMEMBERED = 4096


class Lineage:
    """Which states a reader has taken, and which come next; see "Deltas" in docs/format.md.

    `digest`: of the newest state taken; None before the first.
    """

    def __init__(self) -> None:
        self.digest: str | None = None
        # digests of the newest state: a compacted full also has that of the delta it replaces
        self._same: set[str] = set()
        self._taken: dict[str, None] = {}

    def accepts(self, manifest: Manifest) -> bool:
        """Return whether a state is to be taken next; False if it was taken before.

        Raises:
            DeltaGap: the states before this delta are missing.
            ForkedLineage: the delta belongs to a run that branched off.
        """
        if manifest.digest in self._taken:
            return False
        if manifest.kind == "full" or manifest.parent in self._same:
            return True
        delta = f"delta {manifest.version}"
        parent = str(manifest.parent)[:12]
        if self.digest is None:
            raise DeltaGap(
                f"{delta}: there is no state yet to apply it to, got parent {parent}. "
                "Take the full of its chain first."
            )
        newest = self.digest[:12]
        missing = self._missing(manifest)
        if missing is None:
            raise ForkedLineage(
                f"{delta}: it belongs to a run that branched off, got parent {parent} after "
                f"{newest}. Take the next full of its run."
            )
        raise DeltaGap(
            f"{delta}: {missing} deltas before it are missing, got parent {parent} after "
            f"{newest}. Take them first, in order."
        )

    def _missing(self, manifest: Manifest) -> int | None:
        """Return the number of deltas between; None if the newest state is not in the chain."""
        for missing, link in enumerate(reversed(manifest.chain)):
            if link.digest in self._same:
                return missing
        return None

    def was_taken(self, manifest: Manifest) -> bool:
        """Return whether a state is an earlier one of those that were taken."""
        return manifest.digest in self._taken and manifest.digest != self.digest

    def took(self, manifest: Manifest) -> None:
        """Make a state the newest one taken."""
        self.digest = manifest.digest
        self._same = {manifest.digest}
        if manifest.compacted and manifest.parent is not None:
            self._same.add(manifest.parent)
        for link in manifest.chain:
            self._taken[link.digest] = None
        for digest in self._same:
            self._taken[digest] = None
        while len(self._taken) > _REMEMBERED:
            del self._taken[next(iter(self._taken))]


class Replica:
    """Tables that follow a run: each full and delta once, in order, checked before tables change.

    Ids that wait for admission are not followed: a replica is read, and does not learn.

    Args:
        tables: the tables by name; None: they are made from the description in the first state.

    Example:
        >>> replica = Replica()
        >>> for reader in Follower("published"):
        ...     replica.apply(reader)
    """

    def __init__(self, tables: Mapping[str, Table] | None = None) -> None:
        self.tables: dict[str, Table] = dict(tables or {})
        self.lineage = Lineage()

    def apply(self, state: Reader | Link) -> bool:
        """Take a full, or the delta that follows next; return False if it was taken before.

        If the delta of a Reader does not follow, its whole chain is taken.

        Raises:
            DeltaGap: the deltas before a Link are missing.
            ForkedLineage: a Link belongs to a run that branched off.
            FormatError: a file is bad; the message names it. The tables are then as before, unless
                the file was removed or changed after it was checked; then a full or a whole chain
                is taken next.
        """
        link = state.newest_link if isinstance(state, Reader) else state
        links = [link]
        try:
            if not self.lineage.accepts(link.manifest):
                return False
        except (DeltaGap, ForkedLineage):
            if not isinstance(state, Reader):
                raise
            links = list(state.links)
        for link in links:
            link.verify()
        try:
            for link in links:
                self._take(link)
        except FormatError:
            self.lineage = Lineage()
            raise
        return True

    def _take(self, link: Link) -> None:
        for entry in link.manifest.tables:
            name = entry.name
            if name not in self.tables:
                self.tables[name] = build(entry.config, Table, f"tables.{name}")
            table = self.tables[name]
            if link.manifest.kind == "full":
                table.clear()
            load_changes(link, name, table)
            table.load_scalars(entry.scalars)
            check_rows(link, name, len(table))
        self.lineage.took(link.manifest)


def compact(where: Where) -> Saved | None:
    """Make a full of the newest state under `where`, with the same content digest.

    The chain stays until retention removes it, so states that rest on it can still be read.
    Followers take the full or the chain.

    Returns:
        The full; None if the newest state is a full already.
    """
    reader = open_checkpoint(where)
    if len(reader.links) == 1:
        return None
    reader.verify()
    newest = reader.newest_link
    manifest = newest.manifest
    with CheckpointWriter(reader.store) as writer:
        row_files = {part.file for entry in manifest.tables for part in entry.all_parts}
        rows = read_open_rows(reader)
        if rows is not None and manifest.open_rows is not None:
            row_files.update(manifest.open_rows.files.values())
            manifest = replace(manifest, open_rows=write_open_rows(writer, rows))
        for name in newest.manifest.files:
            if name not in row_files:
                with newest.open(name) as file:
                    writer.copy(name, file)
        tables = []
        for number, name in enumerate(reader.table_names):
            tables.append(write_merged(writer, number, reader, name))
        full = replace(
            manifest,
            kind="full",
            parent=newest.manifest.digest,
            chain=(),
            compacted=True,
            tables=tuple(tables),
        )
        latest = reader.store.newest_state()
        if latest is None or latest.folder != newest.folder:
            raise PersistError(
                f"{where}: another state became the newest meanwhile, got {latest}. Compact again."
            )
        return writer.commit(full)
