# SPDX-License-Identifier: Apache-2.0
"""load_plain_state: what a program without Hotbed has saved becomes rows of a converted model."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotbed import checks
from hotbed.embedding.modules.state import DenseState
from hotbed.embedding.rule import Adam
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError, FormatError
from hotbed.optim.combined import CombinedOptimizer
from hotbed.optim.torch_rules import saved_slots

from .lookups import MovedLookup
from .plain_values import PlainValues, SavedTensor, StateDictValues
from .rows import check_rows, fill

SAMPLE = 1000
"""Rows of each table that are read back and compared."""
_MOST_STEPS = 2**53  # above it, saved floats are no longer whole numbers one by one

_BY_NUMBER = re.compile(r"(^|\.)state\.\d+\.\w+$")
"""A key of the state of torch's optimizers, which number their parameters."""
_COLLECTIONS = ("embedding_bags", "embeddings")
"""The attributes of TorchRec's collections that hold embeddings by the names of tables."""


@dataclass(frozen=True)
class LoadedTable:
    """The rows of one table.

    Attributes:
        name: of the table.
        key: of its weight in what was loaded.
        num_rows: number of its rows, with the ids 0, 1, …
        slots: names of the optimizer state that was loaded; empty = the state is that of new rows.
        step: number of updates so far, by which Adam corrects its bias.
    """

    name: str
    key: str
    num_rows: int
    slots: tuple[str, ...]
    step: int


@dataclass(frozen=True)
class LoadedState:
    """What `load_plain_state` has loaded.

    Attributes:
        tables: one each.
        dense: names of the dense parameters and buffers.
        with_state: names of the dense parameters whose optimizer state was loaded.
        unused: keys for which the model has no place, such as the settings of an optimizer.
    """

    tables: tuple[LoadedTable, ...]
    dense: tuple[str, ...]
    with_state: tuple[str, ...]
    unused: tuple[str, ...]


def load_plain_state(
    model: nn.Module, source: Any, optimizer: Any = None, *, steps: int | None = None
) -> LoadedState:
    """Load what a program without Hotbed has saved into a model that `hb.auto` converted.

    Row `i` of each weight becomes the row of id `i`, with the optimizer state that was saved of it.
    The rows that a table has before are removed. Keys are matched by their ends: by the path of a
    module, or by the name of a table of TorchRec. So it does not matter below which keys a program
    has put the states of its model and of its optimizer. Weights are read one after the other.

    Args:
        model: one that `hb.auto` converted, or a model around it.
        source: the folder of a checkpoint that `torch.distributed.checkpoint` wrote on any number
            of ranks, of a model that was sharded or not; or nested dicts of whole tensors, such as
            `{"model": model.state_dict(), "optimizer": optimizer.state_dict()}`, where the state
            of the optimizer has the names of the parameters, as TorchRec's KeyedOptimizer writes.
        optimizer: the optimizer that `hb.auto` returned, or the list of them; None = the state of
            dense parameters stays as it is.
        steps: number of updates so far, for tables with Adam whose saved state does not hold it, as
            that of TorchRec's fused optimizers; None = it must.

    Returns:
        What was loaded, and the keys that have no place.

    Raises:
        ConfigError: a weight or its optimizer state is missing, is there twice, or has another
            shape or type. The message lists all of them.
        FormatError: a file is torn.
        RowShapeError: a row holds a number that is not finite. All of these leave the model as it
            was, because everything is read and checked before the first change.

    Example:
        >>> from hotbed.training.auto import load_plain_state
        >>> model, optimizer, report = hb.auto(model, optimizer)
        >>> load_plain_state(model, "checkpoints/1000", optimizer)
    """
    if steps is not None:
        checks.whole_number("load_plain_state.steps", steps, 0, _MOST_STEPS)
    values = _values_of(source)
    tables = _tables_of(model)
    dense = model.state_dict(destination=DenseState())
    saved = _Saved.of(values, _names(tables, dense))
    loads = [_RowLoad(name, lookup, saved, steps) for name, lookup in tables.items()]
    _check_places(type(model).__name__, loads, dense, saved)
    for load in loads:
        load.check_values()
    for name in dense:
        saved.check_readable(name)
    loaded = tuple(load.run() for load in loads)
    with torch.no_grad():
        for name, tensor in dense.items():
            tensor.copy_(saved.value_of(name))
    with_state = tuple(_load_dense_state(model, optimizer, saved))
    return LoadedState(loaded, tuple(dense), with_state, saved.unused)


def _check_places(
    model: str, loads: Iterable[_RowLoad], dense: Mapping[str, Tensor], saved: _Saved
) -> None:
    """Raise ConfigError, with all reasons, unless each part of a model has its saved values."""
    problems = {}
    for load in loads:
        problem = "; ".join(load.problems())
        if problem:
            problems[load.name] = problem
    for name, tensor in dense.items():
        problem = saved.problem(name, tuple(tensor.shape), tensor.dtype)
        if problem:
            problems[name] = problem
    if problems:
        lines = "".join(f"\n  {name}: {problem}" for name, problem in problems.items())
        raise ConfigError(
            f"load_plain_state: these parts of {model} cannot be loaded, got:{lines}\nNothing was "
            "changed. Give what was saved of the same model."
        )


def _values_of(source: Any) -> PlainValues:
    """Return the values of a folder that `torch.distributed.checkpoint` wrote, or of nested dicts.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(source, Mapping):
        return StateDictValues(source)
    if isinstance(source, (str, os.PathLike)):
        from .folder_values import FolderValues  # its import takes half a second

        return FolderValues(source)
    raise ConfigError(
        "load_plain_state.source: expected a folder of torch.distributed.checkpoint or a "
        f"state_dict, got {type(source).__name__}. Give one of them."
    )


def _tables_of(model: nn.Module) -> dict[str, MovedLookup]:
    """Return the lookups of a model by the names of their weights, one a table.

    Raises:
        ConfigError: there are none, or rows of one have no place in a weight.
    """
    lookups: dict[int, tuple[str, MovedLookup]] = {}
    for path, module in model.named_modules():
        if isinstance(module, MovedLookup):
            lookups.setdefault(id(module.tables[0]), (f"{path}.weight".removeprefix("."), module))
    if not lookups:
        raise ConfigError(
            f"load_plain_state: expected a model that hb.auto converted, got "
            f"{type(model).__name__} without a table of it. Convert it, or load it with torch."
        )
    for module in dict(lookups.values()).values():
        if module.unbounded or module.has_raw_ids:
            reason = "unbounded" if module.unbounded else "managed collisions"
            raise ConfigError(
                "load_plain_state: row i of a weight must be the row of id i, got "
                f"{module.path!r}, whose table has other ids ({reason}). Load the model before "
                "hb.auto."
            )
    return dict(lookups.values())


def _names(tables: Mapping[str, MovedLookup], dense: Iterable[str]) -> dict[str, str]:
    """Return the ends of keys by which a part of the model is found, with the name of the part."""
    parts = [*dense, *tables]
    names = dict(zip(parts, parts, strict=True))
    ends = {weight: tuple(weight.split(".")[-3:]) for weight in tables}
    counts = Counter(ends.values())
    for weight, end in ends.items():
        if end[0] in _COLLECTIONS and counts[end] == 1:
            names.setdefault(".".join(end), weight)
    return names


@dataclass(frozen=True)
class _Saved:
    """What was saved of each part of a model.

    Attributes:
        values: from which parts are read.
        keys: the keys of each part, by its name.
        slots: of the optimizer state of each part, the key of each slot.
        unused: keys that belong to no part.
    """

    values: PlainValues
    keys: Mapping[str, list[str]]
    slots: Mapping[str, Mapping[str, str]]
    unused: tuple[str, ...]

    @staticmethod
    def of(values: PlainValues, names: Mapping[str, str]) -> _Saved:
        """Return what was saved of parts that are found by the ends of their keys."""
        keys: dict[str, list[str]] = defaultdict(list)
        slots: dict[str, dict[str, str]] = defaultdict(dict)
        unused = []
        for key in (*values.tensors, *values.others):
            name, slot = _place(key.split("."), names)
            if not name or "param_groups" in key:
                unused.append(key)
            elif slot:
                slots[name][slot] = key
            else:
                keys[name].append(key)
        numbered = next((key for key in unused if _BY_NUMBER.search(key)), "")
        if numbered:
            raise ConfigError(
                "load_plain_state: the state of an optimizer must have the names of parameters, "
                f"got a number in {numbered!r}. Load it into torch's optimizer before hb.auto, "
                "which takes it over."
            )
        return _Saved(values, keys, slots, tuple(unused))

    def problem(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """Return why the value of a part cannot be loaded; "" if it can."""
        keys = self.keys.get(name, [])
        if len(keys) != 1:
            return f"expected one key that ends with its name, got {keys or 'none'}"
        tensor = self.values.tensors.get(keys[0])
        if tensor is None:
            return f"expected a tensor at {keys[0]!r}, got another value"
        if (tensor.shape, tensor.dtype) == (shape, dtype):
            return ""
        received = f"{list(tensor.shape)} of {_plain(tensor.dtype)} at {keys[0]!r}"
        return f"expected the shape {list(shape)} of {_plain(dtype)}, got {received}"

    def value_of(self, name: str) -> Tensor:
        """Return the tensor of a part without a problem."""
        tensor: Tensor = self.values.read(self.keys[name][0])
        return tensor.detach()

    def check_readable(self, name: str) -> None:
        """Raise FormatError if a value of a part is torn."""
        for key in (*self.keys[name], *self.slots.get(name, {}).values()):
            self.values.read(key)


def _place(parts: Sequence[str], names: Mapping[str, str]) -> tuple[str, str]:
    """Return the part that a key belongs to, "" for none, and the slot; "" for its value."""
    for start in range(len(parts)):
        for stop in range(len(parts), start, -1):
            name = names.get(".".join(parts[start:stop]))
            if name is not None:
                return name, ".".join(parts[stop:])
    return "", ""


class _RowLoad:
    """The load of one table."""

    def __init__(self, name: str, lookup: MovedLookup, saved: _Saved, steps: int | None) -> None:
        self.name = name
        self._saved = saved
        self._steps = steps
        self._table: Table = lookup.tables[0]
        self._shape = (lookup.num_embeddings, lookup.embedding_dim)
        slots = saved.slots.get(name, {})
        # fused optimizers of TorchRec write the table's name before that of a slot
        self._keys = {slot.rsplit(".", 1)[-1]: key for slot, key in slots.items()}

    def problems(self) -> Iterator[str]:
        """Yield why the table cannot be loaded."""
        problem = self._saved.problem(self.name, self._shape, torch.float32)
        if problem:
            yield problem
            return
        slots = self._slots()
        missing = [names[0] for names, key in slots.items() if not key]
        if missing and len(missing) < len(slots):
            yield f"expected all of its optimizer state, got none of {missing}"
        for key in slots.values():
            problem = self._slot_problem(key) if key else ""
            if problem:
                yield problem
        needs_steps = isinstance(self._table.rule, Adam) and not missing
        if "step" in self._keys:
            yield from self._step_problem()
        elif needs_steps and self._steps is None:
            yield "expected the number of updates, got optimizer state without it: give steps="

    def check_values(self) -> None:
        """Read all numbers of the table; change nothing.

        Raises:
            FormatError: a file is torn.
            RowShapeError: a number is not finite.
        """
        state = [self._read_slot(key) for key in self._saved_slots().values()]
        check_rows(self._table, self._saved.value_of(self.name), state)

    def run(self) -> LoadedTable:
        """Load the table, and compare a sample of it.

        Raises:
            FormatError: rows differ from what was read.
        """
        table = self._table
        slots = self._saved_slots()
        state = [self._read_slot(key) for key in slots.values()]
        step = 0
        if slots:
            step = self._step()
        weight = self._saved.value_of(self.name)
        table.clear()
        fill(table, weight, state, step)
        ids = np.unique(np.linspace(0, len(weight) - 1, SAMPLE).astype(np.int64))
        places = table.find(ids)
        is_here = places >= 0  # other ranks may hold the others
        if not np.array_equal(table.gather(places[is_here]), weight[ids[is_here]].cpu().numpy()):
            raise FormatError(
                f"load_plain_state: rows of table {table.name!r} differ from what was read of "
                f"{self._saved.keys[self.name][0]!r}. Load again, and report it if this repeats."
            )
        (key,) = self._saved.keys[self.name]
        return LoadedTable(table.name, key, len(weight), tuple(slots), step)

    def _slots(self) -> dict[tuple[str, ...], str]:
        """Return the key of each slot of the rule; "" where it was not saved."""
        keys = {}
        for names in saved_slots(self._table.rule):
            keys[names] = next((self._keys[name] for name in names if name in self._keys), "")
        return keys

    def _saved_slots(self) -> dict[str, str]:
        """Return the key of each slot that was saved, by the name of the slot."""
        return {names[0]: key for names, key in self._slots().items() if key}

    def _slot_problem(self, key: str) -> str:
        tensor = self._saved.values.tensors.get(key)
        weight = self._saved.values.tensors[self._saved.keys[self.name][0]]
        shapes: list[tuple[int, ...]] = [self._shape]
        if self._table.state_width < self._shape[1]:  # one number a row
            shapes = [(self._shape[0],), (self._shape[0], 1), self._shape_of_parts(weight)]
        if tensor is None or tensor.shape not in shapes or tensor.dtype != torch.float32:
            received = "another value"
            if tensor is not None:
                received = f"{list(tensor.shape)} of {_plain(tensor.dtype)}"
            return f"expected {list(shapes[0])} of float32 at {key!r}, got {received}"
        if tensor.shape == shapes[-1] and weight.is_grid and len(shapes) > 1:
            return f"expected one number a row at {key!r}, got those of a grid of parts"
        return ""

    def _shape_of_parts(self, weight: SavedTensor) -> tuple[int, ...]:
        return (self._shape[0] * max(len(weight.widths), 1),)

    def _read_slot(self, key: str) -> Tensor:
        """Return a slot of each row, [num rows, its width]."""
        values: Tensor = self._saved.values.read(key).detach().cpu()
        num_rows = self._shape[0]
        weight = self._saved.values.tensors[self._saved.keys[self.name][0]]
        if values.dim() == 1 and len(values) != num_rows:
            # the mean of squares of a row is that of its parts, by their widths
            widths = torch.tensor(weight.widths, dtype=torch.float32)
            values = (values.view(len(widths), num_rows) * widths[:, None]).sum(0) / widths.sum()
        return values.reshape(num_rows, -1)

    def _step(self) -> int:
        key = self._keys.get("step")
        return int(self._saved.values.read(key)) if key is not None else self._steps or 0

    def _step_problem(self) -> Iterator[str]:
        """Yield why the saved number of updates cannot be loaded."""
        key = self._keys["step"]
        value = self._saved.values.read(key)
        number = value.item() if torch.is_tensor(value) and value.numel() == 1 else value
        is_whole = isinstance(number, (int, float)) and float(number).is_integer()
        if not is_whole or not 0 <= number <= _MOST_STEPS:
            yield f"expected a whole number of updates at {key!r}, got {value!r:.80}"


def _load_dense_state(model: nn.Module, optimizer: Any, saved: _Saved) -> Iterator[str]:
    """Load the optimizer state of dense parameters, and yield their names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    members = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    for member in members:
        part = member.dense if isinstance(member, CombinedOptimizer) else member
        for group in getattr(part, "param_groups", ()):
            for parameter in group["params"]:
                name = names.get(id(parameter), "")
                keys = saved.slots.get(name)
                if keys is not None:
                    part.state[parameter] = {
                        slot: _copy_of(saved.values.read(key)) for slot, key in keys.items()
                    }
                    yield name


def _copy_of(value: Any) -> Any:
    return value.detach().clone() if torch.is_tensor(value) else value


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
