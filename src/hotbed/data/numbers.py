# SPDX-License-Identifier: Apache-2.0
"""Columns of numbers as NumPy arrays: dense values, labels, weights and times."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.connectors.read_plan import Skips
from hotbed.connectors.times import to_microseconds
from hotbed.data.arrays import (
    as_numpy,
    first_of,
    integers_of,
    list_lengths,
    nulls_of,
    require_text_form,
    rows_of_items,
)
from hotbed.data.arrow_types import is_bytes, is_list, is_number, is_whole
from hotbed.data.batch import Batch, changed
from hotbed.data.context import BadRows
from hotbed.data.schema import Dense, DisplayPosition, Label, Time, Weight
from hotbed.errors import DataError, SchemaError

_PLAIN = {pa.float32().id, pa.int8().id, pa.int16().id, pa.int32().id, pa.int64().id}

NAMED_VALUES = 10
"""Values of a label that a message names."""
FIRST_ROWS = 100_000
"""Rows of a stream after which a warning says that a label was always 0, or always 1."""


def dense(column: Dense, values: pa.Array) -> np.ndarray:
    """Return float32 [n], or [n, width] for lists."""
    if pa.types.is_null(values.type) and column.width != 1:
        values = values.cast(pa.list_(pa.float32()))
    if not is_list(values.type):
        if column.width != 1:
            raise SchemaError(
                f"dense {column.name!r}: expected lists of {column.width} numbers, "
                f"got {values.type}. Give lists or width=1."
            )
        return numeric(column.name, values)
    lengths = list_lengths(values)
    wrong = lengths != column.width
    missing = nulls_of(values)
    if missing.any():
        message = (
            f"dense {column.name!r}: expected lists of {column.width} numbers, got a missing list. "
            "Correct the row, or write its numbers as nulls and add FillMissing."
        )
        raise BadRows(column.name, missing, message)
    if wrong.any():
        raise BadRows(
            column.name,
            wrong,
            f"dense {column.name!r}: expected lists of {column.width} numbers, "
            f"got a list of {lengths[wrong][0]}. Correct the row or the width.",
        )
    flat = numeric(column.name, values.flatten(), lengths)
    if column.width == 1:
        return flat
    return flat.reshape(-1, column.width)


def label(column: Label, values: pa.Array, in_unit: bool = False) -> np.ndarray:
    """Return float32 [n]; with `in_unit`, values outside [0, 1] are bad rows."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if values.null_count:
        raise _missing_label(column, nulls_of(values))
    if column.positive is not None:
        require_text_form(f"label {column.name!r}: positive", values.type)
        equal = pc.equal(values.cast(pa.string()), column.positive)
        return np.asarray(as_numpy(equal), np.float32)
    try:
        if column.threshold is not None:
            numeric(column.name, values, kind=np.float64)
            return _reaches(values, column.threshold).astype(np.float32)
        numbers = numeric(column.name, values)
    except BadRows as bad:
        word = first_of(values, bad.mask)
        if word != word:
            raise _missing_label(column, bad.mask) from None
        if not is_bytes(values.type):
            raise
        message = (
            f"label {column.name!r}: expected numbers, got {word!r}. "
            f"For text labels, give positive={word!r} or another of the texts."
        )
        raise BadRows(column.source, bad.mask, message) from None
    if in_unit:
        mask = outside_unit(numbers)
        if mask.any():
            raise BadRows(column.source, mask, label_outside_unit(column, numbers[mask][0]))
    return numbers


def _reaches(values: pa.Array, threshold: float) -> np.ndarray:
    """Return bool [n]: where numbers are >= `threshold` in their own type; none are missing."""
    kind = values.type
    if is_bytes(kind):
        text = pl.Series(_as_text(values))
        whole = text.cast(pl.Int64, strict=False)
        is_float = as_numpy(whole.is_null().to_arrow())
        reaches = _reaches(whole.fill_null(0).to_arrow(), threshold)
        floats = text.cast(pl.Float64, strict=False).to_numpy()
        return np.where(is_float, floats >= threshold, reaches)
    if pa.types.is_decimal(kind):
        least = Decimal(str(threshold))
        return np.array([value >= least for value in values.to_pylist()], bool)
    if not is_whole(kind):
        numbers = as_numpy(values)
        with np.errstate(over="ignore"):
            return np.asarray(numbers >= numbers.dtype.type(threshold))
    integers, _ = integers_of(values)
    limits = np.iinfo(integers.dtype)
    if threshold > limits.max:
        return np.zeros(len(integers), bool)
    return np.asarray(integers >= math.ceil(max(threshold, limits.min)))


def outside_unit(labels: np.ndarray) -> np.ndarray:
    """Return bool [n]: true where a label is outside [0, 1]."""
    return (labels < 0) | (labels > 1)


def label_outside_unit(column: Label, value: float) -> str:
    """Return the message for a label that a cross-entropy cannot take."""
    if column.source == column.name:
        source = ""
    else:
        source = f" of column {column.source!r}"
    return (
        f"label {column.name!r}{source}: the loss is a cross-entropy and needs labels from 0 to 1, "
        f"got {value:g}. Give Label({column.name!r}, threshold=…), which makes 1 of values from "
        "it on and 0 of the others, or train with loss 'mse'."
    )


def with_unit_labels(batch: Batch, labels: Iterable[Label], skips: Skips | None) -> Batch:
    """Return a mapped batch without the rows that have a label outside [0, 1].

    Args:
        batch: its rows; labels that it does not have are not checked.
        labels: those that must lie in [0, 1].
        skips: counts the rows that are left out.

    Raises:
        DataError: there is such a row, and `skips` is None.
    """
    for label in labels:
        if label.name not in batch.labels:
            continue
        wrong = outside_unit(batch.labels[label.name])
        if not wrong.any():
            continue
        message = label_outside_unit(label, batch.labels[label.name][wrong][0])
        if skips is None:
            raise DataError(f"row {int(wrong.argmax()) + 1} of a mapped batch: {message}")
        skips.add("value", message, int(wrong.sum()))
        sound = batch.take(np.flatnonzero(~wrong))
        batch = changed(sound, {"previews": batch.previews})
    return batch


def _missing_label(column: Label, mask: np.ndarray) -> BadRows:
    message = (
        f"label {column.name!r}: expected a value in every row, got a missing value. "
        "Leave such rows out of the data."
    )
    return BadRows(column.source, mask, message)


def weight(column: Weight, values: pa.Array) -> np.ndarray:
    """Return float32 [n]; values below 0 are bad rows."""
    numbers = numeric(column.name, values)
    wide = numeric(column.name, values, kind=np.float64)
    is_negative = wide < 0
    if is_negative.any():
        raise BadRows(
            column.source,
            is_negative,
            f"weight {column.name!r}: expected weights >= 0, got {wide.min():g}. Correct the row.",
        )
    return numbers


def display_position(column: DisplayPosition, values: pa.Array) -> np.ndarray:
    """Return float32 [n]: 0 for the first place, -1 where it is missing.

    Places before the first one, and numbers that are not whole, are bad rows.
    """
    is_missing = values.is_null().to_numpy(zero_copy_only=False)
    places = numeric(column.name, values.fill_null(column.first), kind=np.float64) - column.first
    is_wrong = ~((places >= 0) & (places == np.floor(places)))
    if is_wrong.any():
        raise BadRows(
            column.source,
            is_wrong,
            f"display position {column.name!r}: expected whole numbers from {column.first} on, got "
            f"{places[is_wrong][0] + column.first:g}. Correct the row, or give `first`.",
        )
    return np.where(is_missing, -1, np.minimum(places, column.size - 1)).astype(np.float32)


def time(column: Time, values: pa.Array, zones: set[str] | None = None) -> np.ndarray:
    """Return int64 [n], microseconds UTC. `zones`: as in `to_microseconds`."""
    micros = to_microseconds(values, column.unit, zones)
    if micros.null_count:
        mask = nulls_of(micros)
        raise BadRows(
            column.source,
            mask,
            f"time {column.name!r}: expected times of unit {column.unit!r}, "
            f"got {first_of(values, mask)!r}. Correct the row or the unit.",
        )
    return np.array(as_numpy(micros), dtype=np.int64)


def numeric(
    name: str, values: pa.Array, lengths: np.ndarray | None = None, *, kind: type = np.float32
) -> np.ndarray:
    """Return finite floats [n] from numbers or from text that holds numbers.

    Args:
        name: the column in messages.
        values: the column, or the flat items of a column of lists.
        lengths: for lists, the number of items of each row.
        kind: np.float32 or np.float64.

    Raises:
        SchemaError: for a type that does not hold numbers.
        BadRows: for values that are missing, not numbers or not finite.
    """
    stored = values.type
    # The common case is short, because requests wait for it.
    if stored.id in _PLAIN and not values.null_count:
        plain: np.ndarray = values.to_numpy().astype(kind)
        if np.isfinite(plain).all():
            return plain
    if pa.types.is_dictionary(stored):
        return numeric(name, values.dictionary_decode(), lengths, kind=kind)
    if not (is_bytes(stored) or is_number(stored)):
        raise SchemaError(
            f"column {name!r}: expected numbers, got {stored}. Transform it or give it another "
            "role."
        )
    if is_bytes(stored):
        text = pl.Series(_as_text(values))
        numbers = text.cast(pl.Float64, strict=False).to_arrow()
    else:
        numbers = values.cast(pa.float64(), safe=False)
    with np.errstate(over="ignore"):
        result: np.ndarray = np.array(as_numpy(numbers), dtype=kind)
    wrong = ~np.isfinite(result)
    if not wrong.any():
        return result
    first = first_of(values, wrong)
    if first is None or first != first:
        fault = "got a missing value. Add FillMissing."
    else:
        fault = f"got {first!r}. Correct or Clip it."
    if lengths is not None:
        wrong = rows_of_items(wrong, lengths)
    expected = f"expected finite {np.dtype(kind)} numbers"
    raise BadRows(name, wrong, f"column {name!r}: {expected}, {fault}")


def parsed(name: str, values: pa.Array) -> pa.Array:
    """Return numbers, those of text as float64; missing ones are null.

    Raises BadRows for text that is not a number.
    """
    if not is_bytes(values.type):
        return values
    numbers = pl.Series(_as_text(values)).cast(pl.Float64, strict=False).to_arrow()
    wrong = nulls_of(numbers) & ~nulls_of(values)
    if wrong.any():
        message = f"column {name!r}: expected numbers, got {first_of(values, wrong)!r}. Correct it."
        raise BadRows(name, wrong, message)
    return numbers


def _as_text(values: pa.Array) -> pa.Array:
    """Return bytes as text; those that are not UTF-8 become a text that is not a number."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        texts = []
        for value in values.to_pylist():
            is_bytes_value = isinstance(value, bytes)
            texts.append(value.decode("utf-8", "replace") if is_bytes_value else value)
        return pa.array(texts, pa.string())


@dataclass
class LabelValues:
    """What the rows of a label held so far.

    `rows`: encoded rows. `lowest`, `highest`: of their values. `warned`: whether it was reported
    that they are all alike. `others`: with `positive`, some of the other texts, while none matched.
    """

    label: Label
    rows: int = 0
    lowest: float = np.inf
    highest: float = -np.inf
    warned: bool = False
    others: dict[str, None] = field(default_factory=dict)

    def add(self, encoded: np.ndarray, values: pa.Array) -> None:
        """Add a chunk, which has rows: its encoded label and the raw column of the label."""
        self.rows += len(encoded)
        self.lowest = min(self.lowest, float(encoded.min()))
        self.highest = max(self.highest, float(encoded.max()))
        if self.is_unmatched and len(self.others) < NAMED_VALUES:
            texts = pc.unique(_as_text(values)).to_pylist()
            self.others.update(dict.fromkeys(texts))

    @property
    def is_unmatched(self) -> bool:
        """Whether the label has a `positive` that no row matched."""
        return self.label.positive is not None and self.highest <= 0

    @property
    def is_constant(self) -> bool:
        """Whether all rows are 0, or all are 1."""
        return self.lowest == self.highest and self.lowest in (0, 1)

    def message(self) -> str:
        """Return the message that no row matched `positive`, or that all rows are alike."""
        if self.is_unmatched:
            named = list(self.others)[:NAMED_VALUES]
            names = ", ".join(repr(text) for text in named)
            return (
                f"label {self.label.name!r}: none of {self.rows:,} rows is "
                f"positive={self.label.positive!r}, got {names}. Give one of them."
            )
        return (
            f"label {self.label.name!r}: expected 0 and 1, got {self.lowest:g} in all of the first "
            f"{self.rows:,} rows. Look whether column {self.label.source!r} holds the outcomes, "
            "and whether outcomes are known when their events are read."
        )


def check_matched(labels: Iterable[LabelValues]) -> None:
    """Raise DataError for a label whose `positive` did not match in a whole epoch."""
    for values in labels:
        if values.rows and values.is_unmatched:
            raise DataError(values.message())


def warn_constant(labels: Iterable[LabelValues]) -> None:
    """Warn once about a label that is always 0, or always 1, in the first rows of a stream."""
    for values in labels:
        if values.is_constant and not values.warned and values.rows >= FIRST_ROWS:
            values.warned = True
            warnings.warn(values.message(), UserWarning, stacklevel=3)
