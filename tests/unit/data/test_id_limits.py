# SPDX-License-Identifier: Apache-2.0
"""Ids beyond what was declared are counted, and said once."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from hotbed.data.bad_rows import IdLimits, LimitCheck
from hotbed.data.batch import Batch, Ids


def batch(*lists: list[int], one_hot: tuple[int, ...] = (0, 0)) -> Batch:
    offsets = np.cumsum([0, *map(len, lists)])
    ids = {
        "one": Ids(np.array(one_hot)),
        "many": Ids(np.array([key for keys in lists for key in keys], np.int64), offsets),
    }
    return Batch(ids=ids, dense={}, labels={}, num_samples=len(offsets) - 1)


LIMITS = {"one": IdLimits(0, 10, 1), "many": IdLimits(100, 50, 2)}


def test_what_is_within_the_limits_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    check = LimitCheck(LIMITS)
    inside = batch([100, 149], [], one_hot=(0, 9))
    assert check(inside) is inside
    check(batch([], []))
    assert (check.outside, check.too_long) == ({}, {})
    assert not caplog.records


def test_excess_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    check = LimitCheck(LIMITS)
    with caplog.at_level(logging.WARNING):
        check(batch([100], [101]))
        check(batch([99, 100, 150], [101, 102], one_hot=(10, -1)))
        check(batch([100, 101, 102], [103, 104, 105, 160], one_hot=(3, 10)))
    assert check.outside == {"one": 3, "many": 3}
    assert check.too_long == {"many": 3}
    assert [record.getMessage().partition(". ")[0] for record in caplog.records] == [
        "column 'one': 2 ids of a batch lie outside of 0 to 9, which were declared, such as 10",
        "column 'many': 2 ids of a batch lie outside of 100 to 149, which were declared, such as "
        "99",
        "column 'many': 1 samples of a batch have more ids than 2, which was declared, the longest "
        "3",
    ]


def test_counts_are_those_of_a_loop() -> None:
    random = np.random.default_rng(0)
    check = LimitCheck(LIMITS)
    outside = too_long = 0
    for _ in range(20):
        lists = [random.integers(95, 155, random.integers(0, 4)).tolist() for _ in range(8)]
        check(batch(*lists, one_hot=(1,) * 8))
        outside += sum(not 100 <= key < 150 for keys in lists for key in keys)
        too_long += sum(len(keys) > 2 for keys in lists)
    assert check.outside == {"many": outside}
    assert check.too_long == {"many": too_long}
