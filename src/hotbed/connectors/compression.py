# SPDX-License-Identifier: Apache-2.0
"""What the first bytes of a file say: how it is compressed, and what cannot be read as text."""

from __future__ import annotations

import io
import os
from typing import Any

from hotbed.connectors.paths import open_bytes
from hotbed.errors import DecodeError

CODECS = {
    ".bz2": "bz2",
    ".gz": "gzip",
    ".gzip": "gzip",
    ".lz4": "lz4",
    ".zst": "zstd",
    ".zstd": "zstd",
}
"""Endings of the names of compressed files, in lower case, and what they stand for."""

_MAGIC = {
    b"\x1f\x8b\x08": "gzip",
    b"BZh": "bz2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
_BZ2_BLOCK = (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")
"""What follows "BZh" and a digit: the first block, or the end of an empty file."""

_AGAIN = "Compress it with gzip, zstd, bz2 or lz4 instead, or unpack it"
_BOM = b"\xef\xbb\xbf"
_UTF16 = "Write it as UTF-8, or read it with hb.sources.Csv(..., encoding='utf-16')"
_UTF32 = "Write it as UTF-8, or read it with hb.sources.Csv(..., encoding='utf-32')"
_OTHERS = {
    b"PK\x03\x04": ("a zip archive or an Excel file", f"Export it as csv. {_AGAIN}"),
    b"PK\x05\x06": ("an empty zip archive", _AGAIN),
    b"\xfd7zXZ\x00": ("compressed with xz", _AGAIN),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", _AGAIN),
    b"Rar!\x1a\x07": ("a rar archive", _AGAIN),
    b"\x1f\x9d": ("compressed with compress", _AGAIN),
    b"\xff\x06\x00\x00sNaPpY": ("compressed with snappy", _AGAIN),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("an Excel file", "Export it as csv"),
    b"PAR1": ("a Parquet file", "Read it with hb.sources.Parquet"),
    b"ARROW1": ("an Arrow file", "Write it as Parquet"),
    b"ORC": ("an ORC file", "Write it as Parquet"),
    b"Obj\x01": ("an Avro file", "Write it as Parquet"),
    b"SQLite format 3": ("a SQLite database", "Export the table as csv"),
}
_ENCODINGS = {
    b"\xff\xfe\x00\x00": ("UTF-32", _UTF32),
    b"\x00\x00\xfe\xff": ("UTF-32", _UTF32),
    b"\xff\xfe": ("UTF-16", _UTF16),
    b"\xfe\xff": ("UTF-16", _UTF16),
}
_TAR = slice(257, 262)


def ending_of(file: str) -> str:
    """Return the ending of a file name in lower case, without that of its compression."""
    stem, ending = os.path.splitext(file.lower())
    if ending in CODECS:
        return os.path.splitext(stem)[1]
    return ending


def codec_of(file: str) -> str | None:
    """Return how a file is compressed, by its content; None = it is not, or it is empty.

    Raises:
        DecodeError: its name says that it is compressed, and its content does not.
        OSError: it cannot be read.
    """
    with open_bytes(file) as stream:
        return codec_by_head(stream.read(10), file)


def codec_by_head(head: bytes, file: str) -> str | None:
    """Return what `codec_of` does, from the first 10 bytes of a file."""
    for magic, codec in _MAGIC.items():
        if head.startswith(magic) and (codec != "bz2" or head[4:].startswith(_BZ2_BLOCK)):
            return codec
    by_name = CODECS.get(os.path.splitext(file.lower())[1])
    if by_name is not None and head:
        raise DecodeError(
            f"{file}: its name says {by_name}, and its content is not {by_name}, got {head!r}. "
            "Rename it if it is not compressed, or write it again.",
            file,
        )
    return None


class TextStream(io.RawIOBase):
    """A stream of text without its byte order mark; other kinds of files are refused.

    Args:
        stream: the decompressed bytes.
        file: their path, for messages.
        is_utf8: whether the text should be UTF-8.

    Raises:
        DecodeError: the first bytes are those of another kind of file, or of another encoding.
    """

    def __init__(self, stream: Any, file: str, *, is_utf8: bool = True) -> None:
        self._stream = stream
        self._file = file
        self._is_utf8 = is_utf8
        self._is_checked = False
        self.num_skipped = 0
        """Bytes of the byte order mark."""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._stream.close()
        super().close()

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._stream.read(size)
        if self._is_checked:
            return data
        self._is_checked = True
        self._check(data)
        if self._is_utf8 and data.startswith(_BOM):
            self.num_skipped = len(_BOM)
            return data[len(_BOM) :] or self.read(size)
        return data

    def _check(self, head: bytes) -> None:
        for magic, (kind, advice) in _OTHERS.items():
            if head.startswith(magic):
                raise self._refused(kind, head, advice)
        if head[_TAR] == b"ustar":
            raise self._refused("a tar archive", head, "Unpack it")
        if not self._is_utf8:
            return
        for mark, (kind, advice) in _ENCODINGS.items():
            if head.startswith(mark):
                raise self._refused(f"{kind} text", head, advice)
        if b"\0" in head[:4]:
            raise self._refused("not UTF-8 text, perhaps UTF-16", head, _UTF16)

    def _refused(self, kind: str, head: bytes, advice: str) -> DecodeError:
        return DecodeError(f"{self._file}: it is {kind}, got {head[:10]!r}. {advice}.", self._file)


def read_full(stream: Any, num_bytes: int) -> bytes:
    """Return `num_bytes` bytes, fewer at the end: a decompressing stream may return parts."""
    data: bytes = stream.read(num_bytes)
    while len(data) < num_bytes and (more := stream.read(num_bytes - len(data))):
        data += more
    return data
