# SPDX-License-Identifier: Apache-2.0
"""What a state means, compared field by field with what would resume from it."""

from __future__ import annotations

import fnmatch
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from hotbed.errors import PersistError

log = logging.getLogger("hotbed.persist")

Meaning = Mapping[str, Any]
"""Dotted name of a field -> its plain value. An object has its kind under its own name."""

Decision = Literal["refuse", "accept", "keep", "warn"]
"""`refuse`: the state would mean something else. `accept`: the new value takes effect.
`keep`: the checkpoint's value stays in force. `warn`: accepted, the bits may differ. All but the
first are logged."""

FIELDS: tuple[tuple[str, Decision], ...] = (
    ("tables.*.rule.lr", "accept"),
    ("tables.*.rule.l1", "accept"),
    ("tables.*.rule.l2", "accept"),
    ("tables.*.rule.clip", "accept"),
    ("tables.*.rule.eps", "accept"),
    ("tables.*.rule.decay", "accept"),
    ("tables.*.rule.initial_accumulator", "accept"),
    ("tables.*.admit.sketch_bytes", "refuse"),
    ("tables.*.admit.*", "accept"),
    ("tables.*.evict", "accept"),
    ("tables.*.evict.*", "accept"),
    ("tables.*.tier", "accept"),
    ("tables.*.tier.*", "accept"),
    ("network.*dropout*", "accept"),
    ("loss_fn.*.kind", "refuse"),
    ("loss_fn.*", "accept"),
    ("optimizer.lr", "accept"),
    ("optimizer", "keep"),
    ("optimizer.*", "keep"),
    ("metrics", "accept"),
    ("metrics.*", "accept"),
    ("amp_level", "accept"),
    ("boost_level", "accept"),
    ("boost_level.*", "accept"),
    ("run.*", "accept"),
    ("machine.*", "warn"),
    ("*", "refuse"),
)
"""The first pattern that matches the name of a field decides."""


def meaning(
    tables: Mapping[str, Mapping[str, Any]],
    schema: Mapping[str, Any] | None,
    model: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Describe what rows, tensors and columns of a state mean.

    Args:
        tables: the config of each table by name.
        schema: `Schema.to_json()`; None = unknown.
        model: the member `model` of the manifest; None = unknown.

    Returns:
        One plain value per field, such as `{"tables.user.rule": "adagrad", "order.id": ["user"]}`.
    """
    fields: dict[str, Any] = {}
    for name, config in tables.items():
        for key, value in config.items():
            if key != "name":
                _flatten(f"tables.{name}.{key}", value, fields)
    for column in [] if schema is None else schema["columns"]:
        fields.setdefault(f"order.{column['kind']}", []).append(column["name"])
        _flatten(f"schema.{column['name']}", _with_defaults(column), fields)
    for key, value in ({} if model is None else model).items():
        if key != "given_tables" and value is not None:
            _flatten(key, value, fields)
    plain: dict[str, Any] = json.loads(json.dumps(fields))
    return plain


def compare(place: str, saved: Meaning, here: Meaning, allow: Sequence[str] = ()) -> set[str]:
    """Compare what a checkpoint means with what would resume; return the names of accepted changes.

    Args:
        place: where the checkpoint lies, for messages.
        allow: names of fields, or patterns of them, that may differ although they would be refused.

    Raises:
        PersistError: a field that may not change differs; the message names it and both values.
    """
    accepted: set[str] = set()
    refused: list[str] = []
    for name in _different(saved, here):
        before = _shown(name, saved)
        after = _shown(name, here)
        decision = decided(name)
        if _is_unknown(name, saved):
            log.info("%s: it does not tell %s, resumed with %s", place, name, after)
        elif decision == "refuse" and not _matches(name, allow):
            refused.append(name)
        elif decision == "keep":
            log.info("%s: %s stays %s, received %s", place, name, before, after)
        else:
            accepted.add(name)
            text = f"{place}: {name} was {before}, resumed with {after}"
            if decision == "warn":
                log.warning("%s; the bits may differ from those of an unbroken run", text)
            else:
                log.info("%s", text)
    if refused:
        first, *rest = refused
        others = f" (also changed: {', '.join(rest)})" if rest else ""
        raise PersistError(
            f"{place}: {first} is {_shown(first, saved)} in the checkpoint{others} — "
            f"received {_shown(first, here)} — build it as it was when it was saved, "
            f"or accept the change with Checkpoint(allow={refused!r})"
        )
    return accepted


def decided(name: str) -> Decision:
    """Return what a change of a field leads to."""
    return next(decision for pattern, decision in FIELDS if fnmatch.fnmatchcase(name, pattern))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _different(saved: Meaning, here: Meaning) -> list[str]:
    """Names of the fields that differ; of an object of another kind its own name alone."""
    names: list[str] = []
    for name in dict.fromkeys([*saved, *here]):
        if name in saved and name in here and saved[name] == here[name]:
            continue
        if not any(name.startswith(f"{other}.") for other in names):
            names.append(name)
    return names


def _is_unknown(name: str, saved: Meaning) -> bool:
    """Whether the checkpoint does not tell the field.

    What an object of a known kind does not tell has its default. A column is new that a known
    schema lacks.
    """
    if name in saved or name.rpartition(".")[0] in saved:
        return False
    section = name.partition(".")[0]
    if section not in ("schema", "order"):
        return True
    return not any(known.startswith(f"{section}.") for known in saved)


def _flatten(name: str, value: Any, fields: dict[str, Any]) -> None:
    if not isinstance(value, Mapping):
        fields[name] = value
        return
    if "kind" in value or "torch" in value:
        kind = value["kind"] if "kind" in value else str(value["torch"]).lower()
        fields[name] = kind
    for key, item in value.items():
        if key not in ("kind", "torch", "name"):
            _flatten(f"{name}.{key}", item, fields)


def _with_defaults(column: Mapping[str, Any]) -> Mapping[str, Any]:
    """A column whose raw column and table are told although they have its name."""
    told = {"column": column["name"]}
    if column["kind"] == "id":
        told["table"] = column["name"]
    return {**told, **{key: value for key, value in column.items() if value is not None}}


def _shown(name: str, fields: Meaning) -> str:
    if name not in fields:
        return "its default" if name.rpartition(".")[0] in fields else "absent"
    text = repr(fields[name])
    return text if len(text) <= 80 else f"{text[:77]}..."
