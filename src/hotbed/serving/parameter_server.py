# SPDX-License-Identifier: Apache-2.0
"""Own the tables of several models and versions, mapped into memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import ConfigError, FormatError, PersistError, StoreError
from hotbed.files import SharedLock, Where, local_path
from hotbed.frozen import IdArray, RowArray, RowDtype
from hotbed.memory import return_free_memory
from hotbed.persist.container.format import Reader, open_checkpoint
from hotbed.serving.stores.base import RowStore
from hotbed.serving.stores.held import HeldVersions
from hotbed.serving.stores.locking import TemporaryFolder
from hotbed.serving.stores.mapped import MappedVersion, ModelFolder, damage_of, damaged_files
from hotbed.serving.stores.opening import open_row_store
from hotbed.serving.stores.successors import check_grows
from hotbed.serving.stores.writing import make_newest, tidy, write_served

log = logging.getLogger("hotbed.serving")
_TEMPORARY = "hotbed-rows-"
# versions of a model that can be read: the newest, and the one that running requests began with
_KEPT = 2


class ParameterServer(RowStore):
    """Load exported models and return rows by id. A loaded version never changes.

    Args:
        folder: folder of the version files, which processes map and share. One process loads; any
            number of others may read what `model` finds there, at once and after a restart. None
            makes a temporary folder.
        dtype: type of the rows: float32, float16 or int8 (one scale a row).

    Attributes:
        held: the versions that rules name, beside the newest ones.

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
        self.held = HeldVersions(self.folder)
        self._dtype = dtype
        self._lock = threading.Lock()
        self._changing = dict[str, threading.RLock]()  # by model: one may wait for its source
        self._versions = dict[str, tuple[MappedVersion, ...]]()
        self._loaded = set[str]()
        # by model: the key of the version that was written or checked last, and its damaged files
        self._checked = dict[str, tuple[str, set[str]]]()
        self._folder_lock: SharedLock | None = None

    @staticmethod
    def connect(url: str, token: str | None = None, trusted: str | Path | None = None) -> RowStore:
        """Connect to a `hotbed parameter-server` in another process. Needs the extra `serve`.

        Args:
            url: grpc://HOST:PORT, or grpcs:// for TLS.
            token: the token, where the server requires one.
            trusted: a PEM file of certificate authorities for TLS, instead of those of the system.

        Raises:
            ConfigError: `url` is not an address, or `trusted` cannot be read.

        Example: `hb.ParameterServer.connect("grpc://rows:8002").model("ranker")`
        """
        return open_row_store(url, token, trusted)

    def load(
        self,
        name: str,
        source: Where | Reader,
        accept: Callable[[MappedVersion], object] | None = None,
    ) -> MappedVersion:
        """Load the newest version under `source` as model `name`.

        Requests use the version before until the new one is ready. An exported model contains its
        graph. States that a trainer publishes later contain rows and weights for that graph; of a
        delta only the changes are written. If the folder already holds versions followed from the
        same state, the first load of the process resumes with the newest of them. All loads but
        those of a Reader, and the first one, `check` the files that the folder holds, and write
        damaged ones anew.

        A Reader brings the next version of the model. A version with other inputs or outputs is
        rejected, and so is an earlier one. To load such a version, unload the model first.

        Args:
            name: name of the model.
            source: a path, or a Reader from a `Follower`.
            accept: called with the new version before it becomes the newest. If it raises, the
                version before stays, and the error is raised.

        Raises:
            ConfigError: the state does not fit the model.
            FormatError: a file of the source is bad.
            PersistError: a Reader went back to an earlier version, the folder cannot be written,
                or another process writes it.
        """
        reader = source if isinstance(source, Reader) else open_checkpoint(source)
        with self._change(name), self._writing(name):
            folder = ModelFolder(self.folder, name)
            before = self.find(name)
            try:
                if before is not None and isinstance(source, Reader):
                    check_grows(before, reader)
                if not isinstance(source, Reader):
                    self.check(name)
                damaged = self.damaged(name)
                if before is not None and self._resumes(name, reader, before) and not damaged:
                    newest = before
                else:
                    follows = isinstance(source, Reader) or reader.manifest.graph is None
                    origin = before.spec["origin"] if before and follows else None
                    key = write_served(folder, reader, before, self._dtype, origin, damaged)
                    newest = folder.open(key)
                    if accept:
                        accept(newest)
                    make_newest(folder, newest.key)
            except BaseException:
                if before is not None:  # the files of this attempt would fill the disk
                    self._tidy(name)
                raise
            self._keep(newest)
            self._loaded.add(name)
            self._checked[name] = (newest.key, set())
            self._tidy(name)
        return_free_memory()  # writing a version takes many times the memory that it keeps
        return newest

    def obtain(
        self,
        name: str,
        number: int,
        sources: Sequence[Where],
        accept: Callable[[MappedVersion], object],
    ) -> MappedVersion:
        """Return the version of this number, and hold it until the next rule is in force.

        It is written if the folder does not hold it; the newest version stays the newest.

        Args:
            name: name of the model.
            number: of the version.
            sources: where its state may lie.
            accept: called with a version that was written. If it raises, so does this.

        Raises:
            PersistError: no source has the version; the message lists those that there are.
            ConfigError: the state is one of another model.
            FormatError: a file of the source is bad.
        """
        version = self._known(name, number)
        if version is None:
            with self._change(name), self._writing(name):
                try:
                    version = self._known(name, number)
                    if version is None:
                        version = self._write(name, self._find(name, number, sources))
                        accept(version)
                    self.held.claim(name, version)
                    self._tidy(name)
                except BaseException:
                    self._tidy(name)
                    raise
            return_free_memory()
        return version

    def _known(self, name: str, number: int) -> MappedVersion | None:
        """Return the version of this number that the folder holds, claimed; None for none.

        A version with damaged files does not count.
        """
        newest = self.find(name)
        newest_first = [] if newest is None else [newest]
        key, damaged = self._checked.get(name, ("", set()))
        is_damaged = set(self.held.damaged(name)) | ({key} if damaged else set())
        for version in (*newest_first, *self._versions.get(name, ())[::-1], *self.held.whole(name)):
            if version.version == number and version.key not in is_damaged:
                self.held.claim(name, version)  # from here on no load removes its files
                if all((version.folder / file).exists() for file in version.files()):
                    return version
        return None

    def _find(self, name: str, number: int, sources: Sequence[Where]) -> Reader:
        """Return the state of this number at the first source that has it."""
        reasons = []
        for source in sources:
            try:
                return open_checkpoint(source, number)
            except PersistError as error:
                reasons.append(str(error))
        versions = (*self._versions.get(name, ()), *self.held.whole(name))
        numbers = ", ".join(map(str, sorted({version.version for version in versions})))
        raise PersistError(
            f"model {name!r}: there is no version {number}, got {numbers or 'none'} in the served "
            f"folder. {' '.join(reasons)}"
        )

    def _write(self, name: str, reader: Reader) -> MappedVersion:
        """Write a state as a version beside the newest one, or anew where it has damaged files."""
        folder = ModelFolder(self.folder, name)
        before = self.find(name)
        damaged: Collection[str] = ()
        for key, names in self.held.damaged(name).items():
            version = self.held.open(name, key)
            if version.digest == reader.manifest.digest:
                before = version
                damaged = names
        origin = None if before is None else before.spec["origin"]
        return folder.open(write_served(folder, reader, before, self._dtype, origin, damaged))

    def _tidy(self, name: str) -> None:
        """Remove the files of versions that nothing needs."""
        try:
            versions = [*self._versions.get(name, ()), *self.held.all(name)]
        except FormatError as error:  # its files could be mended
            log.warning("%s", error)
            return
        tidy(ModelFolder(self.folder, name), versions)

    def check(self, name: str, is_wanted: Callable[[], bool] = lambda: True) -> set[str]:
        """Read all files of the newest version, and return the names of the damaged ones.

        They are logged, and the next load writes them anew. The versions of the rule of the model
        are read, too; their damage is recorded in `held`.

        Args:
            name: name of the model; a model that is not loaded has no damaged files.
            is_wanted: asked before each piece of a file; False ends the check.
        """
        newest = self.find(name)
        versions = [] if newest is None else [newest]
        versions += self.held.whole(name)
        damaged = damaged_files(versions, is_wanted)
        self.held.note_damage(name, damaged)
        for file in sorted(damaged):
            log.warning("%s", damage_of(ModelFolder(self.folder, name).path / file))
        newest = self.find(name)
        if newest is None:
            return set()
        damaged &= newest.files()  # a load may have removed files of the one before
        self._checked[name] = (newest.key, damaged)
        return damaged

    def damaged(self, name: str) -> set[str]:
        """Return the names of the damaged files of the newest version, as the last check found.

        A version that this process neither wrote nor checked is checked first.
        """
        version = self.find(name)
        key, damaged = self._checked.get(name, ("", set()))
        if version is None or version.key == key:
            return damaged
        return self.check(name)

    def unload(self, name: str) -> None:
        """Unload a model. Versions in use stay valid, and the files stay for the next `load`."""
        with self._change(name), self._writing(name):
            self.model(name)
            ModelFolder(self.folder, name).forget()
            self._loaded.discard(name)
            self._checked.pop(name, None)
            del self._versions[name]

    def model(self, name: str) -> MappedVersion:
        """Return the newest version, whichever process loaded it.

        Raises ConfigError where the model is not loaded, FormatError where its file is torn.
        """
        versions = self._versions.get(name)
        if versions is not None and name in self._loaded:
            return versions[-1]
        folder = ModelFolder(self.folder, name)
        pointer = folder.pointer()
        if pointer is None:
            names = sorted(self._versions) or "no model"
            raise ConfigError(f"model {name!r}: not loaded, got {names}. Load it.")
        if versions is not None and versions[-1].key == pointer:
            return versions[-1]
        with self._change(name):
            return self._take(name, folder)

    def find(self, name: str) -> MappedVersion | None:
        """Return the newest version; None where the model is not loaded or its file is torn."""
        try:
            return self.model(name)
        except ConfigError:
            return None
        except FormatError as error:
            log.warning("%s", error)
            return None

    def version(self, name: str, digest: str) -> MappedVersion:
        """Return the newest version, the one before it, or one of a rule, by digest.

        Raises StoreError for any other version.
        """
        newest = self.model(name)
        rule = self.held.rule(name)
        of_rules = (*rule.versions.values(), *rule.before.values())
        for version in (newest, *self._versions.get(name, ()), *of_rules):
            if version.digest == digest:
                return version
        raise StoreError(
            f"model {name!r}: version {digest[:12]} is no longer available, the newest is "
            f"{newest.digest[:12]}. Use the newest."
        )

    def changes(self, name: str, since: str, to: str) -> Mapping[str, IdArray] | None:
        version = self.version(name, to)
        return version.changed(since)

    def hot(self, name: str, table: str, n: int) -> IdArray:
        version = self.model(name)
        return version.hot(table, n)

    def lookup(self, model: str, table: str, ids: Any) -> tuple[RowArray, NDArray[np.bool_]]:
        """Return the rows of ids, int64 [n] -> float32 [n, dim], and which ids have one, bool [n].

        Raises RowShapeError for anything but whole numbers, as `Table.find` does.
        """
        version = self.model(model)
        return version.table(table).find(ids)

    def _change(self, name: str) -> AbstractContextManager[bool]:
        """Hold the lock of a model in this object."""
        with self._lock:
            return self._changing.setdefault(name, threading.RLock())

    def _writing(self, name: str) -> AbstractContextManager[bool]:
        """Hold the lock of the folder of a model."""
        self._folder_lock = SharedLock.of(self.folder)
        return self._folder_lock.busy(name)

    def _resumes(self, name: str, reader: Reader, before: MappedVersion) -> bool:
        """Return whether `before` is the state of `reader`, or was followed from it before."""
        if name in self._loaded or before.spec["dtype"] != self._dtype:
            return False
        return reader.manifest.digest in (before.digest, before.spec["origin"])

    def _take(self, name: str, folder: ModelFolder) -> MappedVersion:
        newest = folder.newest()
        if newest is None:
            raise ConfigError(f"model {name!r}: not loaded, got an unload meanwhile. Load it.")
        self._keep(newest)
        return newest

    def _keep(self, newest: MappedVersion) -> None:
        versions = list[MappedVersion]()
        for version in self._versions.get(newest.name, ()):
            if version.digest != newest.digest:
                versions.append(version)
        versions.append(newest)
        self._versions[newest.name] = tuple(versions[-_KEPT:])
