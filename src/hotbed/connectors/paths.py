# SPDX-License-Identifier: Apache-2.0
"""Paths, URLs and globs: which files they name, each once, and the bytes of a file."""

from __future__ import annotations

import functools
import glob
import logging
import os
from collections.abc import Iterator, Sequence
from urllib.parse import unquote

import pyarrow as pa

from hotbed import objects
from hotbed.errors import DataError, printable
from hotbed.files import resolve

logger = logging.getLogger("hotbed.connectors")

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def expand(path: Paths) -> list[str]:
    """Return the files of `path`: a file, a glob (sorted; `**` recurses) or a list of both.

    A `file://` URL is the path after it; another URL is that of an object, or a glob. A glob names
    each file once: loops of links are not followed, and of several names of one file (links) the
    one without links stays.

    Raises:
        DataError: a path or glob matches no file.
        StoreAway: an object store does not answer, or refuses to list objects.
    """
    if isinstance(path, (str, os.PathLike)):
        path = [path]
    files: list[str] = []
    for item in path:
        text = os.fspath(item)
        place = resolve(text)
        if isinstance(place, str):
            matches = objects.matches(place)
        else:
            if text.startswith("file:"):
                text = str(place)
            matches = [text] if os.path.isfile(text) else _matching_files(text)
        if not matches:
            raise DataError(
                f"path: no file to read, got {text!r}, which matches nothing. Check the path (a "
                "folder needs a glob: 'folder/*')."
            )
        files += matches
    return files


def open_bytes(file: str, *, ahead: bool = False) -> pa.NativeFile:
    """Open a file or an object without decompressing it.

    Args:
        file: the file, or the URL of the object.
        ahead: fetch what follows in an object before it is asked for.

    Raises:
        OSError: the file cannot be read.
        DataError: there is no such object.
        StoreAway: the object store does not answer, or refuses.
    """
    if objects.is_url(file):
        return pa.PythonFile(objects.ObjectFile(file, ahead=ahead), "r")
    try:
        file.encode()
        return pa.OSFile(file)
    except UnicodeEncodeError:  # pyarrow takes only names that are UTF-8
        handle = os.open(file, os.O_RDONLY)
        try:
            return pa.OSFile(f"/dev/fd/{handle}")
        finally:
            os.close(handle)


def size_of(file: str) -> int:
    """Return the number of bytes of a file or an object."""
    if objects.is_url(file):
        return objects.Identity.of(file).size
    return os.path.getsize(file)


def state_of(file: str) -> tuple[str, int, int] | None:
    """Return path, size and time of change of a local file; None if it is away, or an object."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return file, status.st_size, status.st_mtime_ns


def folder_values(file: str) -> dict[str, str | None]:
    """Return the values that folders of a path name as `key=value`, as Hive's partitions do.

    Both are URL-encoded; None = Hive's name for a null.
    """
    values: dict[str, str | None] = {}
    for folder in os.path.dirname(file).split(os.sep):
        name, sign, value = folder.partition("=")
        if name and sign:
            text = unquote(value)
            values[unquote(name)] = None if text == HIVE_NULL else text
    return values


def _matching_files(pattern: str) -> list[str]:
    """Return the files that match a glob, sorted, each once."""
    names: dict[str, list[str]] = {}  # by the path without links
    folders: dict[str, str] = {}
    for path in sorted(_matches(pattern)):
        if not os.path.isfile(path):
            continue
        folder, name = os.path.split(path)
        if os.path.islink(path):
            real = os.path.realpath(path)
        else:
            if folder not in folders:
                folders[folder] = os.path.realpath(folder)
            real = os.path.join(folders[folder], name)
        names.setdefault(real, []).append(path)
    files = [min(paths, key=_num_links) for paths in names.values()]
    left_out = {path for paths in names.values() for path in paths} - set(files)
    if left_out:
        _warn_of_links(pattern, len(left_out), printable(min(left_out)))
    return sorted(files)


@functools.cache  # files are listed several times
def _warn_of_links(pattern: str, count: int, example: str) -> None:
    logger.warning(
        "%s: it matches %d names of links to files that it matches already, such as %s; each "
        "file is read once",
        pattern,
        count,
        example,
    )


def _num_links(path: str) -> int:
    """Return how many parts of a path are links."""
    num_links = 0
    while path and path != os.path.dirname(path):
        num_links += os.path.islink(path)
        path = os.path.dirname(path)
    return num_links


def _matches(pattern: str) -> Iterator[str]:
    """Yield the paths that match a glob. `**` enters each folder once, also through links."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    place = parts.index("**")
    before = os.sep.join(parts[:place])
    after = os.sep.join(parts[place + 1 :]) or "*"
    roots = [before]
    if place:
        roots = sorted(glob.glob(before or os.sep))
    for root in roots:
        for folder in _folders(root):
            yield from _matches(os.path.join(glob.escape(folder), after))


def _folders(root: str) -> Iterator[str]:
    """Yield a folder and the folders below it, each once; those of links after all others."""
    visited: set[str] = set()
    waiting = [root]
    links: list[str] = []
    while waiting or links:
        folder = (waiting or links).pop(0)
        real = os.path.realpath(folder)
        if real in visited:
            continue
        visited.add(real)
        yield folder
        for name in sorted(os.listdir(folder or os.curdir)):
            path = os.path.join(folder, name)
            if name.startswith(".") or not os.path.isdir(path):
                continue
            if os.path.islink(path):
                links.append(path)
            else:
                waiting.append(path)
