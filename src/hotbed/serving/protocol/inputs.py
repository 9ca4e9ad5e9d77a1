# SPDX-License-Identifier: Apache-2.0
"""The inputs of a model: which tensors it takes, and those of a request as columns."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa

from hotbed.config import did_you_mean
from hotbed.data.schema import Id, Schema
from hotbed.errors import DataError
from hotbed.serving.datatypes import input_datatypes, input_units
from hotbed.serving.protocol.bodies import Bounds, JsonValues, ValueSpan
from hotbed.serving.protocol.tensors import PLAIN_DTYPES, ColumnValues, Tensor, flat_numbers

T = TypeVar("T")
_ZEROS: Mapping[str, Any] = {"BYTES": b"", "BOOL": False}
_EXAMPLE_TIME = "2026-01-01T12:00:00Z"
_CACHED_HEADS = 64
_CACHED_HEAD_BYTES = 16 << 10  # the longest head that is cached


class TensorBlock(NamedTuple):
    """Consecutive binary tensors of plain numbers, all [num_rows] of one type.

    `start`: the first byte of the block in the data of its request.
    """

    names: list[str]
    dtype: np.dtype[Any]
    num_rows: int
    start: int

    def read(self, data: bytes) -> Iterable[tuple[str, ColumnValues]]:
        """Return the name and the column of each tensor, without a copy."""
        shape = len(self.names), self.num_rows
        values = np.frombuffer(data, self.dtype, shape[0] * shape[1], self.start)
        return zip(self.names, values.reshape(shape), strict=True)


class InputHead(NamedTuple):
    """How the head of a request describes a tensor.

    `num_bytes`: of a binary tensor. `times`, `is_base64`: as in `Tensor`.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    num_bytes: int = 0
    times: pa.DataType | None = None
    is_base64: bool = False

    @property
    def is_flat(self) -> bool:
        """Whether the tensor holds numbers [n]."""
        return len(self.shape) == 1 and self.datatype in PLAIN_DTYPES and self.times is None


@dataclass(frozen=True, eq=False)
class RequestHead:
    """The tensors of an infer request, all of them binary or all of them JSON.

    Clients send the same head again and again.
    """

    inputs: Sequence[InputHead]

    @cached_property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.inputs)

    @cached_property
    def blocks(self) -> Sequence[TensorBlock] | None:
        """The tensors in blocks; None unless all are plain numbers [n], aligned in the body."""
        blocks = list[TensorBlock]()
        start = 0
        for entry in self.inputs:
            dtype = PLAIN_DTYPES.get(entry.datatype)
            if dtype is None or not entry.is_flat or start % dtype.itemsize:
                return None
            num_rows = entry.shape[0]
            block = blocks[-1] if blocks else None
            if block is None or block.dtype != dtype or block.num_rows != num_rows:
                block = TensorBlock([], dtype, num_rows, start)
                blocks.append(block)
            block.names.append(entry.name)
            start += entry.num_bytes
        return blocks

    @cached_property
    def are_flat(self) -> bool:
        """Whether all tensors hold numbers [n], n > 0."""
        return all(entry.is_flat and entry.shape[0] > 0 for entry in self.inputs)


class HeadCache(Generic[T]):
    """What was read from the heads that clients repeat, by their bytes. Threads may share it."""

    def __init__(self) -> None:
        self._heads: dict[bytes, T] = {}
        self._changing = threading.Lock()
        self.find = self._heads.get  # returns None for an unknown head

    def add(self, text: bytes, head: T) -> None:
        """Keep a head, unless it is long; the oldest one leaves."""
        if len(text) > _CACHED_HEAD_BYTES:
            return
        with self._changing:
            if len(self._heads) >= _CACHED_HEADS:
                oldest = next(iter(self._heads))
                del self._heads[oldest]
            self._heads[text] = head


@dataclass(frozen=True)
class PackedTensors:
    """Consecutive binary tensors, as described by `head`."""

    head: RequestHead
    data: bytes

    def unpack(self) -> list[Tensor]:
        """Return the tensors one by one."""
        tensors = []
        start = 0
        for entry in self.head.inputs:
            end = start + entry.num_bytes
            data = self.data[start:end]
            tensors.append(Tensor(entry.name, entry.datatype, entry.shape, data, entry.times))
            start = end
        return tensors


@dataclass(frozen=True)
class JsonTensors:
    """Tensors whose values are JSON at `spans` of `text`, as described by `head`."""

    head: RequestHead
    text: bytes
    spans: Sequence[ValueSpan]

    def unpack(self) -> list[Tensor]:
        """Return the tensors one by one."""
        tensors = []
        for entry, span in zip(self.head.inputs, self.spans, strict=True):
            values = JsonValues(self.text, span)
            tensor = Tensor(entry.name, entry.datatype, entry.shape, values, entry.times)
            tensor.is_base64 = entry.is_base64
            tensors.append(tensor)
        return tensors

    def read(self) -> Iterable[tuple[str, ColumnValues]] | None:
        """Return the name and the column of each tensor.

        None where a closer look is needed: the values are not as many numbers as the head says.
        """
        columns = list[tuple[str, ColumnValues]]()
        for entry, span in zip(self.head.inputs, self.spans, strict=True):
            values = flat_numbers(entry.datatype, entry.shape[0], JsonValues(self.text, span))
            if values is None:
                return None
            columns.append((entry.name, values))
        return columns


class Candidates(NamedTuple):
    """What a request asks to score.

    Attributes:
        num_rows: number of candidates, n.
        columns: columns [n].
        context: if n > 1: columns [1], valid for all candidates.
    """

    num_rows: int
    columns: dict[str, ColumnValues]
    context: dict[str, ColumnValues]


class ModelInputs:
    """The tensors that a model takes: one for each raw column of its schema that serving reads.

    Args:
        schema: the schema.
        shapes: by column, the shape of its values for each candidate, where the model fixes it.

    Attributes:
        lists: the columns that hold a list for each candidate.
    """

    def __init__(self, schema: Schema, shapes: Mapping[str, Sequence[int]] | None = None) -> None:
        self._shapes = shapes or {}
        self.names = schema.raw_columns(labels=False)
        self.allowed = set(self.names)
        for column in (schema.time, schema.display_position):
            if column is not None:  # the log of requests keeps it, and scores do not depend on it
                self.allowed.add(column.source)
        self._optional = [feature.source for feature in schema.kept_features]
        if schema.time is not None and schema.kept:
            self._optional.append(schema.time.source)
        self.allowed.update(self._optional)
        self._kept_lists = [feature for feature in schema.kept_features if isinstance(feature, Id)]
        self._schema = schema
        self.lists = frozenset(self._lists())
        # the heads that were valid, with their number of candidates
        self._layouts = WeakKeyDictionary[RequestHead, tuple[int, Sequence[TensorBlock]]]()
        self._flat = WeakKeyDictionary[RequestHead, int]()

    def metadata(self) -> list[dict[str, Any]]:
        """Return name, datatype and shape of each tensor.

        The datatype is the least that gives the scores of training, see `input_datatypes`. The
        shape of lists is [-1, -1]. If the model does not record the types of its columns, those
        with a transform of text are BYTES, and those with weights are lists. A column that depends
        on other rows, so that the client has to compute it, has the parameter `derived`, which says
        how; one that holds times has those of `input_units`. Columns that the model keeps, and the
        time of their rows, come last, with the parameter `optional`: requests need not bring them.
        """
        datatypes = input_datatypes(self._schema)
        units = input_units(self._schema)
        derived = self._schema.derived
        dense = {column.source: column for column in self._schema.dense}
        tensors = []
        for name in dict.fromkeys([*self.names, *self._optional]):
            shape = [-1]
            if name in self._shapes:
                shape = [-1, *self._shapes[name]]
            elif name in dense and dense[name].width > 1:
                shape = [-1, dense[name].width]
            elif name in self.lists:
                shape = [-1, -1]
            tensor: dict[str, Any] = {"name": name, "datatype": datatypes[name], "shape": shape}
            parameters: dict[str, Any] = dict(units.get(name, {}))
            if name in derived:
                parameters["derived"] = derived[name]
            if name not in self.names:
                parameters["optional"] = True
            if parameters:
                tensor["parameters"] = parameters
            tensors.append(tensor)
        return tensors

    def zeros(self) -> Candidates:
        """Return a candidate of zeros and empty texts."""
        columns = dict[str, ColumnValues]()
        for described in self._required():
            datatype = described["datatype"]
            lengths = [max(1, length) for length in described["shape"]]
            values = [_ZEROS.get(datatype, 0)] * math.prod(lengths)
            shape = [1, math.prod(lengths)] if len(lengths) > 1 else [1]
            name = described["name"]
            columns[name] = Tensor(name, datatype, shape, values).column()
        return Candidates(1, columns, {})

    def example(self) -> dict[str, Any]:
        """Return a request in JSON with one candidate, whose values are made up."""
        tensors = []
        for described in self._required():
            shape = [max(1, length) for length in described["shape"]]
            value: Any = 1
            if described["datatype"] == "BYTES":
                is_time = described.get("parameters", {}).get("unit") == "iso"
                value = _EXAMPLE_TIME if is_time else "1"
            elif described["datatype"] == "BOOL":
                value = True
            names = {"name": described["name"], "datatype": described["datatype"]}
            tensors.append({**names, "shape": shape, "data": [value] * math.prod(shape)})
        return {"inputs": tensors}

    def _required(self) -> list[dict[str, Any]]:
        """Return the metadata of the tensors that each request brings."""
        return [tensor for tensor in self.metadata() if tensor["name"] in self.names]

    def _lists(self) -> set[str]:
        """Return the raw columns that hold a list for each candidate."""
        lists = set()
        for name, shape in self._schema.shapes.items():
            if shape != "value":
                lists.add(name)
        for column in self._schema.ids:
            if column.weights:
                lists |= {column.source, column.weights}
        return lists.union(feature.source for feature in self._kept_lists)

    def most_kept_values(self, candidates: Candidates) -> int:
        """Return at most how many values of lists the model adds to what a request brings."""
        return candidates.num_rows * sum(
            feature.max_length or 0
            for feature in self._kept_lists
            if feature.source not in candidates.columns | candidates.context
        )

    def columns(
        self, tensors: Sequence[Tensor] | PackedTensors | JsonTensors, bounds: Bounds
    ) -> Candidates:
        """Check all tensors of a request, then decode them.

        Raises:
            DataError: tensors are unknown, missing, sent twice, too long or of different lengths.
        """
        if isinstance(tensors, JsonTensors):
            return self._json_columns(tensors, bounds)
        if not isinstance(tensors, PackedTensors):
            return self._check_and_decode(tensors, bounds)
        head = tensors.head
        layout = self._layouts.get(head)
        if layout is None:
            candidates = self._check_and_decode(tensors.unpack(), bounds)
            if head.blocks is not None:
                self._layouts[head] = candidates.num_rows, head.blocks
            return candidates
        num_rows, blocks = layout
        columns = dict[str, ColumnValues]()
        context = dict[str, ColumnValues]()
        for block in blocks:
            if block.num_rows == num_rows:
                columns.update(block.read(tensors.data))
            else:
                context.update(block.read(tensors.data))
        return Candidates(num_rows, columns, context)

    def _json_columns(self, tensors: JsonTensors, bounds: Bounds) -> Candidates:
        head = tensors.head
        num_rows = self._flat.get(head)
        named = tensors.read() if num_rows is not None else None
        if num_rows is None or named is None:
            candidates = self._check_and_decode(tensors.unpack(), bounds)
            if head.are_flat:
                self._flat[head] = candidates.num_rows
            return candidates
        columns = dict[str, ColumnValues]()
        context = dict[str, ColumnValues]()
        for name, values in named:
            if len(values) == num_rows:
                columns[name] = values
            else:
                context[name] = values
        return Candidates(num_rows, columns, context)

    def _check_and_decode(self, tensors: Sequence[Tensor], bounds: Bounds) -> Candidates:
        self._check_names(tensors)
        for tensor in tensors:
            shape = self._shapes.get(tensor.name, ())
            if len(shape) > 1 and list(tensor.shape[1:]) == list(shape):
                tensor.nesting = tensor.shape[1:]
                tensor.shape = [tensor.shape[0], math.prod(shape)]
        lengths = {tensor.check(bounds) for tensor in tensors}
        if len(lengths - {1}) > 1:
            raise DataError(
                f"inputs differ in length: expected n or 1 for each, got {sorted(lengths)}. "
                "Send each column for all candidates, or with one value that holds for all."
            )
        num_rows = max(lengths - {1}, default=1)
        columns = dict[str, ColumnValues]()
        context = dict[str, ColumnValues]()
        for tensor in tensors:
            values = tensor.column()
            if len(values) == num_rows:
                columns[tensor.name] = values
            else:
                context[tensor.name] = values
        return Candidates(num_rows, columns, context)

    def _check_names(self, tensors: Sequence[Tensor]) -> None:
        names = set[str]()
        for tensor in tensors:
            if tensor.name not in self.allowed:
                name = tensor.name[:100]
                raise DataError(
                    f"input {name!r}: the model has no such input. {did_you_mean(name, self.names)}"
                )
            if tensor.name in names:
                raise DataError(
                    f"input {tensor.name!r}: expected once, got it twice. Send it once."
                )
            names.add(tensor.name)
        missing = [name for name in self.names if name not in names]
        if missing:
            raise DataError(f"inputs are missing: got {sorted(names)}. Add {missing}.")
