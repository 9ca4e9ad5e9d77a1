# SPDX-License-Identifier: Apache-2.0
"""Automatic graph modification: step 8 where ids are computed inside the model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.automatic import Automatic, IdReader, time_of
from hotbed.compat.mx_rec.checks import boolean
from hotbed.compat.mx_rec.core.asc.manager import start_asc_pipeline
from hotbed.compat.mx_rec.errors import CallError
from hotbed.compat.mx_rec.feature_spec import Thresholds
from hotbed.compat.mx_rec.framework import Framework, TracedLookup
from hotbed.compat.mx_rec.no_effect import ARGUMENTS
from hotbed.compat.mx_rec.pipeline import as_tensors
from hotbed.compat.mx_rec.tables import agreed, make_pipeline, make_tables, owners_of
from hotbed.config import did_you_mean
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError
from hotbed.optim.modes import in_train_mode
from hotbed.optim.sparse import dense_parameters
from hotbed.parallel import at
from hotbed.training.auto import Findings, Report
from hotbed.training.auto.foreseen import IdFeatures, LookupEntry, lookup_report
from hotbed.training.step.network import obstacle_of

__all__ = ["GraphModifierHook", "modify_graph_and_start_emb_cache"]

log = logging.getLogger("hotbed.compat.mx_rec")

WHERE = "modify_graph_and_start_emb_cache"
MOST_LOOKUPS = 128
"""Lookups of one table in a forward pass."""
KEYS = ("access_threshold", "eviction_threshold", "faae_coefficient")
"""Of `access_and_evict_config`."""


@at("modify_graph_and_start_emb_cache")
def modify_graph_and_start_emb_cache(
    model: nn.Module,
    train: Iterable[Any],
    evaluation: Iterable[Any] | None = None,
    *,
    arguments: Callable[[Any], Any] | None = None,
    times: Callable[[Any], Any] | None = None,
    full_graph: Any = None,
    dump_graph: bool = False,
) -> Report[LookupEntry]:
    """Make the tables, and compute the ids of a model before its forward pass: step 8.

    The model is traced with the first batch of `train`. Then ids are computed and mapped to rows
    while earlier batches train. Iterate over `get_initializer(True)()` and
    `get_initializer(False)()`, and call the model with each batch.

    Args:
        model: looks up ids with `sparse_lookup(table, ids, modify_graph=True)`.
        train: yields the batches of training.
        evaluation: yields those of evaluation; None = never.
        arguments: of the model for a batch. None = the batch, its columns by name, or the first
            items of a tuple.
        times: returns the seconds of a batch; None = its Time column, or what
            `add_to_collection(ASCEND_TIMESTAMP, ...)` got.
        full_graph: has no effect.
        dump_graph: has no effect; `report.picture(path)` draws the model.

    Raises:
        CallError: the model looks up nothing, or tables or optimizers are missing.
        ConfigError: the model cannot be traced, a lookup depends on a condition on data, or lookups
            of a table differ. Nothing is started.
    """
    owner = framework.current()
    owner.check_not_started(WHERE)
    _check_inputs(model, train)
    owners = owners_of(owner)
    ARGUMENTS.log_no_effect("modify_graph.full_graph", when=full_graph is not None)
    ARGUMENTS.log_no_effect("modify_graph.dump_graph", when=dump_graph)
    times = times or owner.times
    data = Begun(train)
    first = as_tensors(data.first)
    findings, features, lookups = _trace(owner, model, first, arguments)
    thresholds = _thresholds(lookups)
    _check_times(thresholds, has_times=time_of(first, times) is not None)
    tables = make_tables(owner.tables, owners, thresholds, owner.shard.size)
    entries = [_entry(table, findings, features) for table in tables.values()]
    pipeline = make_pipeline(owner, owners, tables)
    reader = IdReader(features, entries, times)
    owner.automatic = Automatic(pipeline, model, reader, data, evaluation)
    owner.pipeline = pipeline
    return _report(model, entries, findings)


class GraphModifierHook:
    """Runs step 8 where a loop begins.

    Call `begin()` before the loop.

    Args:
        dump_graph: has no effect.
        modify_graph: whether ids are computed inside the model. False = step 8 of FeatureSpecs,
            where it has not run yet.
        options: with `modify_graph`, the arguments of `modify_graph_and_start_emb_cache`: `model`,
            `train`, and others.

    Example: `mx.GraphModifierHook(model=model, train=dataset).begin()`
    """

    def __init__(
        self, dump_graph: bool | str = False, modify_graph: bool | str = True, **options: Any
    ) -> None:
        dumps = boolean("GraphModifierHook: dump_graph", dump_graph)
        ARGUMENTS.log_no_effect("modify_graph.dump_graph", when=dumps)
        self.modify_graph = boolean("GraphModifierHook: modify_graph", modify_graph)
        self._options = options
        self._check_options()

    def begin(self) -> Report[LookupEntry] | None:
        """Run step 8, and return the report of automatic mode."""
        if self.modify_graph:
            return modify_graph_and_start_emb_cache(**self._options)
        if framework.current().pipeline is None:
            start_asc_pipeline()
        return None

    def _check_options(self) -> None:
        where = "GraphModifierHook"
        names = list(inspect.signature(modify_graph_and_start_emb_cache).parameters)
        for name in self._options:
            if name not in names:
                advice = did_you_mean(name, names)
                raise ConfigError(f"{where}: unknown keyword, got {name!r}. {advice}")
        missing = [name for name in ("model", "train") if name not in self._options]
        if self.modify_graph and missing:
            raise ConfigError(
                f"{where}: PyTorch has no default graph, so that the hook needs the model and the "
                f"data, got no {' and no '.join(missing)}. Give GraphModifierHook(model=..., "
                "train=...), or modify_graph=False."
            )
        if not self.modify_graph and self._options:
            raise ConfigError(
                f"{where}: modify_graph=False takes no model and no data, got "
                f"{', '.join(self._options)}. Leave them out, or give modify_graph=True."
            )


def _check_inputs(model: Any, train: Any) -> None:
    """Raise ConfigError unless there are a module and data."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{WHERE}.model: a torch module is needed, got {model!r}. Give the model whose forward "
            "pass calls sparse_lookup."
        )
    if not isinstance(train, Iterable):
        raise ConfigError(
            f"{WHERE}.train: batches to iterate over are needed, got {train!r}. Give the data of "
            "training."
        )


class Begun:
    """Data whose first batch was read for a trace; the first iteration yields it, too.

    Attributes:
        first: the first batch.

    Raises:
        ConfigError: the data are empty.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._batches: Iterator[Any] | None = iter(data)
        nothing = object()
        self.first = next(self._batches, nothing)
        if self.first is nothing:
            raise ConfigError(
                f"{WHERE}: train must yield a batch, which the model is traced with, got none. "
                "Give data that are not empty."
            )

    def resume(self, position: Any) -> None:
        """Let the next iteration begin after a position of the data."""
        self._data.resume(position)

    def __iter__(self) -> Iterator[Any]:
        batches = self._batches
        self._batches = None
        is_resumed = getattr(self._data, "resumed_epoch", None) is not None
        if batches is None or is_resumed:  # a saved state was restored after the trace
            yield from self._data
            return
        yield self.first
        yield from batches


def _trace(
    owner: Framework, model: nn.Module, first: Any, arguments: Callable[[Any], Any] | None
) -> tuple[Findings, IdFeatures, list[TracedLookup]]:
    """Return what a trace of the model shows; the tables do not exist yet."""
    call = None if arguments is None else _call_of(arguments)
    owner.traced = []
    lookups = owner.traced
    try:
        with in_train_mode(model):
            findings, features = IdFeatures.trace(model, owner.tables, first, call)
    finally:
        owner.traced = None
    name = type(model).__name__
    refused = [f"\n  {table}: {reason}" for table, reason in findings.refused.items()]
    if refused:
        raise ConfigError(
            f"{WHERE}: whether a batch is looked up must not depend on data, got:{''.join(refused)}"
            f"\nNothing was started. Look up always in {name}, and choose afterwards."
        )
    if findings.problem:
        raise ConfigError(
            f"{WHERE}: the code of {name} cannot be traced, got: {findings.problem} Nothing was "
            "started. Change the code that computes ids, give arguments=..., or use FeatureSpec."
        )
    if features is None:
        raise CallError(
            f"{WHERE}: the forward pass of {name} must look up a table, got none. Use "
            "sparse_lookup(table, ids, modify_graph=True) in it."
        )
    return findings, features, lookups


def _call_of(arguments: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = arguments(item)
        return values if isinstance(values, tuple) else (values,), {}

    return call


def _thresholds(lookups: Sequence[TracedLookup]) -> dict[str, Thresholds]:
    """Return the thresholds of each table.

    Raises:
        ConfigError: a value is wrong, or two lookups of a table differ.
    """
    thresholds = []
    for lookup in lookups:
        table = lookup.table
        where = f"sparse_lookup {table.name!r}"
        if not lookup.options["is_train"]:
            raise ConfigError(
                f"{where}: is_train=False is for evaluation, got it in the forward pass of "
                "training. Leave it out, or use is_grad=False to learn nothing."
            )
        config = lookup.options["access_and_evict_config"]
        thresholds.append((table.name, where, _configured(where, config)))
    return agreed(thresholds)


def _configured(where: str, config: Any) -> Thresholds:
    """Return the thresholds of an `access_and_evict_config`."""
    if config is None:
        return Thresholds()
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"{where}: access_and_evict_config is a dict, got {type(config).__name__}. Give "
            "dict(access_threshold=..., eviction_threshold=...)."
        )
    for key in config:
        if key not in KEYS:
            raise ConfigError(
                f"{where}: access_and_evict_config has the keys {', '.join(KEYS)}, got {key!r}. "
                f"{did_you_mean(key, KEYS)}"
            )
    thresholds = Thresholds(**config)
    thresholds.check(where)
    return thresholds


def _check_times(thresholds: Mapping[str, Thresholds], *, has_times: bool) -> None:
    for table, values in thresholds.items():
        if values.evicts and not has_times:
            raise ConfigError(
                f"table {table!r}: an eviction threshold needs the time of each batch, got "
                f"eviction_threshold={values.eviction_threshold} and batches without times. Give "
                "the schema a Time column, or times=..."
            )


def _entry(table: Table, findings: Findings, features: IdFeatures) -> LookupEntry:
    """Return what becomes of the lookups of a table."""
    name = table.name
    num_lookups = sum(lookup == name for lookup in features.lookups.values())
    if num_lookups > MOST_LOOKUPS:
        raise CallError(
            f"table {name!r}: a forward pass may look it up {MOST_LOOKUPS} times, got "
            f"{num_lookups}. Join the ids with torch.cat, and look them up once."
        )
    if name in findings.obstacles:
        reason = f"its ids depend on {findings.obstacles[name]}"
        return LookupEntry(name, "forward", reason, table)
    if not num_lookups:
        return LookupEntry(name, "unused", table=table)
    reason = obstacle_of([table])
    return LookupEntry(
        name, "step" if reason else "ahead", reason, table, num_lookups, findings.sources.get(name)
    )


def _report(
    model: nn.Module, entries: Sequence[LookupEntry], findings: Findings
) -> Report[LookupEntry]:
    return lookup_report(
        "modify_graph",
        type(model).__name__,
        tuple(entries),
        sum(parameter.numel() for parameter in dense_parameters(model)),
        findings.inputs,
        ("In evaluation, the forward pass looks up the ids and only reads: no table changes.",),
    )
