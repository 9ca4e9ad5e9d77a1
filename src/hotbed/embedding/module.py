# SPDX-License-Identifier: Apache-2.0
"""Tables as torch modules: lookups that autograd, torch.compile and plain PyTorch loops understand.

Each module holds one parameter, a `TableRows`, for each group of tables (tables of one dim and
rule). After a backward pass its `.grad` holds the summed gradients of the batch's distinct ids,
[num unique ids, dim], so gradient clipping and GradScaler work as on any parameter; its shape
changes with every batch. `hb.SparseOptimizer` takes these parameters, `hb.dense_parameters` all
others.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hotbed.data.batch import Ids
from hotbed.errors import ConfigError, RowShapeError

from .gradients import Pending, Weighted, dense_rows, float32, int64, takes_gradient
from .opaque import alive, pool_opaque
from .parameter import TableRows
from .state import Carrier
from .table import POOLINGS, Step, Table

if TYPE_CHECKING:
    from hotbed.data.schema import Schema


@dataclass(frozen=True)
class Feature:
    """A feature of a collection: `name` in the batch, the `table` that holds its ids, and its
    `pooling`.
    """

    name: str
    table: str
    pooling: str = "sum"


@dataclass(frozen=True)
class Group:
    """Tables of one dim and rule, whose gradients share one parameter. `tables`: their numbers in
    the module.
    """

    dim: int
    tables: tuple[int, ...]


class TableModule(Carrier, ABC):
    """Base of Embedding, EmbeddingBag and EmbeddingCollection: many features over many tables in
    one
        native call.

    `state_dict_limit`: bytes of rows up to which `state_dict()` carries those of a module; beyond
    it raises PersistError.
    """

    def __init__(self, tables: Sequence[Table], features: Sequence[Feature]) -> None:
        super().__init__()
        self.tables = list(tables)
        self.features = tuple(features)
        numbers = {table.name: number for number, table in enumerate(self.tables)}
        if len(numbers) != len(self.tables):
            raise ConfigError(
                f"embedding: table names must differ — received {[t.name for t in self.tables]} — "
                "rename one"
            )
        for feature in self.features:
            if feature.pooling not in POOLINGS:
                raise ConfigError(
                    f"feature {feature.name!r}: unknown pooling — received {feature.pooling!r} — "
                    f"use one of {', '.join(POOLINGS)}"
                )
            if feature.table not in numbers:
                raise ConfigError(
                    f"feature {feature.name!r}: no table {feature.table!r} — received "
                    f"{sorted(numbers)} — give that table"
                )
        self._table_of = [numbers[feature.table] for feature in self.features]
        self._layout = [
            (table, POOLINGS.index(f.pooling))
            for table, f in zip(self._table_of, self.features, strict=True)
        ]
        self._timed = any(table.needs_times or table.keeps_times for table in self.tables)
        self.dims = [self.tables[table].dim for table in self._table_of]
        self.pooled = [feature.pooling != "none" for feature in self.features]
        self.output_dim = sum(
            dim for dim, pooled in zip(self.dims, self.pooled, strict=True) if pooled
        )
        self.groups = _group(self.tables)
        # follows .to(device); results go there
        self.register_buffer("_device", torch.empty(0), persistent=False)
        self._begin()

    def _begin(self) -> None:
        """What each module has for itself, a copy too."""
        for number, group in enumerate(self.groups):
            self.register_parameter(
                f"rows_{number}", TableRows([self.tables[table] for table in group.tables])
            )
        self.pending: Pending | None = None
        # ties the lookup into autograd; takes no gradient itself
        self.anchor = torch.zeros((), requires_grad=True)
        self.number = id(self)  # under which torch.compile's operators find this module
        alive[self.number] = self

    @property
    def rows(self) -> list[TableRows]:
        """The parameter of each group."""
        return [self._parameters[f"rows_{number}"] for number in range(len(self.groups))]  # type: ignore[misc]

    @property
    def learns(self) -> bool:
        """Whether a table is not frozen."""
        return not all(table.frozen for table in self.tables)

    def extra_repr(self) -> str:
        lines = []
        for feature, number in zip(self.features, self._table_of, strict=True):
            pooling = "" if feature.pooling == "none" else f"{feature.pooling} of "
            lines.append(f"{feature.name}: {pooling}{self.tables[number]}")
        return "\n".join(lines)

    def pool(self, inputs: Sequence[Ids], time: Any = None) -> tuple[Tensor, list[Tensor]]:
        """All features at once: pooled ones side by side [n, output_dim], and the rows [m, dim] of
        each sequence feature.
        """
        weights = [one.weights if takes_gradient(one.weights) else None for one in inputs]
        weighted = any(one is not None for one in weights)
        if torch.compiler.is_compiling():
            return (
                _pool_eagerly(self, inputs, time) if weighted else pool_opaque(self, inputs, time)
            )
        if torch.is_grad_enabled() and (weighted or self.learns):
            anchor = self.anchor if self.learns else self.anchor.detach()
            flat, *sequences = _Pool.apply(anchor, self, inputs, time, *weights)  # type: ignore[no-untyped-call]
            return flat, sequences
        flat, sequences, _ = self.look_up(inputs, time, training=self.training, keeps=False)
        return flat, sequences

    def look_up(
        self, inputs: Sequence[Ids], time: Any, *, training: bool, keeps: bool
    ) -> tuple[Tensor, list[Tensor], Step]:
        """The native lookup: maps ids (in training inserts, counts and touches) and pools rows;
        `keeps`: a backward comes.
        """
        num_samples = -1
        held = []
        ids = []
        for feature, one in zip(self.features, inputs, strict=True):
            values = int64(one.values, feature.name)
            offsets = None if one.offsets is None else int64(one.offsets, feature.name)
            weights = None if one.weights is None else float32(one.weights, feature.name)
            samples = len(values) if offsets is None else len(offsets) - 1
            num_samples = samples if num_samples < 0 else num_samples
            _check_samples(feature, samples, num_samples, values, weights)
            held.append((values, offsets, weights))
            starts = 0 if offsets is None else offsets.data_ptr()
            ids.append(
                (
                    values.data_ptr(),
                    len(values),
                    starts,
                    0 if weights is None else weights.data_ptr(),
                    samples,
                )
            )
        num_samples = max(num_samples, 0)
        times = self._times(time, num_samples) if training else None
        flat = torch.empty(num_samples, self.output_dim)
        base = flat.data_ptr()
        at = 0
        out = []
        sequences = []
        for dim, pooled, (values, _, _) in zip(self.dims, self.pooled, held, strict=True):
            if pooled:
                out.append((base + 4 * at, self.output_dim))
                at += dim
            else:
                sequences.append(torch.empty(len(values), dim))
                out.append((sequences[-1].data_ptr(), dim))
        step = Step(self._natives(), self._layout)
        try:
            step.lookup(ids, 0 if times is None else times.ctypes.data, training, keeps, out)
        except ValueError:
            self._blame_offsets(held)
            raise
        device = self._device.device
        if device.type != "cpu":
            flat = flat.to(device)
            sequences = [rows.to(device) for rows in sequences]
        return flat, sequences, step

    def _blame_offsets(self, held: Sequence[tuple[Tensor, Tensor | None, Tensor | None]]) -> None:
        for feature, (values, offsets, _) in zip(self.features, held, strict=True):
            if offsets is not None and (
                offsets[0] != 0 or offsets[-1] != len(values) or bool((offsets.diff() < 0).any())
            ):
                raise RowShapeError(
                    f"feature {feature.name!r}: offsets start at 0, never fall and end at the "
                    f"number of ids, {len(values)} — "
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
        """Takes the gradients of a lookup's results: sums them an id and leaves them as `.grad` of
        the group parameters.

        Rows of a frozen table get sums of zero, so that they count for nothing when gradients are
        clipped.
        """
        flat = None if flat is None else dense_rows(flat)
        held = [None if grad is None else dense_rows(grad) for grad in sequences]
        rows: list[tuple[int, int]] = []
        at = 0
        rest = iter(held)
        for table, dim, pooled in zip(self._table_of, self.dims, self.pooled, strict=True):
            grad = flat if pooled else next(rest)
            if self.tables[table].frozen:
                grad = None
            rows.append(
                (0, 0)
                if grad is None
                else (
                    grad.data_ptr() + (4 * at if pooled else 0),
                    grad.stride(0) if len(grad) else 0,
                )
            )
            at += dim if pooled else 0
        uniques = step.num_uniques()
        grads = [
            torch.empty(sum(uniques[t] for t in group.tables), group.dim) for group in self.groups
        ]
        addresses = self.addresses(step, grads)
        finite = step.sum_gradients(rows, addresses)
        if self.pending is not None and all(p.grad is not None for p in self.rows):
            step, grads = self._merge(self.pending, step, grads)
            addresses = self.addresses(step, grads)  # sums of finite sums may overflow: look again
            finite = False
        for parameter, grad in zip(self.rows, grads, strict=True):
            parameter.grad = grad
        self.pending = Pending(step, grads, addresses, [grad._version for grad in grads], finite)

    def _natives(self) -> list[Any]:
        return [table.native for table in self.tables]

    def split(
        self, flat: Tensor | None, sequences: Sequence[Tensor | None]
    ) -> Iterator[Tensor | None]:
        """What each feature has of a result, or of its gradient."""
        rest = iter(sequences)
        start = 0
        for dim, pooled in zip(self.dims, self.pooled, strict=True):
            if not pooled:
                yield next(rest)
                continue
            yield None if flat is None else flat[:, start : start + dim]
            start += dim

    def weighted(self, number: int, ids: Ids) -> Weighted:
        """What the gradient of a feature's weights needs."""
        feature = self.features[number]
        return Weighted.of(self.tables[self._table_of[number]], feature.name, feature.pooling, ids)

    def addresses(self, step: Step, grads: Sequence[Tensor]) -> list[int]:
        """Where each table's sums start in the groups' tensors."""
        uniques = step.num_uniques()
        out = [0] * len(self.tables)
        for group, grad in zip(self.groups, grads, strict=True):
            at = grad.data_ptr()
            for table in group.tables:
                out[table] = at
                at += 4 * group.dim * uniques[table]
        return out

    def _merge(
        self, pending: Pending, step: Step, grads: list[Tensor]
    ) -> tuple[Step, list[Tensor]]:
        """Adds a micro-batch to what waits already."""
        earlier = [
            dense_rows(parameter.grad) for parameter in self.rows if parameter.grad is not None
        ]
        both = [self.addresses(pending.step, earlier), self.addresses(step, grads)]
        merged, sums = Step.merge([pending.step, step], both)
        out = []
        for group in self.groups:
            parts = [torch.from_numpy(sums[table]).view(-1, group.dim) for table in group.tables]
            out.append(torch.cat(parts) if len(parts) > 1 else parts[0])
        return merged, out


class Embedding(TableModule):
    """A table as nn.Embedding: ids int64 [...] -> rows [..., dim]; Ids -> rows [m, dim] of all its
    ids (a sequence lookup).

    Example: `hb.Embedding(hb.Table("item", dim=16))(torch.tensor([[7, -1]]))` has shape [1, 2, 16].
    """

    def __init__(self, table: Table) -> None:
        super().__init__([table], [Feature(table.name, table.name, "none")])

    def forward(self, ids: Tensor | Ids, time: Any = None) -> Tensor:
        """`time`: int64 microseconds, one an id (or one a sample of Ids), for tables whose eviction
        needs it.
        """
        if isinstance(ids, Ids):
            return self.pool([ids], time)[1][0]
        return self.pool([Ids(ids.reshape(-1))], time)[1][0].view(*ids.shape, self.tables[0].dim)


class EmbeddingBag(TableModule):
    """A table as nn.EmbeddingBag: bags of ids -> pooled rows [n, dim]; `pooling`: sum, mean or max.
    An empty bag reads as zeros.

    Example: `hb.EmbeddingBag(table, pooling="mean")(values, offsets)` with offsets [n + 1], as
        hb.Ids has them.
    """

    def __init__(self, table: Table, pooling: str = "sum") -> None:
        if pooling == "none":
            raise ConfigError(
                "EmbeddingBag: pooling 'none' is no bag — received 'none' — use hb.Embedding for "
                "sequences"
            )
        super().__init__([table], [Feature(table.name, table.name, pooling)])

    def forward(
        self,
        ids: Tensor | Ids,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
        time: Any = None,
    ) -> Tensor:
        """`ids`: int64 [m] with `offsets` [n + 1], or [n, k] = n bags of k ids, or Ids. `weights`:
        float32 like ids.

        Rows are multiplied by their weights before they are pooled; mean divides by the number of
        ids, not by the sum of weights. Weights that require a gradient get one, as
        nn.EmbeddingBag's per_sample_weights.
        """
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
    """All sparse features of a batch over their tables, in one native call; several features may
    share a table.

    Tables have different names. Weights of ids are as for `EmbeddingBag`.

    `features`: a Schema (its Id columns) or Features. `tables`: by name, or a list.
    `collection(batch)` gives each feature's rows by name: [n, dim] pooled, [m, dim] for pooling
    "none". `collection.flat(batch)`: the pooled ones side by side [n, output_dim]. In train mode
    new ids are inserted, counted and timed (batch.time); in eval mode nothing changes.

    Example: `hb.EmbeddingCollection(schema, hb.make_tables(schema, dim=16))`
    """

    def __init__(
        self, features: Schema | Sequence[Feature], tables: Mapping[str, Table] | Sequence[Table]
    ) -> None:
        if not isinstance(features, Sequence):
            features = [
                Feature(column.name, str(column.table), column.pooling) for column in features.ids
            ]
        wanted = {feature.table for feature in features}
        given = tables.values() if isinstance(tables, Mapping) else tables
        super().__init__(
            [table for table in given if table.name in wanted or not isinstance(tables, Mapping)],
            features,
        )

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Each feature's rows by name. `batch`: a Batch, or a mapping of feature names to Ids or
        int64 tensors [n].
        """
        flat, sequences = self.pool(self._inputs(batch), getattr(batch, "time", None))
        pooled = iter(
            torch.split(
                flat,
                [dim for dim, pooled in zip(self.dims, self.pooled, strict=True) if pooled],
                dim=1,
            )
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
                f"embedding: the batch lacks feature {missing} — received {sorted(ids)} — encode "
                "it with the same schema"
            ) from None
        return [one if isinstance(one, Ids) else Ids(one) for one in found]


def table_modules(model: nn.Module) -> list[TableModule]:
    """The table modules inside a model, each once."""
    return [module for module in model.modules() if isinstance(module, TableModule)]


class _Pool(torch.autograd.Function):
    """`weights`: those of each feature that require a gradient, else None."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        module: TableModule,
        inputs: Sequence[Ids],
        time: Any,
        *weights: Tensor | None,
    ) -> Any:
        flat, sequences, step = module.look_up(inputs, time, training=module.training, keeps=True)
        ctx.module = module
        ctx.step = step
        ctx.weighted = [
            None if weight is None else module.weighted(number, inputs[number])
            for number, weight in enumerate(weights)
        ]
        ctx.set_materialize_grads(False)
        return (flat, *sequences)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        module: TableModule = ctx.module
        if module.learns and any(grad is not None for grad in grads):
            module.receive(ctx.step, grads[0], grads[1:])
        of_weights: list[Tensor | None] = [None] * len(ctx.weighted)
        for number, grad in enumerate(module.split(grads[0], grads[1:])):
            if ctx.weighted[number] is not None and grad is not None:
                of_weights[number] = ctx.weighted[number].gradient(grad)
        return None, None, None, None, *of_weights


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _pool_eagerly(
    module: TableModule, inputs: Sequence[Ids], time: Any
) -> tuple[Tensor, list[Tensor]]:
    return module.pool(inputs, time)


def _group(tables: Sequence[Table]) -> list[Group]:
    numbers: dict[tuple[int, Any], list[int]] = {}
    for number, table in enumerate(tables):
        numbers.setdefault((table.dim, table.rule), []).append(number)
    return [Group(dim, tuple(members)) for (dim, _), members in numbers.items()]


def _check_samples(
    feature: Feature, samples: int, num_samples: int, values: Tensor, weights: Tensor | None
) -> None:
    """Raise RowShapeError where the ids of a feature do not fit the batch, or their weights them."""
    if samples < 0:
        raise RowShapeError(
            f"feature {feature.name!r}: offsets are [samples + 1] — received none — check the batch"
        )
    if samples != num_samples:
        raise RowShapeError(
            f"feature {feature.name!r}: samples differ between features — received "
            f"{samples} beside {num_samples} — check the batch"
        )
    if weights is not None and len(weights) != len(values):
        raise RowShapeError(
            f"feature {feature.name!r}: one weight an id — received {len(weights)} for "
            f"{len(values)} ids — check the batch"
        )
    if weights is not None and feature.pooling == "max":
        raise RowShapeError(
            f"feature {feature.name!r}: max pooling takes no weights — received some — "
            "use sum or mean"
        )
