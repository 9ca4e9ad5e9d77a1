# SPDX-License-Identifier: Apache-2.0
"""Job: a training run as one value, in Python or as a YAML or JSON file of the same keys.

    job = Job.read("job.yaml", {"tables.rule.lr": 0.1})
    job.to_json()                                    # plain values; Job.from_json is the inverse

Paths in a job are relative to the working directory, as everywhere in Python.
"""

from __future__ import annotations

import functools
import importlib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hotbed import checks, config, plugins
from hotbed.connectors import Slice, Source
from hotbed.data.grains import LEAST_SAMPLES, MOST_GRAINS, grains_for
from hotbed.data.schema import Schema
from hotbed.data.schema_changes import change_of
from hotbed.embedding.policy import PARTITIONS
from hotbed.embedding.rule import Adam, Rule
from hotbed.errors import ConfigError
from hotbed.files import Where
from hotbed.job.file import read_values
from hotbed.job.tables import Tables

#: A kind and its keywords, or the bare kind; built only when the job runs, since it needs torch.
Spec = Mapping[str, Any] | str

if TYPE_CHECKING:
    from hotbed.data.dataset import Dataset
    from hotbed.training.model import RecModel


@dataclass(frozen=True)
class Fit:
    """How to go through the data.

    Args:
        epochs: passes over `train`.
        batch_size: rows of a batch.
        stream_batch_size: rows of a batch of `stream`; None = `batch_size`.
        shuffle: rows in the shuffle buffer of `train`; 0 = keep the order of the source.
        on_error: `"skip"` leaves out bad rows, which are counted.
        torch_threads: threads of the dense network; None = torch's choice, with several grains 1.
            Small networks are fastest with 1.
        amp_level: as in `RecModel`.
        compile: mode of torch.compile for the training step; None = it is not compiled.
        device: where the dense part computes, such as "cuda" or "cuda:1", as in `RecModel`; None =
            the CPU. Rows of tables stay where they are.
        flush_seconds: of an endless `stream`, as in `Dataset`.
        max_ahead_seconds: as in `Dataset`.
    """

    epochs: int = 1
    batch_size: int = 1024
    stream_batch_size: int | None = None
    shuffle: int = 0
    on_error: Literal["raise", "skip"] = "raise"
    torch_threads: int | None = None
    amp_level: Literal["O0", "O1", "O2", "O3", "auto"] = "O0"
    compile: (
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    ) = None
    device: str | None = None
    flush_seconds: float | None = None
    max_ahead_seconds: float | None = None

    def __post_init__(self) -> None:
        least_values = {
            "epochs": 1,
            "batch_size": 1,
            "stream_batch_size": 1,
            "shuffle": 0,
            "torch_threads": 1,
        }
        for name, least in least_values.items():
            checks.at_least(name, getattr(self, name), least)


@dataclass(frozen=True)
class WarmStart:
    """Rows that a job begins with: those of another job's checkpoint.

    Args:
        path: where the checkpoint is.
        rename: as in `RecModel.warm_start`.
        optimizer_state: as in `RecModel.warm_start`.
    """

    path: str
    rename: Mapping[str, str] | list[tuple[str, str]] = field(default_factory=dict)
    optimizer_state: bool = False


@dataclass(frozen=True)
class PreparedSchema:
    """The schema of the rows that `hotbed prepare` wrote.

    Args:
        prepared: the output folder of the preparation.
        rows: `"raw"`: the fitted schema over raw rows instead, such as those of a stream.
    """

    prepared: str
    rows: Literal["prepared", "raw"] = "prepared"


@dataclass(frozen=True)
class Job:
    """One training run: data, model, tables, optimizers, how to train, where results go.

    A job needs `train` or `stream`. `train` is learned first; `stream` comes last, in the order of
    its source, and each batch is predicted before it is learned.

    Args:
        schema: the columns and their roles; or where the preparation is that fitted them.
        model: a kind of `hb.models`, and its keywords.
        train: source that is learned for `fit.epochs`.
        valid: source that is only evaluated.
        stream: source that is followed; it may be endless.
        predict: source that `hotbed predict` scores; None = `valid`.
        tables: keywords of the embedding tables.
        warm_start: rows to begin with.
        optimizer: a rule, for the dense parameters; rows have `tables.rule`.
        loss: a kind of `hb.losses`.
        base_rate: the share of positives that the model predicts at first, as in
            `hb.models.set_base_rate`; of several labels, by label. None: one half.
        metrics: kinds of `hb.metrics`; for several labels a mapping of label to such a list.
        callbacks: kinds of `hb.callbacks`, for `train`.
        stream_callbacks: kinds of `hb.callbacks`, for `stream`.
        baselines: whether simple models learn beside the model, and reports compare it with them:
            the callback `Baselines`, which may stand among the callbacks with keywords instead.
            None: in one process they do.
        checkpoint: keywords of the stream's `Checkpoint`; its folder is `checkpoint` in `output`.
        fit: how to go through the data.
        grains: runs of samples that each batch is computed in, as in `RecModel`. `"auto"`: the
            largest power of two up to 8 with at least 512 samples a grain. None: `"auto"` on
            several ranks, else 1.
        output: folder or URL of the model and the report.
        average: the share that a step keeps of moving averages of the dense parameters, as in
            `RecModel`; None: the weights themselves are evaluated, saved and published.
        seed: of initial rows, dense parameters, shuffles and dropout.
        classes: digests of the sources of classes of other packages, by kind. The job.json of a run
            has them; with other sources the job is wrong.

    Raises:
        ConfigError: a key is wrong; the message starts with its dotted path.

    Example: `Job.read("job.yaml", {"fit.epochs": 2})`, `hotbed train job.yaml --set fit.epochs=2`.
    """

    schema: Schema | PreparedSchema
    model: Spec
    train: Source | None = None
    valid: Source | None = None
    stream: Source | None = None
    predict: Source | None = None
    tables: Tables = field(default_factory=Tables)
    warm_start: WarmStart | None = None
    optimizer: Rule = field(default_factory=lambda: Adam(lr=1e-3))
    loss: Spec = "bce"
    base_rate: float | Mapping[str, float] | None = None
    metrics: Sequence[Spec] | Mapping[str, Sequence[Spec]] = ("auc", "log_loss")
    callbacks: Sequence[Spec] = ()
    stream_callbacks: Sequence[Spec] = ()
    baselines: bool | None = None
    checkpoint: Mapping[str, Any] = field(default_factory=lambda: {"every_seconds": 60.0})
    fit: Fit = field(default_factory=Fit)
    grains: int | Literal["auto"] | None = None
    average: float | None = None
    output: str = "runs/job"
    seed: int = 0
    classes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.train is None and self.stream is None:
            raise ConfigError(
                "train: missing key, got a job without train and stream. Add one of them."
            )
        for name in ("train", "valid", "predict"):
            source = getattr(self, name)
            if source is not None and source.endless:
                raise ConfigError(
                    f"{name}: it never ends, got {source}. Give an endless source as `stream`."
                )
        if self.grains is not None and self.grains != "auto":
            advice = "Grains are joined by halves: give such as 8, or auto."
            checks.power_of_two("grains", self.grains, advice)
        self._share_sources()

    def _check_kinds(self) -> None:
        """Raise ConfigError for a kind of model, loss, metric or callback that does not exist.

        Classes of other packages are imported; one whose source is not that in `classes` is wrong.
        """
        self._metrics()
        try:
            from hotbed.models.losses import Loss, MultiTask
            from hotbed.training.run import Callback
        except ImportError:  # jobs are read without torch, too
            return
        config.check_kind(self.model, [_network()], "job.model")
        config.check_kind(self.loss, [Loss, MultiTask], "job.loss")
        for name in ("callbacks", "stream_callbacks"):
            for number, spec in enumerate(getattr(self, name)):
                config.check_kind(spec, [Callback], f"job.{name}.{number}")
        now = self.with_classes().classes if self.classes else {}
        for kind, digest in self.classes.items():
            if now.get(kind, digest) != digest:
                raise ConfigError(
                    f"job.classes: the source of {kind} was {digest}, got {now[kind]}. Put it back "
                    "as it was, or take the key `classes` out."
                )

    def with_classes(self) -> Job:
        """Return the job with the digests of the sources of its own classes."""
        specs = [self.model, self.loss, *self.callbacks, *self.stream_callbacks]
        metrics = self.metrics.values() if isinstance(self.metrics, Mapping) else [self.metrics]
        for several in metrics:
            specs += several
        named = [
            {"kind": spec.partition("@")[0]} if isinstance(spec, str) else spec for spec in specs
        ]
        return replace(self, classes=plugins.digests([*named, self.to_json()]))

    def _share_sources(self) -> None:
        """Let slices of equal sources share one: it is sorted and held in memory once."""
        shared: list[Source] = []
        for name in ("train", "valid", "stream", "predict"):
            part = getattr(self, name)
            if not isinstance(part, Slice):
                continue
            if part.source in shared:
                equal = shared[shared.index(part.source)]
                object.__setattr__(self, name, replace(part, source=equal))
            else:
                shared.append(part.source)

    @staticmethod
    def read(path: str | Path, assignments: Mapping[str, object] | None = None) -> Job:
        """Return the job of a YAML or JSON file, with `assignments` of values to dotted paths."""
        return read_values(path, assignments or {}, Job.from_json)

    @staticmethod
    def from_json(spec: Mapping[str, Any]) -> Job:
        """Return the job of plain values.

        Raises:
            ConfigError: a key is wrong; the message starts with its dotted path.
        """
        job = typing.cast(Job, config.build(spec, Job, "job"))
        job._check_kinds()
        return job

    def to_json(self) -> dict[str, Any]:
        """Return plain values without defaults; `Job.from_json(job.to_json()) == job`."""
        plain: dict[str, Any] = config.describe(self)
        del plain["kind"]
        for name in ("schema", "tables", "fit", "warm_start"):
            plain.get(name, {}).pop("kind", None)  # only one class fits there
        return plain

    def dataset(self, source: Source, schema: Schema, *, batch_size: int | None = None) -> Dataset:
        """Return the batches of one of the job's sources; only `train` is shuffled."""
        from hotbed.data.dataset import Dataset

        fit = self.fit
        return Dataset(
            source,
            schema,
            batch_size or fit.batch_size,
            shuffle=fit.shuffle if source is self.train else 0,
            seed=self.seed,
            on_error=fit.on_error,
            flush_seconds=fit.flush_seconds if source.endless else None,
            max_ahead_seconds=fit.max_ahead_seconds,
        )

    def fitted(self) -> Schema:
        """Return the schema after its transforms learned from `train`, if there is one."""
        if self.train is None:
            return self.declared
        return self.declared.fit(self.train)

    @functools.cached_property
    def declared(self) -> Schema:
        """The columns and their roles; those of a preparation are read from its folder."""
        if isinstance(self.schema, PreparedSchema):
            return Schema.of_prepared(self.schema.prepared, self.schema.rows)
        return self.schema

    def schema_of(self, states: Where) -> Schema:
        """Return the fitted schema that a stream's states were learned with.

        Its fitted maps are those of the job, where the job has them: a preparation may be moved.

        Raises:
            ConfigError: the job has other columns now, or they mean something else.
        """
        from hotbed.persist.container.format import open_checkpoint

        schema = Schema.from_json(open_checkpoint(states).manifest.schema or {})
        before = [(type(column), column.name) for column in schema.columns]
        now = [(type(column), column.name) for column in self.declared.columns]
        if before != now:
            raise ConfigError(
                f"schema: its columns are not those that {states} was learned with, got "
                f"{[name for _, name in now]} after {[name for _, name in before]}. Give the job "
                "another output."
            )
        change = change_of(schema, self.declared)
        if change is not None:
            raise ConfigError(
                f"job.schema.{change.key}: {states} was learned with {change.before!r}, got "
                f"{change.now!r}. Give what it was learned with, or give the job another output."
            )
        of_requests = self.declared.raw or self.declared
        return schema.with_maps({fitted.digest: fitted.path for fitted in of_requests.maps})

    def rec_model(self, schema: Schema) -> RecModel:
        """Return the job's model, untrained; `schema` is fitted.

        The dense parameters depend on `seed` only.
        """
        from hotbed.models.base_rate import set_base_rate
        from hotbed.models.losses import Loss, MultiTask
        from hotbed.optim.precision import Compile
        from hotbed.parallel.world import trains_together, world_size
        from hotbed.training.devices import find_device
        from hotbed.training.model import RecModel, set_seed

        device = None
        if self.fit.device is not None:
            device = find_device("job.fit.device", self.fit.device)
        grains = self.num_grains(world_size() if trains_together() else 1)
        torch_threads = self.fit.torch_threads
        if torch_threads is None and grains > 1:
            torch_threads = 1  # bits by grains depend on them, so they must not on the machine
        if torch_threads is not None:
            importlib.import_module("torch").set_num_threads(torch_threads)
        set_seed(self.seed)
        arguments = {"schema": schema, "tables": self.tables.make(schema, self.seed)}
        network = config.build(self.model, _network(), "job.model", arguments)
        if self.base_rate is not None:
            set_base_rate(network, self.base_rate)
        loss = config.build(self.loss, Loss | MultiTask, "job.loss")
        return RecModel(
            network,
            loss,
            self.optimizer,
            self._metrics(),
            amp_level=self.fit.amp_level,
            compile=None if self.fit.compile is None else Compile(self.fit.compile),
            grains=grains,
            average=self.average,
            device=device,
        )

    def num_grains(self, ranks: int) -> int:
        """Return the number of grains if `ranks` processes train the job.

        Raises:
            ConfigError: there are fewer grains than ranks, or more ranks than a table can lie on.
        """
        if ranks > PARTITIONS:
            raise ConfigError(
                f"--ranks: the rows of a table lie on at most {PARTITIONS} ranks, got {ranks}. "
                "Start fewer."
            )
        if isinstance(self.grains, int):
            if self.grains < ranks:
                raise ConfigError(
                    f"job.grains: each rank computes at least one, got {self.grains} grains and "
                    f"{ranks} ranks. Give grains: {_power_of_two(ranks)}, or start at most "
                    f"{self.grains} ranks."
                )
            return self.grains
        if self.grains is None and ranks == 1:
            return 1
        sizes = [self.fit.batch_size] if self.train is not None else []
        if self.stream is not None:
            sizes.append(self.fit.stream_batch_size or self.fit.batch_size)
        grains = grains_for(min(sizes))
        if grains < ranks:
            raise _too_few(grains, ranks, self.fit.batch_size)
        return grains

    def make_callbacks(self, *, stream: bool = False) -> list[Any]:
        """Return new callbacks for `train`; or for `stream`, with its `Checkpoint`."""
        from hotbed.training.callbacks import Checkpoint
        from hotbed.training.run import Callback

        name = "stream_callbacks" if stream else "callbacks"
        callbacks = []
        for number, spec in enumerate(getattr(self, name)):
            callbacks.append(config.build(spec, Callback, f"job.{name}.{number}"))
        callbacks += self._default_baselines(callbacks)
        if stream:
            arguments = {"path": self.state_path}
            callbacks.append(config.build(self.checkpoint, Checkpoint, "job.checkpoint", arguments))
        return callbacks

    def _default_baselines(self, callbacks: Sequence[Any]) -> list[Any]:
        """Return the callback `Baselines` where the job wants it and has none with keywords."""
        from hotbed.parallel.world import trains_together
        from hotbed.training.watching.baselines import Baselines

        is_wanted = self.baselines
        if is_wanted is None:
            is_wanted = not trains_together()
        has_one = any(isinstance(callback, Baselines) for callback in callbacks)
        return [Baselines()] if is_wanted and not has_one else []

    @property
    def state_path(self) -> str:
        """The folder or URL of the stream's states."""
        return self.output_path("checkpoint")

    def output_path(self, name: str) -> str:
        """Return the path or URL of a file or folder of the output."""
        return f"{self.output.rstrip('/')}/{name}"

    def _metrics(self) -> dict[str, Any]:
        if not isinstance(self.metrics, Mapping):
            return _metrics_of(self.metrics, "job.metrics")
        metrics: dict[str, Any] = {}
        for label, specs in self.metrics.items():
            metrics[label] = _metrics_of(specs, f"job.metrics.{label}")
        return metrics


def _power_of_two(number: int) -> int:
    """Return the first power of two that is not below a number."""
    return 1 << (number - 1).bit_length()


def _too_few(grains: int, ranks: int, batch_size: int) -> ConfigError:
    needed = _power_of_two(ranks)
    advice = f"Give grains: {needed}"
    if needed <= MOST_GRAINS:
        advice = f"Give fit.batch_size: {needed * LEAST_SAMPLES} or more, or grains: {needed}"
    several = "one process" if grains == 1 else f"at most {grains} ranks"
    return ConfigError(
        f"job.grains: auto makes at most {MOST_GRAINS} grains of at least {LEAST_SAMPLES} samples, "
        f"and each rank needs one, got batches of {batch_size} samples and {ranks} ranks. "
        f"{advice}; or start {several}."
    )


def _metrics_of(specs: Sequence[Spec], path: str) -> dict[str, Any]:
    """Return metrics by kind; the second one of a kind has its number in its name."""
    from hotbed.metrics import get_metric

    metrics: dict[str, Any] = {}
    for number, spec in enumerate(specs):
        metric = get_metric(spec, f"{path}.{number}")
        name = spec.get("kind") if isinstance(spec, Mapping) else spec
        if not isinstance(name, str) or ":" in name:
            _, separator, group = str(name).partition("@")
            name = f"{config.kind_of(type(metric))}{separator}{group}"
        if name in metrics:
            name = f"{name}.{number}"
        metrics[name] = metric
    return metrics


def _network() -> type:
    """Return the base of all networks; jobs are read without torch, too."""
    network: type = importlib.import_module("torch.nn").Module
    return network
