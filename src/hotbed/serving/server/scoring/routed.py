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
from hotbed.serving.routes.rule import NEWEST, ROLES
from hotbed.serving.server.scoring.model import Model
from hotbed.serving.session import InferenceSession
from hotbed.serving.stores.base import ModelVersion
from hotbed.serving.stores.following import KeepsOn
from hotbed.serving.stores.held import HeldVersions, RoutesInForce
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

    roles = ROLES

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
        versions = {key: store.open(name, key) for key in sorted(set(keys))}
        self._named(name).prepare(versions)

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
        model = self._named(name)
        with model.composing:
            if model.wanted:
                self._look(model)

    def _look(self, model: Model) -> None:
        """Answer by the rule in force; on an error, what was served stays."""
        store = self._server.held
        problem = ""
        try:
            in_force = store.routes(model.name)
            if in_force is not None:
                model.route(in_force, partial(store.open, model.name))
        except HotbedError as error:
            problem = f"its rule is not in force: {error}"
            if problem != model.routing_problem:
                log.error("model %s: %s", model.name, problem)
        model.routing_problem = problem
