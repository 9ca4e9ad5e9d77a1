# SPDX-License-Identifier: Apache-2.0
"""The container of docs/format.md: files with digests, a manifest written last, CURRENT moved by an atomic rename.

It knows nothing of networks or optimizers, imports no torch, and unpickles nothing.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, BinaryIO
from urllib.parse import quote

import pyarrow as pa

from hotbed.errors import FormatError, PersistError, VersionError

FORMAT = "hotbed.checkpoint"
FORMAT_VERSION = 1
MANIFEST, CURRENT = "MANIFEST.json", "CURRENT"
NUM_PARTITIONS = 256
_NAME = re.compile(r"checkpoint-(\d{8,})")
_PARTIAL = re.compile(r"\.checkpoint-\d+\.(\d+)\.partial")
_ZEROS = "0" * 64


class Writer:
    """Writes one checkpoint under `root`: nothing is visible before `commit`, and leaving without it removes the files.

    Example:
        >>> with Writer(root) as writer:
        ...     writer.write("dense.safetensors", data)
        ...     writer.commit({"kind": "full"})
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, dict[str, Any]] = {}
        try:
            root.mkdir(parents=True, exist_ok=True)
            _sweep(root)
            self.number = max(_numbers(root), default=0) + 1
            self._folder = root / f".checkpoint-{self.number:08d}.{os.getpid()}.partial"
            self._folder.mkdir()
        except OSError as error:
            raise PersistError(
                f"{root}: cannot be written — {error} — give a folder that this process may write"
            ) from error

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise PersistError(
                f"{self.root}: cannot be written — {error} — free space or choose another folder"
            ) from error

    def write(self, name: str, data: bytes | memoryview) -> None:
        """One file from bytes."""
        with _Hashed(self._place(name)) as file:
            file.write(data)
        self.files[name] = file.entry()

    def write_batches(self, name: str, batches: Iterable[pa.RecordBatch]) -> int:
        """One Arrow IPC file; returns its rows. Without a single batch no file is written and 0 is returned."""
        iterator = iter(batches)
        first = next(iterator, None)
        if first is None:
            return 0
        rows = 0
        with _Hashed(self._place(name)) as file, pa.ipc.new_file(pa.PythonFile(file, mode="w"), first.schema) as sink:
            for batch in _prepend(first, iterator):
                sink.write_batch(batch)
                rows += batch.num_rows
        self.files[name] = file.entry()
        return rows

    def commit(self, members: Mapping[str, Any], keep: int = 1) -> tuple[Path, str]:
        """Write the manifest with `members`, make the checkpoint visible and current; its folder and digest.

        Older checkpoints beyond `keep` are removed afterwards.
        """
        head = {"format": FORMAT, "format_version": FORMAT_VERSION}
        text, digest = _sealed({**head, **members, "files": self.files})
        with _Hashed(self._folder / MANIFEST) as file:
            file.write(text.encode())
        for folder in [path for path in self._folder.rglob("*") if path.is_dir()] + [self._folder]:
            _sync_folder(folder)
        final = self.root / f"checkpoint-{self.number:08d}"
        try:
            os.rename(self._folder, final)
        except OSError as error:
            raise PersistError(
                f"{final}: another process wrote it meanwhile — {error} — let one process save"
            ) from error
        _sync_folder(self.root)
        _point(self.root, final.name, file.entry()["sha256"])
        for number in sorted(_numbers(self.root))[:-keep]:
            shutil.rmtree(self.root / f"checkpoint-{number:08d}", ignore_errors=True)
        return final, digest

    def _place(self, name: str) -> Path:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


@dataclass(frozen=True)
class Reader:
    """One complete checkpoint; every file is checked against its digest when it is read."""

    folder: Path
    manifest: Mapping[str, Any]
    _checked: dict[str, memoryview] = field(default_factory=dict, repr=False)

    def read(self, name: str) -> memoryview:
        """Bytes of one file, memory-mapped. Raises FormatError naming the file when it is missing, torn or changed."""
        path = self.folder / name
        if name in self._checked:
            return self._checked[name]
        entry = self.manifest["files"].get(name)
        if entry is None:
            raise FormatError(
                f"{path}: not listed in {MANIFEST} — a part refers to it — restore the checkpoint from a copy"
            )
        data = _map(path)
        if len(data) != entry["bytes"]:
            raise FormatError(f"{path}: torn — received {len(data)} bytes instead of {entry['bytes']} — {_ADVICE}")
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise FormatError(f"{path}: changed since it was written — its SHA-256 is not the manifest's — {_ADVICE}")
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
            raise FormatError(f"{self.folder / name}: no Arrow IPC file — {error} — {_ADVICE}") from error

    def verify(self) -> None:
        """Check every file; FormatError names the first bad one."""
        for name in self.manifest["files"]:
            self.read(name)


_ADVICE = "do not use it; restore the checkpoint from a copy"


def open_checkpoint(path: Path) -> Reader:
    """The current checkpoint under `path`, or the one in `path` itself; its manifest checked.

    Raises FormatError naming what is missing, torn or changed, VersionError for another format version.
    """
    pointer = path / CURRENT
    if pointer.is_file():
        name, expected = _read_pointer(pointer)
        folder = path / name
    elif (path / MANIFEST).is_file():
        folder, expected = path, None
    else:
        raise FormatError(f"{path}: no checkpoint — it holds neither {CURRENT} nor {MANIFEST} — "
                          "give the path that save() was called with")  # fmt: skip
    file = folder / MANIFEST
    data = bytes(_map(file))
    if expected is not None and hashlib.sha256(data).hexdigest() != expected:
        raise FormatError(f"{file}: not the manifest that {pointer} points to — its SHA-256 differs — {_ADVICE}")
    return Reader(folder, _unsealed(data, file))


def table_folder(number: int, name: str) -> str:
    """Folder of a table: its number and its name, made safe for any file system.

    >>> table_folder(3, "item/colour")
    'tables/003-item%2Fcolour'
    """
    return f"tables/{number:03d}-{quote(name, safe='')[:100]}"


def partition_ranges(rows: int, rows_per_part: int = 1 << 20) -> list[range]:
    """Equal ranges of the 256 partitions for a table of `rows`, about `rows_per_part` rows each."""
    parts = 1
    while parts < NUM_PARTITIONS and rows > parts * rows_per_part:
        parts *= 2
    width = NUM_PARTITIONS // parts
    return [range(first, first + width) for first in range(0, NUM_PARTITIONS, width)]


# --- sealing --------------------------------------------------------------------------------------------------------


def _sealed(members: Mapping[str, Any]) -> tuple[str, str]:
    """Manifest text whose last member is the SHA-256 of the text with 64 zeros in its place."""
    if "digest" in members:
        raise PersistError("digest: a reserved member of the manifest — received one — leave it out")
    text = json.dumps({**members, "digest": _ZEROS}, indent=1, ensure_ascii=False) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    head, _, tail = text.rpartition(_ZEROS)
    return head + digest + tail, digest


def _unsealed(data: bytes, file: Path) -> dict[str, Any]:
    at = data.rfind(b'"digest": "') + len(b'"digest": "')
    digest = data[at : at + 64]
    if hashlib.sha256(data[:at] + _ZEROS.encode() + data[at + 64 :]).hexdigest().encode() != digest:
        raise FormatError(f"{file}: torn or changed since it was written — its own digest does not fit — {_ADVICE}")
    manifest: dict[str, Any] = json.loads(data)
    if manifest.get("format") != FORMAT:
        raise FormatError(
            f"{file}: not a Hotbed checkpoint — received format {manifest.get('format')!r} — give another path"
        )
    if manifest["format_version"] != FORMAT_VERSION:
        raise VersionError(f"{file}: format version {manifest['format_version']} — this build reads {FORMAT_VERSION} — "
                           "use the Hotbed version that wrote it, or a newer one")  # fmt: skip
    for name in manifest["files"]:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise FormatError(f"{file}: a file outside of the checkpoint — received {name!r} — {_ADVICE}")
    return manifest


def _point(root: Path, name: str, sha256: str) -> None:
    partial = root / f".{CURRENT}.{os.getpid()}.partial"
    with _Hashed(partial) as file:
        file.write(f"{name} {sha256}\n".encode())
    os.replace(partial, root / CURRENT)
    _sync_folder(root)


def _read_pointer(pointer: Path) -> tuple[str, str]:
    match = re.fullmatch(rb"(checkpoint-\d{8,}) ([0-9a-f]{64})\n", bytes(_map(pointer)))
    if match is None:
        raise FormatError(f"{pointer}: torn or changed — it is not a checkpoint's name and digest — "
                          "name the newest complete checkpoint folder instead")  # fmt: skip
    return match[1].decode(), match[2].decode()


# --- files ----------------------------------------------------------------------------------------------------------


class _Hashed:
    """A new file that is hashed while it is written, and on disk when it closes."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = open(path, "xb", buffering=1 << 20)  # noqa: SIM115 - closed by __exit__
        self._hash, self._bytes = hashlib.sha256(), 0

    def __enter__(self) -> _Hashed:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._file.flush()
        if kind is None:
            os.fsync(self._file.fileno())
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._hash.update(view)
        self._bytes += view.nbytes
        return self._file.write(view)

    def flush(self) -> None:
        """Arrow asks for it after each batch; the file flushes itself when it is full and when it closes."""

    def entry(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}


def _map(path: Path) -> memoryview:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise FormatError(f"{path}: missing or unreadable — {error.strerror or error} — {_ADVICE}") from error


def _sync_folder(path: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _numbers(root: Path) -> list[int]:
    return [int(match[1]) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]


def _sweep(root: Path) -> None:
    """Remove partial folders of processes that are gone."""
    for path in root.iterdir():
        match = _PARTIAL.fullmatch(path.name)
        if match and not _alive(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    if process == os.getpid():
        return False  # a process that ended had our number, as happens in containers: we are not saving yet
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _prepend(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest
