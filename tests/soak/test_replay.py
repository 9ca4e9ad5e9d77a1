# SPDX-License-Identifier: Apache-2.0
"""Replays of 20 pairs of jobs, each in a world of its own whose click probabilities are known.

`pytest -m soak tests/soak/test_replay.py -s` prints the table of docs/replay.md.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import polars as pl
import pytest

pytest.importorskip("torch", reason="torch absent")

from served_streams import ServedStream, join, with_outcomes, write
from simulated_world import StoppingWorld, World, job, replay, scores_of, write_world

import hotbed as hb

pytestmark = pytest.mark.soak

REQUESTS = 6000
PAIRS = [
    ("crossed", "item"),
    ("fm", "item"),
    ("network", "item as network"),
    ("taste", "category"),
    ("item", "category"),
    ("crossed", "taste"),
    ("item and noise", "noise"),
    ("item", "coarse item"),
    ("crossed", "slow"),
    ("crossed", "wild"),
    ("crossed", "few rows"),
    ("crossed", "few items"),
    ("noise", "taste"),
    ("coarse item", "fm"),
    ("category", "network"),
    ("slow", "item"),
    ("few rows", "taste"),
    ("wild", "fm"),
    ("few items", "network"),
    ("noise", "item as network"),
]
"""Half of them with the better job first: other networks, learning rates, missing features, wrong
features, and admission."""


@pytest.mark.parametrize(("kind", "least_right"), [(World, 18), (StoppingWorld, 16)])
def test_the_sign_of_planted_pairs_is_right(
    kind: type[World], least_right: int, tmp_path: Path
) -> None:
    """The truth is what the simulator earns with both learned jobs from requests to come.

    In a `StoppingWorld` the click model is wrong, and the intervals are of another figure.
    """
    right = 0
    covered = 0
    for number, names in enumerate(PAIRS):
        world = kind.drawn(100 + number)
        folder = tmp_path / str(number)
        write_world(folder, world.served(world.requests(REQUESTS, seed=number)))
        result = replay(folder, names, folder / "replay").replay()
        assert result is not None
        fresh = world.requests(20_000, seed=1000 + number)
        rates = [
            world.true_rate(fresh, scores_of(folder / "replay" / side, fresh))
            for side in ("replay", "base")
        ]
        truth = rates[0] - rates[1]
        predicted = result.prediction.difference
        right += predicted.value * truth > 0
        covered += predicted.low <= truth <= predicted.high
        interval = f"{predicted.low:+.4f} to {predicted.high:+.4f}"
        print(f"| {' | '.join(names)} | {predicted.value:+.4f} | {interval} | {truth:+.4f} |")
    print(f"right {right} of {len(PAIRS)}, the interval holds the truth in {covered}")
    assert right >= least_right
    assert covered >= 16 or kind is StoppingWorld


def test_equal_jobs_of_other_seeds_are_not_told_apart(tmp_path: Path) -> None:
    """They differ by their initial rows alone."""
    covered = 0
    for number in range(20):
        world = World.drawn(200 + number)
        folder = tmp_path / str(number)
        write_world(folder, world.served(world.requests(2000, seed=number)))
        replaying = replay(folder, ("network", "network"), folder / "replay")
        result = dataclasses.replace(replaying, base=job("network", folder, seed=1)).replay()
        assert result is not None
        difference = result.prediction.difference
        assert difference.low < difference.high
        covered += difference.low <= 0 <= difference.high
    print(f"the interval of equal jobs holds 0 in {covered} of 20")
    assert covered >= 17


def pages_of_obd(shared: Path) -> ServedStream:
    """Return impressions of Open Bandit's random policy as pages of its three places.

    The data have no pages: the next impressions at each place for equal users make one. Pages with
    an item twice are left out.
    """
    rows = pl.read_csv(shared / "obd" / "random_men.csv")
    rows = rows.select(
        served_at=pl.col("timestamp").str.to_datetime(time_zone="UTC").dt.timestamp("us"),
        item=pl.col("item_id").cast(pl.Int64),
        user=pl.concat_str([f"user_feature_{number}" for number in range(4)]),
        segment=pl.col("user_feature_0"),
        place=pl.col("position"),
        label=pl.col("click").cast(pl.Float64),
    ).sort("served_at", maintain_order=True)
    page = pl.int_range(pl.len()).over("user", "place")
    rows = rows.with_columns(request_id=pl.format("{}-{}", "user", page))
    is_whole = (pl.len() == 3) & (pl.col("item").n_unique() == 3)
    rows = rows.filter(is_whole.over("request_id"))
    rows = rows.with_columns(served_at=pl.col("served_at").max().over("request_id"))
    rows = rows.sort("served_at", "request_id", "item")
    rows = rows.with_columns(position=pl.int_range(pl.len()).over("request_id"), rate=pl.lit(0.5))
    return with_outcomes(rows, rows["label"].to_numpy() > 0, np.random.default_rng(3))


def test_a_random_policy_was_logged(shared_data: Path, tmp_path: Path) -> None:
    """Where places are random, candidates that another order leaves in place tell its click rate.

    Such a share needs no click model. It has a third of the clicks.
    """
    stream = pages_of_obd(shared_data)
    score = np.random.default_rng(0).random(stream.shown.height).astype(np.float32)
    rows = stream.served({"41": score})
    write(tmp_path, stream, rows, columns=("place",))
    samples = join(tmp_path / "log", tmp_path / "outcomes")
    output = tmp_path / "replay"
    measure = hb.ServingQuality(samples, user="user", seconds=None, output=str(output))
    replaying = hb.JobReplay(measure, job("item", tmp_path), place="place", warm_up=0.0)
    result = replaying.replay()
    assert result is not None
    scores = np.fromfile(output / "replay" / "scores.f32", np.float32)
    known = rows.head(len(scores)).with_columns(replayed=pl.Series(scores))
    order = pl.col("replayed").rank("ordinal", descending=True).over("request_id")
    kept = known.filter(order == pl.col("place"))
    rate = kept["label"].mean()
    reach = 1.96 * (rate / kept.height) ** 0.5
    prediction = result.prediction
    print(f"Open Bandit: {kept.height} candidates kept their place: {rate:.5f} ±{reach:.5f}")
    print(prediction)
    predicted = prediction.rates["replay"]
    assert predicted.low <= rate + reach
    assert rate - reach <= predicted.high
    assert prediction.difference.low <= prediction.difference.value <= prediction.difference.high
