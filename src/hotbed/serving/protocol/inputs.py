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

from hotbed.config import did_you_mean
from hotbed.data.schema import Dense, Id, Schema
from hotbed.errors import DataError
from hotbed.serving.protocol.bodies import Bounds
from hotbed.serving.protocol.tensors import PLAIN_DTYPES, ColumnValues, Tensor

T = TypeVar("T")
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


class BinaryInput(NamedTuple):
    """How the head of a request describes a binary tensor of `num_bytes` bytes."""

    name: str
    datatype: str
    shape: Sequence[int]
    num_bytes: int


@dataclass(frozen=True, eq=False)
class RequestHead:
    """The tensors of an infer request that are all binary.

    Clients send the same head again and again.
    """

    inputs: Sequence[BinaryInput]

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
            if dtype is None or len(entry.shape) != 1 or start % dtype.itemsize:
                return None
            num_rows = entry.shape[0]
            block = blocks[-1] if blocks else None
            if block is None or block.dtype != dtype or block.num_rows != num_rows:
                block = TensorBlock([], dtype, num_rows, start)
                blocks.append(block)
            block.names.append(entry.name)
            start += entry.num_bytes
        return blocks


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
            tensors.append(Tensor(entry.name, entry.datatype, entry.shape, data))
            start = end
        return tensors


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
    """

    def __init__(self, schema: Schema, shapes: Mapping[str, Sequence[int]] | None = None) -> None:
        self._shapes = shapes or {}
        self.names = schema.raw_columns(labels=False)
        self.allowed = set(self.names)
        if schema.time is not None:
            self.allowed.add(schema.time.source)
        self._schema = schema
        # the heads that were valid, with their number of candidates
        self._layouts = WeakKeyDictionary[RequestHead, tuple[int, Sequence[TensorBlock]]]()

    def metadata(self) -> list[dict[str, Any]]:
        """Return name, datatype and shape of each tensor.

        The datatype is BYTES for columns that were text in training, BOOL for those that were
        booleans, INT64 for integers (ids, and columns that a Cross combines), FP32 for other
        numbers and for the weights of bags. The shape of lists is [-1, -1]. If
        the model does not record the types of its columns, those with a transform of text are
        BYTES, and those with weights are lists. A column that depends on other rows, so that the
        client has to compute it, has the parameter `derived`, which says how.
        """
        types = self._types()
        lists = self._lists()
        dense = {column.source: column for column in self._schema.dense}
        read_as_ids = self._read_as_ids()
        weights = {column.weights for column in self._schema.ids if column.weights}
        numbers = (set(dense) | weights) - read_as_ids
        tensors = []
        for name in self.names:
            datatype = "INT64"
            if types.get(name) == "text":
                datatype = "BYTES"
            elif name in numbers or types.get(name) == "number":
                datatype = "FP32"
            elif types.get(name) == "boolean":
                datatype = "BOOL"
            shape = [-1]
            if name in self._shapes:
                shape = [-1, *self._shapes[name]]
            elif name in dense and dense[name].width > 1:
                shape = [-1, dense[name].width]
            elif name in lists:
                shape = [-1, -1]
            tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
            if name in self._schema.derived:
                tensor["parameters"] = {"derived": self._schema.derived[name]}
            tensors.append(tensor)
        return tensors

    def _types(self) -> dict[str, str]:
        """Return the recorded types of raw columns, and "text" for those that must be text."""
        types = dict[str, str]()
        for column in self._features():
            if column.transforms and column.transforms[0].reads_text:
                types[column.source] = "text"
        return {**types, **self._schema.types}

    def _lists(self) -> set[str]:
        """Return the raw columns that hold a list for each candidate."""
        lists = set()
        for name, shape in self._schema.shapes.items():
            if shape != "value":
                lists.add(name)
        for column in self._schema.ids:
            if column.weights:
                lists |= {column.source, column.weights}
        return lists

    def _read_as_ids(self) -> set[str]:
        """Return the raw columns that stay integers: of ids, keys, and what a Cross combines."""
        names = {column.source for column in self._schema.ids}
        for column in self._features():
            if not column.reads_numbers:
                names.add(column.source)
            for transform in column.transforms:
                names.update(transform.inputs())
        return names

    def _features(self) -> list[Dense | Id]:
        return [column for column in self._schema.columns if isinstance(column, Dense | Id)]

    def columns(self, tensors: Sequence[Tensor] | PackedTensors, bounds: Bounds) -> Candidates:
        """Check all tensors of a request, then decode them.

        Raises:
            DataError: tensors are unknown, missing, sent twice, too long or of different lengths.
        """
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
