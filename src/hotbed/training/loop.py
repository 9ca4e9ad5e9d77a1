# SPDX-License-Identifier: Apache-2.0
"""The only loop in Hotbed: training, evaluation, prediction and online learning are this loop with other parts.

    read -> encode -> (predict) -> map ids -> forward -> loss -> backward -> check all gradients
         -> dense step -> sparse step -> callbacks

* learn only: `fit`                     * predict only: `evaluate`, `predict`
* predict, then learn: a stream, where each batch is scored as a server would have scored it before it is learned

What varies comes in as objects: an `Observer` predicts, an `Update` learns, callbacks watch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from hotbed.config import nearest
from hotbed.data.batch import Batch
from hotbed.errors import ConfigError
from hotbed.training.learner import Example, Update, prepare

EVENTS = (
    "on_fit_begin", "on_epoch_begin", "on_predicted", "on_gradients", "on_step_end", "on_epoch_end", "on_fit_end",
)  # fmt: skip


class Observer(Protocol):
    """Predicts a batch without learning from it and keeps what it needs: metrics, or the predictions themselves."""

    def observe(self, example: Example) -> None:
        """Score one example in eval mode; tables are read, never grown."""


@dataclass
class Run:
    """What callbacks see and may change: where training is, and the switch that ends it.

    `step` and `samples` count over all epochs of this fit; `metrics` holds the newest value of each name; `now` is the
    newest event time in microseconds (None without a Time column); `window` the metrics of a stream's last window;
    `windows` what the callback `Windows` has kept so far (None without one).
    """

    model: Any = None
    tables: Mapping[str, Any] = field(default_factory=dict)
    learner: Any = None
    observer: Any = None
    valid: Any = None
    epochs: int = 1
    epoch: int = 0
    step: int = 0
    samples: int = 0
    skipped: int = 0
    now: int | None = None
    example: Example | None = None
    loss: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    window: dict[str, float] = field(default_factory=dict)
    windows: Any = None
    validates: bool = False
    validated: bool = False
    total_steps: int | None = None
    stopped: str = ""
    began: float = field(default_factory=time.perf_counter)

    def stop(self, reason: str) -> None:
        """End training after this step."""
        self.stopped = self.stopped or reason


class Callbacks:
    """Calls each callback's methods at their events; what a callback does not define costs nothing.

    A callback is any object with some of the methods `on_fit_begin`, `on_epoch_begin`, `on_predicted` (a batch was
    scored, by `run.observer`; it is not learned yet), `on_gradients` (after backward, before any update), `on_step_end`,
    `on_epoch_end`, `on_fit_end`, each taking the `Run`.
    """

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        self.all = list(callbacks)
        for callback in self.all:
            known = [name for name in dir(callback) if name.startswith("on_")]
            wrong = [name for name in known if name not in EVENTS]
            if wrong or not known:
                raise ConfigError(
                    f"{type(callback).__name__} is no callback — received {wrong or 'no on_… method'} — "
                    f"{nearest(wrong[0] if wrong else '', EVENTS)}"
                )
        self._methods: Mapping[str, list[Callable[[Run], None]]] = {
            event: [getattr(callback, event) for callback in self.all if hasattr(callback, event)] for event in EVENTS
        }

    def __call__(self, event: str, run: Run) -> None:
        for method in self._methods[event]:
            method(run)


def pass_over(
    data: Iterable[Any],
    run: Run,
    callbacks: Callbacks,
    update: Update | None = None,
    observer: Observer | None = None,
    *,
    device: torch.device,
    labelled: bool,
) -> None:
    """One pass over `data`, to its end or until a callback stops it."""
    for item in data:  # a Dataset reads and encodes ahead, on its own thread
        example = prepare(item, device, labelled)
        run.example = example
        if observer is not None:
            observer.observe(example)
            callbacks("on_predicted", run)
        if update is not None:
            run.loss = loss = update.forward(example)  # maps ids to rows on its way
            update.backward(loss)
            if update.gradients_are_finite():
                callbacks("on_gradients", run)
                update.dense_step()
                update.sparse_step()
            else:
                run.skipped += 1
        run.step += 1
        run.samples += example.num_samples
        run.now = newest(example.batch, run.now)
        callbacks("on_step_end", run)
        if run.stopped:
            break
    run.example = run.loss = None


def newest(batch: Batch | None, now: int | None) -> int | None:
    """The later of `now` and the newest event time of a batch, in microseconds."""
    if batch is None or batch.time is None or len(batch.time) == 0:
        return now
    latest = int(batch.time.max())
    return latest if now is None else max(now, latest)
