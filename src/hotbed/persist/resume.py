# SPDX-License-Identifier: Apache-2.0
"""Resuming from a state: whether it fits, completing the first one after a kill, and going back."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hotbed.connectors import Journal
from hotbed.errors import ConfigError, PersistError
from hotbed.files import Where, sync_folder
from hotbed.persist.format import Reader, open_folder
from hotbed.persist.inspect import verify
from hotbed.persist.store import JOURNAL, LETTERS, MANIFEST_FILE, LocalStore, number_of, open_store

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
STREAM = "stream"
"""The name of a stream's position in a state."""
EPOCHS = "fit"
"""The name of a fit's position in a state: inside an epoch, or empty before the first."""
DEAD_LETTER_BYTES = "wall_dead_letter_bytes"
"""The name of the dead letters' length in a state: it is no part of the content digest."""
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


# --- going back ---------------------------------------------------------------------------------


def finish_first(where: Where) -> None:
    """Write CURRENT where the writer of the first checkpoint was killed before it could.

    Call it under the lock of the folder. Raises FormatError where that checkpoint is damaged.
    """
    store = open_store(where)
    folder = store.unpointed() if isinstance(store, LocalStore) else None
    if isinstance(store, LocalStore) and folder is not None:
        verify(store.path(folder))
        _point(store, folder)
        log.warning("%s: verified and made current; its writer was killed", store.place(folder))


def go_back(where: Where, number: int | None) -> dict[str, Any]:
    """Make state `number` under `where` the newest one, so that a stream resumes there.

    The state is verified with its chain. Newer states move to the folder `aside`. The journal and
    the dead letters lose what came after the state. Later states get numbers above every number
    used before. After a kill on the way, call it again.

    Returns:
        `{"folder", "kind", "version", "aside"}`; `aside`: the names of the states that moved.

    Raises:
        ConfigError: there is no such state, or `where` is an object store.
        FormatError: the state or its chain is not complete.
        PersistError: another run holds the lock.
    """
    store = open_store(where)
    if not isinstance(store, LocalStore):
        raise ConfigError(
            f"restore: works on local folders, got {where}. "
            f"In an object store, move newer states away: the last one with {MANIFEST_FILE} counts."
        )
    folder = f"checkpoint-{0 if number is None else number:08d}"
    if folder not in store.folders():
        choice = ", ".join(str(number_of(name)) for name in store.folders()) or "none"
        raise ConfigError(f"--state: not in {store.root}, got {number}. Choose one of: {choice}.")
    summary = verify(store.path(folder))
    reader = open_folder(store, folder)
    with _journal_of(store, reader) as journal:
        _point(store, folder)
        newer = [name for name in store.folders() if number_of(name) > number_of(folder)]
        for name in reversed(newer):  # deltas before what they rest on
            _set_aside(store, name)
        if journal is not None:
            journal.cut(_decided(reader))
            _cut_letters(store, reader)
    return {
        "folder": folder,
        "kind": summary["kind"],
        "version": summary["version"],
        "aside": newer,
    }


def _point(store: LocalStore, folder: str) -> None:
    manifest = bytes(store.read(f"{folder}/{MANIFEST_FILE}"))
    store.point(folder, hashlib.sha256(manifest).hexdigest())


def _set_aside(store: LocalStore, folder: str) -> None:
    aside = store.aside().root
    aside.mkdir(exist_ok=True)
    os.rename(store.root / folder, aside / folder)
    sync_folder(aside)
    sync_folder(store.root)


@contextlib.contextmanager
def _journal_of(store: LocalStore, reader: Reader) -> Iterator[Journal | None]:
    """The journal of a stream or a fit, which is the lock of its states; None for other states."""
    if not {STREAM, EPOCHS} & set(reader.manifest.positions):
        yield None
        return
    journal = Journal(store.root / JOURNAL)
    try:
        yield journal
    finally:
        journal.close()


def _decided(reader: Reader) -> dict[str, int]:
    """By topic, the number of the last decision that the state rests on."""
    positions = reader.manifest.positions
    position = positions[STREAM] if STREAM in positions else positions[EPOCHS]
    last = {"evict": int(reader.progress["run"]["step"])}
    if "rows" in position:
        last["cut"] = int(position["rows"])
    if "block" in (position.get("source") or {}):
        last["block"] = int(position["source"]["block"]) - 1
    elif "rows" in position:
        last["block"] = -1  # nothing was read yet
    return last


def _cut_letters(store: LocalStore, reader: Reader) -> None:
    """Move the dead letters of rows that are read again aside; old states hold no length."""
    letters = store.root / LETTERS
    length = reader.progress.get(DEAD_LETTER_BYTES)
    if length is None or not letters.exists() or letters.stat().st_size <= length:
        return
    later = letters.read_bytes()[length:]
    store.aside().root.mkdir(exist_ok=True)
    with open(store.aside().root / LETTERS, "ab") as file:
        file.write(later)
        file.flush()
        os.fsync(file.fileno())
    _truncate(letters, length)
    sync_folder(store.root)


def _truncate(path: Path, length: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(length)
        os.fsync(file.fileno())
