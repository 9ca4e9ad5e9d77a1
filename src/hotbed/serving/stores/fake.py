# SPDX-License-Identifier: Apache-2.0
"""A parameter server over dicts: too simple to be wrong, for tests of what reads rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.data.schema import Schema
from hotbed.errors import StoreError
from hotbed.serving.rows import ServedTable
from hotbed.serving.stores.base import ModelVersion, Store

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
            raise StoreError("the store is silent — received nothing — wait")
        found = {}
        for name, ids in wanted.items():
            found[name] = self.absent[name].find(ids)[0]
            for place, one in enumerate(ids.tolist()):
                if one in self.rows[name]:
                    found[name][place] = self.rows[name][one]
        return found


class FakeStore(Store):
    """A parameter server of one model over dicts. `silent`: it does not answer. `asked`: what it
    was asked for.
    """

    def __init__(self, configs: Mapping[str, Mapping[str, Any]]) -> None:
        self.configs = configs
        self.silent = False
        self.hottest = dict[str, list[int]]()
        self.versions = list[FakeVersion]()
        self.asked = list[dict[str, list[int]]]()

    def publish(self, rows: _Tables) -> FakeVersion:
        """A version of these rows, by table and id."""
        number = len(self.versions) + 1
        nothing = Schema([])
        absent = {name: ServedTable(config, ()) for name, config in self.configs.items()}
        made = FakeVersion(
            "fake", number, f"{number}", nothing, {}, self.configs, None, None, rows, absent, self
        )
        self.versions.append(made)
        return made

    def model(self, name: str) -> FakeVersion:
        return self.versions[-1]

    def changes(self, name: str, since: str, to: str) -> Mapping[str, NDArray[np.int64]] | None:
        old, new = (self.versions[int(digest) - 1].rows for digest in (since, to))
        return {
            table: np.array(
                [
                    one
                    for one in {*old[table], *new[table]}
                    if old[table].get(one) != new[table].get(one)
                ],
                np.int64,
            )
            for table in self.configs
        }

    def hot(self, name: str, table: str, n: int) -> NDArray[np.int64]:
        return np.array(self.hottest.get(table, [])[:n], np.int64)
