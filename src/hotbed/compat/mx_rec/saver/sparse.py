# SPDX-License-Identifier: Apache-2.0
"""export: the rows of the newest save as NumPy files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.errors import CallError
from hotbed.compat.mx_rec.saver.saver import NUMBERED, opened
from hotbed.config import did_you_mean
from hotbed.errors import ConfigError
from hotbed.files import new_file, writing
from hotbed.parallel import at
from hotbed.persist.container.format import Reader

__all__ = ["export"]

FILE = "key-emb.npy"

log = logging.getLogger("hotbed.compat.mx_rec")


@at("export")
def export(table_list: Sequence[str] | None = None) -> None:
    """Write the rows of tables, as they were saved or restored last, as NumPy files.

    `<folder>/sparse-<name>-<global step>/<table>/key-emb.npy` lies beside the checkpoint
    `<folder>/<name>`; `np.load(path, allow_pickle=True).item()` is a dict of id to its row. Of
    several ranks, the first writes.

    Args:
        table_list: names of tables; None = all that were saved.

    Raises:
        CallError: nothing was saved or restored yet.
        ConfigError: the checkpoint has no such table, or does not lie on a disk of this machine.
        NotWritten: a file cannot be written.

    Example: `export(table_list=["user_table"])`
    """
    owner = framework.current()
    if owner.last_save is None:
        raise CallError(
            "export: it writes rows that were saved, got no save. Call Saver.save before it."
        )
    for saver in owner.savers:
        saver.wait()
    path = owner.last_save
    owner.shard.from_first(lambda: _export(path, table_list))


def _export(path: str, table_list: Sequence[str] | None) -> None:
    numbered = NUMBERED.fullmatch(path)
    if "://" in path or numbered is None:
        raise ConfigError(
            f"export: files are written on a disk of this machine, got the checkpoint {path!r}. "
            "Save into a local folder, or read the rows by table.export()."
        )
    reader = opened(path)
    place = Path(numbered[1])
    folder = place.parent / f"sparse-{place.name}-{numbered[2]}"
    for name in reader.table_names if table_list is None else table_list:
        if name not in reader.table_names:
            advice = did_you_mean(name, reader.table_names)
            raise ConfigError(f"export: {path} has no such table, got {name!r}. {advice}")
        file = folder / name / FILE
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            with new_file(file) as stream:
                np.save(stream, np.array(_rows(reader, name), dtype=object))
        log.info("export: wrote the rows of table %r to %s", name, file)


def _rows(reader: Reader, table: str) -> dict[int, NDArray[np.float32]]:
    """Return the rows of a table by their ids."""
    rows: dict[int, NDArray[np.float32]] = {}
    for batch in reader.rows(table):
        ids = batch.column("id").to_numpy().tolist()
        values = batch.column("value").flatten().to_numpy().reshape(len(ids), -1)
        rows.update(zip(ids, values, strict=True))
    return rows
