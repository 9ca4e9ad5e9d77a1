# SPDX-License-Identifier: Apache-2.0
"""Read the keys of a clause in a JSON file. HugeCTR ignores keys that it does not know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, TypeVar

from hotbed.compat.hugectr.knobs import KNOBS, NO_EFFECT
from hotbed.config import did_you_mean
from hotbed.errors import ConfigError

E = TypeVar("E", bound=Enum)


def read_clause(spec: Any, where: str, keys: Iterable[str]) -> dict[str, Any]:
    """Return the keys of a clause that have an effect; log the others.

    Args:
        spec: the clause.
        where: its place, in messages, such as `solver`.
        keys: names of all keys with an effect.

    Raises:
        ConfigError: the clause is not an object, or has a key that no release reads or wrote.
    """
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{where}: not an object, got {spec!r:.80}. Write the keys in braces.")
    names = tuple(keys)
    values: dict[str, Any] = {}
    for key, value in spec.items():
        knob = f"{where}.{key}"
        if key in names:
            values[key] = value
        elif knob in NO_EFFECT:
            KNOBS.log_no_effect(knob)
        else:
            advice = did_you_mean(key, names)
            raise ConfigError(
                f"{knob}: unknown key, got {key!r} with the value {value!r:.80}. {advice}"
            )
    return values


def needed(values: Mapping[str, Any], where: str, keys: Iterable[str]) -> None:
    """Check that a clause has each of `keys`.

    Raises:
        ConfigError: one is missing.
    """
    for key in keys:
        if key not in values:
            present = ", ".join(values) or "an empty clause"
            raise ConfigError(f"{where}.{key}: missing key, got {present}. Add it.")


def member(enum: type[E], value: Any, where: str) -> E:
    """Return the member of an enum that has this value in JSON files.

    Raises:
        ConfigError: there is no such member.
    """
    values = {str(item.value): item for item in enum}
    if not isinstance(value, str) or value not in values:
        advice = did_you_mean(str(value), values)
        raise ConfigError(f"{where}: unknown name, got {value!r:.80}. {advice}")
    return values[value]
