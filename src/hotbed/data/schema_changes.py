# SPDX-License-Identifier: Apache-2.0
"""What a declared schema says otherwise than the fitted one that a model learned with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hotbed import config
from hotbed.data.schema import Column, Schema
from hotbed.data.transforms import Transform


@dataclass(frozen=True)
class Change:
    """A setting of a schema that differs: its dotted key, and its values."""

    key: str
    before: Any
    now: Any


def change_of(learned: Schema, declared: Schema) -> Change | None:
    """Return the first setting by which a declared schema differs from a fitted one, or None.

    Values that are learned from data are left out, unless the schema is of prepared rows: there
    other values are another preparation.

    Args:
        learned: the schema of a state.
        declared: of the same columns.
    """
    pairs = zip(learned.columns, declared.columns, strict=True)
    changes = (change for pair in pairs for change in _changes(*pair))
    change = next(changes, None)
    if change is None and learned.raw is not None and declared.raw is not None:
        before = sorted(fitted.digest[:12] for fitted in learned.raw.maps)
        now = sorted(fitted.digest[:12] for fitted in declared.raw.maps)
        if before != now:
            return Change("prepared", before, now)
    return change


def _changes(learned: Column, declared: Column) -> Iterator[Change]:
    path = f"columns.{declared.name}"
    before = _settings(learned)
    now = _settings(declared)
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) != now.get(key):
            values = (_value(before, learned, key), _value(now, declared, key))
            yield Change(f"{path}.{key}", *values)
    ours: list[Transform] = list(getattr(learned, "transforms", ()))
    theirs: list[Transform] = list(getattr(declared, "transforms", ()))
    kinds = [config.kind_of(type(transform)) for transform in ours]
    kinds_now = [config.kind_of(type(transform)) for transform in theirs]
    if kinds != kinds_now:
        yield Change(f"{path}.transforms", kinds, kinds_now)
        return
    for number, (fitted, transform) in enumerate(zip(ours, theirs, strict=True)):
        learns = transform.learner() is not None
        plain = _plain(fitted)
        plain_now = _plain(transform)
        for key in dict.fromkeys([*plain, *plain_now]):
            is_learned = key == "fitted" or (learns and key not in plain_now)
            if not is_learned and plain.get(key) != plain_now.get(key):
                where = f"{path}.transforms.{number}.{key}"
                values = (_value(plain, fitted, key), _value(plain_now, transform, key))
                yield Change(where, *values)


def _value(settings: Mapping[str, Any], value: object, key: str) -> Any:
    """Return a setting; the default of `value` if the settings leave it out."""
    return settings.get(key, getattr(value, key, None))


def _settings(column: Column) -> dict[str, Any]:
    """Return a column's settings but its transforms, with its raw column and its table."""
    settings: dict[str, Any] = {"column": column.source}
    if hasattr(column, "table"):
        settings["table"] = column.table or column.name
    for key, value in _plain(column).items():
        if value is not None and key != "transforms":
            settings[key] = value
    return settings


def _plain(value: object) -> Mapping[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(config.describe(value)))
    return plain
