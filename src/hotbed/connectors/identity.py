# SPDX-License-Identifier: Apache-2.0
"""What a file is: its name and the content that was read. Times and inodes do not matter."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote_from_bytes, unquote_to_bytes

EDGE_BYTES = 1 << 16
"""Bytes at the begin and at the end of what was read that a digest covers."""

_HALF = 16
Content = Literal["same", "longer", "other", "gone"]


@dataclass(frozen=True)
class Identity:
    """The content that was read of a file.

    `size`: the bytes that were read, from the begin of the file. `digest`: of their first 64 KiB
    (16 digits) and of their last 64 KiB (16 more); "" = not known, as in old positions.
    `rows`: how many rows those bytes held.
    """

    size: int
    digest: str
    rows: int = 0

    @classmethod
    def of(cls, path: str, size: int, rows: int = 0) -> Identity:
        """The identity of the first `size` bytes of a file; reads at most 128 KiB.

        Raises OSError where the file cannot be read.
        """
        with open(path, "rb") as file:
            head = file.read(min(size, EDGE_BYTES))
            file.seek(max(0, size - EDGE_BYTES))
            tail = file.read(min(size, EDGE_BYTES))
        return cls(size, _digest(head) + _digest(tail), rows)

    def compare(self, path: str, size: int | None = None) -> Content:
        """What a file holds now: the same bytes, more after them, other ones, or it is gone.

        `size`: its bytes, where they are known already.
        """
        try:
            size = os.stat(path).st_size if size is None else size
            if size < self.size or (size > self.size and not self.digest):
                return "other"
            if self.digest and Identity.of(path, self.size).digest != self.digest:
                return "other"
        except FileNotFoundError:
            return "gone"
        return "same" if size == self.size else "longer"

    def begins_as(self, other: Identity) -> bool:
        """Whether the first 64 KiB are those of `other`."""
        if min(self.size, other.size) < EDGE_BYTES:
            return False
        return self.digest[:_HALF] == other.digest[:_HALF]

    def to_json(self) -> list[Any]:
        """As it stands in a position."""
        return [self.size, self.digest, self.rows]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Identity:
        """Inverse of `to_json`."""
        size, digest, rows = value
        return cls(size, digest, rows)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_HALF // 2).hexdigest()


def text_of(name: str) -> str:
    """A file name as text for positions, messages and dead letters.

    That is the name itself; if it is not UTF-8, "/" (which no name holds) and its bytes in
    percent-encoding.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        return "/" + quote_from_bytes(os.fsencode(name))
    return name


def name_of(text: str) -> str:
    """Inverse of `text_of`."""
    return os.fsdecode(unquote_to_bytes(text[1:])) if text.startswith("/") else text
