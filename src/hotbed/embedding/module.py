# SPDX-License-Identifier: Apache-2.0
"""Tables as torch modules: lookups that autograd, torch.compile and plain PyTorch loops understand.

Each module holds one nn.Parameter a group of tables (tables of one dim and rule). After a backward pass its `.grad` holds the summed
gradients of the batch's distinct ids, [num unique ids, dim], so gradient clipping and GradScaler work as on any parameter; its shape
changes with every batch. `hb.SparseOptimizer` takes these parameters, `hb.dense_parameters` gives all others.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hotbed.data.batch import Ids, as_ids
from hotbed.errors import ConfigError, RowShapeError

from .opaque import alive, pool_opaque
from .table import POOLINGS, Step, Table

if TYPE_CHECKING:
    from hotbed.data.schema import Schema


@dataclass(frozen=True)
class Feature:
    """A feature of a collection: `name` in the batch, the `table` that holds its ids, and its `pooling`."""

    name: str
    table: str
    pooling: str = "sum"


@dataclass(frozen=True)
class Group:
    """Tables of one dim and rule, whose gradients share one parameter. `tables`: their numbers in the module."""

    dim: int
    tables: tuple[int, ...]


@dataclass
class Pending:
    """Gradients that wait for the optimizer: the distinct ids (`step`) and their sums, one tensor a group.

    `addresses`: where each table's sums start. `finite`: whether the sums were found finite, at these `versions`.
    """

    step: Step
    grads: list[Tensor]
    addresses: list[int]
    versions: list[int]
    finite: bool

    def known_finite(self, grads: Sequence[Tensor]) -> bool:
        """True when the sums were found finite and nobody (clipping, unscaling) has changed them since."""
        return self.finite and self.holds(grads) and self.versions == [grad._version for grad in grads]

    def holds(self, grads: Sequence[Tensor]) -> bool:
        """True when these are the tensors that backward left, whatever their values are now."""
        return all(grad is own for grad, own in zip(grads, self.grads, strict=True))


class TableModule(nn.Module, ABC):
    """Base of Embedding, EmbeddingBag and EmbeddingCollection: many features over many tables in one native call."""

    tables: list[Table]

    def __init__(self, tables: Sequence[Table], features: Sequence[Feature]) -> None:
        super().__init__()
        self.tables = list(tables)
        self.features = tuple(features)
        numbers = {table.name: number for number, table in enumerate(self.tables)}
        if len(numbers) != len(self.tables):
            raise ConfigError(
                f"embedding: table names must differ — received {[t.name for t in self.tables]} — rename one"
            )
        for feature in self.features:
            if feature.pooling not in POOLINGS:
                raise ConfigError(
                    f"feature {feature.name!r}: unknown pooling — received {feature.pooling!r} — use one of {', '.join(POOLINGS)}"
                )
            if feature.table not in numbers:
                raise ConfigError(
                    f"feature {feature.name!r}: no table {feature.table!r} — received {sorted(numbers)} — give that table"
                )
        self._table_of = [numbers[feature.table] for feature in self.features]
        self._layout = [
            (table, POOLINGS.index(f.pooling)) for table, f in zip(self._table_of, self.features, strict=True)
        ]
        self._timed = any(table.needs_times or table.keeps_times for table in self.tables)
        self.dims = [self.tables[table].dim for table in self._table_of]
        self.pooled = [feature.pooling != "none" for feature in self.features]
        self.output_dim = sum(dim for dim, pooled in zip(self.dims, self.pooled, strict=True) if pooled)
        self.groups = _group(self.tables)
        for number, group in enumerate(self.groups):  # parameters of its own: state_dict leaves them out, see below
            self.register_parameter(f"rows_{number}", nn.Parameter(torch.empty(0, group.dim)))
        self.pending: Pending | None = None
        self.anchor = torch.zeros((), requires_grad=True)  # ties the lookup into autograd; takes no gradient itself
        self.number = id(self)  # under which torch.compile's operators find this module
        alive[self.number] = self
        self.register_buffer("_device", torch.empty(0), persistent=False)  # follows .to(device); results go there

    @property
    def rows(self) -> list[nn.Parameter]:
        """The parameter of each group."""
        return [self._parameters[f"rows_{number}"] for number in range(len(self.groups))]  # type: ignore[misc]

    # Rows are saved by persist, not by state_dict: the parameters here are windows on the last batch.
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(self, *args: Any) -> None:
        pass

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            "embedding: modules with tables do not pickle — received a copy or pickle — save with hotbed.persist or RecModel.save"
        )

    def pool(self, inputs: Sequence[Ids], time: Any = None) -> tuple[Tensor, list[Tensor]]:
        """All features at once: pooled ones side by side [n, output_dim], and the rows [m, dim] of each sequence feature."""
        if torch.compiler.is_compiling():
            return pool_opaque(self, inputs, time)
        if self.training and torch.is_grad_enabled():
            flat, *sequences = _Pool.apply(self.anchor, self, inputs, time)  # type: ignore[no-untyped-call]
            return flat, sequences
        flat, sequences, _ = self.look_up(inputs, time, training=self.training)
        return flat, sequences

    def look_up(self, inputs: Sequence[Ids], time: Any, *, training: bool) -> tuple[Tensor, list[Tensor], Step]:
        """The native lookup: maps ids (in training inserts, counts and touches) and pools rows."""
        num_samples = -1
        held, ids = [], []
        for feature, one in zip(self.features, inputs, strict=True):
            values = _int64(one.values, feature.name)
            offsets = None if one.offsets is None else _int64(one.offsets, feature.name)
            weights = None if one.weights is None else _float32(one.weights, feature.name)
            samples = len(values) if offsets is None else len(offsets) - 1
            num_samples = samples if num_samples < 0 else num_samples
            if samples < 0:
                raise RowShapeError(
                    f"feature {feature.name!r}: offsets are [samples + 1] — received none — check the batch"
                )
            if samples != num_samples:
                raise RowShapeError(
                    f"feature {feature.name!r}: samples differ between features — received {samples} beside {num_samples} — check the batch"
                )
            if weights is not None and len(weights) != len(values):
                raise RowShapeError(
                    f"feature {feature.name!r}: one weight an id — received {len(weights)} for {len(values)} ids — check the batch"
                )
            if weights is not None and feature.pooling == "max":
                raise RowShapeError(
                    f"feature {feature.name!r}: max pooling takes no weights — received some — use sum or mean"
                )
            held.append((values, offsets, weights))
            starts = 0 if offsets is None else offsets.data_ptr()
            ids.append((values.data_ptr(), len(values), starts, 0 if weights is None else weights.data_ptr(), samples))
        num_samples = max(num_samples, 0)
        times = self._times(time, num_samples) if training else None
        flat = torch.empty(num_samples, self.output_dim)
        base, at, out, sequences = flat.data_ptr(), 0, [], []
        for dim, pooled, (values, _, _) in zip(self.dims, self.pooled, held, strict=True):
            if pooled:
                out.append((base + 4 * at, self.output_dim))
                at += dim
            else:
                sequences.append(torch.empty(len(values), dim))
                out.append((sequences[-1].data_ptr(), dim))
        step = Step(self._natives(), self._layout)
        try:
            step.lookup(ids, 0 if times is None else times.ctypes.data, training, out)
        except ValueError:
            self._blame_offsets(held)
            raise
        device: torch.device = self._device.device  # type: ignore[assignment]
        if device.type != "cpu":
            flat, sequences = flat.to(device), [rows.to(device) for rows in sequences]
        return flat, sequences, step

    def _blame_offsets(self, held: Sequence[tuple[Tensor, Tensor | None, Tensor | None]]) -> None:
        for feature, (values, offsets, _) in zip(self.features, held, strict=True):
            if offsets is not None and (
                offsets[0] != 0 or offsets[-1] != len(values) or bool((offsets.diff() < 0).any())
            ):
                raise RowShapeError(
                    f"feature {feature.name!r}: offsets start at 0, never fall and end at the number of ids, {len(values)} — "
                    f"received {offsets[:3].tolist()} … {offsets[-1].item()} — check the batch"
                ) from None

    def _times(self, time: Any, num_samples: int) -> np.ndarray | None:
        if not self._timed:
            return None
        if isinstance(time, Tensor):
            time = time.detach().cpu().numpy()
        times = [table.check_times(time, num_samples) for table in self.tables]
        return times[0]

    def receive(self, step: Step, flat: Tensor | None, sequences: Sequence[Tensor | None]) -> None:
        """Takes the gradients of a lookup's results: sums them an id and leaves them as `.grad` of the group parameters."""
        flat = None if flat is None else _dense(flat)
        held = [None if grad is None else _dense(grad) for grad in sequences]
        rows: list[tuple[int, int]] = []
        at, rest = 0, iter(held)
        for dim, pooled in zip(self.dims, self.pooled, strict=True):
            grad = flat if pooled else next(rest)
            rows.append(
                (0, 0)
                if grad is None
                else (grad.data_ptr() + (4 * at if pooled else 0), grad.stride(0) if len(grad) else 0)
            )
            at += dim if pooled else 0
        uniques = step.num_uniques()
        grads = [torch.empty(sum(uniques[t] for t in group.tables), group.dim) for group in self.groups]
        addresses = self.addresses(step, grads)
        finite = step.sum_gradients(rows, addresses)
        if self.pending is not None and all(p.grad is not None for p in self.rows):
            step, grads = self._merge(self.pending, step, grads)
            addresses, finite = self.addresses(step, grads), False  # sums of finite sums may overflow: look again
        for parameter, grad in zip(self.rows, grads, strict=True):
            parameter.grad = None
            parameter.data = grad.new_empty(1).expand(grad.shape)
            parameter.grad = grad
        self.pending = Pending(step, grads, addresses, [grad._version for grad in grads], finite)

    def _natives(self) -> list[Any]:
        return [table.native for table in self.tables]

    def addresses(self, step: Step, grads: Sequence[Tensor]) -> list[int]:
        """Where each table's sums start in the groups' tensors."""
        uniques, out = step.num_uniques(), [0] * len(self.tables)
        for group, grad in zip(self.groups, grads, strict=True):
            at = grad.data_ptr()
            for table in group.tables:
                out[table] = at
                at += 4 * group.dim * uniques[table]
        return out

    def _merge(self, pending: Pending, step: Step, grads: list[Tensor]) -> tuple[Step, list[Tensor]]:
        """Adds a micro-batch to what waits already."""
        earlier = [_dense(parameter.grad) for parameter in self.rows if parameter.grad is not None]
        both = [self.addresses(pending.step, earlier), self.addresses(step, grads)]
        merged, sums = Step.merge([pending.step, step], both)
        out = []
        for group in self.groups:
            parts = [torch.from_numpy(sums[table]).view(-1, group.dim) for table in group.tables]
            out.append(torch.cat(parts) if len(parts) > 1 else parts[0])
        return merged, out


class Embedding(TableModule):
    """A table as nn.Embedding: ids int64 [...] -> rows [..., dim]; Ids -> rows [m, dim] of all its ids (a sequence lookup).

    Example: `hb.Embedding(hb.Table("item", dim=16))(torch.tensor([[7, -1]]))` has shape [1, 2, 16].
    """

    def __init__(self, table: Table) -> None:
        super().__init__([table], [Feature(table.name, table.name, "none")])

    def forward(self, ids: Tensor | Ids, time: Any = None) -> Tensor:
        """`time`: int64 microseconds, one an id (or one a sample of Ids), for tables whose eviction needs it."""
        if isinstance(ids, Ids):
            return self.pool([ids], time)[1][0]
        return self.pool([Ids(ids.reshape(-1))], time)[1][0].view(*ids.shape, self.tables[0].dim)


class EmbeddingBag(TableModule):
    """A table as nn.EmbeddingBag: bags of ids -> pooled rows [n, dim]; `pooling`: sum, mean or max. An empty bag reads as zeros.

    Example: `hb.EmbeddingBag(table, pooling="mean")(values, offsets)` with offsets [n + 1], as hb.Ids has them.
    """

    def __init__(self, table: Table, pooling: str = "sum") -> None:
        if pooling == "none":
            raise ConfigError(
                "EmbeddingBag: pooling 'none' is no bag — received 'none' — use hb.Embedding for sequences"
            )
        super().__init__([table], [Feature(table.name, table.name, pooling)])

    def forward(
        self, ids: Tensor | Ids, offsets: Tensor | None = None, weights: Tensor | None = None, time: Any = None
    ) -> Tensor:
        """`ids`: int64 [m] with `offsets` [n + 1], or [n, k] = n bags of k ids, or Ids. `weights`: float32 like ids (no gradient)."""
        if isinstance(ids, Ids):
            return self.pool([ids], time)[0]
        if ids.dim() == 2 and offsets is None:
            offsets = (
                torch.arange(0, ids.numel() + 1, max(ids.shape[1], 1))
                if ids.shape[1]
                else torch.zeros(len(ids) + 1, dtype=torch.int64)
            )
            weights = None if weights is None else weights.reshape(-1)
            ids = ids.reshape(-1)
        return self.pool([Ids(ids, offsets, weights)], time)[0]


class EmbeddingCollection(TableModule):
    """All sparse features of a batch over their tables, in one native call; several features may share a table.

    `features`: a Schema (its Id columns) or Features. `tables`: by name, or a list. `collection(batch)` gives each feature's rows by
    name: [n, dim] pooled, [m, dim] for pooling "none". `collection.flat(batch)`: the pooled ones side by side [n, output_dim].
    In train mode new ids are inserted, counted and timed (batch.time); in eval mode nothing changes.

    Example: `hb.EmbeddingCollection(schema, hb.make_tables(schema, dim=16))`
    """

    def __init__(self, features: Schema | Sequence[Feature], tables: Mapping[str, Table] | Sequence[Table]) -> None:
        if not isinstance(features, Sequence):
            features = [Feature(column.name, str(column.table), column.pooling) for column in features.ids]
        wanted = {feature.table for feature in features}
        given = tables.values() if isinstance(tables, Mapping) else tables
        super().__init__(
            [table for table in given if table.name in wanted or not isinstance(tables, Mapping)], features
        )

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Each feature's rows by name. `batch`: a Batch, or a mapping of feature names to Ids or int64 tensors [n]."""
        flat, sequences = self.pool(self._inputs(batch), getattr(batch, "time", None))
        pooled = iter(
            torch.split(flat, [dim for dim, pooled in zip(self.dims, self.pooled, strict=True) if pooled], dim=1)
        )
        rest = iter(sequences)
        return {
            feature.name: next(pooled if is_pooled else rest)
            for feature, is_pooled in zip(self.features, self.pooled, strict=True)
        }

    def flat(self, batch: Any) -> Tensor:
        """The pooled features side by side, [n, output_dim], in the order of the schema."""
        return self.pool(self._inputs(batch), getattr(batch, "time", None))[0]

    def _inputs(self, batch: Any) -> list[Ids]:
        ids = batch.ids if hasattr(batch, "ids") else batch
        try:
            found = [ids[feature.name] for feature in self.features]
        except KeyError as missing:
            raise RowShapeError(
                f"embedding: the batch lacks feature {missing} — received {sorted(ids)} — encode it with the same schema"
            ) from None
        return [one if isinstance(one, Ids) else Ids(one) for one in found]


def table_modules(model: nn.Module) -> list[TableModule]:
    """The table modules inside a model, each once."""
    return [module for module in model.modules() if isinstance(module, TableModule)]


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, module: TableModule, inputs: Sequence[Ids], time: Any) -> Any:
        flat, sequences, step = module.look_up(inputs, time, training=True)
        ctx.module, ctx.step = module, step
        ctx.set_materialize_grads(False)
        return (flat, *sequences)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if any(grad is not None for grad in grads):
            ctx.module.receive(ctx.step, grads[0], grads[1:])
        return None, None, None, None


def _group(tables: Sequence[Table]) -> list[Group]:
    numbers: dict[tuple[int, Any], list[int]] = {}
    for number, table in enumerate(tables):
        numbers.setdefault((table.dim, table.rule), []).append(number)
    return [Group(dim, tuple(members)) for (dim, _), members in numbers.items()]


def _int64(array: Any, feature: str) -> Tensor:
    if isinstance(array, Tensor):
        tensor = array
    else:
        tensor = torch.from_numpy(as_ids(array, f"feature {feature!r}: ids and offsets"))
    if tensor.dtype != torch.int64 or tensor.dim() != 1:
        raise RowShapeError(
            f"feature {feature!r}: ids and offsets are int64 [n] — received {tensor.dtype} {list(tensor.shape)} — convert or flatten them"
        )
    return tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.cpu().contiguous()


def _float32(array: Any, feature: str) -> Tensor:
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    if tensor.dtype != torch.float32 or tensor.dim() != 1:
        raise RowShapeError(
            f"feature {feature!r}: weights are float32 [m] — received {tensor.dtype} {list(tensor.shape)} — convert them"
        )
    return tensor.detach().cpu().contiguous()


def _dense(grad: Tensor) -> Tensor:
    """A gradient as float32 rows on the host; rows may lie apart, lanes may not."""
    if grad.dtype != torch.float32 or not grad.is_cpu or grad.requires_grad:
        grad = grad.detach().to("cpu", torch.float32)
    return grad if grad.dim() == 2 and grad.stride(1) == 1 and grad.stride(0) >= grad.shape[1] else grad.contiguous()
