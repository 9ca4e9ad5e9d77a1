# SPDX-License-Identifier: Apache-2.0
"""Negatives of implicit feedback: rows of items that a user did not choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed import checks
from hotbed.data import numbers
from hotbed.data.columns import Columns, ids_of
from hotbed.data.schema import Label, Schema
from hotbed.embedding.hashing import Uint64Array
from hotbed.errors import ConfigError
from hotbed.prepare.places import hash_copies
from hotbed.prepare.sampling.catalogue import Catalogue
from hotbed.prepare.sampling.draw import draw
from hotbed.prepare.sampling.exposure import Seen, Visits
from hotbed.prepare.sampling.order import Order
from hotbed.prepare.shuffle import Bucket

BoolArray = NDArray[np.bool_]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class Negatives:
    """Add rows with label 0 after each positive row of the source.

    A negative is a copy of its positive with another item. Items of which the user has a row at the
    time of the positive are not drawn. Training rows get items of training rows, and validation
    rows get items of validation rows. Items are drawn independently, so that one may repeat.

    The schema has one label. If the source has its column, rows with a label above 0 are the
    positives. Else all rows are, and the column is added.

    A positive for which there is nothing to draw is left out, and counted: without negatives, its
    user and its history would give its label away. `seen="never"` keeps it.

    Args:
        user: the column of users.
        item: the column of items.
        per_positive: negatives for each positive row.
        draw: "uniform": all items have the same chance. "popularity": the chance of an item is
            proportional to its number of rows in the part, to the power of `power`.
        power: of "popularity"; 0.75 as in word2vec.
        item_columns: columns that follow the item. A negative takes them from the latest row of its
            item at or before its time, else from the first row. It takes other columns from the
            positive.
        seen: which items that the user has seen are drawn. "matched": if the user has an earlier
            row of the positive's item, other items of the user's earlier rows; else items without
            an earlier row of the user. "any": all. "never": only items of which the user has no row
            at any time, with `item_columns` as in the item's first row. With "never" and a history
            of the user, "the item is in the history" is the label.

    Example: `Negatives("user", "film", per_positive=4, item_columns=["genres"])`
    """

    user: str
    item: str
    per_positive: int = 4
    draw: Literal["uniform", "popularity"] = "uniform"
    power: float = 0.75
    item_columns: Sequence[str] = ()
    seen: Seen = "matched"

    def __post_init__(self) -> None:
        checks.one_of("negatives.seen", self.seen, ("matched", "any", "never"))
        object.__setattr__(self, "item_columns", checks.names(self.item_columns))
        checks.whole_number("negatives.per_positive", self.per_positive, 1)
        checks.finite_number("negatives.power", self.power, least=0)
        if self.user == self.item:
            raise ConfigError(
                f"negatives.item: expected another column than that of users, got {self.item!r}. "
                "Name the column of items."
            )

    def inputs(self) -> Sequence[str]:
        """Return the raw columns that it reads, without the label's."""
        return (self.user, *self.of_item)

    @property
    def of_item(self) -> Sequence[str]:
        """The raw columns of an item: itself, and those that follow it."""
        others = [name for name in self.item_columns if name != self.item]
        return (self.item, *others)

    @property
    def exponent(self) -> float:
        """The e for which an item's chance is proportional to its number of rows ** e."""
        if self.draw == "uniform":
            return 0.0
        return self.power


def label_of(schema: Schema) -> Label:
    """Return the label that negatives have.

    Raises:
        ConfigError: the schema has none or several.
    """
    if len(schema.labels) == 1:
        return schema.labels[0]
    names = [label.name for label in schema.labels]
    raise ConfigError(
        f"negatives: expected a schema with one label, got {names}. A column of this name is 1 for "
        "rows of the source and 0 for the rows that are added."
    )


def with_label(rows: pa.RecordBatch, label: Label) -> pa.RecordBatch:
    """Return `rows` with the raw column of the label: 1 in each row, unless it is there."""
    if label.source in rows.schema.names:
        return rows
    if label.positive is not None or label.threshold is not None:
        raise ConfigError(
            f"negatives: the source has no column {label.source!r}, got a label with positive or "
            "threshold. Leave them out: the column is added, 1 for rows of the source."
        )
    ones = pa.array(np.ones(rows.num_rows, np.int64))
    return rows.append_column(label.source, ones)


def user_rows(
    negatives: Negatives,
    rows: pa.RecordBatch,
    label: Label,
    order: Order,
    is_valid: BoolArray,
    hashes: Uint64Array,
) -> tuple[Int64Array, pa.RecordBatch]:
    """Return the keys and the rows of a shuffle by user.

    Rows without a user, an item or a time are left out: nothing is known of them.

    Args:
        negatives: the columns.
        rows: the raw rows of a chunk, with the label's column.
        label: which rows are positive.
        order: the times of the rows.
        is_valid: which rows are for validation, [n].
        hashes: hashes of the rows' places for `Purpose.NEGATIVES`, [n].
    """
    columns = Columns(rows)
    users = columns.column(negatives.user)
    items = columns.column(negatives.item)
    is_positive = numbers.label(label, columns.column(label.source)) > 0
    times, without_time = order.times(rows)
    missing = np.asarray(users.is_null()) | np.asarray(items.is_null()) | without_time
    places = np.flatnonzero(~missing)
    keys = ids_of(users, negatives.user)[places]
    batch = pa.record_batch(
        {
            "row": places,
            "user": keys,
            "item": ids_of(items, negatives.item)[places],
            "time": times[places],
            "is_positive": is_positive[places],
            "is_valid": is_valid[places],
            "hash": hashes[places],
        }
    )
    return keys, batch


@dataclass(frozen=True)
class Drawn:
    """The negatives of a bucket's rows.

    `items`: places in the catalogue, list of int64 for each row; null for rows without negatives.
    `num_items`: all of them. `num_without`: positives for which there is nothing to draw.
    """

    items: pa.FixedSizeListArray
    num_items: int
    num_without: int


def draw_bucket(negatives: Negatives, catalogue: Catalogue, bucket: Bucket) -> Drawn:
    """Draw the negatives of all users of a bucket, whose rows are those of `user_rows`."""
    columns = {name: bucket.rows.column(name).to_numpy() for name in bucket.rows.column_names}
    items = catalogue.places(columns["item"])
    visits = Visits.of(columns["user"], columns["time"], items)
    width = negatives.per_positive
    random = hash_copies(columns["hash"][:, None], np.arange(1, width + 1))
    drawn = np.full((len(items), width), -1, np.int64)
    for is_valid, weights in ((False, catalogue.train), (True, catalogue.valid)):
        rows = np.flatnonzero(columns["is_positive"] & (columns["is_valid"] == is_valid))
        drawn[rows] = draw(visits.candidates(negatives.seen, weights), rows, random)
    is_without = drawn[:, 0] < 0
    lists = pa.FixedSizeListArray.from_arrays(
        pa.array(drawn.ravel()), width, mask=pa.array(is_without)
    )
    num_without = int((is_without & columns["is_positive"]).sum())
    return Drawn(lists, int((drawn >= 0).sum()), num_without)


@dataclass(frozen=True)
class Expanded:
    """Rows with their negatives, each positive before its own.

    `origins`: the row of each row or of its positive, [m]. `copies`: 0 for a row of the source,
    else the number of the negative from 1, [m].
    """

    rows: pa.RecordBatch
    origins: Int64Array
    copies: Int64Array


def expand(
    negatives: Negatives,
    rows: pa.RecordBatch,
    label: Label,
    order: Order,
    catalogue: Catalogue,
    items: pa.Array,
) -> Expanded:
    """Return `rows` with their negatives; positives without any are left out.

    Args:
        negatives: the columns.
        rows: raw and derived columns of a chunk, with the label's column.
        label: gets a value that is encoded as 0.
        order: the times of the rows.
        catalogue: of all items.
        items: what was drawn for each row, as in `Drawn.items`.
    """
    is_without = np.asarray(items.is_null())
    num_copies = np.where(is_without, 1, 1 + negatives.per_positive)
    if negatives.seen != "never":
        is_positive = numbers.label(label, Columns(rows).column(label.source)) > 0
        num_copies[is_without & is_positive] = 0
    origins = np.repeat(np.arange(rows.num_rows), num_copies)
    first = np.cumsum(num_copies) - num_copies
    copies = np.arange(len(origins)) - first[origins]
    is_copy = copies > 0
    # the values of the negatives stand behind those of the rows
    places = origins.copy()
    places[is_copy] = rows.num_rows + np.arange(int(is_copy.sum()))
    times = None
    if order.column is not None:
        times = order.times(rows)[0][origins[is_copy]]
    drawn = items.drop_null().flatten().to_numpy(zero_copy_only=False)
    replaced = catalogue.take(negatives.of_item, drawn, times)
    columns: dict[str, pa.Array] = {}
    for name in rows.schema.names:
        values = _plain(rows.column(name))
        new = replaced.get(name)
        if name == label.source:
            new = _zero(label, values.type).take(_zeros(len(drawn)))
        if new is None:
            columns[name] = values.take(pa.array(origins))
        else:
            both = pa.concat_arrays([values, new.cast(values.type)])
            columns[name] = both.take(pa.array(places))
    return Expanded(pa.RecordBatch.from_pydict(columns), origins, copies)


def _zero(label: Label, kind: pa.DataType) -> pa.Array:
    """Return a raw value that the label encodes as 0, as an array of it alone."""
    zero = 0
    if label.threshold is not None:
        zero = min(0, math.floor(label.threshold - 1))
    if label.positive is not None:
        as_text = pa.array([zero]).cast(kind).cast(pa.string())
        if as_text[0].as_py() == label.positive:
            zero = 1
    return pa.array([zero]).cast(kind)


def _zeros(count: int) -> pa.Array:
    return pa.array(np.zeros(count, np.int64))


def _plain(values: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(values.type):
        return values.dictionary_decode()
    return values
