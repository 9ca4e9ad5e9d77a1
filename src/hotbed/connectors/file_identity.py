# SPDX-License-Identifier: Apache-2.0
"""The identity of a file: its name and the content that was read, not its times or inode."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote_from_bytes, unquote_to_bytes

EDGE_BYTES = 1 << 16
"""Bytes at the begin and at the end of the content that a digest covers."""

_HALF = 16
Content = Literal["same", "longer", "other", "gone"]


@dataclass(frozen=True)
class FileIdentity:
    """The content that was read of a file.

    Args:
        size: the bytes that were read, from the begin of the file.
        digest: of the first 64 KiB of these bytes (16 digits) and of the last 64 KiB (16 more
            digits); "" = unknown, as in old positions.
        rows: the rows in these bytes.
    """

    size: int
    digest: str
    rows: int = 0

    @classmethod
    def of(cls, path: str, size: int, rows: int = 0) -> FileIdentity:
        """Return the identity of the first `size` bytes of a file; read at most 128 KiB.

        Raises:
            OSError: the file cannot be read.
        """
        with open(path, "rb") as file:
            head = file.read(min(size, EDGE_BYTES))
            file.seek(max(0, size - EDGE_BYTES))
            tail = file.read(min(size, EDGE_BYTES))
        return cls(size, _digest(head) + _digest(tail), rows)

    def compare(self, path: str, size: int | None = None) -> Content:
        """Return whether a file has the same content, a longer one, another one, or is gone.

        Args:
            path: the file.
            size: its size; None = ask the file system.
        """
        try:
            if size is None:
                size = os.stat(path).st_size
            if size < self.size or (size > self.size and not self.digest):
                return "other"
            if self.digest and FileIdentity.of(path, self.size).digest != self.digest:
                return "other"
        except FileNotFoundError:
            return "gone"
        if size == self.size:
            return "same"
        return "longer"

    def begins_as(self, other: FileIdentity) -> bool:
        """Return whether both have the same first 64 KiB."""
        if min(self.size, other.size) < EDGE_BYTES:
            return False
        return self.digest[:_HALF] == other.digest[:_HALF]

    def to_json(self) -> list[Any]:
        """Return the identity as JSON for a position."""
        return [self.size, self.digest, self.rows]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> FileIdentity:
        """Return the identity that `to_json` wrote."""
        size, digest, rows = value
        return cls(size, digest, rows)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_HALF // 2).hexdigest()


def text_of(name: str) -> str:
    """Return a file name as text for positions, messages and dead letters.

    This is the name itself. If it is not UTF-8, it is "/", which cannot be part of a name, and the
    bytes in percent-encoding.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        return "/" + quote_from_bytes(os.fsencode(name))
    return name


def name_of(text: str) -> str:
    """Return the file name that `text_of` wrote."""
    if not text.startswith("/"):
        return text
    return os.fsdecode(unquote_to_bytes(text[1:]))
