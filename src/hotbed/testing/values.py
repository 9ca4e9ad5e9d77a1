# SPDX-License-Identifier: Apache-2.0
"""Compare the rows of a server with those of the run that it follows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from hotbed.embedding.table import Table
from hotbed.persist.container.format import Reader
from hotbed.persist.state.tables import flat


def values_digest(state: Reader | Mapping[str, Table]) -> str:
    """Return the SHA-256 (hex) of the ids and values of all rows, without their state."""
    if isinstance(state, Mapping):
        tables = {name: table.export() for name, table in state.items()}
    else:
        tables = {name: state.rows(name) for name in state.table_names}
    digest = hashlib.sha256()
    for name, batches in sorted(tables.items()):
        ids = hashlib.sha256()
        values = hashlib.sha256()
        for batch in batches:  # in both by partition and id, however they are cut
            ids.update(flat(batch["id"]).tobytes())
            values.update(flat(batch["value"]).tobytes())
        digest.update(repr((name, ids.hexdigest(), values.hexdigest())).encode())
    return digest.hexdigest()
