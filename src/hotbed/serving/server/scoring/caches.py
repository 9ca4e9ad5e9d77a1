# SPDX-License-Identifier: Apache-2.0
"""The caches of a model whose rows a parameter server has: one for each version that answers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hotbed.frozen import IdArray
from hotbed.serving.cache import EmbeddingCache
from hotbed.serving.stores.base import ModelVersion, RowStore

_COUNTS = ("hits", "misses", "late", "fetches", "fetch_seconds")


class ModelCaches:
    """The caches of a model: one follows the newest version, the others hold one of the rule each.

    A cache holds the rows of one version: two versions in one cache would drive each other out.

    Args:
        store: the parameter server.
        name: name of the model there.
        settings: keywords of each `EmbeddingCache`.
    """

    def __init__(self, store: RowStore, name: str, settings: Mapping[str, Any]) -> None:
        self._store = store
        self._name = name
        self._settings = settings
        self._newest: EmbeddingCache | None = None
        self._fixed = dict[str, EmbeddingCache]()  # by key
        self._lock = threading.Lock()
        self._earlier = Counter[str]()  # counts of caches whose versions the rule named before

    def newest(self) -> EmbeddingCache:
        """Return the cache that follows the newest version."""
        with self._lock:
            if self._newest is None:
                store = _NewestOf(self._store)
                self._newest = EmbeddingCache(store, self._name, **self._settings)
            return self._newest

    def of(self, key: str, version: ModelVersion) -> EmbeddingCache:
        """Return the cache of a version of the rule."""
        with self._lock:
            if key not in self._fixed:
                store = _OneVersion(self._store, version)
                self._fixed[key] = EmbeddingCache(store, self._name, **self._settings)
            return self._fixed[key]

    def keep(self, keys: Collection[str]) -> None:
        """Drop the caches of versions with other keys; their counts stay."""
        with self._lock:
            for key in self._fixed.keys() - set(keys):
                cache = self._fixed.pop(key)
                for name in _COUNTS:
                    self._earlier[name] += getattr(cache, name)

    def status(self) -> dict[str, float]:
        """Return the counts of all of them together, as `EmbeddingCache` has them."""
        counts: dict[str, float] = {name: self._earlier[name] for name in _COUNTS}
        counts |= {"rows": 0, "bytes": 0}
        for cache in self._all():
            for name in _COUNTS:
                counts[name] += getattr(cache, name)
            counts["rows"] += cache.num_rows
            counts["bytes"] += cache.num_bytes
        return counts

    def _all(self) -> Iterator[EmbeddingCache]:
        if self._newest is not None:
            yield self._newest
        yield from list(self._fixed.values())


class _NewestOf(RowStore):
    """The newest versions of a store, also where its rule pins another one."""

    def __init__(self, store: RowStore) -> None:
        self._store = store

    def model(self, name: str) -> ModelVersion:
        version, _ = self._store.routed(name)
        return version

    def changes(self, name: str, since: str, to: str) -> Mapping[str, IdArray] | None:
        return self._store.changes(name, since, to)

    def hot(self, name: str, table: str, n: int) -> IdArray:
        return self._store.hot(name, table, n)


class _OneVersion(RowStore):
    """One version of a store."""

    def __init__(self, store: RowStore, version: ModelVersion) -> None:
        self._store = store
        self._version = version

    def model(self, name: str) -> ModelVersion:
        return self._version

    def changes(self, name: str, since: str, to: str) -> Mapping[str, IdArray] | None:
        return None

    def hot(self, name: str, table: str, n: int) -> IdArray:
        return self._store.hot(name, table, n)
