# SPDX-License-Identifier: Apache-2.0
"""The promises of every table, as checks; a table of your own passes them too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.embedding.hashing import name_hash, partition
from hotbed.embedding.init import Uniform, Zeros
from hotbed.embedding.policy import Lru, MinCount, Ttl
from hotbed.embedding.rule import Adagrad, Adam, Sgd
from hotbed.errors import NonFiniteGradient, RowShapeError, TableError, TableFull

# A table, or anything with its verbs; `make_table(name, dim, **keywords of hb.Table)` builds a
# fresh one.
MakeTable = Callable[..., Any]
_IDS = np.array([-1, -2, 0, -(2**63), 2**63 - 1, 7], np.int64)


def _every_int64_is_an_ordinary_id(make_table: MakeTable) -> None:
    t = make_table("user", 3, rule=Sgd(lr=1.0))
    assert (t.find(_IDS) == -1).all()
    assert len(t) == 0
    first = t.lookup(_IDS)
    assert (first == Uniform(0.05).rows(0, name_hash("user"), _IDS, 3)).all()
    slots = t.find_or_insert(_IDS)
    assert len(t) == len(set(slots.tolist())) == len(_IDS)
    assert slots.min() >= 0
    t.update(slots[:1], np.ones((1, 3), np.float32))
    assert (t.gather(slots) == np.concatenate([first[:1] - np.float32(1), first[1:]])).all()


def _gradients_of_an_id_are_summed_before_the_rule(make_table: MakeTable) -> None:
    t = make_table("user", 2, rule=Adagrad(lr=1.0), init=Zeros())
    slots = t.find_or_insert(np.array([5, 9, 5], np.int64))
    t.update(slots, np.array([[1, 2], [3, 0], [3, -2]], np.float32))
    assert np.allclose(t.lookup(np.array([5, 9], np.int64)), [[-1, 0], [-1, 0]])


def _a_refused_id_has_no_row_and_no_gradient(make_table: MakeTable) -> None:
    t = make_table("user", 2, admit=MinCount(2), default=0.5)
    slots = t.find_or_insert(np.array([1, 2, 2], np.int64))
    assert slots[0] == -1
    assert slots[1] == slots[2] >= 0
    t.update(slots, np.ones((3, 2), np.float32))
    assert (t.gather(slots[:1]) == 0.5).all()
    assert (t.lookup(np.array([1], np.int64)) == 0.5).all()
    assert t.find_or_insert(np.array([1], np.int64))[0] >= 0


def _an_expired_row_is_absent_and_starts_anew(make_table: MakeTable) -> None:
    t = make_table("user", 2, rule=Sgd(lr=1.0), evict=Ttl(seconds=10))
    t.update(t.find_or_insert(_IDS, 0), np.ones((len(_IDS), 2), np.float32))
    t.find_or_insert(_IDS[:2], 1)
    assert t.evict(9_999_999) == 0
    assert t.evict(10_000_000) == len(_IDS) - 2 == len(_IDS) - len(t)
    assert (t.find(_IDS) >= 0).tolist() == [True, True] + [False] * (len(_IDS) - 2)
    slots = t.find_or_insert(_IDS[2:], 10_000_001)
    assert (t.gather(slots) == Uniform(0.05).rows(0, name_hash("user"), _IDS[2:], 2)).all()


def _empty_batches_are_batches(make_table: MakeTable) -> None:
    t = make_table("user", 4)
    none = np.zeros(0, np.int64)
    assert t.find(none).shape == t.find_or_insert(none).shape == (0,)
    assert t.lookup(none).shape == t.gather(none).shape == (0, 4)
    t.update(none, np.zeros((0, 4), np.float32))
    t.load([])
    assert len(t) == t.evict(5) == sum(b.num_rows for b in t.export()) == 0


def _a_load_restores_what_export_gave(make_table: MakeTable) -> None:
    t = make_table("user", 3, rule=Adam())
    other = make_table("user", 3, rule=Adam())
    ids = np.concatenate([_IDS, np.arange(100, 400)])
    t.update(t.find_or_insert(ids), np.ones((len(ids), 3), np.float32))
    rows = pa.Table.from_batches(t.export())
    keys = list(zip(rows["partition"].to_pylist(), rows["id"].to_pylist(), strict=True))
    assert keys == sorted(zip(partition(ids).tolist(), ids.tolist(), strict=True))
    other.load(t.export())
    assert pa.Table.from_batches(other.export()).equals(rows)
    assert (other.lookup(ids) == t.lookup(ids)).all()
    assert (
        pa.Table.from_batches(t.export([int(partition(ids)[0])]))["id"].to_pylist().count(-1) == 1
    )


def _a_failed_batch_changes_nothing(make_table: MakeTable) -> None:
    t = make_table("user", 2, evict=Lru(1024))
    slots = t.find_or_insert(_IDS)
    before = list(t.export())
    grads = np.ones((len(_IDS), 2), np.float32)
    grads[3, 1] = np.nan
    failures: tuple[tuple[type[Exception], Callable[[], Any]], ...] = (
        (NonFiniteGradient, lambda: t.update(slots, grads)),
        (TableFull, lambda: t.find_or_insert(np.arange(10_000))),
        (RowShapeError, lambda: t.update(slots, grads[:, :1])),
    )
    for error, fail in failures:
        try:
            fail()
        except error:
            assert list(t.export()) == before
        else:
            raise AssertionError(f"{error.__name__} was not raised")


def _a_frozen_table_keeps_its_rows(make_table: MakeTable) -> None:
    t = make_table("user", 2, rule=Adam(decay=0.1, scope="all"), evict=Ttl(seconds=1))
    t.update(t.find_or_insert(_IDS, 0), np.ones((len(_IDS), 2), np.float32))
    before = list(t.export())
    for frozen in ("rows", "all"):
        t.frozen = frozen
        assert (t.find_or_insert(np.array([7, 99]), 0) >= 0).tolist() == [True, False]
        try:
            t.update(t.find(_IDS), np.ones((len(_IDS), 2), np.float32))
        except TableError:
            assert list(t.export()) == before
        else:
            raise AssertionError("a frozen table took an update")
    assert t.evict(2_000_000) == 0
    t.frozen = "rows"
    assert t.evict(2_000_000) == len(_IDS)


TABLE_CHECKS: tuple[Callable[[MakeTable], None], ...] = (
    _every_int64_is_an_ordinary_id,
    _gradients_of_an_id_are_summed_before_the_rule,
    _a_refused_id_has_no_row_and_no_gradient,
    _an_expired_row_is_absent_and_starts_anew,
    _empty_batches_are_batches,
    _a_load_restores_what_export_gave,
    _a_failed_batch_changes_nothing,
    _a_frozen_table_keeps_its_rows,
)


def check_table(make_table: MakeTable) -> None:
    """Check the promises of every table; raises `AssertionError`.

    `make_table(name, dim, **keywords)` makes a table. Example: `check_table(hb.Table)`.
    """
    for check in TABLE_CHECKS:
        check(make_table)
