# SPDX-License-Identifier: Apache-2.0
"""Scoring without learning: what evaluation, prediction and predict-then-learn put into the loop as
observers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from hotbed.config import kind_of
from hotbed.data.batch import Batch
from hotbed.data.dataset import Dataset
from hotbed.errors import ConfigError
from hotbed.metrics import Metric, bounded, get_metric
from hotbed.optim.modes import in_eval_mode
from hotbed.optim.precision import Precision
from hotbed.training.learner import Criterion, Example

LOSS = "loss"
ALL = slice(None)


class Watcher(Protocol):
    """Hears of every batch that an observer scored, once it is learned."""

    def watch(self, outputs: tuple[Any, ...], example: Example) -> None:
        """`outputs` are those of `Scorer.outputs` for the example."""


def metric_set(metrics: Any) -> dict[str, Any]:
    """Metrics by name from what `RecModel(metrics=…)` takes.

    A set or list of names and `Metric` objects, a mapping of names to either, or a mapping of label
    names to such sets. "gauc@user" is the metric within the groups of Id column `user`; so is a
    metric object with an attribute `group`.

    >>> sorted(metric_set({"auc", "gauc@user"}))
    ['auc', 'gauc@user']
    """
    if metrics is None:
        return {}
    if isinstance(metrics, (str, Metric)):
        metrics = [metrics]
    if isinstance(metrics, Mapping):
        several = (Mapping, set, frozenset, list, tuple)
        return {
            str(name): metric_set(metric)
            if isinstance(metric, several)
            else _metric(metric, str(name))
            for name, metric in metrics.items()
        }
    if not isinstance(metrics, Iterable):
        raise ConfigError(
            f"metrics: not a set of metrics — received {metrics!r:.80} — give names such as "
            f"{{'auc'}}"
        )
    named: dict[str, Any] = {}
    for metric in sorted(metrics, key=str) if isinstance(metrics, (set, frozenset)) else metrics:
        name = metric if isinstance(metric, str) else kind_of(type(metric))
        named[name] = _metric(metric, name)
    return named


def check_groups(metrics: Mapping[str, Any]) -> None:
    """Raise ConfigError where a metric within groups does not say which Id column holds them."""
    for name, metric in metrics.items():
        if isinstance(metric, Mapping):
            check_groups(metric)
        elif (
            getattr(metric, "needs_group", False)
            and metric.group is None
            and metric.indexes is None
        ):
            raise ConfigError(
                f"metrics.{name}: it ranks within groups — received no group — name their Id "
                "column, "
                f"as in '{kind_of(type(metric))}@user' or {type(metric).__name__}(group='user')"
            )


def _metric(metric: Any, name: str) -> Any:
    """The metric of that name; `ndcg@user` gives a metric its group."""
    if isinstance(metric, str):
        metric = get_metric(metric)
    missing = [
        verb for verb in ("clear", "update", "eval") if not callable(getattr(metric, verb, None))
    ]
    if missing:
        raise ConfigError(
            f"metrics: {metric!r:.80} has no {missing[0]}() — give a name or a hb.metrics object"
        )
    group = name.partition("@")[2]
    if group and getattr(metric, "needs_group", False) and metric.group is None:
        metric = copy.copy(metric)
        metric.group = group
    return metric


class Scorer:
    """Scores examples, with every module in eval mode, and feeds metrics.

    Without `eval_network`, outputs are (loss, prediction, label) of the network and its criterion.
    With it, outputs are whatever it returns; it may share modules with the network. `indexes` =
    positions of loss, prediction and label among them, None = all of them go to every metric (which
    may pick with `Metric.set_indexes`).
    """

    def __init__(
        self,
        network: Any,
        criterion: Criterion | None,
        metrics: Mapping[str, Any],
        *,
        eval_network: Any = None,
        indexes: tuple[int, int, int] | None = None,
        precision: Precision | None = None,
    ) -> None:
        self.network = network
        self.criterion = criterion
        self.metrics = metrics
        self.eval_network = eval_network
        self._indexes = (0, 1, 2) if eval_network is None else indexes
        self._precision = precision or Precision()
        self._fed: list[tuple[str, str | None, Any]] = []
        self._saved: Mapping[str, Any] = {}
        self._loss = 0.0
        self._seen: float = 0  # samples, or their weight
        self._held: tuple[tuple[Any, ...], Example] | None = None
        self.watchers: list[Watcher] = []

    @property
    def gives_probabilities(self) -> bool:
        """Whether predictions are probabilities: the loss is a cross-entropy of logits. False where
        that is not known.
        """
        if self.has_own_outputs or self.criterion is None:
            return False
        losses = getattr(self.criterion.loss_fn, "losses", self.criterion.loss_fn)
        labels = losses if isinstance(losses, Mapping) else [None]
        return all(
            float(self.criterion.activate(torch.zeros(()), label)) == 0.5 for label in labels
        )

    def outputs(self, example: Example) -> tuple[Any, ...]:
        """Outputs for one example, as NumPy on the host: (loss, prediction, label), or what
        `eval_network` returns.
        """
        with torch.no_grad(), in_eval_mode(self.network, self.eval_network):
            with self._precision.autocast(example.device):
                if self.eval_network is None:
                    raw = self.network(*example.arguments)
                else:
                    raw = self.eval_network(*example.everything)
            if self.has_own_outputs:
                return tuple(
                    host(part) for part in (raw if isinstance(raw, (tuple, list)) else (raw,))
                )
        if self.criterion is None:
            return None, host(raw), host(example.labels)
        return self.outputs_of(self.criterion.shape(raw, example.labels), example)

    def outputs_of(self, raw: Any, example: Example) -> tuple[Any, ...]:
        """The same from what the network gave for the example, in the criterion's shape."""
        assert self.criterion is not None
        with torch.no_grad():
            loss = None
            if example.labels is not None:
                loss = self.criterion(raw, example.labels, _with_mean_one(example.weight))
            return host(loss), host(self.criterion.activate(raw)), host(example.labels)

    @property
    def has_own_outputs(self) -> bool:
        """Whether outputs are those of an eval_network."""
        return self.eval_network is not None

    def observe(self, example: Example) -> None:
        """Score one example."""
        self._held = (self.outputs(example), example)

    def settle(self) -> None:
        """Feed every metric and watcher with what was observed."""
        if self._held is not None:
            (outputs, example) = self._held
            self._held = None
            self.feed(outputs, example)
            for watcher in self.watchers:
                watcher.watch(outputs, example)

    def feed(self, outputs: tuple[Any, ...], example: Example, rows: slice = ALL) -> None:
        """Feed every metric with what `outputs` gave for an example, or for some of its rows."""
        weight = None if example.weight is None else host(example.weight)
        num_rows = example.num_samples

        def update(metric: Any, arguments: tuple[Any, ...], extras: Mapping[str, Any]) -> None:
            chosen = {name: _part(value, rows, num_rows) for name, value in extras.items()}
            metric.update(*(_part(value, rows, num_rows) for value in arguments), **chosen)

        if self._indexes is None:
            for _, _, metric in self._fed or self._lay_out(None):
                update(metric, outputs, {})
            return
        loss, prediction, label = (self._pick(outputs, place) for place in self._indexes)
        if loss is not None:
            mass: float = len(range(*rows.indices(num_rows)))
            if weight is not None and not self.has_own_outputs:
                mass = float(weight[rows].sum(dtype=np.float64))
            self._loss += float(np.mean(loss)) * mass
            self._seen += mass
        if self.metrics and label is None:
            raise ConfigError(
                "metrics need labels — received data without — use predict(), or add a Label column"
            )
        for _, name, metric in self._fed or self._lay_out(prediction):
            chooses = getattr(metric, "indexes", None) is not None
            arguments = outputs if chooses else (prediction, label)
            if name is not None:
                arguments = tuple(
                    value[name] if isinstance(value, Mapping) else value for value in arguments
                )
            update(
                metric,
                arguments,
                {} if chooses and self.has_own_outputs else _extras(metric, weight, example),
            )

    def state(self) -> dict[str, Any]:
        """What has been fed, as JSON values and NumPy arrays; metrics of the user's own without
        `state` begin anew.
        """
        metrics = {
            name: metric.state() for name, _, metric in self._fed if hasattr(metric, "state")
        }
        return {"loss": self._loss, "seen": self._seen, "metrics": metrics or dict(self._saved)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave; a metric that was not there then begins anew."""
        self._loss = float(state["loss"])
        self._seen = state["seen"]
        self._fed = []  # metrics are laid out by the first batch
        self._saved = dict(state["metrics"])
        self._held = None

    def again(self, metrics: Mapping[str, Any] | None = None) -> Scorer:
        """A scorer of the same kind that has seen nothing yet; `metrics`: others than this one's."""
        fresh = copy.copy(self)
        fresh.metrics = self.metrics if metrics is None else metrics
        fresh._fed = []
        fresh._saved = {}
        fresh._loss = 0.0
        fresh._seen = 0
        fresh._held = None
        fresh.watchers = []
        return fresh

    def bounded(self) -> Scorer:
        """A scorer that has seen nothing yet, whose metrics need memory that does not grow: see
        `hb.metrics.bounded`.
        """

        def each(metrics: Mapping[str, Any]) -> dict[str, Any]:
            return {
                k: each(v) if isinstance(v, Mapping) else bounded(v) for k, v in metrics.items()
            }

        return self.again(each(self.metrics))

    def results(self) -> dict[str, float]:
        """Newest value of each metric, `label.metric` for several labels, and the mean loss where
        one is computed.
        """
        found = {LOSS: self._loss / self._seen} if self._seen else {}
        return found | {name: float(metric.eval()) for name, _, metric in self._fed}

    def _lay_out(self, prediction: Any) -> list[tuple[str, str | None, Any]]:
        """Fix which metric reads which label: a metric given once serves every label with a copy of
        its own.
        """
        labels = list(prediction) if isinstance(prediction, dict) else [None]
        for name, metric in self.metrics.items():
            if isinstance(metric, Mapping):
                if name not in labels:
                    known = (
                        ", ".join(str(label) for label in labels)
                        if labels != [None]
                        else "one without a name"
                    )
                    raise ConfigError(
                        f"metrics.{name}: no such label — the network's outputs are {known} — use "
                        "those"
                    )
                self._fed += [
                    (f"{name}.{inner}", name, _fresh(one)) for inner, one in metric.items()
                ]
            else:
                self._fed += [
                    (name if label is None else f"{label}.{name}", label, _fresh(metric))
                    for label in labels
                ]
        for name, _, metric in self._fed:
            if name in self._saved and hasattr(metric, "load_state"):
                metric.load_state(self._saved[name])
        self._saved = {}
        return self._fed

    def _pick(self, outputs: tuple[Any, ...], place: int) -> Any:
        if -len(outputs) <= place < len(outputs):
            return outputs[place]
        raise ConfigError(
            f"eval_indexes: no output {place} — eval_network returned {len(outputs)} — "
            "give the positions of loss, prediction and label among its outputs"
        )


class Progressive:
    """Scores a stream batch by batch before it is learned: all of it, and the window since the last
        `roll`.

    `endless`: the metrics take the form whose memory does not grow (`hb.metrics.bounded`).
    `learner`: take the outputs of its training forward instead of a forward of their own: cheaper,
    but with dropout, with the batch's own norms, and with rows for ids that are new in it. What it
    has seen is a `state` for checkpoints, and of learned batches only.
    """

    def __init__(self, scorer: Scorer, *, endless: bool = False, learner: Any = None) -> None:
        if learner is not None and (scorer.criterion is None or scorer.has_own_outputs):
            raise ConfigError(
                "progressive='training': the training forward gives no prediction — received a "
                "model with "
                "eval_network or without loss_fn — give progressive=True"
            )
        self._learner = learner
        self.total = scorer.bounded() if endless else scorer
        self._window = self.total.again()
        self._held: tuple[tuple[Any, ...], Example] | None = None
        self.watchers: list[Watcher] = []

    def observe(self, example: Example) -> None:
        self._held = (self.total.outputs(example) if self._learner is None else (), example)

    def settle(self) -> None:
        if self._held is None:
            return
        (outputs, example) = self._held
        self._held = None
        if self._learner is not None:
            outputs = self.total.outputs_of(self._learner.outputs, example)
        for scorer in (self.total, self._window):
            scorer.feed(outputs, example)
        for watcher in self.watchers:
            watcher.watch(outputs, example)

    def window(self) -> dict[str, float]:
        """Metrics since the last `roll`; nan where there was one class only."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return self._window.results()

    def roll(self) -> dict[str, float]:
        """Metrics of the window, which then starts anew."""
        results = self.window()
        self._window = self.total.again()
        return results

    def state(self) -> dict[str, Any]:
        """All of the stream and the window since the last `roll`, as JSON values and NumPy arrays."""
        return {"total": self.total.state(), "window": self._window.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave: to the same bits."""
        self.total.load_state(state["total"])
        self._window = self.total.again()
        self._window.load_state(state["window"])
        self._held = None


def to_predict(data: Any) -> Any:
    """What `predict` reads of its data: one Batch as batches, a Dataset without its labels."""
    if isinstance(data, Dataset):
        return data.without_labels()
    return [data] if isinstance(data, Batch) else data


class Collector:
    """Keeps the predictions of every example, for `predict`."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._parts = list[Any]()

    def observe(self, example: Example) -> None:
        self._parts.append(self._scorer.outputs(replace(example, labels=None))[1])

    def settle(self) -> None: ...

    def predictions(self) -> Any:
        """float32 [n] (or [n, k]); a dict of these for a network with several outputs."""
        if self._parts and isinstance(self._parts[0], dict):
            return {
                name: np.concatenate([part[name] for part in self._parts])
                for name in self._parts[0]
            }
        return (
            np.concatenate([np.atleast_1d(part) for part in self._parts])
            if self._parts
            else np.empty(0, np.float32)
        )


def host(value: Any) -> Any:
    """Tensors as NumPy arrays on the host, in float32 where they are a shorter float; other values
    as they are.
    """
    if torch.is_tensor(value):
        value = value.detach()
        value = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
        return value.cpu().numpy()
    if isinstance(value, Mapping):
        return {name: host(part) for name, part in value.items()}
    return value


def _part(value: Any, rows: slice, num_rows: int) -> Any:
    """The given rows of an array that has one a sample; other values as they are."""
    if rows is ALL or getattr(value, "shape", ())[:1] != (num_rows,):
        return value
    return value[rows]


def _with_mean_one(weight: torch.Tensor | None) -> torch.Tensor | None:
    """Weights divided by their mean: the mean over samples is then the weighted mean."""
    if weight is None:
        return None
    mean = weight.mean()
    return weight / mean if mean > 0 else weight


def _fresh(metric: Any) -> Any:
    metric = copy.deepcopy(metric)
    metric.clear()
    return metric


def _extras(metric: Any, weight: Any, example: Example) -> dict[str, Any]:
    """Weight and group, for the metrics that use them."""
    extras: dict[str, Any] = {} if weight is None else {"weight": weight}
    name = getattr(metric, "group", None)
    if isinstance(name, str):
        if example.batch is None or name not in example.batch.ids:
            known = (
                ", ".join(example.batch.ids)
                if example.batch is not None
                else "none, the data are tuples"
            )
            raise ConfigError(
                f"metrics: no Id column {name!r} to group by — the batch has {known} — name one "
                "of them"
            )
        ids = example.batch.ids[name]
        if ids.offsets is not None:
            raise ConfigError(
                f"metrics: column {name!r} holds several ids a sample — group by a column with one"
            )
        extras["group"] = host(ids.values)
    return extras
