# SPDX-License-Identifier: Apache-2.0
"""Attempts that fail are spaced by pauses that double up to a limit."""

from __future__ import annotations

from hotbed.serving.stores.backoff import Backoff


def test_backoff_doubles_its_pauses_up_to_the_longest() -> None:
    backoff = Backoff(1, 8)
    attempts = []
    for now in range(40):
        if backoff.is_due(now):
            attempts.append(now)
            backoff.failed(now)
    assert attempts == [0, 1, 3, 7, 15, 23, 31, 39]


def test_backoff_starts_anew_after_a_success() -> None:
    backoff = Backoff(0.5, 8)
    assert backoff.is_due(10)
    assert not backoff.is_pausing
    backoff.failed(10)
    backoff.failed(11)
    assert backoff.is_pausing
    assert not backoff.is_due(11.9)
    backoff.reset()
    assert not backoff.is_pausing
    assert backoff.is_due(11)
    backoff.failed(11)
    assert backoff.is_due(11.5)
