# SPDX-License-Identifier: Apache-2.0
"""Files that are hashed while they are written, at the speed of the disk: pieces are hashed,
written and synced beside each other, and go past the page cache where the system allows, so that a
save costs little time and pushes nothing out of memory. And the folder that they are in, which its
writer holds.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hotbed.files import partial_path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

PIECE_BYTES = 2 << 20
BACKGROUND = 5
BUSY_SHARE = 0.1
LOOK_SECONDS = 0.01
_PIECES = 8
_UNSYNCED = 32


class SaveThreads:
    """The threads of one draft: they hash, write and sync pieces in parallel, a file's in order.

    `pace` keeps a save in the background: while other threads of the process are at work, as in
    training, it stands back for BACKGROUND times what the last pieces cost, so that a save takes a
    sixth of one processor; else none. A longer save would not disturb less while it lasts, and
    keeps more of the rows aside that training changes meanwhile.
    """

    def __init__(self) -> None:
        self.hash, self.write, self.sync = (
            ThreadPoolExecutor(1, thread_name_prefix="hotbed-save") for _ in range(3)
        )
        # pieces on their way, oldest first
        self._flying: deque[tuple[memoryview, list[Future[None]]]] = deque()
        self.unsynced: deque[Future[None]] = deque()
        self._threads = [
            pool.submit(threading.get_ident).result() for pool in (self.hash, self.write, self.sync)
        ]
        self._seen = self._clocks()

    def pace(self) -> None:
        """Called by the thread that saves, after each piece."""
        now = self._clocks()
        seen = self._seen
        wall = now[0] - seen[0]
        own = now[2] - seen[2]
        if wall < LOOK_SECONDS:
            return
        self._seen = now
        # at least: the clocks of a save at work run on while they are read
        others = now[1] - seen[3] - own
        if others > BUSY_SHARE * wall:
            time.sleep(min(own * BACKGROUND, 1.0))
            self._seen = self._clocks()

    def _clocks(self) -> tuple[float, float, float, float]:
        """Seconds: of the clock, of the process' processors, of those that this save used, and the
        second again; elsewhere than on Unix it cannot tell, and does not stand back.
        """
        if not hasattr(time, "pthread_getcpuclockid"):
            return time.perf_counter(), 0.0, 0.0, 0.0
        wall = time.perf_counter()
        process = time.process_time()
        own = sum(
            time.clock_gettime(time.pthread_getcpuclockid(thread)) for thread in self._threads
        )
        return wall, process, time.thread_time() + own, time.process_time()

    def take(self) -> memoryview:
        """Memory for a piece, in whole pages; waits for the oldest piece where many are on their
        way, and raises what it raised.
        """
        if len(self._flying) < _PIECES:
            return memoryview(mmap.mmap(-1, PIECE_BYTES))
        memory, work = self._flying.popleft()
        for future in work:
            future.result()
        return memory

    def send(
        self, memory: memoryview, num_bytes: int, *work: Callable[[memoryview], None]
    ) -> list[Future[None]]:
        """Hash and write what was put into `memory`, which is taken again when both are done."""
        futures = [
            pool.submit(one, memory[:num_bytes])
            for pool, one in zip((self.hash, self.write), work, strict=True)
        ]
        self._flying.append((memory, futures))
        return futures

    def settle(self, allowed: int = 0) -> None:
        """Wait until at most `allowed` files are not yet on disk; raises what their writing raised."""
        while len(self.unsynced) > allowed:
            self.unsynced.popleft().result()

    def close(self) -> None:
        for pool in (self.hash, self.write):
            pool.shutdown(wait=True, cancel_futures=True)
        self.sync.shutdown(wait=True)  # it closes the files


class HashedFile:
    """A new file that is hashed while it is written, in large pieces; on disk once its draft is
    published.

    `raw`: its `write` takes a piece, all of it; `finish`: makes it durable and closes it.
    """

    def __init__(self, raw: Any, workers: SaveThreads, finish: Callable[[], None]) -> None:
        self._raw = raw
        self._workers = workers
        self._finish = finish
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._piece: memoryview | None = None
        self._held = 0  # bytes of it that are filled
        self._flying: list[Future[None]] = []
        self._ended: Future[None] | None = None
        self.closed = False

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.closed = True
        try:
            if kind is None:
                self._emit()
        finally:  # the next file begins while this one ends
            self._ended = self._workers.sync.submit(self._end)
            self._workers.unsynced.append(self._ended)
        self._workers.settle(_UNSYNCED)

    def write(self, data: Any) -> int:
        """Take bytes; they are copied."""
        view = memoryview(data).cast("B")
        self._bytes += view.nbytes
        at = 0
        while at < view.nbytes:
            if self._piece is None:
                self._piece = self._workers.take()
            n = min(PIECE_BYTES - self._held, view.nbytes - at)
            self._piece[self._held : self._held + n] = view[at : at + n]
            self._held = self._held + n
            at = at + n
            if self._held == PIECE_BYTES:
                self._emit()
        return view.nbytes

    def flush(self) -> None:
        """Arrow asks for it after each batch; pieces go out when they are full and at the end."""

    def result(self) -> tuple[int, str]:
        """Return bytes and SHA-256 once the file is on disk; raise what its writing raised."""
        assert self._ended is not None
        self._ended.result()
        return self._bytes, self._hash.hexdigest()

    def _emit(self) -> None:
        if self._piece is not None:
            self._flying += self._workers.send(
                self._piece, self._held, self._hash.update, self._raw.write
            )
            self._workers.pace()
        self._piece = None
        self._held = 0

    def _end(self) -> None:
        failed: Exception | None = None
        for future in self._flying:  # each of them: nobody may write to a file that is closed
            try:
                future.result()
            except Exception as error:
                failed = failed or error
        self._finish()
        if failed is not None:
            raise failed


class LocalFile:
    """A new local file. Whole pieces go straight to the disk where the system has that; the fsync
    at its end is short.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666
        )
        self._direct = False

    def write(self, piece: memoryview) -> None:
        self._go_direct(piece.nbytes == PIECE_BYTES)
        while piece.nbytes:
            try:
                piece = piece[os.writev(self._handle, [piece]) :]
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                self._go_direct(False)  # a file system that wants it in other units

    def finish(self) -> None:
        try:
            os.fsync(self._handle)
        finally:
            os.close(self._handle)

    def _go_direct(self, on: bool) -> None:
        if on == self._direct or not hasattr(os, "O_DIRECT"):
            return
        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        try:
            fcntl.fcntl(
                self._handle, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
            )
        except OSError:
            if not on:  # else: not every file system has it
                raise
        else:
            self._direct = on


class Held:
    """A folder that nobody else may take away, until the process ends: whatever its number is
        elsewhere, and however it ends.

    OSError where another has it, or it is gone. `surely`: not where files or the file system have
    no such locks.
    """

    def __init__(self, path: Path) -> None:
        self._handle: int | None = None
        if fcntl is None or not path.is_dir():
            return
        handle = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(handle), os.stat(path)):
                raise FileNotFoundError(path)
        except OSError as error:
            os.close(handle)
            if isinstance(error, (BlockingIOError, FileNotFoundError)):
                raise
        else:
            self._handle = handle

    @property
    def surely(self) -> bool:
        """Whether a lock says so."""
        return self._handle is not None

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Let go of it; again does nothing."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def new_partial(root: Path, name: str) -> tuple[Path, Held]:
    """A new folder of such a name, held."""
    while True:
        path = partial_path(root, name)
        path.mkdir()
        # somebody sweeps, and takes it for a left one
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            return path, Held(path)
