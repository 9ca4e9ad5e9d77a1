# SPDX-License-Identifier: Apache-2.0
"""Watch a file of rules, and put its rules in force in all processes of a server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from hotbed.config import did_you_mean
from hotbed.errors import ConfigError, HotbedError, PersistError
from hotbed.files import Where
from hotbed.serving.routes.leases import Leases
from hotbed.serving.routes.rule import NEWEST, LogRule, ModelRule, Routes, read_routes
from hotbed.serving.routes.split import check_column
from hotbed.serving.stores.base import ModelVersion, RoutesInForce

log = logging.getLogger("hotbed.serving")
WATCH_SECONDS = 0.2  # between looks at the file
_RETRY_SECONDS = 2.0  # after which a rule that could not be put in force is tried again


class RoutedProcesses(Protocol):
    """The processes of a server, all of which a rule reaches."""

    def in_force(self, name: str) -> RoutesInForce | None: ...
    def is_answering(self, name: str) -> bool: ...
    def digests(self, name: str) -> set[str]: ...
    def is_damaged(self, name: str) -> bool: ...
    def obtain(self, name: str, number: int, sources: Sequence[Where]) -> str: ...
    def newest(self, name: str) -> ModelVersion | None: ...
    def prepare(self, name: str, keys: Collection[str]) -> None: ...
    def put_in_force(self, name: str, routes: RoutesInForce) -> None: ...
    def note_problem(self, problem: str) -> None: ...


class RouteWatcher:
    """Puts the rules of a file in force whenever its revision grows.

    All processes warm up the versions of all rules; then each answers by them. If anything is
    wrong, the rules in force stay, and the problem is logged and reported. A version of a rule in
    force that has damaged files is written anew from its source.

    Args:
        path: the file.
        sources: where the versions of each model lie; other models cannot have a rule.
        processes: the processes that answer.
        leases: keep the versions of rules where they are published.
        check_log: raises ConfigError for what the request log of the processes cannot do.
    """

    def __init__(
        self,
        path: str | Path,
        sources: Mapping[str, Sequence[Where]],
        processes: RoutedProcesses,
        leases: Leases,
        check_log: Callable[[LogRule, str], None],
    ) -> None:
        self._path = Path(path)
        self._sources = sources
        self._processes = processes
        self._leases = leases
        self._check_log = check_log
        self._seen: bytes | None = None  # the content at the last look
        self._settled: bytes | None = None  # the content that is in force
        self._retry_at = 0.0
        self._problem = ""

    def step(self) -> None:
        """Look at the file once.

        A content counts once two looks have seen it: a file may be written in several steps.
        """
        content = self._content()
        is_new = content != self._seen
        self._seen = content
        if is_new:
            self._retry_at = 0.0
        elif time.monotonic() >= self._retry_at and self._is_due(content):
            self._try(content)
        for name in self._sources:
            self._leases.hold(name, self._processes.digests(name))

    def start(self) -> None:
        """Put the rules of the file in force before the first request."""
        self._seen = self._content()
        self._try(self._seen)

    def _is_due(self, content: bytes | None) -> bool:
        """Return whether a content is not in force yet, or a version of its rules is damaged."""
        return content != self._settled or any(map(self._processes.is_damaged, self._sources))

    def _content(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except OSError:
            return None

    def _try(self, content: bytes | None) -> None:
        """Put the content of the file in force, or report why not."""
        is_in_force = content == self._settled and content is not None  # a version is damaged
        try:
            self._apply(read_routes(self._path))
        except Exception as error:  # the thread goes on
            problem = f"{self._path}: its rules are not in force: {error}"
            if is_in_force:
                problem = f"{self._path}: a damaged version of its rules stays: {error}"
            else:
                self._settled = None
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            if problem != self._problem:
                is_known = isinstance(error, (OSError, HotbedError))
                log.error("%s", problem, exc_info=None if is_known else error)
                self._processes.note_problem(problem)
            self._problem = problem
            return
        self._settled = content
        if self._problem:
            self._processes.note_problem("")
        self._problem = ""

    def _apply(self, routes: Routes) -> None:
        for name in routes.models:
            if name not in self._sources:
                raise ConfigError(
                    f"routes.models.{name}: unknown model, or one of a parameter server elsewhere, "
                    f"got {name!r}. {did_you_mean(name, self._sources)}"
                )
        rules = {name: routes.models.get(name, ModelRule()) for name in self._sources}
        for name, rule in rules.items():  # also those in force: a restart may have ended the log
            if rule.log is not None:
                self._check_log(rule.log, f"routes.models.{name}.log")
        before = {name: self._processes.in_force(name) for name in rules}
        self._check_revision(routes.revision, rules, before)
        changed = {}
        for name, rule in rules.items():
            if _differs(before[name], rule) or self._needs_versions(name):
                changed[name] = rule
        in_force = {}
        try:
            for name, rule in changed.items():
                in_force[name] = RoutesInForce(
                    routes.revision, rule.to_json(), self._keys(name, rule)
                )
                self._processes.prepare(name, list(in_force[name].keys.values()))
        except BaseException:
            for name in changed:
                self._processes.prepare(name, ())
            raise
        for name, routes_before in before.items():
            if name in in_force:
                self._processes.put_in_force(name, in_force[name])
            elif routes_before is not None and routes_before.revision != routes.revision:
                renumbered = replace(routes_before, revision=routes.revision)
                self._processes.put_in_force(name, renumbered)
        log.info("%s: revision %d is in force", self._path, routes.revision)

    def _needs_versions(self, name: str) -> bool:
        """Return whether the versions of a rule in force do not answer, or are damaged."""
        processes = self._processes
        return not processes.is_answering(name) or processes.is_damaged(name)

    def _check_revision(
        self,
        revision: int,
        rules: Mapping[str, ModelRule],
        before: Mapping[str, RoutesInForce | None],
    ) -> None:
        """Raise ConfigError for a revision that is not above those in force, over restarts, too."""
        for name, routes in before.items():
            if routes is None or revision > routes.revision:
                continue
            if revision < routes.revision:
                raise ConfigError(
                    f"routes.revision: revisions only grow, got {revision} after "
                    f"{routes.revision}. Write {routes.revision + 1} or more."
                )
            if _differs(routes, rules[name]):
                raise ConfigError(
                    f"routes.revision: this revision is in force with another rule of model "
                    f"{name!r}, got {revision} again. Write {revision + 1} or more."
                )

    def _keys(self, name: str, rule: ModelRule) -> dict[str, str]:
        """Hold the versions that a rule names, and return their keys by role."""
        where = f"routes.models.{name}"
        newest = self._processes.newest(name)
        if rule.canary is not None:
            if newest is None:
                raise PersistError(
                    f"{where}: no version of the model is loaded yet, got a rule with a canary. "
                    "The rule is in force once one is."
                )
            check_column(newest.schema, rule.canary, where)
        if rule.log is not None and newest is not None:
            _check_logged(rule.log, newest, where)
        keys = {}
        for role, version in rule.versions().items():
            if version != NEWEST:
                assert isinstance(version, int)
                keys[role] = self._processes.obtain(name, version, self._sources[name])
        return keys


def _check_logged(rule: LogRule, newest: ModelVersion, where: str) -> None:
    """Raise ConfigError for a column that the newest version does not have: it would be logged."""
    columns = newest.schema.raw_columns(labels=False)
    columns += [feature.source for feature in newest.schema.kept_features]
    for key, names in (("omit", rule.omit), ("hash", rule.hash)):
        for name in names:
            if name not in columns:
                raise ConfigError(
                    f"{where}.log.{key}: the model has no such input, got {name!r}. "
                    f"{did_you_mean(name, columns)}"
                )


def _differs(routes: RoutesInForce | None, rule: ModelRule) -> bool:
    """Return whether a rule is another one than that in force."""
    plain = rule.to_json()
    return plain != ({} if routes is None else routes.rule)
