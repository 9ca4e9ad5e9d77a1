# SPDX-License-Identifier: Apache-2.0
"""Arrays in files without a header: mapped, with their sizes checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.compat.hugectr.paths import check_local
from hotbed.errors import FormatError, PersistError

FLOAT = np.dtype("<f4")
INT64 = np.dtype("<i8")


def read_array(path: Path, dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    """Return the whole file as an array [n] of `dtype`.

    Args:
        path: of the file.
        dtype: of one entry, which may be a record.
        what: the entries in words, for messages.

    Raises:
        PersistError: there is no such file.
        FormatError: its size is not a multiple of the size of an entry.
    """
    num_bytes = file_size(path)
    if num_bytes % dtype.itemsize:
        raise FormatError(
            f"{path}: expected {what} of {dtype.itemsize} bytes each, got {num_bytes} bytes, "
            f"{num_bytes % dtype.itemsize} of them left over. Check the type of keys, the vector "
            "size and the release that wrote it."
        )
    if not num_bytes:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r")


def file_size(path: Path) -> int:
    """Return the bytes of a file; raise PersistError if it does not exist."""
    check_local("weights", path)
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "nothing"
        raise PersistError(f"{path}: expected a file, got {kind}. Give a file that HugeCTR wrote.")
    return path.stat().st_size


def check_size(path: Path, num_bytes: int, what: str) -> None:
    """Raise FormatError unless a file has `num_bytes`, which hold `what`."""
    size = file_size(path)
    if size != num_bytes:
        relation = "missing" if size < num_bytes else "too many"
        raise FormatError(
            f"{path}: expected {num_bytes} bytes for {what}, got {size}, {abs(size - num_bytes)} "
            f"{relation}. Give the file of this very model."
        )
