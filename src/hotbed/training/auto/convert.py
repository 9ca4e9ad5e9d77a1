# SPDX-License-Identifier: Apache-2.0
"""hb.auto: an ordinary torch model becomes one whose embeddings are tables."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hotbed import config
from hotbed.embedding.lookups import Buckets
from hotbed.embedding.modules import TableRows
from hotbed.embedding.rule import Rule, Sgd
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError, HotbedError
from hotbed.optim.combined import CombinedOptimizer
from hotbed.optim.torch_rules import row_state, rule_of

from . import trace
from .adapter import ConvertedAdapter
from .conversion_report import EmbeddingEntry, conversion_report
from .lookups import MovedEmbedding, MovedEmbeddingBag, MovedLookup, MovedWeight, become
from .network import Converted, arguments_of, attach, converted
from .owners import Optimizer, adopt, owners_of, unwrapped
from .report import Report
from .rows import fill
from .signature import Signature
from .sites import EmbeddingWeight, weights_of
from .torchrec.fused import unfused
from .torchrec.managed_collision import pass_raw_ids, raw_ids_passing
from .torchrec.plans import plan_notes

Options = Mapping[str, Mapping[str, Any] | None]

DECIDED = ("name", "dim", "rule")
"""Keywords of hb.Table that the model and its optimizer decide."""
BUCKETS = "buckets"
"""The keyword of the lookups in a table, see `hb.EmbeddingCollection`."""


def auto(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    tables: Options | None = None,
    times: str | None = None,
    *,
    unbounded: Sequence[str] = (),
    batch: Any = None,
    plan: Any = None,
) -> tuple[nn.Module, Any, Report[EmbeddingEntry]]:
    """Turn the embeddings of an ordinary model into tables that grow and forget, in place.

    Every nn.Embedding and nn.EmbeddingBag looks up its rows in a `hb.Table` of its path, with the
    arguments and results that it had; the rest of the model stays as it is. The tables of
    TorchRec's EmbeddingBagCollection and EmbeddingCollection keep their names. The rows of the
    weight are those of the ids 0, 1, …, with the state that the optimizer has of them, so that a
    conversion after some steps changes nothing. New ids are inserted in training; their rows start
    as torch's do, Normal(0, 1), and as a config of TorchRec says.

    A module whose weight is read outside a lookup, such as one tied to an output layer, stays an
    nn.Embedding; the report says so. Nothing is changed before everything has been checked.

    Args:
        model: an ordinary module, on any device.
        optimizer: the torch optimizer of the embeddings, or a list of several; TorchRec's
            KeyedOptimizerWrapper stands for the optimizer inside of it, and its CombinedOptimizer
            for a list. Make schedulers afterwards, for the optimizer that is returned.
        tables: by module path, or by the name of a table of TorchRec, keywords of `hb.Table`, such
            as `admit`, `evict` and `init`, and `buckets` as `hb.EmbeddingCollection` takes them;
            None keeps that module as it is.
        times: the name of the argument of the model that holds the time of each sample, int64
            microseconds, for policies that need it.
        unbounded: paths of the modules whose ids end with `% bins`: their tables take the ids
            before it, and grow.
        batch: one batch, as the loop gives it to the model: the code of the model is then traced
            with it. A tuple is the model's arguments. None = the first batch is waited for.
        plan: TorchRec's ShardingPlan, or a dict of its ParameterConstraints: the report says what
            of it has no effect. None = there is none.

    Returns:
        The model; the optimizer, a `hb.CombinedOptimizer` that steps parameters and tables (a list
        if a list was given); and the report, which accounts for every embedding.

    Raises:
        ConfigError: an embedding cannot become a table (the message lists each with its reason), or
            a module path or keyword is unknown.

    Example:
        >>> model, optimizer, report = hb.auto(
        ...     model, optimizer, tables={"user": {"evict": hb.Ttl(days=30)}}, times="time"
        ... )
        >>> print(report)
    """
    _check_types(model, tables, times, unbounded)
    optimizers = _optimizers(model, optimizer)
    with unfused(model):
        combined, report = _convert(model, optimizers, tables or {}, times, unbounded, batch, plan)
    return model, _as_given(optimizer, combined), report


def _as_given(optimizer: Optimizer | Sequence[Optimizer], combined: list[Optimizer]) -> Any:
    """Return the new optimizers as the old ones were given: one alone, or a list."""
    if isinstance(optimizer, Optimizer) and len(combined) == 1:
        return combined[0]
    return combined


def _convert(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    options: Options,
    times: str | None,
    unbounded: Sequence[str],
    batch: Any,
    plan: Any,
) -> tuple[list[Optimizer], Report[EmbeddingEntry]]:
    """Convert `model`; return what takes the place of each optimizer, and the report."""
    weights = weights_of(model)
    notes = plan_notes(plan, [weight.name for weight in weights])
    paths = _paths("tables", options, weights)
    options = {paths[key]: keywords for key, keywords in options.items()}
    unbounded = list(_paths("unbounded", unbounded, weights).values())
    signature = _signature(model, batch, times)
    with raw_ids_passing(model):
        findings = trace.inspect_both_modes(
            model,
            [site.path for weight in weights for site in weight.sites if not site.is_scripted],
            signature,
        )
    reasons = {weight.name: _kept(weight, options, findings) for weight in weights}
    _check_managed(weights, reasons)
    movable = [weight for weight in weights if not reasons[weight.name]]
    _check_unbounded(unbounded, movable, findings)
    if unbounded and signature is not None:
        _check_traced(model, unbounded, findings)
    device = _device_of_results(model, movable)
    moves = _moves(movable, options, optimizers, findings)
    report = _report(model, weights, reasons, moves, findings, unbounded, notes)
    state = Converted(model, {}, report, times, frozenset(unbounded))
    if signature is not None and findings.graph is not None:
        state.set_graph(findings.graph, signature)
    for move in moves:
        state.lookups.update(move.put_in_place(unbounded, device))
    pass_raw_ids(model)
    attach(state, ConvertedAdapter(state))
    rows = {move.weight.parameter: move.rows for move in moves}
    adopt(rows, optimizers[0], optimizers)
    combined = [_combined(optimizer, model, rows) for optimizer in optimizers]
    for move in moves:
        MovedWeight.retire(move.weight.parameter, move.weight.name)
    return combined, report


def _signature(model: nn.Module, batch: Any, times: str | None) -> Signature | None:
    """Return the signature of a call with `batch`; None without a batch.

    Raises:
        ConfigError: the model does not take the batch, or it has no tensor called `times`.
    """
    if batch is None:
        return None
    args, kwargs = arguments_of(model, batch)
    signature = Signature.of(model, args, kwargs)
    if times is not None and getattr(batch, "time", None) is None:
        signature[times]  # raises for an unknown name
    return signature


@dataclass(frozen=True)
class Move:
    """A weight that becomes a table.

    Attributes:
        weight: with its modules.
        table: holds its rows.
        lookups: what the modules become, one each.
    """

    weight: EmbeddingWeight
    table: Table
    lookups: tuple[MovedLookup, ...]

    @staticmethod
    def of(weight: EmbeddingWeight, table: Table, buckets: Sequence[int]) -> Move:
        lookups: list[MovedLookup] = []
        for site in weight.sites:
            if isinstance(site.module, nn.EmbeddingBag):
                lookups.append(MovedEmbeddingBag(site.path, table, site.module, buckets))
            else:
                lookups.append(MovedEmbedding(site.path, table, site.module, buckets))
        for lookup in lookups[1:]:
            lookup.share_gradients(lookups[0])
        return Move(weight, table, tuple(lookups))

    @property
    def rows(self) -> TableRows:
        """Return the parameter that takes the place of the weight."""
        return self.lookups[0].rows[0]

    def put_in_place(self, unbounded: Iterable[str], device: torch.device) -> dict[str, Any]:
        """Turn the modules into lookups, and return them by path.

        `device`: of the results of a weight on the meta device.
        """
        changed = {}
        for site, lookup in zip(self.weight.sites, self.lookups, strict=True):
            lookup.unbounded = site.path in unbounded
            lookup.has_raw_ids = site.raw_ids is not None
            if self.weight.parameter.is_meta:
                lookup.to(device)
            become(site.module, lookup)
            changed[site.path] = site.module
        return changed


def _device_of_results(model: nn.Module, movable: Sequence[EmbeddingWeight]) -> torch.device:
    """Return the device of the parameters that stay.

    Raises:
        ConfigError: one of them is on the meta device.
    """
    moved = {id(weight.parameter) for weight in movable}
    device = torch.device("cpu")
    for name, parameter in model.named_parameters():
        if id(parameter) in moved or is_lazy(parameter):
            continue
        if parameter.is_meta:
            raise ConfigError(
                f"hb.auto: only the weight of a table may be on the meta device, got {name!r}. "
                "Make the dense layers on a device that has values (of DLRM: dense_device=)."
            )
        device = parameter.device
    return device


def _check_types(model: Any, tables: Any, times: Any, unbounded: Any) -> None:
    """Raise ConfigError unless the arguments of `auto` have their types."""
    if not isinstance(model, nn.Module):
        received = (
            f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        )
        raise ConfigError(f"hb.auto.model: expected an nn.Module, got {received}. Make a model.")
    if tables is not None and not isinstance(tables, Mapping):
        raise ConfigError(
            "hb.auto.tables: expected a dict of keywords of hb.Table by module path, got "
            f"{type(tables).__name__}. Write {{'path': {{'evict': hb.Ttl(days=30)}}}}."
        )
    for path, keywords in (tables or {}).items():
        if keywords is not None and not isinstance(keywords, Mapping):
            raise ConfigError(
                f"hb.auto.tables[{path!r}]: expected a dict of keywords of hb.Table or None, got "
                f"{keywords!r}. Write {{'evict': …}}, or the keyword that you mean."
            )
    if times is not None and not isinstance(times, str):
        raise ConfigError(
            f"hb.auto.times: expected the name of an argument, got {times!r}. Give its name."
        )
    if isinstance(unbounded, str):
        raise ConfigError(
            f"hb.auto.unbounded: expected a list of module paths, got {unbounded!r}. Write "
            f"[{unbounded!r}]."
        )


def _optimizers(model: nn.Module, optimizer: Any) -> list[Optimizer]:
    state = converted(model)
    if state is not None and state.lookups:
        raise ConfigError(
            f"hb.auto: a model is converted once, got {type(model).__name__}, which hb.auto has "
            "converted. Use the model and the optimizer that it returned."
        )
    optimizers = [optimizer]
    if isinstance(optimizer, (list, tuple)):
        optimizers = list(optimizer)
    for element in optimizers:
        if not isinstance(element, Optimizer):
            raise ConfigError(
                f"hb.auto.optimizer: expected a torch optimizer or a list of them, got "
                f"{type(element).__name__}. Give the optimizer of the model."
            )
        if hasattr(element.step, "_wrapped_by_lr_sched") or hasattr(element.step, "_with_counter"):
            raise ConfigError(
                "hb.auto.optimizer: expected an optimizer without a scheduler, got "
                f"{type(element).__name__} whose step a scheduler wraps. Make schedulers after "
                "hb.auto, for the optimizer that it returns."
            )
    every = [each for element in optimizers for each in unwrapped(element)]
    if not every:
        raise ConfigError(
            "hb.auto.optimizer: expected an optimizer of torch, got only those of fused "
            "collections. Give the optimizer of the dense parameters."
        )
    return every


def _paths(keyword: str, keys: Iterable[str], weights: Sequence[EmbeddingWeight]) -> dict[str, str]:
    """Return the path that each of `keys` stands for: a path, or the name of a table.

    Raises:
        ConfigError: the model has no embedding of a key, or two keys stand for one path.
    """
    path_of = {}
    for weight in weights:
        path_of[weight.name] = weight.paths[0]
    for weight in weights:
        path_of.update({path: path for path in weight.paths})
    paths: dict[str, str] = {}
    for key in keys:
        if key not in path_of:
            raise ConfigError(
                f"hb.auto.{keyword}: the model has no embedding at this path, got {key!r}. "
                f"{config.did_you_mean(key, path_of)}"
            )
        if path_of[key] in paths.values():
            raise ConfigError(
                f"hb.auto.{keyword}: one embedding is named twice, got {key!r} and "
                f"{path_of[key]!r}. Name it once."
            )
        paths[key] = path_of[key]
    return paths


def _check_unbounded(
    paths: Sequence[str], movable: Sequence[EmbeddingWeight], findings: trace.Findings
) -> None:
    moved = [path for weight in movable for path in weight.paths]
    for path in paths:
        if path not in moved:
            raise ConfigError(
                f"hb.auto.unbounded: this embedding is kept as it is, got {path!r}. Leave it out."
            )
        source = findings.sources.get(path)
        if source is not None and source.bins is None:
            raise ConfigError(
                f"hb.auto.unbounded: the ids of this lookup do not end with '% bins', got {path!r} "
                f"with ids {source.text}. Leave it out."
            )


def _check_traced(model: nn.Module, paths: Sequence[str], findings: trace.Findings) -> None:
    """Raise ConfigError unless the id graph gives the ids at `paths` without `% bins`."""
    if findings.graph is None:
        raise ConfigError(
            f"hb.auto.unbounded: the code of {type(model).__name__} cannot be traced, got: "
            f"{findings.problem}. Leave unbounded out."
        )
    findings.graph.unbounded(paths)


def _kept(weight: EmbeddingWeight, options: Options, findings: trace.Findings) -> str:
    """Return why a weight stays that of an nn.Embedding; "" if it becomes a table."""
    for path in weight.paths:
        if path in options and options[path] is None:
            return "tables has None for it"
    if weight.read:
        return f"its weight is also {weight.read}"
    for site in weight.sites:
        reason = site.kept()
        if not reason and site.path in findings.kept:
            reason = f"its weight is read outside a lookup, {findings.kept[site.path]}"
        if reason and len(weight.sites) > 1:
            return f"{reason} ({site.path})"
        if reason:
            return reason
    return ""


def _check_managed(weights: Sequence[EmbeddingWeight], reasons: Mapping[str, str]) -> None:
    """Raise ConfigError if an embedding is kept that would get raw ids from now on."""
    for weight in weights:
        if reasons[weight.name] and weight.sites[0].raw_ids is not None:
            raise ConfigError(
                "hb.auto: an embedding behind managed collisions becomes a table, which takes raw "
                f"ids, got {weight.name!r}, which would be kept: {reasons[weight.name]}. Let it "
                "become a table, or use an EmbeddingBagCollection alone."
            )


def _moves(
    weights: Sequence[EmbeddingWeight],
    options: Options,
    optimizers: Sequence[Optimizer],
    findings: trace.Findings,
) -> list[Move]:
    """Return the tables of `weights`, with their rows; nothing in the model is changed.

    Raises:
        ConfigError: some cannot become tables. The message lists them all.
    """
    refused: dict[str, str] = {}
    moves = []
    for weight in weights:
        for site in weight.sites:
            reason = site.refused() or findings.refused.get(site.path, "")
            if reason:
                refused[site.path] = reason
        if any(path in refused for path in weight.paths):
            continue
        try:
            keywords = _keywords(weight, options, _rule(weight, optimizers))
            buckets = keywords.pop(BUCKETS, ())
            Buckets.of(weight.name, buckets)
            table = Table(weight.name, weight.parameter.shape[1], **keywords)
        except HotbedError as error:
            refused[weight.name] = str(error)
            continue
        moves.append((weight, table, buckets))
    if refused:
        lines = "".join(f"\n  {path}: {reason}" for path, reason in refused.items())
        keep = ", ".join(f"{path!r}: None" for path in refused)
        raise ConfigError(
            f"hb.auto: these embeddings cannot become tables, got:{lines}\nNothing was "
            f"changed. Change them, or keep them as they are: tables={{{keep}}}."
        )
    for weight, table, _ in moves:
        _fill(weight, table, optimizers)
    return [Move.of(*move) for move in moves]


def _rule(weight: EmbeddingWeight, optimizers: Sequence[Optimizer]) -> Rule:
    owners = owners_of(weight.parameter, optimizers)
    if len(owners) > 1:
        names = ", ".join(type(owner.optimizer).__name__ for owner in owners)
        raise ConfigError(f"its weight must be in one optimizer, got {names}.")
    if not weight.parameter.requires_grad:
        return Sgd()  # of a frozen table: no step changes it
    if not owners:
        raise ConfigError(
            "its weight is in no optimizer that was given. Give that optimizer too, or set "
            "requires_grad=False."
        )
    owner = owners[0]
    rule = rule_of(owner.optimizer, owner.group, sparse=weight.is_sparse)
    return replace(rule, scope="touched") if owner.is_fused else rule


def _keywords(weight: EmbeddingWeight, options: Options, rule: Rule) -> dict[str, Any]:
    """Return the keywords of a weight's table."""
    keywords: dict[str, Any] = {}
    for path in weight.paths:
        for keyword, value in (options.get(path) or {}).items():
            if keywords.get(keyword, value) != value:
                raise ConfigError(
                    f"its modules {', '.join(weight.paths)} share one table, got two values of "
                    f"{keyword}. Give one."
                )
            keywords[keyword] = value
    parameters = list(inspect.signature(Table).parameters)
    free = [BUCKETS, *(keyword for keyword in parameters if keyword not in DECIDED)]
    for keyword in keywords:
        if keyword in DECIDED:
            raise ConfigError(
                f"{keyword} comes from the model and its optimizer, got {keyword}="
                f"{keywords[keyword]!r}. Leave it out."
            )
        if keyword not in free:
            raise ConfigError(
                f"hb.Table has no such keyword, got {keyword!r}. "
                f"{config.did_you_mean(keyword, free)}"
            )
    return {"init": weight.init, **keywords, "rule": rule}


def _fill(weight: EmbeddingWeight, table: Table, optimizers: Sequence[Optimizer]) -> None:
    """Load the rows of a weight, with the state that its optimizer has of them.

    A weight on the meta device has no values: its table begins empty.
    """
    is_learned = weight.parameter.requires_grad
    if not weight.parameter.is_meta:
        state: list[torch.Tensor] = []
        step = 0
        for owner in owners_of(weight.parameter, optimizers):
            if is_learned:
                of_weight = owner.optimizer.state.get(weight.parameter, {})
                state, step = row_state(owner.optimizer, of_weight, weight.parameter)
        _load_rows(weight, table, state, step)
    if not is_learned:
        table.requires_grad_(False)


def _load_rows(
    weight: EmbeddingWeight, table: Table, state: Sequence[torch.Tensor], step: int
) -> None:
    raw_ids = weight.sites[0].raw_ids
    if raw_ids is None:
        fill(table, weight.parameter, state, step)
        return
    of_rows = [slot[raw_ids.rows] for slot in state]
    fill(table, weight.parameter[raw_ids.rows], of_rows, step, raw_ids.ids.numpy())


def _report(
    model: nn.Module,
    weights: Sequence[EmbeddingWeight],
    reasons: Mapping[str, str],
    moves: Sequence[Move],
    findings: trace.Findings,
    unbounded: Sequence[str],
    notes: Sequence[str],
) -> Report[EmbeddingEntry]:
    tables = {move.weight.name: move.table for move in moves}
    entries = []
    for weight in weights:
        reason = reasons[weight.name]
        for site in weight.sites:
            entries.append(
                EmbeddingEntry(
                    path=site.path,
                    kind=site.kind,
                    outcome="kept" if reason else "moved",
                    reason=reason,
                    table=tables.get(weight.name),
                    others=tuple(path for path in weight.paths if path != site.path),
                    num_rows=site.module.num_embeddings,
                    dim=site.module.embedding_dim,
                    source=findings.sources.get(site.path),
                    obstacle=findings.obstacles.get(site.path, ""),
                    is_unbounded=site.path in unbounded,
                )
            )
    notes = [*notes]
    if findings.problem:
        notes.append(
            f"The code of the model could not be traced ({findings.problem}). Its lookups work as "
            "they are, and map their ids in the forward pass; hb.Ahead, unbounded and serving need "
            "a trace, which the first batch may give."
        )
    empty = [move.table.name for move in moves if move.weight.parameter.is_meta]
    if empty:
        notes.append(
            f"Weights on the meta device have no values: the tables {', '.join(empty)} begin "
            "without rows."
        )
    remapped = [move.table.name for move in moves if move.weight.sites[0].raw_ids is not None]
    if remapped:
        notes.append(
            f"Managed collisions are gone: the tables {', '.join(remapped)} have a row for each "
            "raw id. Bound them with evict=hb.Lru(max_rows) or hb.Lfu(max_rows)."
        )
    moved = {id(move.weight.parameter) for move in moves}
    num_dense = 0
    for parameter in model.parameters():
        if id(parameter) not in moved and not is_lazy(parameter):
            num_dense += parameter.numel()
    return conversion_report(
        type(model).__name__, tuple(entries), num_dense, findings.inputs, tuple(notes)
    )


def _combined(
    optimizer: Optimizer, model: nn.Module, rows: Mapping[nn.Parameter, TableRows]
) -> Optimizer:
    """Return the optimizer of parameters and rows; the same one if it had no weight that moved."""
    for group in optimizer.param_groups:
        if any(parameter in rows for parameter in group["params"]):
            return CombinedOptimizer(optimizer, model, rows)
    return optimizer
