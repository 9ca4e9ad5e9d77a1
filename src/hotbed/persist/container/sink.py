# SPDX-License-Identifier: Apache-2.0
"""Files that are hashed while they are written, at the speed of the disk.

Pieces are hashed, written and synced in parallel. They bypass the page cache where the system
allows that, so that a save takes little time and removes nothing from memory.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hotbed.files import close_synced

PIECE_BYTES = 2 << 20
BACKGROUND = 5
"""How many times as long as it worked a save pauses while other threads work."""
BUSY_SHARE = 0.1
"""Processors' share from which other threads count as working."""
LOOK_SECONDS = 0.01
_MAX_PAUSE_SECONDS = 1.0
_MAX_PIECES = 8
_MAX_UNSYNCED_FILES = 32


class Clocks(NamedTuple):
    """Seconds at one look.

    Attributes:
        wall: of the clock on the wall.
        process: of the processors, used by the whole process.
        own: of the processors, used by this save.
        process_after: as `process`, read again after `own`.
    """

    wall: float
    process: float
    own: float
    process_after: float


class SaveThreads:
    """The threads of one draft: they hash, write and sync pieces in parallel, a file's in order.

    `pace` keeps a save in the background. While other threads of the process work, as in training,
    it pauses for BACKGROUND times what the last pieces took, so that a save takes a sixth of one
    processor. A longer save would disturb as much, and would keep more of the rows apart that
    training changes meanwhile.

    Attributes:
        stands_back: whether `pace` pauses. A save that training waits for does not: the other
            threads that work then carry its own messages between ranks.
    """

    def __init__(self) -> None:
        self.stands_back = True
        self.hash = _thread()
        self.write = _thread()
        self.sync = _thread()
        # pieces that are being hashed and written, oldest first
        self._pending: deque[tuple[memoryview, list[Future[None]]]] = deque()
        self.unsynced: deque[Future[None]] = deque()
        self._idents = [
            thread.submit(threading.get_ident).result()
            for thread in (self.hash, self.write, self.sync)
        ]
        self._last = self._clocks()

    def pace(self) -> None:
        """Pause if other threads work. The thread that saves calls it after each piece."""
        if not self.stands_back:
            return
        now = self._clocks()
        last = self._last
        wall = now.wall - last.wall
        if wall < LOOK_SECONDS:
            return
        self._last = now
        own_seconds = now.own - last.own
        # a lower bound: the clocks of a save at work run on while they are read
        others = now.process - last.process_after - own_seconds
        if others > BUSY_SHARE * wall:
            time.sleep(min(own_seconds * BACKGROUND, _MAX_PAUSE_SECONDS))
            self._last = self._clocks()

    def _clocks(self) -> Clocks:
        """Read the clocks; on systems that cannot tell, no thread seems to work."""
        if not hasattr(time, "pthread_getcpuclockid"):
            return Clocks(time.perf_counter(), 0.0, 0.0, 0.0)
        wall = time.perf_counter()
        process = time.process_time()
        own_seconds = time.thread_time()
        for ident in self._idents:
            own_seconds += time.clock_gettime(time.pthread_getcpuclockid(ident))
        return Clocks(wall, process, own_seconds, time.process_time())

    def take(self) -> memoryview:
        """Return memory for a piece, in whole pages.

        If many pieces are pending, it waits for the oldest, and raises what writing it raised.
        """
        if len(self._pending) < _MAX_PIECES:
            return memoryview(mmap.mmap(-1, PIECE_BYTES))
        memory, futures = self._pending.popleft()
        for future in futures:
            future.result()
        return memory

    def send(
        self,
        memory: memoryview,
        num_bytes: int,
        update_hash: Callable[[memoryview], None],
        write: Callable[[memoryview], None],
    ) -> list[Future[None]]:
        """Hash and write the first bytes of `memory`, which is reused when both are done."""
        piece = memory[:num_bytes]
        futures = [self.hash.submit(update_hash, piece), self.write.submit(write, piece)]
        self._pending.append((memory, futures))
        return futures

    def settle(self, allowed: int = 0) -> None:
        """Wait until at most `allowed` files are not on disk; raise what writing them raised."""
        while len(self.unsynced) > allowed:
            self.unsynced.popleft().result()

    def close(self) -> None:
        for thread in (self.hash, self.write):
            thread.shutdown(wait=True, cancel_futures=True)
        self.sync.shutdown(wait=True)  # it closes the files


def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="hotbed-save")


class RawFile(Protocol):
    """A file that takes whole pieces."""

    def write(self, piece: memoryview) -> Any: ...


class HashedFile:
    """A new file that is hashed while it is written; on disk once its draft is published.

    Args:
        raw: the file below, whose `write` takes all of a piece.
        threads: those of the draft.
        finish: makes the file below durable and closes it.
    """

    def __init__(self, raw: RawFile, threads: SaveThreads, finish: Callable[[], None]) -> None:
        self._raw = raw
        self._threads = threads
        self._finish = finish
        self._hash = hashlib.sha256()
        self._num_bytes = 0
        self._piece: memoryview | None = None
        self._filled = 0  # bytes of the piece
        self._pending: list[Future[None]] = []
        self._ended: Future[None] | None = None
        self.closed = False

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.closed = True
        try:
            if kind is None:
                self._send_piece()
        finally:  # the next file begins while this one ends
            self._ended = self._threads.sync.submit(self._end)
            self._threads.unsynced.append(self._ended)
        self._threads.settle(_MAX_UNSYNCED_FILES)

    def write(self, data: Any) -> int:
        """Copy bytes into pieces; return their number."""
        view = memoryview(data).cast("B")
        self._num_bytes += view.nbytes
        start = 0
        while start < view.nbytes:
            if self._piece is None:
                self._piece = self._threads.take()
            num_bytes = min(PIECE_BYTES - self._filled, view.nbytes - start)
            end = self._filled + num_bytes
            self._piece[self._filled : end] = view[start : start + num_bytes]
            self._filled = end
            start += num_bytes
            if end == PIECE_BYTES:
                self._send_piece()
        return view.nbytes

    def flush(self) -> None:
        """Do nothing. Arrow calls it after each batch; pieces are sent when they are full."""

    def result(self) -> tuple[int, str]:
        """Return bytes and SHA-256 once the file is on disk; raise what its writing raised."""
        assert self._ended is not None
        self._ended.result()
        return self._num_bytes, self._hash.hexdigest()

    def _send_piece(self) -> None:
        if self._piece is not None:
            self._pending += self._threads.send(
                self._piece, self._filled, self._hash.update, self._raw.write
            )
            self._threads.pace()
        self._piece = None
        self._filled = 0

    def _end(self) -> None:
        failure: Exception | None = None
        for future in self._pending:  # all of them: a closed file must not be written to
            try:
                future.result()
            except Exception as error:
                failure = failure or error
        self._finish()
        if failure is not None:
            raise failure


class LocalFile:
    """A new local file. Whole pieces bypass the page cache where the system allows that.

    The sync at its end is then short.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        self._handle = os.open(path, flags, 0o666)
        self._is_direct = False

    def write(self, piece: memoryview) -> None:
        self._set_direct(piece.nbytes == PIECE_BYTES)
        while piece.nbytes:
            try:
                num_bytes = os.writev(self._handle, [piece])
            except OSError as error:
                if not self._is_direct or error.errno != errno.EINVAL:
                    raise
                self._set_direct(False)  # the file system wants direct writes of another size
            else:
                piece = piece[num_bytes:]

    def finish(self) -> None:
        """Close the file once it is on disk."""
        close_synced(self._handle)

    def _set_direct(self, wanted: bool) -> None:
        if wanted == self._is_direct or not hasattr(os, "O_DIRECT"):
            return
        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        flags = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags)
        except OSError:
            if not wanted:
                raise
        else:  # not every file system allows direct writes
            self._is_direct = wanted
