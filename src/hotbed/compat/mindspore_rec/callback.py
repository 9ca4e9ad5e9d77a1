# SPDX-License-Identifier: Apache-2.0
"""MindSpore's callbacks: their events, what they get to see, and how the engine calls them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hotbed import checks
from hotbed.compat.mindspore_rec.tensor import with_asnumpy
from hotbed.errors import ConfigError
from hotbed.parallel.world import speaks
from hotbed.training.arguments import listed
from hotbed.training.run import Run

if TYPE_CHECKING:
    from hotbed.training.model import RecModel

_STEP_EVENTS = (
    "step_begin",
    "step_end",
    "on_train_step_begin",
    "on_train_step_end",
    "on_eval_step_begin",
    "on_eval_step_end",
)
_SUNK_EVENTS = ("epoch_begin", "epoch_end", "on_train_epoch_begin", "on_train_epoch_end")


class CallbackParams(dict[str, Any]):
    """What `RunContext.original_args()` returns: values by key, and as attributes.

    In training: `network`, `train_network`, `loss_fn`, `optimizer`, `train_dataset`,
    `list_callback`, `mode`, `epoch_num`, `batch_num`, `dataset_sink_mode`, `parallel_mode`,
    `device_number`, `cur_epoch_num` and `cur_step_num` (both from 1 on), `net_outputs`. In
    evaluation: `eval_network`, `valid_dataset`, `metrics` and `eval_results` as well.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"original_args: no {name!r} at this event, got {', '.join(self)}. Use one of them."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class RunContext:
    """What each event of a callback receives.

    Args:
        original_args: what the callbacks may read.
        stop: ends the training after the step under way.
    """

    def __init__(self, original_args: CallbackParams, stop: Callable[[str], None]) -> None:
        self._args = original_args
        self._stop = stop
        self._stop_requested = False

    def original_args(self) -> CallbackParams:
        """Return the state of the training."""
        return self._args

    def request_stop(self) -> None:
        """End the training after the step under way."""
        self._stop_requested = True
        self._stop("request_stop() of a callback")

    def get_stop_requested(self) -> bool:
        """Return whether a callback requested the end."""
        return self._stop_requested


class Callback:
    """Base of the callbacks for `train`, `fit`, `eval` and `online_train`.

    Override the events that you need, by the name for training and evaluation or by that of one of
    them. Each receives a `RunContext`. In sink mode on a device other than the CPU, a call of
    `sink_size` batches is an epoch.

    * `begin`: `on_train_begin`, `on_eval_begin`;
    * `epoch_begin`: `on_train_epoch_begin`, `on_eval_epoch_begin`;
    * `step_begin`: `on_train_step_begin`, `on_eval_step_begin`;
    * `step_end`: `on_train_step_end`, `on_eval_step_end`;
    * `epoch_end`: `on_train_epoch_end`, `on_eval_epoch_end`;
    * `end`: `on_train_end`, `on_eval_end`.

    Attributes:
        uses_tables: whether the events of a step read or change tables. False lets `hb.Ahead` map
            the ids of coming batches meanwhile.
    """

    uses_tables = True

    def begin(self, run_context: RunContext) -> None: ...

    def epoch_begin(self, run_context: RunContext) -> None: ...

    def step_begin(self, run_context: RunContext) -> None: ...

    def step_end(self, run_context: RunContext) -> None: ...

    def epoch_end(self, run_context: RunContext) -> None: ...

    def end(self, run_context: RunContext) -> None: ...

    def on_train_begin(self, run_context: RunContext) -> None:
        self.begin(run_context)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self.epoch_begin(run_context)

    def on_train_step_begin(self, run_context: RunContext) -> None:
        self.step_begin(run_context)

    def on_train_step_end(self, run_context: RunContext) -> None:
        self.step_end(run_context)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        self.epoch_end(run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        self.end(run_context)

    def on_eval_begin(self, run_context: RunContext) -> None:
        self.begin(run_context)

    def on_eval_epoch_begin(self, run_context: RunContext) -> None:
        self.epoch_begin(run_context)

    def on_eval_step_begin(self, run_context: RunContext) -> None:
        self.step_begin(run_context)

    def on_eval_step_end(self, run_context: RunContext) -> None:
        self.step_end(run_context)

    def on_eval_epoch_end(self, run_context: RunContext) -> None:
        self.epoch_end(run_context)

    def on_eval_end(self, run_context: RunContext) -> None:
        self.end(run_context)


class LossMonitor(Callback):
    """Print the loss every `per_print_times` steps, with the step in its epoch; 0 = never.

    A loss that is NaN or infinite raises ValueError, as in MindSpore.
    """

    uses_tables = False

    def __init__(self, per_print_times: int = 1) -> None:
        checks.whole_number("LossMonitor.per_print_times", per_print_times, 0)
        self._every = per_print_times
        self._printed = -1  # the last printed step, at first the step before this call

    def step_begin(self, run_context: RunContext) -> None:
        if self._printed < 0:
            self._printed = run_context.original_args().cur_step_num - 1

    def step_end(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        loss = _loss_of(args)
        place = f"epoch: {args.cur_epoch_num} step: {_step_in_epoch(args)}"
        if not math.isfinite(loss):
            raise ConfigError(
                f"{place}: the loss is not finite, got {loss}. Lower the learning rate, or look "
                "for NaN in the data."
            )
        if self._every and args.cur_step_num - self._printed >= self._every:
            self._printed = args.cur_step_num
            _print(f"{place}, loss is {loss}")


class TimeMonitor(Callback):
    """Print the time of each epoch and of a step, also after every `data_size` steps.

    Args:
        data_size: steps of an epoch; None = print at the end of an epoch only.
        data_time: without effect on what is printed: the time includes reading.
    """

    uses_tables = False

    def __init__(self, data_size: int | None = None, data_time: bool = False) -> None:
        if data_size is not None:
            checks.whole_number("TimeMonitor.data_size", data_size, 1)
        self._size = data_size
        self._began = (0.0, 0)

    def epoch_begin(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        self._began = (time.perf_counter(), args.cur_step_num)

    def step_end(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        steps = args.cur_step_num - self._began[1]
        if self._size is not None and steps >= self._size:
            self._print(args)

    def epoch_end(self, run_context: RunContext) -> None:
        self._print(run_context.original_args())

    def _print(self, args: CallbackParams) -> None:
        began, first = self._began
        seconds = time.perf_counter() - began
        steps = args.cur_step_num - first
        self._began = (time.perf_counter(), args.cur_step_num)
        if steps:
            milliseconds = seconds * 1000
            _print(
                f"Train epoch time: {milliseconds:5.3f} ms, "
                f"per step time: {milliseconds / steps:5.3f} ms"
            )


@dataclass
class Training:
    """The state of one call, shared by its callbacks.

    Attributes:
        engine: the model that learns.
        data: what it learns.
        args: of `RunContext.original_args`.
        evaluates: whether the call evaluates.
        sink_size: batches that are an epoch; None without sink mode.
        initial_epoch: number of epochs before the first of the call.
    """

    engine: RecModel
    data: Any
    args: CallbackParams
    evaluates: bool = False
    sink_size: int | None = None
    initial_epoch: int = 0


class Adapter:
    """Calls one MindSpore callback at the events of the engine.

    Args:
        callback: with the events of `Callback`.
        training: shared by the callbacks of a call.
    """

    is_of_program = True

    def __init__(self, callback: Callback, training: Training) -> None:
        self._callback = callback
        self._training = training
        self._run: Run | None = None
        self._context = RunContext(training.args, self._stop)
        events: tuple[str, ...] = _STEP_EVENTS
        if training.sink_size is not None:
            events += _SUNK_EVENTS
        self._sunk = 0  # batches of the epoch under way, in sink mode
        self._acts = callback.uses_tables and any(_overrides(callback, name) for name in events)

    def on_fit_begin(self, run: Run) -> None:
        self._run = run
        self._sunk = 0
        self._training.args.update(cur_epoch_num=0, cur_step_num=run.step)
        self.call("begin")

    def on_epoch_begin(self, run: Run) -> None:
        if self._training.sink_size is None:
            epoch = run.epoch - run.goal.first_epoch + self._training.initial_epoch + 1
            self._training.args.update(cur_epoch_num=epoch, cur_step_num=run.step)
            self.call("epoch_begin")

    def barrier(self, step: int, now: int | None) -> bool:
        return self._acts

    def on_step_begin(self, run: Run) -> None:
        self._run = run
        size = self._training.sink_size
        if size is None:
            self._training.args.cur_step_num = run.step + 1
            self.call("step_begin")
        elif not self._sunk:
            self._training.args.cur_epoch_num = run.step // size + 1
            self.call("epoch_begin")
            self._training.args.cur_step_num = run.step + size
            self.call("step_begin")

    def on_step_end(self, run: Run) -> None:
        outputs = with_asnumpy(_outputs(run))
        self._training.args.update(net_outputs=outputs, cur_step_num=run.step)
        if self._training.sink_size is None:
            self.call("step_end")
            return
        self._sunk += 1
        if self._sunk == self._training.sink_size:
            self._end_sunk()

    def on_stream_end(self, run: Run) -> None:
        if self._sunk:  # the last epoch of a stream may be shorter
            self._end_sunk()

    def on_epoch_end(self, run: Run) -> None:
        if self._training.sink_size is None:
            self.call("epoch_end")

    def on_fit_end(self, run: Run) -> None:
        if run.error is None:
            self.call("end")

    def _end_sunk(self) -> None:
        self._sunk = 0
        self.call("step_end")
        self.call("epoch_end")

    def call(self, event: str) -> None:
        """Call an event of the callback by its name in training, or in evaluation."""
        prefix = "on_eval_" if self._training.evaluates else "on_train_"
        getattr(self._callback, prefix + event)(self._context)

    def _stop(self, reason: str) -> None:
        if self._run is not None:
            self._run.stop(reason)


def adapted(callbacks: Any, training: Training) -> list[Any]:
    """Return the callbacks of a call for the engine, whose own callbacks stay as they are.

    A `Callback` is adapted. An object with the method `for_engine(training)` gives the engine's
    callbacks that take its place.
    """
    every_callback = listed(callbacks)
    training.args.list_callback = every_callback
    engine_callbacks: list[Any] = []
    for callback in every_callback:
        if isinstance(callback, Callback):
            engine_callbacks.append(Adapter(callback, training))
        elif hasattr(callback, "for_engine") and not isinstance(callback, type):
            engine_callbacks += callback.for_engine(training)
        else:
            engine_callbacks.append(callback)
    return engine_callbacks


def _overrides(callback: Callback, name: str) -> bool:
    return getattr(type(callback), name) is not getattr(Callback, name)


def _outputs(run: Run) -> Any:
    """Return the outputs of the network that the callback sees: its own, or the loss."""
    learner = run.learner
    if learner.criterion is None and learner.outputs is not None:
        return learner.outputs
    return run.loss


def _print(line: str) -> None:
    """Print a line; of several ranks, the first one does."""
    if speaks():
        print(line, flush=True)


def _step_in_epoch(args: CallbackParams) -> int:
    """Return the number of a step in its epoch; a stream without sink mode is one epoch."""
    step: int = args.cur_step_num
    if args.epoch_num is None and not args.dataset_sink_mode:
        return step
    batches: int = args.batch_num
    return (step - 1) % batches + 1


def _loss_of(args: CallbackParams) -> float:
    outputs = args.net_outputs
    while isinstance(outputs, Sequence) and not isinstance(outputs, str):
        outputs = outputs[0]
    return float(outputs)
