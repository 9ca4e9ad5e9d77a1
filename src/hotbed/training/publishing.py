# SPDX-License-Identifier: Apache-2.0
"""Publishing: the saved states of a run are handed to a publisher while training continues."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hotbed.errors import ConfigError, MissingExtra, PersistError
from hotbed.persist.format import Saved
from hotbed.persist.publish import Publisher
from hotbed.training.run import Run
from hotbed.training.stages.network import adapter_of

log = logging.getLogger("hotbed")


class Publishing:
    """Hands saved states to a publisher, one after the other, on a thread.

    Versions that cannot be published are logged; readers recover with the next full.
    """

    def __init__(self, publisher: Publisher, run: Run) -> None:
        self._publisher = publisher
        self._thread = ThreadPoolExecutor(1, "hotbed-publish")
        self._versions: list[Future[Any]] = []
        self._is_exported = self._export(run)

    def publish(self, run: Run, saved: Saved) -> None:
        """Publish a saved state, unless it lies before the first batch of a converted model."""
        self._log_errors()
        self._is_exported = self._is_exported or self._export(run)
        if self._is_exported:
            self._versions.append(self._thread.submit(self._publisher.publish, saved))

    def close(self) -> None:
        """Wait until all versions are published."""
        self._thread.shutdown()
        self._log_errors()

    def _export(self, run: Run) -> bool:
        """Give the publisher the graph for servers; return False if it needs a batch first."""
        adapter = adapter_of(run.model.network)
        if adapter is not None and not adapter.was_called:
            return False  # the state before the first batch is not published
        self._publisher.graph = _graph(run)
        return True

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
