# SPDX-License-Identifier: Apache-2.0
"""Following published versions: complete, in order, each once."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

from hotbed.errors import DeltaGap, ForkedLineage, FormatError, PersistError, StoreAway
from hotbed.files import Where
from hotbed.persist.chain import Lineage
from hotbed.persist.format import Reader, open_folder
from hotbed.persist.store import CheckpointStore, NewestState, number_of, open_store

log = logging.getLogger("hotbed.persist")


class Follower:
    """The versions that a publisher hands on: complete, in order, each once.

    `source`: the directory or URL of a `PublishDirectory`, or a `TopicFeed`. A gap or a fork is logged
    and kept in `told`; the next version that can be loaded whole recovers. Versions only grow:
    where the source goes back to an earlier one, that is logged and kept in `told` as well, and not
    handed on. Feed what comes to `Replica.apply`.

    Example:
        >>> for reader in Follower("published/clicks"):
        ...     replica.apply(reader)
    """

    def __init__(self, source: Where | VersionFeed, poll_seconds: float = 1.0) -> None:
        self._feed: VersionFeed = (
            source if isinstance(source, VersionFeed) else _DirectoryFeed(open_store(source))
        )
        self._poll_seconds = poll_seconds
        self._lineage = Lineage()
        self._newest: Reader | None = None  # what was handed on last
        self.told: list[PersistError] = []

    def __iter__(self) -> Iterator[Reader]:
        while True:
            yield from self.poll()
            time.sleep(self._poll_seconds)

    def poll(self) -> Iterator[Reader]:
        """What is new now, without waiting for more."""
        try:
            for folder in self._feed.arrivals():
                try:
                    reader = open_folder(self._feed.store, folder)
                except FormatError as error:  # its chain, or itself, is not (or no longer) there
                    self._tell(
                        DeltaGap(f"{folder}: it cannot be read with what it rests on — {error}")
                    )
                    return
                yield from self._advance(reader)
        except StoreAway as error:  # the next poll asks again
            self._tell(error)

    def close(self) -> None:
        """Let go of connections."""
        self._feed.close()

    def _advance(self, reader: Reader) -> Iterator[Reader]:
        if self._is_earlier(reader):
            self._tell(self._rolled_back(reader))
            return
        for number, link in enumerate(reader.links, 1):
            try:
                if self._lineage.accepts(link.manifest):
                    self._lineage.took(link.manifest)
                    self._newest = Reader(reader.links[:number])
                    yield self._newest
            except (DeltaGap, ForkedLineage) as error:
                self._tell(error)
                self._lineage.took(reader.manifest)  # it is whole: what follows rests on it
                self._newest = reader
                yield reader
                return

    def _is_earlier(self, reader: Reader) -> bool:
        """Whether the source went back: its newest version is in an earlier folder than the last
        one, and was taken or published before it."""
        last = self._newest
        if last is None or _number(reader) >= _number(last):
            return False  # of a source that began anew the numbers are low, and the moments late
        if self._lineage.was_taken(reader.manifest):
            return True
        published = reader.manifest.get("published")
        before = last.manifest.get("published")
        return published is not None and before is not None and published < before

    def _rolled_back(self, reader: Reader) -> PersistError:
        assert self._newest is not None
        return PersistError(
            f"{reader.folder}: versions only grow, got version {reader.manifest['version']} after "
            f"version {self._newest.manifest['version']}, which stays. Publish the earlier state "
            "again to return to it."
        )

    def _tell(self, error: PersistError) -> None:
        if not self.told or str(self.told[-1]) != str(error):  # a poll later it is the same
            log.warning("%s", error)
            self.told = [*self.told[-99:], error]


def _number(reader: Reader) -> int:
    return number_of(reader.links[-1].folder)


class VersionFeed(ABC):
    """Where published versions arrive. `store`: where they can be read."""

    store: CheckpointStore

    @abstractmethod
    def arrivals(self) -> Iterator[str]:
        """Folders in `store` of versions that are complete since the last call, in order."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections; the next call makes new ones."""


class _DirectoryFeed(VersionFeed):
    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self._seen = NewestState("", None)

    def arrivals(self) -> Iterator[str]:
        newest = self.store.newest_state()
        if newest is not None and newest != self._seen:
            yield newest.folder
            self._seen = newest  # one that could not be read comes again

    def close(self) -> None: ...
