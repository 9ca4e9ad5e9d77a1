# SPDX-License-Identifier: Apache-2.0
"""Resolve paths and URLs, write files whole, map them into memory, and lock what one writes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import logging
import mmap
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import xxhash

from hotbed.errors import ConfigError, NotWritten, PersistError

MARK_FILE = ".hotbed"
"""The file in a folder whose content Hotbed may remove."""

Where = str | Path
"""A local path or a URL such as `s3://bucket/model`."""

DIGESTS: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256, "xxh3": xxhash.xxh3_128}
"""The kinds of digests of a file, by name."""

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+(::|://)")
_LOCAL_URL = re.compile(r"(?:file|local):(?://(?P<path>.+)|(?P<absolute>/.*))", re.DOTALL)
_LOCK_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{16}\.partial", re.DOTALL)
_PIECE_BYTES = 4 << 20
_READ_BYTES = 1 << 20
"""Up to which size a file is read, not mapped."""
_LOG = logging.getLogger("hotbed")
_MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")
"""A space or a backslash in it."""
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_REMOTE = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "glusterfs", "fuse.sshfs"}
)
_SHORTENED_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/[^/]")


def resolve(where: Where) -> Path | str:
    """Return a local path as a Path, the URL of an object store as text without its last slash.

    `file://` and `local://` URLs are local paths; what follows is taken literally, as in fsspec.

    Raises:
        ConfigError: `where` is not a path, or it is a URL that was made into a Path, which loses a
            slash.
    """
    if not isinstance(where, (str, os.PathLike)) or not str(where) or "\0" in str(where):
        raise ConfigError(
            f"path: must be a text or a Path, not empty, got {where!r:.60}. Give a folder or a "
            "URL; '.' is the working directory."
        )
    text = str(where)
    local = _LOCAL_URL.fullmatch(text)
    if local is not None:
        return Path(local["path"] or local["absolute"])
    if _URL.match(text):
        return text.rstrip("/")
    if isinstance(where, Path) and _SHORTENED_URL.match(text):
        raise ConfigError(f"path: a URL made into a Path, got {where!r}. Give URLs as text.")
    return Path(where)


def local_path(where: Where, name: str) -> Path:
    """Return `where` as a local path; ConfigError naming `name` for the URL of an object store."""
    path = resolve(where)
    if isinstance(path, str):
        raise ConfigError(f"{name}: must be a local path, got {path!r}. Give a local folder.")
    return path


def sync_folder(folder: Path) -> None:
    """Make names that came, went or moved in `folder` survive a loss of power."""
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def partial_path(root: Path, name: str) -> Path:
    """Return a path that nobody else uses, for what is not whole yet or is being removed."""
    return root / f".{name}.{secrets.token_hex(8)}.partial"


def is_partial(name: str) -> bool:
    """Return whether a file or folder has a name as `partial_path` gives it."""
    return _PARTIAL.fullmatch(name) is not None


def claim_folder(
    folder: Path, where: str, is_own: Callable[[Path], bool] = lambda path: False
) -> None:
    """Make a folder whose content may be removed, and leave a mark in it.

    A folder that exists is taken if it has the mark, or holds nothing but what `is_own` knows.

    Args:
        folder: the folder.
        where: the argument that names it, for messages.
        is_own: whether an earlier version of Hotbed, which left no mark, wrote a path in it.

    Raises:
        ConfigError: the folder is a link, or holds what Hotbed did not write.
        NotWritten: it cannot be made.
    """
    if folder.is_symlink():
        raise ConfigError(
            f"{where}: {folder} is a link, got a link to {os.readlink(folder)!r}. What lies behind "
            "it is not removed: remove the link, or choose another place."
        )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / MARK_FILE
        if mark.is_file():
            return
        foreign = sorted(path.name for path in folder.iterdir() if not is_own(path))
        if foreign:
            raise ConfigError(
                f"{where}: {folder} would be emptied, and holds what Hotbed did not write, got "
                f"{foreign[0]!r}. Move it away, or choose another place."
            )
        mark.write_text("Hotbed made this folder, and may remove what is in it.\n")


def check_scratch(folder: str, where: str) -> None:
    """Raise ConfigError unless files can be made in a folder; warn if it is on no local disk.

    Args:
        folder: for files without a name, which are read at random.
        where: the argument that names it, for messages.
    """
    path = Path(folder)
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist"
        raise ConfigError(
            f"{where}: {problem}, got {folder!r}. Make the folder, or name one on a local disk."
        )
    _check_writable(path, where)
    _warn_of(os.path.realpath(path))


def check_folder(folder: Where, where: str) -> None:
    """Raise ConfigError unless a local folder is there or can be made, and takes files.

    Args:
        folder: of an object store nothing is checked.
        where: the argument that names it, for messages.
    """
    path = resolve(folder)
    if isinstance(path, str):
        return
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    if not path.is_dir():
        raise ConfigError(f"{where}: is not a folder, got {os.fspath(path)!r}. Name another one.")
    _check_writable(path, where)


def _check_writable(path: Path, where: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"{where}: no file can be made in it, got {os.fspath(path)!r}: {error.strerror}. "
            "Correct its rights, or name a folder on another disk."
        ) from error


@functools.cache  # once, though each table of a folder asks
def _warn_of(folder: str) -> None:
    kind = file_system(folder)
    if kind in _IN_MEMORY:
        _LOG.warning(
            "%s is on %s, which is memory: rows there save none. Name a folder on a disk",
            folder,
            kind,
        )
    if kind in _REMOTE:
        _LOG.warning(
            "%s is on %s, the disk of another machine: each read waits for the network. Name a "
            "folder on a local disk",
            folder,
            kind,
        )


def mounts() -> str:
    """Return the mounts of this process as the system lists them; "" where it does not."""
    try:
        return _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # only Linux has them
        return ""


def file_system(folder: str) -> str:
    """Return the kind of file system of a folder without links, such as ext4; "" if not known."""
    longest = ""
    kind = ""
    for line in mounts().splitlines():
        mount, _, source = line.partition(" - ")
        place = _OCTAL.sub(lambda code: chr(int(code[1], 8)), mount.split()[4])
        is_above = folder == place or folder.startswith(place.rstrip("/") + "/")
        if is_above and len(place) >= len(longest):  # of two mounts at a place the last counts
            longest = place
            kind = source.split()[0]
    return kind


def remove_all(paths: Iterable[Path]) -> None:
    """Remove files and folders; of a link, the link alone."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def not_written(place: object, error: OSError) -> NotWritten:
    """Return the error to raise where the system refuses to write `place`."""
    return NotWritten(
        f"{place}: cannot be written, got {error}. Free space, correct the rights, or choose "
        "another place."
    )


def free_name(folder: Path) -> Path:
    """Return the name that `folder` is moved aside to: the first of `<name>.aside-1`, ... ."""
    number = 1
    while True:
        aside = folder.with_name(f"{folder.name}.aside-{number}")
        if not os.path.lexists(aside):
            return aside
        number += 1


@contextlib.contextmanager
def writing(place: object) -> Iterator[None]:
    """Raise NotWritten, which names `place`, if the block ends with an OSError."""
    try:
        yield
    except OSError as error:
        raise not_written(place, error) from error


@contextlib.contextmanager
def new_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file that appears at `path`, whole and on disk, when the block ends.

    It replaces a file that is there. After an error `path` is as before.

    Args:
        path: the file.
        durable: False: do not wait for the disk. After a loss of power the file may be torn.
    """
    partial = partial_path(path.parent, path.name)
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


def close_synced(handle: int) -> None:
    """Close an open file once its bytes are on disk."""
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append_bytes(path: Path, data: bytes) -> None:
    """Append to a file, and return once the bytes are on disk."""
    with open(path, "ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def truncate_file(path: Path, num_bytes: int) -> None:
    """Cut a file back to `num_bytes`, and return once that is on disk."""
    with open(path, "r+b") as file:
        file.truncate(num_bytes)
        os.fsync(file.fileno())


def digest_of(
    path: Where, kind: str = "sha256", is_wanted: Callable[[], bool] = lambda: True
) -> str:
    """Return the digest of a file, hex; an empty text once the digest is not wanted any longer.

    The file is read, not mapped: a mapped file that another process cuts ends this process.

    Args:
        path: the file.
        kind: "sha256", or "xxh3", which takes a tenth of the time and finds flipped bits, but not
            a change that was made to go unnoticed.
        is_wanted: asked before each piece of the file.

    Raises:
        OSError: it cannot be read.
    """
    digest = DIGESTS[kind]()
    with open_regular(path) as file:
        piece = memoryview(bytearray(min(_PIECE_BYTES, 1 + os.fstat(file.fileno()).st_size)))
        while num_bytes := file.readinto(piece):
            if not is_wanted():
                return ""
            digest.update(piece[:num_bytes])
    return str(digest.hexdigest())


def map_file(path: Path) -> memoryview:
    """Return the bytes of a file: a small one is read, a larger one mapped into memory.

    They stay valid when the file is removed. A mapped file that another process cuts ends this one
    by SIGBUS: this is for files that Hotbed alone writes, and replaces by others.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size <= _READ_BYTES:
            return memoryview(file.read())
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def open_regular(path: Where) -> io.FileIO:
    """Open a file to read it, unbuffered; OSError for others, such as a pipe that would block."""
    return open(path, "rb", buffering=0, opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    handle = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "not a regular file", path)


class SizedFile(io.RawIOBase, ABC):
    """A file to read whose number of bytes is known; `read` moves `place`.

    Attributes:
        num_bytes: how many it has.
        place: of the next byte.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.num_bytes}
        self.place = base[whence] + offset
        return self.place

    @abstractmethod
    def read(self, size: int | None = -1) -> bytes: ...


class Lock:
    """The lock of the one process that writes `path`, until `release` or until the process ends.

    The locked file is `path` with `.lock` at its end. It is kept, so that all lock the same file.

    Raises:
        PersistError: another holder has the lock.
        NotWritten: the folder or the locked file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._handle: int | None = None
        file = lock_file(path)
        with writing(file):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(file, _LOCK_FLAGS, 0o644)
        try:
            _lock(handle, file)
        except OSError as error:
            raise PersistError(
                f"{path}: another run writes this journal, got {error}. "
                "Stop that run, or give this one a folder of its own."
            ) from error
        self._handle = handle

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def lock_file(path: Path) -> Path:
    """Return the file that a `Lock` of `path` is on."""
    return path.with_name(path.name + ".lock")


class FolderLock(Lock):
    """The lock of the one process that writes `folder`, until `release` or until the process ends.

    The locked file is `LOCK` in the folder. It holds the number of the process, for messages.

    Raises:
        PersistError: another process has the lock.
        OSError: the folder cannot be made, or nothing can be written to it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._handle: int | None = None
        file = folder_lock_file(folder)
        handle = os.open(file, _LOCK_FLAGS, 0o644)
        try:
            _lock(handle, file)
        except BlockingIOError as error:
            process = file.read_text("ascii", "replace").strip() or "unknown"
            raise PersistError(
                f"{folder}: another process writes it, got process {process}. Give each writer a "
                "folder of its own; any number of processes may read."
            ) from error
        self._handle = handle
        number = f"{os.getpid()}\n".encode()
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the number
            if file.read_bytes().strip().isdigit() or not os.fstat(handle).st_size:
                os.truncate(handle, 0)
                os.write(handle, number)


class HeldFolder(Lock):
    """A folder that no other process may remove, until `release` or until the process ends.

    The folder itself is locked: it can be renamed, and no file is added to it.

    Attributes:
        is_certain: False for a file, and where the file system has no locks.

    Raises:
        BlockingIOError: another process holds it.
        FileNotFoundError: it was moved away.
    """

    def __init__(self, path: Path) -> None:
        self._handle: int | None = None
        if not path.is_dir():
            return
        handle = os.open(path, os.O_RDONLY)
        try:
            _lock(handle, path)
        except (BlockingIOError, FileNotFoundError):
            raise
        except OSError:
            return
        self._handle = handle

    @property
    def is_certain(self) -> bool:
        """Whether a lock on the folder is held."""
        return self._handle is not None

    def __enter__(self) -> HeldFolder:
        return self


def new_partial(root: Path, name: str) -> tuple[Path, HeldFolder]:
    """Make a folder at a `partial_path`, and hold it."""
    while True:
        path = partial_path(root, name)
        path.mkdir()
        # another process may remove it before the lock, as if its writer was killed
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            return path, HeldFolder(path)


class SharedLock:
    """The lock of a folder, which all its writers in one process share.

    It is held until the last of them is gone, or until the process ends.

    """

    _by_folder: ClassVar = weakref.WeakValueDictionary[Path, "SharedLock"]()
    _creating: ClassVar = threading.Lock()

    def __init__(self, folder: Path) -> None:
        self._parts = defaultdict[str, threading.RLock](threading.RLock)
        self.process = os.getpid()
        with writing(folder):
            lock = FolderLock(folder)
        weakref.finalize(self, lock.release)

    def busy(self, part: str) -> threading.RLock:
        """Return the lock to hold around each change of a part of the folder, by any thread."""
        with self._creating:
            return self._parts[part]

    @classmethod
    def of(cls, folder: Path) -> SharedLock:
        """Return the lock of this process.

        Raises PersistError where another process has it, also the one that this process was
        forked from.
        """
        place = folder.resolve()
        with cls._creating:
            lock = cls._by_folder.get(place)
            if lock is None or lock.process != os.getpid():
                lock = cls(place)
                cls._by_folder[place] = lock
            return lock


def folder_lock_file(folder: Path) -> Path:
    """Return the file that a `FolderLock` of `folder` is on."""
    return folder / "LOCK"


def _lock(handle: int, file: Path) -> None:
    """Lock an open file. After an OSError it is closed; BlockingIOError if another has the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(handle), os.stat(file)):
            raise FileNotFoundError(f"{file} was moved away")
    except OSError:
        os.close(handle)
        raise
