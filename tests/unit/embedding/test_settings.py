# SPDX-License-Identifier: Apache-2.0
"""Settings of a table that may change while it is in use."""

from __future__ import annotations

import copy

import pytest

import hotbed as hb
from hotbed.errors import ConfigError


def test_a_changed_count_admits_from_then_on_and_is_saved() -> None:
    table = hb.Table("user", dim=2, admit=hb.MinCount(3))
    assert table.find_or_insert([1, 1]).tolist() == [-1, -1]
    assert "min_count" not in table.scalars()
    table.set_min_count(2)
    assert table.find([1]).tolist() == [-1]
    assert table.find_or_insert([1, 2]).tolist() == [0, -1]
    table.set_min_count(4)
    assert table.find_or_insert([1, 2, 2]).tolist() == [0, -1, -1]
    other = copy.deepcopy(table)
    assert other.min_count == 4
    assert other.scalars() == table.scalars()
    assert other.find_or_insert([2]).tolist() != [-1]
    table.clear()
    assert table.find_or_insert([5, 5, 5]).tolist() == [-1, -1, -1]


@pytest.mark.parametrize("admit", [None, hb.MinCount(0), hb.MinCount(None), hb.Probability(0.5)])
def test_a_table_without_counts_takes_no_count(admit: hb.Admission | None) -> None:
    table = hb.Table("user", dim=2, admit=admit)
    assert table.min_count is None
    with pytest.raises(ConfigError, match="the table keeps no counts of ids without a row"):
        table.set_min_count(2)


def test_a_count_below_one_is_rejected() -> None:
    table = hb.Table("user", dim=2, admit=hb.MinCount(3))
    with pytest.raises(ConfigError, match=r"min_count: .* >= 1, got 0"):
        table.set_min_count(0)


def test_a_default_is_what_an_id_without_a_row_reads_as() -> None:
    table = hb.Table("user", dim=2, admit=hb.MinCount(2))
    table.set_default(0.5)
    assert table.lookup([1]).tolist() == [[0.5, 0.5]]
    assert table.gather([-1]).tolist() == [[0.5, 0.5]]
    assert hb.Table(**table.config).lookup([1]).tolist() == [[0.5, 0.5]]
    with pytest.raises(ConfigError, match="default"):
        table.set_default(float("nan"))
