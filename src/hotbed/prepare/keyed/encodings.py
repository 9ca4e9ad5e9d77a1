# SPDX-License-Identifier: Apache-2.0
"""Target encodings of training rows, which their own labels have no part in.

All other rows, and servers, get the learned values of `TargetEncode`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from hotbed.data.arrays import nulls_of
from hotbed.data.columns import Columns, transformed
from hotbed.data.fitted import FittedMap
from hotbed.data.schema import Column, Dense, Id, Schema
from hotbed.prepare.partitions import TRAIN, Chunk, Partition
from hotbed.prepare.places import Purpose, folds_of
from hotbed.prepare.shuffle import Side

Values = Callable[[Chunk], pa.Array]


class Encoding(ABC):
    """Base of the encodings of training rows.

    `column`: the name of the schema's column. `num_transforms`: how many transforms of the column
    the encoding stands for.
    """

    column: str
    num_transforms: int

    @property
    def name(self) -> str:
        """The column that it adds to the raw ones; no raw column has such a name."""
        return f"\0encoded {self.column}"

    @abstractmethod
    def values(self, partition: Partition) -> Values:
        """Return what gives the values of a chunk: float32 [n], null outside of training."""


@dataclass(frozen=True)
class OutOfFold(Encoding):
    """The mean of the label over the rows outside of a row's fold.

    Args:
        column: the name of the schema's column.
        num_transforms: how many transforms of the column the encoding stands for.
        before: the column with the transforms before the encoding, which gives the keys.
        means: by key, a value for each fold.
        prior: for missing keys.
        seed: of the preparation.
        rules: as `Schema.rules`.
    """

    column: str
    num_transforms: int
    before: Dense | Id
    means: FittedMap
    prior: float
    seed: int
    rules: int

    def values(self, partition: Partition) -> Values:
        return self._of_chunk

    def _of_chunk(self, chunk: Chunk) -> pa.Array:
        context = Columns(chunk.rows, self.rules)
        keys = transformed(self.before.source, self.before.transforms, context)
        slots = self.means.slots(context.ids(keys))
        slots[nulls_of(keys)] = -1
        folds = folds_of(chunk.hashes(self.seed, Purpose.FOLDS), self.means.width)
        means = self.means.values(slots)[np.arange(len(chunk)), folds]
        means[slots < 0] = self.prior
        return pa.array(means, mask=chunk.part != TRAIN)


@dataclass(frozen=True)
class Earlier(Encoding):
    """The mean of the label over strictly earlier rows of the key.

    Args:
        column: the name of the schema's column.
        num_transforms: how many transforms of the column the encoding stands for.
        side: has the values.
        prior: for missing keys.
    """

    column: str
    num_transforms: int
    side: Side
    prior: float

    def values(self, partition: Partition) -> Values:
        reader = self.side.reader(partition.number)

        def of_chunk(chunk: Chunk) -> pa.Array:
            table = reader.read(chunk.number, len(chunk))
            means = table.column("mean").combine_chunks().cast(pa.float32())
            means = means.fill_null(self.prior)
            missing = pa.scalar(None, pa.float32())
            return pa.compute.if_else(pa.array(chunk.part == TRAIN), means, missing)

        return of_chunk


def training_schema(schema: Schema, encodings: Sequence[Encoding]) -> Schema:
    """Return the schema that encodes training rows, which have the columns of `encodings`."""
    by_column = {encoding.column: encoding for encoding in encodings}
    columns: list[Column] = []
    for column in schema.columns:
        encoding = by_column.get(column.name)
        if encoding is None:
            columns.append(column)
            continue
        assert isinstance(column, (Dense, Id))
        rest = column.transforms[encoding.num_transforms :]
        columns.append(replace(column, column=encoding.name, transforms=rest))
    return replace(schema, columns=columns)
