# SPDX-License-Identifier: Apache-2.0
"""Counts of the stream and equal keys, for a softmax over the items of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch, Ids
from hotbed.data.schema import Id
from hotbed.embedding.init import Zeros
from hotbed.embedding.modules import EmbeddingCollection, Feature
from hotbed.embedding.rule import Sgd
from hotbed.embedding.table import Table
from hotbed.models.layers.inputs import table_of


class StreamCounts(nn.Module):
    """How often each id of a column was learned, kept as rows of the table `<table>.counts`.

    The rows have one number and are a part of the model's state: saved, resumed, spread over ranks
    and evicted as all rows are. An id gets 1 more for each sample that has it, in the step that
    learns the sample. Counts are exact up to 2**24. A schedule of the tables' learning rate changes
    the 1 of a step to another number, the same one for all ids.

    Args:
        tables: tables by name.
        column: the column, with one id a sample.

    Source: for the use of streaming frequencies, Yi et al., "Sampling-Bias-Corrected Neural
        Modeling for Large Corpus Item Recommendations", RecSys 2019. They estimate the interval
        between two samples of an item in a hashed array; here each id has a row.
    """

    def __init__(self, tables: Mapping[str, Table], column: Id) -> None:
        super().__init__()
        table = table_of(tables, column)
        changes = {
            "name": f"{table.name}.counts",
            "dim": 1,
            "rule": Sgd(lr=1.0),
            "init": Zeros(),
            "default": 0.0,
            "dtype": "float32",
        }
        counts = Table(**{**table.config, **changes})
        self.counts = EmbeddingCollection([Feature(column.name, counts.name, "sum")], [counts])

    def forward(self, batch: Batch, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return `outputs`, whose backward pass counts the samples, and counts before them [n].

        `outputs`: what the loss is computed from.
        """
        rows = self.counts.flat(batch)
        # torch has no types for it
        counted: Tensor = _Counted.apply(outputs, rows)  # type: ignore[no-untyped-call]
        return counted, rows.detach().squeeze(1)


def counting_modules(network: nn.Module) -> set[nn.Module]:
    """Return the modules whose gradients count samples, and are not those of the loss.

    Loss scaling and clipping leave them as they are.
    """
    return {module.counts for module in network.modules() if isinstance(module, StreamCounts)}


class _Counted(torch.autograd.Function):
    """Return the outputs; each row gets the gradient -1, which Sgd with rate 1 adds as 1."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, rows: Tensor) -> Tensor:
        ctx.shape = rows.shape
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_full(ctx.shape, -1.0)


def equal_keys(ids: Ids) -> Tensor:
    """Return which two samples of a column have the same id, bool [n, n].

    A sample without an id, or with several, is equal to itself alone.
    """
    values = torch.as_tensor(ids.values)
    if ids.offsets is None:
        return values.unsqueeze(1) == values.unsqueeze(0)
    offsets = torch.as_tensor(ids.offsets)
    has_one = offsets[1:] - offsets[:-1] == 1
    first = torch.cat([values, values.new_zeros(1)])[offsets[:-1]]
    equal = (first.unsqueeze(1) == first.unsqueeze(0)) & has_one.unsqueeze(1) & has_one.unsqueeze(0)
    return equal | torch.eye(len(first), dtype=torch.bool)
