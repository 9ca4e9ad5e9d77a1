# SPDX-License-Identifier: Apache-2.0
"""Tables that hold rows before several processes share them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hotbed.embedding.table import Table
from hotbed.errors import ConfigError
from hotbed.persist.container.row_files import owned_rows

from .digest import content_digest
from .tables import own_scalars

if TYPE_CHECKING:
    from hotbed.parallel import Shard


def keep_own_rows(tables: Mapping[str, Table], shard: Shard) -> None:
    """Let each process keep the rows that it owns; all of them call this together.

    A process may hold rows of others only where all of them hold the same rows.

    Raises:
        ConfigError: the rows of a table differ; nothing was removed.
    """
    filled = []
    for name, table in tables.items():
        others = np.flatnonzero(~shard.owned(name)).tolist()
        if len(table) and any(batch.num_rows for batch in table.export(others)):
            filled.append(name)
    every = {name for of_process in shard.gathered(filled) for name in of_process}
    whole = {name: table for name, table in tables.items() if name in every}
    for name, table in whole.items():
        digests = shard.gathered(content_digest({name: table})[:12])
        if len(set(digests)) > 1:
            raise ConfigError(
                f"ranks: all ranks must hold the same rows before they share them, got table "
                f"{name!r} with the digests {digests}. Fill it alike on each rank, or load rows "
                "after RecModel or hb.shard has the network."
            )
    for name, table in tables.items():
        table.spread = shard.spread(name)
        if name in whole:
            _keep_own(table, shard)


def _keep_own(table: Table, shard: Shard) -> None:
    scalars = table.scalars()
    owned = shard.owned(table.name)
    rows = list(table.export(np.flatnonzero(owned).tolist()))
    candidates = list(owned_rows(table.candidates(), owned))
    sketch = list(owned_rows(table.sketch(), owned))
    table.clear()
    table.load(rows)
    table.load_scalars(own_scalars(scalars, shard))
    table.load_candidates(candidates)
    table.load_sketch(sketch)
