# SPDX-License-Identifier: Apache-2.0
"""The rules of a parameter server, which the servers before it obey."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from hotbed.files import Where
from hotbed.serving.parameter_server import ParameterServer
from hotbed.serving.routes.rule import LogRule
from hotbed.serving.stores.base import ModelVersion, RoutesInForce

log = logging.getLogger("hotbed.serving")


class RowsRules:
    """See `routes.changing.RoutedProcesses`.

    Args:
        server: has the versions, and the rules in force.
    """

    def __init__(self, server: ParameterServer) -> None:
        self._server = server
        self.in_force = server.held.routes

    def is_answering(self, name: str) -> bool:
        """Return True: each call of a server reads the rule in force."""
        return True

    def newest(self, name: str) -> ModelVersion | None:
        """Return the version of a model that was loaded last."""
        return self._server.find(name)

    def digests(self, name: str) -> set[str]:
        """Return the digests of the versions that the rule in force names by their numbers."""
        return {version.digest for version in self._server.held.rule(name).versions.values()}

    def is_damaged(self, name: str) -> bool:
        """Return whether a version of the rule in force has damaged files."""
        return bool(self._server.held.damaged(name))

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
        log.info("model %s has revision %d of its rule", name, routes.revision)

    def check_log(self, rule: LogRule, where: str) -> None:
        """Accept each rule: it is for the logs of the servers before this one."""

    def note_problem(self, problem: str) -> None:
        """Nothing: the log has it."""
