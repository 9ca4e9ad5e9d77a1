# SPDX-License-Identifier: Apache-2.0
"""Scoring before learning: what counts, what a restart keeps, and metrics given in every shape."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.errors import ConfigError, NonFiniteGradient
from hotbed.metrics.metric_set import metric_set
from hotbed.training.step.criterion import Criterion
from hotbed.training.step.example import prepare
from hotbed.training.step.scorer import Progressive, Scorer

CPU = torch.device("cpu")


class Two(nn.Module):
    """Two labels from one dense column."""

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {"click": batch.dense["x"], "buy": -batch.dense["x"]}


class One(nn.Module):
    def forward(self, batch: Any) -> Tensor:
        return batch.dense["x"]


def batches(number: int, seed: int = 0, rows: int = 50) -> Iterator[hb.Batch]:
    rng = np.random.default_rng(seed)
    for _ in range(number):
        x = rng.normal(size=rows).astype(np.float32)
        labels = {
            name: (x * sign + rng.normal(size=rows) > 0).astype(np.float32)
            for name, sign in (("click", 1), ("buy", -1))
        }
        user = hb.Ids(rng.integers(0, 5, rows), None)
        yield hb.Batch({"user": user}, {"x": x}, labels, weight=rng.random(rows).astype(np.float32))


def progressive(metrics: Any, network: nn.Module | None = None, **settings: Any) -> Progressive:
    return Progressive(Scorer(network or Two(), Criterion("bce"), metric_set(metrics)), **settings)


def see(observer: Progressive, data: Iterator[hb.Batch]) -> None:
    for batch in data:
        observer.observe(prepare(batch, CPU, labelled=True))
        observer.settle()


def through_json(tree: Any) -> Any:
    """What a checkpoint gives back: nested JSON values, and arrays as they were."""
    if isinstance(tree, Mapping):
        return {name: through_json(value) for name, value in tree.items()}
    return (
        tree.copy()
        if isinstance(tree, np.ndarray)
        else json.loads(json.dumps(tree, allow_nan=False))
    )


@pytest.mark.parametrize("endless", [False, True])
def test_a_stream_goes_on_from_its_state_to_the_same_bits(endless: bool) -> None:
    metrics = {"auc", "log_loss", "gauc@user", "calibration"}
    whole, stopped = progressive(metrics, endless=endless), progressive(metrics, endless=endless)
    for number, seed in ((3, 1), (1, 2), (4, 3)):
        for one in (whole, stopped):
            see(one, batches(number, seed))
        state = through_json(stopped.state())
        see(stopped, batches(2, 9))  # lost in the crash
        stopped = progressive(metrics, endless=endless)
        stopped.load_state(state)
        # a save before the first batch loses nothing
        assert through_json(stopped.state()).keys() == state.keys()
    see(whole, batches(2, 4))
    see(stopped, batches(2, 4))
    assert stopped.total.results() == whole.total.results()
    assert stopped.roll() == whole.roll()
    assert len(whole.total.results()) == 9  # the loss, four metrics of each label


def test_a_state_loaded_and_saved_before_any_batch_is_the_same_state() -> None:
    first = progressive({"auc"})
    see(first, batches(3))
    second, third = progressive({"auc"}), progressive({"auc"})
    second.load_state(through_json(first.state()))
    third.load_state(through_json(second.state()))
    for one in (first, third):
        see(one, batches(1, 5))
    assert third.total.results() == first.total.results()


def test_a_metric_that_comes_later_begins_when_it_comes() -> None:
    first = progressive({"auc"})
    see(first, batches(2))
    second, fresh = progressive({"auc", "log_loss"}), progressive({"log_loss"})
    second.load_state(first.state())
    for one in (first, second, fresh):
        see(one, batches(2, 1))
    results = second.total.results()
    assert results["click.auc"] == first.total.results()["click.auc"]
    assert results["click.log_loss"] == fresh.total.results()["click.log_loss"]


def test_a_metric_of_the_users_own_without_a_state_is_left_out() -> None:
    class Mean:
        def clear(self) -> None:
            self.sum, self.number = 0.0, 0

        def update(self, prediction: Any, label: Any, **_: Any) -> None:
            self.sum, self.number = (
                self.sum + float(np.sum(prediction)),
                self.number + len(prediction),
            )

        def eval(self) -> float:
            return self.sum / self.number

    observer = progressive({"mean": Mean(), "auc": "auc"})
    see(observer, batches(1))
    assert set(observer.state()["total"]["metrics"]) == {"click.auc", "buy.auc"}


def test_the_state_of_an_endless_stream_does_not_grow() -> None:
    observer = progressive({"auc", "log_loss", "normalized_entropy"}, endless=True)

    def size() -> int:
        states = observer.state()["total"]["metrics"].values()
        return sum(
            v.nbytes for state in states for v in state.values() if isinstance(v, np.ndarray)
        )

    rng = np.random.default_rng(0)
    fixed = [x.astype(np.float32) for x in (rng.normal(size=200), rng.random(200) > 0.5)]
    sizes = []
    for _ in range(3):
        see(
            observer,
            iter([hb.Batch({}, {"x": fixed[0]}, {"click": fixed[1], "buy": fixed[1]})] * 180),
        )
        sizes.append(size())
    assert max(sizes) < 2 * 32_768 * 24 + 50_000


def test_an_output_without_a_label_has_no_metrics() -> None:
    class Three(Two):
        def forward(self, batch: Any) -> dict[str, Tensor]:
            return {**super().forward(batch), "price": batch.dense["x"] * 7}

    losses = hb.losses.MultiTask({"click": hb.losses.BCE(), "buy": hb.losses.BCE()})
    results = []
    for network in (Two(), Three()):
        observer = Progressive(Scorer(network, Criterion(losses), metric_set({"auc", "log_loss"})))
        see(observer, batches(3))
        results.append(observer.total.results())
    assert results[0] == results[1]


def test_scores_that_are_no_probabilities_have_an_auc_in_an_endless_stream_too() -> None:
    scorer = Scorer(One(), Criterion("mse"), metric_set({"auc"}))
    assert not scorer.gives_probabilities
    assert Scorer(One(), Criterion({"click": "bce", "buy": "bce"}), {}).gives_probabilities
    assert not Scorer(One(), Criterion({"click": "bce", "buy": "mse"}), {}).gives_probabilities
    multi = hb.losses.MultiTask({"click": hb.losses.BCE(), "buy": hb.losses.BCE()})
    assert Scorer(One(), Criterion(multi), {}).gives_probabilities
    observer = Progressive(scorer, endless=True)
    data = [hb.Batch({}, batch.dense, {"click": batch.labels["click"]}) for batch in batches(3)]
    see(observer, iter(data))
    exact = hb.metrics.AUC()
    for batch in data:
        exact.update(batch.dense["x"], batch.labels["click"])
    assert observer.total.results()["auc"] == exact.eval()


def test_a_batch_whose_step_failed_does_not_count(dataset: Any, network: Any) -> None:
    good = list(dataset(256))
    bad = hb.Batch(
        good[1].ids, {"x": good[1].dense["x"] * np.nan}, good[1].labels, time=good[1].time
    )
    model = hb.RecModel(network(), "bce", "adam", {"accuracy"})
    seen: list[Any] = []

    class Keep:
        def on_predicted(self, run: Any) -> None:
            seen.append(run.observer)

    class Zero(nn.Module):
        """Predicts from clean inputs, so that only learning fails."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, batch: Any) -> Tensor:
            return self.inner(batch) if self.training else torch.zeros(batch.num_samples)

    model.network = model.learner.network = model.learner._network = Zero(model.network)
    with pytest.raises(NonFiniteGradient):
        model.fit([good[0], bad, good[2]], callbacks=Keep(), progressive=True, progress=False)
    assert len(seen) == 2
    assert seen[0].state()["total"]["seen"] == 64


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        ({"auc"}, {"click.auc", "buy.auc"}),
        ("auc", {"click.auc", "buy.auc"}),
        (
            [hb.metrics.AUC(bins=64), "log_loss"],
            {"click.auc", "buy.auc", "click.log_loss", "buy.log_loss"},
        ),
        (
            {"mine": hb.metrics.AUC(), "loss2": "log_loss"},
            {"click.mine", "buy.mine", "click.loss2", "buy.loss2"},
        ),
        ({"click": {"auc"}}, {"click.auc"}),
        ({"click": {"auc"}, "buy": ["auc", "accuracy"]}, {"click.auc", "buy.auc", "buy.accuracy"}),
        (
            {"click": {"mine": hb.metrics.AUC()}, "buy": {"mine": "gauc@user"}},
            {"click.mine", "buy.mine"},
        ),
        ({"ndcg@user": hb.metrics.NDCG(5)}, {"click.ndcg@user", "buy.ndcg@user"}),
        (
            [hb.metrics.NDCG(5, group="user"), "hit_rate@user"],
            {"click.ndcg", "buy.ndcg", "click.hit_rate@user", "buy.hit_rate@user"},
        ),
    ],
)
def test_metrics_are_a_name_a_set_or_a_dict_by_name_or_by_label(
    metrics: Any, names: set[str]
) -> None:
    observer = progressive(metrics)
    see(observer, batches(2))
    assert set(observer.total.results()) == names | {"loss"}
    assert all(
        0.0 < value < 1.0
        for name, value in observer.total.results().items()
        if "auc" in name or "mine" in name
    )


def test_a_dict_with_one_label_in_the_data_is_by_name() -> None:
    observer = progressive({"a": "auc", "b": hb.metrics.AUC(bins=4096)}, One())
    see(
        observer,
        (hb.Batch({}, batch.dense, {"click": batch.labels["click"]}) for batch in batches(2)),
    )
    results = observer.total.results()
    assert set(results) == {"loss", "a", "b"}
    assert results["a"] == pytest.approx(results["b"], abs=1e-3)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"clck": {"auc"}}, "metrics.clck: no such label"),
        ({"mine": object()}, r"clear\(\) is missing"),
        (7, "not a set of metrics"),
        ({"acu"}, "Did you mean 'auc'"),
        ({"auc@user"}, r"not a metric within groups, got 'auc@user'\. Use one of gauc@user"),
    ],
)
def test_metrics_that_cannot_work_are_refused(metrics: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        see(progressive(metrics), batches(1))


@pytest.mark.parametrize(
    "metrics", [{"gauc"}, [hb.metrics.NDCG(5)], {"click": {"ndcg": hb.metrics.NDCG(5)}}]
)
def test_a_metric_without_its_group_is_refused_before_training(metrics: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"it ranks within groups, got no group\. Name their Id column"
    ):
        hb.RecModel(Two(), "bce", "adam", metrics)
    own = hb.RecModel(Two(), None, None, metrics, eval_network=Two())  # which may give groups
    assert own.metrics


@pytest.mark.parametrize("loss", ["bce", nn.BCEWithLogitsLoss()])
def test_the_loss_of_weighted_samples_is_their_weighted_mean(loss: Any) -> None:
    scorer = Scorer(One(), Criterion(loss), metric_set({"log_loss"}))
    parts = scorer.again()
    for batch in batches(3):
        example = prepare(
            hb.Batch({}, batch.dense, {"click": batch.labels["click"]}, weight=batch.weight),
            CPU,
            labelled=True,
        )
        outputs = scorer.outputs(example)
        scorer.feed(outputs, example)
        for rows in (slice(0, 9), slice(9, 50)):
            parts.feed(outputs, example, rows)
    assert scorer.results()["loss"] == pytest.approx(scorer.results()["log_loss"], rel=1e-6)
    assert parts.results()["loss"] == pytest.approx(scorer.results()["loss"])


def test_one_metric_object_given_to_two_labels_is_two_metrics() -> None:
    metric = hb.metrics.AUC()
    observer = progressive({"auc": metric})
    see(observer, batches(2))
    results = observer.total.results()
    assert results["click.auc"] != results["buy.auc"]
    with pytest.warns(RuntimeWarning, match="undefined"):
        assert np.isnan(metric.eval())  # the given object is a pattern: it is never fed


def test_rows_of_an_example_can_be_fed_alone() -> None:
    """Cut anywhere, the parts together are the whole: weights and groups are cut with their rows."""
    whole, parts = (
        Scorer(Two(), Criterion("bce"), metric_set({"auc", "gauc@user", "calibration"}))
        for _ in range(2)
    )
    for batch in batches(2):
        example = prepare(batch, CPU, labelled=True)
        outputs = whole.outputs(example)
        whole.feed(outputs, example)
        for rows in (slice(0, 7), slice(7, 8), slice(8, 50)):
            parts.feed(outputs, example, rows)
    assert parts.results() == pytest.approx(whole.results())
    assert parts.results()["click.auc"] == whole.results()["click.auc"]


def test_a_metric_may_choose_among_loss_prediction_and_label() -> None:
    """`set_indexes` without an eval_network: the outputs are (loss, prediction, label), of its
    label.
    """
    observer = progressive(
        {
            "plain": "auc",
            "chosen": hb.metrics.AUC().set_indexes([1, 2]),
            "turned": hb.metrics.Calibration().set_indexes([2, 1]),
        }
    )
    see(observer, batches(3))
    results = observer.total.results()
    assert results["click.chosen"] == results["click.plain"]
    assert results["buy.chosen"] == results["buy.plain"]
    whole = progressive({"calibration"})
    see(whole, batches(3))
    assert results["click.turned"] == pytest.approx(
        1.0 / whole.total.results()["click.calibration"]
    )
