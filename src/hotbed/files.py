# SPDX-License-Identifier: Apache-2.0
"""Where paths and URLs lead, names that survive a loss of power, and the lock of one writer."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from hotbed.errors import ConfigError, PersistError

Where = str | Path
"""A local path or a URL such as `s3://bucket/model`."""

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+(::|://)")
_LOCAL_URL = re.compile(r"(?:file|local):(?://(?P<path>.+)|(?P<absolute>/.*))", re.DOTALL)
_SHORTENED_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/[^/]")


def resolve(where: Where) -> Path | str:
    """Return a local path as a Path, the URL of an object store as text without its last slash.

    `file://` and `local://` URLs are local paths; what follows is taken literally, as in fsspec.

    Raises:
        ConfigError: `where` is a URL that was made into a Path, which loses a slash.
    """
    text = str(where)
    local = _LOCAL_URL.fullmatch(text)
    if local is not None:
        return Path(local["path"] or local["absolute"])
    if _URL.match(text):
        return text.rstrip("/")
    if isinstance(where, Path) and _SHORTENED_URL.match(text):
        raise ConfigError(f"path: a URL made into a Path, got {where!r}. Give URLs as text.")
    return Path(where)


def local_path(where: Where, name: str) -> Path:
    """Return `where` as a local path; ConfigError naming `name` for the URL of an object store."""
    path = resolve(where)
    if isinstance(path, str):
        raise ConfigError(f"{name}: must be a local path, got {path!r}. Give a local folder.")
    return path


def sync_folder(folder: Path) -> None:
    """Make names that came, went or moved in `folder` survive a loss of power."""
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Lock:
    """The lock of the one process that writes `path`, until `release` or until the process ends.

    The locked file is `path` with `.lock` at its end. It is kept, so that all lock the same file.

    Raises:
        PersistError: another holder has the lock.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = lock_file(path)
        self._handle: int | None = None
        handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(handle), os.stat(file)):
                raise FileNotFoundError(f"{file} was moved away")
        except OSError as error:
            os.close(handle)
            raise PersistError(
                f"{path}: another run writes this journal, got {error}. "
                "Stop that run, or give this one a folder of its own."
            ) from error
        self._handle = handle

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def lock_file(path: Path) -> Path:
    """Return the file that a `Lock` of `path` is on."""
    return path.with_name(path.name + ".lock")
