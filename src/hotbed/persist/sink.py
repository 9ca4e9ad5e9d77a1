# SPDX-License-Identifier: Apache-2.0
"""Files that are hashed while they are written, at the speed of the disk: pieces are hashed, written and synced beside each other."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

PIECE_BYTES = 4 << 20
_WRITEBACK_BYTES = 32 << 20
_IN_FLIGHT, _UNSYNCED = 4, 32


class Workers:
    """The threads of one draft: pieces are hashed, written and synced beside each other, each file's in order."""

    def __init__(self) -> None:
        self.hash, self.write, self.sync = (ThreadPoolExecutor(1, thread_name_prefix="hotbed-save") for _ in range(3))
        self.unsynced: list[Future[None]] = []

    def settle(self, allowed: int = 0) -> None:
        """Wait until at most `allowed` files are not yet on disk; raises what their writing raised."""
        while len(self.unsynced) > allowed:
            self.unsynced.pop(0).result()

    def close(self) -> None:
        for pool in (self.hash, self.write, self.sync):
            pool.shutdown(wait=True, cancel_futures=True)


class HashedFile:
    """A new file that is hashed while it is written, in large pieces; on disk once its draft is published.

    `raw`: takes `write(buffer)`; `finish`: makes it durable and closes it.
    """

    def __init__(self, raw: Any, workers: Workers, finish: Callable[[], None]) -> None:
        self._raw, self._workers, self._finish = raw, workers, finish
        self._hash, self._bytes = hashlib.sha256(), 0
        self._piece, self._filled = bytearray(), 0
        self._flying: list[tuple[Future[None], Future[None]]] = []
        self.closed = False

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.closed = True
        try:
            if kind is None:
                self._emit()
                self._land(0)
        finally:
            wait([future for pair in self._flying for future in pair])  # nobody writes to a file that is closed
            self._workers.unsynced.append(self._workers.sync.submit(self._finish))
        self._workers.settle(_UNSYNCED)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._bytes += view.nbytes
        if view.nbytes >= PIECE_BYTES:  # Arrow and safetensors hand out buffers that nobody changes: no copy
            self._emit()
            for at in range(0, view.nbytes, PIECE_BYTES):
                self._send(view[at : at + PIECE_BYTES])
            return view.nbytes
        if not self._piece or self._filled + view.nbytes > len(self._piece):
            self._emit()
            self._piece = bytearray(max(PIECE_BYTES, view.nbytes))
        self._piece[self._filled : self._filled + view.nbytes] = view
        self._filled += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Arrow asks for it after each batch; pieces go out when they are full and at the end."""

    def entry(self) -> dict[str, Any]:
        """The file's entry in the manifest, after it was closed."""
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}

    def _emit(self) -> None:
        if self._filled:
            self._send(memoryview(self._piece)[: self._filled])
        self._piece, self._filled = bytearray(), 0

    def _send(self, piece: memoryview) -> None:
        self._land(_IN_FLIGHT - 1)
        workers = self._workers
        self._flying.append((workers.hash.submit(self._hash.update, piece), workers.write.submit(self._put, piece)))

    def _put(self, piece: memoryview) -> None:
        while piece.nbytes:
            piece = piece[self._raw.write(piece) :]

    def _land(self, allowed: int) -> None:
        while len(self._flying) > allowed:
            for future in self._flying[0]:
                future.result()
            del self._flying[0]


class LocalFile:
    """A new local file whose pages go to disk while it is written, so that the fsync at its end is short."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        self._at = self._begun = 0

    def write(self, data: memoryview) -> int:
        n = os.write(self._handle, data)
        self._at += n
        if self._at - self._begun >= _WRITEBACK_BYTES and hasattr(os, "posix_fadvise"):
            # starts writeback of what is dirty, and drops from memory what is clean: nobody reads it soon
            os.posix_fadvise(self._handle, 0, self._at, os.POSIX_FADV_DONTNEED)
            self._begun = self._at
        return n

    def finish(self) -> None:
        try:
            os.fsync(self._handle)
        finally:
            os.close(self._handle)
