# SPDX-License-Identifier: Apache-2.0
"""Tables as servers read them: files of rows, and the pooling of features over them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed import _core
from hotbed.config import build
from hotbed.data.batch import Ids, as_ids
from hotbed.embedding.native import native_config
from hotbed.embedding.table import Table
from hotbed.errors import FormatError, RowShapeError
from hotbed.frozen import FrozenRows, IdArray, RowArray, rows_at_once

FeatureIds: TypeAlias = Mapping[str, Ids | IdArray]
"""Ids by feature; of an array each sample has one id."""
FeatureSpec: TypeAlias = tuple[str, str, str]
"""Name, table and pooling of a feature."""


class ServedTable:
    """A table as servers read it: files of rows, newest first.

    An id without a row reads exactly as in training: with admission as `default`, without it as
    its initial row.

    Args:
        config: keywords of the table's constructor, as a checkpoint holds them.
        layers: the files.

    Raises:
        FormatError: the files hold rows of another dim.
    """

    def __init__(self, config: Mapping[str, Any], layers: Sequence[FrozenRows]) -> None:
        key = json.dumps(config, sort_keys=True)
        self.name, self.dim, native_config = _native_table(key)
        self.layers = tuple(layers)
        native_layers = [layer.native for layer in layers]
        try:
            self.native = _core.FrozenTable(native_layers, native_config)
        except ValueError as error:
            raise FormatError(
                f"table {self.name!r}: expected rows of dim {self.dim}, got {error}. Export again."
            ) from error

    def find(self, ids: Any) -> tuple[RowArray, NDArray[np.bool_]]:
        """Return the rows of ids, int64 [n] -> float32 [n, dim], and which ids have one, bool [n].

        Raises RowShapeError for anything but whole numbers, as `Table.find` does.
        """
        flat, has_row = self.native.find(as_ids(ids))
        rows = flat.reshape(-1, self.dim)
        return rows, has_row.astype(bool)

    def batches(self, ids: IdArray) -> Iterator[pa.RecordBatch]:
        """Yield the rows of ids as record batches of `id` and `value`."""
        num_rows = rows_at_once(self.dim)
        for start in range(0, len(ids), num_rows):
            part = ids[start : start + num_rows]
            rows, _ = self.find(part)
            lanes = pa.array(rows.reshape(-1))
            values = pa.FixedSizeListArray.from_arrays(lanes, self.dim)
            columns = {"id": pa.array(part), "value": values}
            yield pa.record_batch(columns)


@lru_cache(1024)  # each version of a model has the same tables
def _native_table(config: str) -> tuple[str, int, _core.TableConfig]:
    keywords = json.loads(config)
    table: Table = build(keywords, Table, "table")
    return table.name, table.dim, native_config(table)


class LookupResult(NamedTuple):
    """The embedding half of an answer.

    Attributes:
        flat: pooled features, one after the other, float32 [n, width].
        sequences: the rows [m, dim] of each sequence feature.
        late: how many rows read as without one because they did not arrive in time.
    """

    flat: RowArray
    sequences: list[RowArray]
    late: int = 0


LookupCall: TypeAlias = Callable[[FeatureIds, int, float | None], LookupResult]
"""Ids by feature, number of samples, and their time -> embeddings; see `FrozenLookup`."""


class FrozenLookup:
    """The embedding half of a model: the rows of all features, pooled in one native call.

    A feature with one sample where others have more holds for all samples.

    Args:
        features: (name, table, pooling) of each feature, as the collection in the network had
            them.
        tables: the tables by name.
    """

    def __init__(self, features: Sequence[FeatureSpec], tables: Mapping[str, ServedTable]) -> None:
        names = sorted({table for _, table, _ in features})
        layout = native_layout(features, names)
        self._native = _core.FrozenLookup([tables[name].native for name in names], layout)

    def __call__(
        self, ids: FeatureIds, num_samples: int, asked: float | None = None
    ) -> LookupResult:
        """Return the embeddings of ids by feature; of an array each sample has one id.

        `asked`: not needed, since no row has to be waited for.

        Raises RowShapeError, which names the feature, for ids that do not fit.
        """
        try:
            flat, sequences = self._native(ids, num_samples)
        except ValueError as error:
            raise RowShapeError(f"{error}. Encode the batch with the same schema.") from error
        return LookupResult(flat, sequences)


def native_layout(
    features: Sequence[FeatureSpec], tables: Sequence[str]
) -> list[tuple[str, int, str]]:
    """Return (name, table, pooling) of features with the numbers of their tables."""
    layout = []
    for name, table, pooling in features:
        layout.append((name, tables.index(table), pooling))
    return layout
