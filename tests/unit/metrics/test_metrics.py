# SPDX-License-Identifier: Apache-2.0
"""Metrics equal brute force, with ties, weights and groups, and say so when they are undefined."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    NormalizedEntropy,
    Precision,
    Recall,
    Windowed,
    get_metric,
    smaller_is_better,
)
from hotbed.metrics.metric import Metric

ALL = (
    AUC,
    GAUC,
    LogLoss,
    NormalizedEntropy,
    Calibration,
    Accuracy,
    Precision,
    Recall,
    F1,
    HitRate,
    NDCG,
    MSE,
    RMSE,
    MAE,
    SMAPE,
)


def draw(
    n: int = 300, seed: int = 0, levels: int = 20
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Predictions with many ties, labels, weights and groups."""
    random = np.random.default_rng(seed)
    prediction = (random.integers(1, levels, n) / levels).astype(np.float32)
    label = (random.random(n) < prediction).astype(np.float32)
    return prediction, label, random.random(n).astype(np.float32), random.integers(0, 25, n)


def brute_auc(prediction: np.ndarray, label: np.ndarray, weight: np.ndarray) -> float:
    """Every pair, one by one."""
    won = total = 0.0
    for i in np.flatnonzero(label > 0.5):
        for j in np.flatnonzero(label <= 0.5):
            pair = float(weight[i]) * float(weight[j])
            total += pair
            won += pair * (
                1.0
                if prediction[i] > prediction[j]
                else 0.5
                if prediction[i] == prediction[j]
                else 0.0
            )
    return won / total if total else math.nan


def evaluate(metric: Metric, *inputs: np.ndarray, **named: np.ndarray) -> float:
    """The metric after one update."""
    metric.update(*inputs, **named)
    return metric.eval()


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_auc_equals_all_pairs_with_ties_and_weights(seed: int) -> None:
    prediction, label, weight, _ = draw(seed=seed)
    assert evaluate(AUC(), prediction, label, weight) == pytest.approx(
        brute_auc(prediction, label, weight), abs=1e-12
    )
    ones = np.ones_like(weight)
    assert evaluate(AUC(), prediction, label) == pytest.approx(
        brute_auc(prediction, label, ones), abs=1e-12
    )


STREAMS = {
    "smooth": (-4.0, 1.5),
    "a young model": (-3.0, 1e-3),
    "a younger model": (-3.0, 1e-5),
    "very rare": (-18.0, 1.0),
    "beyond the old range": (-25.0, 3.0),
    "nearly certain": (20.0, 5.0),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streaming_auc_is_exact_to_four_digits_wherever_the_scores_lie(name: str) -> None:
    """Scores of a narrow range, float32 and float64; the order of the updates does not matter."""
    random = np.random.default_rng(1)
    mean, width = STREAMS[name]
    truth = random.normal(size=100_000)
    label = random.random(100_000) < 1.0 / (1.0 + np.exp(-truth))
    prediction = 1.0 / (1.0 + np.exp(-(mean + width * truth)))
    for scores in (prediction, prediction.astype(np.float32)):
        exact, streaming = AUC(), AUC(bins=8192, exact=10_000)
        for part in np.array_split(np.arange(100_000), 70):
            exact.update(scores[part], label[part])
            streaming.update(scores[part], label[part])
        assert streaming.eval() == pytest.approx(exact.eval(), abs=2e-6)


def test_streaming_auc_follows_scores_that_drift_and_repeat() -> None:
    """Within the bound of the docstring, with weights, one score in half of the samples, and
    infinite ones.
    """
    random = np.random.default_rng(2)
    score = np.linspace(0, 1, 60_000) + 1e-4 * random.normal(size=60_000)
    score[::2] = 0.5
    score[7::5000] = -np.inf
    label = random.random(60_000) < 0.2 + 0.3 * (score > 0.5)
    weight = random.random(60_000) * (random.random(60_000) < 0.9)
    exact, streaming = AUC(), AUC(bins=1024)
    for part in np.array_split(np.arange(60_000), 13):
        exact.update(score[part], label[part], weight[part])
        streaming.update(score[part], label[part], weight[part])
    assert streaming.eval() == pytest.approx(exact.eval(), abs=8 * math.log2(60) / 1024)
    assert streaming.eval() == pytest.approx(exact.eval(), abs=1e-3)


def test_streaming_auc_of_few_different_scores_is_exact() -> None:
    random = np.random.default_rng(3)
    score = random.integers(0, 500, 20_000)
    label = random.random(20_000) * 500 < score
    assert evaluate(AUC(bins=512), score, label) == pytest.approx(
        evaluate(AUC(), score, label), abs=1e-12
    )


def test_streaming_auc_does_not_depend_on_how_samples_are_cut_into_batches() -> None:
    random = np.random.default_rng(4)
    score, label = random.random(5000), random.random(5000) < 0.3
    pieces = AUC(bins=64)
    for part in np.array_split(np.arange(5000), 37):
        pieces.update(score[part], label[part])
    assert pieces.eval() == evaluate(AUC(bins=64), score, label)


def test_streaming_auc_takes_zero_and_one() -> None:
    assert evaluate(AUC(bins=2), np.array([0.0, 1.0, 0.0, 1.0]), np.array([0, 1, 0, 1])) == 1.0


def test_auc_does_not_depend_on_how_samples_are_cut_into_batches() -> None:
    prediction, label, weight, group = draw()
    whole, parts = (
        [evaluate(cls(), prediction, label, weight, group) for cls in ALL],
        [cls() for cls in ALL],
    )
    for part in np.array_split(np.arange(len(label)), 11):
        for metric in parts:
            metric.update(prediction[part], label[part], weight=weight[part], group=group[part])
    assert [metric.eval() for metric in parts] == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_gauc_is_the_weighted_mean_of_the_groups_that_have_both_classes(seed: int) -> None:
    prediction, label, weight, group = draw(seed=seed)
    total = shares = 0.0
    for one in np.unique(group):
        rows = group == one
        area = brute_auc(prediction[rows], label[rows], weight[rows])
        if not math.isnan(area):
            share = float(weight[rows].astype(np.float64).sum())
            total, shares = total + area * share, shares + share
    assert evaluate(GAUC(), prediction, label, weight, group) == pytest.approx(
        total / shares, abs=1e-12
    )


def test_groups_may_be_strings() -> None:
    prediction, label, _, group = draw()
    names = np.array([f"user {code}" for code in group])
    assert evaluate(GAUC(), prediction, label, group=names) == pytest.approx(
        evaluate(GAUC(), prediction, label, group=group)
    )


def test_log_loss_and_normalized_entropy_equal_their_formulas() -> None:
    prediction, label, weight, _ = draw()
    p, y, w = (values.astype(np.float64) for values in (prediction, label, weight))
    entropy = -np.sum(w * (y * np.log(p) + (1 - y) * np.log(1 - p))) / w.sum()
    rate = np.sum(w * y) / w.sum()
    base = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert evaluate(LogLoss(), prediction, label, weight) == pytest.approx(entropy, abs=1e-12)
    assert evaluate(NormalizedEntropy(), prediction, label, weight) == pytest.approx(
        entropy / base, abs=1e-12
    )


def test_normalized_entropy_of_the_mean_is_one() -> None:
    label = np.array([1, 0, 0, 0])
    assert evaluate(NormalizedEntropy(), np.full(4, 0.25), label) == pytest.approx(1.0, abs=1e-12)


def test_certain_and_wrong_has_a_finite_log_loss() -> None:
    assert evaluate(LogLoss(eps=1e-7), np.array([1.0]), np.array([0.0])) == pytest.approx(
        -math.log(1e-7), rel=1e-6
    )


def test_calibration_is_mean_prediction_over_mean_label() -> None:
    weight = np.array([1.0, 3.0])
    assert evaluate(Calibration(), np.array([0.2, 0.4]), np.array([0, 1]), weight) == pytest.approx(
        1.4 / 3.0
    )


def test_accuracy_precision_recall_and_f1_count_the_threshold_as_positive() -> None:
    prediction, label = np.array([0.9, 0.5, 0.4, 0.1]), np.array([1, 0, 1, 0])
    assert evaluate(Accuracy(), prediction, label) == 0.5
    assert evaluate(Precision(), prediction, label) == 0.5
    assert evaluate(Recall(), prediction, label) == 0.5
    assert evaluate(Recall(threshold=0.4), prediction, label) == 1.0
    assert evaluate(Precision(), prediction, label, np.array([3.0, 1.0, 1.0, 1.0])) == 0.75
    assert evaluate(F1(), prediction, label) == 0.5
    for weight in (None, np.array([3.0, 1.0, 0.5, 1.0])):
        precision, recall, f1 = (
            evaluate(kind(threshold=0.4), prediction, label, weight)
            for kind in (Precision, Recall, F1)
        )
        assert f1 == pytest.approx(2 * precision * recall / (precision + recall))


AMOUNTS = st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, -0.0, 1.0])


@given(
    samples=st.lists(st.tuples(AMOUNTS, AMOUNTS, st.floats(0.125, 8.0)), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_errors_of_amounts_equal_their_formulas(
    samples: list[tuple[float, float, float]], cuts: list[int]
) -> None:
    """However the samples are cut into batches, and of the sums of two metrics."""
    p, y, w = np.array(samples).T
    half = (np.abs(p) + np.abs(y)) / 2
    ratio = [0.0 if not h else abs(a - b) / h for a, b, h in zip(p, y, half, strict=True)]
    wanted = {
        MSE: np.average((p - y) ** 2, weights=w),
        RMSE: math.sqrt(np.average((p - y) ** 2, weights=w)),
        MAE: np.average(np.abs(p - y), weights=w),
        SMAPE: np.average(ratio, weights=w),
    }
    for kind, value in wanted.items():
        metric = kind()
        parts = np.split(np.arange(len(y)), sorted(cuts))
        for part in parts:
            metric.update(p[part], y[part], weight=w[part])
        assert metric.eval() == pytest.approx(value, rel=1e-12, abs=1e-30)
        others = [kind(), kind()]
        others[0].update(p[:3], y[:3], w[:3])
        others[1].update(p[3:], y[3:], w[3:])
        merged = kind()
        merged.load_state({"sums": sum(other.state()["sums"] for other in others)})
        assert merged.eval() == pytest.approx(value, rel=1e-12, abs=1e-30)


def test_smape_of_zeros_and_of_values_below_zero_is_defined() -> None:
    assert evaluate(SMAPE(), np.array([0.0]), np.array([0.0])) == 0.0
    assert evaluate(SMAPE(), np.array([0.0, 3.0]), np.array([2.0, 0.0])) == 2.0
    assert evaluate(SMAPE(), np.array([-1.0]), np.array([1.0])) == 2.0
    assert evaluate(SMAPE(), np.array([-2.0]), np.array([-1.0])) == pytest.approx(2 / 3)
    assert evaluate(SMAPE(), np.array([2.0]), np.array([1.0])) == pytest.approx(1 / 1.5)


def test_an_infinite_prediction_without_weight_does_not_count() -> None:
    values = np.array([np.inf, 1.0])
    for kind in (RMSE, MAE):
        assert evaluate(kind(), values, np.zeros(2), np.array([0.0, 2.0])) == 1.0
        assert evaluate(kind(), values, np.zeros(2)) == math.inf
    assert evaluate(SMAPE(), values, np.ones(2)) == 1.0


def test_hit_rate_looks_at_the_k_highest_of_each_group() -> None:
    prediction = np.array([0.9, 0.8, 0.1, 0.9, 0.8, 0.1, 0.5])
    label = np.array([0, 1, 0, 0, 0, 1, 0])
    group = np.array([7, 7, 7, -1, -1, -1, 3])  # group 3 has no positive and does not count
    assert evaluate(HitRate(k=1), prediction, label, group=group) == 0.0
    assert evaluate(HitRate(k=2), prediction, label, group=group) == 0.5
    assert evaluate(HitRate(k=3), prediction, label, group=group) == 1.0


def test_a_constant_prediction_earns_no_hits() -> None:
    label, group = np.array([1, 0, 0, 0]), np.zeros(4, np.int64)
    assert evaluate(HitRate(k=3), np.ones(4), label, group=group) == 0.0
    assert evaluate(HitRate(k=4), np.ones(4), label, group=group) == 1.0


@pytest.mark.parametrize("k", [1, 3, 10, None])
@pytest.mark.parametrize("gain", ["linear", "exponential"])
def test_ndcg_equals_the_mean_over_all_orders_of_ties(k: int | None, gain: str) -> None:
    random = np.random.default_rng(3)
    prediction = random.integers(0, 3, 12) / 4
    label = random.integers(0, 4, 12).astype(float)
    group = np.repeat([0, 1, 2], 4)
    label[group == 2] = 0.0  # nothing to gain: left out
    values = []
    for one in (0, 1):
        rows = np.flatnonzero(group == one)
        gains = label[rows] if gain == "linear" else 2.0 ** label[rows] - 1.0
        scores = prediction[rows]
        discount = np.where(np.arange(4) < (k or 4), 1.0 / np.log2(np.arange(4) + 2.0), 0.0)
        orders = [
            list(o)
            for o in permutations(range(4))
            if all(scores[a] >= scores[b] for a, b in pairwise(o))
        ]
        reached = np.mean([np.sum(gains[order] * discount) for order in orders])
        values.append(reached / np.sum(np.sort(gains)[::-1] * discount))
    metric = NDCG(k=k, gain="linear" if gain == "linear" else "exponential")
    assert evaluate(metric, prediction, label, group=group) == pytest.approx(
        np.mean(values), abs=1e-12
    )


def test_whole_ndcg_ranks_all_samples_as_one_list() -> None:
    prediction, label, _, _ = draw()
    whole = NDCG(k=None, whole=True)
    one = np.zeros(len(label), np.int64)
    assert evaluate(whole, prediction, label) == evaluate(
        NDCG(k=None), prediction, label, group=one
    )
    order = np.argsort(-prediction, kind="stable")
    discount = 1.0 / np.log2(np.arange(len(label)) + 2.0)
    ideal = np.sort(label)[::-1] @ discount
    if len(np.unique(prediction)) == len(prediction):
        wanted = label[order] @ discount / ideal
        assert evaluate(whole, prediction, label) == pytest.approx(wanted)
    with pytest.raises(ConfigError, match=r"NDCG\.whole: one ranking of all samples has no groups"):
        NDCG(group="user", whole=True)


# --- undefined and wrong --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metric", [AUC(), AUC(bins=8), NormalizedEntropy(), GAUC()], ids=["0", "1", "2", "3"]
)
def test_one_class_only_is_nan_and_warns(metric: Metric) -> None:
    metric.clear()
    metric.update(np.array([0.1, 0.7]), np.array([1, 1]), group=np.array([1, 1]))
    with pytest.warns(RuntimeWarning, match=r"undefined and reads nan: .*(both classes)"):
        assert math.isnan(metric.eval())


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_no_samples_is_nan_and_warns(cls: type[Metric]) -> None:
    for metric in (cls(), cls()):
        with pytest.warns(RuntimeWarning, match="undefined"):
            assert math.isnan(metric.eval())
        metric.update(np.empty(0), np.empty(0), group=np.empty(0, np.int64))
        with pytest.warns(RuntimeWarning, match="undefined"):
            assert math.isnan(metric.eval())


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_clear_forgets(cls: type[Metric]) -> None:
    prediction, label, weight, group = draw()
    metric = cls()
    metric.update(1.0 - prediction, label, weight, group)
    metric.clear()
    metric.update(prediction, label, weight, group)
    assert metric.eval() == evaluate(cls(), prediction, label, weight, group)
    assert metric.eval() == metric.eval()


@pytest.mark.parametrize(
    "metric",
    [GAUC(), HitRate(), NDCG(), Windowed(GAUC(), 10)],
    ids=lambda metric: metric.__class__.__name__,
)
def test_a_batch_without_group_is_an_error_of_that_batch(metric: Metric) -> None:
    half, one = np.array([0.5, 0.5]), np.array([0, 1])
    metric.update(half, one, group=one)
    with pytest.raises(DataError, match="it ranks within groups, got 2 samples without group"):
        metric.update(half, one)
    metric.update(half[:0], one[:0])


@pytest.mark.parametrize("kind", [NDCG, lambda: HitRate(k=1)], ids=["NDCG", "HitRate"])
def test_groups_count_with_the_mean_weight_of_their_samples(kind: Callable[[], Metric]) -> None:
    prediction, label, weight, group = draw()
    by_group = weight[group]
    total = share = 0.0
    for number in np.unique(group):
        rows = group == number
        value = evaluate(kind(), prediction[rows], label[rows], group=group[rows])
        total += value * float(by_group[rows][0])
        share += float(by_group[rows][0])
    assert evaluate(kind(), prediction, label, by_group, group) == pytest.approx(total / share)
    alone = evaluate(kind(), prediction[group > 3], label[group > 3], group=group[group > 3])
    assert evaluate(kind(), prediction, label, (group > 3).astype(float), group) == pytest.approx(
        alone
    )


def test_a_sample_without_weight_is_not_ranked() -> None:
    prediction, label, group = np.array([0.9, 0.8, 0.1]), np.array([0, 1, 0]), np.zeros(3)
    for metric in (NDCG(), HitRate(k=1)):
        assert evaluate(metric, prediction, label, np.array([0.0, 1.0, 1.0]), group) == 1.0


def test_bad_inputs_are_errors_that_name_the_metric() -> None:
    half, one = np.array([0.5, 0.5]), np.array([0, 1])
    with pytest.raises(
        DataError, match=r"AUC: inputs differ in length, .*'prediction': 2, 'label': 1"
    ):
        AUC().update(half, one[:1])
    with pytest.raises(
        DataError, match=r"one score for each sample, .* shape \[2, 3\] for 2 labels"
    ):
        AUC().update(np.full((2, 3), 0.5), one)
    with pytest.raises(DataError, match="AUC: prediction is nan, got nan at sample 1"):
        AUC().update(np.array([0.5, np.nan]), one)
    with pytest.raises(DataError, match="weight below 0"):
        AUC().update(half, one, weight=np.array([1.0, -1.0]))
    with pytest.raises(DataError, match=r"LogLoss: predictions lie outside 0 to 1, got 0.5 to 3"):
        LogLoss().update(np.array([0.5, 3.0]), one)
    for kind in (LogLoss, NormalizedEntropy):
        with pytest.raises(DataError, match="labels lie outside 0 to 1, got -1 to 1"):
            kind().update(half, np.array([-1, 1]))
    with pytest.raises(DataError, match="got 1 inputs"):
        AUC().update(half)
    for make in (
        lambda: AUC(bins=1),
        lambda: HitRate(k=0),
        lambda: NDCG(k=-1),
        lambda: Windowed(AUC(), samples=0),
    ):
        with pytest.raises(ConfigError, match=r"must be at least \d, got"):
            make()


# --- faces ----------------------------------------------------------------------------------------


def test_set_indexes_picks_inputs_by_position() -> None:
    prediction, label, weight, _ = draw()
    metric = AUC().set_indexes([2, 1, 3])
    metric.update(np.float32(0.3), label, prediction, weight)
    assert metric.eval() == evaluate(AUC(), prediction, label, weight)
    with pytest.raises(DataError, match="set_indexes asks for input 3"):
        metric.update(label, prediction)
    with pytest.raises(ConfigError, match="indexes"):
        AUC().set_indexes([0])


def test_tensors_and_columns_are_read_as_arrays() -> None:
    torch = pytest.importorskip("torch", reason="torch absent")
    prediction, label, weight, group = draw()
    inputs = [torch.from_numpy(values) for values in (prediction, label, weight, group)]
    inputs[0] = inputs[0].unsqueeze(1).requires_grad_()
    assert evaluate(GAUC(), *inputs) == evaluate(GAUC(), prediction, label, weight, group)
    assert 0.0 <= evaluate(AUC(), inputs[0].bfloat16(), inputs[1].bool()) <= 1.0


@pytest.mark.parametrize("size", [1, 37, 100, 1000])
def test_a_window_is_the_metric_of_the_newest_samples(size: int) -> None:
    prediction, label, weight, group = draw()
    for cls in (AUC, GAUC, LogLoss, RMSE, MAE, SMAPE):
        metric = Windowed(cls(), samples=size)
        for part in np.array_split(np.arange(len(label)), 13):
            metric.update(prediction[part], label[part], weight[part], group[part])
        newest = [values[-size:] for values in (prediction, label, weight, group)]
        if size == 1 and cls in (AUC, GAUC):
            with pytest.warns(RuntimeWarning, match="undefined"):
                assert math.isnan(metric.eval())
        else:
            assert metric.eval() == pytest.approx(evaluate(cls(), *newest), abs=1e-12)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_every_metric_is_found_by_name_and_describes_itself(cls: type[Metric]) -> None:
    assert type(get_metric(config.kind_of(cls))) is cls
    assert config.describe(cls()) == {"kind": config.kind_of(cls)}


def test_an_unknown_name_gets_the_nearest_right_one() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'log_loss'"):
        get_metric("logloss")
    spec = {"kind": "windowed", "metric": {"kind": "auc", "bins": 64}, "samples": 10}
    assert config.describe(config.build(spec, Metric)) == spec


@pytest.mark.parametrize(
    ("name", "smaller"),
    [
        ("loss", True),
        ("valid.click.log_loss", True),
        ("normalized_entropy", True),
        ("valid.auc", False),
        ("gauc@user", False),
        ("of_my_own", False),
    ],
)
def test_losses_are_better_when_smaller(name: str, smaller: bool) -> None:
    assert smaller_is_better(name) == smaller
