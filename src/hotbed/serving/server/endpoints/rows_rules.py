# SPDX-License-Identifier: Apache-2.0
"""The rules of a parameter server: it can pin versions, which the servers before it then have."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from hotbed.files import Where
from hotbed.serving.parameter_server import ParameterServer
from hotbed.serving.stores.base import ModelVersion
from hotbed.serving.stores.held import STABLE, RoutesInForce

log = logging.getLogger("hotbed.serving")


class RowsRules:
    """See `routes.changing.RoutedProcesses`.

    Args:
        server: has the versions, and the rules in force.
    """

    roles = frozenset({STABLE})

    def __init__(self, server: ParameterServer) -> None:
        self._server = server
        self.in_force = server.held.routes

    def is_answering(self, name: str) -> bool:
        """Return True: each call reads the version that is pinned."""
        return True

    def newest(self, name: str) -> ModelVersion | None:
        """Return the version of a model that was loaded last."""
        return self._server.find(name)

    def digests(self, name: str) -> set[str]:
        """Return the digest of the version that is pinned, if one is."""
        pinned = self._server.held.pinned(name)
        return set() if pinned is None else {pinned.digest}

    def obtain(self, name: str, number: int, sources: Sequence[Where]) -> str:
        """Hold a version for a rule that is to come, and return its key."""
        return self._server.obtain(name, number, sources, lambda version: None).key

    def prepare(self, name: str, keys: Collection[str]) -> None:
        """Open the versions of a rule that is to come; without keys, drop such versions."""
        if not keys:
            self._server.held.release(name)
        for key in keys:
            self._server.held.open(name, key)

    def put_in_force(self, name: str, routes: RoutesInForce) -> None:
        """Write the rule of a model, and answer by it."""
        self._server.held.put_in_force(name, routes)
        pinned = self._server.held.pinned(name)
        what = "the newest version" if pinned is None else f"version {pinned.version}"
        log.info("model %s answers with %s", name, what)

    def note_problem(self, problem: str) -> None:
        """Nothing: the log has it."""
