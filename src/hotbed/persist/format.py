# SPDX-License-Identifier: Apache-2.0
"""The container of docs/format.md: files with digests, a manifest written last, fulls and the deltas that rest on them.

It knows nothing of networks or optimizers, imports no torch, and unpickles nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.embedding.policy import PARTITIONS
from hotbed.errors import FormatError, PersistError, VersionError
from hotbed.files import Where
from hotbed.persist.sink import HashedFile
from hotbed.persist.store import ADVICE, MANIFEST, Store, number_of, open_store, split
from hotbed.persist.tree import decode, unpacked

FORMAT = "hotbed.checkpoint"
FORMAT_VERSION = 2
_ZEROS = "0" * 64


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on disk.

    `folder`: a Path, or a URL as text; `bytes`: of its files, manifest aside; `chain`: what a delta on it rests on.
    """

    folder: Where
    digest: str
    version: int
    bytes: int
    kind: str
    chain: tuple[Mapping[str, str], ...]


class Writer:
    """Writes one checkpoint under `root`: nothing is visible before `commit`, and leaving without it removes the files.

    Example:
        >>> with Writer(root) as writer:
        ...     writer.write("dense.safetensors", data)
        ...     saved = writer.commit({"kind": "full"})
    """

    def __init__(self, root: Where | Store) -> None:
        self.store = root if isinstance(root, Store) else open_store(root)
        self.files: dict[str, HashedFile] = {}
        try:
            self._draft = self.store.draft()
        except OSError as error:
            raise PersistError(
                f"{self.store.place('')}: cannot be written — {error} — give a place that this process may write"
            ) from error

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draft.discard()
        if isinstance(error, OSError):
            raise PersistError(
                f"{self.store.place('')}: cannot be written — {error} — free space or choose another place"
            ) from error

    def write(self, name: str, data: bytes | memoryview) -> None:
        """One file from bytes."""
        with self._draft.create(name) as file:
            file.write(data)
        self.files[name] = file

    def write_batches(self, name: str, batches: Iterable[pa.RecordBatch]) -> int:
        """One Arrow IPC file; returns its rows. Without a single batch no file is written and 0 is returned."""
        iterator = iter(batches)
        first = next(iterator, None)
        if first is None:
            return 0
        rows = 0
        with self._draft.create(name) as file, pa.ipc.new_file(pa.PythonFile(file, mode="w"), first.schema) as sink:
            for batch in itertools.chain([first], iterator):
                sink.write_batch(batch)
                rows += batch.num_rows
        self.files[name] = file
        return rows

    def commit(self, members: Mapping[str, Any]) -> Saved:
        """Write the manifest with `members`, make the checkpoint visible and newest."""
        head = {"format": FORMAT, "format_version": FORMAT_VERSION}
        files = {name: self.files[name].entry() for name in sorted(self.files)}
        text, digest = _sealed({**head, **members, "files": files})
        self._draft.publish(text.encode())
        name, num_bytes = self._draft.folder, sum(int(entry["bytes"]) for entry in files.values())
        chain = (*members.get("chain", ()), {"folder": name, "digest": digest})
        return Saved(self.store.path(name), digest, members.get("version", 0), num_bytes, members["kind"], chain)


@dataclass(frozen=True)
class Link:
    """One checkpoint folder by itself; every file is checked against its digest when it is read."""

    store: Store
    folder: str
    manifest: Mapping[str, Any]
    _checked: dict[str, memoryview] = field(default_factory=dict, repr=False)

    @property
    def chain(self) -> list[Mapping[str, str]]:
        """What a delta on this state gives as its chain."""
        return [*self.manifest.get("chain", ()), {"folder": self.folder, "digest": self.manifest["digest"]}]

    def read(self, name: str) -> memoryview:
        """Bytes of one file. Raises FormatError naming the file when it is missing, torn or changed."""
        place = self.store.place(f"{self.folder}/{name}")
        if name in self._checked:
            return self._checked[name]
        entry = self.manifest["files"].get(name)
        if entry is None:
            raise FormatError(
                f"{place}: not listed in {MANIFEST} — a part refers to it — restore the checkpoint from a copy"
            )
        data = self.store.read(f"{self.folder}/{name}")
        if len(data) != entry["bytes"]:
            raise FormatError(f"{place}: torn — received {len(data)} bytes instead of {entry['bytes']} — {ADVICE}")
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise FormatError(f"{place}: changed since it was written — its SHA-256 is not the manifest's — {ADVICE}")
        self._checked[name] = data
        return data

    def batches(self, name: str) -> Iterator[pa.RecordBatch]:
        """Record batches of one Arrow file, without copying."""
        data = self.read(name)
        try:
            file = pa.ipc.open_file(pa.py_buffer(data))
            for index in range(file.num_record_batches):
                yield file.get_batch(index)
        except pa.ArrowInvalid as error:
            place = self.store.place(f"{self.folder}/{name}")
            raise FormatError(f"{place}: no Arrow IPC file — {error} — {ADVICE}") from error

    def verify(self) -> None:
        """Check every file; FormatError names the first bad one."""
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for _ in pool.map(self.read, self.manifest["files"]):
                pass

    def parts(self, table: str, member: str = "parts") -> Iterator[pa.RecordBatch]:
        """The rows (or `removed` ids) that this folder itself holds of a table, by (partition, id)."""
        for part in self.entry(table).get(member, ()):
            yield from self.batches(part["file"])

    def entry(self, table: str) -> Mapping[str, Any]:
        """The manifest's entry of a table; PersistError when there is none of that name."""
        for entry in self.manifest["tables"]:
            if entry["name"] == table:
                found: Mapping[str, Any] = entry
                return found
        names = [entry["name"] for entry in self.manifest["tables"]]
        raise PersistError(f"{self.store.place(self.folder)}: no table {table!r} — it has {names} — name one of these")


@dataclass(frozen=True)
class Reader:
    """One complete state: a full, or a delta with its chain. `links`: the full first, the state's own folder last."""

    links: tuple[Link, ...]

    @property
    def store(self) -> Store:
        return self.links[-1].store

    @property
    def folder(self) -> str:
        """Where the newest link lies, as a path or URL."""
        return self.store.place(self.links[-1].folder)

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The manifest of the state itself."""
        return self.links[-1].manifest

    def verify(self) -> None:
        """Check every file of every link; FormatError names the first bad one."""
        for link in self.links:
            link.verify()

    def read(self, name: str) -> memoryview:
        """Bytes of a file of the newest link."""
        return self.links[-1].read(name)

    def batches(self, name: str) -> Iterator[pa.RecordBatch]:
        """Record batches of an Arrow file of the newest link."""
        return self.links[-1].batches(name)

    def rows(self, table: str) -> Iterator[pa.RecordBatch]:
        """All rows of a table in this state by (partition, id), in batches of some ten thousand."""
        held = sum(part["rows"] for link in self.links for part in link.entry(table)["parts"])
        return (batch for batch in self.spans(table, partition_ranges(held, 1 << 16)) if batch is not None)

    def spans(self, table: str, spans: Iterable[range]) -> Iterator[pa.RecordBatch | None]:
        """The rows of each span of partitions, by (partition, id); None where there are none. `spans`: rising, without gaps."""
        rows = [Cuts(link.parts(table)) for link in self.links]
        gone = [Cuts(link.parts(table, "removed")) for link in self.links]
        for span in spans:
            merged = _merge([one.until(span.stop) for one in rows], [one.until(span.stop) for one in gone])
            yield merged if merged is not None and merged.num_rows else None

    def candidates(self, table: str) -> Iterator[pa.RecordBatch]:
        """Admission's memory of a table."""
        entry = self.links[-1].entry(table)["candidates"]
        return iter(()) if entry is None else self.batches(entry["file"])

    def dense(self) -> memoryview:
        """The bytes of dense.safetensors; empty without a dense part."""
        part = self.manifest["dense"] or {"file": None}
        return self.read(part["file"]) if part["file"] else memoryview(b"")

    @property
    def progress(self) -> Any:
        """What `State.progress` was, with NumPy arrays; {} where nothing was kept."""
        return self._tree("tree")

    @property
    def random(self) -> Any:
        """What `State.random` was, as NumPy arrays; {} where nothing was kept."""
        return self._tree("random")

    def _tree(self, member: str) -> Any:
        part = self.manifest.get("progress")
        if part is None:
            return {}
        return decode(part[member], unpacked(self.read(part["file"])) if part["file"] else {})


def open_checkpoint(path: Where) -> Reader:
    """The newest checkpoint under `path`, or the one in `path` itself, with its chain; all manifests checked.

    `path`: a local path, or a URL for fsspec. Raises FormatError naming what is missing, torn or changed, VersionError
    for another format version.
    """
    store = open_store(path)
    newest = store.newest()
    if newest is not None:
        return open_folder(store, newest.folder, newest.sha256)
    if not store.exists(MANIFEST):
        raise FormatError(f"{path}: no checkpoint — it holds neither CURRENT nor {MANIFEST} — "
                          "give the path that save() was called with")  # fmt: skip
    root, folder = split(path)
    return open_folder(open_store(root), folder)


def open_folder(store: Store, folder: str, sha256: str | None = None) -> Reader:
    """The state of one checkpoint folder; `sha256`: what its manifest must hash to, else its own digest is trusted."""
    newest = open_link(store, folder, sha256)
    links = []
    for entry in newest.manifest.get("chain", ()):
        link = open_link(store, entry["folder"])
        if link.manifest["digest"] != entry["digest"]:
            raise FormatError(f"{store.place(entry['folder'])}/{MANIFEST}: not the state that {folder} rests on — its digest is "
                              f"{link.manifest['digest']} — {ADVICE}")  # fmt: skip
        links.append(link)
    return Reader((*links, newest))


def open_link(store: Store, folder: str, sha256: str | None = None) -> Link:
    """One checkpoint folder without its chain."""
    name = f"{folder}/{MANIFEST}"
    data = bytes(store.read(name))
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise FormatError(
            f"{store.place(name)}: not the manifest that CURRENT points to — its SHA-256 differs — {ADVICE}"
        )
    return Link(store, folder, _unsealed(data, store.place(name)))


# --- rows of a chain ------------------------------------------------------------------------------------------------


def partition_ranges(rows: int, rows_per_part: int = 1 << 20) -> list[range]:
    """Equal ranges of the 256 partitions for a table of `rows`, about `rows_per_part` rows each."""
    parts = 1
    while parts < PARTITIONS and rows > parts * rows_per_part:
        parts *= 2
    width = PARTITIONS // parts
    return [range(first, first + width) for first in range(0, PARTITIONS, width)]


class Cuts:
    """Batches in the order of partitions, cut where the reader asks."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches, self._head = batches, next(batches, None)

    def until(self, stop: int) -> pa.RecordBatch | None:
        """All rows of partitions below `stop` that were not handed out yet."""
        found = []
        while self._head is not None:
            partitions = self._head.column("partition").to_numpy()
            if (partitions[1:] < partitions[:-1]).any():
                raise FormatError(f"rows: partitions must rise — received them out of order — {ADVICE}")
            n = int(np.searchsorted(partitions, stop))
            if n:
                found.append(self._head.slice(0, n))
            if n < self._head.num_rows:
                self._head = self._head.slice(n)
                break
            self._head = next(self._batches, None)
        return pa.concat_batches(found) if len(found) > 1 else found[0] if found else None


def in_order(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows by (partition, id)."""
    return batch.take(pa.array(np.lexsort([batch.column(name).to_numpy() for name in ("id", "partition")])))


def _merge(rows: list[pa.RecordBatch | None], gone: list[pa.RecordBatch | None]) -> pa.RecordBatch | None:
    """The rows of some partitions: of an id the newest, unless it went later."""
    decided: NDArray[np.int64] = np.empty(0, np.int64)
    kept = []
    for batch, removed in zip(reversed(rows), reversed(gone), strict=True):
        if batch is not None:
            ids = batch.column("id").to_numpy()
            kept.append(batch.filter(pa.array(~np.isin(ids, decided))) if len(decided) else batch)
            decided = np.union1d(decided, ids) if len(rows) > 1 else decided
        if removed is not None:
            decided = np.union1d(decided, removed.column("id").to_numpy())
    if len(kept) < 2:
        return kept[0] if kept else None
    names = [name for name in kept[0].schema.names if all(name in batch.schema.names for batch in kept)]
    return in_order(pa.concat_batches([batch.select(names) for batch in kept]))


# --- files ----------------------------------------------------------------------------------------------------------


def _sealed(members: Mapping[str, Any]) -> tuple[str, str]:
    """Manifest text whose last member is the SHA-256 of the text with 64 zeros in its place."""
    if "digest" in members:
        raise PersistError("digest: a reserved member of the manifest — received one — leave it out")
    text = json.dumps({**members, "digest": _ZEROS}, indent=1, ensure_ascii=False) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    head, _, tail = text.rpartition(_ZEROS)
    return head + digest + tail, digest


def _unsealed(data: bytes, place: str) -> dict[str, Any]:
    at = data.rfind(b'"digest": "') + len(b'"digest": "')
    digest = data[at : at + 64]
    if hashlib.sha256(data[:at] + _ZEROS.encode() + data[at + 64 :]).hexdigest().encode() != digest:
        raise FormatError(f"{place}: torn or changed since it was written — its own digest does not fit — {ADVICE}")
    manifest: dict[str, Any] = json.loads(data)
    if manifest.get("format") != FORMAT:
        raise FormatError(
            f"{place}: not a Hotbed checkpoint — received format {manifest.get('format')!r} — give another path"
        )
    if manifest["format_version"] not in (FORMAT_VERSION - 1, FORMAT_VERSION):
        raise VersionError(f"{place}: format version {manifest['format_version']} — this build reads {FORMAT_VERSION} — "
                           "use the Hotbed version that wrote it, or a newer one")  # fmt: skip
    for name in manifest["files"]:
        if any(path.root or path.drive or ".." in path.parts for path in (PurePosixPath(name), PureWindowsPath(name))):
            raise FormatError(f"{place}: a file outside of the checkpoint — received {name!r} — {ADVICE}")
    for link in manifest.get("chain", ()):
        number_of(link["folder"])  # nothing else lies beside it that it may rest on
    return manifest
