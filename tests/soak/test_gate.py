# SPDX-License-Identifier: Apache-2.0
"""A gate serves no bad version after planted faults, and holds at most one clean version in 100."""

from __future__ import annotations

from pathlib import Path

import planted_faults
import pytest
import torch

import hotbed as hb
from hotbed.errors import ConfigError

pytestmark = pytest.mark.soak
SEEDS = 10
"""Clean runs of each stream."""


@pytest.fixture(autouse=True)
def without_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no graph: no server follows."""
    torch.set_num_threads(1)

    def refuse(*_: object) -> None:
        raise ConfigError("export: a graph takes seconds")

    monkeypatch.setattr(hb.RecModel, "graph", refuse)


@pytest.mark.parametrize("name", planted_faults.STREAMS)
def test_no_bad_version_is_served_after_a_planted_fault(name: str, shared_data: Path) -> None:
    stream = planted_faults.STREAMS[name]
    rows = stream.read(shared_data)
    courses = {
        fault: planted_faults.train(stream, rows, 0, planted_faults.FAULTS[fault])
        for fault in planted_faults.FAULTS
    }
    served = {fault: course.bad_and_served for fault, course in courses.items()}
    assert not any(served.values()), served
    assert any(course.bad for course in courses.values()), "the faults do harm"


@pytest.mark.parametrize("name", planted_faults.STREAMS)
def test_at_most_one_clean_version_in_100_is_held(name: str, shared_data: Path) -> None:
    stream = planted_faults.STREAMS[name]
    rows = stream.read(shared_data)
    courses = [planted_faults.train(stream, rows, seed) for seed in range(SEEDS)]
    versions = sum(len(course.versions) for course in courses)
    assert sum(len(course.held) for course in courses) <= versions / 100
