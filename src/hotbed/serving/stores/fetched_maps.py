# SPDX-License-Identifier: Apache-2.0
"""Keep the fitted maps of versions that another process serves in files of this one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

from hotbed.data.fitted import FittedMap
from hotbed.data.schema import Schema
from hotbed.errors import FormatError
from hotbed.files import new_file, writing
from hotbed.serving.stores.locking import TemporaryFolder
from hotbed.serving.stores.mapped import map_file_of

Fetch: TypeAlias = Callable[[str], Iterable[bytes]]
"""Digest of a map -> its file, in parts."""


class FetchedMaps:
    """The fitted maps of the newest version of each model, in a temporary folder.

    Older versions keep theirs mapped into memory. Safe to call from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: TemporaryFolder | None = None
        self._schemas = dict[str, Schema]()

    def local(self, model: str, schema: Schema, fetch: Fetch) -> Schema:
        """Return the schema of a model's newest version with its maps in files that are here.

        Maps that no model needs any more are removed.

        Raises:
            FormatError: a map is not the one of its digest.
            NotWritten: the disk is full or refuses.
        """
        with self._lock:
            if schema.maps:
                schema = self._fetched(schema, fetch)
            self._schemas[model] = schema
            self._remove_others()
        return schema

    def _fetched(self, schema: Schema, fetch: Fetch) -> Schema:
        if self._folder is None:
            self._folder = TemporaryFolder("hotbed-maps-")
        paths = dict[str, Path]()
        for fitted in schema.maps:
            paths[fitted.digest] = self._folder.path / map_file_of(fitted.digest)
        schema = schema.with_maps(paths)
        for fitted in schema.maps:
            if not fitted.path.exists():
                _write(fitted.path, fetch(fitted.digest))
            _open(fitted)
        return schema

    def _remove_others(self) -> None:
        if self._folder is None:
            return
        needed = set[Path]()
        for schema in self._schemas.values():
            needed.update(fitted.path for fitted in schema.maps)
        for path in self._folder.path.glob("*.map"):
            if path not in needed:
                path.unlink(missing_ok=True)


def _write(path: Path, parts: Iterable[bytes]) -> None:
    with writing(path), new_file(path) as file:
        for part in parts:
            file.write(part)


def _open(fitted: FittedMap) -> None:
    try:
        fitted.open()
    except FormatError:
        fitted.path.unlink(missing_ok=True)  # the next attempt fetches it again
        raise
