# SPDX-License-Identifier: Apache-2.0
"""Versions of models as files that are mapped into memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import ConfigError
from hotbed.persist.content import tensors
from hotbed.persist.format import Link, Reader
from hotbed.serving.rows import ServedTable
from hotbed.serving.stores.base import ModelVersion


@dataclass(frozen=True, eq=False)
class MappedVersion(ModelVersion):
    """A version in mapped files. `tables` by name; `exported` holds the graph, `reader` the state."""

    tables: Mapping[str, ServedTable]
    exported: Link = field(repr=False)
    reader: Reader = field(repr=False)

    def graph_bytes(self) -> bytes:
        return bytes(self.exported.read(self.graph["file"]))

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        for name, dtype, shape, data in tensors(self.reader):
            known = "network." + name.removeprefix("network/")
            if dtype == "F32" and known in self.graph["weights"]:
                yield known, np.frombuffer(data, np.float32).reshape(shape).copy()

    def find(
        self, wanted: Mapping[str, NDArray[np.int64]], seconds: float | None = None
    ) -> dict[str, NDArray[np.float32]]:
        unknown = sorted(set(wanted) - set(self.tables))
        if unknown:
            raise ConfigError(f"model {self.name!r}: no table {unknown[0]!r} — received {sorted(self.tables)} — "
                              "name one of them")  # fmt: skip
        return {table: self.tables[table].find(ids)[0] for table, ids in wanted.items()}
