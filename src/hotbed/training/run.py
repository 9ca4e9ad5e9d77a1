# SPDX-License-Identifier: Apache-2.0
"""Run: where a training stands, and the callbacks that read and change it."""

from __future__ import annotations

import time
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from torch import Tensor

from hotbed.config import did_you_mean, kind_of
from hotbed.connectors import Journal, Position
from hotbed.connectors.read_plan import NO_WISHES, JoinWishes
from hotbed.data.columns import SegmentColumn
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError
from hotbed.metrics.reliability import Reliability
from hotbed.parallel import WHOLE, Shard, at
from hotbed.training.step.compared import reads_name
from hotbed.training.step.example import Example
from hotbed.training.step.learner import SelfUpdating, StepLearner
from hotbed.training.step.map_stage import MapStage
from hotbed.training.step.scorer import Watcher
from hotbed.training.trained import TrainedModel

T = TypeVar("T")
EVENTS = (
    "on_fit_begin",
    "on_stream_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_predicted",
    "on_gradients",
    "on_step_end",
    "on_idle",
    "on_stop",
    "on_stream_end",
    "on_epoch_end",
    "on_error",
    "on_fit_end",
)
WITHIN = ("on_step_begin", "on_predicted", "on_gradients", "on_step_end", "on_error")
"""The events at which batches after this step may be mapped already."""


class Callback(ABC):  # noqa: B024  # each of its methods may be absent
    """What `Callbacks` calls: any class with one of the methods `EVENTS` is below it."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return any(hasattr(other, event) for event in EVENTS)


class Observer(Protocol):
    """Predicts batches without learning from them, and keeps metrics or the predictions.

    Attributes:
        watchers: receive each example with its outputs once it counts.
    """

    watchers: list[Watcher]

    def observe(self, example: Example) -> None:
        """Score one example in eval mode; tables are read, never grown."""

    def settle(self) -> None:
        """Count the example that was observed last: its step is done.

        An example whose step failed is never counted.
        """

    def barrier(self, step: int, now: int | None) -> bool:
        """Return whether it reads tables between this step and the next one, as in `Callbacks`."""


@dataclass(frozen=True)
class Goal:
    """What a call of `fit`, `online_train` or `evaluate` reads, and how far.

    Attributes:
        dataset: the data.
        valid: the data that `Validate` evaluates.
        depth: batches whose ids may be mapped ahead.
        online: True for a stream, False for a fit.
        first_epoch: number of the first epoch of a fit, counted over all fits of the model.
        end_epoch: number of its last epoch plus one.
        epoch_steps: number of batches of an epoch; None if it is not known.
        agrees: whether the ranks agree on a stop where a step ends, since one alone may ask for it.
        wishes: what a join of streams in the data is asked for.
        own: the grains whose ids and dense columns this rank reads; None = those of all.
    """

    dataset: Iterable[Any]
    valid: Iterable[Any] | None = None
    depth: int = 0
    online: bool = False
    first_epoch: int = 0
    end_epoch: int = 1
    epoch_steps: int | None = None
    agrees: bool = False
    wishes: JoinWishes = NO_WISHES
    own: range | None = None


@dataclass
class Counts:
    """How far a run has come; a checkpoint holds these numbers.

    Attributes:
        step: batches learned, over all epochs of this fit and over all resumptions.
        samples: samples in them.
        skipped: batches that loss scaling left out.
        now: the watermark, the newest event time in microseconds, which never decreases; None
            without a Time column.
        epoch: number of the epoch, counted over all fits of the model.
        epoch_began: the step at which this epoch began.
    """

    step: int = 0
    samples: int = 0
    skipped: int = 0
    now: int | None = None
    epoch: int = 0
    epoch_began: int = 0


@dataclass
class WallClock:
    """The clock of this machine, with the journal of the decisions that depend on it.

    Attributes:
        read: returns seconds since 1970.
        journal: holds each decision before it takes effect, so that a resumed run takes the same
            ones. None = they are not recorded.
        shard: the processes that decide alike: the clock and the journal of the first count.
    """

    read: Callable[[], float] = time.time
    journal: Journal | None = None
    shard: Shard = WHOLE

    def __call__(self) -> float:
        return self.read()

    def decide(
        self, topic: str, number: int, propose: Callable[[], Mapping[str, Any] | None]
    ) -> Mapping[str, Any] | None:
        """Return a decision of the first process, as `Journal.decide` does."""
        journal = self.journal
        if journal is None:
            return self.shard.from_first(propose)
        return self.shard.from_first(lambda: journal.decide(topic, number, propose))

    def decided(self, topic: str, number: int) -> Mapping[str, Any] | None:
        """Return the decision that the journal holds; None: it holds none."""
        return self.shard.from_first(
            lambda: None if self.journal is None else self.journal.get(topic, number)
        )


@dataclass(frozen=True)
class Ending:
    """Why a run ends.

    Attributes:
        reason: of the callback that stopped it.
        error: the error that ends it.
        whole: whether no step and no end of an epoch was half done.
        agreed: whether all ranks end; False: this one asks for it.
        is_known: whether callbacks know of the stop.
    """

    reason: str = ""
    error: BaseException | None = None
    whole: bool = True
    agreed: bool = True
    is_known: bool = False


@dataclass(frozen=True)
class Kept:
    """A moment of a training whose state the model has at the end.

    Attributes:
        step: of the run.
        epoch: number of the epoch plus one, as in `History.epochs`.
        samples: of the run.
        metrics: as of the run.
        reliability: as of the run.
    """

    step: int
    epoch: int
    samples: int
    metrics: dict[str, float]
    reliability: dict[str, Reliability]


@dataclass
class Run:
    """The state of training, which callbacks read and may change.

    Attributes:
        model: the model that learns.
        goal: what it learns, and how far.
        callbacks: those of this run.
        observer: predicts each batch before it is learned; None = nothing does.
        counts: how far the run has come; `step`, `samples`, `epoch` and `now` are among them.
        position: position of the dataset after the last batch learned.
        example: the batch of this step.
        loss: its loss.
        metrics: the newest value of each name.
        window: metrics of a stream's last window.
        validated: True for the callbacks after `Validate` where its results are new.
        reliability: how the probabilities of the last validation compare with the labels, by label.
        clock: the clock of this machine, in seconds since 1970.
        ending: why the run ends; None until then.
        stage: yields the batches of this pass, and maps some of them ahead.
    """

    model: TrainedModel
    goal: Goal
    callbacks: Callbacks = field(default_factory=lambda: Callbacks())
    observer: Observer | None = None
    counts: Counts = field(default_factory=Counts)
    position: Position | None = None
    example: Example | None = None
    loss: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    window: dict[str, float] = field(default_factory=dict)
    validated: bool = False
    reliability: dict[str, Reliability] = field(default_factory=dict)
    clock: WallClock = field(default_factory=WallClock)
    ending: Ending | None = None
    stage: MapStage | None = None

    @property
    def step(self) -> int:
        """Batches learned, over all epochs of this fit and over all resumptions."""
        return self.counts.step

    @property
    def samples(self) -> int:
        """Samples learned, over all epochs of this fit and over all resumptions."""
        return self.counts.samples

    @property
    def epoch(self) -> int:
        """Number of the epoch, counted over all fits of the model."""
        return self.counts.epoch

    @property
    def now(self) -> int | None:
        """The newest event time learned, in microseconds; None without a Time column."""
        return self.counts.now

    @property
    def online(self) -> bool:
        """True for a stream, False for a fit."""
        return self.goal.online

    @property
    def dataset(self) -> Iterable[Any]:
        """The data that are learned."""
        return self.goal.dataset

    @property
    def learner(self) -> StepLearner | SelfUpdating:
        """The network with its optimizers."""
        return self.model.learner

    @property
    def tables(self) -> Mapping[str, Table]:
        """The tables of the network, by name."""
        return self.model.tables

    @property
    def ahead(self) -> int:
        """Number of batches after this one whose ids are mapped already.

        The tables hold new ids of these batches. It is 0 at a barrier.
        """
        return 0 if self.stage is None else self.stage.ahead

    @property
    def stopped(self) -> str:
        """Why training ends after this step; empty until then, and while batches are ahead."""
        if self.ending is None or not self.ending.agreed or self.ahead:
            return ""
        return self.ending.reason

    @property
    def error(self) -> BaseException | None:
        """The error that ends training."""
        return None if self.ending is None else self.ending.error

    def ask_join(self, wishes: JoinWishes) -> None:
        """Ask this of a join of streams in the data, before it is read."""
        self.goal = replace(self.goal, wishes=wishes)

    def stop(self, reason: str) -> None:
        """End training after this step; batches that are mapped ahead are learned first.

        Training on several ranks ends on all of them, whichever calls it.
        """
        if self.ending is None:
            self.ending = Ending(reason, agreed=not self.goal.agrees)

    def ends(self) -> bool:
        """Return whether the run ends after this step, on all ranks; all ask between two steps.

        They agree where a step ends, not where an item is read: that may be some steps ahead. The
        first time, callbacks learn that it is stopped.
        """
        if self.goal.agrees and (self.ending is None or not self.ending.agreed):
            shard = self.learner.shard
            if shard.any(self.ending is not None):
                endings = [ending for ending in shard.gathered(self.ending) if ending is not None]
                self.ending = Ending(endings[0].reason)
        if self.stopped and self.ending is not None and not self.ending.is_known:
            self.ending = replace(self.ending, is_known=True)
            self.callbacks("on_stop", self)
        return bool(self.stopped)

    def fail(self, error: BaseException, *, whole: bool = True) -> None:
        """Record that `error` ends training.

        `whole`: no step was half done. A batch that is mapped ahead is half done, too.
        """
        reason = ""
        if self.ending is not None:
            reason = self.ending.reason
            whole = whole and self.ending.whole
        self.ending = Ending(reason, error, whole and not self.ahead)

    def barrier(self, step: int, now: int | None) -> bool:
        """Return whether no batch after step `step` may be mapped before that step is over.

        A stop, the observer and the callbacks make barriers, on any rank.
        """
        return self.learner.shard.any(self._is_barrier(step, now))

    def _is_barrier(self, step: int, now: int | None) -> bool:
        if self.ending is not None:
            return True
        if self.observer is not None and self.observer.barrier(step, now):
            return True
        return self.callbacks.barrier(step, now)

    def count(self, example: Example, *, learned: bool) -> None:
        """Count an example that was learned, or that was observed where nothing learns."""
        batch = example.batch
        if learned:
            self.model.counters["steps"] += 1
            self.model.counters["samples"] += example.num_samples
        self.counts.step += 1
        self.counts.samples += example.num_samples
        self.position = None if batch is None else batch.position
        latest = example.latest
        if latest is not None:
            self.counts.now = latest if self.now is None else max(self.now, latest)


class Callbacks:
    """Calls the methods of each callback at their events.

    A callback is any object with some of these methods, each taking the `Run`: `on_fit_begin`,
    `on_stream_begin` (of a stream, after `on_fit_begin`), `on_epoch_begin`, `on_step_begin` (the
    first batch of the step was read), `on_predicted` (a batch was scored by `run.observer`; it is
    not learned yet), `on_gradients` (after backward, before any update), `on_step_end`, `on_idle`
    (a stream has nothing new), `on_stop` (a stop ends training after this step), `on_stream_end`
    (the stream ended or was stopped), `on_epoch_end`,
    `on_error` (`run.error` ends training), `on_fit_end`. Methods that a callback does not define
    cost nothing.

    `barrier(step, now)` declares barriers: it returns whether the callback reads or changes tables
    between step `step` and the next one; `now` is the newest event time up to that step. It is
    asked before the step, and no batch after a barrier is mapped before the step is over. A
    callback that does not define it makes a barrier of every step if it has one of the methods
    `on_step_begin`, `on_predicted`, `on_gradients`, `on_step_end` and `on_error`. So does a class
    that inherits `barrier` and defines one of these methods itself. Between barriers the tables may
    hold ids of `run.ahead` later batches, and must not be saved, evaluated or evicted from.

    A callback whose `runs_last` is true is called after all others. One whose `is_of_program` is
    true may differ on several ranks. On several ranks, `run.example.batch` has the ids and dense
    columns of all samples for a callback that reads `run.example`, unless it sets `reads_features`
    to False. A callback that must survive a
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
            _check_callback(callback)
        self._methods: Mapping[str, list[Callable[[Run], None]]] = {
            event: [_method(callback, event) for callback in self.all if hasattr(callback, event)]
            for event in EVENTS
        }
        acting = [callback for callback in self.all if _acts_within(callback)]
        self._barriers = [callback.barrier for callback in acting if _declares(callback)]
        self._undeclared = len(self._barriers) < len(acting)

    @property
    def kept(self) -> Kept | None:
        """The moment whose state the model has when training has ended; None: the last one."""
        moments = [getattr(callback, "kept", None) for callback in self.all]
        return next((moment for moment in moments if isinstance(moment, Kept)), None)

    def __call__(self, event: str, run: Run) -> None:
        for method in self._methods[event]:
            method(run)

    @property
    def has_own(self) -> bool:
        """Whether a callback is of another package, and may do otherwise on another rank."""
        modules = [type(callback).__module__ for callback in self.all]
        return not all(module.startswith("hotbed.training.") for module in modules)

    @property
    def reads_features(self) -> bool:
        """Whether a callback reads ids or dense columns, as far as its code says.

        One of another package does if it reads `run.example`.
        """
        return any(map(_reads_features, self.all))

    @property
    def held_back(self) -> float:
        """The share of a stream's events that a callback wants scored and never learned."""
        return max((getattr(callback, "held_back", 0.0) for callback in self.all), default=0.0)

    @property
    def segments(self) -> list[SegmentColumn]:
        """The raw columns by whose values a callback divides figures."""
        return [each for callback in self.all for each in getattr(callback, "segments", ())]

    def barrier(self, step: int, now: int | None) -> bool:
        """Return whether a callback reads or changes tables between this step and the next one."""
        return self._undeclared or any(barrier(step, now) for barrier in self._barriers)

    def end(self, run: Run) -> None:
        """Call `on_fit_end` of every callback, also after an error in one of them."""
        with ExitStack() as stack:
            for method in reversed(self._methods["on_fit_end"]):
                stack.callback(method, run)

    def of(self, kind: type[T]) -> list[T]:
        """Return the callbacks of a class, in their order."""
        return [callback for callback in self.all if isinstance(callback, kind)]

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


def _method(callback: Any, event: str) -> Callable[[Run], None]:
    """Return a method of a callback, which messages to other ranks name."""
    method: Callable[[Run], None] = at(f"{type(callback).__name__}.{event}")(
        getattr(callback, event)
    )
    return method


def _acts_within(callback: Any) -> bool:
    return any(hasattr(callback, event) for event in WITHIN)


def _declares(callback: Any) -> bool:
    """Return whether `barrier` knows the methods of a callback: its class is not above theirs."""
    if not hasattr(callback, "barrier"):
        return False
    methods = [event for event in WITHIN if hasattr(callback, event)]
    return all(_place(callback, "barrier") <= _place(callback, event) for event in methods)


def _place(callback: Any, name: str) -> int:
    """Return where an attribute is found: 0 in the object itself, 1 in its class, and so on."""
    owners = [callback, *type(callback).__mro__]
    places = (place for place, owner in enumerate(owners) if name in getattr(owner, "__dict__", ()))
    return next(places, 0)


def _reads_features(callback: Any) -> bool:
    says: bool | None = getattr(callback, "reads_features", None)
    return reads_name(callback, "example") if says is None else says


def _check_callback(callback: Any) -> None:
    if isinstance(callback, type):
        raise ConfigError(
            f"callbacks: an object is needed, got the class {callback.__name__}. "
            f"Give {callback.__name__}(…)."
        )
    names = [name for name in dir(callback) if name.startswith("on_")]
    wrong = [name for name in names if name not in EVENTS]
    if names and not wrong:
        return
    kind = type(callback).__name__
    problem = wrong or "no on_… method"
    advice = did_you_mean(wrong[0] if wrong else "", EVENTS)
    raise ConfigError(f"callbacks: {kind} is not a callback, got {problem}. {advice}")


def passed(step: int, before: int, every: int | None) -> bool:
    """Return whether a multiple of `every` lies in (before, step]; False if `every` is None.

    Several steps may pass at once.
    """
    return every is not None and step // every > before // every
