# SPDX-License-Identifier: Apache-2.0
"""The tensors of a plain model and the ids of its lookups, from an encoded request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.data.batch import Ids
from hotbed.errors import DataError
from hotbed.serving.request import ScoreRequest

Tensors = dict[str, NDArray[Any]]
"""Inputs of a graph by name."""


def column_shapes(graph: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return, by column, the shape of a candidate's values, where the model of a graph fixes it.

    `graph`: as a manifest describes it.
    """
    arguments = graph.get("ids", {}).get("arguments", ())
    bags = {entry["column"] for entry in arguments if entry["part"] in ("starts", "ends")}
    shapes = {}
    for entry in arguments:
        if entry["part"] == "values" and entry["column"] not in bags:
            shapes[entry["column"]] = list(entry["shape"])
    return shapes


class PlainInputs:
    """What a model that takes tensors needs of a request, before its dense graph.

    Args:
        entry: `ids` of the graph in a manifest, see `hotbed.persist.publish.version.IdsOnnx`.
        session: The id graph in ONNX Runtime.
    """

    def __init__(self, entry: Mapping[str, Any], session: Any) -> None:
        self._arguments: Sequence[Mapping[str, Any]] = entry["arguments"]
        self._lookups: Sequence[Mapping[str, Any]] = entry["lookups"]
        self._session = session
        self._inputs = [argument.name for argument in session.get_inputs()]
        self._shapes = column_shapes({"ids": entry})
        self._bags = set[str]()
        for argument in self._arguments:
            if argument["part"] in ("starts", "ends"):
                self._bags.add(argument["column"])

    def flat(self, columns: Any, *, is_context: bool = False) -> Any:
        """Return columns in which a candidate's values are one list, whatever their shape.

        Args:
            columns: Of a request: a mapping, or a table, which is returned as it is.
            is_context: Whether each column holds the values of one candidate.
        """
        if not isinstance(columns, Mapping):
            return columns
        changed = dict(columns)
        for name, shape in self._shapes.items():
            values = changed.get(name)
            is_nested = isinstance(values, np.ndarray) or len(shape) > 1
            if not shape or values is None or not is_nested or isinstance(values, pa.Array):
                continue
            array = np.asarray(values)
            if is_context:
                changed[name] = array.reshape(-1).tolist()
            elif array.ndim > 1:
                rows = len(array)
                offsets = np.arange(rows + 1) * (array.size // max(rows, 1))
                flat = pa.array(array.reshape(-1))
                changed[name] = pa.LargeListArray.from_arrays(pa.array(offsets), flat)
        return changed

    def tensors(self, request: ScoreRequest) -> Tensors:
        """Return the tensors that the graphs take.

        Raises:
            DataError: A list has another length than the model's tensor.
        """
        tensors: Tensors = {}
        for argument in self._arguments:
            column = argument["column"]
            if column in request.dense:
                values = _repeated(request.dense[column], request.num_samples)
            else:
                ids = _all_samples(request.ids[column], request.num_samples)
                values = self._part(argument, ids)
            if column not in self._bags:
                values = values.reshape(request.num_samples, *argument["shape"])
            dtype = np.dtype(argument["dtype"])
            tensors[f"argument/{argument['name']}"] = values.astype(dtype, copy=False)
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
                weights = ids.weights
                return np.ones(len(ids.values), np.float32) if weights is None else weights
        values: NDArray[Any] = ids.values
        return values

    def lookups(self, tensors: Tensors) -> dict[str, LookedUp]:
        """Return what each lookup takes, by feature."""
        names = []
        for lookup in self._lookups:
            names += [lookup[part] for part in ("ids", "offsets", "weights") if part in lookup]
        own = {name: tensors[name] for name in self._inputs}
        outputs = dict(zip(names, self._session.run(names, own), strict=True))
        return {lookup["feature"]: LookedUp(lookup, outputs) for lookup in self._lookups}


class LookedUp:
    """What a lookup takes.

    Attributes:
        shape: Of the ids, as the model looks them up.
    """

    def __init__(self, lookup: Mapping[str, Any], outputs: Mapping[str, NDArray[Any]]) -> None:
        values = outputs[lookup["ids"]]
        self.shape = values.shape
        self._values = values.reshape(-1)
        self._padding = lookup.get("padding")
        self._weights: Any = None
        if "weights" in lookup:
            self._weights = outputs[lookup["weights"]].reshape(-1)
        self._offsets = None
        if "offsets" in lookup:
            self._offsets = outputs[lookup["offsets"]]
            if not lookup["ends"]:
                self._offsets = np.append(self._offsets, len(self._values))

    def rows(self) -> Ids:
        """Return all ids as those of one sample."""
        return Ids(self._values, np.array([0, len(self._values)]))

    def bags(self) -> Ids:
        """Return the ids by bag, without padding."""
        offsets = self._offsets
        if offsets is None:
            num_bags, length = self.shape
            offsets = length * np.arange(num_bags + 1)
        values = self._values[: offsets[-1]]
        weights = self._weights
        if self._padding is None:
            return Ids(values, offsets, weights)
        stays = values != self._padding
        before = np.zeros(len(values) + 1, np.int64)
        np.cumsum(stays, out=before[1:])
        if weights is not None:
            weights = weights[: len(values)][stays]
        return Ids(values[stays], before[offsets], weights)


def _all_samples(ids: Any, num_samples: int) -> Ids:
    """Return ids with one entry for each sample; those of one sample hold for all."""
    own: Ids = ids if isinstance(ids, Ids) else Ids(ids)
    if len(own) == num_samples:
        return own
    return own.take(np.zeros(num_samples, np.int64))


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
