# SPDX-License-Identifier: Apache-2.0
"""Serve rows from dicts, for tests of the code that reads rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotbed.data.schema import Schema
from hotbed.errors import StoreError
from hotbed.frozen import IdArray, RowArray
from hotbed.serving.rows import ServedTable
from hotbed.serving.stores.base import ModelVersion, RowStore, Weight

_Tables = Mapping[str, Mapping[int, Sequence[float]]]


@dataclass(frozen=True, eq=False)
class FakeVersion(ModelVersion):
    """A version whose rows are dicts."""

    rows: _Tables
    absent: Mapping[str, ServedTable]
    store: FakeStore

    def graph_bytes(self) -> bytes:
        return b""

    def weights(self) -> Iterator[Weight]:
        return iter(())

    def find(
        self, wanted: Mapping[str, IdArray], seconds: float | None = None
    ) -> dict[str, RowArray]:
        call = {name: ids.tolist() for name, ids in wanted.items()}
        self.store.asked.append(call)
        if self.store.silent:
            raise StoreError("the store is silent, got no answer. Wait.")
        answer = {}
        for name, ids in wanted.items():
            rows, _ = self.absent[name].find(ids)
            for place, row_id in enumerate(call[name]):
                row = self.rows[name].get(row_id)
                if row is not None:
                    rows[place] = row
            answer[name] = rows
        return answer


class FakeStore(RowStore):
    """A parameter server of one model over dicts.

    Attributes:
        silent: whether it raises StoreError instead of an answer.
        asked: the ids by table of each call of `find`.
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
        absent = {}
        for name, config in self.configs.items():
            absent[name] = ServedTable(config, ())
        version = FakeVersion(
            name="fake",
            version=number,
            digest=f"{number}",
            schema=Schema([]),
            graph={},
            configs=self.configs,
            published=None,
            learned=None,
            mended=0,
            rows=rows,
            absent=absent,
            store=self,
        )
        self.versions.append(version)
        return version

    def model(self, name: str) -> FakeVersion:
        return self.versions[-1]

    def changes(self, name: str, since: str, to: str) -> Mapping[str, IdArray] | None:
        old = self.versions[int(since) - 1]
        new = self.versions[int(to) - 1]
        changes = {}
        for table in self.configs:
            old_rows = old.rows[table]
            new_rows = new.rows[table]
            ids = []
            for row_id in {*old_rows, *new_rows}:
                if old_rows.get(row_id) != new_rows.get(row_id):
                    ids.append(row_id)
            changes[table] = np.array(ids, np.int64)
        return changes

    def hot(self, name: str, table: str, n: int) -> IdArray:
        hottest = self.hottest.get(table, [])
        return np.array(hottest[:n], np.int64)
