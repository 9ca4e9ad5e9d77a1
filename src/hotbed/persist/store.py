# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints lie: a local folder, or any store that fsspec knows. docs/format.md says in
which order things appear.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

from hotbed.errors import FormatError, MissingExtra, PersistError, StoreAway
from hotbed.files import Where, map_file, partial_path, resolve, sync_folder
from hotbed.persist.sink import HashedFile, Held, LocalFile, SaveThreads, new_partial

MANIFEST_FILE = "MANIFEST.json"
CURRENT_FILE = "CURRENT"
CLAIM_FILE = "CLAIM"
FIRST = "checkpoint-00000001"
ASIDE = "aside"  # where states lie that a run no longer rests on
JOURNAL = "journal"
LETTERS = "dead_letters.jsonl"
ADVICE = "Do not use it; restore the checkpoint from a copy."
_IN_MEMORY_BYTES = 1 << 20
_NAME = re.compile(r"checkpoint-(\d{8,})")
_PARTIAL = re.compile(r"\.(checkpoint-\d+|CURRENT)\.[0-9a-f]+\.partial")
_LEFT_SECONDS = 86_400  # after which what nobody can be seen to hold is nobody's


class NewestState(NamedTuple):
    """The newest checkpoint of a store: its folder and, where the store keeps it apart, its
    manifest's SHA-256.
    """

    folder: str
    sha256: str | None


class Draft(ABC):
    """A checkpoint being written: nothing is visible before `publish`; `discard` leaves no trace."""

    folder: str

    @abstractmethod
    def create(self, name: str) -> HashedFile:
        """A new file of the checkpoint."""

    @abstractmethod
    def publish(self, manifest: bytes) -> None:
        """Everything durable, then the manifest, then visible and newest. PersistError if another
        writer was first.
        """

    @abstractmethod
    def discard(self) -> None:
        """Forget the draft and free its threads; harmless after `publish`."""


class CheckpointStore(ABC):
    """Checkpoints under one root. Names are relative, always with `/`."""

    @abstractmethod
    def place(self, name: str) -> str:
        """Where `name` is, for messages and for people."""

    @abstractmethod
    def path(self, folder: str) -> Where:
        """What to give to `open_checkpoint` for one checkpoint: a Path, or a URL as text."""

    @abstractmethod
    def read(self, name: str) -> memoryview:
        """Bytes of a file; FormatError naming it when it is missing."""

    @abstractmethod
    def exists(self, name: str) -> bool: ...

    @abstractmethod
    def newest_state(self) -> NewestState | None:
        """None = the root holds no checkpoint. FormatError when the pointer to it is torn."""

    @abstractmethod
    def folders(self) -> list[str]:
        """The visible checkpoints, oldest first."""

    @abstractmethod
    def draft(self) -> Draft:
        """Start the next checkpoint; OSError where that is not possible."""

    @abstractmethod
    def remove(self, folder: str) -> None:
        """Take a checkpoint away: invisible first, then gone."""

    @abstractmethod
    def new_file(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file beside the checkpoints; it appears, or replaces the one of that name, when
        the block ends.
        """


def open_store(where: Where) -> CheckpointStore:
    """The store of a local path or URL. MissingExtra where a URL needs a package that is not
    installed.

    Example: `open_store("s3://bucket/model")`.
    """
    place = resolve(where)
    return LocalStore(place) if isinstance(place, Path) else ObjectStore(place)


def split(where: Where) -> tuple[Where, str]:
    """The root and the name of a checkpoint folder's own path."""
    place = resolve(where)
    if isinstance(place, str):
        root, _, name = place.rpartition("/")
        return root, name
    path = place.resolve()
    return path.parent, path.name


@contextlib.contextmanager
def new_file(where: Where) -> Iterator[IO[bytes]]:
    """Open a file or an object to write. It appears whole when the block ends, and not at all after
    an error.
    """
    root, name = split(where)
    store = open_store(root)
    with store.new_file(name) as file:
        yield file


# --- a local folder -------------------------------------------------------------------------------


class LocalStore(CheckpointStore):
    """A folder. Files are memory-mapped; a checkpoint appears by a rename, and `CURRENT` moves by
    another.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def place(self, name: str) -> str:
        return str(self.root / name)

    def path(self, folder: str) -> Where:
        return self.root / folder

    def read(self, name: str) -> memoryview:
        try:
            return map_file(self.root / name)
        except OSError as error:
            raise FormatError(
                f"{self.root / name}: missing or unreadable — {error.strerror or error} — {ADVICE}"
            ) from error

    def exists(self, name: str) -> bool:
        return (self.root / name).is_file()

    def newest_state(self) -> NewestState | None:
        if not self.exists(CURRENT_FILE):
            folders = self.folders()
            if not folders or self.unpointed() is not None:
                return None
            if not self.exists(
                CURRENT_FILE
            ):  # looked for again: a writer may have made it meanwhile
                raise FormatError(
                    f"{self.root / CURRENT_FILE}: missing beside states, got {', '.join(folders)}. "
                    f"{self._advice()}"
                )
        match = re.fullmatch(
            rb"(checkpoint-\d{8,}) ([0-9a-f]{64})\n", bytes(self.read(CURRENT_FILE))
        )
        if match is None:
            raise FormatError(
                f"{self.root / CURRENT_FILE}: torn or changed, got no checkpoint's name and digest. "
                f"{self._advice()}"
            )
        return NewestState(match[1].decode(), match[2].decode())

    def unpointed(self) -> str | None:
        """The first checkpoint, alone and without CURRENT, else None: its writer makes CURRENT
        next, or was killed.
        """
        alone = self.folders() == [FIRST] and not self.aside().folders()
        return FIRST if alone and not self.exists(CURRENT_FILE) else None

    def aside(self) -> LocalStore:
        """States that were moved aside."""
        return LocalStore(self.root / ASIDE)

    def _advice(self) -> str:
        return f"Choose one: hotbed restore {self.root} --state N."

    def folders(self) -> list[str]:
        found = self.root.iterdir() if self.root.is_dir() else ()
        return sorted((p.name for p in found if _NAME.fullmatch(p.name)), key=number_of)

    def draft(self) -> Draft:
        self.root.mkdir(parents=True, exist_ok=True)
        self._sweep()
        used = [number_of(folder) for folder in (*self.folders(), *self.aside().folders())]
        return _LocalDraft(self.root, max(used, default=0) + 1)

    def point(self, folder: str, sha256: str) -> None:
        """Make a checkpoint the newest one; `sha256`: of its manifest."""
        partial = partial_path(self.root, CURRENT_FILE)
        try:
            file = LocalFile(partial)
            file.write(memoryview(f"{folder} {sha256}\n".encode()))
            file.finish()
            os.replace(partial, self.root / CURRENT_FILE)
        finally:
            partial.unlink(missing_ok=True)
        sync_folder(self.root)

    def remove(self, folder: str) -> None:
        hidden = partial_path(self.root, folder)
        with contextlib.suppress(OSError):  # what stays is swept by a later writer
            os.rename(self.root / folder, hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    @contextlib.contextmanager
    def new_file(self, name: str) -> Iterator[IO[bytes]]:
        self.root.mkdir(parents=True, exist_ok=True)
        partial = partial_path(self.root, name)
        try:
            with open(partial, "xb") as file:
                yield file
            os.replace(partial, self.root / name)
        finally:
            partial.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove what writers left who are gone."""
        for path in self.root.iterdir():
            if _PARTIAL.fullmatch(path.name):
                with contextlib.suppress(OSError), Held(path) as held:
                    if held.surely or time.time() - path.stat().st_mtime > _LEFT_SECONDS:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()


class _LocalDraft(Draft):
    def __init__(self, root: Path, number: int) -> None:
        self.folder = f"checkpoint-{number:08d}"
        self._root = root
        self._partial, self._held = new_partial(root, self.folder)
        self._workers = SaveThreads()

    def create(self, name: str) -> HashedFile:
        file = LocalFile(self._partial / name)
        return HashedFile(file, self._workers, file.finish)

    def publish(self, manifest: bytes) -> None:
        self._workers.settle()
        with self.create(MANIFEST_FILE) as file:
            file.write(manifest)
        self._workers.settle()
        for folder in [path for path in self._partial.rglob("*") if path.is_dir()] + [
            self._partial
        ]:
            sync_folder(folder)
        final = self._root / self.folder
        try:
            os.rename(self._partial, final)
            self._held.release()
        except OSError as error:
            raise PersistError(
                f"{final}: another process wrote it meanwhile — {error} — let one process save"
            ) from error
        try:
            sync_folder(self._root)
            LocalStore(self._root).point(self.folder, hashlib.sha256(manifest).hexdigest())
        except OSError:
            LocalStore(self._root).remove(self.folder)  # whole, but nothing came to point to it
            raise

    def discard(self) -> None:
        self._workers.close()
        shutil.rmtree(self._partial, ignore_errors=True)
        self._held.release()


def number_of(folder: str) -> int:
    """The number in a checkpoint's name."""
    match = _NAME.fullmatch(folder)
    if match is None:
        raise FormatError(
            f"{folder}: no checkpoint's name — received {folder!r} — give a folder "
            "checkpoint-<number>"
        )
    return int(match[1])


# --- an object store ------------------------------------------------------------------------------


class ObjectStore(CheckpointStore):
    """A prefix of a store that fsspec knows: no rename, no pointer; a checkpoint is there once its
    manifest is.
    """

    def __init__(self, url: str) -> None:
        try:
            import fsspec

            client, self._root = fsspec.core.url_to_fs(url.rstrip("/"))
        except ImportError as error:
            raise MissingExtra(
                f"{url} needs a package — {error} — pip install hotbed[object] and fsspec's "
                "package for it"
            ) from error
        self.url = url.rstrip("/")
        self._fs: Any = _Client(client, self.url)

    def place(self, name: str) -> str:
        return f"{self.url}/{name}"

    def path(self, folder: str) -> Where:
        return self.place(folder)

    def read(self, name: str) -> memoryview:
        path = f"{self._root}/{name}"
        try:
            if self._fs.size(path) <= _IN_MEMORY_BYTES:
                return memoryview(self._fs.cat_file(path))
            with tempfile.NamedTemporaryFile(
                prefix="hotbed-read-"
            ) as file:  # mapped: no part of the process's own memory
                self._fs.get_file(path, file.name)
                return map_file(Path(file.name))
        except OSError as error:
            raise FormatError(
                f"{self.place(name)}: missing or unreadable — {error} — {ADVICE}"
            ) from error

    def exists(self, name: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.isfile(f"{self._root}/{name}"))

    def newest_state(self) -> NewestState | None:
        visible = (
            folder
            for folder in reversed(self._prefixes())
            if self.exists(f"{folder}/{MANIFEST_FILE}")
        )
        return next((NewestState(folder, None) for folder in visible), None)

    def folders(self) -> list[str]:
        return [folder for folder in self._prefixes() if self.exists(f"{folder}/{MANIFEST_FILE}")]

    def draft(self) -> Draft:
        taken = self._prefixes()
        visible = self.folders()
        # a writer that died left it; one that lives on is late, and its state would not
        # be newest
        for folder in taken:
            if visible and folder not in visible and number_of(folder) < number_of(visible[-1]):
                self.remove(folder)
        number = number_of(taken[-1]) + 1 if taken else 1
        while not self.create(f"checkpoint-{number:08d}/{CLAIM_FILE}", b""):
            number += 1
        return _ObjectDraft(self, f"checkpoint-{number:08d}")

    def remove(self, folder: str) -> None:
        self._fs.invalidate_cache()
        found = self._fs.find(f"{self._root}/{folder}")
        for path in sorted(found, key=lambda path: not path.endswith(f"/{MANIFEST_FILE}")):
            with contextlib.suppress(FileNotFoundError):
                # one by one: rm() would read brackets in a name as a pattern
                self._fs.rm_file(path)

    def create(self, name: str, data: bytes) -> bool:
        """Put a whole object; False if it is there already, as surely as the store can tell."""
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

    @contextlib.contextmanager
    def new_file(self, name: str) -> Iterator[IO[bytes]]:
        with tempfile.NamedTemporaryFile(prefix="hotbed-write-") as file:
            yield file
            file.flush()
            self._fs.put_file(file.name, f"{self._root}/{name}")

    def open(self, name: str) -> Any:
        """A new object, written through."""
        path = f"{self._root}/{name}"
        # stores without folders have nothing to make
        with contextlib.suppress(OSError, NotImplementedError):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        return _Client(self._fs.open(path, "wb"), self.url)

    def _prefixes(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        names: Iterator[str] = (str(path).rstrip("/").rpartition("/")[2] for path in found)
        return sorted((name for name in names if _NAME.fullmatch(name)), key=number_of)


class _Client:
    """What fsspec gives; a store that does not answer raises errors of its own package, which come
    as StoreAway.
    """

    def __init__(self, client: Any, url: str) -> None:
        self._client = client
        self._told = _Told(url)

    def __getattr__(self, name: str) -> Any:
        return self._told(getattr(self._client, name))


class _Told(contextlib.ContextDecorator):
    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        ours = (OSError, NotImplementedError, TypeError, ValueError)
        if isinstance(error, Exception) and not isinstance(error, ours):
            raise StoreAway(
                f"{self._url}: the store does not answer — received {type(error).__name__}: "
                f"{error} — "
                "look at its address, our rights and the network"
            ) from error


class _ObjectDraft(Draft):
    def __init__(self, store: ObjectStore, folder: str) -> None:
        self.folder = folder
        self._store = store
        self._workers = SaveThreads()
        self._open = True

    def create(self, name: str) -> HashedFile:
        file = self._store.open(f"{self.folder}/{name}")
        return HashedFile(file, self._workers, file.close)

    def publish(self, manifest: bytes) -> None:
        self._workers.settle()
        name = f"{self.folder}/{MANIFEST_FILE}"
        if not self._store.create(name, manifest):
            raise PersistError(
                f"{self._store.place(name)}: another process wrote it meanwhile — received a "
                "second "
                "manifest — let one process save"
            )
        self._open = False

    def discard(self) -> None:
        self._workers.close()
        if self._open:
            self._store.remove(self.folder)
            self._open = False
