# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint or a version keeps of one key: the entries of its histories and counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.config import did_you_mean
from hotbed.connectors.times import text_of_time
from hotbed.data.arrow_types import holds_text
from hotbed.data.histories import KeptByKey, RowKeys, read_stored
from hotbed.data.schema import Schema
from hotbed.embedding.hashing import partition
from hotbed.embedding.policy import PARTITIONS
from hotbed.errors import ConfigError
from hotbed.persist.container.format import Reader, read_newest


@dataclass(frozen=True)
class KeptEntries:
    """The entries of a column that are kept of a key, by arrival.

    Attributes:
        column: its name.
        parts: what an entry has beside its time.
        times: from when on each was known, in microseconds; of a count where its tile begins.
        values: [entries, parts].
    """

    column: str
    parts: Sequence[str]
    times: NDArray[np.int64]
    values: NDArray[np.int64]

    def lines(self) -> Iterator[list[str]]:
        """Yield the time and the parts of each entry as texts."""
        for time, values in zip(self.times.tolist(), self.values.tolist(), strict=True):
            yield [text_of_time(time), *map(str, values)]


def kept_entries(path: str | Path, feature: str, value: str) -> list[KeptEntries]:
    """Return what is kept of a key, for each column that is kept by it.

    Args:
        path: a checkpoint, an export or published versions.
        feature: the id column that is the key.
        value: its raw value, as text.

    Raises:
        ConfigError: nothing is kept by this column.
    """
    return read_newest(path, lambda reader: _entries(reader, feature, value))


def _entries(reader: Reader, feature: str, value: str) -> list[KeptEntries]:
    schema = reader.schema
    columns = [each for each in _kept(schema) if each.by == feature]
    if schema is None or not columns:
        choices = {each.by for each in _kept(schema)}
        raise ConfigError(
            f"--history: nothing is kept by this column, got {feature!r}. "
            f"{did_you_mean(feature, choices)}"
        )
    column = schema[feature]
    raw: Any = value
    if not holds_text(schema.types.get(column.source, "integer")):
        raw = int(value)
    key = schema.ids_of(feature, [raw])
    keys = [RowKeys(key, np.zeros(1, np.int64))] * len(columns)

    def read(wanted: Mapping[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int32]]:
        return {table: _rows(reader, table, ids) for table, ids in wanted.items()}

    entries = []
    for each, stored in zip(columns, read_stored(columns, schema, keys, read), strict=True):
        kind = each.kind_in(schema)
        times = each.times_of(stored.entries, kind) * kind.tick
        numbers = each.numbers_of(stored.entries)
        entries.append(KeptEntries(each.name, each.parts_in(schema), times, numbers))
    return entries


def _kept(schema: Schema | None) -> list[KeptByKey]:
    columns = () if schema is None else schema.kept
    return [column for column in columns if isinstance(column, KeptByKey)]


def _rows(reader: Reader, table: str, ids: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the rows of ids, [n, dim]; zeros for those without one."""
    owned = np.zeros(PARTITIONS, bool)
    owned[partition(ids)] = True
    places = {int(each): place for place, each in enumerate(ids)}
    rows = np.zeros((len(ids), int(reader.entry(table).config["dim"])), np.int32)
    for link in reader.links:
        for batch in link.removed(table, lambda name: owned):
            for each in batch.column("id").to_pylist():
                if each in places:
                    rows[places[each]] = 0
        for batch in link.parts(table, lambda name: owned):
            values = batch.column("value").flatten().to_numpy().reshape(batch.num_rows, -1)
            for number, each in enumerate(batch.column("id").to_pylist()):
                if each in places:
                    rows[places[each]] = values[number]
    return rows
