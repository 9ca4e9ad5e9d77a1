# SPDX-License-Identifier: Apache-2.0
"""The promises of every table, as checks; a table of your own passes them too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.embedding.hashing import name_hash, partition
from hotbed.embedding.init import Uniform, Zeros
from hotbed.embedding.policy import Lru, MinCount, Ttl
from hotbed.embedding.rule import Adagrad, Adam, Sgd
from hotbed.errors import NonFiniteGradient, RowShapeError, TableError, TableFull

MakeTable = Callable[..., Any]
"""Returns a new table, or an object with its methods: `make_table(name, dim, **keywords)`.

The keywords are those of `hb.Table`.
"""

_IDS = np.array([-1, -2, 0, -(2**63), 2**63 - 1, 7], np.int64)
_SECOND = 1_000_000  # times are in microseconds


def _initial_rows(ids: np.ndarray, dim: int) -> np.ndarray:
    """Return the initial rows of ids in a table "user" with the default `init`."""
    return Uniform(0.05).rows(0, name_hash("user"), ids, dim)


def _ones(num_rows: int, dim: int) -> np.ndarray:
    return np.ones((num_rows, dim), np.float32)


def _rows(table: Any) -> pa.Table:
    return pa.Table.from_batches(table.export())


def _every_int64_is_an_ordinary_id(make_table: MakeTable) -> None:
    table = make_table("user", 3, rule=Sgd(lr=1.0))
    assert (table.find(_IDS) == -1).all()
    assert len(table) == 0
    first = table.lookup(_IDS)
    assert (first == _initial_rows(_IDS, 3)).all()
    slots = table.find_or_insert(_IDS)
    assert len(table) == len(_IDS)
    assert len(set(slots.tolist())) == len(_IDS)
    assert slots.min() >= 0
    table.update(slots[:1], _ones(1, 3))
    expected = first.copy()
    expected[0] -= np.float32(1)
    assert (table.gather(slots) == expected).all()


def _gradients_of_an_id_are_summed_before_the_rule(make_table: MakeTable) -> None:
    table = make_table("user", 2, rule=Adagrad(lr=1.0), init=Zeros())
    slots = table.find_or_insert(np.array([5, 9, 5], np.int64))
    gradients = np.array([[1, 2], [3, 0], [3, -2]], np.float32)
    table.update(slots, gradients)
    rows = table.lookup(np.array([5, 9], np.int64))
    assert np.allclose(rows, [[-1, 0], [-1, 0]])


def _a_refused_id_has_no_row_and_no_gradient(make_table: MakeTable) -> None:
    table = make_table("user", 2, admit=MinCount(2), default=0.5)
    refused = np.array([1], np.int64)
    slots = table.find_or_insert(np.array([1, 2, 2], np.int64))
    assert slots[0] == -1
    assert slots[1] == slots[2]
    assert slots[1] >= 0
    table.update(slots, _ones(3, 2))
    assert (table.gather(slots[:1]) == 0.5).all()
    assert (table.lookup(refused) == 0.5).all()
    assert table.find_or_insert(refused)[0] >= 0


def _an_expired_row_is_absent_and_starts_anew(make_table: MakeTable) -> None:
    table = make_table("user", 2, rule=Sgd(lr=1.0), evict=Ttl(seconds=10))
    seen_again = _IDS[:2]
    expired = _IDS[2:]
    table.update(table.find_or_insert(_IDS, 0), _ones(len(_IDS), 2))
    table.find_or_insert(seen_again, 1)
    assert table.evict(10 * _SECOND - 1) == 0
    assert table.evict(10 * _SECOND) == len(expired)
    assert len(table) == len(seen_again)
    assert (table.find(seen_again) >= 0).all()
    assert (table.find(expired) == -1).all()
    slots = table.find_or_insert(expired, 10 * _SECOND + 1)
    assert (table.gather(slots) == _initial_rows(expired, 2)).all()


def _empty_batches_are_batches(make_table: MakeTable) -> None:
    table = make_table("user", 4)
    empty = np.zeros(0, np.int64)
    assert table.find(empty).shape == (0,)
    assert table.find_or_insert(empty).shape == (0,)
    assert table.lookup(empty).shape == (0, 4)
    assert table.gather(empty).shape == (0, 4)
    table.update(empty, _ones(0, 4))
    table.load([])
    assert len(table) == 0
    assert table.evict(5) == 0
    assert sum(batch.num_rows for batch in table.export()) == 0


def _a_load_restores_what_export_gave(make_table: MakeTable) -> None:
    table = make_table("user", 3, rule=Adam())
    other = make_table("user", 3, rule=Adam())
    ids = np.concatenate([_IDS, np.arange(100, 400)])
    table.update(table.find_or_insert(ids), _ones(len(ids), 3))
    rows = _rows(table)
    order = list(zip(rows["partition"].to_pylist(), rows["id"].to_pylist(), strict=True))
    partitions = partition(ids).tolist()
    assert order == sorted(zip(partitions, ids.tolist(), strict=True))

    other.load(table.export())
    assert _rows(other).equals(rows)
    assert (other.lookup(ids) == table.lookup(ids)).all()
    part = pa.Table.from_batches(table.export([partitions[0]]))
    assert part["id"].to_pylist().count(-1) == 1


def _a_failed_batch_changes_nothing(make_table: MakeTable) -> None:
    table = make_table("user", 2, evict=Lru(1024))
    slots = table.find_or_insert(_IDS)
    before = list(table.export())
    gradients = _ones(len(_IDS), 2)
    gradients[3, 1] = np.nan
    failures: tuple[tuple[type[Exception], Callable[[], Any]], ...] = (
        (NonFiniteGradient, lambda: table.update(slots, gradients)),
        (TableFull, lambda: table.find_or_insert(np.arange(10_000))),
        (RowShapeError, lambda: table.update(slots, gradients[:, :1])),
    )
    for error, fail in failures:
        _must_raise(error, fail)
        assert list(table.export()) == before


def _a_frozen_table_keeps_its_rows(make_table: MakeTable) -> None:
    table = make_table("user", 2, rule=Adam(decay=0.1, scope="all"), evict=Ttl(seconds=1))
    table.update(table.find_or_insert(_IDS, 0), _ones(len(_IDS), 2))
    before = list(table.export())
    for frozen in ("rows", "all"):
        table.frozen = frozen
        slots = table.find_or_insert(np.array([7, 99]), 0)
        assert (slots >= 0).tolist() == [True, False]
        slots = table.find(_IDS)
        _must_raise(TableError, functools.partial(table.update, slots, _ones(len(_IDS), 2)))
        assert list(table.export()) == before
    assert table.evict(2 * _SECOND) == 0
    table.frozen = "rows"
    assert table.evict(2 * _SECOND) == len(_IDS)


def _must_raise(error: type[Exception], fail: Callable[[], Any]) -> None:
    try:
        fail()
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")


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
"""What every table promises, one check each."""


def check_table(make_table: MakeTable) -> None:
    """Check what every table promises.

    Args:
        make_table: returns a new table: `make_table(name, dim, **keywords)`.

    Raises:
        AssertionError: a promise is broken.

    Example: `check_table(hb.Table)`
    """
    for check in TABLE_CHECKS:
        check(make_table)
