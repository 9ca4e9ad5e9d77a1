# SPDX-License-Identifier: Apache-2.0
"""The versions that the rule of a model names: they stay in the served folder beside the newest.

The file ROUTES beside CURRENT holds the rule in force. Its one writer replaces it as a whole; any
process may read it.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hotbed.errors import FormatError
from hotbed.files import new_file, writing
from hotbed.serving.stores.mapped import MappedVersion, ModelFolder

log = logging.getLogger("hotbed.serving")
STABLE = "stable"
"""The role of the version that answers in general."""
_ROUTES_FILE = "ROUTES"


@dataclass(frozen=True)
class RoutesInForce:
    """The rule of a model that is in force.

    Attributes:
        revision: of the file that it is from.
        rule: its plain values.
        keys: the keys of the versions of roles that do not follow the newest one.
    """

    revision: int
    rule: Mapping[str, Any]
    keys: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for the file."""
        return asdict(self)


class HeldVersions:
    """The versions of each model in a served folder that its rule names, or that one is to name.

    Args:
        root: the served folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._claimed = dict[str, dict[str, MappedVersion]]()
        self._open = dict[str, dict[str, MappedVersion]]()
        self._pinned = dict[str, MappedVersion | None]()
        self._pinned_before = dict[str, MappedVersion | None]()

    def routes(self, name: str) -> RoutesInForce | None:
        """Return the rule of a model that is in force; None if there is none.

        Raises FormatError for a file that is torn.
        """
        path = ModelFolder(self._root, name).path / _ROUTES_FILE
        try:
            spec = json.loads(path.read_bytes())
            return RoutesInForce(int(spec["revision"]), dict(spec["rule"]), dict(spec["keys"]))
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
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            with new_file(path) as file:
                file.write(json.dumps(routes.to_json()).encode())
        self._pinned_before[name] = self._pinned.pop(name, None)
        self.release(name)

    def pinned(self, name: str) -> MappedVersion | None:
        """Return the version that the rule of a model pins, for the process that writes rules.

        Raises FormatError where the rule or the version is torn.
        """
        if name not in self._pinned:
            routes = self.routes(name)
            key = None if routes is None else routes.keys.get(STABLE)
            self._pinned[name] = None if key is None else self.open(name, key)
        return self._pinned[name]

    def pinned_before(self, name: str) -> MappedVersion | None:
        """Return the version that the rule before pinned: servers ask for its rows until they know.

        Only for the process that writes rules.
        """
        return self._pinned_before.get(name)

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
