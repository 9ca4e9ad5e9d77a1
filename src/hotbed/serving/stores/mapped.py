# SPDX-License-Identifier: Apache-2.0
"""Read the served folder: versions are files that are mapped into memory and shared.

docs/format.md describes the files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from hotbed.errors import ConfigError, FormatError, HotbedError
from hotbed.files import DIGESTS, digest_of, map_file
from hotbed.frozen import FrozenRows, IdArray, RowArray
from hotbed.serving.rows import ServedTable
from hotbed.serving.stores.base import ModelVersion, Weight, read_weights, version_fields

log = logging.getLogger("hotbed.serving")
POINTER_FILE = "CURRENT"
FORMAT = "hotbed.served"
FORMAT_VERSION = 1
_ADVICE = "Load the model again."
_POINTER = re.compile(rb"[0-9a-f]{64}\n")
_FILE = re.compile(r"[0-9a-f]{32}[.-][^/\\\0]+")  # a file of the folder itself, no path out of it
_VERSION_FILE = re.compile(r"[0-9a-f]{32}\.json")
_ATTEMPTS = 5


def names_a_file(name: str) -> bool:
    """Return whether a file of a version could have this name."""
    return _FILE.fullmatch(name) is not None


def holds_versions(folder: Path) -> bool:
    """Return whether a folder is one of a model, by its CURRENT or a file of a version in it."""
    if any(_VERSION_FILE.fullmatch(path.name) for path in folder.iterdir()):
        return True
    pointer = folder / POINTER_FILE
    return pointer.is_file() and _POINTER.fullmatch(pointer.read_bytes()) is not None


@dataclass(frozen=True, eq=False)
class MappedVersion(ModelVersion):
    """A version in mapped files.

    Attributes:
        tables: the tables by name.
        key: SHA-256 of the version's own file in the served folder.
        spec: content of that file.
        folder: the folder of the model.
        blobs: the bytes of the graph, the weights, and the id graph if there is one.
    """

    tables: Mapping[str, ServedTable]
    key: str = field(repr=False)
    spec: Mapping[str, Any] = field(repr=False)
    folder: Path = field(repr=False)
    blobs: Mapping[str, memoryview] = field(repr=False)

    def graph_bytes(self) -> bytes:
        return bytes(self.blobs["graph"])

    def ids_bytes(self) -> bytes:
        return bytes(self.blobs.get("ids", b""))

    def weights(self) -> Iterator[Weight]:
        place = f"{self.folder}: weights of version {self.version}"
        yield from read_weights(self.blobs["weights"], place)

    def find(
        self, wanted: Mapping[str, IdArray], seconds: float | None = None
    ) -> dict[str, RowArray]:
        rows = {}
        for name, ids in wanted.items():
            table = self.table(name)
            rows[name], _ = table.find(ids)
        return rows

    def table(self, name: str) -> ServedTable:
        """Return a table by name. Raises ConfigError for an unknown one."""
        if name not in self.tables:
            raise ConfigError(
                f"model {self.name!r}: unknown table, got {name!r}. Choose one of "
                f"{sorted(self.tables)}."
            )
        return self.tables[name]

    def files(self) -> set[str]:
        """Return the names of all its files in its folder."""
        names = {entry["file"] for entry in self._entries()}
        for fitted in self.schema.maps:
            names.add(str(fitted.path.relative_to(self.folder)))
        return names | {file_of(self.key)}

    @property
    def num_digests(self) -> int:
        """The number of files whose digest is known."""
        return len({name for name, _, _ in self.digests()})

    def damaged(self, is_wanted: Callable[[], bool] = lambda: True) -> set[str]:
        """Return the names of its files that are not as they were written. All bytes are read.

        `is_wanted`: asked before each piece of a file; False ends the search.
        """
        return damaged_files([self], is_wanted)

    def _entries(self) -> Iterator[Mapping[str, Any]]:
        """Yield the entries of its files: graphs, weights, and those of tables."""
        yield from self.spec["files"].values()
        for table in self.spec["tables"].values():
            yield from table["layers"]
            yield from table["changed"]
            if table["hot"] is not None:
                yield table["hot"]

    def digests(self) -> Iterator[tuple[str, str, str]]:
        """Yield name, kind of digest and digest of each file that has one."""
        yield file_of(self.key), "sha256", self.key
        for entry in self._entries():
            for kind in DIGESTS.keys() & entry.keys():
                yield entry["file"], kind, entry[kind]
        for fitted in self.schema.maps:
            yield fitted.path.name, "sha256", fitted.digest

    def changed(self, since: str) -> Mapping[str, IdArray] | None:
        """Return by table the ids whose row differs from version `since`, and maybe some more.

        None means that the changes are unknown.
        """
        chain: list[str] = self.spec["chain"]
        if since not in chain:
            return None
        start = chain.index(since) + 1
        later = chain[start:]
        changes = {}
        try:
            for name in self.tables:
                changes[name] = self._changed(name, later)
        except FileNotFoundError:  # a later version removed the file
            return None
        except FormatError as error:
            log.warning("%s", error)
            return None
        return changes

    def _changed(self, table: str, links: list[str]) -> IdArray:
        spec = self.spec["tables"][table]
        entries = {entry["digest"]: entry for entry in spec["changed"]}
        if not entries.keys() >= set(links):  # more deltas than are remembered apart
            overlay = self.tables[table].layers[0]  # all changes since the full
            return np.concatenate(overlay.entries())
        parts = [np.empty(0, np.int64)]
        for link in links:
            parts.append(self._ids(entries[link]))
        return np.unique(np.concatenate(parts))

    def hot(self, table: str, n: int) -> IdArray:
        """Return up to n ids, the most frequent first."""
        name = self.table(table).name
        entry = self.spec["tables"][name]["hot"]
        no_ids = np.empty(0, np.int64)
        if entry is None:
            return no_ids
        try:
            ids = self._ids(entry)
        except FileNotFoundError:  # a later version removed the file
            return no_ids
        return ids[:n]

    def _ids(self, entry: Mapping[str, Any]) -> IdArray:
        data = _read(self.folder, entry)
        return np.frombuffer(data, "<i8").astype(np.int64)


def damaged_files(
    versions: Iterable[MappedVersion], is_wanted: Callable[[], bool] = lambda: True
) -> set[str]:
    """Return the names of files that are not as they were written, of versions of one model.

    All bytes are read, those of a file that several versions have once.

    Args:
        versions: the versions.
        is_wanted: asked before each piece of a file; False ends the search.
    """
    names = set[str]()
    read = set[tuple[str, str, str]]()
    for version in versions:
        for entry in version.digests():
            if entry in read:
                continue
            read.add(entry)
            name, kind, digest = entry
            try:
                actual = digest_of(version.folder / name, kind, is_wanted)
            except OSError:
                actual = "unreadable"
            if not actual:
                return names
            if actual != digest:
                names.add(name)
    return names


class ModelFolder:
    """The files of one model in a served folder, which any process may read."""

    def __init__(self, root: Path, name: str) -> None:
        if name in ("", ".", ".."):
            raise ConfigError(
                f"model {name!r}: expected a name that a folder can have, got {name!r}. Choose "
                "another name."
            )
        self.name = name
        self.path = root / quote(name, safe="")

    def pointer(self) -> str | None:
        """Return the content of CURRENT, the SHA-256 of the newest version's file.

        None without a CURRENT. Raises FormatError where it is torn or unreadable.
        """
        place = self.path / POINTER_FILE
        try:
            text = place.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise FormatError(f"{place}: unreadable, got {str(error)!r}. {_ADVICE}") from error
        if not _POINTER.fullmatch(text):
            raise FormatError(f"{place}: torn or changed, got {text[:80]!r}. {_ADVICE}")
        return text[:64].decode()

    def newest(self) -> MappedVersion | None:
        """Return the version that CURRENT names, None without a CURRENT.

        Raises FormatError, which names the file, where one is torn, changed or foreign.
        """
        for attempt in range(_ATTEMPTS):
            pointer = self.pointer()
            if pointer is None:
                return None
            try:
                return self.open(pointer)
            except FormatError:
                # otherwise a writer published a newer version during the read
                if attempt == _ATTEMPTS - 1 or self.pointer() == pointer:
                    raise
        return None

    def forget(self) -> None:
        """Remove CURRENT; the model then has no newest version."""
        (self.path / POINTER_FILE).unlink(missing_ok=True)

    def open(self, key: str) -> MappedVersion:
        """Open the version whose file has this SHA-256.

        Raises FormatError, which names the file, where one is torn, changed or foreign.
        """
        place = self.path / file_of(key)
        try:
            spec = _version_spec(place, key)
            return self._version(place, key, spec)
        except FormatError:
            raise
        except (OSError, KeyError, TypeError, ValueError, AttributeError, HotbedError) as error:
            raise FormatError(
                f"{place}: not a whole version, got {type(error).__name__}: {error}. {_ADVICE}"
            ) from error

    def _version(self, place: Path, key: str, spec: Mapping[str, Any]) -> MappedVersion:
        """Return the version of a file with this content; it raises many errors for a bad one."""
        fields = version_fields(spec, str(place), self.path)
        blobs = {}
        for name in ("graph", "ids", "weights"):
            if name != "ids" or "ids" in spec["graph"]:
                blobs[name] = _read(self.path, spec["files"][name])
        tables = {}
        for name, config in fields["configs"].items():
            tables[name] = self._table(config, spec["tables"][name])
        version = MappedVersion(
            **fields, tables=tables, key=key, spec=spec, folder=self.path, blobs=blobs
        )
        for name in version.files():
            _inside(self.path, name)
        for fitted in version.schema.maps:
            fitted.open()
        if not {"origin", "dtype", "chain"} <= spec.keys():
            raise FormatError(f"{place}: not a whole version, got {sorted(spec)}. {_ADVICE}")
        return version

    def _table(self, config: Mapping[str, Any], entry: Mapping[str, Any]) -> ServedTable:
        layers = []
        for layer in entry["layers"]:
            path = _inside(self.path, layer["file"])
            num_bytes = path.stat().st_size
            if num_bytes != layer["bytes"]:
                raise FormatError(
                    f"{path}: torn, got {num_bytes} bytes instead of {layer['bytes']}. {_ADVICE}"
                )
            layers.append(FrozenRows(path))
        return ServedTable(config, layers)


def _version_spec(place: Path, key: str) -> dict[str, Any]:
    """Return the content of a version's file, checked by its digest."""
    data = place.read_bytes()
    if hashlib.sha256(data).hexdigest() != key:
        raise FormatError(
            f"{place}: expected the file that {POINTER_FILE} names, got another SHA-256. {_ADVICE}"
        )
    spec: dict[str, Any] = json.loads(data)
    if (spec["format"], spec["format_version"]) != (FORMAT, FORMAT_VERSION):
        raise FormatError(
            f"{place}: unknown format, got {spec['format']} {spec['format_version']}. {_ADVICE}"
        )
    return spec


def file_of(key: str) -> str:
    """Return the name of a version's file by its SHA-256."""
    return f"{key[:32]}.json"


def map_file_of(digest: str) -> str:
    """Return the name of a fitted map's file by its SHA-256."""
    return f"{digest[:32]}.map"


def _inside(folder: Path, name: str) -> Path:
    if not names_a_file(name):
        raise FormatError(f"{folder}: a file lies outside of the folder, got {name!r}. {_ADVICE}")
    return folder / name


def _read(folder: Path, entry: Mapping[str, Any]) -> memoryview:
    """Return the bytes of a small file, checked by its digest, also once the file is removed.

    It may be mapped: Hotbed alone writes the folder, and replaces files there by others.
    """
    path = _inside(folder, entry["file"])
    data = map_file(path)
    digest = hashlib.sha256(data).hexdigest()
    if len(data) != entry["bytes"] or digest != entry["sha256"]:
        raise FormatError(damage_of(path))
    return data


def damage_of(path: Path) -> str:
    """Return what is wrong with a file that is not as it was written."""
    return f"{path}: torn or changed since it was written, got another length or digest. {_ADVICE}"
