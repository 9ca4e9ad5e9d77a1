# SPDX-License-Identifier: Apache-2.0
"""Change a file of rules, with the next revision, and compare what replicas answer by."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from hotbed.errors import ConfigError, HotbedError
from hotbed.files import new_file, writing
from hotbed.serving.client import Client
from hotbed.serving.routes.rule import (
    NEWEST,
    Canary,
    ModelRule,
    Routes,
    Shadow,
    Stable,
    Version,
    read_routes,
)

NONE = "none"
"""The text that removes a canary or a shadow."""


@dataclass(frozen=True)
class RouteChange:
    """A change of the rule of a model, as texts of the command; None = as before.

    Attributes:
        stable: VERSION or newest.
        canary: VERSION=SHARE, newest=SHARE or none.
        by, salt: of the canary.
        shadow: VERSION, newest or none.
    """

    stable: str | None = None
    canary: str | None = None
    by: str | None = None
    salt: str | None = None
    shadow: str | None = None

    def applied(self, rule: ModelRule) -> ModelRule:
        """Return a rule with this change. Raises ConfigError for a text that is not as above."""
        if self.stable is not None:
            version = _version_of("--stable", self.stable)
            stable = Stable(follow=True) if version == "newest" else Stable(pin=version)
            rule = replace(rule, stable=stable)
        return replace(rule, canary=self._canary(rule.canary), shadow=self._shadow(rule.shadow))

    def _canary(self, before: Canary | None) -> Canary | None:
        if self.canary == NONE:
            return None
        by = self.by or (before.by if before else "")
        salt = before.salt if before else ""
        if self.salt is not None:
            salt = self.salt
        if self.canary is not None:
            number, equals, share = self.canary.partition("=")
            if not equals:
                raise ConfigError(
                    f"--canary: expected a version and a share, got {self.canary!r}. Write "
                    "--canary 4310=5%."
                )
            if not by:
                raise ConfigError(
                    "--by: a canary needs the column that names the user, got none. Add --by user."
                )
            return Canary(_version_of("--canary", number), _share_of(share), by, salt)
        if before is None:
            if self.by or self.salt is not None:
                raise ConfigError(
                    f"--by, --salt: the model has no canary, got {self.by or self.salt!r}. Add "
                    "--canary VERSION=SHARE."
                )
            return None
        return replace(before, by=by, salt=salt)

    def _shadow(self, before: Shadow | None) -> Shadow | None:
        if self.shadow == NONE:
            return None
        if self.shadow is None:
            return before
        version = _version_of("--shadow", self.shadow)
        return replace(before, version=version) if before else Shadow(version)


def change_routes(
    path: str | Path, model: str, changes: Mapping[str, str | None]
) -> tuple[int, dict[str, Any]]:
    """Change the rule of a model in a file, as a whole, with the next revision.

    Return the revision and the rule. A file that is missing is made.

    Args:
        path: the file.
        model: name of the model.
        changes: the attributes of a `RouteChange`.

    Raises:
        ConfigError: the file is wrong or a link, the change is wrong, or this user may not write
            the file.
        NotWritten: the disk refuses.
    """
    change = RouteChange(**changes)
    if change == RouteChange():
        raise ConfigError(
            f"route: expected a change, got none for model {model!r}. Give --stable, --canary or "
            "--shadow."
        )
    file = Path(path)
    if file.is_symlink():
        raise ConfigError(
            f"{file}: expected a file, got a link, such as that of a ConfigMap. Change the file "
            "where the platform takes it from."
        )
    mode = _mode_of(file)
    routes = Routes(0) if mode is None else read_routes(file)
    rule = change.applied(routes.models.get(model, ModelRule()))
    changed = Routes(routes.revision + 1, {**routes.models, model: rule})
    models = {name: each.to_json() for name, each in changed.models.items()}
    spec = {"revision": changed.revision, "models": models}
    text = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True)
    with writing(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        with new_file(file) as written:
            written.write(text.encode())
            if mode is not None:
                os.fchmod(written.fileno(), mode)
    return changed.revision, models[model]


def _mode_of(file: Path) -> int | None:
    """Return the permissions of a file of rules; None if there is none yet.

    Raises ConfigError for one that this user may not write: a replaced file needs only the rights
    of its folder, and who may write the file may route.
    """
    if not file.exists():
        return None
    mode = stat.S_IMODE(file.stat().st_mode)
    if not os.access(file, os.W_OK):
        raise ConfigError(
            f"{file}: you may not write this file, so you may not route, got mode {mode:04o}. Ask "
            "its owner for the change, or for the right to write it."
        )
    return mode


@dataclass(frozen=True)
class ReplicaRoute:
    """What one replica answers by for a model; `problem`: of the replica, or of its rule."""

    url: str
    model: str = ""
    revision: int | None = None
    stable: int | None = None
    canary: str = ""
    shadow: int | None = None
    problem: str = ""

    def is_like(self, other: ReplicaRoute) -> bool:
        """Return whether both replicas answer alike."""
        return asdict(replace(self, url="")) == asdict(replace(other, url=""))


def replica_routes(urls: Sequence[str], token: str | None = None) -> list[ReplicaRoute]:
    """Ask each replica by which rule it answers, over HTTP; a row for each model of each."""
    rows = []
    for url in urls:
        try:
            with Client(url, token) as client:
                models = client.status()["models"]
            rows += [_row(url, model) for model in models]
        except HotbedError as error:
            rows.append(ReplicaRoute(url, problem=str(error)))
    return rows


def differ(rows: Sequence[ReplicaRoute]) -> bool:
    """Return whether a replica has a problem, or answers otherwise than another one."""
    first = dict[str, ReplicaRoute]()
    for row in rows:
        if row.problem or not row.is_like(first.setdefault(row.model, row)):
            return True
    return len({tuple(row.model for row in rows if row.url == url) for url in _urls(rows)}) > 1


def _urls(rows: Sequence[ReplicaRoute]) -> list[str]:
    return list(dict.fromkeys(row.url for row in rows))


def _row(url: str, model: Mapping[str, Any]) -> ReplicaRoute:
    routes = model["routes"]
    versions = {role: entry["version"] for role, entry in routes["roles"].items()}
    canary = routes["rule"].get("canary")
    return ReplicaRoute(
        url,
        model["name"],
        routes["revision"],
        versions.get("stable"),
        f"{versions.get('canary')} ({canary['share']:.3%} by {canary['by']})" if canary else "",
        versions.get("shadow"),
        routes["problem"],
    )


def _version_of(option: str, text: str) -> Version:
    if text == NEWEST:
        return "newest"
    if not text.isdecimal():
        raise ConfigError(
            f"{option}: expected the number of a version or {NEWEST}, got {text!r}. Write such as "
            f"{option} 4213."
        )
    return int(text)


def _share_of(text: str) -> float:
    number = text.removesuffix("%")
    try:
        share = float(number)
    except ValueError:
        raise ConfigError(
            f"--canary: expected a share, got {text!r}. Write such as 5% or 0.05."
        ) from None
    return share / 100 if text.endswith("%") else share
