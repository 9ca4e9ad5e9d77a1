# SPDX-License-Identifier: Apache-2.0
"""Scoring without learning: the observers of evaluation, prediction and predict-then-learn."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from hotbed.data.batch import changed
from hotbed.data.columns import SegmentColumn
from hotbed.errors import ConfigError
from hotbed.metrics import bounded
from hotbed.optim.modes import in_eval_mode
from hotbed.optim.precision import AmpPrecision
from hotbed.parallel import WHOLE, Shard
from hotbed.training.step.criterion import Criterion
from hotbed.training.step.example import CPU, Example, misfits_named
from hotbed.training.step.reading import OneLate, host, host_later
from hotbed.training.step.together import Together

LOSS = "loss"
ALL = slice(None)
Scores = tuple[Any, ...]
"""(loss, prediction, label) of an example, or the values of `eval_network`."""

Observed = tuple[Scores, Example]
"""An example, or one of its grains, with its scores."""

Outputs = Callable[[Example], Scores]
"""Returns the outputs for an example."""

OutputsLater = Callable[[Example], Callable[[], Scores]]
"""Begins to compute the outputs for an example, and returns what waits for them."""

Fed = tuple[str, str | None, Any]
"""Name of a metric, the label that it reads (None = the only one), and the metric."""


class Parted(nn.Module, ABC):
    """An `eval_network` that says which of its outputs are loss, prediction and label."""

    @abstractmethod
    def parts(self, outputs: Scores) -> tuple[Any, Any, Any]:
        """Return loss, prediction and label among the outputs."""


class Watcher(Protocol):
    """Receives every batch that an observer scored, once it is learned, grain by grain."""

    def watch(self, outputs: Scores, example: Example) -> None:
        """Take the `outputs` of the example, those of `Scorer.outputs`."""


class Scorer:
    """Scores examples, with every module in eval mode, and feeds metrics.

    Without `eval_network`, outputs are (loss, prediction, label) of the network and its criterion.
    With `eval_network`, outputs are the values that it returns; it may share modules with the
    network. Every metric gets all outputs, and may pick with `Metric.set_indexes`; of a `Parted`,
    it gets prediction and label.
    """

    def __init__(
        self,
        network: Any,
        criterion: Criterion | None,
        metrics: Mapping[str, Any],
        *,
        eval_network: Any = None,
        precision: AmpPrecision | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        self.network = network
        self.criterion = criterion
        self.metrics = metrics
        self.eval_network = eval_network
        self._precision = precision or AmpPrecision()
        self.shard = shard
        self._fed: list[Fed] = []
        self._saved: Mapping[str, Any] = {}
        self._loss = 0.0
        self._seen: float = 0  # samples, or their weight
        self._observed: Callable[[], Example] | None = None
        self._late: OneLate[Example] = OneLate()
        self._is_late = False  # whether a device scores
        self.watchers: list[Watcher] = []

    @property
    def gives_probabilities(self) -> bool:
        """Whether predictions are probabilities, because the loss is a cross-entropy of logits.

        False where that is not known.
        """
        if self.has_own_outputs or self.criterion is None:
            return False
        return self.criterion.gives_probabilities

    def outputs(self, example: Example) -> Scores:
        """Return the outputs for one example, as NumPy arrays on the host.

        They are (loss, prediction, label), or the values that `eval_network` returns.
        """
        return self.outputs_later(example)()

    def outputs_later(self, example: Example) -> Callable[[], Scores]:
        """Begin to compute the outputs for one example; return what waits for them."""
        with torch.no_grad(), in_eval_mode(self.network, self.eval_network):
            with self._precision.autocast(example.device):
                if self.eval_network is None:
                    with misfits_named(self.network, example):
                        raw = self.network(*example.arguments, **example.keywords)
                else:
                    raw = self.eval_network(*example.everything)
            if self.has_own_outputs:
                if not isinstance(raw, (tuple, list)):
                    raw = (raw,)
                return host_later(tuple(raw), example.device)
        if self.criterion is None:
            return host_later((None, raw, example.labels), example.device)
        return outputs_of(self.criterion, self.criterion.shape(raw, example.labels), example)

    @property
    def scoring(self) -> Any:
        """The network that scores, or another callable."""
        return self.network if self.eval_network is None else self.eval_network

    @property
    def groups(self) -> set[str]:
        """The Id columns by whose ids metrics group samples."""
        return groups_of(self.metrics)

    @property
    def has_own_outputs(self) -> bool:
        """Whether outputs are those of an `eval_network`."""
        return self.eval_network is not None

    def observe(self, example: Example) -> None:
        """Score one example, grain by grain."""
        self._observed = scored_later(self, example)
        self._is_late = example.device != CPU

    def scored(
        self, examples: Sequence[Example], outputs: Outputs | None = None
    ) -> Sequence[Example]:
        """Return examples of one kind with the scores of their grains, which ranks share out.

        Several are returned as they are where each must be scored in its turn.

        Args:
            examples: those of others with scores are returned as they are.
            outputs: of a grain; None = `Scorer.outputs`.
        """
        if examples[0].scores is not None:
            return examples
        outputs = outputs or self.outputs
        scores = None
        if self.shard.size > 1:
            together = Together(examples)
            asked = partial(together.asked, self.scoring)
            every = self.shard.shared_out(len(together), together.grains, asked, outputs)
            scores = None if every is None else together.of_each(every)
        if scores is None and len(examples) == 1:
            scores = [[outputs(grain) for grain in examples[0].grains if grain is not None]]
        if scores is None:
            return examples
        pairs = zip(examples, scores, strict=True)
        return [changed(example, {"scores": of_example}) for example, of_example in pairs]

    def settle(self) -> None:
        """Feed every metric and watcher with the example that was observed.

        Where a device scores, it is fed one example late: see `finish`.
        """
        if self._observed is None:
            return
        for example in self._late.put(self._observed):
            self._take(example)
        self._observed = None
        if not self._is_late:
            self.finish()

    def finish(self) -> None:
        """Feed metrics and watchers with the last example that was observed."""
        for example in self._late.rest():
            self._take(example)

    def _take(self, example: Example) -> None:
        for outputs, grain in observed_in(example, self.metrics, watched=bool(self.watchers)):
            self.feed(outputs, grain)
            for watcher in self.watchers:
                watcher.watch(outputs, grain)

    def barrier(self, step: int, now: int | None) -> bool:
        """Return True: scoring reads the tables."""
        return True

    def feed(self, outputs: Scores, example: Example, rows: slice = ALL) -> None:
        """Feed every metric with the `outputs` of an example, or of some of its rows."""
        num_rows = example.num_samples
        if isinstance(self.eval_network, Parted):
            loss, prediction, label = self.eval_network.parts(outputs)
        elif self.eval_network is None:
            loss, prediction, label = outputs
        else:
            for _, _, metric in self._fed or self._lay_out([None]):
                _update(metric, outputs, {}, rows, num_rows)
            return
        weight = host(example.weight)
        if loss is not None:
            mass: float = len(range(*rows.indices(num_rows)))
            if weight is not None and not self.has_own_outputs:
                mass = float(weight[rows].sum(dtype=np.float64))
            if np.ndim(loss):
                loss = np.mean(loss)
            self._loss += float(loss) * mass
            self._seen += mass
        if self.metrics and label is None:
            raise ConfigError(
                "metrics: they need labels, got data without labels. Use predict(), or add a Label "
                "column."
            )
        for _, name, metric in self._fed or self._lay_out(_labels_of(prediction, label)):
            arguments: Scores = (prediction, label)
            extras: dict[str, Any] = {}
            has_indexes = getattr(metric, "indexes", None) is not None
            if has_indexes:
                arguments = outputs
            if not (has_indexes and self.has_own_outputs):
                extras = _extras(metric, weight, example)
            if name is not None:
                arguments = tuple(_of_label(value, name) for value in arguments)
            _update(metric, arguments, extras, self._known(label, name, rows), num_rows)

    def _known(self, labels: Any, name: str | None, rows: slice) -> slice | np.ndarray:
        """Return those of some rows whose label is not missing."""
        missing_below = None
        if self.criterion is not None and not self.has_own_outputs:
            missing_below = self.criterion.missing_below(name)
        if missing_below is None:
            return rows
        values = labels if name is None else _of_label(labels, name)
        numbers = np.arange(len(values))[rows]
        return numbers[np.reshape(values, len(values))[rows] >= missing_below]

    def state(self) -> dict[str, Any]:
        """Return the sums and the metrics' states, as JSON values and NumPy arrays.

        A user's metric without `state` starts anew after a resumption.
        """
        self.finish()
        metrics = {}
        for name, _, metric in self._fed:
            if hasattr(metric, "state"):
                metrics[name] = metric.state()
        return {"loss": self._loss, "seen": self._seen, "metrics": metrics or dict(self._saved)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; a metric without an entry starts anew."""
        self._loss = float(state["loss"])
        self._seen = state["seen"]
        self._fed = []  # metrics are laid out by the first batch
        self._saved = dict(state["metrics"])
        self._observed = None
        self._late = OneLate()

    def again(self, metrics: Mapping[str, Any] | None = None) -> Scorer:
        """Return a scorer of the same kind without data; `metrics` replaces this one's metrics."""
        fresh = copy.copy(self)
        if metrics is not None:
            fresh.metrics = metrics
        fresh._fed = []
        fresh._saved = {}
        fresh._loss = 0.0
        fresh._seen = 0
        fresh._observed = None
        fresh._late = OneLate()
        fresh.watchers = []
        return fresh

    @property
    def by_name(self) -> dict[str, Any]:
        """The metrics with what they were fed, by name; empty before the first batch."""
        self.finish()
        return {name: metric for name, _, metric in self._fed}

    def results(self) -> dict[str, float]:
        """Return the value of each metric, and the mean loss where one is computed.

        Metrics of several labels are named `label.metric`.
        """
        self.finish()
        values: dict[str, float] = {}
        if self._seen:
            values[LOSS] = self._loss / self._seen
        for name, _, metric in self._fed:
            values[name] = float(metric.eval())
        return values

    def _lay_out(self, labels: list[Any]) -> list[Fed]:
        """Decide which metric reads which label: each label gets a copy of a metric for all."""
        for name, metric in self.metrics.items():
            if isinstance(metric, Mapping):
                self._check_label(name, labels)
                for inner_name, inner in metric.items():
                    fed = (f"{name}.{inner_name}", name, _fresh(inner))
                    self._fed.append(fed)
                continue
            for label in labels:
                full_name = name
                if label is not None:
                    full_name = f"{label}.{name}"
                self._fed.append((full_name, label, _fresh(metric)))
        for name, _, metric in self._fed:
            if name in self._saved and hasattr(metric, "load_state"):
                metric.load_state(self._saved[name])
        self._saved = {}
        return self._fed

    def _check_label(self, name: str, labels: list[Any]) -> None:
        if name in labels:
            return
        outputs = "one without a name"
        if labels != [None]:
            outputs = ", ".join(str(label) for label in labels)
        raise ConfigError(
            f"metrics.{name}: no such label, got a network with the outputs {outputs}. Use those."
        )


def bounded_form(scorer: Scorer) -> Scorer:
    """Return a scorer without data whose metrics need memory that does not grow.

    See `hb.metrics.bounded`.
    """
    return scorer.again(_bounded(scorer.metrics))


def scored_later(
    scorer: Scorer, example: Example, outputs_later: OutputsLater | None = None
) -> Callable[[], Example]:
    """Begin to score an example; return what waits for its scores, and returns it with them.

    `outputs_later`: of a grain; None = `Scorer.outputs_later`.
    """
    outputs_later = outputs_later or scorer.outputs_later
    if example.scores is not None or scorer.shard.size > 1:
        (scored,) = scorer.scored([example], lambda grain: outputs_later(grain)())
        return lambda: scored
    coming = [outputs_later(grain) for grain in example.grains if grain is not None]
    return lambda: changed(example, {"scores": [scores() for scores in coming]})


def outputs_of(
    criterion: Criterion, raw: Any, example: Example, loss: torch.Tensor | None = None
) -> Callable[[], Scores]:
    """Return what waits for (loss, prediction, label) from the outputs of a network.

    Args:
        criterion: of the network.
        raw: the outputs as `Criterion.shape` returns them.
        example: the samples.
        loss: that of these outputs, if it is known.
    """
    with torch.no_grad():
        if loss is None and example.labels is not None:
            loss = criterion(raw, example.labels, _with_mean_one(example.weight))
        predictions = criterion.activate(raw)
    return host_later((loss, predictions, example.labels), example.device)


def observed_in(example: Example, metrics: Mapping[str, Any], *, watched: bool) -> list[Observed]:
    """Return the grains of an example that was scored, those with samples, each with its scores.

    Args:
        example: with scores.
        metrics: that are fed with them.
        watched: whether all columns of a grain are read, not those alone that metrics read.
    """
    batch = example.batch
    if not watched and batch is not None and batch.grain_ends and example.structure is None:
        groups = groups_of(metrics)
        if groups <= set(batch.ids):  # else an error names the columns
            ids = {name: batch.ids[name] for name in groups}
            example = example.of(changed(batch, {"ids": ids, "dense": {}}))
    return list(zip(example.scores, (g for g in example.grains if g is not None), strict=True))


def groups_of(metrics: Mapping[str, Any]) -> set[str]:
    """Return the Id columns by whose ids metrics group samples."""
    every = [
        metric
        for value in metrics.values()
        for metric in (value.values() if isinstance(value, Mapping) else [value])
    ]
    return {name for metric in every if (name := _group_of(metric)) is not None}


class Progressive:
    """Scores a stream batch by batch before it is learned.

    Metrics are of the whole stream, and of the window since the last `roll`. `state` covers learned
    batches only.

    Args:
        scorer: the network and the metrics.
        endless: use the form of the metrics whose memory does not grow (`hb.metrics.bounded`).
        learner: take the outputs of its training forward instead of another forward. This is
            cheaper, but includes dropout, the batch's own norms, and rows for ids that are new in
            the batch; see `obstacle_to_one_pass`.

    Raises:
        ConfigError: with `learner`, the model has an eval_network or no loss_fn.
    """

    def __init__(self, scorer: Scorer, *, endless: bool = False, learner: Any = None) -> None:
        if learner is not None and (scorer.criterion is None or scorer.has_own_outputs):
            raise ConfigError(
                "progressive='training': the training forward gives no prediction, got a model "
                "with eval_network or without loss_fn. Give progressive=True."
            )
        self._learner = learner
        self.total = bounded_form(scorer) if endless else scorer
        self._window = self.total.again()
        self._observed: Callable[[], Example] | None = None
        self.watchers: list[Watcher] = []

    def observe(self, example: Example) -> None:
        """Score one example, unless its training forward will give the outputs."""
        if self.by_training:
            self._observed = lambda: example
        else:
            self._observed = scored_later(self.total, example)

    def settle(self) -> None:
        """Feed metrics and watchers with the example that was observed."""
        if self._observed is None:
            return
        example = self._observed()
        self._observed = None
        if self.by_training:
            observed = self._of_training(example)
        else:
            observed = observed_in(example, self.total.metrics, watched=bool(self.watchers))
        for outputs, grain in observed:
            for scorer in (self.total, self._window):
                scorer.feed(outputs, grain)
            for watcher in self.watchers:
                watcher.watch(outputs, grain)

    def _of_training(self, example: Example) -> list[Observed]:
        """Return the grains of an example with the scores of its training forward."""
        raw = self._learner.outputs
        criterion = self.total.criterion
        assert criterion is not None, "the constructor asks for it"
        if len(example.grains) == 1:
            loss = self._learner.loss if example.weight is None else None
            return [(outputs_of(criterion, raw, example, loss)(), example)]
        observed: list[Observed] = []
        first = 0
        for grain in example.grains:
            if grain is not None:
                rows = slice(first, first + grain.num_samples)
                first = rows.stop
                part = _rows_of(raw, rows)
                observed.append((outputs_of(criterion, part, grain)(), grain))
        return observed

    @property
    def by_training(self) -> bool:
        """Whether the forward pass that learns a batch scores it."""
        return self._learner is not None

    def barrier(self, step: int, now: int | None) -> bool:
        """Return True if scoring reads tables, as they were before the batch was mapped."""
        return self._learner is None

    def window(self) -> dict[str, float]:
        """Return the metrics since the last `roll`; nan where there was one class only."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return self._window.results()

    def roll(self) -> dict[str, float]:
        """Return the metrics of the window, and start a new one."""
        results = self.window()
        self._window = self.total.again()
        return results

    def state(self) -> dict[str, Any]:
        """Return the states of stream and window, as JSON values and NumPy arrays."""
        return {"total": self.total.state(), "window": self._window.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; later results have the same bits."""
        self.total.load_state(state["total"])
        self._window = self.total.again()
        self._window.load_state(state["window"])
        self._observed = None


def scorer_of(observer: Any) -> Scorer | None:
    """Return the scorer of an observer, that of the whole stream; None if it has none."""
    if isinstance(observer, Progressive):
        return observer.total
    if isinstance(observer, Scorer):
        return observer
    return None


def watch_scores(
    observer: Any, watcher: Watcher, wanted: Callable[[Scorer], bool] | None = None
) -> Scorer | None:
    """Let a watcher receive what an observer scores, and return the scorer.

    None if the observer has no scorer, if the watcher receives its scores already, or if `wanted`
    returns False for it.
    """
    scorer = scorer_of(observer)
    if scorer is None or watcher in observer.watchers:
        return None
    if wanted is not None and not wanted(scorer):
        return None
    observer.watchers.append(watcher)
    return scorer


def scores_of_training(learner: Any, example: Example, loss: Any) -> Scores:
    """Return the outputs of a training forward in the form of `Scorer.outputs`; () without any."""
    raw = getattr(learner, "outputs", None)
    criterion = getattr(learner, "criterion", None)
    if raw is None or criterion is None:
        return ()
    return host_later((loss, criterion.activate(raw), example.labels), example.device)()


def _update(
    metric: Any,
    arguments: Scores,
    extras: Mapping[str, Any],
    rows: slice | np.ndarray,
    num_rows: int,
) -> None:
    """Feed a metric with `rows` of its arguments, if there are any."""
    if isinstance(rows, np.ndarray) and not len(rows):
        return
    parts = [_part(value, rows, num_rows) for value in arguments]
    keywords = {name: _part(value, rows, num_rows) for name, value in extras.items()}
    metric.update(*parts, **keywords)


def _rows_of(outputs: Any, rows: slice) -> Any:
    """Return `rows` of the outputs of a batch, of each label."""
    if isinstance(outputs, dict):
        return {name: output[rows] for name, output in outputs.items()}
    return outputs[rows]


def _labels_of(prediction: Any, labels: Any) -> list[Any]:
    """Return the names of the outputs that have a label; [None]: there is one without a name."""
    if not isinstance(prediction, dict):
        return [None]
    if not isinstance(labels, Mapping):
        return list(prediction)
    return [name for name in prediction if name in labels]


def _of_label(value: Any, label: str) -> Any:
    """Return the part of one label; other values as they are."""
    if isinstance(value, Mapping):
        return value[label]
    return value


def _bounded(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics in the form whose memory does not grow."""
    forms: dict[str, Any] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Mapping):
            forms[name] = _bounded(metric)
        else:
            forms[name] = bounded(metric)
    return forms


def _part(value: Any, rows: slice | np.ndarray, num_rows: int) -> Any:
    """Return `rows` of an array that has one row a sample; other values as they are."""
    if rows is ALL or getattr(value, "shape", ())[:1] != (num_rows,):
        return value
    return value[rows]


def _with_mean_one(weight: torch.Tensor | None) -> torch.Tensor | None:
    """Divide weights by their mean: the mean over samples is then the weighted mean."""
    if weight is None:
        return None
    mean = weight.mean()
    if mean > 0:
        return weight / mean
    return weight


def _fresh(metric: Any) -> Any:
    metric = copy.deepcopy(metric)
    metric.clear()
    return metric


def _extras(metric: Any, weight: Any, example: Example) -> dict[str, Any]:
    """Return weight and group, for the metrics that use them."""
    extras: dict[str, Any] = {}
    if weight is not None:
        extras["weight"] = weight
    name = _group_of(metric)
    if name is not None:
        extras["group"] = _groups(name, example)
    segment = getattr(metric, "segment", None)
    if segment is not None:
        extras["group"] = _segments(segment, example)
    return extras


def _segments(segment: SegmentColumn, example: Example) -> Any:
    """Return the value of each sample."""
    batch = example.batch
    if batch is None or segment not in batch.segments:
        kind = "tuples" if batch is None else "batches without it"
        raise ConfigError(
            f"BySegment: the rows have no column {segment.column!r}, got {kind}. Give a hb.Dataset."
        )
    return batch.segments[segment]


def _group_of(metric: Any) -> str | None:
    """Return the Id column by whose ids a metric groups samples; None if it does not."""
    name = getattr(metric, "group", None)
    return name if isinstance(name, str) else None


def _groups(name: str, example: Example) -> Any:
    """Return the ids of the Id column `name`, one a sample."""
    batch = example.batch
    columns = "none, the data are tuples"
    if batch is not None:
        columns = ", ".join(batch.ids)
    if batch is None or name not in batch.ids:
        raise ConfigError(
            f"metrics: the Id column {name!r} to group by is missing, got the columns {columns}. "
            "Name one of them."
        )
    ids = batch.ids[name]
    if ids.offsets is not None:
        raise ConfigError(
            f"metrics: one id a sample is needed to group by, got column {name!r} with several. "
            "Group by a column with one."
        )
    return host(ids.values)
