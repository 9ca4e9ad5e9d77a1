# SPDX-License-Identifier: Apache-2.0
"""Files of a state that are checked whenever they are read.

They are read, never mapped: another process may cut a file at any time, and a mapped file that is
cut ends the process that reads it. The first read compares the digest in the manifest and notes a
digest of each block. Each later read compares those before it returns bytes. So all who read one
`CheckedFile` get the same bytes, or an error that names the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from io import RawIOBase
from typing import Any

import pyarrow as pa
import xxhash

from hotbed.errors import FormatError
from hotbed.files import SizedFile
from hotbed.persist.container.manifest import FileEntry
from hotbed.persist.container.store import ADVICE

BLOCK_BYTES = 256 << 10


class CheckedFile:
    """A file whose bytes were those that the manifest lists when this was made.

    Args:
        opener: opens the file, as often as it is called.
        entry: the file in the manifest.
        place: where the file lies, for messages.

    Raises:
        FormatError: the file is missing, torn or changed.
    """

    def __init__(self, opener: Callable[[], RawIOBase], entry: FileEntry, place: str) -> None:
        self._opener = opener
        self._place = place
        self.num_bytes = entry.bytes
        self._digests: list[bytes] = []
        sha256 = hashlib.sha256()
        with opener() as file, self._reading():
            num_bytes = file.seek(0, os.SEEK_END)
            if num_bytes != entry.bytes:
                raise FormatError(
                    f"{place}: torn, got {num_bytes} bytes instead of {entry.bytes}. {ADVICE}"
                )
            memory = memoryview(bytearray(min(BLOCK_BYTES, num_bytes)))
            for start in range(0, num_bytes, BLOCK_BYTES):
                data = memory[: num_bytes - start]
                self._fill(file, start, data)
                sha256.update(data)
                self._digests.append(xxhash.xxh3_128_digest(data))
        if sha256.hexdigest() != entry.sha256:
            raise FormatError(
                f"{place}: changed since it was written, got SHA-256 {sha256.hexdigest()} instead "
                f"of {entry.sha256}. {ADVICE}"
            )

    def open(self) -> CheckedReader:
        """Open the file to read it; raise FormatError if it is missing."""
        return CheckedReader(self, self._opener())

    def read_block(self, file: RawIOBase, number: int, target: memoryview) -> None:
        """Read a whole block into `target`.

        Raises:
            FormatError: its bytes are not those that were checked, or cannot be read.
        """
        start = number * BLOCK_BYTES
        with self._reading():
            self._fill(file, start, target)
        if xxhash.xxh3_128_digest(target) != self._digests[number]:
            raise self._changed(f"other bytes from {start} on")

    def _fill(self, file: RawIOBase, start: int, target: memoryview) -> None:
        file.seek(start)
        num_bytes = 0
        while num_bytes < len(target):
            num_read = file.readinto(target[num_bytes:])
            if not num_read:
                raise self._changed(f"no bytes from {start + num_bytes} on")
            num_bytes += num_read

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Name the file if the system cannot read it."""
        try:
            yield
        except OSError as error:
            raise FormatError(
                f"{self._place}: missing or unreadable, got {error.strerror or error}. {ADVICE}"
            ) from error

    def _changed(self, problem: str) -> FormatError:
        return FormatError(f"{self._place}: changed while it was read, got {problem}. {ADVICE}")


class CheckedReader(SizedFile):
    """A `CheckedFile` that is open, as Python and Arrow read files.

    Reading raises FormatError if bytes are not those that were checked.
    """

    def __init__(self, checked: CheckedFile, file: RawIOBase) -> None:
        super().__init__(checked.num_bytes)
        self._checked = checked
        self._file = file
        self._number = -1  # of the block in memory
        self._memory = memoryview(bytearray(min(BLOCK_BYTES, checked.num_bytes)))

    def read(self, size: int | None = -1) -> bytes:
        data: bytes = self.read_buffer(size).to_pybytes()
        return data

    def read_buffer(self, size: int | None = -1) -> pa.Buffer:
        """Return the next bytes in memory of Arrow, which calls this instead of `read`."""
        num_bytes = max(self.num_bytes - self.place, 0)
        if size is not None and size >= 0:
            num_bytes = min(num_bytes, size)
        buffer = pa.allocate_buffer(num_bytes)
        self.readinto(memoryview(buffer).cast("B"))
        return buffer

    def readinto(self, target: Any) -> int:
        """Fill `target` with the next bytes; return their number, which is smaller at the end."""
        view = memoryview(target).cast("B")
        view = view[: max(self.num_bytes - self.place, 0)]
        num_bytes = 0
        while num_bytes < len(view):
            number, first = divmod(self.place, BLOCK_BYTES)
            size = min(BLOCK_BYTES, self.num_bytes - number * BLOCK_BYTES)
            part = view[num_bytes : num_bytes + size - first]
            if len(part) == size:
                self._checked.read_block(self._file, number, part)
            else:
                part[:] = self._kept(number, size)[first : first + len(part)]
            num_bytes += len(part)
            self.place += len(part)
        return num_bytes

    def close(self) -> None:
        self._file.close()
        super().close()

    def _kept(self, number: int, size: int) -> memoryview:
        """Return a block, which is kept: the next bytes that are read may lie in it."""
        block = self._memory[:size]
        if number != self._number:
            self._number = -1
            self._checked.read_block(self._file, number, block)
            self._number = number
        return block
