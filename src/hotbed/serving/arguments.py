# SPDX-License-Identifier: Apache-2.0
"""The tensors of a plain model and the ids of its lookups, from an encoded request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.data.arrays import offsets_of
from hotbed.data.batch import Ids
from hotbed.errors import DataError
from hotbed.serving.request import ScoreRequest

Tensors = dict[str, NDArray[Any]]
"""Inputs of a graph by name."""


def column_shapes(graph: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return, by column, the shape of a candidate's values, where the model of a graph fixes it.

    `graph`: as a manifest describes it.
    """
    entry = graph.get("ids", {})
    arguments = entry.get("arguments", ())
    bags = _bag_columns(arguments)
    shapes = {}
    for argument in arguments:
        column = argument["column"]
        if argument["part"] == "values" and column not in bags:
            shapes[column] = list(argument["shape"])
    return shapes


def _bag_columns(arguments: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the columns whose values the model takes as bags, with offsets."""
    columns = set[str]()
    for argument in arguments:
        if argument["part"] in ("starts", "ends"):
            columns.add(argument["column"])
    return columns


class PlainInputs:
    """What a model that takes tensors needs of a request, before its dense graph.

    Args:
        entry: `ids` of the graph in a manifest, see `hotbed.persist.publish.version.IdsOnnx`.
        session: the id graph in ONNX Runtime.
    """

    def __init__(self, entry: Mapping[str, Any], session: Any) -> None:
        self._arguments: Sequence[Mapping[str, Any]] = entry["arguments"]
        self._lookups: Sequence[Mapping[str, Any]] = entry["lookups"]
        self._session = session
        self._inputs = [argument.name for argument in session.get_inputs()]
        self._outputs = [output.name for output in session.get_outputs()]
        self._shapes = column_shapes({"ids": entry})
        self._bags = _bag_columns(self._arguments)

    def flat(self, columns: Any, *, is_context: bool = False) -> Any:
        """Return columns in which a candidate's values are one list, whatever their shape.

        Args:
            columns: of a request: a mapping, or a table, which is returned as it is.
            is_context: whether each column holds the values of one candidate.
        """
        if not isinstance(columns, Mapping):
            return columns
        changed = dict(columns)
        for name, shape in self._shapes.items():
            values = changed.get(name)
            if not shape or values is None or isinstance(values, pa.Array):
                continue
            if len(shape) == 1 and not isinstance(values, np.ndarray):
                continue  # lists are what encoding takes
            array = np.asarray(values)
            if is_context:
                flat = array.reshape(-1)
                changed[name] = flat.tolist()
            elif array.ndim > 1:
                changed[name] = _lists(array)
        return changed

    def tensors(self, request: ScoreRequest) -> Tensors:
        """Return the tensors that the graphs take.

        Raises:
            DataError: a list has another length than the model's tensor.
        """
        tensors: Tensors = {}
        for argument in self._arguments:
            column = argument["column"]
            name = argument["name"]
            num_samples = request.num_samples
            if column in request.dense:
                values = _repeated(request.dense[column], num_samples)
            else:
                ids = _all_samples(request.ids[column], num_samples)
                values = self._part(argument, ids)
            if column not in self._bags:
                shape = argument["shape"]
                values = values.reshape(num_samples, *shape)
            dtype = np.dtype(argument["dtype"])
            tensors[f"argument/{name}"] = values.astype(dtype, copy=False)
        return tensors

    def _part(self, argument: Mapping[str, Any], ids: Ids) -> NDArray[Any]:
        """Return the part of ids that a tensor takes, flat."""
        column = argument["column"]
        if column not in self._bags:
            _check_lengths(column, ids, argument["shape"])
        match argument["part"]:
            case "starts":
                return _offsets(ids)[:-1]
            case "ends":
                return _offsets(ids)
            case "weights":
                weights: NDArray[Any] = ids.weights
                return weights
        values: NDArray[Any] = ids.values
        return values

    def lookups(self, tensors: Tensors) -> dict[str, LookedUp]:
        """Return what each lookup takes, by feature."""
        feeds = {name: tensors[name] for name in self._inputs}
        values = self._session.run(self._outputs, feeds)
        outputs = dict(zip(self._outputs, values, strict=True))
        looked_up = {}
        for lookup in self._lookups:
            feature = lookup["feature"]
            looked_up[feature] = LookedUp(lookup, outputs)
        return looked_up


class LookedUp:
    """What a lookup takes.

    Attributes:
        shape: of the ids, as the model looks them up.
    """

    def __init__(self, lookup: Mapping[str, Any], outputs: Mapping[str, NDArray[Any]]) -> None:
        values = outputs[lookup["ids"]]
        self.shape = values.shape
        self._values = values.reshape(-1)
        self._padding = lookup.get("padding")
        self._weights: Any = None
        if "weights" in lookup:
            weights = outputs[lookup["weights"]]
            self._weights = weights.reshape(-1)
        self._offsets = None
        if "offsets" in lookup:
            offsets = outputs[lookup["offsets"]]
            if not lookup["ends"]:
                end = len(self._values)
                offsets = np.append(offsets, end)
            self._offsets = offsets

    def rows(self) -> Ids:
        """Return all ids as those of one sample."""
        end = len(self._values)
        offsets = np.array([0, end])
        return Ids(self._values, offsets)

    def bags(self) -> Ids:
        """Return the ids by bag, without padding."""
        offsets = self._offsets
        if offsets is None:
            num_bags, length = self.shape
            offsets = length * np.arange(num_bags + 1)
        end = offsets[-1]
        values = self._values[:end]
        weights = self._weights
        if weights is not None:
            weights = weights[:end]
        if self._padding is None:
            return Ids(values, offsets, weights)
        stays = values != self._padding
        before = offsets_of(stays)
        if weights is not None:
            weights = weights[stays]
        return Ids(values[stays], before[offsets], weights)


def _lists(array: NDArray[Any]) -> pa.Array:
    """Return the rows of an array of any number of axes as lists."""
    num_rows = len(array)
    flat = array.reshape(-1)
    length = flat.size // max(num_rows, 1)
    offsets = length * np.arange(num_rows + 1)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat))


def _all_samples(ids: Any, num_samples: int) -> Ids:
    """Return ids with one entry for each sample; those of one sample hold for all."""
    if not isinstance(ids, Ids):
        ids = Ids(ids)
    bags: Ids = ids
    if len(bags) == num_samples:
        return bags
    first = np.zeros(num_samples, np.int64)
    return bags.take(first)


def _repeated(values: NDArray[Any], num_samples: int) -> NDArray[Any]:
    if len(values) == num_samples:
        return values
    return np.repeat(values, num_samples, axis=0)


def _offsets(ids: Ids) -> NDArray[np.int64]:
    offsets: NDArray[np.int64] = ids.with_offsets().offsets
    return offsets


def _check_lengths(column: str, ids: Ids, shape: Sequence[int]) -> None:
    expected = math.prod(shape)
    lengths = ids.lengths()
    wrong = np.flatnonzero(lengths != expected)
    if len(wrong):
        place = wrong[0]
        raise DataError(
            f"column {column!r}: the model takes {expected} ids a candidate, got "
            f"{lengths[place]} for candidate {place}. Send lists of {expected} ids."
        )
