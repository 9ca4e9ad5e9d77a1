# SPDX-License-Identifier: Apache-2.0
"""ParameterServer: owns the tables of several models and versions, mapped into memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import ConfigError, FormatError, StoreError
from hotbed.files import Where, local_path
from hotbed.persist.format import Reader, open_checkpoint
from hotbed.serving.rows import RowDtype, return_free_memory
from hotbed.serving.stores.base import Store
from hotbed.serving.stores.mapped import MappedVersion, ModelFolder
from hotbed.serving.stores.writing import TemporaryFolder, Writer, make_newest, tidy, write_version

if TYPE_CHECKING:
    from hotbed.serving.stores.remote import RemoteParameterServer

log = logging.getLogger("hotbed.serving")
_TEMPORARY = "hotbed-rows-"
# versions of a model that are answered for: the newest, and what requests under way began with
_KEPT = 2


class ParameterServer(Store):
    """Loads exported models and gives rows by id; a version that is loaded never changes.

    `folder`: where versions are kept as files that processes map and share. One process loads; any
    number may read what `model` finds there, at once and after a restart. None: a temporary folder.
    `dtype`: float32, float16 or int8 (one scale a row).

    Example:
        >>> server = hb.ParameterServer("rows")
        >>> server.load("ranker", "exported")
        >>> rows, found = server.lookup("ranker", "user", [7, 8])
    """

    def __init__(self, folder: str | Path | None = None, dtype: RowDtype = "float32") -> None:
        if folder is None:
            self._temporary = TemporaryFolder(_TEMPORARY)
            folder = self._temporary.path
        self.folder = local_path(folder, "ParameterServer.folder")
        self._dtype = dtype
        self._lock = threading.RLock()
        self._versions = dict[str, tuple[MappedVersion, ...]]()
        self._loaded = set[str]()
        self._writer: Writer | None = None

    @staticmethod
    def connect(
        url: str, token: str | None = None, trusted: str | Path | None = None
    ) -> RemoteParameterServer:
        """One that runs elsewhere, as `hotbed parameter-server`; see `RemoteParameterServer`. Needs
        the extra `serve`.

        Example: `hb.ParameterServer.connect("grpc://rows:8002").model("ranker")`
        """
        from hotbed.serving.stores.remote import RemoteParameterServer

        return RemoteParameterServer(url, token, trusted)

    def load(
        self,
        name: str,
        source: Where | Reader,
        accept: Callable[[MappedVersion], object] | None = None,
    ) -> MappedVersion:
        """Load the newest version under `source` as model `name`; requests see the version before
        until it is ready.

        An exported model brings its graph. What a trainer publishes later (a path, or a Reader from
        a `Follower`) brings rows and weights for it; of a delta only what changed is written. At a
        start, a folder that holds what was followed from that very state on goes on from there.
        Raises ConfigError for what does not fit, FormatError for bad files, PersistError where the
        folder cannot be written or another process writes it, and what `accept` raises, which is
        asked about it before it is the newest; the version before stays.
        """
        reader = source if isinstance(source, Reader) else open_checkpoint(source)
        with self._lock, self._writing():
            folder = ModelFolder(self.folder, name)
            before = self.find(name)
            try:
                if before is not None and self._goes_on(name, reader, before):
                    newest = before
                else:
                    follows = isinstance(source, Reader) or not reader.manifest.get("graph")
                    origin = before.spec["origin"] if before and follows else None
                    newest = folder.open(write_version(folder, reader, before, self._dtype, origin))
                    if accept:
                        accept(newest)
                    make_newest(folder, newest.key)
            except BaseException:
                if before is not None:  # what this left would take the room of the next try
                    tidy(folder, list(self._versions[name]))
                raise
            self._keep(newest)
            self._loaded.add(name)
            tidy(folder, list(self._versions[name]))
        return_free_memory()
        return newest

    def unload(self, name: str) -> None:
        """Forget a model; who still holds a version keeps it. Its files stay for the next `load`."""
        with self._lock, self._writing():
            self.model(name)
            ModelFolder(self.folder, name).forget()
            self._loaded.discard(name)
            del self._versions[name]

    def model(self, name: str) -> MappedVersion:
        """The newest version, whichever process loaded it. Raises ConfigError where there is none,
        FormatError where it is torn.
        """
        found = self._versions.get(name)
        if found is not None and name in self._loaded:
            return found[-1]
        folder = ModelFolder(self.folder, name)
        pointer = folder.pointer()
        if pointer is None:
            known = sorted(self._versions) or "no model"
            raise ConfigError(f"model {name!r}: not loaded — received {known} — load it")
        if found is not None and found[-1].key == pointer:
            return found[-1]
        with self._lock:
            return self._take(name, folder)

    def find(self, name: str) -> MappedVersion | None:
        """The newest version, or None where there is none; a torn one is as good as none."""
        try:
            return self.model(name)
        except ConfigError:
            return None
        except FormatError as error:
            log.warning("%s", error)
            return None

    def version(self, name: str, digest: str) -> MappedVersion:
        """A version by its digest: the newest, or the one before. Raises StoreError where it has
        gone.
        """
        newest = self.model(name)
        for one in (newest, *self._versions.get(name, ())):
            if one.digest == digest:
                return one
        raise StoreError(
            f"model {name!r}: version {digest[:12]} has gone — received it while "
            f"{newest.digest[:12]} is the newest — "
            "take that one"
        )

    def changes(self, name: str, since: str, to: str) -> Mapping[str, NDArray[np.int64]] | None:
        return self.version(name, to).changed(since)

    def hot(self, name: str, table: str, n: int) -> NDArray[np.int64]:
        return self.model(name).hot(table, n)

    def lookup(
        self, model: str, table: str, ids: Any
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Rows of ids, int64 [n] -> float32 [n, dim], and whether each has one.

        Raises RowShapeError for anything but whole numbers, as `Table.find` does.
        """
        return self.model(model).table(table).find(ids)

    def _writing(self) -> AbstractContextManager[bool]:
        self._writer = Writer.of(self.folder)
        return self._writer.busy

    def _goes_on(self, name: str, reader: Reader, before: MappedVersion) -> bool:
        if name in self._loaded or before.spec["dtype"] != self._dtype:
            return False
        return bool(before.spec["origin"] == reader.manifest["digest"])

    def _take(self, name: str, folder: ModelFolder) -> MappedVersion:
        newest = folder.newest()
        if newest is None:
            raise ConfigError(
                f"model {name!r}: not loaded — received an unload meanwhile — load it"
            )
        self._keep(newest)
        return newest

    def _keep(self, newest: MappedVersion) -> None:
        kept = [one for one in self._versions.get(newest.name, ()) if one.digest != newest.digest]
        self._versions[newest.name] = (*kept[1 - _KEPT :], newest)
