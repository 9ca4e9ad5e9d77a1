# SPDX-License-Identifier: Apache-2.0
"""Follow a stream: the limits, sink mode, eviction and signals of `RecModel.online_train`."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from hotbed import checks
from hotbed.errors import ConfigError
from hotbed.training.loop import Run

log = logging.getLogger("hotbed")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def batches_a_call(sink_mode: bool, sink_size: int, device_type: str) -> int:
    """Return how many batches are learned between two `on_step_end`.

    That is `sink_size` where batches are moved to a device before they are learned, else 1. A CPU
    learns batch by batch; one line is logged then.

    Raises:
        ConfigError: `sink_mode` is not a bool; or it is True and `sink_size` not an integer >= 1.
    """
    if not isinstance(sink_mode, bool):
        raise ConfigError(
            f"dataset_sink_mode: must be a bool, got {sink_mode!r}. Give True or False."
        )
    if not sink_mode:
        return 1
    advice = "Give the number of batches of one call."
    checks.whole_number("sink_size", sink_size, 1, advice=advice)
    if device_type == "cpu":
        log.info("dataset_sink_mode: a CPU has nowhere to sink data to; training is batch by batch")
        return 1
    return sink_size


class StreamLimits:
    """End training after `max_steps` steps or `max_seconds` seconds.

    Steps before a resumption count. Seconds are those of this call.
    """

    def __init__(self, max_steps: int | None, max_seconds: float | None) -> None:
        for name, value in (("max_steps", max_steps), ("max_seconds", max_seconds)):
            checks.at_least(name, value, 0, "Give a number, or None for no limit.")
        self._steps = max_steps
        self._seconds = max_seconds
        self._until = 0.0

    def on_epoch_begin(self, run: Run) -> None:
        self._until = time.monotonic() + (self._seconds or 0.0)
        if self._steps is not None and run.step >= self._steps:
            run.stop(f"{run.step} steps")

    def on_step_end(self, run: Run) -> None:
        if self._steps is not None and run.step >= self._steps:
            run.stop(f"{run.step} steps")
        self.on_idle(run)

    def on_idle(self, run: Run) -> None:
        if self._seconds is not None and time.monotonic() >= self._until:
            run.stop(f"{self._seconds:g} seconds")


def follow(data: Iterable[Any], run: Run, learn: Callable[[Iterable[Any], Run], object]) -> None:
    """Learn a stream by `learn(data, run)` until it ends, is stopped or fails.

    SIGINT and SIGTERM end it after the step under way; a second signal ends it at once. An error is
    passed to `on_error` as `run.error` before it is raised.
    """
    called = run.callbacks
    called("on_fit_begin", run)
    try:
        with _ended_by_signals(run):
            called("on_stream_begin", run)
            called("on_epoch_begin", run)
            learn(data, run)
            called("on_stream_end", run)  # saves the last state before callbacks look back
            called("on_epoch_end", run)
        if run.stopped:
            log.info("the stream was stopped at step %d: %s", run.step, run.stopped)
    except BaseException as error:
        run.error = error
        called("on_error", run)
        raise
    finally:
        called("on_fit_end", run)


@contextmanager
def _ended_by_signals(run: Run) -> Iterator[None]:
    # only the main thread may set handlers
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: Any) -> None:
        run.stop(signal.Signals(number).name)
        signal.signal(number, before[signal.Signals(number)])

    handlers = {number: signal.getsignal(number) or signal.SIG_DFL for number in SIGNALS}
    # signals that are ignored stay ignored, as under nohup
    before = {
        number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN
    }
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
