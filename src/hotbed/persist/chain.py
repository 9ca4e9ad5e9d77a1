# SPDX-License-Identifier: Apache-2.0
"""Fulls and the deltas on them: which follows which, which stay, and one full from a chain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotbed.config import build
from hotbed.embedding.table import Table
from hotbed.errors import DeltaGap, ForkedLineage, PersistError
from hotbed.files import Where
from hotbed.persist.format import (
    CheckpointWriter,
    Link,
    Reader,
    Saved,
    open_checkpoint,
    open_folder,
    open_link,
)
from hotbed.persist.store import CheckpointStore, number_of
from hotbed.persist.tables import settle_table, write_merged

_REMEMBERED = 4096


class Lineage:
    """Which states somebody has taken, and which come next; the rules stand in docs/format.md under
    "Deltas".

    `digest`: of the state at hand; None = none yet.
    """

    def __init__(self) -> None:
        self.digest: str | None = None
        # digests of the state at hand: a compacted full is its parent too
        self._same: set[str] = set()
        self._taken: dict[str, None] = {}

    def accepts(self, manifest: Mapping[str, Any]) -> bool:
        """Whether this state is to be taken next; False = it was taken before. DeltaGap,
        ForkedLineage where it cannot be.
        """
        digest = manifest["digest"]
        version = manifest["version"]
        if digest in self._taken:
            return False
        if manifest["kind"] == "full" or manifest["parent"] in self._same:
            return True
        chain = [link["digest"] for link in manifest["chain"]]
        if self.digest is None:
            raise DeltaGap(
                f"delta {version}: there is no state yet to apply it to — received parent "
                f"{manifest['parent'][:12]} — "
                "take the full of its chain first"
            )
        if self._same & set(chain):
            missing = len(chain) - 1 - max(n for n, one in enumerate(chain) if one in self._same)
            raise DeltaGap(
                f"delta {version}: {missing} deltas before it are missing — received parent "
                f"{manifest['parent'][:12]} on {self.digest[:12]} — take them first, in order"
            )
        raise ForkedLineage(
            f"delta {version}: it belongs to a run that branched off — received parent "
            f"{manifest['parent'][:12]} on "
            f"{self.digest[:12]} — take the next full of its run"
        )

    def was_taken(self, manifest: Mapping[str, Any]) -> bool:
        """Whether this state was at hand before."""
        return manifest["digest"] in self._taken and manifest["digest"] != self.digest

    def took(self, manifest: Mapping[str, Any]) -> None:
        """The state of `manifest` is now at hand."""
        self.digest = digest = str(manifest["digest"])
        self._same = {digest, manifest["parent"]} if manifest.get("compacted") else {digest}
        for one in [*(link["digest"] for link in manifest.get("chain", ())), *self._same]:
            self._taken[one] = None
        while len(self._taken) > _REMEMBERED:
            del self._taken[next(iter(self._taken))]


class Replica:
    """Tables that follow a run: each full and delta once, in order, checked before anything
    changes.

    `tables`: made from the first state's description where none are given. Ids that wait for
    admission are not followed: a replica is read, and does not learn.

    Example:
        >>> replica = Replica()
        >>> for reader in Follower("published"):
        ...     replica.apply(reader)
    """

    def __init__(self, tables: Mapping[str, Table] | None = None) -> None:
        self.tables: dict[str, Table] = dict(tables or {})
        self.lineage = Lineage()

    def apply(self, state: Reader | Link) -> bool:
        """Take a state: a full, or the one delta that follows. False where it was taken before.

        A Reader whose whole chain is there is taken whole where its delta alone does not fit.
        Raises DeltaGap and ForkedLineage for a Link that does not fit, FormatError naming a bad
        file; the tables are then as before.
        """
        link = state.links[-1] if isinstance(state, Reader) else state
        try:
            if not self.lineage.accepts(link.manifest):
                return False
            links = [link]
        except (DeltaGap, ForkedLineage):
            if not isinstance(state, Reader):
                raise
            links = list(state.links)
        for one in links:
            one.verify()
        for one in links:
            self._take(one)
        return True

    def _take(self, link: Link) -> None:
        for entry in link.manifest["tables"]:
            name = entry["name"]
            if name not in self.tables:
                self.tables[name] = build(dict(entry["config"]), Table, f"tables.{name}")
            table = self.tables[name]
            if link.manifest["kind"] == "full":
                table.clear()
            for batch in link.parts(name, "removed"):
                table.remove(batch.column("id"))
            table.load(link.parts(name))
            settle_table(table, entry, link)
        self.lineage.took(link.manifest)


def retain(store: CheckpointStore, keep: int) -> None:
    """Remove all but the newest `keep` fulls, the deltas that rest on them, and what the newest
    state needs.
    """
    newest = store.newest_state()
    if newest is None:
        return
    needed = {link.folder for link in open_folder(store, newest.folder).links}
    folders = store.folders()
    bases = {folder: _base(store, folder) for folder in folders}
    kept = [folder for folder in folders if bases[folder] == folder][-keep:]
    for folder in reversed(folders):  # deltas before what they rest on
        late = number_of(folder) > number_of(newest.folder)
        unknown = bases[folder] is None and number_of(folder) > number_of(kept[0])
        if not (late or unknown or folder in needed or bases[folder] in kept):
            store.remove(folder)


def _base(store: CheckpointStore, folder: str) -> str | None:
    """The full that a checkpoint rests on, itself for a full; None where its manifest cannot be
    read.
    """
    try:
        chain = open_link(store, folder).manifest.get("chain")
    except PersistError:
        return None
    return str(chain[0]["folder"]) if chain else folder


def compact(where: Where) -> Saved | None:
    """Make a full of the newest state under `where`, of the same content digest; None where it is a
    full already.

    The chain stays until retention gives it up, so what rests on it goes on; a follower takes
    either.
    """
    reader = open_checkpoint(where)
    if len(reader.links) == 1:
        return None
    reader.verify()
    with CheckpointWriter(reader.store) as writer:
        newest = reader.links[-1]
        named = {part["file"] for entry in newest.manifest["tables"] for part in all_parts(entry)}
        for name in newest.manifest["files"]:
            if name not in named:
                writer.write(name, newest.read(name))
        tables = [
            write_merged(writer, number, reader, name)
            for number, name in enumerate(reader.table_names)
        ]
        dropped = ("format", "format_version", "files", "digest")
        members = {name: value for name, value in newest.manifest.items() if name not in dropped}
        link = {"kind": "full", "parent": newest.manifest["digest"], "chain": [], "compacted": True}
        if (latest := reader.store.newest_state()) is None or latest.folder != newest.folder:
            raise PersistError(
                f"{where}: another became newest meanwhile — received {latest} — compact again"
            )
        return writer.commit({**members, **link, "tables": tables})


def all_parts(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*entry["parts"], *entry.get("removed", ())]
