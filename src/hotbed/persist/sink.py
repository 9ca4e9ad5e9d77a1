# SPDX-License-Identifier: Apache-2.0
"""Files that are hashed while they are written, at the speed of the disk: pieces are hashed, written and synced beside each other."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

PIECE_BYTES, SMALL_BYTES = 1 << 20, 16 << 10
BACKGROUND, BUSY_SHARE, LOOK_SECONDS = 20, 0.1, 0.01
_WRITEBACK_BYTES = 32 << 20
_IN_FLIGHT, _UNSYNCED, _MOST_BUFFERS = 16, 32, 512


class Workers:
    """The threads of one draft: pieces are hashed, written and synced beside each other, each file's in order.

    `pace` keeps a save in the background: while other threads of the process are at work, as in training, it stands
    back for BACKGROUND times what the last pieces cost, so that a save takes a twentieth of one processor; else none.
    """

    def __init__(self) -> None:
        self.hash, self.write, self.sync = (ThreadPoolExecutor(1, thread_name_prefix="hotbed-save") for _ in range(3))
        self.unsynced: list[Future[None]] = []
        self._threads = [pool.submit(threading.get_ident).result() for pool in (self.hash, self.write, self.sync)]
        self._seen = self._clocks()

    def pace(self) -> None:
        """Called by the thread that saves, after each piece."""
        now = self._clocks()
        wall, process, own = (new - old for new, old in zip(now, self._seen, strict=True))
        if wall < LOOK_SECONDS:
            return
        self._seen = now
        if process - own > BUSY_SHARE * wall:
            time.sleep(min(own * BACKGROUND, 1.0))
            self._seen = self._clocks()

    def _clocks(self) -> tuple[float, float, float]:
        """Seconds: of the clock, of the process' processors, of those that this save used; elsewhere than on Unix it
        cannot tell, and does not stand back."""
        if not hasattr(time, "pthread_getcpuclockid"):
            return time.perf_counter(), 0.0, 0.0
        own = (time.clock_gettime(time.pthread_getcpuclockid(thread)) for thread in self._threads)
        return time.perf_counter(), time.process_time(), time.thread_time() + sum(own)

    def settle(self, allowed: int = 0) -> None:
        """Wait until at most `allowed` files are not yet on disk; raises what their writing raised."""
        while len(self.unsynced) > allowed:
            self.unsynced.pop(0).result()

    def close(self) -> None:
        for pool in (self.hash, self.write, self.sync):
            pool.shutdown(wait=True, cancel_futures=True)


class HashedFile:
    """A new file that is hashed while it is written, in large pieces; on disk once its draft is published.

    `raw`: `write(buffers)` takes them all; `finish`: makes it durable and closes it.
    """

    def __init__(self, raw: Any, workers: Workers, finish: Callable[[], None]) -> None:
        self._raw, self._workers, self._finish = raw, workers, finish
        self._hash, self._bytes = hashlib.sha256(), 0
        self._piece: list[memoryview] = []
        self._held = 0
        self._flying: list[tuple[Future[None], ...]] = []
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
        """Take bytes; buffers of SMALL_BYTES and more are not copied, so they must not change any more."""
        view = memoryview(data).cast("B")
        self._bytes += view.nbytes
        whole = view if view.nbytes >= SMALL_BYTES else memoryview(bytes(view))
        for at in range(0, whole.nbytes, PIECE_BYTES):
            self._piece.append(whole[at : at + PIECE_BYTES])
            self._held += self._piece[-1].nbytes
            if self._held >= PIECE_BYTES or len(self._piece) == _MOST_BUFFERS:
                self._emit()
        return view.nbytes

    def flush(self) -> None:
        """Arrow asks for it after each batch; pieces go out when they are full and at the end."""

    def entry(self) -> dict[str, Any]:
        """The file's entry in the manifest, after it was closed."""
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}

    def _emit(self) -> None:
        if self._piece:
            self._land(_IN_FLIGHT - 1)
            workers, piece = self._workers, self._piece
            self._flying.append(
                (workers.hash.submit(self._update, piece), workers.write.submit(self._raw.write, piece))
            )
            workers.pace()
        self._piece, self._held = [], 0

    def _update(self, piece: list[memoryview]) -> None:
        for view in piece:
            self._hash.update(view)

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

    def write(self, buffers: Iterable[memoryview]) -> None:
        left = list(buffers)
        while left:
            written = os.writev(self._handle, left)
            self._at += written
            while left and written >= left[0].nbytes:
                written -= left.pop(0).nbytes
            if written:
                left[0] = left[0][written:]
        if self._at - self._begun >= _WRITEBACK_BYTES and hasattr(os, "posix_fadvise"):
            # starts writeback of what is dirty, and drops from memory what is clean: nobody reads it soon
            os.posix_fadvise(self._handle, 0, self._at, os.POSIX_FADV_DONTNEED)
            self._begun = self._at

    def finish(self) -> None:
        try:
            os.fsync(self._handle)
        finally:
            os.close(self._handle)
