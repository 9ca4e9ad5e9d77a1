# SPDX-License-Identifier: Apache-2.0
"""Gradients of a lookup: those of rows, which wait for an update, and those of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotbed.data.batch import Ids
from hotbed.embedding.table import Step, Table
from hotbed.errors import NonFiniteGradient

from .inputs import Buckets, int64
from .parameter import TableRows


@dataclass(frozen=True)
class Group:
    """Tables of one dim and rule, whose gradients share one parameter.

    `tables`: their numbers in the module.
    """

    dim: int
    tables: tuple[int, ...]


@dataclass(frozen=True)
class Pending:
    """Gradients that wait for an update.

    Attributes:
        step: the distinct ids of each table.
        grads: their sums, a tensor a group.
        addresses: of each table, the address of its first sum.
        versions: those of the tensors when the sums were made.
        finite: whether the sums were finite then.
    """

    step: Step
    grads: list[Tensor]
    addresses: list[int]
    versions: list[int]
    finite: bool

    def known_finite(self, grads: Sequence[Tensor]) -> bool:
        """Return True when the sums were finite and nothing has changed them since."""
        return self.finite and self.unchanged(grads)

    def unchanged(self, grads: Sequence[Tensor]) -> bool:
        """Return True when these are the tensors that backward left, with the same values."""
        return self.holds(grads) and self.versions == [grad._version for grad in grads]

    def holds(self, grads: Sequence[Tensor]) -> bool:
        """Return True when these are the tensors that backward left, whatever their values are."""
        return all(grad is own for grad, own in zip(grads, self.grads, strict=True))


@dataclass(frozen=True)
class Sums:
    """Gradients summed by id, with the learning rates of the step that applies them.

    Attributes:
        tables: the tables that are updated.
        step: the distinct ids of each table.
        arrays: hold the sums; they must live until `apply` has read them.
        addresses: of each table, the address of its first sum; a table with None is left alone.
        rates: of each table, its learning rate.
    """

    tables: Sequence[Table]
    step: Step
    arrays: list[Any]
    addresses: list[int | None]
    rates: list[float]

    def apply(self) -> None:
        """Apply one step of each table's rule to its rows that have a sum."""
        self.step.apply(self.addresses, self.rates)

    @staticmethod
    def merge(parts: Sequence[Sums]) -> Sums:
        """Return the sums of all parts, each table once."""
        steps = [part.step for part in parts]
        step, arrays = Step.merge(steps, [part.addresses for part in parts])
        rates: dict[Table, float] = {}  # in the order of merge: as the tables come first
        for part in parts:
            for table, rate, address in zip(part.tables, part.rates, part.addresses, strict=True):
                if address is not None:
                    rates[table] = rate
        addresses: list[int | None] = [array.__array_interface__["data"][0] for array in arrays]
        return Sums(list(rates), step, arrays, addresses, list(rates.values()))


class RowGradients:
    """The gradients of a module's rows, from a backward pass until an update.

    They are summed by id and lie in `.grad` of the parameter of each group, where clipping and
    GradScaler find them. `zero_grad()` drops them by setting `.grad` to None. If it sets them to
    zero instead, a step without ids waits.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        groups: Sequence[Group],
        parameters: Sequence[TableRows],
        buckets: Buckets,
    ) -> None:
        self._buckets = buckets
        self._tables = tables
        self._groups = groups
        self._parameters = parameters
        self._pending: Pending | None = None

    def add(self, step: Step, rows: list[tuple[int, int]]) -> None:
        """Sum the gradients of a lookup's results by id, and add them to those that wait.

        Args:
            step: the plan of the lookup.
            rows: of each feature, the address and the stride of its gradient.
        """
        uniques = step.num_uniques()
        grads = []
        for group in self._groups:
            num_uniques = sum(uniques[table] for table in group.tables)
            num_rows = self._num_rows(group, num_uniques)
            grad = torch.empty(num_rows, group.dim, dtype=torch.float32, device="cpu")
            if num_rows > num_uniques:
                grad[num_uniques:] = 0.0
            grads.append(grad)
        addresses = self._addresses(uniques, grads)
        finite = step.sum_gradients(rows, addresses)
        earlier = self._waiting()
        if self._pending is not None and any(self._pending.step.num_uniques()):
            step, grads = self._merge(self._pending.step, earlier, step, grads)
            addresses = self._addresses(step.num_uniques(), grads)
            # sums of finite sums may overflow: they must be checked again
            finite = False
        self._wait(step, grads, addresses, finite=finite)

    def check_finite(self) -> None:
        """Raise NonFiniteGradient, naming table and id, if a waiting gradient is not finite."""
        grads = self._waiting()
        if self._pending is None or self._pending.known_finite(grads):
            return
        step = self._pending.step
        addresses = self._addresses(step.num_uniques(), grads)
        for number, table in enumerate(self._tables):
            bad = step.find_nonfinite(number, addresses[number])
            if bad is not None:
                raise NonFiniteGradient(
                    f"table {table.name!r}: the gradient of id {bad} is not finite; nothing "
                    "was updated. Look at the loss.",
                    table.name,
                    bad,
                )

    def take(self, rates: Sequence[float], *, keeps: bool = False) -> Sums | None:
        """Return the gradients that wait, None if there are none.

        Args:
            rates: the learning rate of each group.
            keeps: whether they wait on; else none wait afterwards.
        """
        grads = self._waiting()
        pending = self._pending
        if pending is None:
            return None
        if not keeps:
            self._pending = None
        addresses = pending.addresses
        if not pending.holds(grads):
            addresses = self._addresses(pending.step.num_uniques(), grads)
        rate_of = [0.0] * len(self._tables)
        for group, rate in zip(self._groups, rates, strict=True):
            for number in group.tables:
                rate_of[number] = rate
        return Sums(self._tables, pending.step, grads, [*addresses], rate_of)

    def drop(self) -> None:
        """Drop the gradients that wait."""
        self._pending = None
        for parameter in self._parameters:
            parameter.grad = None

    def clear(self) -> None:
        """Set the gradients that wait to zero: their ids are forgotten, a step without ids waits.

        A gradient of zero moves a row as no gradient does, except where a rule with momentum moves
        only the rows that have one. There torch forgets the ids of a sparse gradient, too.
        """
        if self._pending is None:
            return
        step = Step([table.native for table in self._tables], [])
        step.map([], 0, training=False)
        grads = [
            torch.zeros(self._num_rows(group, 0), group.dim, dtype=torch.float32, device="cpu")
            for group in self._groups
        ]
        self._wait(step, grads, self._addresses(step.num_uniques(), grads), finite=True)

    def _wait(self, step: Step, grads: list[Tensor], addresses: list[int], *, finite: bool) -> None:
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.grad = grad
        versions = [grad._version for grad in grads]
        self._pending = Pending(step, grads, addresses, versions, finite)

    def _waiting(self) -> list[Tensor]:
        """Return the gradients of each group that wait, as they are now; [] for none."""
        pending = self._pending
        if pending is None:
            return []
        grads = [parameter.grad for parameter in self._parameters]
        if any(grad is None for grad in grads):
            self._pending = None
            return []
        rows = [grad.contiguous() for grad in grads if grad is not None]
        if not pending.unchanged(rows) and not any(_has_value(grad) for grad in rows):
            self.clear()  # by nn.Module.zero_grad(set_to_none=False), which knows no tables
            rows = [] if self._pending is None else list(self._pending.grads)
        return rows

    def _addresses(self, uniques: Sequence[int], grads: Sequence[Tensor]) -> list[int]:
        """Return the address of each table's first sum in the groups' tensors.

        Args:
            uniques: the number of distinct ids of each table.
            grads: the tensor of each group.
        """
        addresses = [0] * len(self._tables)
        for group, grad in zip(self._groups, grads, strict=True):
            address = grad.data_ptr()
            for table in group.tables:
                addresses[table] = address
                address += 4 * group.dim * uniques[table]
        return addresses

    def _merge(
        self, earlier: Step, earlier_grads: Sequence[Tensor], step: Step, grads: Sequence[Tensor]
    ) -> tuple[Step, list[Tensor]]:
        """Add the gradients of a micro-batch to those that wait already."""
        rows = [dense_rows(grad) for grad in earlier_grads]
        addresses = [
            self._addresses(earlier.num_uniques(), rows),
            self._addresses(step.num_uniques(), grads),
        ]
        merged, sums = Step.merge([earlier, step], addresses)
        merged_grads = []
        for group in self._groups:
            parts = [torch.from_numpy(sums[table]).view(-1, group.dim) for table in group.tables]
            num_uniques = sum(len(part) for part in parts)
            num_zeros = self._num_rows(group, num_uniques) - num_uniques
            if num_zeros:
                parts.append(torch.zeros(num_zeros, group.dim, dtype=torch.float32, device="cpu"))
            if len(parts) > 1:
                parts = [torch.cat(parts)]
            merged_grads.append(parts[0])
        return merged, merged_grads

    def _num_rows(self, group: Group, num_uniques: int) -> int:
        """Return the rows of a group's gradient, those of its buckets included."""
        names = ", ".join(repr(self._tables[table].name) for table in group.tables)
        return self._buckets.size_for(num_uniques, f"table {names}: distinct ids")


@dataclass(frozen=True)
class Weighted:
    """The values that the gradient of weights needs.

    `rows`: the row of each id [m, dim]; `results`: the number of the result to which it was added
    [m]; `shares`: its share of that result [m].
    """

    rows: Tensor
    results: Tensor
    shares: Tensor
    device: torch.device

    @staticmethod
    def of(table: Table, feature: str, pooling: str, ids: Ids) -> Weighted:
        rows = torch.from_numpy(table.lookup(int64(ids.values, feature).numpy()))
        results = torch.arange(len(rows), device="cpu")
        shares = torch.ones(len(rows), dtype=torch.float32, device="cpu")
        if pooling != "none" and ids.offsets is not None:
            lengths = int64(ids.offsets, feature).diff()
            results = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), lengths)
            if pooling == "mean":
                shares = 1.0 / lengths[results].float()
        return Weighted(rows, results, shares, ids.weights.device)

    def gradient(self, grad: Tensor) -> Tensor:
        """Return the gradient of the weights [m] from `grad`, that of the results [n, dim]."""
        each = (self.rows * grad.detach().to("cpu", torch.float32)[self.results]).sum(1)
        return (each * self.shares).to(self.device)


def _has_value(grad: Tensor) -> bool:
    """Return whether a gradient is not zero; the first row mostly tells."""
    return bool(grad[:1].any()) or bool(grad.any())


def takes_gradient(weights: Any) -> bool:
    return isinstance(weights, Tensor) and weights.requires_grad and torch.is_grad_enabled()


def dense_rows(grad: Tensor) -> Tensor:
    """Return a gradient as float32 rows on the host; rows may lie apart, lanes may not."""
    if grad.dtype != torch.float32 or not grad.is_cpu or grad.requires_grad:
        grad = grad.detach().to("cpu", torch.float32)
    if grad.dim() == 2:
        between_rows, between_lanes = grad.stride()
        if between_lanes == 1 and between_rows >= grad.shape[1]:
            return grad
    return grad.contiguous()
