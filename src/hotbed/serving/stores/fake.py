# SPDX-License-Identifier: Apache-2.0
"""Serve rows from dicts, for tests of the code that reads rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.data.schema import Schema
from hotbed.errors import StoreError
from hotbed.serving.rows import ServedTable
from hotbed.serving.stores.base import ModelVersion, RowStore

_Tables = Mapping[str, Mapping[int, Sequence[float]]]


@dataclass(frozen=True, eq=False)
class FakeVersion(ModelVersion):
    """A version whose rows are dicts."""

    rows: _Tables
    absent: Mapping[str, ServedTable]
    store: FakeStore

    def graph_bytes(self) -> bytes:
        return b""

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        return iter(())

    def find(
        self, wanted: Mapping[str, NDArray[np.int64]], seconds: float | None = None
    ) -> dict[str, NDArray[np.float32]]:
        self.store.asked.append({name: ids.tolist() for name, ids in wanted.items()})
        if self.store.silent:
            raise StoreError("the store is silent, got no answer. Wait.")
        rows = {}
        for name, ids in wanted.items():
            rows[name] = self.absent[name].find(ids)[0]
            for place, row_id in enumerate(ids.tolist()):
                if row_id in self.rows[name]:
                    rows[name][place] = self.rows[name][row_id]
        return rows


class FakeStore(RowStore):
    """A parameter server of one model over dicts.

    Attributes:
        silent: Whether it raises StoreError instead of an answer.
        asked: The ids by table of each call of `find`.
    """

    def __init__(self, configs: Mapping[str, Mapping[str, Any]]) -> None:
        self.configs = configs
        self.silent = False
        self.hottest = dict[str, list[int]]()
        self.versions = list[FakeVersion]()
        self.asked = list[dict[str, list[int]]]()

    def publish(self, rows: _Tables) -> FakeVersion:
        """Add a version of these rows, by table and id, and return it."""
        number = len(self.versions) + 1
        version = FakeVersion(
            name="fake",
            version=number,
            digest=f"{number}",
            schema=Schema([]),
            graph={},
            configs=self.configs,
            published=None,
            learned=None,
            rows=rows,
            absent={name: ServedTable(config, ()) for name, config in self.configs.items()},
            store=self,
        )
        self.versions.append(version)
        return version

    def model(self, name: str) -> FakeVersion:
        return self.versions[-1]

    def changes(self, name: str, since: str, to: str) -> Mapping[str, NDArray[np.int64]] | None:
        old = self.versions[int(since) - 1].rows
        new = self.versions[int(to) - 1].rows
        changes = {}
        for table in self.configs:
            ids = {*old[table], *new[table]}
            changed = [row_id for row_id in ids if old[table].get(row_id) != new[table].get(row_id)]
            changes[table] = np.array(changed, np.int64)
        return changes

    def hot(self, name: str, table: str, n: int) -> NDArray[np.int64]:
        return np.array(self.hottest.get(table, [])[:n], np.int64)
