# SPDX-License-Identifier: Apache-2.0
"""RowGroups: parts of Parquet files that several readers need, decoded once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import pyarrow as pa

from hotbed.objects import Identity


class RowGroup(NamedTuple):
    """A row group of a file, and how its columns are read.

    Attributes:
        file: the file.
        number: of the group.
        columns: the names of its columns that are read.
        words: those of them that are read as dictionaries.
    """

    file: str
    number: int
    columns: tuple[str, ...]
    words: tuple[str, ...]


@dataclass(eq=False)
class Decoded:
    """The rows of a row group, in order."""

    batches: list[pa.RecordBatch]
    num_bytes: int

    def cut(self, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows in views of at most `rows` rows."""
        for batch in self.batches:
            for start in range(0, batch.num_rows, rows):
                yield batch.slice(start, rows)


class RowGroups:
    """Row groups that readers of the ranges of one epoch share.

    A group is kept as long as a reader holds it. Groups beyond `most_bytes`, and damaged ones, are
    not shared: each reader decodes them for itself.

    Attributes:
        most_bytes: of the decoded groups together.
        footers: of files that are read, by path, size and time of change.
        identities: of objects that are read, by URL: one epoch reads one content.
    """

    def __init__(self) -> None:
        self.most_bytes = 256 << 20
        self.footers: WeakValueDictionary[tuple[str, int, int], Any] = WeakValueDictionary()
        self.identities: dict[str, Identity] = {}
        self._held: WeakValueDictionary[RowGroup, Decoded] = WeakValueDictionary()
        self._alone: set[RowGroup] = set()

    def decoded(self, group: RowGroup, batches: Iterable[pa.RecordBatch]) -> Decoded | None:
        """Return the rows of a group, of which `batches` are decoded if nobody holds it yet.

        None: it is not shared.
        """
        if group in self._held or group in self._alone:
            return self._held.get(group)
        room = self.most_bytes - sum(each.num_bytes for each in self._held.values())
        decoded = Decoded([], 0)
        is_sound = True
        try:
            for batch in batches:
                decoded.batches.append(batch)
                decoded.num_bytes += batch.nbytes
                if decoded.num_bytes > room:
                    break
        except (pa.ArrowException, OSError):
            is_sound = False
        if not is_sound or decoded.num_bytes > room:
            self._alone.add(group)
            return None
        self._held[group] = decoded
        return decoded
