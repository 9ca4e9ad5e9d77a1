# SPDX-License-Identifier: Apache-2.0
"""Following published versions: complete, in order, each once."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

from hotbed.errors import DeltaGap, ForkedLineage, FormatError, PersistError, StoreAway
from hotbed.files import Where
from hotbed.persist.container.format import Reader, open_folder
from hotbed.persist.container.store import CheckpointStore, NewestState, number_of, open_store
from hotbed.persist.state.chain import Lineage

_REMEMBERED_ERRORS = 100
log = logging.getLogger("hotbed.persist")


class VersionFeed(ABC):
    """Where published versions arrive. `store`: where they can be read."""

    store: CheckpointStore

    @abstractmethod
    def arrivals(self) -> Iterator[str]:
        """Yield the folders in `store` of versions that were completed since the last call."""

    @abstractmethod
    def close(self) -> None:
        """Close connections; the next call makes new ones."""


class Follower:
    """The versions of a publisher: complete, in order, each once.

    A gap or a fork is logged and kept in `errors`; the next version that can be loaded whole
    recovers. Versions only grow: if the source goes back to an earlier one, that is logged and kept
    in `errors` too, and the earlier version is not yielded. `Replica.apply` takes the versions.

    Attributes:
        away: why the source could not be read at the last poll: an object store that does not
            answer, or a folder that is gone. None = it was read.
        problem: why the newest version of the source is not the one yielded last. None = it is.
        errors: the newest ones.

    Args:
        source: the directory or URL of a `PublishDirectory`, or a `TopicFeed`.
        poll_seconds: seconds between two looks at the source.

    Example:
        >>> for reader in Follower("published/clicks"):
        ...     replica.apply(reader)
    """

    def __init__(self, source: Where | VersionFeed, poll_seconds: float = 1.0) -> None:
        if isinstance(source, VersionFeed):
            self._feed = source
        else:
            self._feed = _DirectoryFeed(source)
        self._poll_seconds = poll_seconds
        self._lineage = Lineage()
        self._newest: Reader | None = None  # the version yielded last
        self._problem = ""  # of the last poll
        self.away: StoreAway | None = None
        self.problem: PersistError | None = None
        self.errors: list[PersistError] = []

    def __iter__(self) -> Iterator[Reader]:
        while True:
            yield from self.poll()
            time.sleep(self._poll_seconds)

    def poll(self) -> Iterator[Reader]:
        """Yield the versions that are new now, without waiting for more."""
        problem_before = self._problem
        self._problem = ""
        self.away = None
        try:
            for folder in self._feed.arrivals():
                try:
                    reader = open_folder(self._feed.store, folder)
                except FormatError as error:  # it, or a part of its chain, is missing or damaged
                    gap = DeltaGap(f"{folder}: it cannot be read with its chain, got: {error}")
                    self.problem = gap
                    self._log(gap, problem_before)
                    return
                yield from self._advance(reader, problem_before)
        except StoreAway as error:  # the next poll asks again
            self.away = error
            self._log(error, problem_before)

    def close(self) -> None:
        """Close connections."""
        self._feed.close()

    def _advance(self, reader: Reader, problem_before: str) -> Iterator[Reader]:
        if self._is_earlier(reader):
            self.problem = self._rolled_back(reader)
            self._log(self.problem, problem_before)
            return
        self.problem = None
        if self._lineage.was_taken(reader.manifest):  # before versions of another run
            yield self._take(reader)
            return
        for number, link in enumerate(reader.links, 1):
            try:
                if not self._lineage.accepts(link.manifest):
                    continue
            except (DeltaGap, ForkedLineage) as error:
                self._log(error, problem_before)
                yield self._take(reader)  # it is whole: later versions rest on it
                return
            yield self._take(Reader(reader.links[:number]))

    def _take(self, reader: Reader) -> Reader:
        self._lineage.took(reader.manifest)
        self._newest = reader
        return reader

    def _is_earlier(self, reader: Reader) -> bool:
        """Return whether the source went back.

        Its newest version then is in an earlier folder than the last one, and was taken or
        published before it. A source that began anew has low numbers, but late times.
        """
        last = self._newest
        if last is None or _number(reader) >= _number(last):
            return False
        if self._lineage.was_taken(reader.manifest):
            return True
        published = reader.manifest.published
        before = last.manifest.published
        return published is not None and before is not None and published < before

    def _rolled_back(self, reader: Reader) -> PersistError:
        assert self._newest is not None
        return PersistError(
            f"{reader.folder}: versions only grow, got version {reader.manifest.version} after "
            f"version {self._newest.manifest.version}, which stays. Publish the earlier state "
            "again to return to it."
        )

    def _log(self, error: PersistError, problem_before: str) -> None:
        """Log and keep an error, once while it repeats at each poll."""
        self._problem = str(error)
        if self._problem == problem_before:
            return
        log.warning("%s", error)
        self.errors = [*self.errors, error][-_REMEMBERED_ERRORS:]


def _number(reader: Reader) -> int:
    return number_of(reader.newest_link.folder)


class _DirectoryFeed(VersionFeed):
    def __init__(self, source: Where) -> None:
        self.store = open_store(source)
        self._source = source
        self._last: NewestState | None = None

    def arrivals(self) -> Iterator[str]:
        newest = self.store.newest_state()
        if newest is None and self._last is not None:
            raise StoreAway(
                f"{self._source}: the versions that are followed are gone, got a missing or empty "
                "folder. Mount it again, or publish there; the version that is served stays."
            )
        if newest is not None and newest != self._last:
            yield newest.folder
            self._last = newest  # not reached if it could not be read: it is tried again

    def close(self) -> None: ...
