# SPDX-License-Identifier: Apache-2.0
"""The container of docs/format.md: files with digests, a manifest written last, fulls and the
deltas that rest on them.

It knows nothing of networks or optimizers, imports no torch, and unpickles nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import safetensors
from safetensors import SafetensorError

from hotbed.errors import FormatError, PersistError
from hotbed.files import Where
from hotbed.persist.manifest import (
    Arrays,
    check_descriptions,
    check_links,
    decode,
    sealed,
    unpacked,
    unsealed,
)
from hotbed.persist.rows import (
    RowCuts,
    arrow_batches,
    checked_candidates,
    checked_rows,
    merged_rows,
    partition_ranges,
    row_types,
)
from hotbed.persist.sink import HashedFile
from hotbed.persist.store import (
    ADVICE,
    MANIFEST_FILE,
    CheckpointStore,
    NewestState,
    open_store,
    split,
)

READS = 5
"""How often a state is read, where each time a writer replaces it meanwhile."""
T = TypeVar("T")
log = logging.getLogger("hotbed.persist")


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on disk.

    `folder`: a Path, or a URL as text; `bytes`: of its files, manifest aside; `chain`: what a delta
    on it rests on.
    """

    folder: Where
    digest: str
    version: int
    bytes: int
    kind: str
    chain: tuple[Mapping[str, str], ...]


class DenseTensor(NamedTuple):
    """A tensor of the dense part. `dtype`: its name in safetensors, such as `BF16`."""

    name: str
    dtype: str
    shape: list[int]
    data: memoryview


class CheckpointWriter:
    """Writes one checkpoint under `root`.

    Nothing is visible before `commit`. Leaving without it removes the files.

    Example:
        >>> with CheckpointWriter(root) as writer:
        ...     writer.write("dense.safetensors", data)
        ...     saved = writer.commit(members)
    """

    def __init__(self, root: Where | CheckpointStore) -> None:
        self.store = root if isinstance(root, CheckpointStore) else open_store(root)
        self.files: dict[str, HashedFile] = {}
        try:
            self._draft = self.store.draft()
        except OSError as error:
            raise PersistError(
                f"{self.store.place('')}: cannot be written — {error} — give a place that this "
                "process may write"
            ) from error

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._draft.discard()
        if isinstance(error, OSError):
            raise PersistError(
                f"{self.store.place('')}: cannot be written — {error} — free space or choose "
                "another place"
            ) from error

    def write(self, name: str, data: bytes | memoryview) -> None:
        """One file from bytes."""
        with self._draft.create(name) as file:
            file.write(data)
        self.files[name] = file

    def write_batches(self, name: str, batches: Iterable[pa.RecordBatch]) -> int:
        """One Arrow IPC file; returns its rows. Without a single batch no file is written and 0 is
        returned.
        """
        iterator = iter(batches)
        first = next(iterator, None)
        if first is None:
            return 0
        rows = 0
        with (
            self._draft.create(name) as file,
            pa.ipc.new_file(pa.PythonFile(file, mode="w"), first.schema) as sink,
        ):
            for batch in itertools.chain([first], iterator):
                sink.write_batch(batch)
                rows += batch.num_rows
        self.files[name] = file
        return rows

    def commit(self, members: Mapping[str, Any]) -> Saved:
        """Write the manifest with `members`, make the checkpoint visible and newest."""
        files = {name: self.files[name].entry() for name in sorted(self.files)}
        text, digest = sealed({**members, "files": files})
        self._draft.publish(text.encode())
        name = self._draft.folder
        num_bytes = sum(int(entry["bytes"]) for entry in files.values())
        chain = (*members.get("chain", ()), {"folder": name, "digest": digest})
        return Saved(
            self.store.path(name),
            digest,
            members.get("version", 0),
            num_bytes,
            members["kind"],
            chain,
        )


@dataclass(frozen=True)
class Link:
    """One checkpoint folder by itself; every file is checked against its digest when it is read."""

    store: CheckpointStore
    folder: str
    manifest: Mapping[str, Any]
    _checked: dict[str, memoryview] = field(default_factory=dict, repr=False)
    _sound: set[str] = field(default_factory=set, repr=False)  # parts whose rows were checked

    @property
    def chain(self) -> list[Mapping[str, str]]:
        """What a delta on this state gives as its chain."""
        return [
            *self.manifest.get("chain", ()),
            {"folder": self.folder, "digest": self.manifest["digest"]},
        ]

    def read(self, name: str) -> memoryview:
        """Bytes of one file. Raises FormatError naming the file when it is missing, torn or
        changed.
        """
        place = self.store.place(f"{self.folder}/{name}")
        if name in self._checked:
            return self._checked[name]
        entry = self.manifest["files"].get(name)
        if entry is None:
            raise FormatError(
                f"{place}: not listed in {MANIFEST_FILE} — a part refers to it — restore the "
                "checkpoint from a copy"
            )
        data = self.store.read(f"{self.folder}/{name}")
        if len(data) != entry["bytes"]:
            raise FormatError(
                f"{place}: torn — received {len(data)} bytes instead of {entry['bytes']} — {ADVICE}"
            )
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise FormatError(
                f"{place}: changed since it was written — its SHA-256 is not the manifest's — "
                f"{ADVICE}"
            )
        self._checked[name] = data
        return data

    def batches(self, name: str) -> Iterator[pa.RecordBatch]:
        """Record batches of one Arrow file, without copying."""
        return arrow_batches(self.read(name), self.store.place(f"{self.folder}/{name}"))

    def verify(self) -> None:
        """Check every file, and that rows are those of their tables; FormatError names the first
        bad one.
        """
        check_descriptions(self.manifest, self.store.place(f"{self.folder}/{MANIFEST_FILE}"))
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for _ in pool.map(self.read, self.manifest["files"]):
                pass
            for _ in pool.map(self._check_part, self._parts()):
                pass
        for entry in self.manifest["tables"]:
            for _ in self.candidates(entry["name"]):
                pass
        self.tensors()
        self.tree("tree")
        self.tree("random")

    def parts(self, table: str, member: str = "parts") -> Iterator[pa.RecordBatch]:
        """The rows (or `removed` ids) that this folder itself holds of a table, by (partition, id)."""
        entry = self.entry(table)
        for part in entry.get(member, ()):
            yield from self.part(entry, member, part)

    def part(
        self, entry: Mapping[str, Any], member: str, part: Mapping[str, Any]
    ) -> Iterator[pa.RecordBatch]:
        """The rows of one part of a table, checked unless they were."""
        name = part["file"]
        if name in self._sound:
            yield from self.batches(name)
            return
        types = row_types(entry, self.contents, self.store.place(f"{self.folder}/{MANIFEST_FILE}"))
        if member == "removed":
            types = {column: types[column] for column in ("partition", "id")}
        yield from checked_rows(
            self.batches(name), part, types, self.store.place(f"{self.folder}/{name}")
        )
        self._sound.add(name)

    def candidates(self, table: str) -> Iterator[pa.RecordBatch]:
        """What waits for admission to a table."""
        entry = self.entry(table)
        if entry["candidates"] is None:
            return
        name = entry["candidates"]["file"]
        yield from checked_candidates(
            self.batches(name), entry, self.store.place(f"{self.folder}/{name}")
        )

    def dense(self) -> memoryview:
        """The bytes of dense.safetensors; empty without a dense part."""
        part = self.manifest["dense"] or {"file": None}
        return self.read(part["file"]) if part["file"] else memoryview(b"")

    def tensors(self) -> list[DenseTensor]:
        """Return the tensors of the dense part in the order of their names, without torch.

        Raises:
            FormatError: The file is not a safetensors file.
        """
        data = self.dense()
        if not data:
            return []
        with self._reading("dense"):
            plain = safetensors.deserialize(bytes(data))  # type: ignore[no-untyped-call]
        tensors = [
            DenseTensor(name, tensor["dtype"], tensor["shape"], memoryview(tensor["data"]))
            for name, tensor in plain
        ]
        return sorted(tensors, key=lambda tensor: tensor.name)

    def arrays(self) -> Arrays:
        """The arrays of `progress` and `random` by the names in their trees."""
        part = self.manifest.get("progress")
        if part is None or part["file"] is None:
            return {}
        data = self.read(part["file"])
        with self._reading("progress"):
            return unpacked(data)

    def tree(self, member: str) -> Any:
        """The nested value `tree` or `random` of `progress`, with NumPy arrays; {} where nothing
        was kept.
        """
        part = self.manifest.get("progress")
        if part is None:
            return {}
        arrays = self.arrays()
        with self._reading("progress"):
            return decode(part[member], arrays)

    @contextlib.contextmanager
    def _reading(self, member: str) -> Iterator[None]:
        """Name the file of a member of the manifest in the errors of who decodes it."""
        try:
            yield
        except (SafetensorError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            name = self.manifest[member]["file"] or MANIFEST_FILE
            place = self.store.place(f"{self.folder}/{name}")
            what = f"received {type(error).__name__}: {error}"
            raise FormatError(f"{place}: {member} cannot be decoded — {what} — {ADVICE}") from error

    @property
    def contents(self) -> str:
        """`state`, or `values` in what is published for serving."""
        contents: str = self.manifest.get("contents", "state")
        return contents

    def _parts(self) -> Iterator[tuple[Mapping[str, Any], str, Mapping[str, Any]]]:
        for entry in self.manifest["tables"]:
            for member in ("parts", "removed"):
                for part in entry.get(member, ()):
                    yield entry, member, part

    def _check_part(self, place: tuple[Mapping[str, Any], str, Mapping[str, Any]]) -> None:
        for _ in self.part(*place):
            pass

    def entry(self, table: str) -> Mapping[str, Any]:
        """The manifest's entry of a table; PersistError when there is none of that name."""
        for entry in self.manifest["tables"]:
            if entry["name"] == table:
                found: Mapping[str, Any] = entry
                return found
        names = [entry["name"] for entry in self.manifest["tables"]]
        raise PersistError(
            f"{self.store.place(self.folder)}: no table {table!r} — it has {names} — name one of "
            "these"
        )


@dataclass(frozen=True)
class Reader:
    """One complete state: a full, or a delta with its chain. `links`: the full first, the state's
    own folder last.
    """

    links: tuple[Link, ...]

    @property
    def store(self) -> CheckpointStore:
        return self.links[-1].store

    @property
    def table_names(self) -> list[str]:
        """Names of the tables."""
        return [entry["name"] for entry in self.manifest["tables"]]

    @property
    def folder(self) -> str:
        """Where the newest link lies, as a path or URL."""
        return self.store.place(self.links[-1].folder)

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The manifest of the state itself."""
        return self.links[-1].manifest

    def verify(self) -> None:
        """Check every file of every link and what is in it; FormatError names the first bad one."""
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
        return (
            batch
            for batch in self.spans(table, partition_ranges(held, 1 << 16))
            if batch is not None
        )

    def spans(self, table: str, spans: Iterable[range]) -> Iterator[pa.RecordBatch | None]:
        """The rows of each span of partitions, by (partition, id); None where there are none.
        `spans`: rising, without gaps.
        """
        rows = [RowCuts(link.parts(table)) for link in self.links]
        gone = [RowCuts(link.parts(table, "removed")) for link in self.links]
        for span in spans:
            merged = merged_rows(
                [one.until(span.stop) for one in rows], [one.until(span.stop) for one in gone]
            )
            yield merged if merged is not None and merged.num_rows else None

    def candidates(self, table: str) -> Iterator[pa.RecordBatch]:
        """Admission's memory of a table."""
        return self.links[-1].candidates(table)

    def dense(self) -> memoryview:
        """The bytes of dense.safetensors; empty without a dense part."""
        return self.links[-1].dense()

    def tensors(self) -> list[DenseTensor]:
        """Return the tensors of the dense part in the order of their names, without torch."""
        return self.links[-1].tensors()

    def arrays(self) -> Arrays:
        """The arrays of `progress` and `random` by the names in their trees."""
        return self.links[-1].arrays()

    @property
    def progress(self) -> Any:
        """What `State.progress` was, with NumPy arrays; {} where nothing was kept."""
        return self.links[-1].tree("tree")

    @property
    def random(self) -> Any:
        """What `State.random` was, as NumPy arrays; {} where nothing was kept."""
        return self.links[-1].tree("random")


def open_checkpoint(path: Where) -> Reader:
    """The newest checkpoint under `path`, or the one in `path` itself, with its chain; all
    manifests checked.

    `path`: a local path, or a URL for fsspec. Raises FormatError naming what is missing, torn or
    changed, VersionError for another format version.
    """
    return read_newest(path, lambda reader: reader)


def read_newest(path: Where, read: Callable[[Reader], T]) -> T:
    """Call `read` with the newest checkpoint under `path`, or the one in `path` itself; return what
    it returns.

    Where a writer made another state the newest one meanwhile, retention may have removed files
    that `read` needed: it is then called again with that state. Raises what `open_checkpoint` and
    `read` raise.
    """
    store = open_store(path)
    for left in reversed(range(READS)):
        newest = store.newest_state()
        try:
            return read(_opened(path, store, newest))
        except FormatError as error:
            if newest is None or left == 0 or store.newest_state() == newest:
                raise
            log.info("%s; reading the state that became newest meanwhile", error)
    raise AssertionError("the last attempt returns or raises")


def _opened(path: Where, store: CheckpointStore, newest: NewestState | None) -> Reader:
    if newest is not None:
        return open_folder(store, newest.folder, newest.sha256)
    if not store.exists(MANIFEST_FILE):
        raise FormatError(
            f"{path}: no checkpoint — it holds neither CURRENT nor {MANIFEST_FILE} — "
            "give the path that save() was called with"
        )
    root, folder = split(path)
    return open_folder(open_store(root), folder)


def open_folder(store: CheckpointStore, folder: str, sha256: str | None = None) -> Reader:
    """The state of one checkpoint folder; `sha256`: what its manifest must hash to, else its own
    digest is trusted.
    """
    newest = open_link(store, folder, sha256)
    links = []
    for entry in newest.manifest.get("chain", ()):
        link = open_link(store, entry["folder"])
        if link.manifest["digest"] != entry["digest"]:
            raise FormatError(
                f"{store.place(entry['folder'])}/{MANIFEST_FILE}: not the state that {folder} rests on "
                "— its digest is "
                f"{link.manifest['digest']} — {ADVICE}"
            )
        links.append(link)
    check_links(
        [link.manifest for link in (*links, newest)], f"{store.place(folder)}/{MANIFEST_FILE}"
    )
    return Reader((*links, newest))


def open_link(store: CheckpointStore, folder: str, sha256: str | None = None) -> Link:
    """One checkpoint folder without its chain."""
    name = f"{folder}/{MANIFEST_FILE}"
    data = bytes(store.read(name))
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise FormatError(
            f"{store.place(name)}: not the manifest that CURRENT points to — its SHA-256 differs "
            f"— {ADVICE}"
        )
    return Link(store, folder, unsealed(data, store.place(name)))


def newest_link(store: CheckpointStore) -> Link | None:
    """The newest checkpoint folder without its chain; None where there is none."""
    newest = store.newest_state()
    return None if newest is None else open_link(store, newest.folder, newest.sha256)


def refuse_states(link: Link | None) -> None:
    """Raise PersistError where values are to be written over `link`, a state that training resumes
    from.
    """
    if link is not None and link.manifest.get("contents") != "values":
        raise PersistError(
            f"{link.store.place('')}: it holds checkpoints, not published versions, "
            f"got contents {link.manifest.get('contents')!r}. Write to another place."
        )


def refuse_others(store: CheckpointStore) -> None:
    """Raise PersistError where a model is to be saved over a stream's states or published versions.

    Raises FormatError where CURRENT is torn or lost. A newest checkpoint whose manifest is damaged
    may be replaced.
    """
    newest = store.newest_state()
    if newest is None:
        return
    try:
        manifest = open_link(store, newest.folder, newest.sha256).manifest
    except FormatError:
        return
    if manifest.get("contents") == "values" or manifest["positions"]:
        kind = (
            "published versions" if manifest.get("contents") == "values" else "states of a stream"
        )
        raise PersistError(
            f"{store.place('')}: it holds {kind}, got a model to save. Save to another place."
        )
