# SPDX-License-Identifier: Apache-2.0
"""The rule by which the versions of models answer, as a value and as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hotbed import checks, config
from hotbed.errors import ConfigError
from hotbed.serving.stores.held import STABLE
from hotbed.yaml_files import read_mapping

CANARY = "canary"
SHADOW = "shadow"
NEWEST = "newest"
"""The role of the version that was loaded last, and the version of a role that follows it."""
Version: TypeAlias = int | Literal["newest"]
_MOST_REVISION = 1 << 53  # whole numbers up to here are exact in JSON


@dataclass(frozen=True)
class Stable:
    """Which version answers in general: exactly one of the two is given.

    Args:
        follow: the newest version, as without a rule.
        pin: the number of a version, which stays.
    """

    follow: bool = False
    pin: int | None = None

    def __post_init__(self) -> None:
        checks.at_least("Stable.pin", self.pin, 0)
        if self.follow == (self.pin is not None):
            raise ConfigError(
                f"Stable.follow: expected either follow or pin, got follow {self.follow} and pin "
                f"{self.pin}. Write {{follow: true}} or {{pin: VERSION}}."
            )


@dataclass(frozen=True)
class Canary:
    """A version that answers a share of the users.

    Args:
        version: its number, or `newest`.
        share: of the users, 0 to 1.
        by: the column of the context that names the user.
        salt: with another salt, other users are chosen.
    """

    version: Version
    share: float
    by: str
    salt: str = ""

    def __post_init__(self) -> None:
        _check_version("Canary.version", self.version)
        checks.between("Canary.share", self.share, 0, 1)
        if "\0" in self.salt:
            raise ConfigError(
                f"Canary.salt: expected text without NUL, got {self.salt!r}. Choose another one."
            )


@dataclass(frozen=True)
class Shadow:
    """A version that scores requests after they were answered, to be compared.

    Args:
        version: its number, or `newest`.
        sample: the share of the answered requests that it scores, 0 to 1.
        rows_per_second: candidates that each process scores a second at most.
    """

    version: Version
    sample: float = 1.0
    rows_per_second: float = 1000.0

    def __post_init__(self) -> None:
        _check_version("Shadow.version", self.version)
        checks.between("Shadow.sample", self.sample, 0, 1)
        checks.between("Shadow.rows_per_second", self.rows_per_second, 0, 1e9)


@dataclass(frozen=True)
class LogRule:
    """What the request log of a model holds, over the settings of the server.

    Args:
        sample: the share of requests that is logged, 0 to 1; None = as the server is set.
        omit: columns that are left out, beside those that the server leaves out.
        hash: columns of which a keyed hash is logged, beside those that the server hashes.
        max_bytes: of the closed parts; the oldest are removed. None = as the server is set.
    """

    sample: float | None = None
    omit: Sequence[str] = ()
    hash: Sequence[str] = ()
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        checks.between("LogRule.sample", self.sample, 0, 1)
        checks.at_least("LogRule.max_bytes", self.max_bytes, 1)


@dataclass(frozen=True)
class ModelRule:
    """The versions of one model, what each answers, and what of that is logged."""

    stable: Stable = field(default_factory=lambda: Stable(follow=True))
    canary: Canary | None = None
    shadow: Shadow | None = None
    log: LogRule | None = None

    def versions(self) -> dict[str, Version]:
        """Return the version of each role."""
        pin = self.stable.pin
        versions: dict[str, Version] = {STABLE: "newest" if pin is None else pin}
        if self.canary is not None:
            versions[CANARY] = self.canary.version
        if self.shadow is not None:
            versions[SHADOW] = self.shadow.version
        return versions

    def to_json(self) -> dict[str, Any]:
        """Return the plain values of the file."""
        plain: dict[str, Any] = _plain(config.describe(self))
        return plain


@dataclass(frozen=True)
class Routes:
    """The content of a file of rules.

    Args:
        revision: the number of this content, which grows with each change.
        models: the rule of each model; other models follow their newest version.
    """

    revision: int
    models: Mapping[str, ModelRule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.between("Routes.revision", self.revision, 0, _MOST_REVISION)


def read_routes(path: str | Path) -> Routes:
    """Return the rules in a YAML or JSON file.

    Raises:
        ConfigError: the file cannot be read, or a value is wrong; the message has its dotted path.
    """
    spec = read_mapping(path, "file of routes")
    _refuse_log_paths(spec)
    routes: Routes = config.build(spec, Routes, "routes")
    return routes


def rule_of(spec: Mapping[str, Any]) -> ModelRule:
    """Return the rule with these plain values."""
    rule: ModelRule = config.build(spec, ModelRule, "routes")
    return rule


def _refuse_log_paths(spec: Mapping[str, Any]) -> None:
    """Raise ConfigError for a rule that names the place of a log, which a start decides."""
    models = spec.get("models")
    for name, rule in models.items() if isinstance(models, Mapping) else ():
        log = rule.get("log") if isinstance(rule, Mapping) else None
        if isinstance(log, Mapping) and "path" in log:
            raise ConfigError(
                f"routes.models.{name}.log.path: a server keeps the place of its log, got "
                f"{log['path']!r}. Start the server with --set log=FOLDER."
            )


def _check_version(where: str, version: Version) -> None:
    if version != "newest":
        checks.at_least(where, version, 0)


def _plain(described: Any) -> Any:
    """Return a description without the kinds, which a file of routes does not need."""
    if isinstance(described, Mapping):
        return {key: _plain(value) for key, value in described.items() if key != "kind"}
    return described
