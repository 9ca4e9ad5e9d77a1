# SPDX-License-Identifier: Apache-2.0
"""The container of docs/format.md: files with digests, a manifest that is written last, fulls, and
the deltas on them.

It knows nothing of networks or optimizers, imports no torch, and unpickles nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import RawIOBase
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import safetensors
from safetensors import SafetensorError

from hotbed.data.schema import Schema
from hotbed.errors import FormatError, PersistError
from hotbed.files import Where, not_written, writing
from hotbed.persist.container.check.manifest import check_descriptions, check_links, unsealed
from hotbed.persist.container.check.rows import (
    checked_candidates,
    checked_rows,
    checked_sketch,
    removed_types,
    row_types,
)
from hotbed.persist.container.checked_file import CheckedFile, CheckedReader
from hotbed.persist.container.manifest import (
    Arrays,
    ChainEntry,
    FileEntry,
    Manifest,
    PartEntry,
    TableEntry,
    decode,
    unpacked,
)
from hotbed.persist.container.row_files import (
    OwnedPartitions,
    arrow_batches,
    every_partition,
    holds,
    write_batches,
)
from hotbed.persist.container.row_order import RowCuts, merged_rows, partition_ranges
from hotbed.persist.container.sink import PIECE_BYTES, HashedFile
from hotbed.persist.container.store import (
    ADVICE,
    MANIFEST_FILE,
    CheckpointStore,
    LocalStore,
    NewestState,
    aside_of,
    open_store,
    split,
)

READS = 5
"""How often a state is read again, each time because a writer replaced it meanwhile."""
T = TypeVar("T")
log = logging.getLogger("hotbed.persist")
_NOT_DECODED = (SafetensorError, ArithmeticError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on disk.

    Attributes:
        folder: a Path, or a URL as text.
        digest: of its manifest.
        version: number of the state in its lineage.
        bytes: size of its files without the manifest.
        kind: `full` or `delta`.
        chain: the states that a delta on this one needs, itself the last.
    """

    folder: Where
    digest: str
    version: int
    bytes: int
    kind: str
    chain: tuple[ChainEntry, ...]


class DenseTensor(NamedTuple):
    """A tensor of the dense part. `dtype`: its name in safetensors, such as `BF16`."""

    name: str
    dtype: str
    shape: list[int]
    data: memoryview


class WaitingIds(NamedTuple):
    """Counts of the ids of a table that wait for admission, as `Table` yields and loads them."""

    candidates: Iterator[pa.RecordBatch]
    sketch: Iterator[pa.RecordBatch]


class CheckpointWriter:
    """Write one checkpoint under `root`.

    Nothing is visible before `commit`. Leaving the block without it removes the files.

    Args:
        root: where checkpoints lie.
        draft: `draft` of the writer in another process, whose checkpoint this one writes files of;
            that one commits them. None: a checkpoint of its own.
        stands_back: whether it pauses while other threads of the process work, as in training.

    Example:
        >>> with CheckpointWriter(root) as writer:
        ...     writer.write("dense.safetensors", data)
        ...     saved = writer.commit(manifest)
    """

    def __init__(
        self, root: Where | CheckpointStore, draft: str | None = None, *, stands_back: bool = True
    ) -> None:
        self.store = root if isinstance(root, CheckpointStore) else open_store(root)
        self.files: dict[str, HashedFile] = {}
        self._others: dict[str, FileEntry] = {}
        with writing(self._place):
            self._draft = self.store.draft(draft)
        self._draft.threads.stands_back = stands_back

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
            raise not_written(self._place, error) from error

    @property
    def _place(self) -> str:
        return self.store.place("")

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write one file."""
        with self._draft.create(name) as file:
            file.write(data)
        self.files[name] = file

    def copy(self, name: str, file: RawIOBase) -> None:
        """Write one file with all bytes of an open one."""
        with self._draft.create(name) as target:
            shutil.copyfileobj(file, target, PIECE_BYTES)
        self.files[name] = target

    def write_batches(self, name: str, batches: Iterable[pa.RecordBatch]) -> int:
        """Write one Arrow IPC file and return its rows; without batches write no file."""
        iterator = iter(batches)
        first = next(iterator, None)
        if first is None:
            return 0
        with self._draft.create(name) as file:
            rows = write_batches(file, itertools.chain([first], iterator))
        self.files[name] = file
        return rows

    @property
    def draft(self) -> str:
        """What a writer in another process needs to write files of this checkpoint."""
        return self._draft.place

    def entries(self) -> dict[str, FileEntry]:
        """Return the entries of the files written here, once they are on disk."""
        entries = {}
        for name, file in self.files.items():
            num_bytes, sha256 = file.result()
            entries[name] = FileEntry(bytes=num_bytes, sha256=sha256)
        return entries

    def add(self, entries: Mapping[str, FileEntry]) -> None:
        """Add files that writers in other processes wrote."""
        self._others.update(entries)

    def commit(self, manifest: Manifest) -> Saved:
        """Write the manifest with the entries of all files; make the checkpoint the newest."""
        files = dict(sorted((self._others | self.entries()).items()))
        text, manifest = manifest.with_files(files)
        self._draft.publish(text)
        folder = self._draft.folder
        return Saved(
            folder=self.store.path(folder),
            digest=manifest.digest,
            version=manifest.version,
            bytes=sum(entry.bytes for entry in files.values()),
            kind=manifest.kind,
            chain=chain_on(manifest, folder),
        )


def chain_on(manifest: Manifest, folder: str) -> tuple[ChainEntry, ...]:
    """Return the chain of a delta on the state in `folder`."""
    return (*manifest.chain, ChainEntry(folder=folder, digest=manifest.digest))


# --- one folder ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """One checkpoint folder by itself. Every file is checked against its digest when it is read."""

    store: CheckpointStore
    folder: str
    manifest: Manifest
    _files: dict[str, CheckedFile] = field(default_factory=dict, repr=False)
    _sound: set[str] = field(default_factory=set, repr=False)  # parts whose rows were checked

    @property
    def chain(self) -> tuple[ChainEntry, ...]:
        """The chain of a delta on this state."""
        return chain_on(self.manifest, self.folder)

    def _place(self, name: str) -> str:
        """Return where a file of the folder lies, for messages."""
        return self.store.place(f"{self.folder}/{name}")

    def open(self, name: str) -> CheckedReader:
        """Open one file to read it, once its digest was found right.

        Raises:
            FormatError: the file is missing, torn or changed; the message names it. Reading raises
                it too.
        """
        return self._checked(name).open()

    def read(self, name: str) -> bytes:
        """Return the bytes of one file, which need as much memory; raises what `open` does."""
        with self.open(name) as file:
            return file.read()

    def batches(self, name: str) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of one Arrow file, each read when it is asked for."""
        return arrow_batches(self._checked(name).open, self._place(name))

    def _checked(self, name: str) -> CheckedFile:
        if name not in self._files:
            entry = self.manifest.files.get(name)
            if entry is None:
                raise FormatError(
                    f"{self._place(name)}: a part refers to it, but it is not listed, got "
                    f"{len(self.manifest.files)} files in {MANIFEST_FILE}. {ADVICE}"
                )
            opener = self.store.opener(f"{self.folder}/{name}")
            self._files[name] = CheckedFile(opener, entry, self._place(name))
        return self._files[name]

    def verify(self, owned: OwnedPartitions = every_partition) -> None:
        """Check every file, and that the rows are those of their tables.

        Args:
            owned: files without rows of these partitions are left out.

        Raises:
            FormatError: something is wrong; the message names the first bad file.
        """
        check_descriptions(self.manifest, self._place(MANIFEST_FILE))
        left_out = set()
        for entry in self.manifest.tables:
            is_owned = owned(entry.name)
            left_out |= {part.file for part in entry.all_parts if not holds(part, is_owned)}
        names = [name for name in self.manifest.files if name not in left_out]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            _exhaust(pool.map(self._checked, names))
            _exhaust(pool.map(_exhaust, self._all_parts(left_out)))
        for entry in self.manifest.tables:
            for batches in self.waiting(entry.name):
                _exhaust(batches)
        self.tensors()
        self.tree("tree")
        self.tree("random")

    def _all_parts(self, left_out: Collection[str]) -> Iterator[Iterator[pa.RecordBatch]]:
        for entry in self.manifest.tables:
            for part in entry.all_parts:
                if part.file not in left_out:
                    yield self.part(entry, part, removed=part in entry.removed)

    def entry(self, table: str) -> TableEntry:
        """Return the manifest's entry of a table; raise PersistError for an unknown name."""
        for entry in self.manifest.tables:
            if entry.name == table:
                return entry
        names = [entry.name for entry in self.manifest.tables]
        raise PersistError(
            f"{self.store.place(self.folder)}: there is no table {table!r}, got {names}. "
            "Name one of these."
        )

    def parts(
        self, table: str, owned: OwnedPartitions = every_partition
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows that this folder itself holds of a table, by (partition, id).

        `owned`: files without rows of these partitions are left out.
        """
        entry = self.entry(table)
        is_owned = owned(table)
        for part in entry.parts:
            if holds(part, is_owned):
                yield from self.part(entry, part)

    def removed(
        self, table: str, owned: OwnedPartitions = every_partition
    ) -> Iterator[pa.RecordBatch]:
        """Yield the ids of a table that lost their row since the parent, by (partition, id).

        `owned`: files without ids of these partitions are left out.
        """
        entry = self.entry(table)
        is_owned = owned(table)
        for part in entry.removed:
            if holds(part, is_owned):
                yield from self.part(entry, part, removed=True)

    def part(
        self, entry: TableEntry, part: PartEntry, *, removed: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one part of a table; they are checked at the first call."""
        batches = self.batches(part.file)
        if part.file in self._sound:
            yield from batches
            return
        if removed:
            types = removed_types()
        else:
            types = row_types(entry, self.manifest.contents, self._place(MANIFEST_FILE))
        yield from checked_rows(batches, part, types, self._place(part.file))
        self._sound.add(part.file)

    def waiting(self, table: str) -> WaitingIds:
        """Return the counts of the ids that wait for admission to a table, checked as read."""
        entry = self.entry(table)
        candidates: Iterator[pa.RecordBatch] = iter(())
        sketch: Iterator[pa.RecordBatch] = iter(())
        if entry.candidates is not None:
            file = entry.candidates.file
            candidates = checked_candidates(self.batches(file), entry, self._place(file))
        if entry.sketch is not None:
            file = entry.sketch.file
            sketch = checked_sketch(self.batches(file), entry, self._place(file))
        return WaitingIds(candidates, sketch)

    def dense(self) -> bytes:
        """Return the bytes of the safetensors file; empty without a dense part."""
        part = self.manifest.dense
        if part is None or part.file is None:
            return b""
        return self.read(part.file)

    def tensors(self) -> list[DenseTensor]:
        """Return the tensors of the dense part in the order of their names, without torch.

        Raises:
            FormatError: the file is not a safetensors file.
        """
        data = self.dense()
        if not data:
            return []
        with self._decoding("dense"):
            plain = safetensors.deserialize(data)
        tensors = []
        for name, tensor in plain:
            numbers = memoryview(tensor["data"])
            tensors.append(DenseTensor(name, tensor["dtype"], tensor["shape"], numbers))
        return sorted(tensors, key=lambda tensor: tensor.name)

    def tree(self, member: str) -> Any:
        """Return `tree` or `random` of `progress` with NumPy arrays; {} if nothing was kept."""
        part = self.manifest.progress
        if part is None:
            return {}
        arrays = self._arrays()
        with self._decoding("progress"):
            return decode(getattr(part, member), arrays)

    def _arrays(self) -> Arrays:
        """Return the arrays of `progress` by the names in its trees."""
        part = self.manifest.progress
        if part is None or part.file is None:
            return {}
        data = self.read(part.file)
        with self._decoding("progress"):
            return unpacked(data)

    @contextlib.contextmanager
    def _decoding(self, member: str) -> Iterator[None]:
        """Name the file of a member of the manifest in the errors of the block."""
        try:
            yield
        except _NOT_DECODED as error:
            place = self._place(getattr(self.manifest, member).file or MANIFEST_FILE)
            raise FormatError(
                f"{place}: {member} cannot be decoded, got {type(error).__name__}: {error}. "
                f"{ADVICE}"
            ) from error


def _exhaust(iterator: Iterable[object]) -> None:
    for _ in iterator:
        pass


# --- a full and its deltas ----------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """One complete state: a full, or a delta with its chain.

    `links`: the full first, the state's own folder last.
    """

    links: tuple[Link, ...]

    @property
    def newest_link(self) -> Link:
        """The state's own folder."""
        return self.links[-1]

    @property
    def store(self) -> CheckpointStore:
        return self.newest_link.store

    @property
    def folder(self) -> str:
        """Where the state's own folder lies, as a path or URL."""
        return self.store.place(self.newest_link.folder)

    @property
    def manifest(self) -> Manifest:
        return self.newest_link.manifest

    @property
    def saved(self) -> Saved:
        """The state as its writer returned it."""
        manifest = self.manifest
        return Saved(
            folder=self.store.path(self.newest_link.folder),
            digest=manifest.digest,
            version=manifest.version,
            bytes=sum(entry.bytes for entry in manifest.files.values()),
            kind=manifest.kind,
            chain=self.newest_link.chain,
        )

    @property
    def schema(self) -> Schema | None:
        """The schema that the state was learned with; None if it does not hold one."""
        if self.manifest.schema is None:
            return None
        folder = None
        if isinstance(self.store, LocalStore):  # the first link of a version brings fitted maps
            folder = self.store.root / self.links[0].folder
        return Schema.from_json(self.manifest.schema, folder)

    @property
    def table_names(self) -> list[str]:
        """Names of the tables."""
        return [entry.name for entry in self.manifest.tables]

    def entry(self, table: str) -> TableEntry:
        """Return the manifest's entry of a table; raise PersistError for an unknown name."""
        return self.newest_link.entry(table)

    def verify(self, owned: OwnedPartitions = every_partition) -> None:
        """Check every file of every link; raise FormatError naming the first bad one.

        `owned`: files without rows of these partitions are left out.
        """
        for link in self.links:
            link.verify(owned)

    def rows(self, table: str) -> Iterator[pa.RecordBatch]:
        """Yield all rows of a table, by (partition, id), in batches of some ten thousand."""
        num_rows = sum(part.rows for link in self.links for part in link.entry(table).parts)
        for batch in self.spans(table, partition_ranges(num_rows, 1 << 16)):
            if batch is not None:
                yield batch

    def spans(self, table: str, spans: Iterable[range]) -> Iterator[pa.RecordBatch | None]:
        """Yield the rows of each span of partitions, by (partition, id); None for no rows.

        `spans`: rising, without gaps.
        """
        rows = [RowCuts(link.parts(table)) for link in self.links]
        removed = [RowCuts(link.removed(table)) for link in self.links]
        for span in spans:
            rows_of_links = [cuts.until(span.stop) for cuts in rows]
            removed_of_links = [cuts.until(span.stop) for cuts in removed]
            merged = merged_rows(rows_of_links, removed_of_links)
            if merged is not None and not merged.num_rows:
                merged = None
            yield merged

    def waiting(self, table: str) -> WaitingIds:
        """Return the counts of the ids that wait for admission to a table."""
        return self.newest_link.waiting(table)

    def dense(self) -> bytes:
        """Return the bytes of the safetensors file; empty without a dense part."""
        return self.newest_link.dense()

    def tensors(self) -> list[DenseTensor]:
        """Return the tensors of the dense part in the order of their names, without torch."""
        return self.newest_link.tensors()

    def arrays(self) -> Arrays:
        """Return the arrays of `progress` by the names in its trees."""
        return self.newest_link._arrays()

    @property
    def progress(self) -> Any:
        """What `State.progress` was, with NumPy arrays; {} if nothing was kept."""
        return self.newest_link.tree("tree")

    @property
    def random(self) -> Any:
        """What `State.random` was, as NumPy arrays; {} if nothing was kept."""
        return self.newest_link.tree("random")


def open_checkpoint(path: Where, version: int | None = None) -> Reader:
    """Open the newest checkpoint under `path`, or the one in `path` itself, with its chain.

    Args:
        path: a local path, or a URL for fsspec.
        version: open the newest state under `path` with this version, such as its number of steps.

    Raises:
        FormatError: something is missing, torn or changed; the message names it. All manifests
            are checked, files when they are read.
        PersistError: no state has this version; the message lists those that there are.
        VersionError: a manifest has a format version that this build does not read.
    """
    if version is None:
        return read_newest(path, lambda reader: reader)
    store = open_store(path)
    folders: dict[int, str] = {}
    for folder in store.folders():
        with contextlib.suppress(FormatError):  # a damaged state hides no other
            folders[open_link(store, folder).manifest.version] = folder
    if version not in folders:
        choice = ", ".join(map(str, sorted(folders))) or "none"
        raise PersistError(
            f"{path}: no state has this version, got {version}. Choose one of: {choice}."
        )
    return open_folder(store, folders[version])


def read_newest(path: Where, read: Callable[[Reader], T]) -> T:
    """Return what `read` returns for the newest checkpoint under `path`, or the one in `path`.

    If a writer makes another state the newest one meanwhile, retention may have removed files that
    `read` needed; it is then called again with that state. Raises what `open_checkpoint` and `read`
    raise.
    """
    store = open_store(path)
    for remaining in reversed(range(READS)):
        newest = store.newest_state()
        try:
            return read(_opened(path, store, newest))
        except FormatError as error:
            if newest is None or remaining == 0 or store.newest_state() == newest:
                raise
            log.info("%s; reading the state that became newest meanwhile", error)
    raise AssertionError("the last attempt returns or raises")


def holds_nothing(path: Where) -> bool:
    """Return whether no checkpoint is at `path` yet.

    Raises:
        FormatError: CURRENT is torn, or missing next to states.
    """
    store = open_store(path)
    return store.newest_state() is None and not store.exists(MANIFEST_FILE)


def _opened(path: Where, store: CheckpointStore, newest: NewestState | None) -> Reader:
    if newest is not None:
        return open_folder(store, newest.folder, newest.sha256)
    if not store.exists(MANIFEST_FILE):
        raise FormatError(
            f"{path}: there is no checkpoint, got neither CURRENT nor {MANIFEST_FILE}. "
            "Give the folder of a saved, exported or published model."
        )
    root, folder = split(path)
    return open_folder(open_store(root), folder)


def open_folder(store: CheckpointStore, folder: str, sha256: str | None = None) -> Reader:
    """Return the state of one checkpoint folder with its chain.

    `sha256`: what its manifest must hash to; None: its own digest is trusted.
    """
    newest = open_link(store, folder, sha256)
    links = []
    for entry in newest.manifest.chain:
        link = open_link(store, entry.folder)
        if link.manifest.digest != entry.digest:
            raise FormatError(
                f"{store.place(link.folder)}/{MANIFEST_FILE}: {folder} rests on another state, "
                f"got digest {link.manifest.digest} instead of {entry.digest}. {ADVICE}"
            )
        links.append(link)
    links.append(newest)
    check_links([link.manifest for link in links], f"{store.place(folder)}/{MANIFEST_FILE}")
    return Reader(tuple(links))


def open_link(store: CheckpointStore, folder: str, sha256: str | None = None) -> Link:
    """Return one checkpoint folder without its chain."""
    name = f"{folder}/{MANIFEST_FILE}"
    place = store.place(name)
    data = store.read(name)
    if sha256 is not None:
        actual = hashlib.sha256(data).hexdigest()
        if actual != sha256:
            raise FormatError(
                f"{place}: CURRENT points to another manifest, got SHA-256 {actual} instead of "
                f"{sha256}. {ADVICE}"
            )
    return Link(store, folder, unsealed(data, place))


def highest_version(store: CheckpointStore) -> int:
    """Return the highest number of a version that a store ever held, as far as it shows.

    Folders that were moved aside count, and so do damaged ones whose number can be read. -1: none.
    """
    stores = [store]
    if isinstance(store, LocalStore):
        stores.append(aside_of(store))
    highest = -1
    for place in stores:
        for folder in place.folders():
            with contextlib.suppress(FormatError, ValueError, LookupError, TypeError):
                plain = json.loads(place.read(f"{folder}/{MANIFEST_FILE}"))
                highest = max(highest, int(plain["version"]))
    return highest


def newest_link(store: CheckpointStore) -> Link | None:
    """Return the newest checkpoint folder without its chain, None in an empty store."""
    newest = store.newest_state()
    return None if newest is None else open_link(store, newest.folder, newest.sha256)


def refuse_states(link: Link | None) -> None:
    """Raise PersistError if values are to be written over `link`, a state to resume from."""
    if link is not None and link.manifest.contents != "values":
        raise PersistError(
            f"{link.store.place('')}: it holds checkpoints, not published versions, "
            f"got contents {link.manifest.contents!r}. Write to another place."
        )


def refuse_others(store: CheckpointStore) -> None:
    """Raise PersistError if a model is to be saved over a stream's states or published versions.

    Checkpoints whose manifest is damaged may be replaced if no other one says what the folder
    holds. Raises FormatError if CURRENT is torn or lost.
    """
    newest = store.newest_state()
    if newest is None:
        return
    kind = None
    try:
        kind = _others(open_link(store, newest.folder, newest.sha256))
    except FormatError:
        kind = _others_beside(store)
    if kind is not None:
        raise PersistError(
            f"{store.place('')}: it holds {kind}, got a model to save. Save to another place."
        )


def _others_beside(store: CheckpointStore) -> str | None:
    """Return what the checkpoints hold beside a damaged one, as `_others` does."""
    for folder in reversed(store.folders()):
        try:
            return _others(open_link(store, folder))
        except FormatError:
            continue
    return None


def _others(link: Link) -> str | None:
    """Return what a checkpoint is in words, None if it is a model that was saved."""
    if link.manifest.contents == "values":
        return "published versions"
    if link.manifest.positions:
        return "states of a stream"
    return None
