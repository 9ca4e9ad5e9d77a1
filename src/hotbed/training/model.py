# SPDX-License-Identifier: Apache-2.0
"""RecModel: the high-level face of training, after `mindspore_rec.RecModel`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from hotbed import checks
from hotbed.data.batch import Batch
from hotbed.data.dataset import Dataset
from hotbed.data.schema import Schema
from hotbed.embedding.modules import device_of, histories_of
from hotbed.embedding.rule import Rule
from hotbed.errors import ConfigError, DataError
from hotbed.files import Where
from hotbed.metrics.metric_set import check_groups, metric_set
from hotbed.optim.dense import set_dense_rate
from hotbed.optim.modes import in_eval_mode, in_train_mode
from hotbed.optim.precision import Compile, precision
from hotbed.optim.sparse import dense_parameters
from hotbed.parallel import at, edits_of
from hotbed.parallel.world import check_not_wrapped, speaks
from hotbed.persist.container.format import Reader, open_checkpoint, read_newest, refuse_others
from hotbed.persist.container.store import open_store, write_text
from hotbed.persist.publish.version import OnnxGraph
from hotbed.persist.state import checkpoint, restoring
from hotbed.persist.upkeep.warm_starts import warm_start
from hotbed.persist.upkeep.words import types_there
from hotbed.training.ahead import depth_for, unwrap
from hotbed.training.arguments import (
    check_compile,
    check_evaluation,
    check_keeps,
    check_names,
    check_network,
    check_rows_in_order,
    listed,
    log_frozen_lookups,
    tables_of,
)
from hotbed.training.callbacks.validation import Validate
from hotbed.training.described import (
    described_argument,
    described_within,
    given_tables,
    headline_of,
    summary_of,
)
from hotbed.training.devices import find_device, move
from hotbed.training.devices.step_times import device_times
from hotbed.training.feed import num_batches
from hotbed.training.learned_types import check_validation, typed
from hotbed.training.loop import (
    check_batches,
    check_ends,
    count_epochs,
    epoch_of,
    first_epoch,
    fit_epochs,
    pass_over,
)
from hotbed.training.make_learner import keep_average, make_learner
from hotbed.training.online import StreamLimits, follow
from hotbed.training.publishing import freeze, graph_of
from hotbed.training.run import Callbacks, Goal, Run, WallClock
from hotbed.training.run_settings import settings_of_run
from hotbed.training.share_out import own_grains, part_scores
from hotbed.training.step.collector import Collector, to_predict
from hotbed.training.step.compared import compared
from hotbed.training.step.criterion import Criterion
from hotbed.training.step.division import Division, connect_ranks
from hotbed.training.step.learner import SelfUpdating, check_not_moved
from hotbed.training.step.network import adapter_of
from hotbed.training.step.one_pass import obstacle_to_one_pass
from hotbed.training.step.scorer import Parted, Progressive, Scorer
from hotbed.training.watching.history import History
from hotbed.training.watching.progress import ProgressBar

log = logging.getLogger("hotbed")


OptimizerSpec: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Rule | str
"""What `RecModel` takes for the optimizer of the dense parameters."""


class RecModel:
    """A network with its loss, optimizers and metrics, which trains, evaluates, predicts and saves.

    Args:
        network: any `nn.Module`, with or without hotbed embeddings; `network(batch)` for a `Batch`,
            `network(data)` for tuple data with a loss, `network(*items)` for tuple data without.
            One that `hb.auto` converted is called as it was written; see docs/training.md.
        loss_fn: a loss of `hb.losses` or its name, a torch loss, a callable, or a mapping of label
            to such. None: the network returns its loss.
        optimizer: of the dense parameters: a torch optimizer over `hb.dense_parameters(network)`, a
            rule such as `hb.Adam(lr=1e-3)`, or a name. Rows of tables are updated by their tables'
            own rules. For a model of `hb.auto`: the optimizer that `hb.auto` returned, or the list
            of them. None: the network does backward and updates itself. A dense parameter that
            requires a gradient and is in no optimizer is logged, and so is a network that never
            changes.
        metrics: names or objects of `hb.metrics`: a set, or a mapping of name to metric or of label
            to a set.
        eval_network: what evaluation runs instead of `network` with `loss_fn`.
        amp_level: "O0", "O1", "O2", "O3" or "auto": see `hotbed.optim.precision`.
        compile: how torch.compile compiles the training step, such as `hb.Compile()`; None: it
            does not.
        grains: runs of samples that each batch is computed in, a power of two; see docs/grains.md.
        whole_tables: names of tables that lie on one rank each, where there are several; the rows
            of others are spread over all ranks. No bit depends on it; see docs/ranks.md.
        device: where the dense part computes, such as "cuda" or "cuda:1"; the network, the loss and
            `eval_network` are moved there. Rows of tables stay where they are. None: where the
            network is. See docs/devices.md.
        average: the share that a step keeps of moving averages of the dense parameters, such as
            0.999. The network then has these averages between its steps: they are what is
            evaluated, saved, published and exported. None: the network has the weights themselves.

    Raises:
        ConfigError: (a ValueError) arguments cannot work together, or there is no such device.

    Example:
        >>> model = hb.RecModel(network, "bce", "adam", metrics={"auc"})
        >>> history = model.fit(train, valid, epochs=2)
        >>> model.save("model")
        >>> scores = hb.load("model").predict(test)
    """

    @at("RecModel")
    def __init__(
        self,
        network: nn.Module,
        loss_fn: Any = None,
        optimizer: OptimizerSpec | None = None,
        metrics: Any = None,
        eval_network: Callable[..., Any] | None = None,
        amp_level: str = "O0",
        compile: Compile | None = None,
        grains: int = 1,
        whole_tables: Sequence[str] = (),
        device: str | torch.device | None = None,
        average: float | None = None,
    ) -> None:
        connect_ranks(grains)
        check_network(network)
        checks.power_of_two("grains", grains, "Grains are joined by halves: give such as 8.")
        check_evaluation(eval_network)
        check_compile(compile)
        if device is not None:
            losses = loss_fn.values() if isinstance(loss_fn, Mapping) else [loss_fn]
            move(find_device("device", device), [network, eval_network, *losses], optimizer)
        self.network = network
        self.eval_network = eval_network
        self.tables = tables_of(network)
        self.histories = histories_of(network)
        if self.tables:
            check_not_wrapped(network, grains)
        self.metrics = metric_set(metrics)
        self._arguments = {
            "loss_fn": loss_fn,
            "optimizer": optimizer,
            "metrics": metrics,
            "amp_level": amp_level,
            "compile": compile,
            "average": average,
        }
        if grains > 1:
            self._arguments["grains"] = grains
        if eval_network is None or isinstance(eval_network, Parted):
            check_groups(self.metrics)
        self.counters = {"epochs": 0, "steps": 0, "samples": 0}
        self.schema: Any = getattr(network, "_described", {}).get("schema")
        self.parent: str | None = None
        self.encoder: Any = None
        self._criterion = None if loss_fn is None else Criterion(loss_fn)
        if self.metrics and eval_network is None and self._criterion is None:
            raise ConfigError(
                "metrics: nothing to compute them from, got metrics without loss_fn and without "
                "eval_network. Give one of the two."
            )
        self._precision = precision(amp_level, device_of(network))
        self._has_begun = False  # whether step() was called
        check_names("whole_tables", whole_tables, self.tables)
        division = Division.of_job(grains, whole_tables)
        self.learner = make_learner(
            network, self._criterion, optimizer, division, self._precision, amp_level, compile
        )
        if average is not None:
            keep_average(self.learner, average)

    @at("fit")
    def fit(
        self,
        train: Iterable[Any],
        valid: Iterable[Any] | None = None,
        epochs: int | range = 1,
        callbacks: Any = (),
        *,
        progressive: bool = False,
        progress: bool = True,
        max_steps: int | None = None,
    ) -> History:
        """Train on `train` for `epochs` passes, validate on `valid` after each, return the history.

        `callbacks`: one or several of `hb.callbacks`, or objects with some of the methods that
        `Callbacks` names. With `progressive`, each batch is predicted before it is learned, as a
        server would have scored it, and metrics are of those predictions. `progress` shows bars.

        Epochs are counted over all fits of the model, also after `save` and `load`: a second `fit`
        shuffles on, as one fit of all epochs would have. A range gives the epochs their numbers
        instead, as in `epochs=range(2, 5)`. `max_steps` ends training after that number of steps,
        also inside an epoch, which then does not count as learned. With `Checkpoint`, the same
        call resumes where a killed one was, to the same bits; steps and epochs before it count.
        Dropout draws from torch's generator: call `torch.manual_seed` first.
        """
        num_epochs = count_epochs(epochs)
        train, depth, cores = unwrap(train, self.network, self.grains)
        check_batches("train", train, num_epochs)
        check_ends(train)
        self._divide(train)
        first = first_epoch(train, epochs, self.counters["epochs"])
        limits = StreamLimits(max_steps, None)
        history = History()
        times = device_times(self, shows=progress and speaks())
        every_callback = [*listed(callbacks), limits, history, *cores, *times]
        with self.learner.shard.together():  # sources count their rows, and name their columns
            goal = Goal(
                train,
                valid,
                depth_for(self.learner.planner, depth),
                first_epoch=first,
                end_epoch=first + num_epochs,
                epoch_steps=num_batches(train),
            )
            called = self._callbacks(goal, every_callback, progress=progress)
        observer = None
        if progressive:
            self._check_measurable("progressive")
            observer = self._progressive(goal)
        fit_epochs(self._begin(goal, called, observer), history)
        history.ranks = self.learner.end()
        history.step_times = next((part.times for part in times), None)
        return history

    @at("online_train")
    def online_train(
        self,
        train_dataset: Iterable[Any],
        callbacks: Any = None,
        *,
        max_steps: int | None = None,
        max_seconds: float | None = None,
        valid: Iterable[Any] | None = None,
        progressive: bool | Literal["training"] = True,
        progress: bool = True,
    ) -> History:
        """Learn a stream batch by batch, in its order, and return the history.

        `train_dataset`: a Dataset, endless or not, or any iterable of batches or tuples; its length
        is not asked for. With `progressive`, each batch is predicted before it is learned, as a
        server would have scored it ("training": cheaper, metrics are of the training forward's own
        outputs); a model with neither metrics nor loss_fn is not scored. It ends with the stream,
        after `max_steps` (those before a resumption included) or `max_seconds`, by `run.stop()` of
        a callback, or by SIGINT or SIGTERM, always after a whole step. With the callback
        `Checkpoint` a later call resumes where this one ended or failed.

        `valid` is the data that `Validate` evaluates.

        Example:
            >>> checkpoint = hb.callbacks.Checkpoint("runs/clicks", every_seconds=60)
            >>> model.online_train(dataset, [checkpoint])
        """
        train_dataset, depth, cores = unwrap(train_dataset, self.network, self.grains)
        check_batches("train_dataset", train_dataset)
        self._divide(train_dataset)
        limits = StreamLimits(max_steps, max_seconds)
        history = History()
        times = device_times(self, shows=progress and speaks())
        every_callback = [*listed(callbacks), limits, history, *cores, *times]
        with self.learner.shard.together():  # sources count their rows, and name their columns
            goal = Goal(
                train_dataset,
                valid,
                depth_for(self.learner.planner, depth),
                online=True,
                epoch_steps=num_batches(train_dataset, of_stream=True),
            )
            called = self._callbacks(goal, every_callback, progress=progress)
        observer = None
        if progressive == "training" or (progressive and self._is_measurable):
            observer = self._progressive(goal, by_training=progressive == "training")
        follow(self._begin(goal, called, observer), history)
        history.ranks = self.learner.end()
        history.step_times = next((part.times for part in times), None)
        return history

    @at("step")
    def step(self, batch: Any) -> float:
        """Learn one batch, as a step of `fit` does, and return its loss before the update.

        This is for a loop of your own: evaluate, save or set learning rates between two steps.
        Learning the batches of an epoch one by one gives the bits of a `fit` over them. There are
        no callbacks, and the model's counter of epochs stays; `counters` of steps and samples grow.

        Args:
            batch: a `Batch` of a Dataset or a tuple, as in `fit`.

        Raises:
            ConfigError: `batch` is a Dataset or None, the tick of a stream.
            NonFiniteGradient: nothing was learned; under loss scaling the batch is skipped instead,
                and `learner.skipped` counts it.

        Example:
            >>> for number, batch in enumerate(train):
            ...     model.dense_learning_rate = 1e-3 * schedule.factor(number)
            ...     loss = model.step(batch)
        """
        if batch is None or isinstance(batch, (str, Dataset)):
            raise ConfigError(
                f"step: not a batch, got {type(batch).__name__}. Give one batch, or learn a "
                "Dataset with fit()."
            )
        if isinstance(batch, Batch) and batch.encoder is not None:
            self._learn_schema(batch.encoder.schema, batch.encoder)
        if self._has_begun:
            self.learner.forget()  # gradients of a step that failed, or of the user's own loop
        else:
            self._has_begun = True
            self.learner.begin()
        losses: list[float] = []
        last_loss = SimpleNamespace(on_step_end=lambda run: losses.append(run.loss.item()))
        run = Run(self, Goal([batch]), Callbacks([last_loss]))
        with in_train_mode(self.network):
            pass_over([batch], run, self.learner)
        return losses[0]

    @at("evaluate")
    def evaluate(self, data: Iterable[Any], callbacks: Any = ()) -> dict[str, float]:
        """Return the metrics of `data` by name, and the mean loss; nothing is learned.

        Metrics of several labels are named `label.metric`.
        """
        self._check_measurable("evaluate")
        self._compare_ranks()
        scorer = self._scorer()
        if not self._observe(data, scorer, callbacks):
            raise DataError("evaluate: no batch, got empty data. Give data with rows.")
        return scorer.results()

    @at("predict")
    def predict(self, data: Any) -> Any:
        """Return the predictions of a Dataset, of batches or of one Batch.

        They are float32 [n], a dict of these for several labels: probabilities where the loss is a
        cross-entropy of logits, else the outputs of the network. Tables are only read. Labels and
        weights are not read and may be missing.
        """
        self._compare_ranks()
        scorer = Scorer(
            self.network, self._criterion, {}, precision=self._precision, shard=self.learner.shard
        )
        collector = Collector(scorer)
        self._observe(to_predict(data), collector, ())
        return collector.predictions()

    def __repr__(self) -> str:
        return headline_of(self)

    @property
    def grains(self) -> int:
        """Runs of samples that each batch is computed in."""
        return self.learner.grains

    @property
    def device(self) -> torch.device:
        """Where the dense part computes."""
        return self.learner.device

    @property
    def dense_learning_rate(self) -> float | None:
        """The learning rate of the dense parameters from the next step on; None: no optimizer.

        Assigning it sets the rate of all groups of the optimizer. It is saved with the model.
        """
        optimizer = self.learner.dense
        if optimizer is None:
            return None
        return float(optimizer.param_groups[0]["lr"])

    @dense_learning_rate.setter
    def dense_learning_rate(self, rate: float) -> None:
        if self.learner.dense is None:
            raise _no_rate("dense_learning_rate", rate)
        set_dense_rate(self.learner.dense, rate)

    @property
    def table_learning_rates(self) -> dict[str, float]:
        """The learning rates of the tables by name, from the next step on.

        One number may be assigned for all tables, or a mapping for some. They are saved with the
        model.
        """
        rates: dict[str, float] = {}
        if self.learner.sparse is not None:
            for group in self.learner.sparse.param_groups:
                rates.update(dict.fromkeys(group["tables"], group["lr"]))
        return rates

    @table_learning_rates.setter
    def table_learning_rates(self, rates: float | Mapping[str, float]) -> None:
        if self.learner.sparse is None:
            raise _no_rate("table_learning_rates", rates)
        self.learner.sparse.set_learning_rates(rates)

    @property
    def arguments(self) -> dict[str, Any]:
        """The settings by name; None = not given."""
        return {**self._arguments, "metrics": sorted(self.metrics)}

    def summary(self, picture: Where | None = None) -> str:
        """Print dense parameters, tables and settings of the model, and return the text.

        Args:
            picture: the SVG file to draw the layers into, or its URL. Only a network of
                `hb.models.Graph` has a picture, because its layers say what they take.

        Raises:
            ConfigError: the network has no picture.
        """
        text = summary_of(self)
        if picture is not None:
            if not text.picture:
                raise ConfigError(
                    "summary.picture: only networks of hb.models.Graph can be drawn, got "
                    f"{type(self.network).__name__}. Leave it out."
                )
            write_text(picture, text.picture)
        print(text)
        return text

    @at("save")
    def save(self, path: str | Path, callbacks: Sequence[Any] = ()) -> str | Path:
        """Write a checkpoint under `path`, a local path or URL, and return its folder.

        The checkpoint is then the newest under `path`; see docs/format.md. On several ranks, all
        call it, with one folder that they share, and write one checkpoint. The states of
        `callbacks`, such as `Baselines`, are written with it; no digest covers them.

        Raises:
            PersistError: it cannot be written, or `path` holds the states of a stream or published
                versions.
        """
        with self.learner.shard.together():
            refuse_others(open_store(path))  # retention would remove them
        state = self.state()
        if callbacks:
            progress = {**state.progress, "wall_callbacks": Callbacks(callbacks).state()}
            state = replace(state, progress=progress)
        saved = checkpoint.save(path, state)
        self.parent = saved.digest
        return saved.folder

    @at("restore")
    def restore(self, path: str | Path | Reader, allow: Sequence[str] = ()) -> RecModel:
        """Restore network, tables and optimizer state from a checkpoint, and return self.

        Build the model as it was when it was saved.

        Args:
            path: the checkpoint.
            allow: names of fields that may differ although the rows mean something else with them,
                as in `Checkpoint`.

        Raises:
            PersistError: a field differs; the message names the first, and nothing has changed.
        """
        if not isinstance(path, Reader):
            if self.learner.shard.size == 1:
                return read_newest(path, lambda newest: self.restore(newest, allow))
            with self.learner.shard.together():
                path = open_checkpoint(path)
        reader = path
        restoring.restore(reader, self.state(), allow)
        if self._holds_schedules:
            self.learner.load_state(reader.progress.get("learner", {}))
        self.learner.forget()
        self.schema = typed(self.schema, reader.schema, None)
        self.counters = {**self.counters, **reader.manifest.counters}
        self.parent = reader.manifest.digest
        return self

    @at("export")
    def export(self, path: str | Path, state: str | Path | None = None) -> str | Path:
        """Freeze the model for servers under `path`: rows, weights, schema, an ONNX graph; see
        docs/serving.md. `state`: the checkpoint whose newest state is frozen; None: the model as it
        is now.
        """
        return freeze(self, path, state)

    def graph(self) -> OnnxGraph:
        """Return the part of the network after the lookups as an ONNX graph, checked.

        It is computed and checked on the CPU, also where the network is on another device.

        Raises the errors of `hotbed.persist.publish.export.export_graph`.
        """
        return graph_of(self)

    @at("warm_start")
    def warm_start(
        self,
        path: str | Path,
        rename: Mapping[str, str] | Sequence[tuple[str, str]] = (),
        *,
        optimizer_state: bool = False,
        now: int | None = None,
        schema: Schema | None = None,
    ) -> dict[str, str]:
        """Take rows from the tables of another model's checkpoint; returns table here -> table
        there.

        Where a feature is mapped by another vocabulary here, rows follow their words.

        Args:
            path: the checkpoint.
            rename: table there -> table here, or pairs of (regular expression for the name there,
                what takes its place).
            optimizer_state: also take optimizer state; see `hb.checkpoints.warm_start`.
            now: as there.
            schema: of the data here; None: the one that the network was built with.

        Raises:
            PersistError: dims or rules differ, no table has a counterpart, or a transform differs
                so that ids mean other values; the message names it, and nothing has changed.

        Example: `model.warm_start("runs/old", {"member": "user"})`
        """

        def warm(reader: Reader) -> dict[str, str]:
            data_schema = self.schema if schema is None else schema
            matches = warm_start(
                self.tables,
                reader,
                rename,
                optimizer_state=optimizer_state,
                now=now,
                schema=data_schema,
                computed=() if adapter_of(self.network) is None else self.tables,
            )
            if data_schema is not None and reader.schema is not None:
                self.schema = data_schema.with_types(
                    types_there(reader.schema, data_schema, matches), {}
                )
            return matches

        shard = self.learner.shard
        if shard.size == 1:
            return read_newest(path, warm)
        with shard.together():
            reader = open_checkpoint(path)
        restoring.check_one_state(reader, shard.gathered(reader.manifest.digest))
        settings = {"rename": str(rename), "optimizer_state": optimizer_state, "now": now}
        settings["schema"] = None if schema is None else schema.to_json()
        shard.check_equal({"warm_start": settings, **edits_of(self.tables.values())})
        with shard.together():
            return warm(reader)

    def state(self) -> checkpoint.State:
        """Everything that `save` writes, for `hotbed.persist`."""
        dense = {id(parameter) for parameter in dense_parameters(self.network)}
        described = {name: described_argument(value) for name, value in self._arguments.items()}
        schema = None
        if self.schema is not None:
            schema = typed(self.schema, self.schema, self.encoder).to_json()
        network = described_argument(self.network)
        parts = [network, described["loss_fn"], schema]
        return checkpoint.State(
            network=self.network,
            tables=self.tables,
            optimizers=self.learner.optimizers,
            rows=[
                parameter for parameter in self.network.parameters() if id(parameter) not in dense
            ],
            model={
                "network": network,
                "given_tables": given_tables(self.network),
                **described,
                **described_within(self.network, self.learner.optimizers, parts),
            },
            schema=schema,
            counters=self.counters,
            version=self.counters["steps"],
            parent=self.parent,
            progress={"learner": self.learner.state()} if self._holds_schedules else {},
            shard=self.learner.shard,
        )

    @property
    def _holds_schedules(self) -> bool:
        """Whether the network updates itself, by schedules among other things."""
        return isinstance(self.learner, SelfUpdating) and bool(self.learner.state())

    def _scorer(self) -> Scorer:
        return Scorer(
            self.network,
            self._criterion,
            self.metrics,
            eval_network=self.eval_network,
            precision=self._precision,
            shard=self.learner.shard,
        )

    def _progressive(self, goal: Goal, *, by_training: bool = False) -> Progressive:
        """Return what scores each batch of a run before it is learned.

        Args:
            goal: where ids are mapped ahead, the forward pass that learns a batch also scores it,
                if that gives the same bits.
            by_training: it does, whatever that gives.
        """
        scorer = self._scorer()
        is_own = scorer.criterion is not None and not scorer.has_own_outputs
        if goal.depth and is_own and not by_training:
            obstacle = obstacle_to_one_pass(self.network, self.tables.values())
            if self._arguments["average"] is not None:
                obstacle = "the network learns other weights than their averages, which score"
            by_training = not obstacle
            if obstacle:
                log.info("each batch is scored before it is mapped: %s", obstacle)
            else:
                log.info("each batch is scored by the forward pass that learns it")
        learner = self.learner if by_training else None
        return Progressive(scorer, endless=goal.online, learner=learner)

    def _callbacks(self, goal: Goal, callbacks: list[Any], *, progress: bool) -> Callbacks:
        """Return the callbacks of a run: those given, validation where there are data for it."""
        validates = any(isinstance(callback, Validate) for callback in callbacks)
        if goal.valid is not None:
            check_batches("valid", goal.valid)
            if getattr(goal.valid, "num_batches", None) == 0:
                raise DataError(
                    "valid: no row to evaluate, got empty data. Give data with rows, or None."
                )
            if not validates:
                callbacks = [Validate(), *callbacks]
                validates = True
        if validates:
            self._check_measurable("valid")
        datasets = [callback.data for callback in callbacks if isinstance(callback, Validate)]
        for data in (goal.valid, *datasets):
            _read_segments(data, Callbacks(callbacks))
            check_validation(goal.dataset, data)
        if progress and speaks():
            callbacks = [*callbacks, ProgressBar()]
        return Callbacks(callbacks)

    def _divide(self, data: Iterable[Any]) -> None:
        """Let a Dataset that is learned next be read by the grains of this model."""
        if isinstance(data, Dataset):
            data.divide(self.grains)

    def _begin(self, goal: Goal, callbacks: Callbacks, observer: Progressive | None) -> Run:
        """Return a run that has not begun."""
        schema = getattr(goal.dataset, "schema", None)
        shard = self.learner.shard
        check_rows_in_order(self.histories, goal)
        self._learn_schema(schema, getattr(goal.dataset, "encoder", None))
        self.learner.begin()
        shard.check_equal(
            lambda: {**settings_of_run(goal, callbacks, observer), **self._measured()}
        )
        log_frozen_lookups(self.network)
        # clocks and signals may stop a stream on one rank
        agrees = shard.size > 1 and (goal.online or shard.any(callbacks.has_own))
        if observer is not None:
            _read_segments(goal.dataset, callbacks)
        grains = own_grains(goal, callbacks, observer, self.learner)
        goal = replace(goal, agrees=agrees, own=grains)
        run = Run(self, goal, callbacks, observer, clock=WallClock(shard=shard))
        run.counts.epoch = goal.first_epoch
        return run

    def _measured(self) -> dict[str, Any]:
        """Return what an evaluation computes, as ranks compare it."""
        return {"metrics": compared(self.metrics), "eval_network": compared(self.eval_network)}

    def _compare_ranks(self) -> None:
        """Raise ConfigError, on every rank, if they would evaluate other models."""
        self.learner.shard.check_equal(lambda: {**self.learner.settings, **self._measured()})

    def _learn_schema(self, schema: Any, encoder: Any) -> None:
        """Take over the schema of the data that are learned next, if they have one.

        `encoder` collects the types of their raw columns while they are read.
        """
        if encoder is not None and encoder is self.encoder:
            return
        check_keeps(self.histories, schema)
        self.schema = typed(schema or self.schema, self.schema, self.encoder)
        self.encoder = encoder

    @property
    def _is_measurable(self) -> bool:
        """Whether evaluation has anything to compute; a network that updates itself may not."""
        has_loss = self._criterion is not None or isinstance(self.eval_network, Parted)
        return bool(self.metrics) or has_loss

    def _check_measurable(self, where: str) -> None:
        """Raise ConfigError where evaluation would have nothing to compute."""
        if not self._is_measurable:
            raise ConfigError(
                f"{where}: nothing to compute, got a model with neither metrics nor loss_fn. Give "
                "RecModel loss_fn, or eval_network with metrics; a network that returns its loss "
                "cannot be evaluated."
            )

    def _observe(self, data: Iterable[Any], observer: Any, callbacks: Any) -> int:
        """One pass over `data` that learns nothing; returns the number of its batches."""
        check_not_moved(self.learner)
        check_batches("data", data)
        check_ends(data)
        if self.tables and not self.counters["steps"] and not self._has_rows():
            log.warning("the model has learned nothing yet, its tables are empty; train it first")
        if self.schema is None:  # rows may come from elsewhere, and an export needs a schema
            self._learn_schema(getattr(data, "schema", None), getattr(data, "encoder", None))
        if isinstance(data, Dataset):
            data = data.undivided()  # metrics and predictions are in the order of the rows
        run = Run(self, Goal(data), Callbacks(listed(callbacks)), observer)
        _read_segments(data, run.callbacks)
        parts = part_scores(run)
        # always the same epoch, so that two evaluations of shuffled data give the same bits
        number = getattr(data, "resumed_epoch", None) or 0
        with in_eval_mode(self.network, self.eval_network), epoch_of(data, number) as batches:
            pass_over(batches, run, parts=parts)
        return run.step

    def _has_rows(self) -> bool:
        """Return whether a table has a row, here or on another rank."""
        here = {name: {"rows": len(table)} for name, table in self.tables.items()}
        (rows,) = self.learner.summed([here])
        return any(counters["rows"] for counters in rows.values())


class Evaluation:
    """Metrics of batches that are added one by one, each scored by the model as it is then.

    This is for a loop of your own, beside `RecModel.step`. Over all batches of a pass it gives the
    bits of `RecModel.evaluate`.

    Example:
        >>> evaluation = hb.Evaluation(model)
        >>> for batch in valid:
        ...     evaluation.add(batch)
        >>> evaluation.results()["auc"]
    """

    @at("evaluate")
    def __init__(self, model: RecModel) -> None:
        model._check_measurable("evaluation")
        model._compare_ranks()
        self._model = model
        self._scorer = model._scorer()

    @at("evaluate")
    def add(self, batch: Any) -> None:
        """Score a batch, a `Batch` of a Dataset or a tuple as in `evaluate`; learn nothing."""
        self._model._observe([batch], self._scorer, ())

    def results(self) -> dict[str, float]:
        """Return the metrics by name, and the mean loss, of the batches so far; {} of none."""
        return self._scorer.results()


def _no_rate(name: str, rate: Any) -> ConfigError:
    return ConfigError(
        f"{name}: the model has no optimizer that has this rate, got {rate!r}. Give RecModel an "
        "optimizer, or a network with tables."
    )


def set_seed(seed: int) -> None:
    """Seed torch's generators; initial rows and shuffles have their own: `Table(seed=…)`,
    `Dataset(seed=…)`.
    """
    torch.manual_seed(seed)


def _read_segments(data: Any, callbacks: Callbacks) -> None:
    """Let a Dataset read the columns by which callbacks divide figures."""
    if isinstance(data, Dataset):
        data.encoder.read_segments(callbacks.segments)
