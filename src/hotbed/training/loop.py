# SPDX-License-Identifier: Apache-2.0
"""The only loop in Hotbed: training, evaluation, prediction and online learning all run it.

    read -> encode -> (predict) -> map ids -> forward -> loss -> backward -> check all gradients
         -> dense step -> sparse step -> callbacks

* learn only: `fit`                     * predict only: `evaluate`, `predict`
* predict, then learn: a stream, where each batch is scored as a server would have scored it before
  it is learned

The parts are objects: an `Observer` predicts, an `Update` learns, callbacks watch. A stream without
end yields None now and then, a tick: there is nothing new, but callbacks may act or stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Protocol

import torch
from torch import Tensor

from hotbed.config import did_you_mean, kind_of
from hotbed.connectors import Position, Source
from hotbed.data.batch import Batch
from hotbed.errors import ConfigError
from hotbed.metrics.reliability import Reliability
from hotbed.training.learner import Example, Update, prepare

EVENTS = (
    "on_fit_begin",
    "on_stream_begin",
    "on_epoch_begin",
    "on_predicted",
    "on_gradients",
    "on_step_end",
    "on_idle",
    "on_stream_end",
    "on_epoch_end",
    "on_error",
    "on_fit_end",
)


class Observer(Protocol):
    """Predicts batches without learning from them, and keeps metrics or the predictions."""

    def observe(self, example: Example) -> None:
        """Score one example in eval mode; tables are read, never grown."""

    def settle(self) -> None:
        """Count the example that was observed last: its step is done.

        An example whose step failed is never counted.
        """


@dataclass
class Run:
    """The state of training, which callbacks read and may change.

    Attributes:
        step, samples: counted over all epochs of this fit, and over all resumptions of a stream.
        metrics: the newest value of each name.
        epoch: number of the epoch, counted over all fits of the model.
        initial_epoch: number of the first epoch of this fit.
        epochs: number of its last epoch plus one.
        epoch_began: the step at which this epoch began.
        folder: where a `Checkpoint` writes the states of this run.
        now: the watermark, the newest event time in microseconds, which never decreases; None
            without a Time column.
        reliability: how the probabilities of the last validation compare with the labels, by label.
        window: metrics of a stream's last window.
        windows: the callback `Windows`, whose `points` are the windows so far; None without one.
        online: True for a stream, False for a fit.
        position: position of the dataset after the last batch learned.
        whole: no step is half done.
        sweeping: an eviction is under way.
        statistics: of the tables, at the time when the last eviction began.
        sink_size: batches learned between two `on_step_end`.
        clock: returns seconds since 1970.
        journal: records the decisions that depend on the clock.
    """

    model: Any = None
    tables: Mapping[str, Any] = field(default_factory=dict)
    learner: Any = None
    observer: Any = None
    callbacks: Any = None
    dataset: Any = None
    valid: Any = None
    online: bool = False
    epochs: int = 1
    epoch: int = 0
    initial_epoch: int = 0
    epoch_began: int = 0
    step: int = 0
    samples: int = 0
    skipped: int = 0
    sink_size: int = 1
    now: int | None = None
    position: Position | None = None
    journal: Any = None
    sweeping: bool = False
    statistics: dict[str, dict[str, int]] = field(default_factory=dict)
    whole: bool = True
    folder: str | PathLike[str] | None = None
    example: Example | None = None
    loss: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    reliability: dict[str, Reliability] = field(default_factory=dict)
    window: dict[str, float] = field(default_factory=dict)
    windows: Any = None
    validates: bool = False
    validated: bool = False
    counted: tuple[int, int] = (0, 0)
    total_steps: int | None = None
    stopped: str = ""
    error: BaseException | None = None
    clock: Callable[[], float] = time.time
    began: float = field(default_factory=time.perf_counter)

    def stop(self, reason: str) -> None:
        """End training after this step."""
        self.stopped = self.stopped or reason

    def count(self) -> None:
        """Add what was learned since the last count to the model's counters."""
        self.model.counters["steps"] += self.step - self.counted[0]
        self.model.counters["samples"] += self.samples - self.counted[1]
        self.counted = (self.step, self.samples)


class Callbacks:
    """Calls the methods of each callback at their events.

    A callback is any object with some of these methods, each taking the `Run`: `on_fit_begin`,
    `on_stream_begin` (of a stream, after `on_fit_begin`), `on_epoch_begin`, `on_predicted` (a batch
    was scored by `run.observer`; it is not learned yet), `on_gradients` (after backward, before
    any update), `on_step_end`, `on_idle` (a stream has nothing new), `on_stream_end` (the stream
    ended or was stopped), `on_epoch_end`, `on_error` (`run.error` ends training), `on_fit_end`.
    Methods that a callback does not define cost nothing.

    A callback whose `runs_last` is true is called after all others. A callback that must survive a
    restart returns its state from `state()`, as nested dicts and lists of plain values and NumPy
    arrays, and takes it back in `load_state`.

    Raises:
        ConfigError: a callback has no such method, or one that starts with `on_` and is not listed.
    """

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        self.all = sorted(
            callbacks, key=lambda callback: bool(getattr(callback, "runs_last", False))
        )
        for callback in self.all:
            names = [name for name in dir(callback) if name.startswith("on_")]
            wrong = [name for name in names if name not in EVENTS]
            if wrong or not names:
                kind = type(callback).__name__
                raise ConfigError(
                    f"callbacks: {kind} is not a callback, got {wrong or 'no on_… method'}. "
                    f"{did_you_mean(wrong[0] if wrong else '', EVENTS)}"
                )
        self._methods: Mapping[str, list[Callable[[Run], None]]] = {
            event: [getattr(callback, event) for callback in self.all if hasattr(callback, event)]
            for event in EVENTS
        }

    def __call__(self, event: str, run: Run) -> None:
        for method in self._methods[event]:
            method(run)

    def state(self) -> dict[str, Any]:
        """Return the states of callbacks by kind and number: "evict.0" is the first of its kind."""
        return {
            name: callback.state() for name, callback in self._named() if hasattr(callback, "state")
        }

    def names(self) -> list[str]:
        """Return the names of the callbacks that have a state, as in `state`."""
        return [name for name, callback in self._named() if hasattr(callback, "state")]

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; a callback without an entry starts anew."""
        for name, callback in self._named():
            if name in state and hasattr(callback, "load_state"):
                callback.load_state(state[name])

    def _named(self) -> Iterator[tuple[str, Any]]:
        counts: dict[str, int] = {}
        for callback in self.all:
            kind = kind_of(type(callback))
            counts[kind] = counts.get(kind, -1) + 1
            yield f"{kind}.{counts[kind]}", callback


def check_batches(name: str, data: Any, passes: int = 1) -> None:
    """Raise ConfigError if `data`, the argument `name`, cannot be read in `passes` passes."""
    of_columns = (
        isinstance(data, Mapping)
        or hasattr(data, "__arrow_c_stream__")
        or hasattr(data, "__dataframe__")
    )
    iterable = isinstance(data, Iterable) or hasattr(data, "__getitem__")
    if of_columns or isinstance(data, (str, Batch, Source)) or not iterable:
        text = repr(data) if isinstance(data, (str, PathLike)) else type(data).__name__
        raise ConfigError(
            f"{name}: neither a Dataset nor an iterable of batches, got {text}. "
            "Give hb.Dataset(source, schema)."
        )
    if isinstance(data, Iterator) and passes > 1:  # iter() of a Dataset would begin an epoch
        raise ConfigError(
            f"{name}: an iterator can be read once, got epochs = {passes}. "
            "Give a Dataset or a list."
        )


def check_ends(data: Any) -> None:
    """Raise ConfigError if `data` never end."""
    if getattr(data, "endless", False):
        raise ConfigError(
            "data: the data never end, got an endless Dataset. Follow it with online_train(), or "
            "give a Dataset that ends."
        )


def pass_over(
    data: Iterable[Any],
    run: Run,
    callbacks: Callbacks,
    update: Update | None = None,
    observer: Observer | None = None,
    *,
    device: torch.device,
    labelled: bool,
) -> bool:
    """Make one pass over `data`, to its end or until a callback stops it.

    Returns:
        Whether the pass reached the end of the data.
    """
    examples: list[Example] = []  # of one call of `_step`
    ended = not run.stopped
    # a Dataset reads and encodes ahead, on its own thread
    for item in _items(data) if ended else ():
        if item is None:
            callbacks("on_idle", run)
        else:
            examples.append(prepare(item, device, labelled))
            if len(examples) >= run.sink_size:
                _step(examples, run, callbacks, update, observer)
                examples = []
        if run.stopped:
            ended = False
            break
    else:
        if examples:
            _step(examples, run, callbacks, update, observer)
    run.example = None
    run.loss = None
    return ended


def _step(
    examples: Sequence[Example],
    run: Run,
    callbacks: Callbacks,
    update: Update | None,
    observer: Observer | None,
) -> None:
    """Predict and learn each of the examples, then call `on_step_end` once."""
    run.whole = False
    for example in examples:
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
        run.position = None if example.batch is None else example.batch.position
        if observer is not None:
            observer.settle()
    callbacks("on_step_end", run)
    run.whole = True


def _items(data: Iterable[Any]) -> Generator[Any, None, None]:
    """Yield the items of `data`, ticks too.

    An iterator that is made here is closed here, which ends its reading thread.
    """
    stream = getattr(data, "stream", None)
    items = stream() if callable(stream) else iter(data)
    try:
        for item in items:  # noqa: UP028 - `yield from` would close the user's own iterator
            yield item
    finally:
        if items is not data and hasattr(items, "close"):
            items.close()


def newest(batch: Batch | None, now: int | None) -> int | None:
    """Return the later of `now` and the newest event time of a batch, in microseconds."""
    if batch is None or batch.time is None or len(batch.time) == 0:
        return now
    latest = int(batch.time.max())
    return latest if now is None else max(now, latest)


def passed(step: int, before: int, every: int | None) -> bool:
    """Return whether a multiple of `every` lies in (before, step]; False if `every` is None.

    Several steps may pass at once.
    """
    return every is not None and step // every > before // every
