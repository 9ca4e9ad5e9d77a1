# SPDX-License-Identifier: Apache-2.0
"""The only loop in Hotbed: training, evaluation, prediction and online learning all run it.

    read -> encode -> (predict) -> map ids -> forward -> loss -> backward -> check all gradients
         -> update of dense parameters and rows -> callbacks

* learn only: `fit`                     * predict only: `evaluate`, `predict`
* predict, then learn: a stream, where each batch is scored as a server would have scored it before
  it is learned

With `hb.Ahead`, the ids of a batch may be mapped on another thread while the batches before it
train, as far as the next barrier; the stage then only waits. A batch that is mapped first may be
scored by the pass that learns it. See `hotbed.training.ahead`.

The parts are objects: an `Observer` predicts, an `Update` learns, callbacks watch. A stream without
end yields None now and then, a tick: there is nothing new, but callbacks may act or stop.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from hotbed import checks
from hotbed.connectors import Source
from hotbed.data.batch import Batch, changed
from hotbed.data.dataset import Dataset
from hotbed.data.grains import failed_batch
from hotbed.data.schema import Schema
from hotbed.embedding.device import named_failure
from hotbed.errors import ConfigError, DataError
from hotbed.optim.modes import in_train_mode
from hotbed.parallel.placement import SCORED_TOGETHER
from hotbed.training.feed import opened
from hotbed.training.gate.held_back import divided
from hotbed.training.learned_types import check_encoder
from hotbed.training.run import Run
from hotbed.training.share_out import PartScores
from hotbed.training.step.agreement import check_scored
from hotbed.training.step.collector import Collector
from hotbed.training.step.example import CPU, Example, prepare
from hotbed.training.step.learner import Update
from hotbed.training.step.map_stage import MapStage
from hotbed.training.step.scorer import LOSS, Progressive, Scorer
from hotbed.training.step.together import runs_of

if TYPE_CHECKING:
    from hotbed.training.watching.history import History

log = logging.getLogger("hotbed")


def pass_over(
    data: Iterable[Any], run: Run, update: Update | None = None, parts: PartScores | None = None
) -> None:
    """Make one pass over `data`, to its end or until a callback stops it.

    Args:
        data: batches; None among them is a tick.
        run: the run that the pass belongs to.
        update: what learns each batch; None = nothing is learned.
        parts: scores batches of which ranks read some rows each; None = each reads all.
    """
    observer = run.observer
    callbacks = run.callbacks
    if run.ends():
        return
    _prepare_dataset(run, must_match=update is not None)
    shard = run.learner.shard
    examples = _observed(data, run, parts) if update is None else _mapped(data, run, update)
    with closing(examples):
        for example in examples:
            with _marked(run):
                if update is not None:
                    shard.enter("map", run.model.counters["steps"] + 1)
                run.example = example
                callbacks("on_step_begin", run)
                if update is None and run.stage is not None:
                    run.stage.advance(example)  # rows of coming batches are read meanwhile
                if observer is not None:
                    observer.observe(example)
                    callbacks("on_predicted", run)
                if update is not None:
                    planned = example
                    if update.planner is not None:
                        planned = update.planner.map(example)
                    loss = update.forward(planned)
                    if run.stage is not None:  # backward leaves Python's lock to the reader
                        run.stage.advance(planned)
                    update.backward(loss)
                    run.loss = loss.detach()
                    del loss, planned  # with them, the rows of this batch
                    is_finite = update.gradients_are_finite()
                    run.loss = update.loss
                    if is_finite:
                        callbacks("on_gradients", run)
                        update.step()
                    else:
                        run.counts.skipped += 1
                run.count(example, learned=update is not None)
                if observer is not None:
                    observer.settle()
                callbacks("on_step_end", run)
                if update is not None:
                    shard.enter("reading", run.model.counters["steps"] + 1)
    if update is None:
        assert isinstance(observer, (Scorer, Collector)), "it scores"
        observer.finish()
        check_scored(shard, ())
    run.example = None
    run.loss = None


def _mapped(data: Iterable[Any], run: Run, update: Update | None) -> Generator[Example, None, None]:
    """Yield each example, with ids that are mapped ahead where they may be."""
    planner = None if update is None else update.planner
    run.stage = stage = MapStage(
        _examples(data, run, learns=update is not None),
        run.dataset,
        planner,
        0 if update is None else run.goal.depth,
        run.barrier,
        run.step,
        run.now,
    )
    is_listed = isinstance(run.dataset, list) and len(run.dataset) > 1
    if run.goal.depth or is_listed or isinstance(run.dataset, Dataset):
        stage.fetch_for(run.learner.network)  # of other data, nothing is read ahead
    with closing(stage):
        for example in stage:
            if example is None:
                run.callbacks("on_idle", run)
            else:
                yield example
            if run.ends():
                return


def _observed(
    data: Iterable[Any], run: Run, parts: PartScores | None
) -> Generator[Example, None, None]:
    """Yield the examples of a pass that learns nothing, some of them scored before their turn."""
    num_scored = 0
    if parts is not None:
        num_scored = yield from parts.examples()
        if num_scored == parts.num_batches or run.ends():
            return
    with closing(_mapped(data, run, None)) as examples:
        for _ in range(num_scored):
            next(examples)
        yield from _scored_together(examples, run)


def _scored_together(examples: Iterable[Example], run: Run) -> Iterator[Example]:
    """Yield examples; ranks score some at a time where they can be read ahead of callbacks."""
    observer = run.observer
    assert isinstance(observer, (Scorer, Collector)), "it scores"
    shard = run.learner.shard
    is_iterator = isinstance(run.dataset, Iterator)
    most = 0 if shard.size == 1 or is_iterator else SCORED_TOGETHER
    for batches in runs_of(examples, most):
        check_scored(shard, batches)
        scored: Iterable[Example] = batches
        if len(batches) > 1:
            if run.stage is not None:
                run.stage.advance(batches[-1])
            scored = observer.scored(batches)
        for example in scored:
            yield example
            if run.ends():
                return


def _examples(
    data: Iterable[Any], run: Run, *, learns: bool
) -> Generator[Example | None, None, None]:
    """Yield what `_read_examples` does.

    Where ranks share out the data, an error of reading is raised in the step that all begin.
    """
    try:
        yield from _read_examples(data, run, learns=learns)
    except Exception as error:
        if run.goal.own is None or not isinstance(run.dataset, Dataset):
            raise
        learner = run.learner
        batch = failed_batch(run.dataset.schema, learner.grains)
        yield replace(prepare(batch, learner.device, labelled=True), error=error)
        raise


def _read_examples(
    data: Iterable[Any], run: Run, *, learns: bool
) -> Generator[Example | None, None, None]:
    """Yield each item of the data as an example, with the histories of its rows; None for a tick.

    `learns`: whether its rows leave entries in the histories.
    """
    learner = run.learner
    labelled = learner.criterion is not None
    types = None  # the last ones that were compared with those of training
    share = run.callbacks.held_back if run.online else 0.0
    check = None
    if learner.criterion is not None and learner.device != CPU:
        check = learner.criterion.check_on_host
    histories = run.model.histories
    with opened(data, run) as items:
        for item in items:
            if item is None:
                yield None
            else:
                encoder = item.encoder if isinstance(item, Batch) else None
                if encoder is not None and encoder.types is not types:
                    check_encoder(run.model, encoder)
                    types = encoder.types
                aside = None
                if isinstance(item, Batch):
                    if histories is not None:
                        item = histories.fill(item, leaves=learns)
                    item, aside = divided(item, share)
                example = prepare(
                    item, learner.device, labelled=labelled, network=learner.network, check=check
                )
                example = example.divided(learner.grains)
                yield example if aside is None else changed(example, {"held_back": aside})


@contextmanager
def _marked(run: Run) -> Iterator[None]:
    """Record that an error within leaves something half done; name one of a device."""
    try:
        yield
    except BaseException as error:
        run.learner.forget()
        named = named_failure(error, run.learner.device)
        run.fail(named or error, whole=False)
        if named is not None:
            raise named from error
        raise


def _prepare_dataset(run: Run, *, must_match: bool) -> None:
    """Tell a Dataset the rules of the model, and which labels the loss needs from 0 to 1."""
    dataset = run.dataset
    criterion = run.learner.criterion
    if not isinstance(dataset, Dataset):
        return
    labels: Iterable[str] = ()
    if criterion is not None:
        labels = criterion.unit_labels(label.name for label in dataset.schema.labels)
    if isinstance(run.model.schema, Schema):
        dataset.follow_rules(run.model.schema.rules)
    dataset.restrict_labels(labels, must_match=must_match)


@contextmanager
def reported(run: Run) -> Iterator[None]:
    """Pass an error to `on_error` as `run.error` before it is raised; end with `on_fit_end`."""
    try:
        yield
    except BaseException as error:
        run.fail(error)
        run.callbacks("on_error", run)
        raise
    finally:
        run.callbacks.end(run)


def measure(run: Run, history: History) -> None:
    """Add what a pass measured to the metrics of the run."""
    loss = history.epoch_loss
    if loss is not None:
        run.metrics[LOSS] = loss
    if isinstance(run.observer, Progressive):
        run.metrics.update(run.observer.total.results())


# --- the epochs of a fit --------------------------------------------------------------------------


def fit_epochs(run: Run, history: History) -> None:
    """Learn the epochs of the run's goal, until a callback stops training.

    The model's counter "epochs" is the number of the epoch under way, and is incremented when an
    epoch is over.
    """
    run.model.counters["epochs"] = run.epoch
    run.callbacks("on_fit_begin", run)  # a resumption happens here
    learner = run.learner
    end = run.goal.end_epoch
    with reported(run):
        if run.epoch >= end:
            log.warning("nothing to learn: %d of %d epochs are learned", run.epoch, end)
        for epoch in range(run.epoch, end):
            resumed = _begin_epoch(run, epoch)
            if not run.ends():
                with (
                    epoch_of(run.dataset, epoch, run.goal.own) as batches,
                    in_train_mode(learner.network),
                ):
                    pass_over(batches, run, learner)
                measure(run, history)
                _end_epoch(run, resumed=resumed)
            if run.ends():
                log.info("training stopped at step %d: %s", run.step, run.stopped)
                break


def _begin_epoch(run: Run, epoch: int) -> bool:
    """Begin an epoch; return whether it was resumed in its middle."""
    dataset = run.dataset
    resumed = isinstance(dataset, Dataset) and dataset.resumed_epoch == epoch
    run.counts.epoch = epoch
    run.model.counters["epochs"] = epoch
    if not resumed:
        run.counts.epoch_began = run.step
    run.callbacks("on_epoch_begin", run)
    return resumed


def _end_epoch(run: Run, *, resumed: bool) -> None:
    learned = run.step - run.counts.epoch_began
    if not learned and not resumed:
        raise DataError("train: an epoch needs a batch, got empty data. Give data with rows.")
    # a stop at the last batch comes before the end of the data is seen
    if not run.stopped or learned == run.goal.epoch_steps:
        run.model.counters["epochs"] = run.epoch + 1
    with _marked(run):  # some callbacks may have seen the end of the epoch, and some may not
        run.callbacks("on_epoch_end", run)


def count_epochs(epochs: int | range) -> int:
    """Return the number of epochs of a fit.

    Raises:
        ConfigError: there are none, or a range does not count up by one from 0 or more.
    """
    advice = "Give the number of passes, or a range of their numbers such as range(2, 5)."
    if isinstance(epochs, range):
        if epochs.step != 1 or epochs.start < 0 or not epochs:
            raise ConfigError(f"epochs: expected consecutive numbers, got {epochs}. {advice}")
        return len(epochs)
    checks.whole_number("epochs", epochs, 1, advice=advice)
    return epochs


def first_epoch(data: Iterable[Any], epochs: int | range, learned: int) -> int:
    """Return the number of the epoch that a fit begins with.

    Args:
        data: a Dataset that was resumed begins with the epoch of its position.
        epochs: of the fit; a range begins with its first number, others after those `learned`.
        learned: number of epochs that the model has learned.

    Raises:
        ConfigError: a range begins with another epoch than a resumed Dataset.
    """
    resumed = data.resumed_epoch if isinstance(data, Dataset) else None
    if not isinstance(epochs, range):
        return learned if resumed is None else resumed
    if resumed not in (None, epochs.start):
        raise ConfigError(
            f"epochs: the dataset was resumed inside epoch {resumed}, got {epochs}. "
            "Give the number of epochs, or a dataset that was not resumed."
        )
    return epochs.start


@contextmanager
def epoch_of(data: Iterable[Any], number: int, own: range | None = None) -> Iterator[Iterable[Any]]:
    """Yield the batches of epoch `number` of a Dataset, the rest of it after `resume`.

    Other data are yielded unchanged. `own`: as in `Dataset.epoch`.
    """
    if not isinstance(data, Dataset):
        yield data
        return
    batches: Any = data.epoch(number, own)
    with closing(batches):  # ends the reading thread
        yield batches


# --- arguments -----------------------------------------------------------------------------------


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
