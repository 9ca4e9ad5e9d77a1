# SPDX-License-Identifier: Apache-2.0
"""ParameterServer: owns the tables of several models and versions, mapped into memory."""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.data.schema import Schema
from hotbed.errors import ConfigError
from hotbed.persist.content import table_folder, table_names
from hotbed.persist.format import Link, Reader, open_checkpoint
from hotbed.persist.store import MANIFEST, LocalStore, Where
from hotbed.serving.rows import RowDtype, Rows, ServedTable, write_rows
from hotbed.serving.stores.base import Store
from hotbed.serving.stores.mapped import MappedVersion


class ParameterServer(Store):
    """Loads exported models and gives rows by id; a version that is loaded never changes.

    `folder`: where rows are kept as files that processes map and share; a second start finds them there and needs no
    time. None: a temporary folder. `dtype`: float32, float16 or int8 (one scale a row).

    Example:
        >>> server = hb.ParameterServer("rows")
        >>> server.load("ranker", "exported")
        >>> rows, found = server.lookup("ranker", "user", [7, 8])
    """

    def __init__(self, folder: str | Path | None = None, dtype: RowDtype = "float32") -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hotbed-rows-") if folder is None else folder)
        if folder is None:
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._dtype, self._models, self._lock = dtype, dict[str, MappedVersion](), threading.Lock()

    def load(self, name: str, source: Where | Reader) -> MappedVersion:
        """Load the newest version under `source` as model `name`; requests see the version before until it is ready.

        An exported model brings its graph. What a trainer publishes later (a path, or a Reader from a `Follower`) brings rows
        and weights for it; of a delta only what changed is written. Raises ConfigError for what does not fit, FormatError
        for bad files; the version before stays.
        """
        reader = source if isinstance(source, Reader) else open_checkpoint(source)
        manifest = reader.manifest
        exported = reader.links[0] if manifest.get("graph") else self._exported(name, reader)
        reader.verify()
        with self._lock:
            tables = {entry["name"]: self._table(name, reader, number, entry)
                      for number, entry in enumerate(manifest["tables"])}  # fmt: skip
            schema = Schema.from_json(exported.manifest["schema"])
            configs = {entry["name"]: entry["config"] for entry in manifest["tables"]}
            loaded = MappedVersion(name, manifest["version"], manifest["digest"], schema, exported.manifest["graph"], configs,
                                   _published(reader), _learned(manifest), tables, exported, reader)  # fmt: skip
            _check_weights(loaded)
            before = self._models.get(name)
            self._models[name] = loaded
            self._tidy(name, [reader] if before is None else [reader, before.reader])
        return loaded

    def _home(self, model: str, link: Link) -> Path:
        return self._folder / quote(model, safe="") / str(link.manifest["digest"])[:32]

    def _tidy(self, model: str, readers: Sequence[Reader]) -> None:
        """Remove rows of versions before the last; who still has them mapped keeps them."""
        needed = {self._home(model, link) for reader in readers for link in reader.links}
        for folder in next(iter(needed)).parent.iterdir():
            if folder not in needed:
                shutil.rmtree(folder, ignore_errors=True)

    def _exported(self, name: str, reader: Reader) -> Link:
        place = reader.store.place(reader.folder)
        if name not in self._models:
            raise ConfigError(f"{place}: no exported model — received a state without a graph — export the model first")
        served = self._models[name]
        if set(served.tables) != set(table_names(reader)):
            raise ConfigError(f"{place}: another model's state — received tables {table_names(reader)} for "
                              f"{sorted(served.tables)} — export that model and load it")  # fmt: skip
        return served.exported

    def unload(self, name: str) -> None:
        """Forget a model; sessions that still hold a version keep it."""
        self.model(name)
        del self._models[name]

    def model(self, name: str) -> MappedVersion:
        """The version that is served now."""
        if name not in self._models:
            raise ConfigError(f"model {name!r}: not loaded — received {sorted(self._models) or 'no model'} — load it")
        return self._models[name]

    def changes(self, name: str, since: str, to: str) -> Mapping[str, NDArray[np.int64]] | None:
        return None

    def hot(self, name: str, table: str, n: int) -> NDArray[np.int64]:
        return np.empty(0, np.int64)

    def lookup(self, model: str, table: str, ids: Any) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Rows of ids, int64 [n] -> float32 [n, dim], and whether each has one."""
        tables = self.model(model).tables
        if table not in tables:
            raise ConfigError(f"model {model!r}: no table {table!r} — received {sorted(tables)} — name one of them")
        return tables[table].find(ids)

    def _table(self, model: str, reader: Reader, number: int, entry: Mapping[str, Any]) -> ServedTable:
        """A file for the full, and one for everything that its deltas changed."""
        name, layers = entry["name"], list[Rows]()
        for link in reader.links:
            file = self._home(model, link) / f"{Path(table_folder(number, name)).name}.rows"
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                self._write(file, link, name, layers, int(entry["config"]["dim"]))
            layers = [Rows(file), *layers[-1:]]
        return ServedTable(entry["config"], layers)

    def _write(self, file: Path, link: Link, name: str, layers: list[Rows], dim: int) -> None:
        if not layers:
            write_rows(file, dim, link.parts(name), dtype=self._dtype)
            return
        rows, gone = list(link.parts(name)), list(link.parts(name, "removed"))
        if len(layers) > 1:  # what the deltas before this one changed, and this one does not
            config = next(entry["config"] for entry in link.manifest["tables"] if entry["name"] == name)
            before = ServedTable(config, layers[:1])
            known = pa.concat_arrays([batch.column("id") for batch in [*rows, *gone]] or [pa.array([], pa.int64())])
            for batch in before.batches():
                keep = ~np.isin(batch.column("id").to_numpy(), known.to_numpy())
                rows.append(batch.filter(pa.array(keep)))
            gone.append(pa.record_batch({"id": pa.array(layers[0].removed())}))
        write_rows(file, dim, [batch.select(["id", "value"]) for batch in rows], gone, self._dtype)


def _published(reader: Reader) -> float | None:
    """When the newest file of a version came to be, where its store can tell."""
    if not isinstance(reader.store, LocalStore):
        return None
    return (Path(reader.store.place(reader.folder)) / MANIFEST).stat().st_mtime


def _learned(manifest: Mapping[str, Any]) -> float | None:
    """The newest event time that a table knows, in seconds."""
    known = [entry["scalars"].get("watermark") for entry in manifest["tables"]]
    return max((one / 1e6 for one in known if one is not None), default=None)


def _check_weights(model: MappedVersion) -> None:
    missing = sorted(set(model.graph["weights"]) - {name for name, _ in model.weights()})
    if missing:
        raise ConfigError(f"model {model.name!r}: the graph needs weights that this version lacks — received none for "
                          f"{missing[0]!r} — export the model again")  # fmt: skip
