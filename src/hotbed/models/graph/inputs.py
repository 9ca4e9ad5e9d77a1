# SPDX-License-Identifier: Apache-2.0
"""The inputs of a network from a description: from a batch to named tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hotbed.config import did_you_mean
from hotbed.data.batch import Batch
from hotbed.data.schema import Dense, Id, Schema
from hotbed.embedding.histories import HistoryStore
from hotbed.embedding.modules import EmbeddingCollection, Feature
from hotbed.models.graph.description import KeyPlace, Node
from hotbed.models.graph.kinds import NUM_ROWS, Shape
from hotbed.models.layers import PadSequence
from hotbed.models.layers.inputs import bounds_of, dense_matrix, table_of

if TYPE_CHECKING:
    from hotbed.embedding.table import Table

_OF_TABLES = {"columns": list[str], "suffix": str, "dim": int}
_HINTS: Mapping[str, Mapping[str, Any]] = {
    "fields": _OF_TABLES,
    "flat": _OF_TABLES,
    "dense": {"columns": list[str]},
    "sequence": {"column": str, "length": int, "suffix": str, "dim": int},
}
_OPTIONAL = ("suffix", "dim")


class GraphInputs(nn.Module):
    """The inputs that a description names: `inputs(batch)` returns tensors by name.

    All inputs without a suffix share one lookup, so that an id is counted once; so do all inputs
    of one suffix.

    Args:
        schema: the columns of the data.
        tables: tables by name.
        nodes: the inputs of the description.

    Raises:
        ConfigError: an input is wrong; the message starts with its place in the description.
    """

    _device: Tensor

    def __init__(self, schema: Schema, tables: Mapping[str, Table], nodes: Sequence[Node]) -> None:
        super().__init__()
        inputs = [_input(node, schema) for node in nodes]
        self._dense = [input for input in inputs if input.is_dense]
        self._views: list[list[_View]] = []  # of each lookup
        self._histories: list[list[_History]] = []
        self.collections = nn.ModuleList()
        self.pads = nn.ModuleList()
        for suffix in dict.fromkeys(input.suffix for input in inputs if not input.is_dense):
            group = [input for input in inputs if not input.is_dense and input.suffix == suffix]
            collection = _collection(group, tables, HistoryStore.of(schema, tables))
            self.collections.append(collection)
            self._views.append([_view(input, collection) for input in group if not input.length])
            self._histories.append(
                [self._history(input, collection) for input in group if input.length]
            )
        # follows .to(device); dense columns are moved to its device
        self.register_buffer("_device", torch.empty(0), persistent=False)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """A batch of n samples -> tensors by name."""
        tensors: dict[str, Tensor] = {}
        for number, collection in enumerate(self.collections):
            assert isinstance(collection, EmbeddingCollection)
            flat, sequences = collection.flat_and_sequences(batch)
            for view in self._views[number]:
                tensors[view.tensor] = view.of(flat)
            for history in self._histories[number]:
                offsets = bounds_of(batch.ids[history.column])
                padded = self.pads[history.pad](sequences[history.column], offsets)
                tensors.update(zip(history.tensors, padded, strict=True))
        for input in self._dense:
            matrix = dense_matrix(batch, input.names)
            tensors[input.tensor] = matrix.to(self._device.device)
        return tensors

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the tensors by name, for NUM_ROWS samples."""
        shapes: dict[str, Shape] = {}
        for input in self._dense:
            shapes[input.tensor] = (NUM_ROWS, sum(column.width for column in input.columns))
        for views in self._views:
            for view in views:
                shapes[view.tensor] = (NUM_ROWS, *view.shape)
        for histories in self._histories:
            for history in histories:
                rows, mask = history.tensors
                shapes[mask] = (NUM_ROWS, history.shape[0])
                shapes[rows] = (NUM_ROWS, *history.shape)
        return shapes

    def _history(self, input: _Input, collection: EmbeddingCollection) -> _History:
        """Return where a sequence lies in the result of its lookup; its padding is added."""
        if len(input.node.outputs) != 2:
            advice = "Name the rows and their mask."
            place = input.node.place.key("outputs")
            raise place.error("a sequence has two outputs", list(input.node.outputs), advice)
        self.pads.append(PadSequence(input.length))
        names = [feature.name for feature in collection.features]
        number = names.index(input.names[0])
        return _History(
            input.node.outputs,
            input.names[0],
            len(self.pads) - 1,
            (input.length, collection.dims[number]),
        )


@dataclass(frozen=True)
class _Input:
    """An input whose keys are checked."""

    node: Node
    columns: list[Any]
    suffix: str
    dim: int | None
    length: int  # of a sequence, else 0

    @property
    def is_dense(self) -> bool:
        return self.node.kind == "dense"

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    @property
    def tensor(self) -> str:
        return self.node.outputs[0]


@dataclass(frozen=True)
class _View:
    """The part of a lookup's result [n, width] that is a tensor of the network.

    Attributes:
        tensor: its name.
        ranges: begin and end of its columns.
        shape: of the tensor, without its rows.
    """

    tensor: str
    ranges: list[tuple[int, int]]
    shape: Shape

    def of(self, flat: Tensor) -> Tensor:
        """Return the tensor."""
        parts = [flat[:, start:stop] for start, stop in self.ranges]
        values = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return values.reshape(-1, *self.shape)


@dataclass(frozen=True)
class _History:
    """A sequence feature.

    Attributes:
        tensors: names of its rows and their mask.
        column: its name in a batch.
        pad: the number of its padding.
        shape: of its rows, without the samples.
    """

    tensors: tuple[str, ...]
    column: str
    pad: int
    shape: Shape


def _input(node: Node, schema: Schema) -> _Input:
    """Return an input whose kind, keys and columns are right."""
    if node.kind not in _HINTS:
        advice = did_you_mean(node.kind, _HINTS)
        raise node.place.key("input").error("unknown input", node.kind, advice)
    hints = _HINTS[node.kind]
    values = node.values(hints, [key for key in hints if key not in _OPTIONAL])
    if node.kind == "sequence":
        place = node.place.key("column")
        columns = [_column(values["column"], node, place, schema)]
    else:
        columns = _columns(values["columns"], node, schema)
        if len(node.outputs) != 1:
            place = node.place.key("outputs")
            raise place.error(f"{node.kind} has one output", list(node.outputs), "Name one.")
    dim = values.get("dim")
    length = values.get("length")
    for key, size in (("dim", dim), ("length", length)):
        if size is not None and size < 1:
            raise node.place.key(key).error("below 1", size, "Give a number from 1 on.")
    suffix = values.get("suffix", "")
    if dim is not None and not suffix:
        advice = "Add a suffix for tables beside, or set the dim of the tables themselves."
        raise node.place.key("dim").error("a dim without a suffix", dim, advice)
    return _Input(node, columns, suffix, dim, length or 0)


def _columns(names: Sequence[str], node: Node, schema: Schema) -> list[Any]:
    """Return the columns that an input names, each once."""
    place = node.place.key("columns")
    if not names:
        raise place.error("no columns", names, "Name at least one.")
    columns: list[Any] = []
    for number, name in enumerate(names):
        column = _column(name, node, place.item(number), schema)
        if column in columns:
            raise place.item(number).error("a column that comes twice", name, "Remove one.")
        columns.append(column)
    return columns


def _column(name: str, node: Node, place: KeyPlace, schema: Schema) -> Any:
    """Return a column of the role and pooling that an input takes."""
    role = Dense if node.kind == "dense" else Id
    columns: Sequence[Any] = schema.dense if role is Dense else schema.ids
    choices = {column.name: column for column in columns}
    if name not in choices:
        problem = f"not a column of the schema with the role {role.__name__}"
        raise place.error(problem, name, did_you_mean(name, choices))
    column = choices[name]
    if role is Id and (column.pooling == "none") != (node.kind == "sequence"):
        problem = f"a column with pooling {column.pooling!r}"
        advice = "The input 'sequence' takes pooling 'none', the others sum, mean and max."
        raise place.error(problem, name, advice)
    return column


def _collection(
    group: Sequence[_Input], tables: Mapping[str, Table], histories: HistoryStore | None
) -> EmbeddingCollection:
    """Return the lookup of inputs that have the same suffix.

    `histories`: the columns that the model keeps.
    """
    first = group[0]
    used: dict[str, Table] = {}
    features: dict[str, Feature] = {}
    for input in group:
        if input.dim != first.dim:
            problem = f"not the dim of {first.node.name!r}, which has the same suffix"
            raise input.node.place.key("dim").error(problem, input.dim, "Give another suffix.")
        for column in input.columns:
            table = table_of(tables, column)
            name = table.name
            if first.suffix:
                name = f"{table.name}.{first.suffix}"
            if name not in used:
                used[name] = table.like(name, first.dim or table.dim) if first.suffix else table
            features[column.name] = Feature(column.name, name, column.pooling)
    return EmbeddingCollection(list(features.values()), list(used.values()), histories=histories)


def _view(input: _Input, collection: EmbeddingCollection) -> _View:
    """Return where an input lies in the result of its lookup; neighbours are one range."""
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for feature, dim in zip(collection.features, collection.dims, strict=True):
        places[feature.name] = (end, end + dim)
        if feature.pooling != "none":
            end += dim
    ranges: list[tuple[int, int]] = []
    dims: list[int] = []
    for start, stop in [places[name] for name in input.names]:
        dims.append(stop - start)
        if ranges and ranges[-1][1] == start:
            start, _ = ranges.pop()
        ranges.append((start, stop))
    shape: Shape = (sum(dims),)
    if input.node.kind == "fields":
        if len(set(dims)) > 1:
            advice = "Give the tables one dim, or use the input 'flat'."
            raise input.node.place.key("columns").error("tables of different dims", dims, advice)
        shape = (len(dims), dims[0])
    return _View(input.tensor, ranges, shape)
