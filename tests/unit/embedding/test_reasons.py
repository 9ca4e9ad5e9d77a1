# SPDX-License-Identifier: Apache-2.0
"""Each evicted row is counted by its reason, in the table and in its states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hotbed as hb
from hotbed.embedding.table import REASONS
from hotbed.persist.state.digest import content_digest
from hotbed.training.decisions.eviction_schedule import EvictionSchedule

pytestmark = pytest.mark.core

SECOND = 1_000_000


def reasons(table: hb.Table) -> dict[str, int]:
    counts = {key: count for key, count in table.stats.items() if key.startswith("evicted_")}
    assert sum(counts.values()) == table.stats["evicted"]
    return {key.removeprefix("evicted_"): count for key, count in counts.items() if count}


def used_table() -> hb.Table:
    """40 ids that came at second 0, of which each fourth was removed in one of four ways."""
    policies = hb.Ttl(seconds=10), hb.Lru(max_rows=1024)
    table = hb.Table("user", dim=2, evict=policies)
    table.find_or_insert(range(40), [0] * 40)
    assert table.remove(range(10)) == 10
    table.evict(20 * SECOND, partitions=range(0))  # absent from here on, and swept later
    table.find_or_insert(range(10, 25), [20 * SECOND] * 15)
    assert table.sweep() == 15
    return table


def test_rows_are_counted_as_removed_restarted_and_expired() -> None:
    assert reasons(used_table()) == {"removed": 10, "restarted": 15, "expired": 15}


def test_rows_that_make_room_are_counted_as_over_the_cap() -> None:
    table = hb.Table("user", dim=2, evict=hb.Lru(max_rows=1024))
    for start in range(0, 8000, 100):
        table.find_or_insert(range(start, start + 100), [start] * 100)
    assert reasons(table) == {"over_cap": table.stats["admitted"] - table.stats["rows"]}


def test_a_batch_that_is_refused_evicts_nothing() -> None:
    table = used_table()
    before = reasons(table)
    with pytest.raises(hb.errors.TableFull):
        table.find_or_insert(range(50_000), [21 * SECOND] * 50_000)  # more than the cap
    assert reasons(table) == before


def test_a_state_holds_the_reasons_outside_of_what_its_digest_covers() -> None:
    table = used_table()
    scalars: dict[str, Any] = table.scalars()
    assert scalars["evicted_by"] == {"expired": 15, "over_cap": 0, "removed": 10, "restarted": 15}
    other = used_table()
    other.load_scalars({**scalars, "evicted_by": dict.fromkeys(REASONS, 10)})
    assert reasons(other) == dict.fromkeys(REASONS, 10)
    assert content_digest({"user": table}) == content_digest({"user": other})
    other.load_scalars({**scalars, "evicted": 41})
    assert content_digest({"user": table}) != content_digest({"user": other})


def test_a_state_of_before_has_unknown_reasons_to_which_new_ones_are_added() -> None:
    table = used_table()
    scalars = table.scalars()
    del scalars["evicted_by"]
    table.load_scalars(scalars)
    assert reasons(table) == {"unknown": 40}
    table.remove(np.arange(10, 13))
    assert reasons(table) == {"unknown": 40, "removed": 3}
    assert table.scalars()["evicted"] == 43


def test_progress_of_an_eviction_holds_no_reasons_since_its_digest_covers_it() -> None:
    schedule = EvictionSchedule({"user": used_table()}, step_interval=1)
    schedule.step(1, 20 * SECOND)
    counters = [counter for _, counter in schedule.state()["statistics"]["names"]]
    assert counters == ["rows", "admitted", "refused", "evicted", "sketched_partitions"]
