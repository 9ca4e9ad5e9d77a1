# SPDX-License-Identifier: Apache-2.0
"""From when on the labels of a joined sample could be known, and the histories made by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hotbed as hb
from hotbed.testing import ReplayedHistory

WITHIN = 30
LATENESS = 5


def make_world(seed: int) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """Return impressions and clicks; clicks come late, twice or never, and some too late."""
    random = np.random.default_rng(seed)
    shown = []
    clicks = []
    for number in range(400):
        at = number // 2 + int(random.integers(-3, 1)) + 10
        shown.append({"id": number, "at": at, "user": number % 7, "item": number})
        for _ in range(int(random.integers(0, 3))):
            clicks.append({"id": number, "at": at + int(random.integers(0, 2 * WITHIN))})
    clicks.sort(key=lambda row: row["at"])
    return shown, clicks


def known_of(row: dict[str, int], clicks: list[dict[str, int]], *, waits: bool) -> tuple[int, int]:
    """Return whether an impression was clicked, and from when on that was known."""
    times = [each["at"] for each in clicks if each["id"] == row["id"]]
    times = [time for time in times if row["at"] <= time <= row["at"] + WITHIN]
    end = row["at"] + WITHIN + LATENESS
    return int(bool(times)), end if waits or not times else min(times)


@pytest.mark.parametrize("waits", [True, False])
def test_joined_samples_see_what_was_known_when_they_were_shown(waits: bool) -> None:
    shown, clicks = make_world(seed=waits)
    rule = hb.sources.Wait() if waits else hb.sources.AsTheyCome()
    joined = hb.sources.Join(
        hb.sources.Memory({name: [row[name] for row in shown] for name in shown[0]}),
        hb.sources.Memory({name: [row[name] for row in clicks] for name in clicks[0]}),
        on="id",
        within=WITHIN,
        time="at",
        unit="s",
        label="clicked",
        rule=rule,
        lateness_seconds=LATENESS,
    )
    schema = hb.Schema(
        [
            hb.Label("clicked"),
            hb.Time("at"),
            hb.Id("user"),
            hb.Id("item"),
            hb.History("before", of=["item"], by="user", where={"clicked": 1}, length=4),
        ]
    )
    network = hb.models.DIN(
        schema,
        hb.make_tables(schema, dim=4),
        histories={"before": "item"},
        hidden=(4,),
        attention_hidden=(4,),
    )
    model = hb.RecModel(network, "bce", "adam")
    replay = ReplayedHistory(length=4)
    lengths = []

    def check(run: Any) -> None:
        batch = run.example.batch
        ids = batch.ids["before"]
        for place in range(batch.num_samples):
            row = shown[int(batch.ids["item"].values[place])]
            label, known = known_of(row, clicks, waits=waits)
            assert (float(batch.labels["clicked"][place]), int(batch.known[place])) == (
                label,
                known * 1_000_000,
            )
            expected = [item for _, item in replay.see(row["user"], row["at"])]
            own = slice(int(ids.offsets[place]), int(ids.offsets[place + 1]))
            assert ids.values[own].tolist() == expected
            lengths.append(len(expected))
            if label:
                replay.leave(row["user"], row["at"], known, row["item"])

    dataset = hb.Dataset(joined, schema, batch_size=50)
    model.online_train(dataset, [SimpleNamespace(on_step_begin=check)], progress=False)
    assert len(lengths) > 300
    assert max(lengths) == 4
