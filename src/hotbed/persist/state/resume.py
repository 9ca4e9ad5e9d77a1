# SPDX-License-Identifier: Apache-2.0
"""Whether a state fits what would resume from it."""

from __future__ import annotations

import fnmatch
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from hotbed.errors import PersistError
from hotbed.plugins import names_class, short_kind

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
    ("tables.*.capacity", "accept"),
    ("tables.*.tier", "accept"),
    ("tables.*.tier.*", "accept"),
    ("network.*dropout*", "accept"),
    ("loss_fn.losses.*.*", "accept"),
    ("loss_fn.losses.*", "refuse"),
    ("loss_fn.*", "accept"),
    ("optimizer.lr", "accept"),
    ("optimizer", "keep"),
    ("optimizer.*", "keep"),
    ("optimizers.*.lr", "accept"),
    ("optimizers.*", "keep"),
    ("lookups.*.max_norm", "accept"),
    ("metrics", "accept"),
    ("metrics.*", "accept"),
    ("amp_level", "accept"),
    ("average", "accept"),
    ("compile", "accept"),
    ("compile.*", "accept"),
    ("run.*", "accept"),
    ("machine.*", "warn"),
    ("*", "refuse"),
)
"""The first pattern that matches the name of a field decides."""
NOT_COMPARED = ("given_tables", "boost_level")
"""Members of a model's description without a meaning for its state; builds before `compile` wrote
the second.
"""
STREAM = "stream"
"""The name of a stream's position in a state."""
EPOCHS = "fit"
"""The name of a fit's position in a state: inside an epoch, or empty before the first."""
DEAD_LETTER_BYTES = "wall_dead_letter_bytes"
"""The name of the dead letters' length in a state: the content digest passes over it."""
log = logging.getLogger("hotbed.persist")


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
    columns = [] if schema is None else schema["columns"]
    for column in columns:
        fields.setdefault(f"order.{column['kind']}", []).append(column["name"])
        _flatten(f"schema.{column['name']}", _with_defaults(_without_paths(column)), fields)
    for key, value in (model or {}).items():
        if key not in NOT_COMPARED and value is not None:
            _flatten(key, value, fields)
    if model is not None:
        fields.setdefault("grains", 1)
    plain: dict[str, Any] = json.loads(json.dumps(fields))
    return plain


def _without_paths(column: Mapping[str, Any]) -> dict[str, Any]:
    """Return a column without the paths of its fitted maps: their digests say what they are."""
    plain = dict(column)
    transforms = []
    for transform in column.get("transforms", ()):
        fitted = transform.get("fitted")
        if fitted is not None:
            transform = {**transform, "fitted": fitted["digest"]}
        transforms.append(transform)
    if transforms:
        plain["transforms"] = transforms
    return plain


def compare(
    place: str,
    saved: Meaning,
    here: Meaning,
    allow: Sequence[str] = (),
    misfit: Callable[[], str] = str,
) -> set[str]:
    """Compare what a checkpoint means with what would resume; return the names of accepted changes.

    Args:
        place: where the checkpoint lies, for messages.
        saved: what the checkpoint means.
        here: what would resume from it.
        allow: names of fields, or patterns of them, that may differ although they would be refused.
        misfit: returns why the state cannot be loaded, whatever is accepted; "" if it can.

    Raises:
        PersistError: a field that may not change differs; the message names it and both values.
    """
    refused = refused_changes(saved, here, allow)
    if refused:
        raise _refusal(place, refused, saved, here, misfit())
    accepted: set[str] = set()
    for name in _different(saved, here):
        _log_change(place, name, saved, here)
        if not _is_unknown(name, saved) and decided(name) != "keep":
            accepted.add(name)
    return accepted


def refused_changes(saved: Meaning, here: Meaning, allow: Sequence[str] = ()) -> list[str]:
    """Return the names of the fields that differ and may not; `allow`: as in `compare`."""
    refused = []
    for name in _different(saved, here):
        is_known = not _is_unknown(name, saved)
        if is_known and decided(name) == "refuse" and not _matches(name, allow):
            refused.append(name)
    return refused


def _log_change(place: str, name: str, saved: Meaning, here: Meaning) -> None:
    before = shown(name, saved)
    after = shown(name, here)
    decision = decided(name)
    if _is_unknown(name, saved):
        log.info("%s: it does not say %s, resumed with %s", place, name, after)
    elif decision == "keep":
        log.info("%s: %s stays %s, received %s", place, name, before, after)
    elif decision == "warn":
        log.warning(
            "%s: %s was %s, resumed with %s; the bits may differ from those of an unbroken run",
            place,
            name,
            before,
            after,
        )
    else:
        log.info("%s: %s was %s, resumed with %s", place, name, before, after)


def _refusal(
    place: str, refused: list[str], saved: Meaning, here: Meaning, misfit: str
) -> PersistError:
    first, *rest = refused
    others = f" (also changed: {', '.join(rest)})" if rest else ""
    advice = f"or accept the change with allow={refused!r}, an argument of this call."
    if misfit:  # the state would not fit, whatever is accepted
        advice = (
            f"since {misfit}; or begin a new model, and take the rows that fit with "
            "model.warm_start()."
        )
    return PersistError(
        f"{place}: {first} is {shown(first, saved)} in the checkpoint{others}, "
        f"got {shown(first, here)}. Build it as it was when it was saved, {advice}"
    )


def decided(name: str) -> Decision:
    """Return what a change of a field leads to."""
    for pattern, decision in FIELDS:
        if fnmatch.fnmatchcase(name, pattern):
            return decision
    raise AssertionError("the last pattern matches every name")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _different(saved: Meaning, here: Meaning) -> list[str]:
    """Return the names of the fields that differ; for an object of another kind only its own."""
    names: list[str] = []
    for name in dict.fromkeys([*saved, *here]):
        is_equal = name in saved and name in here and _is_same(saved[name], here[name])
        is_inside = any(name.startswith(f"{other}.") for other in names)
        if not is_equal and not is_inside:
            names.append(name)
    return names


def _is_same(before: Any, now: Any) -> bool:
    """Return whether two values are equal; a kind may have its module in one of them alone."""
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_is_same, before, now))
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_is_same(before[key], now[key]) for key in now)
    if names_class(now) and not names_class(before):
        return bool(short_kind(now) == before)
    if names_class(before) and not names_class(now):
        return bool(short_kind(before) == now)
    return bool(before == now)


def _is_unknown(name: str, saved: Meaning) -> bool:
    """Return whether the checkpoint does not say the value of a field.

    A field that an object of a known kind does not mention has its default. A column that a known
    schema lacks is new.
    """
    if name in saved or name.rpartition(".")[0] in saved:
        return False
    section = name.partition(".")[0]
    if section not in ("schema", "order"):
        return True
    return not any(other.startswith(f"{section}.") for other in saved)


def _flatten(name: str, value: Any, fields: dict[str, Any]) -> None:
    if not isinstance(value, Mapping):
        fields[name] = value
        return
    if "kind" in value:
        fields[name] = value["kind"]
    elif "torch" in value:
        fields[name] = str(value["torch"]).lower()
    for key, item in value.items():
        if key not in ("kind", "torch", "name"):
            _flatten(f"{name}.{key}", item, fields)


def _with_defaults(column: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a column with its raw column and its table, also where these have its own name."""
    values = {"column": column["name"]}
    if column["kind"] == "id":
        values["table"] = column["name"]
    for key, value in column.items():
        if value is not None:
            values[key] = value
    return values


def shown(name: str, fields: Meaning) -> str:
    """Return the value of a field for a message."""
    if name in fields:
        text = repr(fields[name])
        return text if len(text) <= 80 else f"{text[:77]}..."
    return "its default" if name.rpartition(".")[0] in fields else "absent"
