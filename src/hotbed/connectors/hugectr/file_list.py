# SPDX-License-Identifier: Apache-2.0
"""File lists, as HugeCTR and NVTabular write them: a count, then one path a line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hotbed.connectors.paths import open_bytes
from hotbed.errors import DataError
from hotbed.files import new_file
from hotbed.objects import is_url


def read_file_list(path: str | os.PathLike[str]) -> list[str]:
    """Return the paths in a file list, in their order.

    A relative path is relative to the working folder, as in HugeCTR. If no file is there, it is
    the file of this name beside the list, so that a moved data set can be read.

    Raises:
        DataError: the list cannot be read, or it does not hold as many paths as it says.
    """
    file = os.fspath(path)
    try:
        with open_bytes(file) as stream:
            text = stream.readall().decode()
        lines = [line.strip() for line in text.splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file}: not a file list, got {error}. Give a text file with a count and then one "
            "path a line."
        ) from error
    first, *paths = [line for line in lines if line] or [""]
    if not first.isdecimal():
        raise DataError(
            f"{file}: a file list begins with the number of its paths, got {first[:80]!r}. Write "
            "the number in its first line."
        )
    if len(paths) != int(first):
        raise DataError(
            f"{file}: expected {first} paths, got {len(paths)}. Correct the number in its first "
            "line."
        )
    return [_located(name, os.path.dirname(file)) for name in paths]


def write_file_list(path: str | os.PathLike[str], files: Sequence[str | os.PathLike[str]]) -> None:
    """Write a file list with these paths, unchanged."""
    lines = [str(len(files))]
    for file in files:
        lines.append(os.fspath(file))
    text = "\n".join(lines) + "\n"
    with new_file(Path(path)) as stream:
        stream.write(text.encode())


def _located(name: str, folder: str) -> str:
    if is_url(name) or os.path.exists(name):
        return name
    beside = os.path.join(folder, os.path.basename(name))
    if is_url(folder) or os.path.exists(beside):
        return beside
    return name
