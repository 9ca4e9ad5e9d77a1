# SPDX-License-Identifier: Apache-2.0
"""Job: everything a training run is, as one value; in Python, or as a YAML or JSON file of the same
keys.

    job = Job.read("job.yaml", {"tables.rule.lr": 0.1})
    job.to_json()                                    # plain values; Job.from_json is the inverse

Paths in a job are relative to the working directory, as everywhere in Python.
"""

from __future__ import annotations

import functools
import importlib
import operator
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hotbed import checks, config
from hotbed.connectors import Slice, Source
from hotbed.data.schema import Schema
from hotbed.embedding.init import Init, Uniform
from hotbed.embedding.policy import Admission, Eviction
from hotbed.embedding.rule import Adagrad, Adam, Rule
from hotbed.embedding.tier import Ram, Tier
from hotbed.errors import ConfigError
from hotbed.job.file import override, read_mapping

#: A kind and its keywords, or the bare kind; built only when the job runs, since it needs torch.
Spec = Mapping[str, Any] | str

if TYPE_CHECKING:
    from hotbed.data.dataset import Dataset
    from hotbed.embedding.table import Table
    from hotbed.training.model import RecModel


@dataclass(frozen=True)
class Tables:
    """Keywords of the embedding tables; `overrides` gives a table (by name) its own: `{"user":
    {"dim": 8}}`.
    """

    dim: int = 16
    rule: Rule = field(default_factory=lambda: Adagrad(lr=0.05))
    admit: Admission | None = None
    evict: Eviction | list[Eviction] | None = None
    tier: Tier = field(default_factory=Ram)
    init: Init = field(default_factory=lambda: Uniform(0.05))
    default: float = 0.0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {name: p for name, p in config.parameters(Tables).items() if name != "overrides"}
        built: dict[str, dict[str, Any]] = {}
        for table, keys in self.overrides.items():
            built[table] = {}
            for key, value in keys.items():
                path = f"overrides.{table}.{key}"
                if key not in known:
                    raise ConfigError(
                        f"{path}: unknown key, got {value!r}. {config.did_you_mean(key, known)}"
                    )
                built[table][key] = config.build(value, known[key].annotation, path)
        object.__setattr__(self, "overrides", built)

    def make(self, schema: Schema, seed: int) -> dict[str, Table]:
        """One table for each table name of the schema."""
        from hotbed.embedding.tables import make_tables

        return make_tables(
            schema,
            self.dim,
            rule=self.rule,
            admit=self.admit,
            evict=self.evict,
            tier=self.tier,
            init=self.init,
            default=self.default,
            seed=seed,
            dtype=self.dtype,
            overrides=self.overrides,
        )


@dataclass(frozen=True)
class Fit:
    """How to go through the data.

    `shuffle`: rows in the shuffle buffer of `train`, 0 = keep the order of the source.
    `stream_batch_size`: of `stream`, None = `batch_size`. `torch_threads`: of the dense network,
    None = torch's choice; small networks are fastest with 1. `amp_level`, `boost_level`: as in
    `RecModel`. `flush_seconds`, `max_ahead_seconds`: of an endless `stream`, as in `Dataset`.
    """

    epochs: int = 1
    batch_size: int = 1024
    stream_batch_size: int | None = None
    shuffle: int = 0
    on_error: Literal["raise", "skip"] = "raise"
    torch_threads: int | None = None
    amp_level: Literal["O0", "O1", "O2", "O3", "auto"] = "O0"
    boost_level: Literal["O0", "O1", "O2"] = "O0"
    flush_seconds: float | None = None
    max_ahead_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("epochs", 1),
            ("batch_size", 1),
            ("stream_batch_size", 1),
            ("shuffle", 0),
            ("torch_threads", 1),
        ):
            checks.at_least(name, getattr(self, name), least)


@dataclass(frozen=True)
class WarmStart:
    """Rows that a job begins with: those of another job's checkpoint at `path`. `rename`,
    `optimizer_state`: as in `RecModel.warm_start`.
    """

    path: str
    rename: Mapping[str, str] | list[tuple[str, str]] = field(default_factory=dict)
    optimizer_state: bool = False


@dataclass(frozen=True)
class Job:
    """One training run: data, model, tables, optimizers, how to train, where results go.

    A job needs `train` or `stream`. `train` is learned first, for `fit.epochs`; `valid` is only
    evaluated; `stream`, which may be endless, comes last, in the order of the source, each batch
    predicted before it is learned; `predict` is what `hotbed predict` scores (default: `valid`).
    `model`: a kind of `hb.models` and its keywords. `optimizer`: a rule, for the dense parameters;
    rows have `tables.rule`. `loss`, `metrics`, `callbacks`: kinds of `hb.losses`, `hb.metrics`,
    `hb.callbacks`; for several labels `metrics` may be a mapping of label to list.
    `stream_callbacks` are those of the stream, `checkpoint` the keywords of its `Checkpoint`, whose
    folder is `checkpoint` in `output`. `warm_start`: where rows come from before anything is
    learned. `output`: folder of the model and the report. Raises ConfigError with the dotted path
    of what is wrong.

    Example: `Job.read("job.yaml", {"fit.epochs": 2})`, `hotbed train job.yaml --set fit.epochs=2`.
    """

    schema: Schema
    model: Spec
    train: Source | None = None
    valid: Source | None = None
    stream: Source | None = None
    predict: Source | None = None
    tables: Tables = field(default_factory=Tables)
    warm_start: WarmStart | None = None
    optimizer: Rule = field(default_factory=lambda: Adam(lr=1e-3))
    loss: Spec = "bce"
    metrics: Sequence[Spec] | Mapping[str, Sequence[Spec]] = ("auc", "log_loss")
    callbacks: Sequence[Spec] = ()
    stream_callbacks: Sequence[Spec] = ()
    checkpoint: Mapping[str, Any] = field(default_factory=lambda: {"every_seconds": 60.0})
    fit: Fit = field(default_factory=Fit)
    output: str = "runs/job"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.train is None and self.stream is None:
            raise ConfigError(
                "train: missing key — received a job without train and stream — add one of them"
            )
        for name in ("train", "valid", "predict"):
            if getattr(getattr(self, name), "endless", False):
                raise ConfigError(
                    f"{name}: it never ends — received {getattr(self, name)} — an endless source "
                    "is a `stream`"
                )
        # slices of equal sources share one, so that it is sorted and held in memory once
        whole: list[Source] = []
        for name in ("train", "valid", "stream", "predict"):
            part = getattr(self, name)
            if isinstance(part, Slice):
                source = next((one for one in whole if one == part.source), part.source)
                object.__setattr__(self, name, replace(part, source=source))
                whole.append(source)

    @staticmethod
    def read(path: str | Path, assignments: Mapping[str, object] | None = None) -> Job:
        """A job from a YAML or JSON file, after `assignments` of values to dotted paths."""
        return Job.from_json(override(read_mapping(path), assignments or {}))

    @staticmethod
    def from_json(spec: Mapping[str, Any]) -> Job:
        """A job from plain values; raises ConfigError that starts with the dotted path of the wrong
        key.
        """
        return typing.cast(Job, config.build(spec, Job, "job"))

    def to_json(self) -> dict[str, Any]:
        """Plain values, defaults left out; `Job.from_json(job.to_json()) == job`."""
        plain: dict[str, Any] = config.describe(self)
        for part in (
            plain,
            *(plain.get(name, {}) for name in ("schema", "tables", "fit", "warm_start")),
        ):
            part.pop("kind", None)  # only one class fits there
        return plain

    def dataset(self, source: Source, schema: Schema, *, batch_size: int | None = None) -> Dataset:
        """The batches of one of the job's sources; only `train` is shuffled."""
        from hotbed.data.dataset import Dataset

        fit = self.fit
        shuffle = self.fit.shuffle if source is self.train else 0
        size = batch_size or fit.batch_size
        live = source.endless
        return Dataset(
            source,
            schema,
            size,
            shuffle=shuffle,
            seed=self.seed,
            on_error=fit.on_error,
            flush_seconds=fit.flush_seconds if live else None,
            max_ahead_seconds=fit.max_ahead_seconds if live else None,
        )

    def fitted(self) -> Schema:
        """The schema after its transforms learned from `train`; as it is in a job without."""
        return self.schema if self.train is None else self.schema.fit(self.train)

    def schema_of(self, states: str) -> Schema:
        """The fitted schema that a stream's states were learned with; ConfigError where the job has
        other columns now.
        """
        from hotbed.persist.format import open_checkpoint

        schema = Schema.from_json(open_checkpoint(states).manifest["schema"])
        before, now = (
            [(type(one), one.name) for one in columns]
            for columns in (schema.columns, self.schema.columns)
        )
        if before != now:
            raise ConfigError(
                f"schema: its columns are not those that {states} was learned with — received "
                f"{[name for _, name in now]} after {[name for _, name in before]} — give another "
                "output"
            )
        return schema

    def rec_model(self, schema: Schema) -> RecModel:
        """The job's model, untrained, over a schema that is fitted. Its dense parameters are a
        function of `seed`.
        """
        from hotbed.models.losses import Loss, MultiTask
        from hotbed.training.model import RecModel, set_seed

        if self.fit.torch_threads is not None:
            importlib.import_module("torch").set_num_threads(self.fit.torch_threads)
        set_seed(self.seed)
        given = {"schema": schema, "tables": self.tables.make(schema, self.seed)}
        network = _one_of(self.model, config.public_kinds("hotbed.models"), "job.model", given)
        loss = config.build(self.loss, Loss | MultiTask, "job.loss")
        return RecModel(
            network,
            loss,
            self.optimizer,
            self._metrics(),
            amp_level=self.fit.amp_level,
            boost_level=self.fit.boost_level,
        )

    def make_callbacks(self, *, stream: bool = False) -> list[Any]:
        """Fresh callbacks for `train`; or for `stream`, with its `Checkpoint`."""
        key = "stream_callbacks" if stream else "callbacks"
        kinds = config.public_kinds("hotbed.training.callbacks")
        made = [_one_of(spec, kinds, f"job.{key}.{i}") for i, spec in enumerate(getattr(self, key))]
        if stream:
            given = {"path": self.state_path}
            made.append(config.build(self.checkpoint, kinds["checkpoint"], "job.checkpoint", given))
        return made

    @property
    def state_path(self) -> str:
        """Where the states of the stream are."""
        return self.output_path("checkpoint")

    def output_path(self, name: str) -> str:
        """Where a file or folder of the output is, a path or a URL."""
        return f"{self.output.rstrip('/')}/{name}"

    def _metrics(self) -> Any:
        from hotbed.metrics import get_metric

        def built(specs: Sequence[Any], path: str) -> dict[str, Any]:
            metrics: dict[str, Any] = {}
            for number, spec in enumerate(specs):
                metric = get_metric(spec, f"{path}.{number}")
                kind = spec.get("kind") if isinstance(spec, Mapping) else spec
                name = kind if isinstance(kind, str) else config.kind_of(type(metric))
                metrics[name if name not in metrics else f"{name}.{number}"] = metric
            return metrics

        if isinstance(self.metrics, Mapping):
            return {
                label: built(specs, f"job.metrics.{label}") for label, specs in self.metrics.items()
            }
        return built(self.metrics, "job.metrics")


def _one_of(
    spec: Spec, kinds: Mapping[str, type], path: str, given: Mapping[str, object] | None = None
) -> Any:
    return config.build(spec, functools.reduce(operator.or_, kinds.values()), path, given)
