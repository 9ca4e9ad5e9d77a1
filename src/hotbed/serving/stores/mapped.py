# SPDX-License-Identifier: Apache-2.0
"""The served folder, read: versions as files that are mapped into memory and shared. docs/format.md
describes the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import ConfigError, FormatError, HotbedError
from hotbed.serving.rows import Rows, ServedTable
from hotbed.serving.stores.base import ModelVersion, read_weights, undescribed

log = logging.getLogger("hotbed.serving")
CURRENT = "CURRENT"
FORMAT = "hotbed.served"
FORMAT_VERSION = 1
_ADVICE = "load the model again"
_POINTER = re.compile(rb"[0-9a-f]{64}\n")
_FILE = re.compile(r"[0-9a-f]{32}[.-][^/\\\0]+")  # of the folder itself: never a way out
_AGAIN = 5


@dataclass(frozen=True, eq=False)
class MappedVersion(ModelVersion):
    """A version in mapped files. `tables` by name; `spec`: its own file in the served folder,
    `key`: that file's SHA-256.
    """

    tables: Mapping[str, ServedTable]
    key: str = field(repr=False)
    spec: Mapping[str, Any] = field(repr=False)
    folder: Path = field(repr=False)
    blobs: Mapping[str, memoryview] = field(repr=False)

    def graph_bytes(self) -> bytes:
        return bytes(self.blobs["graph"])

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield from read_weights(
            self.blobs["weights"], f"{self.folder}: weights of version {self.version}"
        )

    def find(
        self, wanted: Mapping[str, NDArray[np.int64]], seconds: float | None = None
    ) -> dict[str, NDArray[np.float32]]:
        return {table: self.table(table).find(ids)[0] for table, ids in wanted.items()}

    def table(self, name: str) -> ServedTable:
        """Raises ConfigError for an unknown one."""
        if name not in self.tables:
            raise ConfigError(
                f"model {self.name!r}: no table {name!r} — received {sorted(self.tables)} — name "
                "one of them"
            )
        return self.tables[name]

    def files(self) -> set[str]:
        """Names of all its files in its folder."""
        found = {file_of(self.key), *(entry["file"] for entry in self.spec["files"].values())}
        for entry in self.spec["tables"].values():
            lists = [one for one in (entry["hot"],) if one is not None]
            found |= {one["file"] for one in [*entry["layers"], *lists, *entry["changed"]]}
        return found

    def changed(self, since: str) -> Mapping[str, NDArray[np.int64]] | None:
        """Ids by table whose row differs from that in version `since`, and maybe some more; None
        where it cannot be told.
        """
        chain: list[str] = self.spec["chain"]
        if since not in chain:
            return None
        later = chain[chain.index(since) + 1 :]
        try:
            return {name: self._changed(name, later) for name in self.tables}
        except FileNotFoundError:  # a version after this one took it away
            return None
        except FormatError as error:
            log.warning("%s", error)
            return None

    def _changed(self, table: str, links: list[str]) -> NDArray[np.int64]:
        entry = self.spec["tables"][table]
        known = {one["digest"]: one for one in entry["changed"]}
        nothing = np.empty(0, np.int64)
        if all(link in known for link in links):
            return np.unique(np.concatenate([nothing, *(self._ids(known[link]) for link in links)]))
        overlay = self.tables[table].layers[0]  # all that changed since the full
        return np.concatenate(overlay.entries())

    def hot(self, table: str, n: int) -> NDArray[np.int64]:
        """Up to n ids, the most frequent first."""
        entry = self.spec["tables"][self.table(table).name]["hot"]
        with contextlib.suppress(FileNotFoundError):  # a version after this one took it away
            return np.empty(0, np.int64) if entry is None else self._ids(entry)[:n]
        return np.empty(0, np.int64)

    def _ids(self, entry: Mapping[str, Any]) -> NDArray[np.int64]:
        return np.frombuffer(_read(self.folder, entry), "<i8").astype(np.int64)


class ModelFolder:
    """The files of one model in a served folder, as any process may read them."""

    def __init__(self, root: Path, name: str) -> None:
        if name in ("", ".", ".."):
            raise ConfigError(
                f"model {name!r}: no name for a folder — received {name!r} — choose another"
            )
        self.name = name
        self.path = root / quote(name, safe="")

    def pointer(self) -> str | None:
        """What CURRENT says: the SHA-256 of the newest version's file; None where there is none."""
        try:
            text = (self.path / CURRENT).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise FormatError(f"{self.path / CURRENT}: unreadable — {error} — {_ADVICE}") from error
        if not _POINTER.fullmatch(text):
            raise FormatError(
                f"{self.path / CURRENT}: torn or changed — received {text[:80]!r} — {_ADVICE}"
            )
        return text[:64].decode()

    def newest(self) -> MappedVersion | None:
        """The version that CURRENT names. Raises FormatError naming what is torn, changed or
        foreign.
        """
        for attempt in range(_AGAIN):
            pointer = self.pointer()
            if pointer is None:
                return None
            try:
                return self.open(pointer)
            except FormatError:
                # else a writer moved on while we read
                if attempt == _AGAIN - 1 or self.pointer() == pointer:
                    raise
        return None

    def forget(self) -> None:
        """Take CURRENT away: there is no newest version any more."""
        (self.path / CURRENT).unlink(missing_ok=True)

    def open(self, key: str) -> MappedVersion:
        """The version whose file has this SHA-256. Raises FormatError naming what is torn, changed
        or foreign.
        """
        place = self.path / file_of(key)
        try:
            data = place.read_bytes()
            if hashlib.sha256(data).hexdigest() != key:
                raise FormatError(
                    f"{place}: not the file that {CURRENT} names — its SHA-256 differs — {_ADVICE}"
                )
            spec = json.loads(data)
            if (spec["format"], spec["format_version"]) != (FORMAT, FORMAT_VERSION):
                raise FormatError(
                    f"{place}: of another format — received {spec['format']} "
                    f"{spec['format_version']} — {_ADVICE}"
                )
            fields = undescribed(spec, str(place))
            blobs = {name: _read(self.path, spec["files"][name]) for name in ("graph", "weights")}
            tables = {
                name: self._table(config, spec["tables"][name])
                for name, config in fields["configs"].items()
            }
            version = MappedVersion(
                **fields, tables=tables, key=key, spec=spec, folder=self.path, blobs=blobs
            )
            for name in version.files():
                _inside(self.path, name)
            if not {"origin", "dtype", "chain"} <= spec.keys():
                raise FormatError(
                    f"{place}: not a whole version — received {sorted(spec)} — {_ADVICE}"
                )
        except FormatError:
            raise
        except (OSError, KeyError, TypeError, ValueError, AttributeError, HotbedError) as error:
            raise FormatError(
                f"{place}: not a whole version — {type(error).__name__}: {error} — {_ADVICE}"
            ) from error
        return version

    def _table(self, config: Mapping[str, Any], entry: Mapping[str, Any]) -> ServedTable:
        layers = []
        for one in entry["layers"]:
            path = _inside(self.path, one["file"])
            if path.stat().st_size != one["bytes"]:
                raise FormatError(
                    f"{path}: torn — received {path.stat().st_size} bytes instead of "
                    f"{one['bytes']} — {_ADVICE}"
                )
            layers.append(Rows(path))
        return ServedTable(config, layers)


def file_of(key: str) -> str:
    """The file of a version, by its SHA-256."""
    return f"{key[:32]}.json"


def _inside(folder: Path, name: str) -> Path:
    if not _FILE.fullmatch(name):
        raise FormatError(f"{folder}: a file outside of the folder — received {name!r} — {_ADVICE}")
    return folder / name


def _read(folder: Path, entry: Mapping[str, Any]) -> memoryview:
    """A small file, whole, as it was written; mapped, so that it stays when a later version takes
    it away.
    """
    path = _inside(folder, entry["file"])
    with open(path, "rb") as file:
        data = memoryview(b"")
        with contextlib.suppress(ValueError):  # an empty file cannot be mapped
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if len(data) != entry["bytes"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise FormatError(
            f"{path}: torn or changed since it was written — its length or SHA-256 differs — "
            f"{_ADVICE}"
        )
    return data
