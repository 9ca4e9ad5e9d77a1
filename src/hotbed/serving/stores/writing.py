# SPDX-License-Identifier: Apache-2.0
"""The served folder, written: by one process, each version whole before CURRENT names it."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from safetensors.numpy import save

from hotbed.errors import ConfigError, FormatError, PersistError
from hotbed.persist.content import table_folder, table_names, tensors
from hotbed.persist.format import Link, Reader
from hotbed.persist.store import MANIFEST, LocalStore
from hotbed.serving.rows import RowDtype, Rows, ServedTable, write_rows
from hotbed.serving.stores.mapped import CURRENT, FORMAT, FORMAT_VERSION, MappedVersion, ModelFolder, file_of

_HOT = 1 << 22  # ids kept in the order of their counts
_REMEMBERED = 16  # deltas whose ids are kept apart


class Writer:
    """The one process that writes a served folder: it holds a lock on it until it ends, or nobody here writes any more.

    `busy`: held around each change, by whichever thread.
    """

    _known: ClassVar = weakref.WeakValueDictionary[Path, "Writer"]()
    _first: ClassVar = threading.Lock()

    def __init__(self, folder: Path) -> None:
        self.busy = threading.RLock()
        if os.name == "nt":  # no such locks there
            return
        import fcntl

        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(folder / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise PersistError(f"{folder}: cannot be written — {error} — choose another folder") from error
        weakref.finalize(self, os.close, file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(file, 20).decode("ascii", "replace").strip() or "unknown"
            raise PersistError(f"{folder}: another process writes it — received process {holder} — give each writer a folder of "
                               "its own; any number may read") from error  # fmt: skip
        os.truncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)

    @classmethod
    def of(cls, folder: Path) -> Writer:
        """This process' writer of a folder. Raises PersistError where another process has it."""
        place = folder.resolve()
        with cls._first:
            found = cls._known.get(place)
            if found is None:
                cls._known[place] = found = cls(place)
            return found


def write_version(
    folder: ModelFolder, reader: Reader, before: MappedVersion | None, dtype: RowDtype, origin: str | None = None
) -> None:
    """Write what `reader` holds and make it the newest; of a delta only what changed since versions that are there.

    `before`: the version that gives the graph where `reader` brings none; `origin`: the digest of what a start loads that goes
    on from here, where that is another state. Raises ConfigError for what does not fit, FormatError
    for bad files of the source, PersistError where the disk refuses; CURRENT then names what it named before.
    """
    manifest = reader.manifest
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        spec = {
            "format": FORMAT, "format_version": FORMAT_VERSION,
            "name": folder.name, "version": manifest["version"], "digest": manifest["digest"],
            "published": manifest.get("published") or _modified(reader), "learned": manifest.get("learned"), "dtype": dtype,
            "configs": {entry["name"]: entry["config"] for entry in manifest["tables"]},
            "chain": [link.manifest["digest"] for link in reader.links],
            "origin": origin or manifest["digest"], **_graph(folder, reader, before),
            "tables": {name: _Table(folder.path, reader, number, dtype).write() for number, name in enumerate(table_names(reader))},
        }  # fmt: skip
        text = json.dumps(spec, ensure_ascii=False).encode()
        key = hashlib.sha256(text).hexdigest()
        _write(folder.path / file_of(key), text)
        _write(folder.path / CURRENT, f"{key}\n".encode())
    except OSError as error:
        raise PersistError(
            f"{folder.path}: cannot be written — {error} — free space or choose another folder"
        ) from error


def tidy(folder: ModelFolder, versions: list[MappedVersion]) -> None:
    """Remove files of all but these versions; who still has one mapped keeps it."""
    needed = {CURRENT}.union(*(version.files() for version in versions))
    for path in folder.path.iterdir():
        if path.name not in needed:
            path.unlink(missing_ok=True)


def _graph(folder: ModelFolder, reader: Reader, before: MappedVersion | None) -> dict[str, Any]:
    """What is known of the graph and the schema that go with it, and their files; weights are this version's own."""
    own, place = reader.links[0], reader.folder
    key = reader.manifest["digest"][:32]
    if graph := own.manifest.get("graph"):
        onnx = _file(folder.path, f"{own.manifest['digest'][:32]}.onnx", own.read(graph["file"]))
        schema = own.manifest["schema"]
    elif before is None:
        raise ConfigError(f"{place}: no exported model — received a state without a graph — export the model first")
    else:
        if set(before.tables) != set(table_names(reader)):
            raise ConfigError(f"{place}: another model's state — received tables {table_names(reader)} for "
                              f"{sorted(before.tables)} — export that model and load it")  # fmt: skip
        graph, onnx = before.graph, before.spec["files"]["graph"]
        schema = before.spec["schema"]
    values = _weights(reader, graph)
    missing = sorted(set(graph["weights"]) - set(values))
    if missing:
        raise ConfigError(f"{place}: the graph of model {folder.name!r} needs weights that this version lacks — received none "
                          f"for {missing[0]!r} — export the model again")  # fmt: skip
    weights = _file(folder.path, f"{key}.safetensors", save(values))
    return {"schema": schema, "graph": graph, "files": {"graph": onnx, "weights": weights}}


def _weights(reader: Reader, graph: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    found = {}
    for name, dtype, shape, data in tensors(reader):
        known = "network." + name.removeprefix("network/")
        if dtype == "F32" and known in graph["weights"]:
            found[known] = np.frombuffer(data, np.float32).reshape(shape)
    return found


class _Table:
    """One table of a version on its way into the folder."""

    def __init__(self, folder: Path, reader: Reader, number: int, dtype: RowDtype) -> None:
        self._folder, self._reader, self._dtype = folder, reader, dtype
        self._config: Mapping[str, Any] = reader.manifest["tables"][number]["config"]
        self._name: str = reader.manifest["tables"][number]["name"]
        self._stem = Path(table_folder(number, self._name)).name

    def write(self) -> dict[str, Any]:
        """Its entry in the version's file: rows of the full, and beside them all that its deltas changed since."""
        full, *deltas = self._reader.links
        layers = [self._full(full)]
        if deltas:
            layers.insert(0, self._overlay(deltas))
        entries = [{"file": path.name, "bytes": path.stat().st_size} for path in layers]
        return {"layers": entries, "hot": self._hot(full), "changed": self._changed(deltas[-_REMEMBERED:])}

    def _path(self, link: Link, ending: str) -> Path:
        return self._folder / f"{link.manifest['digest'][:32]}-{self._stem}.{ending}"

    def _rows(self, link: Link) -> Path:
        return self._path(link, f"{self._dtype}.rows")

    def _full(self, link: Link) -> Path:
        path = self._rows(link)
        if not _whole(path):
            write_rows(path, int(self._config["dim"]), link.parts(self._name), dtype=self._dtype)
        return path

    def _overlay(self, deltas: list[Link]) -> Path:
        path = self._rows(deltas[-1])
        if not _whole(path):
            known = next((n for n in range(len(deltas) - 1, 0, -1) if _whole(self._rows(deltas[n - 1]))), 0)
            old = Rows(self._rows(deltas[known - 1])) if known else None
            merged = _Merged(deltas[known:], self._name, old, self._config)
            write_rows(path, int(self._config["dim"]), merged.rows(), merged.removed(), self._dtype)
        return path

    def _changed(self, deltas: list[Link]) -> list[dict[str, Any]]:
        """Files of the ids that each delta changed."""
        found = []
        for link in deltas:
            path = self._path(link, "changed")
            data = (
                path.read_bytes()
                if path.exists()
                else np.unique(np.concatenate(list(_ids_of(link, self._name)))).tobytes()
            )
            found.append({"digest": link.manifest["digest"], **_file(self._folder, path.name, data)})
        return found

    def _hot(self, full: Link) -> dict[str, Any] | None:
        """The file of ids by falling count, where there are counts."""
        path = self._path(full, "hot")
        if path.exists():
            return _file(self._folder, path.name, path.read_bytes())
        kept = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        for batch in full.parts(self._name):
            if "count" not in batch.schema.names:
                return None
            kept.append((batch.column("id").to_numpy(), batch.column("count").to_numpy().astype(np.int64)))
            if sum(len(ids) for ids, _ in kept) > 2 * _HOT:
                kept = [_most(kept)]
        ids = _most(kept)[0]
        return _file(self._folder, path.name, ids.tobytes()) if len(ids) else None


def _most(kept: list[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The ids of the highest counts, highest first, with them."""
    ids, counts = (np.concatenate(found) for found in zip(*kept, strict=True))
    order = np.lexsort([ids, -counts])[:_HOT]
    return ids[order], counts[order]


class _Merged:
    """What some deltas, and an older file of changes, say together: of an id the newest."""

    def __init__(self, deltas: list[Link], table: str, old: Rows | None, config: Mapping[str, Any]) -> None:
        self._deltas, self._table, self._old, self._config = deltas, table, old, config
        self._decided, self._gone = np.empty(0, np.int64), list[NDArray[np.int64]]()

    def rows(self) -> Iterator[pa.RecordBatch]:
        for link in reversed(self._deltas):
            for batch in link.parts(self._table):
                yield batch.filter(pa.array(self._open(batch.column("id").to_numpy())))
            own = np.concatenate(list(_ids_of(link, self._table)))
            removed = np.concatenate(list(_ids_of(link, self._table, ("removed",))))
            self._gone.append(removed[self._open(removed)])
            self._decided = np.union1d(self._decided, own)
        if self._old is not None:
            for batch in ServedTable(self._config, [self._old]).batches():
                yield batch.filter(pa.array(self._open(batch.column("id").to_numpy())))
            gone = self._old.removed()
            self._gone.append(gone[self._open(gone)])

    def removed(self) -> Iterator[pa.RecordBatch]:
        """Once all rows were taken: the ids without one."""
        yield from (pa.record_batch({"id": pa.array(ids)}) for ids in self._gone)

    def _open(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of them nothing newer has decided."""
        if not len(self._decided):
            return np.ones(len(ids), bool)
        at = np.minimum(np.searchsorted(self._decided, ids), len(self._decided) - 1)
        found: NDArray[np.bool_] = self._decided[at] != ids
        return found


def _ids_of(link: Link, table: str, members: tuple[str, ...] = ("parts", "removed")) -> Iterator[NDArray[np.int64]]:
    yield np.empty(0, np.int64)
    for member in members:
        yield from (batch.column("id").to_numpy() for batch in link.parts(table, member))


def _whole(path: Path) -> bool:
    """Whether a file of rows is there; one that is torn, by whatever hand, is written again."""
    try:
        Rows(path)
    except FormatError:
        return False
    return True


def _file(folder: Path, name: str, data: bytes | memoryview) -> dict[str, Any]:
    """A small file, written if it is not there as it should be, and how its readers know it."""
    entry = {"file": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path = folder / name
    if not path.exists() or path.read_bytes() != data:
        _write(path, data)
    return entry


def _write(path: Path, data: bytes | memoryview) -> None:
    """Whole and on disk, or as before."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    if os.name != "nt":  # folders cannot be opened there
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _modified(reader: Reader) -> float | None:
    """When the newest file of a version came to be, where its store can tell."""
    if not isinstance(reader.store, LocalStore):
        return None
    return (Path(reader.folder) / MANIFEST).stat().st_mtime
