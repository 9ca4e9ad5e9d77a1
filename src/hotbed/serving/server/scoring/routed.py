# SPDX-License-Identifier: Apache-2.0
"""The rules by which the versions of models answer, as the folder of rows holds them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from hotbed.errors import HotbedError
from hotbed.files import Where
from hotbed.persist.container.format import Reader
from hotbed.serving.routes.rule import NEWEST
from hotbed.serving.server.scoring.model import Model
from hotbed.serving.session import InferenceSession
from hotbed.serving.stores.base import ModelVersion, RoutesInForce
from hotbed.serving.stores.following import KeepsOn
from hotbed.serving.stores.held import HeldVersions
from hotbed.serving.stores.mapped import MappedVersion

log = logging.getLogger("hotbed.serving")


class VersionLoader(Protocol):
    """The part of a parameter server that `Models` uses."""

    @property
    def held(self) -> HeldVersions: ...
    def obtain(
        self, name: str, number: int, sources: Sequence[Where], accept: Callable[[Any], object]
    ) -> MappedVersion: ...
    def load(
        self, name: str, source: Where | Reader, accept: Callable[[Any], object]
    ) -> ModelVersion: ...
    def unload(self, name: str) -> None: ...
    def find(self, name: str) -> ModelVersion | None: ...
    def damaged(self, name: str) -> set[str]: ...
    def check(self, name: str, is_wanted: KeepsOn = ...) -> set[str]: ...


class LocalRules:
    """The rules of the models of this process. See `routes.changing.RoutedProcesses`.

    Args:
        server: has the versions, and the rules in force.
        named: returns a model of this process.
        models: returns all of them.
    """

    def __init__(
        self,
        server: VersionLoader,
        named: Callable[[str], Model],
        models: Callable[[], Iterator[Model]],
    ) -> None:
        self._server = server
        self._named = named
        self._models = models

    def in_force(self, name: str) -> RoutesInForce | None:
        """Return the rule of a model that is in force."""
        return self._server.held.routes(name)

    def is_answering(self, name: str) -> bool:
        """Return whether this process answers by the rule of a model that is in force.

        An unloaded model has no answers; its next load looks at the rule.
        """
        model = self._named(name)
        return not model.wanted or model.routing.in_force == self.in_force(name)

    def newest(self, name: str) -> ModelVersion | None:
        """Return the version of a model that was loaded last."""
        served = self._named(name).routing.roles.get(NEWEST)
        return None if served is None else served.version

    def digests(self, name: str) -> set[str]:
        """Return the digests of the versions that the rule in force names by their numbers."""
        return self._named(name).digests

    def is_damaged(self, name: str) -> bool:
        """Return whether a version of the rule in force has damaged files."""
        return bool(self._server.held.damaged(name))

    def obtain(self, name: str, number: int, sources: Sequence[Where]) -> str:
        """Hold a version for a rule that is to come, and return its key.

        Raises what `ParameterServer.obtain` raises.
        """
        return self._server.obtain(name, number, sources, InferenceSession).key

    def prepare(self, name: str, keys: Collection[str]) -> None:
        """Warm up the versions of a rule that is to come; without keys, drop such versions."""
        store = self._server.held
        if not keys:
            store.release(name)
        model = self._named(name)
        model.prepared = model.warm(keys, partial(store.open, name))

    def put_in_force(self, name: str, routes: RoutesInForce) -> None:
        """Write the rule of a model, and answer by it."""
        self.write(name, routes)
        self.look_at(name)

    def write(self, name: str, routes: RoutesInForce) -> None:
        """Write the rule of a model, by which processes answer once they look at it."""
        self._server.held.put_in_force(name, routes)

    def note_problem(self, problem: str) -> None:
        """Report why the newest file of rules is not in force; "" = it is."""
        for model in self._models():
            model.routes_problem = problem

    def look_at(self, name: str) -> None:
        """Answer by the rule of a model that is in force, if the model is wanted."""
        store = self._server.held
        answer_by(self._named(name), partial(store.routes, name), partial(store.open, name))


def answer_by(
    model: Model,
    find: Callable[[], RoutesInForce | None],
    open_version: Callable[[str], ModelVersion],
) -> None:
    """Answer by the rule in force, if the model is wanted; on an error, what was served stays.

    Args:
        model: the model.
        find: returns the rule in force; None = there is none.
        open_version: returns the version with a key of the rule.
    """
    if not model.wanted:
        return
    problem = ""
    try:
        in_force = find()
        if in_force is not None and in_force != model.routing.in_force:
            versions = model.warm(in_force.keys.values(), open_version)
            with model.composing:
                if model.wanted and find() == in_force:  # no other rule came meanwhile
                    model.route(in_force, versions)
    except HotbedError as error:
        problem = f"its rule is not in force: {error}"
        if problem != model.routing_problem:
            log.error("model %s: %s", model.name, problem)
    model.routing_problem = problem
