# SPDX-License-Identifier: Apache-2.0
"""Baselines: simple models that learn and score the batches of a run beside its model."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.errors import ConfigError
from hotbed.metrics import smaller_is_better
from hotbed.metrics.baselines import SampleFeatures, SimpleModels, names_an_item, places_of
from hotbed.training.run import Kept, Run
from hotbed.training.step.criterion import Criterion
from hotbed.training.step.example import Example
from hotbed.training.step.reading import host
from hotbed.training.step.scorer import Progressive, Scorer, watch_scores
from hotbed.training.watching.new_ids import NewIds

log = logging.getLogger("hotbed")

CONSTANT = "constant"
LINEAR = "linear"
POPULARITY = "popularity of "
_WITHOUT_BETTER = ("calibration", "loss", "precision", "recall")
"""Metrics that do not say which of two models is better."""

_RANKING = ("auc", "gauc", "hit_rate", "ndcg")
_NONE = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))

Figures = dict[str, dict[str, float]]
"""Metrics by the name of a baseline."""


@described
class Baselines:
    """Compare the model with simple ones: a constant, a linear model, the rate of each item.

    The constant is the mean of the labels, weighted as samples are. The rate of an item is the mean
    label of its rows and of ten more with the mean label. The linear model is a logistic one over
    the Id and Dense columns, or a linear one where the loss is not a cross-entropy; it has a rate
    of its own. They learn the same batches in the first pass over the data, and the metrics are
    those of the model. The training of the model has the same bits without them.

    Where data are tuples, only the constant is there. Where the model computes its own loss or has
    an `eval_network`, none is.

    Args:
        item: Id column of one id a sample, which says what is chosen; None = the first one whose
            name says that, such as `movie_id`, else the first Id column of one id a sample.

    Attributes:
        figures: metrics by name of the baseline: those of the newest validation, as in
            `valid.auc`, and of a stream those of all of its samples so far.

    Example: `model.fit(train, valid, callbacks=hb.callbacks.Baselines())`
    """

    reads_features = True

    def __init__(self, item: str | None = None) -> None:
        self._item = item
        self._models: dict[str | None, SimpleModels] = {}
        self._saved: Mapping[str, Any] = {}
        self._inputs: tuple[Example, SampleFeatures] | None = None
        self._predicted: tuple[Example, dict[str, Any]] | None = None  # by what is learned so far
        self._progressive = Comparison(self)
        self.figures: Figures = {}
        self._new_ids: dict[int, Figures] = {}  # by step of the validation

    def on_fit_begin(self, run: Run) -> None:
        self.figures = {}
        self._new_ids = {}
        self._progressive = Comparison(self)

    def barrier(self, step: int, now: int | None) -> bool:
        return False  # it reads no table

    def on_predicted(self, run: Run) -> None:
        self._progressive.on_predicted(run)

    def on_step_end(self, run: Run) -> None:
        criterion = run.learner.criterion
        in_first_pass = run.online or run.epoch == run.goal.first_epoch
        if run.loss is None or run.example is None or criterion is None or not in_first_pass:
            return
        self._learn(run.example, criterion)

    def on_epoch_end(self, run: Run) -> None:
        self._inputs = None
        self._predicted = None
        self.record(self._progressive, run)

    def comparison(self) -> Comparison:
        """Return a callback of `RecModel.evaluate` that scores its batches by the baselines.

        Its `results()` are their metrics.
        """
        return Comparison(self)

    def record(self, comparison: Comparison, run: Run, prefix: str = "") -> None:
        """Take the results of a comparison as figures; `prefix`: of the names of metrics."""
        for name, values in comparison.results().items():
            named = {f"{prefix}{key}": value for key, value in values.items()}
            self.figures.setdefault(name, {}).update(named)
        if comparison.new_ids():
            best = run.callbacks.kept
            steps = [] if best is None else [best.step]
            self._new_ids = {step: self._new_ids[step] for step in steps if step in self._new_ids}
            self._new_ids[run.step] = comparison.new_ids()

    def new_ids(self, kept: Kept | None) -> Figures:
        """Return how samples with new ids were ranked in the validation of the state that is kept.

        For each Id column with ids that training has not seen: the share of rows that have one
        (`new`), and the AUC of the model over the others and over them (`auc_known`, `auc_new`).
        Of models with one probability.
        """
        newest = list(self._new_ids.values())[-1:]
        if kept is not None and kept.step in self._new_ids:
            newest = [self._new_ids[kept.step]]
        return newest[0] if newest else {}

    def unseen(self, example: Example) -> dict[str, Any]:
        """Return for each Id column which samples have an id that no learned sample had, [n]."""
        batch = example.batch
        models = self._models.get(None)
        if batch is None or example.structure is not None or models is None:
            return {}
        unseen = {}
        for name, ids in batch.ids.items():
            lengths = np.asarray(host(ids.lengths()))
            places = places_of([name], np.asarray(host(ids.values)).reshape(1, -1))[0]
            samples = np.repeat(np.arange(len(lengths)), lengths)
            unseen[name] = np.bincount(samples, ~models.has_seen(places), len(lengths)) > 0
        return unseen

    def predictions(self, example: Example, criterion: Criterion) -> dict[str, Any]:
        """Return the predictions of each baseline: [n], or of several labels a dict of these.

        Metrics, windows and segments ask for those of the same example: they are made once.
        """
        if self._predicted is None or self._predicted[0] is not example:
            self._predicted = (example, self._predict(example, criterion))
        return self._predicted[1]

    def _predict(self, example: Example, criterion: Criterion) -> dict[str, Any]:
        inputs = self._inputs_of(example)
        names = [CONSTANT]
        if example.batch is not None and example.structure is None:
            names.append(LINEAR)
        if inputs.items is not None:
            names.append(f"{POPULARITY}{self._item}")
        by_label: dict[str, dict[str | None, Any]] = {name: {} for name in names}
        for label in _labels_of(example):
            columns = self._model(label, criterion).predictions(inputs)
            for name, values in zip(names, columns, strict=False):
                by_label[name][label] = values
        return {name: values.get(None, values) for name, values in by_label.items()}

    def state(self) -> dict[str, Any]:
        """Return all under one key that no content digest covers: models are equal without it."""
        models = {label or "": models.state() for label, models in self._models.items()}
        state = {
            "item": self._item,
            "models": {**self._saved, **models},
            "figures": self.figures,
            "new_ids": [[step, figures] for step, figures in self._new_ids.items()],
            "progressive": self._progressive.state(),
        }
        return {"wall_beside": state}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._predicted = None
        state = state.get("wall_beside", state)  # states of earlier builds had no such key
        self._models = {}
        self._saved = state["models"]
        if self._item not in (None, state["item"]):
            log.info("Baselines: the rates of %s begin anew", self._item)
            none = dict.fromkeys(("items", "item_weights", "item_labels"), np.empty(0, np.int64))
            self._saved = {label: {**models, **none} for label, models in self._saved.items()}
        self._item = self._item or state["item"]
        self.figures = {name: dict(values) for name, values in state["figures"].items()}
        self._new_ids = {step: dict(figures) for step, figures in state.get("new_ids", ())}
        self._progressive.load_state(state["progressive"])

    def _learn(self, example: Example, criterion: Criterion) -> None:
        self._predicted = None
        inputs = self._inputs_of(example)
        weights = np.ones(example.num_samples)
        if example.weight is not None:
            weights = np.asarray(host(example.weight), np.float64)
        for label, values in _labels_of(example).items():
            labels = np.asarray(values, np.float64).reshape(-1)
            missing_below = criterion.missing_below(label)
            if missing_below is None:
                self._model(label, criterion).learn(inputs, labels, weights)
            else:
                there = labels >= missing_below
                self._model(label, criterion).learn(inputs.of(there), labels[there], weights[there])

    def _model(self, label: str | None, criterion: Criterion) -> SimpleModels:
        if label not in self._models:
            models = SimpleModels(is_amount=not criterion.is_probability(label))
            if (label or "") in self._saved:
                models.load_state(self._saved[label or ""])
            self._models[label] = models
        return self._models[label]

    def _inputs_of(self, example: Example) -> SampleFeatures:
        """Return the features of an example, which are read once to score and to learn."""
        if self._inputs is None or self._inputs[0] is not example:
            self._inputs = (example, self._read(example))
        return self._inputs[1]

    def _read(self, example: Example) -> SampleFeatures:
        batch = example.batch
        number = example.num_samples
        if batch is None or example.structure is not None:
            return SampleFeatures(number, *_NONE, np.empty((number, 0)), None)
        parts = list(_places(batch)) or [_NONE]
        rows, places, shares = (np.concatenate(column) for column in zip(*parts, strict=True))
        dense = [np.reshape(host(values), (number, -1)) for values in batch.dense.values()]
        numbers = np.concatenate(dense, 1) if dense else np.empty((number, 0))
        item = self._item_of(batch)
        items = None
        if item is not None:
            values = np.asarray(host(batch.ids[item].values)).reshape(1, -1)
            items = places_of([item], values).reshape(-1)
        return SampleFeatures(
            number, rows, places, shares, np.nan_to_num(numbers.astype(np.float64)), items
        )

    def _item_of(self, batch: Batch) -> str | None:
        """Return the column of the item; None where no column has one id a sample."""
        names = [name for name, ids in batch.ids.items() if ids.offsets is None]
        if self._item is None and names:
            items = [name for name in names if names_an_item(name)]
            self._item = (items or names)[0]
        if self._item is not None and self._item not in names:
            raise ConfigError(
                f"Baselines.item: one id a sample is needed, got {self._item!r} and the columns of "
                f"one id {', '.join(names) or '(none)'}. Name one of them, or leave it out."
            )
        return self._item


class Comparison:
    """Feeds the metrics of a model with the predictions of baselines, in one pass over data."""

    reads_features = True

    def __init__(self, baselines: Baselines) -> None:
        self.baselines = baselines
        self._scorer: Scorer | None = None  # of the model
        self._scorers: dict[str, Scorer] = {}
        self._saved: Mapping[str, Any] = {}
        self._learns = False
        self._new_ids = NewIds()

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_predicted(self, run: Run) -> None:
        scorer = watch_scores(run.observer, self, _is_compared)
        if scorer is not None:
            self._scorer = scorer
            self._scorers = {}
            self._learns = isinstance(run.observer, Progressive)
            self._new_ids = NewIds()

    def watch(self, outputs: tuple[Any, ...], example: Example) -> None:
        """Take a batch that the model has scored."""
        assert self._scorer is not None
        for name, scores in scores_of(self.baselines, self._scorer, outputs, example).items():
            if name not in self._scorers:
                self._scorers[name] = scorer_beside(self._scorer, name, learns=self._learns)
                if name in self._saved:
                    self._scorers[name].load_state(self._saved[name])
            self._scorers[name].feed(scores, example)
        _, prediction, labels = outputs
        if self._scorer.gives_probabilities and not self._learns and np.ndim(prediction) == 1:
            unseen = self.baselines.unseen(example)
            self._new_ids.update(prediction, labels, host(example.weight), unseen)

    def new_ids(self) -> Figures:
        """Return what `Baselines.new_ids` says of this pass; {} where nothing was compared."""
        return self._new_ids.results()

    def results(self) -> Figures:
        """Return the metrics of each baseline."""
        return {name: scorer.results() for name, scorer in self._scorers.items()}

    def state(self) -> dict[str, Any]:
        """Return the states of the metrics, by name of the baseline."""
        states = {name: scorer.state() for name, scorer in self._scorers.items()}
        return states or dict(self._saved)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._scorers = {}
        self._saved = state


def _is_compared(scorer: Scorer) -> bool:
    return scorer.criterion is not None and not scorer.has_own_outputs


def scorer_beside(scorer: Scorer, name: str, *, learns: bool) -> Scorer:
    """Return a scorer of a baseline with the metrics of the model's.

    A constant that learns from sample to sample is not ranked: its order would be that of time.
    """
    if name != CONSTANT or not learns:
        return scorer.again()
    return scorer.again(_without_ranking(scorer.metrics))


def _without_ranking(metrics: Mapping[str, Any]) -> dict[str, Any]:
    others: dict[str, Any] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Mapping):  # of a label
            others[name] = _without_ranking(metric)
        elif name.partition("@")[0] not in _RANKING:
            others[name] = metric
    return others


def scores_of(
    baselines: Baselines, scorer: Scorer, outputs: tuple[Any, ...], example: Example
) -> dict[str, tuple[Any, ...]]:
    """Return what a scorer is fed with for each baseline, in place of the model's outputs.

    {} where the model does not predict one number a sample.
    """
    _, prediction, labels = outputs
    parts = prediction.values() if isinstance(prediction, dict) else [prediction]
    is_comparable = all(np.size(part) == example.num_samples for part in parts)
    if labels is None or scorer.criterion is None or not is_comparable:
        return {}
    if isinstance(prediction, dict) != isinstance(labels, dict):
        return {}
    predictions = baselines.predictions(example, scorer.criterion)
    return {name: (None, values, labels) for name, values in predictions.items()}


def findings(metrics: Mapping[str, float], baselines: Figures) -> list[str]:
    """Return a sentence for each baseline that is better than the model.

    Args:
        metrics: those of the model.
        baselines: metrics of the same names.
    """
    sentences = []
    for name, figures in baselines.items():
        better = []
        for key, value in figures.items():
            own_value = metrics.get(key, math.nan)
            if key.rpartition(".")[2].partition("@")[0] in _WITHOUT_BETTER:
                continue
            gain = value - own_value
            if smaller_is_better(key):
                gain = -gain
            if gain > 0:
                text = key.removeprefix("valid.").replace("_", " ")
                better.append(f"{text} {value:.4f} against {own_value:.4f}")
        if better:
            sentences.append(f"{title_of(name)} is better than the model: {', '.join(better)}.")
    return sentences


def title_of(name: str) -> str:
    """Return the name of a baseline for people, at the begin of a sentence."""
    titles = {CONSTANT: "A constant", LINEAR: "A linear model"}
    return titles.get(name, f"{name[:1].upper()}{name[1:]}")


def _labels_of(example: Example) -> dict[str | None, Any]:
    """Return the labels by name; a single one has the name None."""
    labels = host(example.labels)
    return dict(labels) if isinstance(labels, Mapping) else {None: labels}


def _places(batch: Batch) -> Iterator[tuple[Any, Any, Any]]:
    """Yield sample, place and share of each id: first of all features of one id, then of others."""
    singles = [name for name, ids in batch.ids.items() if ids.offsets is None]
    if singles:
        values = np.stack([np.asarray(host(batch.ids[name].values)) for name in singles])
        rows = np.tile(np.arange(values.shape[1]), len(singles))
        yield rows, places_of(singles, values).reshape(-1), np.ones(len(rows))
    for name, ids in batch.ids.items():
        if ids.offsets is not None:
            lengths = np.asarray(host(ids.lengths()))
            rows = np.repeat(np.arange(len(lengths)), lengths)
            values = np.asarray(host(ids.values)).reshape(1, -1)
            shares = np.repeat(1.0 / np.maximum(lengths, 1), lengths)
            yield rows, places_of([name], values).reshape(-1), shares
