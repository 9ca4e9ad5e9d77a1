# SPDX-License-Identifier: Apache-2.0
"""The served folder, written: by one process, each version whole before CURRENT names it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from safetensors.numpy import save

from hotbed.errors import ConfigError, FormatError, NotWritten, PersistError
from hotbed.persist.content import table_folder, table_names, tensors
from hotbed.persist.format import Link, Reader
from hotbed.persist.store import MANIFEST, LocalStore
from hotbed.serving.rows import FrozenRows, RowDtype, ServedTable, write_rows
from hotbed.serving.stores.mapped import (
    FORMAT,
    FORMAT_VERSION,
    POINTER_FILE,
    MappedVersion,
    ModelFolder,
    file_of,
)

log = logging.getLogger("hotbed.serving")
_HOT = 1 << 22  # ids kept in the order of their counts
_REMEMBERED = 16  # deltas whose ids are kept apart


class Writer:
    """The lock of the one process that writes a served folder.

    It is held until the process ends, or until nothing in it writes any more.

    `busy`: held around each change, by whichever thread.
    """

    _known: ClassVar = weakref.WeakValueDictionary[Path, "Writer"]()
    _first: ClassVar = threading.Lock()

    def __init__(self, folder: Path) -> None:
        self.busy = threading.RLock()
        self.process = os.getpid()
        if os.name == "nt":  # no such locks there
            return
        import fcntl

        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(folder / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise NotWritten(
                f"{folder}: cannot be written — {error} — choose another folder"
            ) from error
        weakref.finalize(self, os.close, file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(file, 20).decode("ascii", "replace").strip() or "unknown"
            raise PersistError(
                f"{folder}: another process writes it — received process {holder} — give each "
                "writer "
                "a folder of its own; any number may read"
            ) from error
        number = f"{self.process}\n".encode()
        with contextlib.suppress(OSError):  # a full disk; the number is for people
            os.pwrite(file, number, 0)
            os.truncate(file, len(number))

    @classmethod
    def of(cls, folder: Path) -> Writer:
        """This process' writer of a folder. Raises PersistError where another process has it, be it
        the one that this process was forked from."""
        place = folder.resolve()
        with cls._first:
            found = cls._known.get(place)
            if found is None or found.process != os.getpid():
                cls._known[place] = found = cls(place)
            return found


class TemporaryFolder:
    """A folder that goes with this object, or with the process that made it; a forked child leaves
    it.

    What killed processes left goes when the next folder with the same `prefix` is made.
    """

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        remove_abandoned(self.path.parent.glob(f"{prefix}*"))
        self._writer = Writer.of(self.path)  # held by nobody else, so it is not abandoned
        self._finalizer = weakref.finalize(self, _remove, self.path, os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self._finalizer()


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(folders: Iterable[Path]) -> None:
    """Remove those served folders of this user that a writer left when it was killed; what is not
    so, or cannot go, stays.
    """
    if os.name == "nt":  # no such locks there
        return
    import fcntl

    for folder in folders:
        with contextlib.suppress(OSError):
            told = folder.lstat()
            if not stat.S_ISDIR(told.st_mode) or told.st_uid != os.geteuid():
                continue
            file = os.open(folder / "LOCK", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(file).st_size:  # a writer that starts locks it while it is empty
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                    log.info("%s: removed; its writer had ended without doing so", folder)
            finally:
                os.close(file)


def write_served(
    folder: ModelFolder,
    reader: Reader,
    before: MappedVersion | None,
    dtype: RowDtype,
    origin: str | None = None,
) -> str:
    """Write what `reader` holds, of a delta only what changed since versions that are there;
    returns the key of the version.

    `before`: the version that gives the graph where `reader` brings none; `origin`: the digest of
    what a start loads that goes on from here, where that is another state. Raises ConfigError for
    what does not fit, FormatError for bad files of the source, PersistError where the disk refuses.
    CURRENT names what it named before, until `make_newest`.
    """
    manifest = reader.manifest
    if LocalStore(folder.path).folders():
        raise ConfigError(
            f"{folder.path}: holds checkpoints, got a model to serve. Choose another folder."
        )
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        spec = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "name": folder.name,
            "version": manifest["version"],
            "digest": manifest["digest"],
            "published": manifest.get("published") or _modified(reader),
            "learned": manifest.get("learned"),
            "dtype": dtype,
            "configs": {entry["name"]: entry["config"] for entry in manifest["tables"]},
            "chain": [link.manifest["digest"] for link in reader.links],
            "origin": origin or manifest["digest"],
            **_graph(folder, reader, before),
            "tables": {
                name: _Table(folder.path, reader, number, dtype, before).write()
                for number, name in enumerate(table_names(reader))
            },
        }
        text = json.dumps(spec, ensure_ascii=False).encode()
        key = hashlib.sha256(text).hexdigest()
        _write(folder.path / file_of(key), text)
    except OSError as error:
        raise _refused(folder, error) from error
    return key


def make_newest(folder: ModelFolder, key: str) -> None:
    """Have CURRENT name a version. Raises PersistError where the disk refuses."""
    try:
        _write(folder.path / POINTER_FILE, f"{key}\n".encode())
    except OSError as error:
        raise _refused(folder, error) from error


def _refused(folder: ModelFolder, error: OSError) -> NotWritten:
    return NotWritten(
        f"{folder.path}: cannot be written — {error} — free space or choose another folder"
    )


def tidy(folder: ModelFolder, versions: list[MappedVersion]) -> None:
    """Remove files of all but these versions; who still has one mapped keeps it. What cannot be
    removed stays, and is told.
    """
    needed = {POINTER_FILE}.union(*(version.files() for version in versions))
    try:
        left = [path for path in folder.path.iterdir() if path.name not in needed]
    except FileNotFoundError:
        return
    for path in left:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s: stays: %s", path, error)


def _graph(folder: ModelFolder, reader: Reader, before: MappedVersion | None) -> dict[str, Any]:
    """What is known of the graph and the schema that go with it, and their files; weights are this
    version's own.
    """
    own = reader.links[0]
    place = reader.folder
    key = reader.manifest["digest"][:32]
    if graph := own.manifest.get("graph"):
        onnx = _file(folder.path, f"{own.manifest['digest'][:32]}.onnx", own.read(graph["file"]))
        schema = own.manifest["schema"]
    elif before is None:
        raise ConfigError(
            f"{place}: no exported model — received a state without a graph — export the model "
            "first"
        )
    else:
        if set(before.tables) != set(table_names(reader)):
            raise ConfigError(
                f"{place}: another model's state — received tables {table_names(reader)} for "
                f"{sorted(before.tables)} — export that model and load it"
            )
        graph = before.graph
        onnx = before.spec["files"]["graph"]
        schema = before.spec["schema"]
    # The full may be older than the first event that was learned: the newest state knows what raw
    # columns hold.
    newest = reader.manifest["schema"] or {}
    for learned in ("types", "shapes"):
        entries = {**schema.get(learned, {}), **newest.get(learned, {})}
        if entries:
            schema = {**schema, learned: entries}
    values = _weights(reader, graph)
    missing = sorted(set(graph["weights"]) - set(values))
    if missing:
        raise ConfigError(
            f"{place}: the graph of model {folder.name!r} needs weights that this version lacks — "
            "received none "
            f"for {missing[0]!r} — export the model again"
        )
    weights = _file(folder.path, f"{key}.safetensors", save(values))
    return {"schema": schema, "graph": graph, "files": {"graph": onnx, "weights": weights}}


def _weights(reader: Reader, graph: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    found = {}
    for name, dtype, shape, data in tensors(reader):
        known = "network." + name.removeprefix("network/")
        if dtype == "F32" and known in graph["weights"]:
            found[known] = np.frombuffer(data, np.float32).reshape(shape)
    return found


class _Delta:
    """What one delta holds of a table, read once: rows, in batches, and ids."""

    def __init__(self, link: Link, table: str) -> None:
        self.batches = list(link.parts(table))
        self.owned = _ids(self.batches)
        self.removed = _ids(link.parts(table, "removed"))

    @property
    def changed(self) -> NDArray[np.int64]:
        """Each id once, rising."""
        return np.union1d(self.owned, self.removed)


class _Table:
    """One table of a version on its way into the folder."""

    def __init__(
        self,
        folder: Path,
        reader: Reader,
        number: int,
        dtype: RowDtype,
        before: MappedVersion | None,
    ) -> None:
        self._folder = folder
        self._reader = reader
        self._dtype = dtype
        self._config: Mapping[str, Any] = reader.manifest["tables"][number]["config"]
        self._name: str = reader.manifest["tables"][number]["name"]
        self._stem = Path(table_folder(number, self._name)).name
        entry = before.spec["tables"].get(self._name) if before else None
        self._known = (
            {one["file"]: one for one in (*entry["changed"], entry["hot"]) if one} if entry else {}
        )
        same_full = (
            before is not None and before.spec["chain"][0] == reader.links[0].manifest["digest"]
        )
        self._countless = same_full and entry is not None and entry["hot"] is None
        self._read = dict[int, _Delta]()

    def write(self) -> dict[str, Any]:
        """Its entry in the version's file: rows of the full, and beside them all that its deltas
        changed since.
        """
        layers = [self._full()]
        if self._last:
            layers.insert(0, self._overlay())
        entries = [{"file": path.name, "bytes": path.stat().st_size} for path in layers]
        remembered = range(max(1, self._last + 1 - _REMEMBERED), self._last + 1)
        return {
            "layers": entries,
            "hot": self._hot(),
            "changed": [self._changed(number) for number in remembered],
        }

    @property
    def _last(self) -> int:
        """The number of the newest delta; 0 is the full."""
        return len(self._reader.links) - 1

    def _delta(self, number: int) -> _Delta:
        if number not in self._read:
            self._read[number] = _Delta(self._reader.links[number], self._name)
        return self._read[number]

    def _path(self, number: int, ending: str) -> Path:
        return (
            self._folder
            / f"{self._reader.links[number].manifest['digest'][:32]}-{self._stem}.{ending}"
        )

    def _rows(self, number: int) -> Path:
        return self._path(number, f"{self._dtype}.rows")

    def _full(self) -> Path:
        path = self._rows(0)
        if not _whole(path):
            full = self._reader.links[0]
            write_rows(path, int(self._config["dim"]), full.parts(self._name), dtype=self._dtype)
        return path

    def _overlay(self) -> Path:
        path = self._rows(self._last)
        if not _whole(path):
            known = next((n for n in range(self._last - 1, 0, -1) if _whole(self._rows(n))), 0)
            old = ServedTable(self._config, [FrozenRows(self._rows(known))]) if known else None
            merged = _Merged([self._delta(n) for n in range(known + 1, self._last + 1)], old)
            write_rows(path, int(self._config["dim"]), merged.rows(), merged.removed(), self._dtype)
        return path

    def _changed(self, number: int) -> dict[str, Any]:
        """The file of the ids that a delta changed."""
        entry = self._listed(path := self._path(number, "changed"))
        entry = entry or _file(self._folder, path.name, self._delta(number).changed.tobytes())
        return {**entry, "digest": self._reader.links[number].manifest["digest"]}

    def _hot(self) -> dict[str, Any] | None:
        """The file of ids by falling count, where there are counts."""
        if self._countless:
            return None
        if entry := self._listed(path := self._path(0, "hot")):
            return entry
        kept = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        for batch in self._reader.links[0].parts(self._name):
            if "count" not in batch.schema.names:
                return None
            kept.append(
                (batch.column("id").to_numpy(), batch.column("count").to_numpy().astype(np.int64))
            )
            if sum(len(ids) for ids, _ in kept) > 2 * _HOT:
                kept = [_most(kept)]
        ids = _most(kept)[0]
        return _file(self._folder, path.name, ids.tobytes()) if len(ids) else None

    def _listed(self, path: Path) -> dict[str, Any] | None:
        """The entry of a file that the version before has, if it is there still."""
        entry = self._known.get(path.name)
        return entry if entry and path.exists() and path.stat().st_size == entry["bytes"] else None


def _most(
    kept: list[tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The ids of the highest counts, highest first, with them."""
    ids, counts = (np.concatenate(found) for found in zip(*kept, strict=True))
    order = np.lexsort([ids, -counts])[:_HOT]
    return ids[order], counts[order]


class _Merged:
    """What some deltas, and an older file of changes, say together: of an id the newest."""

    def __init__(self, deltas: list[_Delta], old: ServedTable | None) -> None:
        self._deltas = deltas
        self._old = old
        self._decided = np.empty(0, np.int64)
        self._gone = list[NDArray[np.int64]]()

    def rows(self) -> Iterator[pa.RecordBatch]:
        for delta in reversed(self._deltas):
            for batch in delta.batches:
                yield batch.filter(pa.array(self._open(batch.column("id").to_numpy())))
            self._gone.append(delta.removed[self._open(delta.removed)])
            self._decided = np.union1d(self._decided, delta.changed)
        if self._old is not None:
            held, removed = self._old.layers[0].entries()
            yield from self._old.batches(held[self._open(held)])
            self._gone.append(removed[self._open(removed)])

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


def _ids(batches: Iterable[pa.RecordBatch]) -> NDArray[np.int64]:
    return np.concatenate(
        [np.empty(0, np.int64), *(batch.column("id").to_numpy() for batch in batches)]
    )


def _whole(path: Path) -> bool:
    """Whether a file of rows is there; one that is torn, by whatever hand, is written again."""
    try:
        FrozenRows(path)
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
