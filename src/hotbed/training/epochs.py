# SPDX-License-Identifier: Apache-2.0
"""Train epoch by epoch: the part of the loop that `RecModel.fit` adds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from hotbed import checks
from hotbed.data.dataset import Dataset
from hotbed.errors import ConfigError, DataError
from hotbed.training.loop import Run

log = logging.getLogger("hotbed")
Learn = Callable[[Iterable[Any], Run], bool]


def first_epoch(data: Iterable[Any], given: int | None, learned: int) -> int:
    """Return the number of the epoch that a fit begins with.

    Args:
        data: a Dataset that was resumed begins with the epoch of its position.
        given: the `initial_epoch` of the user; None = after the epochs that are `learned`.
        learned: number of epochs that the model has learned.

    Raises:
        ConfigError: `given` is below 0, or differs from the epoch of a resumed Dataset.
    """
    resumed = data.resumed_epoch if isinstance(data, Dataset) else None
    if given is None:
        return learned if resumed is None else resumed
    checks.whole_number("initial_epoch", given, 0, advice="Count from 0.")
    if resumed not in (None, given):
        raise ConfigError(
            f"initial_epoch: the dataset was resumed inside epoch {resumed}, got {given}. "
            "Leave initial_epoch out, or give a dataset that was not resumed."
        )
    return given


@contextmanager
def epoch_of(data: Iterable[Any], number: int) -> Iterator[Iterable[Any]]:
    """Yield the batches of epoch `number` of a Dataset, the rest of it after `resume`.

    Other data are yielded unchanged.
    """
    if not isinstance(data, Dataset):
        yield data
        return
    batches: Any = data.epoch(number)
    with closing(batches):  # ends the reading thread
        yield batches


def fit_epochs(data: Iterable[Any], run: Run, learn: Learn) -> None:
    """Learn the epochs `run.epoch` to `run.epochs` of `data`, until a callback stops training.

    The model's counter "epochs" is the number of the epoch under way, and is incremented when an
    epoch is over. An error is passed to `on_error` as `run.error` before it is raised.

    Args:
        data: a Dataset, or other batches.
        run: the run to continue.
        learn: `learn(batches, run)` makes one pass; it returns False when it was stopped before
            the end of the data.
    """
    called = run.callbacks
    run.model.counters["epochs"] = run.epoch
    called("on_fit_begin", run)  # a resumption happens here
    try:
        if run.epoch >= run.epochs:
            log.warning("nothing to learn: %d of %d epochs are learned", run.epoch, run.epochs)
        for epoch in range(run.epoch, run.epochs):
            run.epoch = epoch
            _learn_epoch(data, run, learn)
            if run.stopped:
                log.info("training stopped at step %d: %s", run.step, run.stopped)
                break
    except BaseException as error:
        run.error = error
        called("on_error", run)
        raise
    finally:
        run.count()
        called("on_fit_end", run)


def _learn_epoch(data: Iterable[Any], run: Run, learn: Learn) -> None:
    counters = run.model.counters
    counters["epochs"] = run.epoch
    resumed = isinstance(data, Dataset) and data.resumed_epoch == run.epoch
    if not resumed:
        run.epoch_began = run.step
    run.callbacks("on_epoch_begin", run)
    if run.stopped:
        return
    with epoch_of(data, run.epoch) as batches:
        over = learn(batches, run)
    learned = run.step - run.epoch_began
    if not learned and not resumed:
        raise DataError("train: there is no batch, got an empty epoch. Give data with rows.")
    if over or learned == run.total_steps:  # a stop after the last batch comes before `over`
        counters["epochs"] = run.epoch + 1
    try:
        run.callbacks("on_epoch_end", run)
    except BaseException:
        run.whole = False  # some callbacks have seen the end of the epoch, and some have not
        raise
