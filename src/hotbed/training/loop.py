# SPDX-License-Identifier: Apache-2.0
"""The only loop in Hotbed: training, evaluation, prediction and online learning are this loop with
other parts.

    read -> encode -> (predict) -> map ids -> forward -> loss -> backward -> check all gradients
         -> dense step -> sparse step -> callbacks

* learn only: `fit`                     * predict only: `evaluate`, `predict`
* predict, then learn: a stream, where each batch is scored as a server would have scored it before
  it is learned

What varies comes in as objects: an `Observer` predicts, an `Update` learns, callbacks watch. A
stream without end hands
out None now and then, a tick: nothing new, but callbacks look whether it is time to act or to stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Protocol

import torch
from torch import Tensor

from hotbed.config import kind_of, nearest
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
    """Predicts a batch without learning from it and keeps what it needs: metrics, or the
    predictions themselves.
    """

    def observe(self, example: Example) -> None:
        """Score one example in eval mode; tables are read, never grown."""

    def settle(self) -> None:
        """The example last observed is learned: from now on it counts. One whose step failed never
        does.
        """


@dataclass
class Run:
    """What callbacks see and may change: where training is, and the switch that ends it.

    `step` and `samples` count over all epochs of this fit, and of a stream over all its
    resumptions; `metrics` holds the newest value of each name. `epoch` is the number of the epoch,
    counted over all fits of the model; `initial_epoch` that of this fit's first, `epochs` that
    after its last; `epoch_began` the step at which this epoch began. `folder` is where a
    `Checkpoint` keeps the states of this run.

    `now` is the watermark, the newest event time in microseconds, which never goes back (None
    without a Time column); `reliability` how the last validation's probabilities compare with what
    happened, by label; `window` the metrics of a stream's last window; `windows` what the callback
    `Windows` has kept so far (None without one). `online`: this is a stream, not a fit. `position`:
    where the dataset was after the last batch learned; `whole`: no step is half done; `sweeping`:
    an eviction is under way, and `statistics` are the tables' as of when it began. `sink_size`:
    batches learned between two `on_step_end`. `clock` tells seconds since the epoch; `journal`
    keeps what it decided.
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
    """Calls each callback's methods at their events; what a callback does not define costs nothing.

    A callback is any object with some of these methods, each taking the `Run`: `on_fit_begin`,
    `on_stream_begin` (of a stream, after `on_fit_begin`), `on_epoch_begin`, `on_predicted` (a batch
    was scored, by `run.observer`; it is not learned yet), `on_gradients` (after backward, before
    any update), `on_step_end`, `on_idle` (a stream has nothing new), `on_stream_end` (it ended or
    is left), `on_epoch_end`, `on_error` (`run.error` ends training), `on_fit_end`. One whose
    `runs_last` is true is called after all others. What it must remember over a restart it gives as
    `state()`, nested dicts and lists of plain values and NumPy arrays, and takes back by
    `load_state`.
    """

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        self.all = sorted(
            callbacks, key=lambda callback: bool(getattr(callback, "runs_last", False))
        )
        for callback in self.all:
            known = [name for name in dir(callback) if name.startswith("on_")]
            wrong = [name for name in known if name not in EVENTS]
            if wrong or not known:
                raise ConfigError(
                    f"{type(callback).__name__} is no callback — received "
                    f"{wrong or 'no on_… method'} — "
                    f"{nearest(wrong[0] if wrong else '', EVENTS)}"
                )
        self._methods: Mapping[str, list[Callable[[Run], None]]] = {
            event: [getattr(callback, event) for callback in self.all if hasattr(callback, event)]
            for event in EVENTS
        }

    def __call__(self, event: str, run: Run) -> None:
        for method in self._methods[event]:
            method(run)

    def state(self) -> dict[str, Any]:
        """What callbacks remember, by kind and number: "evict.0" is the first of its kind."""
        return {
            name: callback.state() for name, callback in self._named() if hasattr(callback, "state")
        }

    def names(self) -> list[str]:
        """Name the callbacks that remember something, as `state` does."""
        return [name for name, callback in self._named() if hasattr(callback, "state")]

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Give callbacks back what `state` gave; one that was not there then starts anew."""
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
    """Raises ConfigError where `data`, the argument `name`, cannot be read batch by batch, `passes`
    times.
    """
    of_columns = (
        isinstance(data, Mapping)
        or hasattr(data, "__arrow_c_stream__")
        or hasattr(data, "__dataframe__")
    )
    iterable = isinstance(data, Iterable) or hasattr(data, "__getitem__")
    if of_columns or isinstance(data, (str, Batch, Source)) or not iterable:
        received = repr(data) if isinstance(data, (str, PathLike)) else type(data).__name__
        raise ConfigError(
            f"{name}: neither a Dataset nor an iterable of batches — received {received} — "
            "give hb.Dataset(source, schema)"
        )
    if isinstance(data, Iterator) and passes > 1:  # iter() of a Dataset would begin an epoch
        raise ConfigError(
            f"{name}: an iterator can be read once — received epochs > 1 — give a Dataset or a list"
        )


def check_ends(data: Any) -> None:
    """Raise ConfigError where `data` never end."""
    if getattr(data, "endless", False):
        raise ConfigError(
            "the data never end — received an endless Dataset — follow it with online_train(), or "
            "give a Dataset of what is there"
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
    """One pass over `data`, to its end or until a callback stops it; returns whether it came to the
    end.
    """
    held: list[Example] = []
    ended = not run.stopped
    # a Dataset reads and encodes ahead, on its own thread
    for item in _items(data) if ended else ():
        if item is None:
            callbacks("on_idle", run)
        else:
            held.append(prepare(item, device, labelled))
            if len(held) >= run.sink_size:
                _step(held, run, callbacks, update, observer)
                held = []
        if run.stopped:
            ended = False
            break
    else:
        if held:
            _step(held, run, callbacks, update, observer)
    run.example = run.loss = None
    return ended


def _step(
    examples: Sequence[Example],
    run: Run,
    callbacks: Callbacks,
    update: Update | None,
    observer: Observer | None,
) -> None:
    """Predict and learn each of the examples, then tell the callbacks once."""
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
    """What `data` yields, ticks too; an iterator made here is closed here, which ends its reading
    thread.
    """
    stream = getattr(data, "stream", None)
    items = stream() if callable(stream) else iter(data)
    try:
        for item in items:  # noqa: UP028 - `yield from` would close an iterator of the user's own
            yield item
    finally:
        if items is not data and hasattr(items, "close"):
            items.close()


def newest(batch: Batch | None, now: int | None) -> int | None:
    """The later of `now` and the newest event time of a batch, in microseconds."""
    if batch is None or batch.time is None or len(batch.time) == 0:
        return now
    latest = int(batch.time.max())
    return latest if now is None else max(now, latest)


def passed(step: int, before: int, every: int | None) -> bool:
    """Whether a multiple of `every` lies in (before, step]; several steps may pass at once. None =
    never.
    """
    return every is not None and step // every > before // every
