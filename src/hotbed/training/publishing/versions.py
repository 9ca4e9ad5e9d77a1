# SPDX-License-Identifier: Apache-2.0
"""Publishing: the saved states of a run are handed to a publisher while training continues."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hotbed.errors import ConfigError, MissingExtra, PersistError
from hotbed.persist.container.format import Saved
from hotbed.persist.publish import Publisher
from hotbed.training.run import Run
from hotbed.training.writes import Writes

log = logging.getLogger("hotbed")


class Publishing:
    """Hands saved states to a publisher, one after the other, on a thread.

    Versions that cannot be published are logged; readers recover with the next full.
    """

    def __init__(self, publisher: Publisher, writes: Writes) -> None:
        self._publisher = publisher
        self._writes = writes
        self._thread = ThreadPoolExecutor(1, "hotbed-publish")
        self._versions: list[Future[Any]] = []
        self._is_exported = False

    def export(self, run: Run) -> None:
        """Give the publisher the graph for servers; until then nothing is published."""
        self._publisher.graph = _graph(run)
        self._is_exported = True

    def publish(self, saved: Saved, step: int) -> None:
        """Publish the saved state of a step, unless it lies before the graph."""
        self._log_errors()
        if self._is_exported:
            self._versions.append(self._thread.submit(self._publish, saved, step))

    def call(self, work: Callable[[], None]) -> None:
        """Do some work on the thread, after the versions before it."""
        self._versions.append(self._thread.submit(work))

    def _publish(self, saved: Saved, step: int) -> None:
        begin = time.perf_counter()
        with self._writes.watching():
            version = self._publisher.publish(saved)
        if version is None:  # an earlier process did
            self._writes.resume(saved, step)
        else:
            self._writes.add(version, step, time.perf_counter() - begin)

    def close(self) -> None:
        """Wait until all versions are published."""
        self._thread.shutdown()
        self._log_errors()

    def _log_errors(self) -> None:
        while self._versions and self._versions[0].done():
            error = self._versions.pop(0).exception()
            if error is not None:
                log.error("not published: %s", error)


def _graph(run: Run) -> Any:
    """Return the network as a graph for servers; None if it cannot be exported here."""
    try:
        return run.model.graph()
    except (ConfigError, PersistError, MissingExtra) as error:
        log.warning("published versions contain no graph, servers need an export: %s", error)
        return None
