# SPDX-License-Identifier: Apache-2.0
"""The schedule of learning rates is HugeCTR's, step by step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch absent")

from hotbed.compat.hugectr.model import LearningRateScheduler
from hotbed.errors import ConfigError


def rate_by_hand(
    step: int, base: float, warmup: int, start: int, steps: int, power: float, end: float
) -> float:
    """The four cases of HugeCTR's documentation, for step 1, 2, …"""
    if step <= warmup:
        return step * base / warmup
    if start == 0:
        return base
    if step <= start:
        return base
    if step <= start + steps:
        return max(end, base * ((start + steps - step) / steps) ** power)
    return end


@given(
    base=st.floats(1e-3, 30.0),
    warmup=st.integers(0, 12),
    start=st.integers(0, 20),
    steps=st.integers(1, 12),
    power=st.sampled_from([1.0, 2.0, 3.5]),
    end=st.sampled_from([0.0, 1e-4, 0.05]),
)
def test_every_step_has_the_rate_of_the_formula(
    base: float, warmup: int, start: int, steps: int, power: float, end: float
) -> None:
    scheduler = LearningRateScheduler(base, warmup, start, steps, power, end)
    assert scheduler.get_lr() == 0.0
    for step in range(1, 50):
        wanted = rate_by_hand(step, base, warmup, start, steps, power, end)
        assert scheduler.get_next() == pytest.approx(wanted, rel=1e-12, abs=1e-15)
        assert scheduler.get_step() == step
        assert scheduler.get_lr() == scheduler.at(step)


def test_a_power_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learning_rate\.decay_power"):
        LearningRateScheduler(0.1, decay_power=0.5)
