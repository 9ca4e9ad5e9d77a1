# SPDX-License-Identifier: Apache-2.0
"""TableRows: the parameter that stands for tables in torch; other optimizers may not step it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hotbed.embedding.native import unpicklable
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError, RowShapeError

_NO_WRITES = {"detach_", "share_memory_"}
"""Functions with the name of a write that change no value."""
_WRITES = {"__iadd__", "__imul__", "__isub__", "__itruediv__", "__setitem__"}
"""Operators that write."""

_SHARDING = tuple(
    f"torchrec.distributed.{name}" for name in ("embedding", "model_parallel", "planner")
)
"""The beginnings of the modules of TorchRec that shard a model."""


class StepsTables:
    """Base of the optimizers that may hold `TableRows`."""


class RowsData(Tensor):
    """The `data` of a TableRows: empty, so that a write, such as an average, would change nothing.

    `rows`: the parameter.
    """

    rows: TableRows

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = _target(args, kwargs)
        if _writes(func) and isinstance(target, RowsData):
            raise _written(func, target.rows)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class TableRows(nn.Parameter):
    """The parameter of tables that share dim and rule; the tables hold the rows, it holds none.

    `grad`: after a backward pass the summed gradients of the batch's distinct ids, float32
    [num unique ids, dim], so that gradient clipping and GradScaler work; its shape changes with
    every batch. `requires_grad` is that of the tables: setting it freezes them, see `Table.frozen`.

    Attributes:
        arrive: waits for gradients that are on their way from a device; None = none are.
        arrived: the gradient without them.
    """

    tables: tuple[Table, ...]
    arrive: Callable[[], None] | None
    arrived: Tensor | None

    def __new__(cls, tables: Sequence[Table]) -> TableRows:
        rows: TableRows = super().__new__(
            cls, torch.empty(0, tables[0].dim, dtype=torch.float32, device="cpu")
        )
        rows.tables = tuple(tables)
        rows.arrive = None
        rows.arrived = None
        return rows

    @property
    def grad(self) -> Tensor | None:
        if self.arrive is not None:
            self.arrive()
        return self.arrived

    @grad.setter
    def grad(self, sums: Tensor | None) -> None:
        dim = self.tables[0].dim
        if sums is not None and (sums.dim() != 2 or sums.shape[1] != dim):
            raise RowShapeError(
                f"{self!r}: expected a gradient of shape [unique ids, {dim}], "
                f"got {list(sums.shape)}. Keep the shape that backward left."
            )
        if self.arrive is not None:
            self.arrive()
        self.arrived = sums

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            data = self.detach().as_subclass(RowsData)
        data.rows = self
        return data

    @data.setter
    def data(self, values: Tensor) -> None:
        if not isinstance(values, RowsData):  # what was read here may be put back
            raise _written("data", self)

    @property
    def requires_grad(self) -> bool:
        return not all(table.frozen for table in self.tables)

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        for table in self.tables:
            table.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> TableRows:
        """Freeze the tables (False), or let them learn again (True); return this parameter."""
        self.requires_grad = requires_grad
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch; reject one whose result would have a gradient, or that writes.

        This parameter is empty: a penalty over all parameters would leave the rows out, and so
        would an initialization or an average of all parameters.
        """
        if _writes(func):
            raise _written(func, _target(args, kwargs))
        if _is_of_sharding(sys._getframe(1)):
            raise _sharded(_target(args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        is_read = isinstance(result, Tensor) and result.grad_fn is not None
        if is_read and func is not Tensor.clone:  # a copy is not a penalty yet
            every = [*args, *(kwargs or {}).values()]
            flat = [
                item for value in every for item in (value if isinstance(value, list) else [value])
            ]
            rows = next((item for item in flat if isinstance(item, TableRows)), "rows of tables")
            raise ConfigError(
                f"{getattr(func, '__name__', func)}: a loss cannot read the rows of a table as a "
                f"parameter, got {rows!r}. Penalize rows by weight_decay, or by l1 and l2 of their "
                "rule; leave them out with hb.dense_parameters(model)."
            )
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> TableRows:
        copied = TableRows([copy.deepcopy(table, memo) for table in self.tables])
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise unpicklable(*(table.name for table in self.tables))

    def __repr__(self) -> str:  # type: ignore[override]  # as nn.Parameter's
        sizes = []
        for table in self.tables:
            num_rows = table.stats["rows"]
            sizes.append(f"{table.name!r}: {num_rows:,} rows")
        tables = ", ".join(sizes)
        dim = self.tables[0].dim
        return f"TableRows({tables}, dim={dim}, requires_grad={self.requires_grad})"


def _writes(func: Any) -> bool:
    """Return whether a function of torch writes to its first argument."""
    name = getattr(func, "__name__", "")
    if name in _WRITES:
        return True
    return name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES


def _target(args: Any, kwargs: Any) -> Any:
    """Return the first argument of a function, by place or by name."""
    return next(iter([*args, *(kwargs or {}).values()]), None)


def shared_out(wrapper: str, part: str = "", taker: str = "RecModel") -> ConfigError:
    """Return the error of a network that a wrapper of torch shares out.

    Args:
        wrapper: its name.
        part: the path of the module within; "" = all of the network.
        taker: what takes the network.
    """
    place = f"its part {part!r}" if part else "all of it"
    return ConfigError(
        f"network: {wrapper} shares out dense parameters alone, not rows of tables, got it around "
        f"{place}. Give {taker} the network as it is, and RecModel or hb.shard grains, such as 8; "
        "start the program by torchrun: see docs/ranks.md."
    )


def _written(func: Any, rows: Any) -> ConfigError:
    if _is_in_fsdp():
        return shared_out("FullyShardedDataParallel")
    name = getattr(func, "__name__", func)
    return ConfigError(
        f"{name}: rows of a table cannot be written through their parameter, got {rows!r}. Write "
        "them with Table.load, or leave them out with hb.dense_parameters(model)."
    )


def _is_in_fsdp() -> bool:
    """Return whether torch's FSDP has called this: it moves each parameter before it is known."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.fsdp"):
            return True
        frame = frame.f_back
    return False


def check_not_sharded(rows: object) -> None:
    """Raise ConfigError if TorchRec's planner or a sharder has called this, for these rows."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_of_sharding(frame):
            raise _sharded(rows)
        frame = frame.f_back


def _sharded(rows: object) -> ConfigError:
    return ConfigError(
        f"DistributedModelParallel: TorchRec cannot shard rows of a table, got {rows!r}. Leave it "
        "and its planner out, and spread rows with hb.shard: see docs/migrate/torchrec.md."
    )


def _is_of_sharding(frame: FrameType) -> bool:
    """Return whether a frame is one of TorchRec's planner or sharders."""
    return bool(frame.f_globals.get("__name__", "").startswith(_SHARDING))


def _refuse_rows(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Reject the step of an optimizer that would write rows: the rules of tables step them."""
    if isinstance(optimizer, StepsTables):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # isinstance() of a Parameter is slow, and this runs at each step of any optimizer
            if issubclass(type(parameter), TableRows) and parameter.grad is not None:
                name = type(optimizer).__name__
                raise ConfigError(
                    f"{name}: it cannot step rows of tables, got {parameter!r}. Give it "
                    "hb.dense_parameters(model), and step tables with hb.SparseOptimizer(model)."
                )


register_optimizer_step_pre_hook(_refuse_rows)
