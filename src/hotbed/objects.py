# SPDX-License-Identifier: Apache-2.0
"""Objects of a store, such as s3://bucket/key: clients by fsspec, listings, identities and reads.

States and sources use the same client: errors of a store's own package become StoreAway, and reads
are repeated after failures that pass.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from hotbed.errors import ConfigError, DataError, MissingExtra, StoreAway
from hotbed.files import SizedFile, Where, resolve

T = TypeVar("T")

WAITS = (0.1, 0.4, 1.6, 6.4)
"""Seconds to wait before a read is tried again."""

PIECE_BYTES = 8 << 20
"""Bytes of one request, and of what is read ahead of a text."""

_LEAST_BYTES = 1 << 16
_THREADS = 4
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_MARKS = (
    *("ETag", "etag", "generation", "version_id", "VersionId", "md5Hash", "content_md5"),
    *("checksum", "mtime", "LastModified", "last_modified", "updated", "modified", "created"),
)


class StoreClient:
    """A client or file of fsspec. Errors of the store's own package are raised as StoreAway."""

    def __init__(self, client: Any, url: str) -> None:
        self._client = client
        self._translation = _ErrorTranslation(url)

    def __getattr__(self, name: str) -> Any:
        return self._translation(getattr(self._client, name))


class _ErrorTranslation(contextlib.ContextDecorator):
    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ours = (OSError, NotImplementedError, TypeError, ValueError)
        if isinstance(error, Exception) and not isinstance(error, ours):
            raise _away(self._url, error) from error


def _away(url: str, error: Exception) -> StoreAway:
    return StoreAway(
        f"{url}: the store does not answer, got {type(error).__name__}: {error}. "
        "Check its address, your rights and the network."
    )


def connect(url: str) -> tuple[Any, str]:
    """Return the client of a URL, and the path of the URL in its store.

    Raises:
        ConfigError: fsspec does not know such URLs.
        MissingExtra: a package is not installed.
    """
    try:
        import fsspec

        client, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingExtra(
            f"{url}: needs a package that is not installed, got: {error}. "
            "Install it: pip install hotbed[object], and fsspec's package for this store."
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{url}: fsspec cannot read this URL, got: {error}. Give a local path, or a URL "
            "such as s3://bucket/folder."
        ) from error
    return StoreClient(client, url), path


def repeated(read: Callable[[], T]) -> T:
    """Return what a read returns, which is tried again after failures that may pass.

    What does not pass, such as a missing object or missing rights, is raised at once.
    """
    for wait in WAITS:
        try:
            return read()
        except _LASTING:
            raise
        except (OSError, StoreAway):
            time.sleep(wait)
    return read()


def is_url(where: Where) -> bool:
    """Return whether a path is a URL of an object store, and not a local path."""
    return isinstance(resolve(where), str)


def matches(url: str) -> list[str]:
    """Return the URLs of the object at a URL, or of those that match its glob, sorted.

    Raises:
        StoreAway: the store does not answer, or refuses to list them.
    """
    client, path = connect(url)

    def listed() -> list[str]:
        client.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            if client.info(path)["type"] == "file":
                return [path]
        if not any(sign in path for sign in "*?["):
            return []
        return sorted(name for name in client.glob(path) if not name.endswith("/"))

    try:
        paths = repeated(listed)
    except FileNotFoundError:  # the bucket
        return []
    except OSError as error:
        raise _away(url, error) from error
    if url.endswith(path):
        return [url.removesuffix(path) + name for name in paths]
    return [str(client.unstrip_protocol(name)) for name in paths]


@dataclass(frozen=True)
class Identity:
    """Which content an object has: its number of bytes, and its entity tag, version or time."""

    size: int
    mark: str

    @staticmethod
    def of(url: str) -> Identity:
        """Return the identity of the object that is at a URL now.

        Raises:
            DataError: there is none.
            StoreAway: the store does not answer, or refuses.
        """
        client, path = connect(url)
        return _read(url, lambda: Identity._asked(client, path))

    @staticmethod
    def _asked(client: Any, path: str) -> Identity:
        client.invalidate_cache(os.path.dirname(path))
        facts = client.info(path)
        marks = (str(facts[name]) for name in _MARKS if facts.get(name))
        return Identity(int(facts["size"] or 0), next(marks, ""))

    def __str__(self) -> str:
        return f"{self.size} bytes, {self.mark}"


def _read(url: str, read: Callable[[], T]) -> T:
    """Return what a read of an object returns, as `repeated` does.

    An OSError becomes an error that no reader takes for a damaged file.
    """
    try:
        return repeated(read)
    except FileNotFoundError as error:
        raise DataError(f"{url}: there is no such object, got {error}. Check the URL.") from error
    except OSError as error:
        raise _away(url, error) from error


class ObjectFile(SizedFile):
    """The bytes of an object, fetched in pieces by threads. It must not change while it is read.

    Args:
        url: of the object.
        ahead: fetch the pieces that follow, because the object is read in its order.

    Raises:
        DataError: the object is not there, or was replaced while it was read.
        StoreAway: the store does not answer.
    """

    def __init__(self, url: str, *, ahead: bool = False) -> None:
        self.url = url
        self.identity = Identity.of(url)
        super().__init__(self.identity.size)
        self._client, self._path = connect(url)
        self._ahead = ahead
        self._pieces: dict[int, tuple[int, Future[bytes]]] = {}
        self._threads: list[ThreadPoolExecutor] = []

    def read(self, size: int | None = -1) -> bytes:
        end = self.num_bytes
        if size is not None and size >= 0:
            end = min(self.place + size, end)
        parts = []
        while self.place < end:
            parts.append(self._part(end))
            self.place += len(parts[-1])
        return b"".join(parts)

    def will_read(self, *groups: Iterable[tuple[int, int]]) -> None:
        """Fetch groups of ranges of bytes, and forget all others; a range is fetched once."""
        wanted: dict[int, tuple[int, Future[bytes]]] = {}
        new: list[tuple[int, int]] = []
        for first, last in itertools.chain(*map(_joined, groups)):
            for begin in range(first, last, PIECE_BYTES):
                end = min(begin + PIECE_BYTES, last)
                piece = self._pieces.get(begin)
                if piece is not None and piece[0] == end:
                    wanted[begin] = self._pieces.pop(begin)
                else:
                    new.append((begin, end))
        self._cancel()
        self._pieces = wanted
        if new:
            threads = ThreadPoolExecutor(_THREADS, "hotbed-objects")
            for begin, end in new:
                wanted[begin] = (end, threads.submit(self._fetch, begin, end))
            threads.shutdown(wait=False)  # they end when all is fetched
            self._threads = [*self._threads[-_THREADS:], threads]

    def close(self) -> None:
        self._cancel()
        for threads in self._threads:
            threads.shutdown()
        super().close()

    def _cancel(self) -> None:
        for _, data in self._pieces.values():
            data.cancel()
        self._pieces = {}

    def _part(self, end: int) -> bytes:
        """Return bytes from the place on, at least one, up to `end`."""
        place = self.place
        if self._ahead:
            first = place - place % PIECE_BYTES
            last = min(first + 3 * PIECE_BYTES, self.num_bytes)
            self.will_read([(first, last)])
        for begin, (stop, data) in list(self._pieces.items()):
            if begin <= place < stop:
                return data.result()[place - begin : end - begin]
        following = [begin for begin in self._pieces if begin > place]
        stop = min([max(end, place + _LEAST_BYTES), *following, self.num_bytes])
        fetched: Future[bytes] = Future()
        fetched.set_result(self._fetch(place, stop))
        self._pieces[place] = (stop, fetched)
        return fetched.result()[: end - place]

    def _fetch(self, begin: int, end: int) -> bytes:
        def read() -> bytes:
            try:
                data: bytes = self._client.cat_file(self._path, start=begin, end=end)
            except OSError:  # such as a range that a shorter object does not have
                with contextlib.suppress(OSError, StoreAway):
                    self._check(Identity._asked(self._client, self._path))
                raise
            return data

        data = _read(self.url, read)
        self._check(Identity.of(self.url))
        if len(data) != end - begin:
            raise DataError(
                f"{self.url}: the store sent other bytes than asked for, got {len(data)} instead "
                f"of {end - begin}. Check the store."
            )
        return data

    def require(self, before: Identity) -> None:
        """Raise DataError unless the object is the one that was read before."""
        if self.identity != before:
            raise _replaced(self.url, before, self.identity)

    def _check(self, now: Identity) -> None:
        if now != self.identity:
            raise _replaced(self.url, self.identity, now)


def _replaced(url: str, before: Identity, now: Identity) -> DataError:
    return DataError(
        f"{url}: the object was replaced while it was read, got {now} instead of {before}. Write "
        "new data under a new name, and read again."
    )


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges of bytes in their order; those with a small gap between them are one."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and begin - joined[-1][1] <= _LEAST_BYTES:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def copy(url: str, folder_or_file: Path) -> None:
    """Copy an object, or all below a prefix, to a local path.

    Raises:
        DataError: there is nothing at the URL.
        StoreAway: the store does not answer, or refuses.
    """
    client, path = connect(url)
    folder_or_file.parent.mkdir(parents=True, exist_ok=True)
    _read(url, lambda: client.get(path, str(folder_or_file), recursive=client.isdir(path)))


def each(function: Callable[[str], T], urls: Sequence[str]) -> list[T]:
    """Return what a function returns for each URL; several wait for the store at a time."""
    with ThreadPoolExecutor(16, "hotbed-objects") as threads:
        return list(threads.map(function, urls))
