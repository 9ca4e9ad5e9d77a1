# SPDX-License-Identifier: Apache-2.0
"""Batches as the arguments of an ordinary model: columns by the names of its parameters."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from hotbed import config
from hotbed.data.batch import Batch, Ids
from hotbed.errors import ConfigError, RowShapeError

from .signature import OFFSETS, WEIGHTS, includes_last_offset
from .torchrec.configs import keys_of
from .torchrec.jagged import (
    JAGGED,
    KEYED_JAGGED,
    as_tensor,
    ids_with_offsets,
    is_class,
    jagged,
    to_kjt,
)

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def bind(
    model: nn.Module, batch: Batch, bags: Container[str] = ()
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments of `model` that hold the columns of `batch`.

    A parameter takes the column of its name, and so does a field of the dataclass that annotates a
    parameter. Ids are int64 [n], or [n, k] if each sample has k. A model that also takes
    `<name>_offsets` gets the ids of all samples as `<name>`, with offsets as nn.EmbeddingBag takes
    them, and `<name>_weights`. Labels, weight and time have their own names. A model with one
    parameter that names no column gets a dict of all columns: ids with offsets where samples have
    different numbers of them. A parameter that is annotated with TorchRec's KeyedJaggedTensor takes
    the id columns that the model's collections look up, with weights if some have weights; one that
    is annotated with JaggedTensor takes the id column of its name.

    Args:
        model: an ordinary module.
        batch: of NumPy arrays or tensors.
        bags: names of offsets that a dict of all columns has in any case.

    Raises:
        ConfigError: a parameter names no column.
        RowShapeError: samples have different numbers of ids, and the model takes no offsets.

    Example:
        >>> args, kwargs = bind(model, batch)
        >>> scores = model(*args, **kwargs)
    """
    columns = _Columns(batch, includes_last_offset(model), bags, keys_of(model))
    parameters = inspect.signature(model.forward)
    types = _types(model.forward)
    wanted = {}
    for name, parameter in parameters.parameters.items():
        if parameter.kind not in _VARIABLE:
            wanted[name] = parameter.default is inspect.Parameter.empty
    values, missing = _values(columns, wanted, types)
    if missing and (len(wanted) > 1 or types.get(missing[0]) is Tensor):
        raise _no_column(f"{type(model).__name__}.forward", missing[0], columns)
    for name in missing:
        values[name] = columns.take(None)
    for name, parameter in parameters.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            rest = columns.take(None)
            values[name] = {other: rest[other] for other in rest if other not in values}
    ordered = {name: values[name] for name in parameters.parameters if name in values}
    bound = inspect.BoundArguments(parameters, OrderedDict(ordered))
    return bound.args, bound.kwargs


class _Columns:
    """The columns of a batch as tensors, by the names under which a model takes them."""

    def __init__(
        self, batch: Batch, include_last: bool, bags: Container[str], keys: Sequence[str]
    ) -> None:
        self.batch = batch
        self.keys = keys
        self._bags = bags
        self._include_last = include_last
        self._numbers: dict[str, Any] = {**batch.dense, **batch.labels}
        schema = getattr(batch.encoder, "schema", None)
        for role in ("weight", "time"):
            value = getattr(batch, role)
            if value is not None:
                column = getattr(schema, role, None)
                self._numbers[role if column is None else column.name] = value

    @property
    def names(self) -> dict[str, None]:
        """The names that a model may take, in order."""
        names: dict[str, None] = {}
        for name, ids in self.batch.ids.items():
            names[name] = None
            names[name + OFFSETS] = None
            if ids.weights is not None:
                names[name + WEIGHTS] = None
        names.update(dict.fromkeys(self._numbers))
        return names

    def take(self, names: Collection[str] | None) -> dict[str, Tensor]:
        """Return the columns of these names; None: all, with offsets where ids need them."""
        values: dict[str, Any] = {}
        for name, ids in self.batch.ids.items():
            offsets = name + OFFSETS
            weights = name + WEIGHTS
            if names is None:
                as_bags = offsets in self._bags or _num_ids(ids) is None
            else:
                as_bags = offsets in names
            if as_bags:
                values[name] = as_tensor(ids.values)
                values[offsets] = self._offsets(ids)
                if ids.weights is not None:
                    values[weights] = as_tensor(ids.weights)
            elif names is None or name in names or weights in names:
                values[name] = _matrix(name, ids, ids.values)
                if ids.weights is not None:
                    values[weights] = _matrix(name, ids, ids.weights)
        for name, numbers in self._numbers.items():
            values[name] = as_tensor(numbers)
        if names is None:
            return values
        return {name: values[name] for name in names}

    def _offsets(self, ids: Ids) -> Tensor:
        offsets = ids.offsets
        if offsets is None:
            offsets = np.arange(len(ids) + 1, dtype=np.int64)
        if not self._include_last:
            offsets = offsets[:-1]
        return as_tensor(offsets)


def _values(
    columns: _Columns, wanted: Mapping[str, bool], types: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of parameters or fields, and those that must have one but name no column.

    Args:
        columns: of the batch.
        wanted: whether it must have a value, by parameter or field.
        types: their annotations.
    """
    values: dict[str, Any] = {}
    ids = columns.batch.ids
    plain = [name for name in wanted if not is_class(types.get(name), JAGGED)]
    values.update(columns.take([name for name in plain if name in columns.names]))
    missing = []
    for name, is_required in wanted.items():
        kind = types.get(name)
        if name in values:
            continue
        if kind is Batch:
            values[name] = columns.batch
        elif is_class(kind, KEYED_JAGGED):
            keys = columns.keys or list(ids)
            _check_keys(name, keys, list(ids))
            values[name] = to_kjt(columns.batch, keys)
        elif is_class(kind, JAGGED) and name in ids:
            values[name] = jagged(ids_with_offsets(ids[name]))
        elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
            values[name] = _instance(kind, columns)
        elif is_required:
            missing.append(name)
    return values, missing


def _instance(kind: Any, columns: _Columns) -> Any:
    """Return a dataclass whose fields are columns, or dataclasses of them."""
    wanted = {}
    for field in dataclasses.fields(kind):
        has_default = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        if field.init:
            wanted[field.name] = not has_default
    values, missing = _values(columns, wanted, _types(kind))
    if missing:
        raise _no_column(kind.__name__, missing[0], columns)
    return kind(**values)


def _types(annotated: Callable[..., Any]) -> Mapping[str, Any]:
    """Return annotations; none where one names what is only imported for type checkers."""
    try:
        return typing.get_type_hints(annotated)
    except (NameError, TypeError, AttributeError):
        return {}


def _num_ids(ids: Ids) -> int | None:
    """Return how many ids each sample has; None if the numbers differ."""
    if ids.offsets is None:
        return 1
    lengths = ids.lengths()
    if len(lengths) == 0:
        return 0
    return int(lengths[0]) if bool((lengths == lengths[0]).all()) else None


def _matrix(name: str, ids: Ids, values: Any) -> Tensor:
    """Return values [n] where each sample has one without offsets, else [n, k]."""
    tensor = as_tensor(values)
    if ids.offsets is None:
        return tensor
    num_ids = _num_ids(ids)
    if num_ids is None:
        lengths = ids.lengths()
        raise RowShapeError(
            f"feature {name!r}: each sample must have the same number of ids, got from "
            f"{int(lengths.min())} to {int(lengths.max())}. Let the model take {name + OFFSETS!r} "
            "as well, or bring lists of equal length."
        )
    return tensor.view(len(ids), num_ids)


def _check_keys(name: str, keys: Sequence[str], columns: Sequence[str]) -> None:
    """Raise ConfigError unless id columns have the keys of the KeyedJaggedTensor `name`."""
    missing = [key for key in keys if key not in columns]
    if missing or not keys:
        raise ConfigError(
            f"forward: {name!r} needs an id column for each feature of the collections {keys}, got "
            f"the id columns {columns}. Add hb.Id columns of these names to the schema."
        )


def _no_column(where: str, name: str, columns: _Columns) -> ConfigError:
    return ConfigError(
        f"{where}: {name!r} must have the name of a column of the batch, got columns "
        f"{sorted(columns.names)}. {config.did_you_mean(name, columns.names)}"
    )
