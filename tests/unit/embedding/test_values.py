# SPDX-License-Identifier: Apache-2.0
"""Rules, policies and inits are values: equal when they say the same, and plain about what they
mean.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import hotbed as hb
from hotbed.embedding.hashing import name_hash, xxh64
from hotbed.embedding.policy import MIN_SKETCH_BYTES, evictions
from hotbed.embedding.rule import Rule

pytestmark = pytest.mark.core

RULES = [kind for kind in Rule.__subclasses__() if kind.__module__ == Rule.__module__]


@pytest.mark.parametrize(
    "value", [hb.Adam(lr=0.1), hb.MinCount(3), hb.Ttl(days=1), hb.Uniform(0.1), hb.Ram()], ids=repr
)
def test_values_are_equal_hashable_and_frozen(value: Any) -> None:
    assert dataclasses.replace(value) == value
    assert len({value, dataclasses.replace(value)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.lr = 1


@pytest.mark.parametrize(
    "ttl, microseconds",
    [
        (hb.Ttl(), None),
        (hb.Ttl(seconds=-1), None),
        (hb.Ttl(seconds=0), 0),
        (hb.Ttl(seconds=1.5), 1_500_000),
        (hb.Ttl(hours=2), 7_200_000_000),
        (hb.Ttl(days=30), 2_592_000_000_000),
    ],
    ids=repr,
)
def test_a_ttl_is_a_number_of_microseconds(ttl: hb.Ttl, microseconds: int | None) -> None:
    assert ttl.microseconds == microseconds
    assert ttl.is_on == (microseconds is not None)


def test_max_rows_are_shared_out_over_the_partitions() -> None:
    assert [hb.Lru(n).rows_a_partition for n in (1024, 1025, 1280, 2**20)] == [4, 5, 5, 4096]
    assert hb.Lru(None).rows_a_partition is None
    assert hb.Lfu(-1).rows_a_partition is None


def test_a_sketch_takes_the_largest_power_of_two_that_fits() -> None:
    assert [
        hb.MinCount(3, sketch_bytes=n).sketch_width
        for n in (MIN_SKETCH_BYTES, 2 * MIN_SKETCH_BYTES - 1)
    ] == [16, 16]
    assert hb.Probability(0.5, sketch_bytes=1 << 20).sketch_width == 256
    assert hb.MinCount(3).sketch_width == 0


def test_thresholds_that_are_off_are_none_and_minus_one() -> None:
    assert [hb.MinCount(n).is_on for n in (None, -1, 0, 1)] == [False, False, True, True]
    assert [hb.Probability(p).is_on for p in (None, -1, 0.0, 1.0)] == [False, False, True, True]


def test_evict_takes_one_policy_or_several() -> None:
    assert evictions(None) == ()
    assert evictions(hb.Ttl(days=1)) == (hb.Ttl(days=1),)
    assert evictions([hb.Lru(1024), hb.Ttl(days=1)]) == (hb.Lru(1024), hb.Ttl(days=1))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_says_how_wide_its_state_is_and_how_it_starts(rule: Any) -> None:
    width = rule().state_width(6)
    assert width == {"Sgd": 0, "RowwiseAdagrad": 1, "Adam": 12, "Ftrl": 12}.get(rule.__name__, 6)
    assert rule().initial_state(6).shape == (width,)
    assert hb.Table("user", dim=6, rule=rule()).state_width == width


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_new_row_of_the_native_core_starts_with_the_state_of_the_rule(rule: Any) -> None:
    names = {field.name for field in dataclasses.fields(rule)}
    options = {"initial_accumulator": 0.5} if "initial_accumulator" in names else {}
    value = rule(**options)
    table = hb.Table("user", dim=3, rule=value)
    table.find_or_insert(np.array([7]))
    batch = next(table.export())
    state = batch.column("state").flatten().to_numpy() if value.state_width(3) else np.empty(0)
    assert state.tolist() == value.initial_state(3).tolist()


def test_a_rule_that_the_native_core_does_not_have_is_refused_by_name() -> None:
    class Lion(hb.Sgd):
        pass

    with pytest.raises(ValueError, match=r"rule: unknown name, got 'Lion'\. Use one of Sgd, "):
        hb.Table("user", dim=3, rule=Lion())


def test_a_reference_step_changes_nothing_it_was_given() -> None:
    for rule in RULES:
        value = rule(l2=0.1, clip=0.5)
        w, g = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
        s = np.tile(value.initial_state(3), (2, 1))
        given = w.copy(), s.copy(), g.copy()
        out = value.reference(w, s, g, step=1)
        assert out[0].dtype == np.float32
        assert all(np.array_equal(a, b) for a, b in zip((w, s, g), given, strict=True))


def test_the_names_hash_agrees_with_the_published_vectors() -> None:
    assert xxh64(b"") == 0xEF46DB3751D8E999
    assert xxh64(b"a") == 0xD24EC4F1A98C6E5B
    assert xxh64(b"abc") == 0x44BC2CF5AD770999
    assert name_hash("abc") == 0x44BC2CF5AD770999
