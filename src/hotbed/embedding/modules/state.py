# SPDX-License-Identifier: Apache-2.0
"""How torch saves, loads, moves and copies a module with tables.

In a `state_dict` a table is a dict of tensors and plain values, which `torch.load` reads with
weights_only=True: the columns of `Table.export` and `candidates`, and `scalars`. Checkpoints do not
use it: they stream rows to files. `rule` names the class whose optimizer state the rows have.
"""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from hotbed import config
from hotbed.embedding.dates import check_clock
from hotbed.embedding.native import unpicklable
from hotbed.embedding.snapshot import COLUMN_TYPES
from hotbed.embedding.table import Table
from hotbed.errors import PersistError, RowShapeError

from .parameter import TableRows, check_not_sharded
from .transforms import transformed

EXTRA = "_extra_state"
"""The key under which torch stores state that is neither a parameter nor a buffer."""
ADVICE = "Load the state_dict of a module with the same tables."


class DenseState(OrderedDict[str, Any]):
    """A destination for `module.state_dict(destination=…)` that leaves out the rows of tables."""


class CarriedTables(dict[str, Any]):
    """The tables of a module in a `state_dict`: copied and moved as the tensors beside them.

    Loops that keep their best weights call `value.cpu().clone()` for each value of a `state_dict`.
    It is pickled as a plain mapping, which `torch.load` reads with weights_only=True.
    """

    def clone(self) -> CarriedTables:
        return copy.deepcopy(self)

    def detach(self) -> CarriedTables:
        return self

    def cpu(self) -> CarriedTables:
        return self

    def to(
        self,
        *args: Any,
        device: Any = None,
        dtype: Any = None,
        non_blocking: bool = False,
        copy: bool = False,
        memory_format: Any = None,
    ) -> CarriedTables:
        """Return this state: rows of a `state_dict` lie in the memory of the CPU."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CarriedTables:
        return CarriedTables(copy.deepcopy(dict(self), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())


class Carrier(nn.Module, ABC):
    """A module over `tables`: how torch saves, loads, moves and copies it.

    `state_dict_limit`: the most bytes of rows that `state_dict()` takes from a module; above it,
    `state_dict()` raises PersistError.
    """

    tables: list[Table]
    state_dict_limit = 2**30
    _device: Tensor

    @abstractmethod
    def _begin(self) -> None:
        """Set the parameters and the number that each module, also a copy, has of its own."""

    @abstractmethod
    def share_gradients(self, owner: Any) -> None:
        """Take the parameters and the waiting gradients of a module over the same tables."""

    def get_extra_state(self) -> dict[str, Any]:
        """Return ids, rows, optimizer and policy state of each table by name, for `state_dict`.

        Raises PersistError above `state_dict_limit` bytes, and where the rows of several ranks are
        wanted of one.
        """
        spread = [table.name for table in self.tables if table.is_spread]
        if spread:
            raise PersistError(
                f"state_dict: several ranks hold the rows of a table, got tables {spread}. Save "
                "with RecModel.save, or with hb.checkpoints.save in a loop of hb.shard."
            )
        size = sum(state_bytes(table) for table in self.tables)
        if size > self.state_dict_limit:
            raise PersistError(
                f"state_dict: the rows of tables {[table.name for table in self.tables]} may take "
                f"{self.state_dict_limit:,} bytes, got about {size:,}. Save with RecModel.save, "
                "which streams rows to files, or raise the module's state_dict_limit."
            )
        return CarriedTables(tables={table.name: table_state(table) for table in self.tables})

    def set_extra_state(self, state: Any) -> None:
        """Replace the contents of the tables by a state from `get_extra_state`.

        A frozen table stays frozen. Raises PersistError or RowShapeError for a state of other
        tables, before anything changes.
        """
        names = {table.name for table in self.tables}
        states = None
        if isinstance(state, Mapping):
            states = state.get("tables")
        if not isinstance(states, Mapping) or set(states) != names:
            received: Any = type(state).__name__
            if isinstance(states, Mapping):
                received = sorted(states)
            raise PersistError(
                f"state_dict: expected tables {sorted(names)}, got {received}. {ADVICE}"
            )
        for table in self.tables:
            check_state(table, states[table.name])
        for table in self.tables:
            load_state(table, states[table.name])

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        if torch.onnx.is_in_onnx_export():  # torch's own exporter; that of Hotbed takes no rows
            raise transformed(self.tables, "torch.onnx.export")
        check_not_sharded(self)
        for name, value in (*self._parameters.items(), *self._buffers.items()):
            if value is None or name in self._non_persistent_buffers_set:
                continue
            if not isinstance(value, TableRows):
                destination[prefix + name] = value if keep_vars else value.detach()
        if isinstance(destination, DenseState):
            return
        carried = []
        for key, value in destination.items():
            if key.endswith(EXTRA) and "tables" in value:
                carried.append(value["tables"])
        tables = self.get_extra_state()["tables"]
        for name, state in tables.items():
            others = [tables_of[name] for tables_of in carried if name in tables_of]
            tables[name] = shared(state, others)
        destination[prefix + EXTRA] = CarriedTables(tables=tables)

    def _load_from_state_dict(self, *args: Any) -> None:
        with self.rows_aside():
            super()._load_from_state_dict(*args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Carrier:
        dtype = self._device.dtype
        with self.rows_aside():
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types
        if self._device.dtype != dtype:
            warnings.warn(
                f"embedding: rows stay float32, got a conversion to {self._device.dtype}. Convert "
                "what the module returns, or use torch.autocast.",
                stacklevel=3,
            )
            self._device = self._device.to(dtype)
        return self

    @contextmanager
    def rows_aside(self) -> Iterator[None]:
        """Hide the parameters of tables: they are not moved, converted or exported."""
        others = self._parameters
        rows = {}
        for name, value in list(others.items()):
            if isinstance(value, TableRows):
                rows[name] = others.pop(name)
        try:
            yield
        finally:
            self._parameters = {**rows, **others}

    def __deepcopy__(self, memo: dict[int, Any]) -> Carrier:
        """Return a module over copies of the tables; modules sharing a table share its copy."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        begun = ("gradients", "anchor", "tickets", "number", "_parameters")
        for name, value in self.__dict__.items():
            if name not in begun:
                copied.__dict__[name] = copy.deepcopy(value, memo)
        copied._parameters = {}
        copied._begin()
        owner = memo.setdefault(id(self.gradients), copied)
        if owner is not copied:
            copied.share_gradients(owner)
        for name, value in self._parameters.items():
            if isinstance(value, TableRows):
                memo[id(value)] = copied._parameters[name]
            else:
                copied._parameters[name] = copy.deepcopy(value, memo)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        raise unpicklable(*(table.name for table in self.tables))


def dense_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of `module.state_dict()` without the rows of tables."""
    state = module.state_dict(destination=DenseState())
    return {name: value for name, value in state.items() if torch.is_tensor(value)}


def device_of(network: nn.Module) -> torch.device:
    """Return the device of a network's dense part: the first that is not the CPU, else the CPU."""
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.device.type != "cpu":
            return tensor.device
    return torch.device("cpu")


def state_bytes(table: Table) -> int:
    """Return about how many bytes `table_state` takes."""
    stats = table.stats
    row_bytes = 8 + int(table.native.row_bytes)
    return int(stats["rows"]) * row_bytes + int(stats["candidate_bytes"])


def table_state(table: Table) -> dict[str, Any]:
    """Return the rows, candidates and scalars of a table, but not whether it is frozen."""
    scalars = {name: value for name, value in table.scalars().items() if name != "frozen"}
    return {
        "rows": _tensors(batch.drop_columns(["partition"]) for batch in table.export()),
        "candidates": _tensors(table.candidates()),
        "sketch": _tensors(table.sketch()),
        "scalars": scalars,
        "rule": config.kind_of(type(table.rule)),
    }


def check_state(table: Table, state: Any) -> None:
    """Raise PersistError or RowShapeError if `load_state` would fail. Change nothing."""
    where = f"table {table.name!r}"
    parts = {"rows", "candidates", "scalars", "rule"}
    if not isinstance(state, Mapping) or not parts <= set(state):
        received = type(state).__name__
        raise PersistError(
            f"{where}: expected rows, candidates, scalars and a rule, got {received}. {ADVICE}"
        )
    rule = config.kind_of(type(table.rule))
    if state["rule"] != rule:
        raise PersistError(
            f"{where}: expected the optimizer state of rule {rule!r}, got {state['rule']!r}. "
            "Build the table with the rule that it had when it was saved."
        )
    check_clock(table, state["scalars"])
    rows = state["rows"]
    widths = {"value": table.dim, "state": table.state_width}
    for name, width in widths.items():
        shape = list(rows[name].shape[1:]) if name in rows else [0]
        if shape != [width]:
            raise RowShapeError(
                f"{where}: expected {width} floats of {name} a row, got {shape}. "
                "Build the table with the same dim and the same rule, as it was when it was saved."
            )


def load_state(table: Table, state: Mapping[str, Any]) -> None:
    """Replace the contents of a table by a state from `table_state`."""
    check_state(table, state)
    table.clear()
    rows = dict(state["rows"])
    lists = {name: _lists(rows.pop(name)) for name in ("value", "state") if name in rows}
    table.load([pa.record_batch({**_columns(rows), **lists})])
    table.load_candidates(_by_partition(state["candidates"]))
    sketch = dict(state.get("sketch", {}))  # absent in states of earlier versions
    if sketch:
        cells = _lists(sketch.pop("cells"))
        table.load_sketch([pa.record_batch({**_columns(sketch), "cells": cells})])
    table.load_scalars(state["scalars"])


def shared(state: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return `state`, or the first of `others` that equals it: one table is carried once."""
    for other in others:
        if _equal(state, other):
            return other
    return state


def _equal(state: Any, other: Any) -> bool:
    if torch.is_tensor(state):
        if not torch.is_tensor(other) or state.dtype != other.dtype:
            return False
        return torch.equal(state, other)
    if not isinstance(state, Mapping):
        return bool(state == other)
    if not isinstance(other, Mapping) or set(state) != set(other):
        return False
    return all(_equal(value, other[name]) for name, value in state.items())


def _tensors(batches: Iterable[pa.RecordBatch]) -> dict[str, Tensor]:
    """Return columns as tensors: float lists as [n, width], uint32 as int64 for older torch."""
    parts = list(batches)
    if not parts:
        return {}
    tensors = {}
    for field in parts[0].schema:
        columns = [part.column(field.name) for part in parts]
        width = field.type.list_size if pa.types.is_fixed_size_list(field.type) else 0
        if width:
            columns = [column.flatten() for column in columns]
        values = np.concatenate([column.to_numpy() for column in columns])
        if values.dtype == np.uint32:
            values = values.astype(np.int64)
        if width:
            values = values.reshape(-1, width)
        tensors[field.name] = torch.from_numpy(values)
    return tensors


def _lists(values: Tensor) -> pa.Array:
    numbers = values.cpu().contiguous().numpy()
    flat = pa.array(numbers.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _columns(tensors: Mapping[str, Tensor]) -> dict[str, pa.Array]:
    columns = {}
    for name, tensor in tensors.items():
        kind = COLUMN_TYPES.get(name, pa.int64())
        columns[name] = pa.array(tensor.cpu().numpy()).cast(kind)
    return columns


def _by_partition(candidates: Mapping[str, Tensor]) -> Iterator[pa.RecordBatch]:
    """Yield the candidates as batches, one a partition."""
    if not candidates:
        return
    batch = pa.record_batch(_columns(candidates))
    numbers = batch.column("partition").to_numpy()
    for number in np.unique(numbers):
        yield batch.filter(pa.array(numbers == number))
