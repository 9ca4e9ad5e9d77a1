# SPDX-License-Identifier: Apache-2.0
"""A cache changes how long a score takes, never the score; what it costs is bounded, in bytes and
in seconds.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hotbed as hb
from hotbed.config import describe
from hotbed.errors import ConfigError, NotServed, RowShapeError, StoreError
from hotbed.persist.publish import Follower
from hotbed.serving import cache as caching
from hotbed.serving.cache import Policy
from hotbed.testing import FakeStore

from .conftest import Trainer, draw, wait_for

TINY = 2_000  # bytes: fewer rows than one request asks for


def store_of(*tables: hb.Table) -> FakeStore:
    return FakeStore({table.name: dict[str, Any](describe(table.config)) for table in tables})


def one_table(rows: dict[int, list[float]], **keywords: Any) -> FakeStore:
    store = store_of(hb.Table("t", 2, **keywords))
    store.publish({"t": rows})
    return store


def look(lookup: Any, *ids: int) -> tuple[list[list[float]], int]:
    """Rows of ids, and how many were late."""
    found = lookup({"x": hb.Ids(np.array(ids, np.int64))}, len(ids))
    return found.flat.tolist(), found.late


FEATURES = [("x", "t", "sum")]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("max_bytes", [TINY, 1 << 20])
@pytest.mark.parametrize("preload", [0.0, 1.0])
def test_cached_scores_equal_those_without_a_cache(
    exported: Path, session: hb.InferenceSession, policy: Policy, max_bytes: int, preload: float
) -> None:
    server = hb.ParameterServer()
    version = server.load("m", exported)
    cache = hb.EmbeddingCache(server, "m", max_bytes, policy, preload, deadline_seconds=60)
    cached = hb.InferenceSession(version, cache)
    asked = [
        {**draw(n, seed), "user": np.arange(seed, seed + n)}
        for seed, n in enumerate([1, 40, 200, 40, 3])
    ]
    expected = [session.predict(one) for one in asked]
    for _ in range(3):
        for one, scores in zip(asked, expected, strict=True):
            assert (cached.predict(one) == scores).all()
    with ThreadPoolExecutor(4) as pool:
        for number, scores in enumerate(pool.map(cached.predict, asked * 10)):
            assert (scores == expected[number % len(asked)]).all()
    assert 0 < cache.num_bytes <= max_bytes
    assert cache.hits > 0


def test_context_of_one_sample_holds_for_all_candidates(
    exported: Path, session: hb.InferenceSession
) -> None:
    server = hb.ParameterServer()
    cached = hb.InferenceSession(
        server.load("m", exported), hb.EmbeddingCache(server, "m", deadline_seconds=60)
    )
    columns = draw(20, 3)
    context = {"user": 7, "genres": "g1|g2"}
    rest = {name: values for name, values in columns.items() if name not in context}
    expected = session.predict(rest, context)
    assert (cached.predict(rest, context) == expected).all()
    assert (cached.predict(rest, context) == expected).all()


def test_a_delta_drops_the_rows_that_it_changed_and_no_others(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.publish(1, full=True)
    server, follower = hb.ParameterServer(tmp_path / "rows"), Follower(tmp_path / "published")
    server.load("m", tmp_path / "export")
    sessions: dict[int, hb.InferenceSession] = {}
    plain: dict[int, Any] = {}
    cache: Any = None
    for seed in (2, 3, 4):
        for reader in follower.poll():
            version = server.load("m", reader)
            cache = cache or hb.EmbeddingCache(server, "m", preload=0.0, deadline_seconds=60)
            sessions[version.version] = hb.InferenceSession(version, cache)
            plain[version.version] = hb.InferenceSession(version).predict(trainer.asked)
            for number, one in sessions.items():  # those before read past the cache
                assert (one.predict(trainer.asked) == plain[number]).all()
            assert np.abs(plain[version.version] - trainer.scores[version.version]).max() < 1e-6
        before, hits = cache.num_rows, cache.hits
        trainer.publish(seed)
        (reader,) = follower.poll()
        version = server.load("m", reader)
        changes = server.changes(
            "m", max(sessions.values(), key=lambda s: s.model.version).model.digest, version.digest
        )
        assert changes is not None
        sessions[version.version] = hb.InferenceSession(version, cache)
        plain[version.version] = hb.InferenceSession(version).predict(trainer.asked)
        assert before - sum(map(len, changes.values())) <= cache.num_rows < before
        assert (sessions[version.version].predict(trainer.asked) == plain[version.version]).all()
        assert cache.hits > hits or cache.num_rows == 0


def test_newest_version_of_the_store_is_cached_whatever_its_number() -> None:
    store = one_table({1: [1.0, 2.0]})
    store.publish({"t": {1: [3.0, 4.0]}})
    cache = hb.EmbeddingCache(store, "fake", 1 << 16, deadline_seconds=60)
    look(cache.lookup(store.versions[1], FEATURES), 1)
    store.asked.clear()
    again = store.versions.pop(0)
    store.versions.append(again)  # a run that began anew
    store.changes = lambda *_: None
    lookup = cache.lookup(again, FEATURES)
    assert look(lookup, 1) == look(lookup, 1) == ([[1.0, 2.0]], 0)
    assert store.asked == [{"t": [1]}]
    assert look(cache.lookup(store.versions[0], FEATURES), 1) == ([[3.0, 4.0]], 0)


def test_version_with_other_tables_starts_an_empty_cache() -> None:
    store = one_table({1: [1.0, 2.0]})
    cache = hb.EmbeddingCache(store, "fake", 1 << 16, deadline_seconds=60)
    old = cache.lookup(store.versions[0], FEATURES)
    store.configs = {
        "t": dict(describe(hb.Table("t", 3).config)),
        "u": dict(describe(hb.Table("u", 1).config)),
    }
    store.publish({"t": {1: [5.0, 6.0, 7.0]}, "u": {}})
    new = cache.lookup(store.versions[1], FEATURES)
    for _ in range(2):
        assert look(new, 1) == ([[5.0, 6.0, 7.0]], 0)
        assert look(old, 1) == ([[1.0, 2.0]], 0)
        assert look(cache.lookup(store.versions[0], FEATURES), 1) == ([[1.0, 2.0]], 0)


def test_all_misses_of_a_request_are_fetched_at_once_and_each_id_once() -> None:
    store = store_of(hb.Table("t", 2), hb.Table("u", 1))
    version = store.publish({"t": {1: [1.0, 2.0]}, "u": {5: [5.0]}})
    lookup = hb.EmbeddingCache(store, "fake", deadline_seconds=60).lookup(
        version, [("x", "t", "sum"), ("y", "u", "mean"), ("z", "t", "max")]
    )
    ids = {
        "x": hb.Ids(np.array([1, 1, 2])),
        "y": hb.Ids(np.array([5, 5, 5])),
        "z": hb.Ids(np.array([2, 3, 1])),
    }
    lookup(ids, 3)
    lookup(ids, 3)
    assert store.asked == [{"t": [1, 2, 3], "u": [5]}]


def test_late_row_reads_as_unknown_is_counted_and_not_cached() -> None:
    for keywords in ({"admit": hb.MinCount(2), "default": 0.5}, {"init": hb.Uniform(0.3)}):
        store = one_table({1: [1.0, 2.0], 2: [3.0, 4.0]}, **keywords)
        absent = hb.Table("t", 2, **keywords).lookup(np.array([2, 9])).tolist()
        cache = hb.EmbeddingCache(store, "fake")
        lookup = cache.lookup(store.versions[0], FEATURES)
        assert look(lookup, 1) == ([[1.0, 2.0]], 0)
        store.silent = True
        assert look(lookup, 1, 2, 9, 2) == ([[1.0, 2.0], absent[0], absent[1], absent[0]], 2)
        assert look(lookup, 1) == ([[1.0, 2.0]], 0)  # what is there needs no store
        assert (cache.late, cache.num_rows) == (2, 1)


def test_lookups_of_a_request_wait_for_one_deadline_together() -> None:
    """That of the request, from when it was asked: also in a queue, and over several lookups."""
    store = store_of(hb.Table("t", 2), hb.Table("u", 1))
    version = store.publish({"t": {1: [1.0, 2.0]}, "u": {5: [5.0]}})
    cache = hb.EmbeddingCache(store, "fake", deadline_seconds=10.0)
    lookups = [
        cache.lookup(version, [("x", "t", "sum")]),
        cache.lookup(version, [("x", "u", "sum")]),
    ]
    ids = {"x": hb.Ids(np.array([1, 5]))}
    seconds = list[float]()

    def silent(wanted: Any, allowed: float) -> Any:
        seconds.append(allowed)
        raise StoreError("nothing arrives")

    object.__setattr__(version, "find", silent)
    asked = time.monotonic() - 4.0
    assert [lookup(ids, 2, asked).late for lookup in lookups] == [2, 2]
    assert len(seconds) == 1  # the second lookup knows that the store is silent
    assert 0.0 < seconds[0] <= 6.0


def test_request_that_waited_for_the_deadline_waits_for_no_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(caching.threading, "Thread", AtOnce)
    store = one_table({1: [1.0, 2.0]})
    cache = hb.EmbeddingCache(store, "fake", deadline_seconds=0.1)
    lookup = cache.lookup(store.versions[0], FEATURES)
    ids = {"x": hb.Ids(np.array([1]))}
    assert lookup(ids, 1, time.monotonic() - 1.0).late == 1
    assert lookup(ids, 1).late == 0  # the row came for the requests after it


class AtOnce(threading.Thread):
    """A thread that runs where it is started."""

    def start(self) -> None:
        self.run()


def test_silent_store_is_retried_with_growing_pauses_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(caching.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(caching.threading, "Thread", AtOnce)
    store = one_table({1: [1.0, 2.0]})
    lookup = hb.EmbeddingCache(store, "fake").lookup(store.versions[0], FEATURES)
    store.silent = True
    asked = []
    for _ in range(2000):  # ten seconds
        assert look(lookup, 1)[1] == 1
        if len(store.asked) > len(asked):
            asked.append(now[0])
        now[0] += 0.005
    pauses = np.diff(asked)
    assert pauses[0] == pytest.approx(caching.FIRST_PAUSE, abs=0.011)
    assert (np.diff(pauses) > -0.011).all()
    assert pauses.max() == pytest.approx(caching.LONGEST_PAUSE, abs=0.011)
    store.silent = False
    now[0] += caching.LONGEST_PAUSE
    assert look(lookup, 1)[1] == 1  # it asks, and does not wait
    assert look(lookup, 1) == ([[1.0, 2.0]], 0)
    assert look(lookup, 7)[1] == 0


def test_slow_store_fills_an_empty_cache() -> None:
    store = one_table({one: [float(one), 0.0] for one in range(40)})
    cache = hb.EmbeddingCache(store, "fake", deadline_seconds=0.05)
    lookup = cache.lookup(store.versions[0], FEATURES)
    find, entered, leave = store.versions[0].find, threading.Event(), threading.Event()

    def slow(wanted: Any, seconds: float | None = None) -> Any:
        if len(wanted["t"]) > 10 and seconds is not None and seconds < 1:
            raise StoreError("too late")
        if len(wanted["t"]) > 10:
            entered.set()
            assert leave.wait(20)
        return find(wanted, seconds)

    object.__setattr__(store.versions[0], "find", slow)
    assert look(lookup, *range(30))[1] == 30
    while not entered.wait(0.02):
        assert look(lookup, *range(30))[1] == 30
    for _ in range(20):  # one asks at a time, and nobody waits for it
        assert look(lookup, *range(30, 40))[1] == 10
    assert cache.fetches == 2
    leave.set()
    wait_for(lambda: look(lookup, *range(40))[1] == 0, "the cache stays empty")
    assert look(lookup, *range(40)) == ([[float(one), 0.0] for one in range(40)], 0)


def test_failures_of_simultaneous_requests_count_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = one_table({})
    lookup = hb.EmbeddingCache(store, "fake").lookup(store.versions[0], FEATURES)
    store.silent = True
    together = threading.Barrier(8)
    find = store.versions[0].find

    def slow(wanted: Any, seconds: float | None = None) -> Any:
        together.wait(20)
        return find(wanted, seconds)

    object.__setattr__(store.versions[0], "find", slow)
    with ThreadPoolExecutor(8) as pool:
        assert all(one[1] == 1 for one in pool.map(lambda id: look(lookup, id), range(8)))
    assert lookup._retries._backoff._pause == caching.FIRST_PAUSE


def test_failure_of_a_dropped_version_does_not_delay_the_next() -> None:
    store = one_table({1: [1.0, 2.0]})
    cache = hb.EmbeddingCache(store, "fake", preload=0.0, deadline_seconds=60)
    before = cache.lookup(store.versions[0], FEATURES)

    def find(wanted: Any, seconds: float | None = None) -> Any:
        raise StoreError("version 1 has gone")

    object.__setattr__(store.versions[0], "find", find)
    after = cache.lookup(store.publish({"t": {1: [3.0, 4.0], 2: [5.0, 6.0]}}), FEATURES)
    assert look(before, 1)[1] == 1
    assert look(after, 1) == ([[3.0, 4.0]], 0)
    assert look(before, 1)[1] == 1
    assert look(after, 2) == ([[5.0, 6.0]], 0)


def test_store_that_lacks_the_model_after_its_start_is_late(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = one_table({1: [1.0, 2.0]})
    lookup = hb.EmbeddingCache(store, "fake").lookup(store.versions[0], FEATURES)

    def find(wanted: Any, seconds: float | None = None) -> Any:
        raise NotServed("model 'fake': not loaded")

    object.__setattr__(store.versions[0], "find", find)
    assert [look(lookup, 1)[1] for _ in range(3)] == [1, 1, 1]
    assert "read as default" in caplog.text  # once an outage, not once a request
    assert len(caplog.records) == 1


def test_requests_without_a_deadline_raise_errors_of_the_store() -> None:
    store = one_table({1: [1.0, 2.0]})
    cache = hb.EmbeddingCache(store, "fake", deadline_seconds=None)
    lookup = cache.lookup(store.versions[0], FEATURES)
    store.silent = True
    with pytest.raises(StoreError):
        look(lookup, 1)
    store.silent = False
    assert look(lookup, 1) == ([[1.0, 2.0]], 0)
    assert cache.late == 0


def test_preload_takes_the_rows_that_training_counted_most() -> None:
    store = one_table({one: [float(one), 0.0] for one in range(1000)})
    store.hottest = {"t": list(range(999, -1, -1))}
    cache = hb.EmbeddingCache(store, "fake", 40 * 100, preload=0.5, deadline_seconds=60)
    assert 15 <= cache.num_rows <= 50
    store.asked.clear()
    lookup = cache.lookup(store.versions[0], FEATURES)
    hottest = list(range(999, 999 - cache.num_rows, -1))
    assert look(lookup, *hottest) == ([[float(one), 0.0] for one in hottest], 0)
    assert store.asked == []
    assert cache.hit_rate == 1.0
    empty = hb.EmbeddingCache(store, "fake", 40 * 100, preload=0.0, deadline_seconds=60)
    assert (empty.num_rows, empty.hit_rate) == (0, 0.0)


def test_store_that_is_silent_at_the_start_costs_only_the_hot_rows() -> None:
    store = one_table({1: [1.0, 2.0]})
    store.hottest, store.silent = {"t": [1]}, True
    cache = hb.EmbeddingCache(store, "fake", deadline_seconds=60)
    store.silent = False
    assert look(cache.lookup(store.versions[0], FEATURES), 1) == ([[1.0, 2.0]], 0)


def test_cache_counts_hits_misses_and_fetches() -> None:
    store = one_table({1: [1.0, 2.0]})
    cache = hb.EmbeddingCache(store, "fake", deadline_seconds=60)
    lookup = cache.lookup(store.versions[0], FEATURES)
    look(lookup, 1, 2, 2)
    look(lookup, 1, 2, 3, 3)
    assert (cache.hits, cache.misses, cache.late, cache.num_rows, cache.fetches) == (2, 3, 0, 3, 2)
    assert cache.hit_rate == 0.4
    assert cache.fetch_seconds > 0


@pytest.mark.parametrize(
    ("keywords", "name"),
    [
        ({"policy": "fifo"}, "policy"),
        ({"preload": 1.5}, "preload"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"max_bytes": 100}, "max_bytes"),
    ],
)
def test_invalid_value_is_rejected_by_name(keywords: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^EmbeddingCache\.{name}: .*, got .*\. "):
        hb.EmbeddingCache(one_table({}), "fake", **keywords)


def test_ids_that_do_not_fit_are_rejected_by_feature() -> None:
    store = one_table({})
    lookup = hb.EmbeddingCache(store, "fake").lookup(store.versions[0], FEATURES)
    with pytest.raises(RowShapeError, match="'x'"):
        lookup({"x": hb.Ids(np.array([1, 2]))}, 3)
