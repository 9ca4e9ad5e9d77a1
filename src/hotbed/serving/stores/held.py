# SPDX-License-Identifier: Apache-2.0
"""The versions that the rule of a model names: they stay in the served folder beside the newest.

The file ROUTES beside CURRENT holds the rule in force. Its one writer replaces it as a whole; any
process may read it.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hotbed.errors import FormatError
from hotbed.files import new_file, writing
from hotbed.serving.stores.base import RoutesInForce
from hotbed.serving.stores.mapped import MappedVersion, ModelFolder

log = logging.getLogger("hotbed.serving")
STABLE = "stable"
"""The role of the version that answers in general."""
_ROUTES_FILE = "ROUTES"


@dataclass(frozen=True)
class OpenRule:
    """The rule of a model with its versions, open.

    Attributes:
        routes: the rule in force; None = none was ever in force.
        versions: the versions that it names, by key.
        before: those of the rule before, with which requests under way began.
    """

    routes: RoutesInForce | None = None
    versions: Mapping[str, MappedVersion] = field(default_factory=dict)
    before: Mapping[str, MappedVersion] = field(default_factory=dict)

    @property
    def pinned(self) -> MappedVersion | None:
        """The version that is pinned; None = the newest one answers in general."""
        key = None if self.routes is None else self.routes.keys.get(STABLE)
        return None if key is None else self.versions[key]


class HeldVersions:
    """The versions of each model in a served folder that its rule names, or that one is to name.

    Args:
        root: the served folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._ruling = threading.Lock()  # held while a rule is replaced or read
        self._claimed = dict[str, dict[str, MappedVersion]]()
        self._open = dict[str, dict[str, MappedVersion]]()
        self._rules = dict[str, OpenRule]()
        self._before = dict[str, Mapping[str, MappedVersion]]()
        self._damaged = dict[str, dict[str, set[str]]]()

    def routes(self, name: str) -> RoutesInForce | None:
        """Return the rule of a model that is in force; None if there is none.

        Raises FormatError for a file that is torn.
        """
        path = ModelFolder(self._root, name).path / _ROUTES_FILE
        try:
            return RoutesInForce.from_json(json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FormatError(
                f"{path}: torn or changed, got {error!r}. Remove it, and write the file of routes "
                "with a higher revision."
            ) from error

    def put_in_force(self, name: str, routes: RoutesInForce) -> None:
        """Replace the rule of a model; the versions that were claimed for others may leave.

        Raises NotWritten where the disk refuses.
        """
        path = ModelFolder(self._root, name).path / _ROUTES_FILE
        with self._ruling:
            with writing(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
                with new_file(path) as file:
                    file.write(json.dumps(routes.to_json()).encode())
            before = self._rules.pop(name, None)
            if before is not None:
                self._before[name] = before.versions
        self.release(name)

    def rule(self, name: str) -> OpenRule:
        """Return the rule of a model with its versions, for the process that writes rules.

        Raises FormatError where the rule or a version is torn.
        """
        with self._ruling:
            rule = self._rules.get(name)
            if rule is None:
                routes = self.routes(name)
                keys = set() if routes is None else set(routes.keys.values())
                versions = {key: self.open(name, key) for key in keys}
                rule = OpenRule(routes, versions, self._before.get(name, {}))
                self._rules[name] = rule
            return rule

    def note_damage(self, name: str, files: Collection[str]) -> None:
        """Record which files of the versions of a model are damaged."""
        damaged = {version.key: version.files().intersection(files) for version in self.whole(name)}
        self._damaged[name] = {key: names for key, names in damaged.items() if names}

    def damaged(self, name: str) -> Mapping[str, Collection[str]]:
        """Return the damaged files of the versions of the rule in force, by key."""
        damaged = self._damaged.get(name)
        if not damaged:
            return {}
        routes = self.routes(name)
        keys = set() if routes is None else set(routes.keys.values())
        return {key: names for key, names in damaged.items() if key in keys}

    def claim(self, name: str, version: MappedVersion) -> None:
        """Hold a version for a rule that is to come."""
        with self._lock:
            self._claimed.setdefault(name, {})[version.key] = version

    def release(self, name: str) -> None:
        """Hold only the versions of the rule in force."""
        with self._lock:
            self._claimed.pop(name, None)

    def open(self, name: str, key: str) -> MappedVersion:
        """Return a version by its key. Raises FormatError where a file is torn or gone."""
        with self._lock:
            version = self._claimed.get(name, {}).get(key) or self._open.get(name, {}).get(key)
        return version or ModelFolder(self._root, name).open(key)

    def all(self, name: str) -> list[MappedVersion]:
        """Return the versions of a model that stay.

        Raises FormatError where the rule or one of its versions is torn.
        """
        routes = self.routes(name)
        keys = sorted(set(routes.keys.values())) if routes else []
        in_force = {key: self.open(name, key) for key in keys}
        with self._lock:
            self._open[name] = in_force
            return [*in_force.values(), *self._claimed.get(name, {}).values()]

    def whole(self, name: str) -> list[MappedVersion]:
        """Return those of `all` that are not torn."""
        try:
            routes = self.routes(name)
        except FormatError as error:
            log.warning("%s", error)
            return []
        versions = list(self._claimed.get(name, {}).values())
        for key in sorted(set(routes.keys.values())) if routes else ():
            try:
                versions.append(self.open(name, key))
            except FormatError as error:
                log.warning("%s", error)
        return versions
