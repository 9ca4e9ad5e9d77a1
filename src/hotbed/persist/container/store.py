# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints lie: a local folder, or any object store that fsspec knows.

docs/format.md says in which order files appear.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from io import RawIOBase
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa

from hotbed import files, objects
from hotbed.errors import FormatError, PersistError
from hotbed.files import HeldFolder, Where, map_file, new_partial, partial_path, resolve
from hotbed.persist.container.sink import HashedFile, LocalFile, SaveThreads

MANIFEST_FILE = "MANIFEST.json"
CURRENT_FILE = "CURRENT"
CLAIM_FILE = "CLAIM"
FIRST = "checkpoint-00000001"
ASIDE = "aside"  # where states lie that a run no longer rests on
JOURNAL = "journal"
LETTERS = "dead_letters.jsonl"
ADVICE = "Do not use it; restore the checkpoint from a copy."
_NAME = re.compile(r"checkpoint-(\d{8,})")
_PARTIAL = re.compile(r"\.(checkpoint-\d+|CURRENT)\.[0-9a-f]+\.partial")
_POINTER = re.compile(rb"(checkpoint-\d{8,}) ([0-9a-f]{64})\n")
_ABANDONED_SECONDS = 86_400  # after which a partial that cannot be locked belongs to nobody


class NewestState(NamedTuple):
    """The newest checkpoint of a store.

    `sha256`: of its manifest, where the store keeps it apart from the checkpoint; else None.
    """

    folder: str
    sha256: str | None


class Draft(ABC):
    """A checkpoint being written: nothing is visible before `publish`.

    Several processes may write its files. One opens it and publishes it, the others join it.

    Attributes:
        folder: the name of the checkpoint.
        place: where its files lie until then; a process that joins needs it.
        threads: those that write its files.
    """

    folder: str
    place: str
    threads: SaveThreads

    @abstractmethod
    def create(self, name: str) -> HashedFile:
        """Open a new file of the checkpoint."""

    @abstractmethod
    def publish(self, manifest: bytes) -> None:
        """Make all files durable, write the manifest, then make the checkpoint the newest.

        Raises:
            PersistError: another writer was first.
        """

    @abstractmethod
    def discard(self) -> None:
        """End the threads of the draft and remove it, unless it was published or only joined."""


class CheckpointStore(ABC):
    """Checkpoints under one root. Names are relative, always with `/`."""

    @abstractmethod
    def place(self, name: str) -> str:
        """Return where `name` lies, for messages."""

    @abstractmethod
    def path(self, folder: str) -> Where:
        """Return the argument of `open_checkpoint` for one checkpoint: a Path, or a URL as text."""

    @abstractmethod
    def opener(self, name: str) -> Callable[[], RawIOBase]:
        """Return what opens a file, as often as it is called; an object is fetched once.

        Raises:
            FormatError: the file is missing; so does what is returned.
        """

    def read(self, name: str) -> bytes:
        """Return the bytes of a small file; raise FormatError naming it if it is missing."""
        try:
            with self.opener(name)() as file:
                return file.readall()
        except OSError as error:
            raise _unreadable(self.place(name), error) from error

    @abstractmethod
    def exists(self, name: str) -> bool: ...

    @abstractmethod
    def newest_state(self) -> NewestState | None:
        """Return the newest checkpoint, None in an empty store.

        Raises:
            FormatError: CURRENT is torn, or missing next to states.
        """

    @abstractmethod
    def folders(self) -> list[str]:
        """Return the names of the visible checkpoints, oldest first."""

    @abstractmethod
    def draft(self, joined: str | None = None) -> Draft:
        """Start the next checkpoint; raise OSError if that is not possible.

        Args:
            joined: `Draft.place` of the draft that another process opened, to write some of its
                files.

        Raises:
            PersistError: this process does not see that draft.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Make a checkpoint invisible, then remove it; or remove a file next to the checkpoints."""

    @abstractmethod
    def files(self, prefix: str) -> list[str]:
        """Return the names of files next to the checkpoints that begin with `prefix`."""

    @abstractmethod
    def new_file(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file next to the checkpoints.

        It appears, or replaces the one of that name, when the block ends.
        """


def open_store(where: Where) -> CheckpointStore:
    """Return the store of a local path or URL.

    Raises:
        MissingExtra: the URL needs a package that is not installed.

    Example: `open_store("s3://bucket/model")`.
    """
    place = resolve(where)
    return LocalStore(place) if isinstance(place, Path) else ObjectStore(place)


def _unreadable(place: str, error: OSError) -> FormatError:
    return FormatError(f"{place}: missing or unreadable, got {error.strerror or error}. {ADVICE}")


def split(where: Where) -> tuple[Where, str]:
    """Return the root and the name of a checkpoint folder's own path."""
    place = resolve(where)
    if isinstance(place, str):
        root, _, name = place.rpartition("/")
        return root, name
    path = place.resolve()
    return path.parent, path.name


@contextlib.contextmanager
def new_file(where: Where) -> Iterator[IO[bytes]]:
    """Open a file or an object to write.

    It appears whole when the block ends, and not at all after an error.

    Raises:
        NotWritten: the disk is full or refuses.
    """
    root, name = split(where)
    with files.writing(where), open_store(root).new_file(name) as file:
        yield file


def write_text(where: Where, text: str) -> None:
    """Write a file or an object as `new_file` does, in UTF-8."""
    with new_file(where) as file:
        file.write(text.encode())


def number_of(folder: str) -> int:
    """Return the number in a checkpoint's name."""
    match = _NAME.fullmatch(folder)
    if match is None:
        raise FormatError(
            f"{folder}: not a checkpoint's name, got {folder!r}. Give a folder checkpoint-<number>."
        )
    return int(match[1])


def _name_of(number: int) -> str:
    return f"checkpoint-{number:08d}"


# --- a local folder -----------------------------------------------------------------------------


class LocalStore(CheckpointStore):
    """A local folder. A checkpoint appears by a rename, and `CURRENT` is replaced by another.

    Files are read, not mapped: another process may cut them.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def place(self, name: str) -> str:
        return str(self.root / name)

    def path(self, folder: str) -> Where:
        return self.root / folder

    def opener(self, name: str) -> Callable[[], RawIOBase]:
        path = self.root / name

        def opened() -> RawIOBase:
            try:
                return files.open_regular(path)
            except OSError as error:
                raise _unreadable(str(path), error) from error

        return opened

    def exists(self, name: str) -> bool:
        return (self.root / name).is_file()

    def newest_state(self) -> NewestState | None:
        if not self.exists(CURRENT_FILE):
            folders = self.folders()
            if not folders or self.unpointed() is not None:
                return None
            if not self.exists(CURRENT_FILE):  # again: a writer may have made it meanwhile
                raise FormatError(
                    f"{self.root / CURRENT_FILE}: missing beside states, got {', '.join(folders)}. "
                    f"{self._advice()}"
                )
        match = _POINTER.fullmatch(self.read(CURRENT_FILE))
        if match is None:
            raise FormatError(
                f"{self.root / CURRENT_FILE}: torn or changed, got no checkpoint's name and "
                f"digest. {self._advice()}"
            )
        return NewestState(match[1].decode(), match[2].decode())

    def unpointed(self) -> str | None:
        """Return the first checkpoint if it is alone and CURRENT is missing, else None.

        Its writer makes CURRENT next, or was killed.
        """
        is_alone = self.folders() == [FIRST] and not aside_of(self).folders()
        return FIRST if is_alone and not self.exists(CURRENT_FILE) else None

    def _advice(self) -> str:
        return f"Choose one: hotbed rollback {self.root} --state N."

    def folders(self) -> list[str]:
        if not self.root.is_dir():
            return []
        names = [path.name for path in self.root.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(names, key=number_of)

    def draft(self, joined: str | None = None) -> Draft:
        if joined is None:
            self.root.mkdir(parents=True, exist_ok=True)
            self._sweep()
            used = [number_of(folder) for folder in (*self.folders(), *aside_of(self).folders())]
            return _LocalDraft(self, max(used, default=0) + 1)
        if not (self.root / joined).is_dir():
            raise PersistError(
                f"{self.root}: another process writes a checkpoint there which this one does not "
                f"see, got no folder {joined!r}. Save to a folder that all ranks share, under the "
                "same path."
            )
        return _JoinedDraft(self.root / joined)

    def point(self, folder: str, sha256: str) -> None:
        """Make a checkpoint the newest one; `sha256`: of its manifest."""
        with self.new_file(CURRENT_FILE) as file:
            file.write(f"{folder} {sha256}\n".encode())

    def remove(self, name: str) -> None:
        path = self.root / name
        if path.is_file():
            with contextlib.suppress(OSError):
                path.unlink()
            return
        if not self.exists(f"{name}/{MANIFEST_FILE}"):
            return  # no writer of checkpoints left a folder like this
        hidden = partial_path(self.root, name)
        with contextlib.suppress(OSError):  # what cannot be removed is swept by a later writer
            os.rename(path, hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    def files(self, prefix: str) -> list[str]:
        return sorted(path.name for path in self.root.glob(f"{prefix}*") if path.is_file())

    @contextlib.contextmanager
    def new_file(self, name: str) -> Iterator[IO[bytes]]:
        self.root.mkdir(parents=True, exist_ok=True)
        with files.new_file(self.root / name) as file:
            yield file

    def _sweep(self) -> None:
        """Remove what killed writers left."""
        for path in self.root.iterdir():
            if not _PARTIAL.fullmatch(path.name):
                continue
            with contextlib.suppress(OSError), HeldFolder(path) as lock:
                age_seconds = time.time() - path.stat().st_mtime
                if not lock.is_certain and age_seconds <= _ABANDONED_SECONDS:
                    continue
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def aside_of(store: LocalStore) -> LocalStore:
    """Return the store of the states that were moved aside."""
    return LocalStore(store.root / ASIDE)


class _JoinedDraft(Draft):
    """Files of a draft that another process opened."""

    def __init__(self, partial: Path) -> None:
        self.place = partial.name
        self._partial = partial
        self.threads = SaveThreads()

    def create(self, name: str) -> HashedFile:
        file = LocalFile(self._partial / name)
        return HashedFile(file, self.threads, file.finish)

    def publish(self, manifest: bytes) -> None:
        raise AssertionError("who opened the draft publishes it")

    def discard(self) -> None:
        self.threads.close()


class _LocalDraft(_JoinedDraft):
    def __init__(self, store: LocalStore, number: int) -> None:
        self.folder = _name_of(number)
        self._store = store
        partial, self._held = new_partial(store.root, self.folder)
        super().__init__(partial)

    def publish(self, manifest: bytes) -> None:
        self.threads.settle()
        with self.create(MANIFEST_FILE) as file:
            file.write(manifest)
        self.threads.settle()
        for path in self._partial.rglob("*"):
            if path.is_dir():
                files.sync_folder(path)
        files.sync_folder(self._partial)
        root = self._store.root
        final = root / self.folder
        try:
            os.rename(self._partial, final)
            self._held.release()
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise  # the disk refuses
            raise PersistError(
                f"{final}: another process wrote it meanwhile, got {error}. "
                "Let one process save there."
            ) from error
        try:
            files.sync_folder(root)
            self._store.point(self.folder, hashlib.sha256(manifest).hexdigest())
        except OSError:
            self._store.remove(self.folder)  # whole, but CURRENT does not point to it
            raise

    def discard(self) -> None:
        super().discard()
        shutil.rmtree(self._partial, ignore_errors=True)
        self._held.release()


# --- an object store ----------------------------------------------------------------------------


class ObjectStore(CheckpointStore):
    """A prefix of an object store: without renames and `CURRENT`.

    A checkpoint is visible once its manifest exists; the one with the highest number is the newest.

    Args:
        url: of the prefix, as fsspec reads it.
        in_memory_bytes: larger objects are read through a mapped file, so that their bytes do not
            count as memory of the process.
    """

    def __init__(self, url: str, in_memory_bytes: int = 1 << 20) -> None:
        self._in_memory_bytes = in_memory_bytes
        self.url = url.rstrip("/")
        self._fs, self._root = objects.connect(self.url)

    def place(self, name: str) -> str:
        return f"{self.url}/{name}"

    def path(self, folder: str) -> Where:
        return self.place(folder)

    def opener(self, name: str) -> Callable[[], RawIOBase]:
        path = f"{self._root}/{name}"
        try:
            if objects.repeated(lambda: self._fs.size(path)) <= self._in_memory_bytes:
                data = memoryview(objects.repeated(lambda: self._fs.cat_file(path)))
            else:
                with tempfile.NamedTemporaryFile(prefix="hotbed-read-") as file:
                    objects.repeated(lambda: self._fs.get_file(path, file.name))
                    data = map_file(Path(file.name))  # no other process knows this file
        except OSError as error:
            raise _unreadable(self.place(name), error) from error
        return lambda: pa.BufferReader(data)

    def exists(self, name: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.isfile(f"{self._root}/{name}"))

    def newest_state(self) -> NewestState | None:
        for folder in reversed(self._prefixes()):
            if self._is_visible(folder):
                return NewestState(folder, None)
        return None

    def folders(self) -> list[str]:
        return [folder for folder in self._prefixes() if self._is_visible(folder)]

    def _is_visible(self, folder: str) -> bool:
        return self.exists(f"{folder}/{MANIFEST_FILE}")

    def draft(self, joined: str | None = None) -> Draft:
        if joined is not None:
            return self._join(joined)
        prefixes = self._prefixes()
        visible = self.folders()
        for folder in prefixes:
            # its writer died, or is too late: the state would not become the newest
            is_older = bool(visible) and number_of(folder) < number_of(visible[-1])
            if is_older and folder not in visible:
                self.remove(folder)
        number = number_of(prefixes[-1]) + 1 if prefixes else 1
        while not self.create(f"{_name_of(number)}/{CLAIM_FILE}", b""):
            number += 1
        return _ObjectDraft(self, _name_of(number), is_open=True)

    def _join(self, place: str) -> Draft:
        if not self.exists(f"{place}/{CLAIM_FILE}"):
            raise PersistError(
                f"{self.url}: another process writes a checkpoint there which this one does not "
                f"see, got no object {place}/{CLAIM_FILE}. Save to a store that all ranks reach."
            )
        return _ObjectDraft(self, place, is_open=False)

    def remove(self, name: str) -> None:
        self._fs.invalidate_cache()
        paths = self._fs.find(f"{self._root}/{name}")
        manifest_first = sorted(paths, key=lambda path: not path.endswith(f"/{MANIFEST_FILE}"))
        for path in manifest_first:
            with contextlib.suppress(FileNotFoundError):
                # one by one: rm() would read brackets in a name as a pattern
                self._fs.rm_file(path)

    def create(self, name: str, data: bytes) -> bool:
        """Write a whole object; return False if it exists, as surely as the store can tell."""
        path = f"{self._root}/{name}"
        try:
            self._fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except (NotImplementedError, TypeError, ValueError):  # a store without exclusive creation
            if self.exists(name):
                return False
            self._fs.pipe_file(path, data)
        return True

    def files(self, prefix: str) -> list[str]:
        return [name for name in self._names() if name.startswith(prefix)]

    @contextlib.contextmanager
    def new_file(self, name: str) -> Iterator[IO[bytes]]:
        with tempfile.NamedTemporaryFile(prefix="hotbed-write-") as file:
            yield file
            file.flush()
            self._fs.put_file(file.name, f"{self._root}/{name}")

    def open(self, name: str) -> Any:
        """Open a new object, which is uploaded while it is written."""
        path = f"{self._root}/{name}"
        # stores without folders have none to make
        with contextlib.suppress(OSError, NotImplementedError):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        return objects.StoreClient(self._fs.open(path, "wb"), self.url)

    def _prefixes(self) -> list[str]:
        """Return the names of all checkpoints, visible or not, oldest first."""
        return sorted((name for name in self._names() if _NAME.fullmatch(name)), key=number_of)

    def _names(self) -> list[str]:
        """Return the names of all that lies directly under the prefix."""
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]


class _ObjectDraft(Draft):
    def __init__(self, store: ObjectStore, folder: str, *, is_open: bool) -> None:
        self.folder = self.place = folder
        self._store = store
        self.threads = SaveThreads()
        self._open = is_open  # to be removed, unless it is published

    def create(self, name: str) -> HashedFile:
        file = self._store.open(f"{self.folder}/{name}")
        return HashedFile(file, self.threads, file.close)

    def publish(self, manifest: bytes) -> None:
        self.threads.settle()
        name = f"{self.folder}/{MANIFEST_FILE}"
        if not self._store.create(name, manifest):
            raise PersistError(
                f"{self._store.place(name)}: another process wrote it meanwhile, got a second "
                "manifest. Let one process save there."
            )
        self._open = False

    def discard(self) -> None:
        self.threads.close()
        if self._open:
            self._store.remove(self.folder)
            self._open = False
