# SPDX-License-Identifier: Apache-2.0
"""The options of the client: servers, TLS, SASL, and secrets, which are never written down."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hotbed.errors import ConfigError

HIDDEN = "***"
_OWN = (
    "bootstrap.servers",
    "group.id",
    "enable.auto.commit",
    "auto.offset.reset",
    "enable.partition.eof",
)
_SECRETS = re.compile(r"password|secret|token|\.pem$|oauthbearer\.config")


def check(names: Iterable[str]) -> None:
    """Raise ConfigError for an option that Hotbed sets itself."""
    for name in names:
        if name in _OWN:
            raise ConfigError(f"options.{name}: Hotbed sets it itself, got {name!r}. Leave it out.")


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with each secret hidden that is not the name of a variable."""
    shown = dict(options)
    for key, value in options.items():
        is_name = str(value).startswith("${")
        if _SECRETS.search(key) and not is_name:
            shown[key] = HIDDEN
    return shown


def of_client(servers: str, group: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for librdkafka, with the values of environment variables.

    Raises:
        ConfigError: a secret is missing.
    """
    defaults = {
        "reconnect.backoff.max.ms": 2000,
        "fetch.queue.backoff.ms": 10,  # the pause when its queue is full; its default is 1 s
        "log_level": 0,
    }
    expanded = {key: _expanded(key, value) for key, value in options.items()}
    own_options = {
        "bootstrap.servers": servers,
        "group.id": group or "hotbed",
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
    }
    assert own_options.keys() == set(_OWN)
    return {**defaults, **expanded, **own_options}


def _expanded(key: str, value: Any) -> Any:
    """Return `value` with each `${NAME}` replaced by the environment variable of this name."""
    if value == HIDDEN:
        raise ConfigError(
            f"options.{key}: a secret is never written down, got {value!r}. Give it as '${{NAME}}'."
        )

    def look_up(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ConfigError(
                f"options.{key}: no environment variable {match[1]}, got {value!r}. Set it."
            )
        return os.environ[match[1]]

    if not isinstance(value, str):
        return value
    return re.sub(r"\$\{(\w+)\}", look_up, value)
