# SPDX-License-Identifier: Apache-2.0
"""EmbeddingCache: rows that requests ask for often, in bounded memory; the others come from a
store, within a deadline.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hotbed import _core
from hotbed.data.batch import Ids
from hotbed.embedding.table import POOLINGS
from hotbed.errors import ConfigError, HotbedError, NotServed, RowShapeError, StoreError
from hotbed.serving.rows import Looked, ServedTable
from hotbed.serving.stores.base import ModelVersion, Store

Policy = Literal["lru", "lfu"]
POLICIES: tuple[Policy, ...] = ("lru", "lfu")
FIRST_PAUSE = 0.1  # seconds until a store that did not answer is asked again; they double
LONGEST_PAUSE = 2.0
PATIENT_SECONDS = 2.0  # that it has then, beside requests
_PRELOADED_ROWS = 65_536  # asked for together
_PAST = 2**64 - 1  # an epoch that no cache comes to: everything is missing, nothing is kept
_PAST_BYTES = 1 << 20
log = logging.getLogger("hotbed.serving")


class EmbeddingCache:
    """Rows of one model within `max_bytes`, index included, for requests of any number of threads.

    A score never depends on what the cache holds: what is missing is fetched, all of a request at
    once. `policy`: what stays, of all tables together; "lru": what was asked for last, "lfu": what
    is asked for often. `preload`: share of `max_bytes` that is filled at the start, and after a
    version of which it cannot be told what changed, with the rows that training counted most, where
    it counted. `deadline_seconds`: a row that the store does not give within it reads as an id
    without a row does, is not kept, and is counted in `late` and in the answer's `late`. Then no
    request waits until the store has answered: it is asked beside them, after 0.1 s and then after
    up to 2 s. None: requests wait as long as it takes, and StoreError is theirs.

    The cache holds one version. Opening a newer one drops the rows that changed; requests of any
    other version read their own rows past the cache. Raises ConfigError for values that make no
    sense, and what `parameter_server.model` raises.

    Example:
        >>> cache = hb.EmbeddingCache(server, "ranker", max_bytes=1 << 30)
        >>> hb.InferenceSession(server.model("ranker"), cache).predict({"item": [1, 2]}, context={"user": 7})
    """

    def __init__(
        self,
        parameter_server: Store,
        model: str,
        max_bytes: int = 256 << 20,
        policy: Policy = "lfu",
        preload: float = 0.5,
        deadline_seconds: float | None = 0.1,
    ) -> None:
        if not isinstance(max_bytes, int) or not 0 < max_bytes <= _memory():
            raise ConfigError(
                f"EmbeddingCache.max_bytes: no size of a cache — received {max_bytes!r} — give 1 "
                f"to {_memory()} bytes, "
                "what this machine has"
            )
        if policy not in POLICIES:
            raise ConfigError(
                f"EmbeddingCache.policy: unknown — received {policy!r} — choose one of "
                f"{list(POLICIES)}"
            )
        if not 0 <= preload <= 1:
            raise ConfigError(
                f"EmbeddingCache.preload: no share — received {preload!r} — give one from 0 to 1"
            )
        if deadline_seconds is not None and deadline_seconds <= 0:
            raise ConfigError(
                f"EmbeddingCache.deadline_seconds: no time — received {deadline_seconds!r} — give "
                "more than 0, or "
                "None to wait as long as it takes"
            )
        self.parameter_server = parameter_server
        self.model = model
        self._max_bytes = max_bytes
        self._policy = policy
        self._preload = preload
        self.deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._epoch = 0
        self._late = 0
        self._fetches = 0
        self._fetch_seconds = 0.0
        self._gone = (0, 0)  # hits and misses of a cache of other tables
        self._start(parameter_server.model(model))

    def lookup(
        self, version: ModelVersion, features: Sequence[tuple[str, str, str]]
    ) -> Callable[[Mapping[str, Ids | NDArray[np.int64]], int], Looked]:
        """The embedding half of `version` over this cache: called as a `Lookup` is. `features`:
        (name,
            table, pooling).

        A version newer than the one held takes its place, without the rows that changed.
        """
        with self._lock:
            if version.digest != self._held.digest and self._is_newer(version):
                self._go_on(version)
            if version.digest == self._held.digest:
                return _CachedLookup(self, self._rows, version, features, self._epoch)
            past = (
                self._rows
                if _dims(version) == self._tables
                else _native(_dims(version), _PAST_BYTES, self._policy)
            )
            return _CachedLookup(self, past, version, features, _PAST)

    @property
    def hits(self) -> int:
        """Distinct ids of requests whose row was there."""
        return self._gone[0] + self._rows.hits

    @property
    def misses(self) -> int:
        """Distinct ids of requests whose row was not there."""
        return self._gone[1] + self._rows.misses

    @property
    def hit_rate(self) -> float:
        """Share of hits, 0 before the first request."""
        hits = self.hits
        misses = self.misses
        return hits / max(1, hits + misses)

    @property
    def late(self) -> int:
        """Misses whose row did not come within the deadline."""
        return self._late

    @property
    def num_rows(self) -> int:
        """Rows held."""
        return self._rows.num_rows

    @property
    def num_bytes(self) -> int:
        """Memory held, never above `max_bytes`: rows, their index, and what the policy counts."""
        return self._rows.num_bytes

    @property
    def fetches(self) -> int:
        """How often the store was asked."""
        return self._fetches

    @property
    def fetch_seconds(self) -> float:
        """Seconds that requests waited for the store, in sum."""
        return self._fetch_seconds

    def _count(self, seconds: float | None, late: int = 0) -> None:
        with self._counting:
            self._late += late
            if seconds is not None:
                self._fetches = self._fetches + 1
                self._fetch_seconds = self._fetch_seconds + seconds

    # --- versions ---------------------------------------------------------------------------------

    def _start(self, version: ModelVersion) -> None:
        """An empty cache for the tables of `version`."""
        self._tables = _dims(version)
        self._rows = _native(self._tables, self._max_bytes, self._policy)
        self._enter(version, None)

    def _is_newer(self, version: ModelVersion) -> bool:
        """By its number, or because the store says so: a run that began anew counts from the start."""
        if version.version > self._held.version:
            return True
        try:
            return self.parameter_server.model(self.model).digest == version.digest
        except (StoreError, NotServed):
            return False

    def _go_on(self, version: ModelVersion) -> None:
        if self._tables != _dims(version):
            self._gone = (self.hits, self.misses)
            self._start(version)
            return
        try:
            changes = self.parameter_server.changes(self.model, self._held.digest, version.digest)
        except StoreError as error:
            log.warning(
                "model %s: what version %s changed is not known, all rows go: %s",
                self.model,
                version.version,
                error,
            )
            changes = None
        self._enter(version, changes)

    def _enter(
        self, version: ModelVersion, changes: Mapping[str, NDArray[np.int64]] | None
    ) -> None:
        self._epoch += 1
        nothing = np.empty(0, np.int64)
        dropped = [
            np.ascontiguousarray((changes or {}).get(name, nothing), np.int64)
            for name in self._tables
        ]
        self._rows.advance(self._epoch, dropped, changes is None)
        self._held = version
        if changes is None:
            self._fill(version)

    def _fill(self, version: ModelVersion) -> None:
        """Hot rows, as many bytes of each table; what one does not need is left to those after it."""
        left = self._preload * self._max_bytes
        try:
            for number, name in enumerate(self._tables):
                row_bytes = self._rows.row_bytes(number)
                wanted = int(left / (len(self._tables) - number) / row_bytes)
                hot = (
                    self.parameter_server.hot(self.model, name, wanted)
                    if wanted
                    else np.empty(0, np.int64)
                )
                left -= len(hot) * row_bytes
                # the hottest last: what came first goes first
                for end in range(len(hot), 0, -_PRELOADED_ROWS):
                    ids = np.ascontiguousarray(hot[max(0, end - _PRELOADED_ROWS) : end][::-1])
                    self._rows.preload(
                        self._epoch, number, ids, _flat(version.find({name: ids})[name])
                    )
        except (StoreError, NotServed) as error:
            log.warning("model %s: the cache starts with fewer hot rows: %s", self.model, error)


class _CachedLookup:
    """A lookup of one version through a cache."""

    def __init__(
        self,
        cache: EmbeddingCache,
        rows: _core.RowCache,
        version: ModelVersion,
        features: Sequence[tuple[str, str, str]],
        epoch: int,
    ) -> None:
        self._cache = cache
        self._version = version
        self._patience = _Patience(version)
        self._names = list(_dims(version))
        layout = [
            (name, self._names.index(table), POOLINGS.index(pooling))
            for name, table, pooling in features
        ]
        self._rows = rows
        self._epoch = epoch
        self._native = _core.CachedLookup(rows, layout, epoch)
        self._absent = {name: ServedTable(version.configs[name], ()) for _, name, _ in features}

    def __call__(self, ids: Mapping[str, Ids | NDArray[np.int64]], num_samples: int) -> Looked:
        try:
            found = self._native(ids, num_samples)
        except ValueError as error:
            raise RowShapeError(f"{error} — encode the batch with the same schema") from error
        if isinstance(found, tuple):
            return Looked(*found)
        wanted = {self._names[table]: missing for table, missing in found.missing()}
        fetched = self._fetch(wanted)
        if fetched is not None:
            return Looked(*found.pool([_flat(fetched[name]) for name in wanted], True))
        late = sum(map(len, wanted.values()))
        self._cache._count(None, late)
        absent = [_flat(self._absent[name].find(missing)[0]) for name, missing in wanted.items()]
        flat, sequences = found.pool(absent, False)
        return Looked(flat, sequences, late)

    def _fetch(
        self, wanted: Mapping[str, NDArray[np.int64]]
    ) -> Mapping[str, NDArray[np.float32]] | None:
        """Rows of what is missing; None where they are late."""
        deadline = self._cache.deadline_seconds
        began = time.monotonic()
        if deadline is not None and self._patience.pausing:
            if self._patience.asks(began):
                threading.Thread(
                    target=self._ask_again,
                    args=(wanted, deadline),
                    daemon=True,
                    name="hotbed-cache",
                ).start()
            return None
        try:
            rows = self._version.find(wanted, deadline)
        except (StoreError, NotServed) as error:  # not served: a store that has just started, say
            if deadline is None:
                raise
            self._patience.failed(began, error)
            return None
        finally:
            self._cache._count(time.monotonic() - began)
        self._patience.answered()
        return rows

    def _ask_again(self, wanted: Mapping[str, NDArray[np.int64]], deadline: float) -> None:
        """Beside requests, with more time than they have: a store too slow for an empty cache would
        else leave it empty.
        """
        began = time.monotonic()
        self._cache._count(0.0)
        try:
            rows = self._version.find(wanted, max(deadline, PATIENT_SECONDS))
            for name, missing in wanted.items():
                self._rows.preload(self._epoch, self._names.index(name), missing, _flat(rows[name]))
            self._patience.answered()
        except HotbedError as error:
            self._patience.failed(began, error)
        finally:
            self._patience.ended()


class _Patience:
    """When a store that did not answer for a version is asked again: once at a time, after longer
    and
        longer pauses.

    Each version has its own: one that the store has let go of says nothing of the next, which is
        known because it answered.
    """

    def __init__(self, version: ModelVersion) -> None:
        self._version = version
        self._lock = threading.Lock()
        self._asking = False
        self._pause = self._until = self._failed = 0.0

    @property
    def pausing(self) -> bool:
        """Whether requests do without what they miss."""
        return self._pause > 0

    def asks(self, now: float) -> bool:
        """Whether it is time to ask again; then `ended` follows."""
        with self._lock:
            if now < self._until or self._asking:
                return False
            self._asking = True
            return True

    def ended(self) -> None:
        with self._lock:
            self._asking = False

    def failed(self, began: float, error: HotbedError) -> None:
        """`began`: when the store was asked; several that asked before it was known to fail are one
        failure.
        """
        with self._lock:
            if began < self._failed:
                return
            if not self._pause:
                version = self._version
                log.warning(
                    "model %s, version %s: rows that are missing read as default: %s",
                    version.name,
                    version.version,
                    error,
                )
            self._failed = time.monotonic()
            self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
            self._until = self._failed + self._pause

    def answered(self) -> None:
        if self._pause:
            with self._lock:
                self._pause = 0.0
            log.info(
                "model %s, version %s: rows come again", self._version.name, self._version.version
            )


def _native(dims: Mapping[str, int], max_bytes: int, policy: Policy) -> _core.RowCache:
    try:
        return _core.RowCache(list(dims.values()), max_bytes, policy == "lfu")
    except ValueError as error:
        raise ConfigError(
            f"EmbeddingCache.max_bytes: too few for one row — received {max_bytes} for tables of "
            "dim "
            f"{sorted(set(dims.values()))} — give more"
        ) from error


def _memory() -> int:
    """Bytes of memory of this machine, as far as it tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize


def _dims(version: ModelVersion) -> dict[str, int]:
    return {name: int(version.configs[name]["dim"]) for name in sorted(version.configs)}


def _flat(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.ascontiguousarray(rows, np.float32).reshape(-1)
