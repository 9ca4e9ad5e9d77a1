# SPDX-License-Identifier: Apache-2.0
"""Metrics are saved and loaded to the bit, have forms of bounded memory, and choose their inputs."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hotbed import config
from hotbed.errors import ConfigError, DataError
from hotbed.metrics import (
    AUC,
    F1,
    GAUC,
    MAE,
    MSE,
    NDCG,
    RMSE,
    SMAPE,
    Accuracy,
    Calibration,
    HitRate,
    LogLoss,
    Metric,
    NormalizedEntropy,
    Precision,
    Recall,
    Windowed,
    bounded,
)
from hotbed.metrics.reliability import Reliability

# --- state ----------------------------------------------------------------------------------------

KINDS = {
    **{
        kind.__name__: kind
        for kind in (
            AUC,
            GAUC,
            LogLoss,
            NormalizedEntropy,
            Calibration,
            Accuracy,
            Precision,
            Recall,
            F1,
            MSE,
            RMSE,
            MAE,
            SMAPE,
        )
    },
    "HitRate": lambda: HitRate(k=1),
    "NDCG": NDCG,
    "NDCG of one ranking": lambda: NDCG(whole=True, gain="exponential"),
    "AUC in bins": lambda: AUC(bins=512),
    "AUC in bins, at first exact": lambda: AUC(bins=512, exact=250),
    "Windowed AUC": lambda: Windowed(AUC(), samples=150),
    "Windowed GAUC": lambda: Windowed(GAUC(), samples=150),
}


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """A state as it comes back from a checkpoint: JSON for what is JSON, copies of the arrays."""
    arrays = {name: value.copy() for name, value in state.items() if isinstance(value, np.ndarray)}
    return (
        json.loads(json.dumps({k: v for k, v in state.items() if k not in arrays}, allow_nan=False))
        | arrays
    )


def samples(rng: np.random.Generator, rows: int, texts: bool) -> tuple[np.ndarray, ...]:
    group = rng.integers(0, 9, rows)
    score = np.round(rng.random(rows), 2)
    return (
        score,
        (rng.random(rows) < score).astype(float),
        rng.random(rows),
        group.astype(str) if texts else group,
    )


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_a_metric_goes_on_from_its_state_to_the_same_bits(name: str, texts: bool) -> None:
    """Saved and loaded in the middle, at random places: the same bits as one that was never
    stopped.
    """
    rng = np.random.default_rng(len(name))
    whole, stopped = KINDS[name](), KINDS[name]()
    for step in range(12):
        batch = samples(rng, int(rng.integers(20, 60)), texts)
        whole.update(*batch)
        stopped.update(*batch)
        if step in (0, 5, 6):
            state = through_json(stopped.state())
            # what came after the save is lost in the crash
            stopped.update(*samples(rng, 30, texts))
            stopped = KINDS[name]()
            stopped.update(*samples(rng, 30, texts))
            stopped.load_state(state)
        assert stopped.eval() == whole.eval()


@pytest.mark.parametrize("name", KINDS)
def test_a_state_is_a_picture_that_later_samples_do_not_change(name: str) -> None:
    rng = np.random.default_rng(3)
    metric, other = KINDS[name](), KINDS[name]()
    metric.update(*samples(rng, 100, False))
    value, state = metric.eval(), metric.state()
    score, label, *rest = samples(rng, 100, False)
    metric.update(score, 1.0 - label, *rest)
    other.load_state(state)
    assert other.eval() == value != metric.eval()


def test_auc_takes_the_state_of_another_number_of_bins() -> None:
    rng = np.random.default_rng(1)
    exact, fine, coarse = AUC(), AUC(bins=512), AUC(bins=256)
    score, label, weight, _ = samples(rng, 5000, False)
    for metric in (exact, fine):
        metric.update(score, label, weight)
    coarse.load_state(through_json(fine.state()))
    assert coarse.eval() == pytest.approx(exact.eval(), abs=1e-3)
    with pytest.raises(ConfigError, match="bins=512 into bins=None"):
        AUC().load_state(fine.state())


def test_auc_takes_a_state_with_bins_of_equal_width() -> None:
    """Checkpoints of earlier builds hold two counts for each bin of the logit from -16 to 16."""
    metric = AUC(bins=512)
    counts = np.array([[3.0, 1.0, 0.0], [1.0, 1.0, 2.0]])
    metric.load_state({"bins": 65_536, "place": np.array([7, 30_000, 65_535]), "counts": counts})
    assert metric.eval() == pytest.approx((1 * 1.5 + 1 * 3.5 + 2 * 4) / 16)
    metric.update(np.array([0.999]), np.array([1]))
    assert metric.eval() == pytest.approx((1 * 1.5 + 1 * 3.5 + 2 * 4 + 4) / 20)


def test_an_auc_in_bins_is_exact_up_to_a_number_of_samples() -> None:
    rng = np.random.default_rng(0)
    exact, binned = AUC(), AUC(bins=16, exact=300)
    for rows, equal in ((200, True), (100, True), (1, False)):
        batch = rng.random(rows), rng.random(rows) > 0.5
        exact.update(*batch)
        binned.update(*batch)
        assert (binned.eval() == exact.eval()) is equal
        assert ("counts" in binned.state()) is not equal
    assert binned.eval() == pytest.approx(exact.eval(), abs=0.05)
    with pytest.raises(ConfigError, match=r"AUC\.exact"):
        AUC(bins=16, exact=-1)


def test_the_samples_of_a_metric_without_any_are_a_state_too() -> None:
    for kind in (AUC, GAUC, lambda: Windowed(NDCG(), 10)):
        metric = kind()
        metric.load_state(through_json(kind().state()))
        with pytest.warns(RuntimeWarning, match="undefined"):
            assert math.isnan(metric.eval())


# --- parts ----------------------------------------------------------------------------------------

KEPT = {"AUC", "GAUC", "HitRate", "NDCG", "NDCG of one ranking", "Windowed AUC", "Windowed GAUC"}
IN_BINS = {"AUC in bins", "AUC in bins, at first exact"}


def test_every_metric_is_held_to_its_promises() -> None:
    held = {type(kind()) for kind in KINDS.values()}
    ours = {kind for kind in config.kinds(Metric).values() if kind.__module__.startswith("hotbed.")}
    assert ours <= held


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_merged_parts_equal_a_metric_of_the_whole(name: str, texts: bool) -> None:
    """Parts are empty or uneven, batches have from 0 samples on, and some weights are 0."""
    rng = np.random.default_rng(len(name))
    sizes = [0, 1, 1, *rng.integers(0, 90, 37).tolist()]
    batches = [samples(rng, size, texts) for size in sizes]
    for _, _, weight, _ in batches:
        weight[weight < 0.1] = 0.0
    whole = KINDS[name]()
    for batch in batches:
        whole.update(*batch)
    for num_parts in (1, 2, 3, 8):
        inner = [2, 3, 3, *rng.integers(0, 41, 4).tolist()]
        cuts = [0, *sorted(inner[: num_parts - 1]), 40]
        merged = [merged_parts(name, batches, cuts) for _ in range(2)]
        assert merged[0].eval() == merged[1].eval()  # one cut gives equal bits
        if name in KEPT:
            assert merged[0].eval() == whole.eval()
        elif name in IN_BINS:  # scores have 101 values, fewer than bins: sums differ by rounding
            assert merged[0].eval() == pytest.approx(whole.eval(), abs=1e-12)
        else:
            assert merged[0].eval() == pytest.approx(whole.eval(), rel=1e-12)


def merged_parts(name: str, batches: list[Any], cuts: list[int]) -> Any:
    merged = KINDS[name]()
    for start, stop in pairwise(cuts):
        part = KINDS[name]()
        for batch in batches[start:stop]:
            part.update(*batch)
        state = through_json(part.state())
        merged.merge(part)
        assert str(through_json(part.state())) == str(state)  # the part stays as it is
    return merged


def test_merged_bins_keep_the_bound_of_their_error() -> None:
    """Scores of all sizes, without ties: 8 times the doublings of the blocks, by the bins."""
    rng = np.random.default_rng(2)
    exact, merged = AUC(), AUC(bins=256)
    for _ in range(7):
        part = AUC(bins=256)
        for _ in range(int(rng.integers(1, 5))):
            score = np.exp(rng.normal(0, 9, 1000))
            batch = score, rng.random(1000) < score / (1 + score)
            exact.update(*batch)
            part.update(*batch)
        merged.merge(part)
    doublings = len(merged.state()["lengths"])
    assert merged.eval() == pytest.approx(exact.eval(), abs=8 * doublings / 256)
    assert merged.eval() == pytest.approx(exact.eval(), abs=1e-3)


def test_metrics_that_are_not_alike_are_not_merged() -> None:
    with pytest.raises(ConfigError, match=r"AUC\.merge: .* got AUC and GAUC\. Merge metrics that"):
        AUC().merge(GAUC())
    with pytest.raises(ConfigError, match="got bins=8 and bins=None"):
        AUC().merge(AUC(bins=8))
    with pytest.raises(ConfigError, match="got samples=5 and samples=6"):
        Windowed(AUC(), 5).merge(Windowed(AUC(), 6))
    with pytest.raises(ConfigError, match="got k=2 and k=3"):
        Windowed(HitRate(k=2), 5).merge(Windowed(HitRate(k=3), 5))
    with pytest.raises(ConfigError, match=r"got threshold=0\.1 and threshold=0\.5"):
        Precision().merge(Precision(0.1))
    LogLoss().merge(LogLoss(eps=1e-7))


def test_part_without_samples_does_not_change_the_groups_of_the_others() -> None:
    """Neighbouring ids above 2^53 are one float."""
    users = np.array([2**60, 2**60 + 1])
    merged, whole = GAUC(), GAUC()
    merged.update([], [], group=[])
    merged.update(np.array([0.1, 0.9]), np.array([0, 1]), group=users)
    whole.update(np.array([0.1, 0.9]), np.array([0, 1]), group=users)
    assert merged.state()["group"].tolist() == whole.state()["group"].tolist() == users.tolist()


# --- bounded --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_a_bounded_metric_says_the_same_and_its_state_does_not_grow(name: str) -> None:
    rng = np.random.default_rng(5)
    metric, small = KINDS[name](), bounded(KINDS[name](), samples=400)
    for step in range(20):
        batch = samples(rng, 100 if step < 4 else 4000, False)
        metric.update(*batch)
        small.update(*batch)
        if step == 3:
            assert small.eval() == pytest.approx(metric.eval(), abs=1e-4)
    size = sum(value.nbytes for value in small.state().values() if isinstance(value, np.ndarray))
    assert size <= (32_768 * 32 if name.startswith("AUC") else 400 * 32)


def test_a_bounded_metric_keeps_its_settings() -> None:
    assert bounded(GAUC("user")).group == "user"
    assert bounded(GAUC().set_indexes([2, 0])).indexes == [2, 0]
    assert bounded(AUC()).bins == 8192
    scores = bounded(AUC())  # any score
    scores.update(np.array([-3.0, 5.0]), np.array([0, 1]))
    assert scores.eval() == 1.0
    own = object.__new__(type("Own", (), {"clear": lambda self: None}))
    assert type(bounded(own)) is type(own)


# --- set_indexes ----------------------------------------------------------------------------------


def test_indexes_choose_prediction_label_weight_and_group_among_the_inputs() -> None:
    rng = np.random.default_rng(1)
    score, label, weight, group = samples(rng, 200, False)
    plain, chosen = GAUC(), GAUC().set_indexes([3, 0, 2, 1])
    plain.update(score, label, weight, group)
    chosen.update(label, group, weight, score)
    assert chosen.eval() == plain.eval()
    assert chosen.indexes == [3, 0, 2, 1]
    chosen.clear()  # forgets samples, not settings
    chosen.update(label, group, weight, score)
    assert chosen.eval() == plain.eval()
    assert chosen.set_indexes(None).indexes is None


@pytest.mark.parametrize("indexes", [[1], [0, 1, 2, 3, 4], [0, -1], [0.0, 1], "ab"])
def test_indexes_that_cannot_work_are_refused(indexes: Any) -> None:
    with pytest.raises(ConfigError, match="indexes"):
        AUC().set_indexes(indexes)


def test_an_index_beyond_the_inputs_is_an_error_that_counts_them() -> None:
    with pytest.raises(DataError, match="asks for input 5, got 2 inputs"):
        AUC().set_indexes([0, 5]).update(np.ones(1), np.ones(1))


def test_merged_reliability_curves_equal_a_curve_of_the_whole() -> None:
    rng = np.random.default_rng(4)
    whole = Reliability()
    merged = [Reliability(), Reliability()]
    for size in (0, 1, 5000, 0, 700, 9000):
        batch = rng.random(size), rng.integers(0, 2, size), rng.random(size)
        whole.update(*batch)
        for curve in merged:
            part = Reliability()
            part.update(*batch)
            curve.merge(part)
    assert merged[0].curve() == merged[1].curve()
    np.testing.assert_allclose(merged[0].curve(), whole.curve(), rtol=1e-12)
    assert merged[0].weight == pytest.approx(whole.weight, rel=1e-12)


def test_a_reliability_curve_continues_from_its_state_to_the_same_bits() -> None:
    rng = np.random.default_rng(3)
    unbroken, restarted = Reliability(), Reliability()
    for step in range(90):  # blocks end within
        prediction, label, weight = rng.random(70), rng.integers(0, 2, 70), rng.random(70)
        for curve in (unbroken, restarted):
            curve.update(prediction, label, weight if step % 2 else None)
        if step % 25 == 0:
            saved = restarted.state()
            restarted = Reliability()
            restarted.load_state(saved)
    assert restarted.curve() == unbroken.curve()
    assert restarted.weight == unbroken.weight
    earlier = {name: unbroken.state()[name] for name in ("place", "sums")}  # of an earlier build
    restarted.load_state(earlier)
    assert 0 < restarted.weight < unbroken.weight
