# SPDX-License-Identifier: Apache-2.0
"""A model that takes tensors, as the exporter needs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.data.schema import Schema

Part = tuple[str, str]
"""A column of the schema, and what of it feeds a tensor: "values" (ids or numbers), "starts" (where
the ids of each sample begin), "ends" (these, and where the last ones end), or "weights"."""

_ROWS = (5, 7, 11, 13, 17, 19, 23)  # samples to trace with: a number that no other size is
FEW_ROWS = 3


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a model takes.

    Attributes:
        name: its name.
        dtype: as torch names it, such as "int64".
        shape: without the first axis.
        axis: what the first axis counts: "samples", "ends" (one more), "values" (the ids of all
            bags), or "fixed".
        size: of the first axis, where it is fixed; None: a number without an axis.
        bag: the tensor of ids that these offsets or weights belong to, or None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    axis: str
    size: int | None
    bag: str | None = None

    @property
    def is_offsets(self) -> bool:
        """Whether it says where the ids of each sample begin."""
        return self.bag is not None and self.axis in ("samples", "ends")


@dataclass(frozen=True)
class ServedLookup:
    """A lookup of a model in its forward pass.

    Attributes:
        path: path of the module.
        module: the module.
        table: name of its table.
        pooling: of its bags, or "none" for rows.
        dim: lanes of a row.
        ids: number of the output of the id graph that holds its ids.
        offsets: of the output that holds its offsets, or None.
        weights: of the output that holds its weights, or None.
        weighted: whether it takes weights; without an output they depend on what is learned.
        ends: whether its offsets include the last one.
        padding: the id that its bags leave out, or None.
    """

    path: str
    module: nn.Module
    table: str
    pooling: str
    dim: int
    ids: int
    offsets: int | None
    weights: int | None
    weighted: bool
    ends: bool
    padding: int | None

    @property
    def is_pooled(self) -> bool:
        """Whether a server pools its bags before the dense graph."""
        return self.pooling != "none" and (self.weights is not None or not self.weighted)


@dataclass(frozen=True)
class PlainModel:
    """A model that takes tensors, as the exporter needs it.

    Attributes:
        network: the model.
        tensors: that it takes.
        call: runs the model with these tensors, in their order.
        ids: returns the ids, offsets and weights of the lookups for these tensors.
        lookups: in the order of the forward pass.
        schema: returns the schema of requests for tensors of these names, and by tensor the column
            that feeds it.
    """

    network: nn.Module
    tensors: Sequence[TensorSpec]
    call: Callable[[Sequence[Tensor]], Any]
    ids: nn.Module
    lookups: Sequence[ServedLookup]
    schema: Callable[[Collection[str]], tuple[Schema, Mapping[str, Part]]]


def argument(name: str) -> str:
    """Return the name that the input for a tensor of the model has in a graph."""
    return f"argument/{name}"


def num_rows_of(specs: Sequence[TensorSpec]) -> int:
    """Return a number of samples that no other size of the tensors is."""
    sizes = {size for spec in specs for size in (spec.size, *spec.shape)}
    return next(number for number in (*_ROWS, 29) if number not in sizes or number == 29)


def example_lengths(num_rows: int) -> list[int]:
    """Return how many ids each sample has in the bags of `examples`."""
    return [2] * (num_rows - 1) + [3]


def examples(
    specs: Sequence[TensorSpec], num_rows: int, integers: Sequence[int] = (0, 1), seed: int = 0
) -> list[Tensor]:
    """Return made-up tensors for `num_samples` samples, with ids out of `integers`.

    Tensors of a fixed size are the same for every number of samples and every seed.
    """
    lengths = example_lengths(num_rows)
    num_values = sum(lengths)
    sizes = {"samples": num_rows, "ends": num_rows + 1, "values": num_values}
    of_samples = torch.Generator().manual_seed(num_rows + 1000 * seed)
    of_all = torch.Generator().manual_seed(0)
    tensors = []
    for spec in specs:
        dtype = getattr(torch, spec.dtype)
        size = sizes.get(spec.axis, spec.size)
        generator = of_samples if spec.axis in sizes else of_all
        shape = spec.shape if size is None else (size, *spec.shape)
        if spec.is_offsets:
            offsets = torch.tensor([0, *lengths]).cumsum(0)
            tensors.append(offsets[:size].to(dtype))
        elif dtype.is_floating_point:
            tensors.append(torch.rand(shape, generator=generator).to(dtype))
        else:
            places = torch.randint(0, len(integers), shape, generator=generator)
            tensors.append(torch.tensor(integers)[places].to(dtype))
    return tensors
