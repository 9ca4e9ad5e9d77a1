# SPDX-License-Identifier: Apache-2.0
"""MaskNet: features times masks that depend on the sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from hotbed import checks
from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.models.layers import (
    MLP,
    FeatureInputs,
    FieldNorm,
    LogitHead,
    MaskBlock,
    PositionTerm,
    xavier_,
)
from hotbed.models.layers.dense import Activation

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class MaskNet(nn.Module):
    """MaskNet: blocks that multiply features with a mask, which a perceptron makes of the features.

    Serial blocks each take the result of the block before. Parallel blocks all take the features,
    and a perceptron takes their results side by side. The first blocks take the normalized
    embeddings of each field, and all masks depend on the embeddings before that. All tables must
    have the same dim.

    Args:
        schema: the columns of the data.
        tables: tables by name.
        structure: "parallel" or "serial".
        num_blocks: parallel blocks; without a meaning for serial ones.
        block_width: width of the result of a parallel block.
        hidden: widths of the serial blocks, or of the perceptron over parallel ones.
        reduction_ratio: width of the hidden layer of a mask, divided by the width of all features.
        activation: of the perceptron: relu, gelu, silu, tanh, sigmoid or leaky_relu.
        dropout: rate after each block and each hidden layer, in [0, 1).

    Example: `hb.models.MaskNet(schema, tables, structure="serial", hidden=(400, 400))`. Source:
    Wang et al., "MaskNet: Introducing Feature-Wise Multiplication to CTR Ranking Models by
    Instance-Guided Mask", DLP-KDD 2021.
    """

    looks_up_once = True
    ignores_mode = True

    def __init__(
        self,
        schema: Schema,
        tables: Mapping[str, Table],
        *,
        structure: Literal["parallel", "serial"] = "parallel",
        num_blocks: int = 3,
        block_width: int = 64,
        hidden: Sequence[int] = (400, 400, 400),
        reduction_ratio: float = 1.0,
        activation: Activation = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        checks.one_of("structure", structure, ("parallel", "serial"))
        checks.at_least("num_blocks", num_blocks, 1)
        self.inputs = FeatureInputs(schema, tables)
        dim = self.inputs.equal_dim("MaskNet")
        self.norm = FieldNorm(len(self.inputs.field_dims), dim)
        width = self.inputs.output_dim
        self.serial = structure == "serial"
        if self.serial:
            sizes = list(zip([width, *hidden], hidden, strict=False))
        else:
            sizes = [(width, block_width)] * num_blocks
        self.blocks = nn.ModuleList()
        for size, next_size in sizes:
            block = MaskBlock(
                size, width, next_size, reduction_ratio=reduction_ratio, dropout=dropout
            )
            self.blocks.append(block)
        last = [width, *hidden][-1]
        self.mlp: MLP | None = None
        if not self.serial:
            self.mlp = MLP(num_blocks * block_width, hidden, activation=activation, dropout=dropout)
            last = self.mlp.output_dim
        self.head = LogitHead(last)
        self.position = PositionTerm(schema)
        xavier_(self)

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        flat = self.inputs(batch)
        numbers = flat[:, self.inputs.embedding_dim :]
        x = torch.cat([self.norm(self.inputs.fields(flat)).flatten(1), numbers], dim=1)
        if self.mlp is None:
            for block in self.blocks:
                x = block(x, flat)
        else:
            x = self.mlp(torch.cat([block(x, flat) for block in self.blocks], dim=1))
        logits: Tensor = self.position(self.head(x), batch)
        return logits
