# SPDX-License-Identifier: Apache-2.0
"""Cache the rows that requests read often in bounded memory; fetch the others from a store."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Literal
from weakref import WeakValueDictionary

import numpy as np

from hotbed import _core, checks
from hotbed.errors import ConfigError, HotbedError, NotServed, RowShapeError, StoreError
from hotbed.frozen import IdArray, RowArray
from hotbed.serving.rows import (
    FeatureIds,
    FeatureSpec,
    LookupCall,
    LookupResult,
    ServedTable,
    native_layout,
)
from hotbed.serving.stores.backoff import Backoff
from hotbed.serving.stores.base import ModelVersion, RowStore

Policy = Literal["lru", "lfu"]
POLICIES: tuple[Policy, ...] = ("lru", "lfu")
FIRST_PAUSE = 0.1  # seconds before the first retry of a store that failed; doubled each time
LONGEST_PAUSE = 2.0
PATIENT_SECONDS = 2.0  # deadline of a retry, which runs in its own thread
_PRELOADED_ROWS = 65_536  # rows fetched by one call of the preload
_PAST = 2**64 - 1  # an epoch that no cache reaches: every row is missing, none is kept
_PAST_BYTES = 1 << 20
log = logging.getLogger("hotbed.serving")


class EmbeddingCache:
    """Cache rows of one model within `max_bytes`, index included. Safe to use from several threads.

    A score never depends on the content of the cache: the missing rows of a request are fetched
    together.

    The cache holds one version. Opening a newer version drops the rows that changed. Requests of
    any other version bypass the cache and read their own rows.

    Args:
        parameter_server: the store that the rows come from.
        model: name of the model in that store.
        max_bytes: limit of the memory for rows, their index and the counts of the policy.
        policy: which rows stay, over all tables together. "lru" keeps the rows that were read
            last, "lfu" those that are read often.
        preload: share of `max_bytes` that is filled with the rows that training counted most,
            where it counted. This happens at the start, and after a version whose changes are
            unknown.
        deadline_seconds: a row that the store does not return within this time reads like an id
            without a row, is not kept, and is counted in `late` and in the answer's `late`. From
            then on requests do not wait until the store has answered: it is retried in a thread
            of its own, after 0.1 s at first and after up to 2 s later. With None requests wait
            for as long as the store takes, and they raise its StoreError.

    Raises:
        ConfigError: a value is out of its bounds.
        NotServed, StoreError: as `parameter_server.model` raises them.

    Example:
        >>> cache = hb.EmbeddingCache(server, "ranker", max_bytes=1 << 30)
        >>> session = hb.InferenceSession(server.model("ranker"), cache)
        >>> session.predict({"item": [1, 2]}, context={"user": 7})
    """

    def __init__(
        self,
        parameter_server: RowStore,
        model: str,
        max_bytes: int = 256 << 20,
        policy: Policy = "lfu",
        preload: float = 0.5,
        deadline_seconds: float | None = 0.1,
    ) -> None:
        memory_bytes = _memory()
        advice = f"Give 1 to {memory_bytes}, the bytes that this machine has."
        checks.whole_number("EmbeddingCache.max_bytes", max_bytes, 1, memory_bytes, advice)
        checks.one_of("EmbeddingCache.policy", policy, POLICIES)
        checks.between("EmbeddingCache.preload", preload, 0, 1)
        advice = "Give more than 0, or None to wait without a limit."
        checks.above("EmbeddingCache.deadline_seconds", deadline_seconds, 0, advice)
        self.parameter_server = parameter_server
        self.model = model
        self._max_bytes = max_bytes
        self._policy = policy
        self._preload = preload
        self.deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._epoch = 0
        self._retries = WeakValueDictionary[str, _Retries]()  # by digest of a version
        self._late = 0
        self._fetches = 0
        self._fetch_seconds = 0.0
        self._earlier_hits = 0  # of caches with other tables
        self._earlier_misses = 0
        self._start(parameter_server.model(model))

    def lookup(self, version: ModelVersion, features: Sequence[FeatureSpec]) -> LookupCall:
        """Return the embedding half of `version` over this cache, called like a `Lookup`.

        A version newer than the cached one replaces it, without the rows that changed. If the
        cached version was mended, all rows are dropped.

        Args:
            version: the version to look rows up in.
            features: (name, table, pooling) of each feature.
        """
        with self._lock:
            if version.digest == self._version.digest:
                if version.mended > self._version.mended:  # rows of damaged files may be here
                    self._enter(version, None)
            elif self._is_newer(version):
                self._advance(version)
            retries = self._retries.setdefault(version.digest, _Retries(version))
            if version.digest == self._version.digest:
                return _CachedLookup(self, self._rows, version, features, retries, self._epoch)
            if _dims(version) == self._tables:
                rows = self._rows
            else:
                rows = _native(_dims(version), _PAST_BYTES, self._policy)
            return _CachedLookup(self, rows, version, features, retries, _PAST)

    @property
    def hits(self) -> int:
        """Return how many distinct ids of requests had their row in the cache."""
        return self._earlier_hits + self._rows.hits

    @property
    def misses(self) -> int:
        """Return how many distinct ids of requests did not have their row in the cache."""
        return self._earlier_misses + self._rows.misses

    @property
    def hit_rate(self) -> float:
        """Return the share of hits, 0 before the first request."""
        hits = self.hits
        misses = self.misses
        return hits / max(1, hits + misses)

    @property
    def late(self) -> int:
        """Return the number of misses whose row did not arrive within the deadline."""
        return self._late

    @property
    def num_rows(self) -> int:
        """Return the number of cached rows."""
        return self._rows.num_rows

    @property
    def num_bytes(self) -> int:
        """Return the bytes of rows, their index and the policy's counts; at most `max_bytes`."""
        return self._rows.num_bytes

    @property
    def fetches(self) -> int:
        """Return the number of calls of the store."""
        return self._fetches

    @property
    def fetch_seconds(self) -> float:
        """Return the sum of the seconds that requests waited for the store."""
        return self._fetch_seconds

    def _count(self, seconds: float | None, late: int = 0) -> None:
        with self._counting:
            self._late += late
            if seconds is not None:
                self._fetches += 1
                self._fetch_seconds += seconds

    # --- versions ---------------------------------------------------------------------------------

    def _start(self, version: ModelVersion) -> None:
        """Begin an empty cache for the tables of `version`."""
        self._tables = _dims(version)
        self._rows = _native(self._tables, self._max_bytes, self._policy)
        self._enter(version, None)

    def _is_newer(self, version: ModelVersion) -> bool:
        """Return whether `version` has a higher number or is the store's current version.

        A run that started anew counts versions from the start, so the number alone is not enough.
        """
        if version.version > self._version.version:
            return True
        try:
            return self.parameter_server.model(self.model).digest == version.digest
        except (StoreError, NotServed):
            return False

    def _advance(self, version: ModelVersion) -> None:
        if self._tables != _dims(version):
            self._earlier_hits = self.hits
            self._earlier_misses = self.misses
            self._start(version)
            return
        try:
            changes = self.parameter_server.changes(
                self.model, self._version.digest, version.digest
            )
        except StoreError as error:
            log.warning(
                "model %s: the changes of version %s are unknown, all cached rows are dropped: %s",
                self.model,
                version.version,
                error,
            )
            changes = None
        self._enter(version, changes)

    def _enter(self, version: ModelVersion, changes: Mapping[str, IdArray] | None) -> None:
        self._epoch += 1
        no_ids = np.empty(0, np.int64)
        changed = [
            np.ascontiguousarray((changes or {}).get(name, no_ids), np.int64)
            for name in self._tables
        ]
        self._rows.advance(self._epoch, changed, all=changes is None)
        self._version = version
        if changes is None:
            self._fill(version)

    def _fill(self, version: ModelVersion) -> None:
        """Preload hot rows, an equal share of bytes a table; unused bytes go to later tables."""
        bytes_left = self._preload * self._max_bytes
        try:
            for number, name in enumerate(self._tables):
                row_bytes = self._rows.row_bytes(number)
                num_rows = int(bytes_left / (len(self._tables) - number) / row_bytes)
                if not num_rows:
                    continue
                hot = self.parameter_server.hot(self.model, name, num_rows)
                bytes_left -= len(hot) * row_bytes
                # the hottest rows last: the rows that entered first are evicted first
                for end in range(len(hot), 0, -_PRELOADED_ROWS):
                    ids = np.ascontiguousarray(hot[max(0, end - _PRELOADED_ROWS) : end][::-1])
                    rows = _flat(version.find({name: ids})[name])
                    self._rows.preload(self._epoch, number, ids, rows)
        except (StoreError, NotServed) as error:
            log.warning("model %s: the cache starts with fewer hot rows: %s", self.model, error)


class _CachedLookup:
    """Look rows of one version up through a cache."""

    def __init__(
        self,
        cache: EmbeddingCache,
        rows: _core.RowCache,
        version: ModelVersion,
        features: Sequence[FeatureSpec],
        retries: _Retries,
        epoch: int,
    ) -> None:
        self._cache = cache
        self._version = version
        self._retries = retries
        self._names = list(_dims(version))
        layout = native_layout(features, self._names)
        self._rows = rows
        self._epoch = epoch
        self._native = _core.CachedLookup(rows, layout, epoch)
        self._absent = {name: ServedTable(version.configs[name], ()) for _, name, _ in features}

    def __call__(
        self, ids: FeatureIds, num_samples: int, asked: float | None = None
    ) -> LookupResult:
        """Return the embeddings of ids.

        Missing rows may arrive until the deadline after `asked`, a `time.monotonic()`; None = now.
        """
        try:
            lookup = self._native(ids, num_samples)
        except ValueError as error:
            raise RowShapeError(f"{error}. Encode the batch with the same schema.") from error
        if isinstance(lookup, tuple):  # all rows were there, already pooled
            return LookupResult(*lookup)
        missing = {self._names[table]: table_ids for table, table_ids in lookup.missing()}
        rows = self._fetch(missing, time.monotonic() if asked is None else asked)
        if rows is not None:
            return LookupResult(*lookup.pool([_flat(rows[name]) for name in missing], keep=True))
        late = sum(map(len, missing.values()))
        self._cache._count(None, late)
        absent = [
            _flat(self._absent[name].find(table_ids)[0]) for name, table_ids in missing.items()
        ]
        flat, sequences = lookup.pool(absent, keep=False)
        return LookupResult(flat, sequences, late)

    def _fetch(self, missing: Mapping[str, IdArray], asked: float) -> Mapping[str, RowArray] | None:
        """Return the rows of the missing ids, None where they are late."""
        deadline = self._cache.deadline_seconds
        began = time.monotonic()
        seconds = None if deadline is None else asked + deadline - began
        if deadline is not None and (self._retries.is_needed or asked + deadline <= began):
            if self._retries.starts(began):
                threading.Thread(
                    target=self._retry, args=(missing, deadline), daemon=True, name="hotbed-cache"
                ).start()
            return None
        try:
            rows = self._version.find(missing, seconds)
        except (StoreError, NotServed) as error:  # NotServed: the store has just started, say
            if deadline is None:
                raise
            self._retries.failed(began, error)
            return None
        finally:
            self._cache._count(time.monotonic() - began)
        self._retries.answered()
        return rows

    def _retry(self, missing: Mapping[str, IdArray], deadline: float) -> None:
        """Fetch rows outside of any request, with more time than a request has.

        A store that is too slow for an empty cache would otherwise leave the cache empty.
        """
        began = time.monotonic()
        self._cache._count(0.0)
        try:
            rows = self._version.find(missing, max(deadline, PATIENT_SECONDS))
            for name, ids in missing.items():
                self._rows.preload(self._epoch, self._names.index(name), ids, _flat(rows[name]))
            self._retries.answered()
        except HotbedError as error:
            self._retries.failed(began, error)
        finally:
            self._retries.ended()


class _Retries:
    """Decide when a store that failed for a version is called again: one call at a time.

    Each version has its own instance, which all of its lookups share: when the store has dropped a
    version, that says nothing about the next one, which is known only because the store answered.
    """

    def __init__(self, version: ModelVersion) -> None:
        self._version = version
        self._lock = threading.Lock()
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        self._is_running = False
        self._last_failure = 0.0

    @property
    def is_needed(self) -> bool:
        """Whether the last call failed; requests then do not wait for missing rows."""
        return self._backoff.is_pausing

    def starts(self, now: float) -> bool:
        """Return whether it is time for a retry; if so, the caller calls `ended` after it."""
        with self._lock:
            if self._is_running or not self._backoff.is_due(now):
                return False
            self._is_running = True
            return True

    def ended(self) -> None:
        with self._lock:
            self._is_running = False

    def failed(self, began: float, error: HotbedError) -> None:
        """Record a failure of a call that started at `began`.

        Calls that started before the last failure was recorded count as the same failure.
        """
        version = self._version
        with self._lock:
            if began < self._last_failure:
                return
            if not self._backoff.is_pausing:
                log.warning(
                    "model %s, version %s: rows that are missing read as default: %s",
                    version.name,
                    version.version,
                    error,
                )
            self._last_failure = time.monotonic()
            self._backoff.failed(self._last_failure)

    def answered(self) -> None:
        if not self._backoff.is_pausing:
            return
        with self._lock:
            self._backoff.reset()
        log.info(
            "model %s, version %s: the store answers again",
            self._version.name,
            self._version.version,
        )


def _native(dims: Mapping[str, int], max_bytes: int, policy: Policy) -> _core.RowCache:
    try:
        return _core.RowCache(list(dims.values()), max_bytes, policy)
    except ValueError as error:
        raise ConfigError(
            f"EmbeddingCache.max_bytes: too small for one row, got {max_bytes} for tables of dim "
            f"{sorted(set(dims.values()))}. Give more bytes."
        ) from error


def _memory() -> int:
    """Return the bytes of memory of this machine, as far as the system reports them."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize


def _dims(version: ModelVersion) -> dict[str, int]:
    return {name: int(version.configs[name]["dim"]) for name in sorted(version.configs)}


def _flat(rows: RowArray) -> RowArray:
    return np.ascontiguousarray(rows, np.float32).reshape(-1)
