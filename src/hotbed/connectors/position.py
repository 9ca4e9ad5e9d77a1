# SPDX-License-Identifier: Apache-2.0
"""Positions in a source, places of rows, and the batches that mark events of a stream."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from hotbed.config import parse_json
from hotbed.connectors.types import is_open
from hotbed.errors import DataError

PLACE = "\0place"
"""Column of an endless source's batches: a struct that says where each row came from."""

COUNTED = "\0counted"
"""Column of a join's batches that may hold several samples of an impression: whether policies of
tables count this one.
"""

IMPRESSION = "\0impression"
"""Column of a join's batches: the number of the impression, if its reader asks for previews."""

KNOWN = "\0known"
"""Column of a join's batches, if its reader asks for it: from when on the labels of a sample could
be known, in microseconds of event time.
"""
PREVIEW = {b"hotbed": b"preview"}
"""Metadata of the batches of impressions that a join accepted, which have no labels yet."""


MARKS = (COUNTED, IMPRESSION, KNOWN, PLACE)
"""Columns of batches that no schema names: a source over another one passes them on."""


def is_preview(batch: pa.RecordBatch) -> bool:
    """Return whether a batch holds impressions without labels, beside the samples of its source."""
    return bool(batch.schema.metadata == PREVIEW)


def with_marks(batch: pa.RecordBatch, columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """Return other columns of the rows of a batch, with its marks and whether it is a preview."""
    marks = {name: batch.column(name) for name in MARKS if name in batch.schema.names}
    whole = {**columns, **marks}
    rows = pa.RecordBatch.from_arrays(list(whole.values()), names=list(whole))
    return rows.replace_schema_metadata(PREVIEW if is_preview(batch) else None)


TICK = pa.RecordBatch.from_arrays([], schema=pa.schema([]))
"""The empty batch that an endless source yields when it has nothing new."""


OPENED = pa.RecordBatch.from_arrays([], schema=pa.schema([]))
"""The empty batch that an endless source yields before the rows of a block.

Its position holds the decision about the block, so that reading resumes without the journal too.
"""


SETTINGS = "settings"
"""Member of a position: the settings of its source that it depends on."""


_KEYS = {
    "Join": {"inputs"},
    "Kafka": {"offsets"},
    "Follow": {"seen"},
    "FakeStream": {"start", "take"},
    "Replay": {"at", "emitted"},
    "Concat": {"part"},
    "Slice": {"cut"},
    "a part of files": {"file", "name", "row", "share"},
    "files": {"file", "name", "row"},
}
"""Kinds of sources, with keys that only their positions have."""
ROWS = "Memory, Sort or Generated"
"""Kinds of sources whose positions are a number of rows."""


class PlacedRows(Protocol):
    """A source, as its positions know it."""

    @property
    def settings(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Position:
    """The place that a reader has reached: a small JSON object.

    Only the source that wrote a position knows its keys. Reading that resumes from a position
    repeats nothing and loses nothing.

    Example: `Position.from_json(json.loads(text))`, `json.dumps(position.to_json())`.
    """

    state: Mapping[str, Any]

    @classmethod
    def of(cls, source: PlacedRows, state: Mapping[str, Any]) -> Position:
        """Return a source's position of a state, with the settings that it depends on."""
        return cls({**state, SETTINGS: source.settings})

    def to_json(self) -> dict[str, Any]:
        """Return this position as plain JSON values (dict, list, str, int, float, bool, None)."""
        text = json.dumps(dict(self.state))
        value: dict[str, Any] = json.loads(text)
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | str | Position) -> Position:
        """Return the position of a JSON object or its text, as `to_json` returns it.

        Raises:
            DataError: `value` is not a JSON object, or is nested too deeply.
        """
        if isinstance(value, Position):
            return value
        state = value
        if isinstance(value, str):
            try:
                state = parse_json(value)
            except ValueError as error:
                raise DataError(
                    f"position: not JSON, got {error}. Pass the value that Position.to_json() "
                    "returned."
                ) from error
        if not isinstance(state, Mapping):
            raise DataError(
                f"position: a position is a JSON object, got {value!r}. Pass the value that "
                "Position.to_json() returned."
            )
        return cls(dict(state))

    def __getitem__(self, key: str) -> Any:
        return self.state[key]

    @property
    def writer(self) -> str:
        """The kind of source that wrote this position, as far as its keys say."""
        for kind, keys in _KEYS.items():
            if keys <= self.state.keys():
                return kind
        if self.state.keys() - {SETTINGS} == {"row"}:
            return ROWS
        return f"a source with the keys {sorted(self.state)}"

    def require(self, kind: str, source: PlacedRows) -> None:
        """Raise DataError unless a source like `source` wrote this.

        Its kind must be `kind`, and its settings those of `source`. Positions of older versions
        hold no settings.
        """
        if self.writer != kind:
            raise DataError(
                f"position: it was written by {self.writer}, got {type(source).__name__} to resume "
                "from it. Give the source that the position was written for, or begin without it."
            )
        self.require_settings(source)

    def require_settings(self, source: PlacedRows) -> None:
        """Raise DataError unless the settings in this are those of `source`."""
        if SETTINGS in self.state:
            require_equal(type(source).__name__, self.state[SETTINGS], source.settings)

    def require_types(self, declared: pa.Schema) -> None:
        """Raise DataError if columns before this were read as other types than those `declared`.

        A column keeps its first type, so that the declaration would be ignored.
        """
        before = schema_from_text(self.state.get("schema", ""))
        for column in declared:
            if column.name not in before.names:
                continue
            kind = before.field(column.name).type
            if kind != column.type and not is_open(kind):
                raise DataError(
                    f"position: column {column.name!r} was read as {kind}, got a declaration as "
                    f"{column.type}. Declare it as {kind}, or begin without the position, in a new "
                    "folder of states."
                )

    def require_rows(self, row: int, first: int, last: int) -> None:
        """Raise DataError unless `row`, which this position holds, lies in `first` to `last`."""
        if not first <= row <= last:
            raise DataError(
                f"position: it lies after row {row}, got a source of rows {first} to {last}. Give "
                "the source that the position was written for, or begin without it."
            )


def require_equal(writer: str, before: Any, now: Any) -> None:
    """Raise DataError if the rows that a position counts differ now from what it says of them."""
    change = _change("", before, now)
    if change is not None:
        name, written, current = change
        raise DataError(
            f"position: it was written by {writer} with {name}={written}, got {name}={current}. "
            f"Its rows would be learned twice, or never: give {name} as it was, or begin without "
            "the position, in a new folder of states."
        )


def _change(name: str, before: Any, now: Any) -> tuple[str, str, str] | None:
    """Return the first setting that differs, by its dotted name, with both values; None for none.

    A mapping without a setting has its default.
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*before, *now]):
            inner = f"{name}.{key}" if name else key
            change = _change(inner, before.get(key, _DEFAULT), now.get(key, _DEFAULT))
            if change is not None:
                return change
        return None
    if before == now:
        return None
    return name, _shown(before), _shown(now)


def _shown(value: Any) -> str:
    return _DEFAULT if value is _DEFAULT else repr(value)


_DEFAULT = "(default)"


def join_position(state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the position of the join inside the position of a dataset or a source; None = none."""
    while isinstance(state, Mapping):
        if "inputs" in state:
            return state
        state = state.get("source")
    return None


def partitions_of(state: Mapping[str, Any] | None) -> list[str]:
    """Return the partitions of a topic that a source reads at a position; [] = no topic.

    Of a join they are those of its impressions, whose places its samples have.
    """
    while isinstance(state, Mapping):
        if "offsets" in state:
            return sorted({**state["offsets"], **state["take"]})
        if "inputs" in state:
            state = state["inputs"][0]
        state = state.get("source")
    return []


def decisions_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of the block that a source's position lies in, by topic of the journal.

    The inputs of a join have topics of their own.
    """
    blocks = {"block": int(state["block"])}
    join = join_position(state) or {}
    for number, place in enumerate(join.get("inputs", ())):
        inner = place["source"] or {}
        if "block" in inner:
            blocks[f"block.{number}"] = int(inner["block"])
    return blocks


Batches = Iterator[tuple[pa.RecordBatch, Position]]
"""Record batches, each with the position after it."""


@dataclass(frozen=True)
class RowPlace:
    """A row of a file, such as "clicks.csv, line 12"; `number` counts from 1, None = unknown."""

    file: str
    number: int | None
    word: str = "row"

    def __str__(self) -> str:
        if self.number is None:
            return self.file
        return f"{self.file}, {self.word} {self.number}"


def schema_to_text(schema: pa.Schema) -> str:
    """Return names and types as text for a position."""
    return base64.b64encode(schema.remove_metadata().serialize().to_pybytes()).decode()


def schema_from_text(text: str) -> pa.Schema:
    """Return the schema that `schema_to_text` wrote; no columns for an empty text."""
    if not text:
        return pa.schema([])
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
