# SPDX-License-Identifier: Apache-2.0
"""FuxiCTR's own layers between the tables and the last layer of Hotbed, one network each.

Each network here joins the layers as the network of FuxiCTR does, whose own class reads FuxiCTR's
data and embeddings. Layers that only one network has lie in `model_zoo` of its repository.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from fuxictr.pytorch.layers import (
    CrossNet,
    CrossNetV2,
    DIN_Attention,
    InnerProductInteraction,
    MLP_Block,
)
from model_zoo.AutoInt.src.AutoInt import MultiHeadSelfAttention
from model_zoo.FinalMLP.src.FinalMLP import FeatureSelection, InteractionAggregation
from model_zoo.MaskNet.src.MaskNet import ParallelMaskNet
from model_zoo.multitask.MMoE.src.MMoE import MMoE_Layer
from model_zoo.multitask.PLE.src.PLE import CGC_Layer
from model_zoo.QNN.src.QNN_alpha import QuadraticNeuralNetworks
from torch import Tensor, nn

import hotbed as hb
from hotbed.models.layers import FeatureInputs, HistoryInputs, LinearTerm, LogitHead, xavier_

Tables = Mapping[str, hb.Table]
CROSSES = {"DCN": CrossNet, "DCNv2": CrossNetV2}


class Crossed(nn.Module):
    """DNN, DCN or DCNv2: a perceptron, beside it `num_crosses` cross layers."""

    def __init__(
        self,
        schema: hb.Schema,
        tables: Tables,
        *,
        hidden: Sequence[int],
        kind: str = "DNN",
        num_crosses: int = 0,
    ) -> None:
        super().__init__()
        self.inputs = FeatureInputs(schema, tables)
        width = self.inputs.output_dim
        self.cross = CROSSES[kind](width, num_crosses) if num_crosses else None
        self.mlp = MLP_Block(width, list(hidden))
        self.head = LogitHead(hidden[-1] + width * (self.cross is not None))
        xavier_(self)

    def forward(self, batch: hb.Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        flat = self.inputs(batch)
        outputs = [self.mlp(flat)]
        if self.cross is not None:
            outputs.insert(0, self.cross(flat))
        logits: Tensor = self.head(torch.cat(outputs, dim=1))
        return logits


class DeepFM(nn.Module):
    """A factorization machine and a perceptron."""

    def __init__(self, schema: hb.Schema, tables: Tables, *, hidden: Sequence[int]) -> None:
        super().__init__()
        self.linear = LinearTerm(schema, tables)
        self.inputs = FeatureInputs(schema, tables)
        self.pairs = InnerProductInteraction(len(self.inputs.field_dims), "product_sum")
        self.mlp = MLP_Block(self.inputs.output_dim, list(hidden))
        self.head = LogitHead(hidden[-1])
        xavier_(self)

    def forward(self, batch: hb.Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        flat = self.inputs(batch)
        pairs = self.pairs(self.inputs.fields(flat)).squeeze(1)
        logits: Tensor = self.linear(batch) + pairs + self.head(self.mlp(flat))
        return logits


class DLRM(nn.Module):
    """Inner products of all pairs, with the numbers as one more field."""

    def __init__(
        self, schema: hb.Schema, tables: Tables, *, bottom: Sequence[int], hidden: Sequence[int]
    ) -> None:
        super().__init__()
        self.inputs = FeatureInputs(schema, tables)
        dim = self.inputs.equal_dim("DLRM")
        has_numbers = self.inputs.dense_dim > 0
        self.bottom = None
        if has_numbers:
            self.bottom = MLP_Block(
                self.inputs.dense_dim, list(bottom), output_dim=dim, output_activation="relu"
            )
        num_fields = len(self.inputs.field_dims) + has_numbers
        self.pairs = InnerProductInteraction(num_fields, "inner_product")
        self.top = MLP_Block(self.pairs.interaction_units + dim * has_numbers, list(hidden))
        self.head = LogitHead(hidden[-1])
        xavier_(self)

    def forward(self, batch: hb.Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        flat = self.inputs(batch)
        fields = self.inputs.fields(flat)
        parts = []
        if self.bottom is not None:
            numbers = self.bottom(flat[:, self.inputs.embedding_dim :])
            fields = torch.cat([fields, numbers.unsqueeze(1)], dim=1)
            parts.append(numbers)
        parts.insert(0, self.pairs(fields))
        logits: Tensor = self.head(self.top(torch.cat(parts, dim=1)))
        return logits


class AutoInt(nn.Module):
    """Self-attention over fields, and a perceptron; a number scales a learned vector."""

    def __init__(
        self,
        schema: hb.Schema,
        tables: Tables,
        *,
        num_layers: int,
        width: int,
        hidden: Sequence[int],
    ) -> None:
        super().__init__()
        self.inputs = FeatureInputs(schema, tables)
        dim = self.inputs.equal_dim("AutoInt")
        self.numbers = nn.Parameter(torch.empty(self.inputs.dense_dim, dim))
        if self.inputs.dense_dim:
            nn.init.xavier_normal_(self.numbers)
        self.attention = nn.Sequential()
        for number in range(num_layers):
            layer = MultiHeadSelfAttention(
                width if number else dim, attention_dim=width, num_heads=2
            )
            self.attention.append(layer)
        self.mlp = MLP_Block(self.inputs.output_dim, list(hidden))
        num_fields = len(self.inputs.field_dims) + self.inputs.dense_dim
        self.head = LogitHead([num_fields * width, hidden[-1]])
        xavier_(self)

    def forward(self, batch: hb.Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        flat = self.inputs(batch)
        vectors = flat[:, self.inputs.embedding_dim :].unsqueeze(2) * self.numbers
        fields = torch.cat([self.inputs.fields(flat), vectors], dim=1)
        logits: Tensor = self.head(self.attention(fields).flatten(1), self.mlp(flat))
        return logits


class MaskNet(nn.Module):
    """Blocks of masked features side by side."""

    def __init__(
        self, schema: hb.Schema, tables: Tables, *, num_blocks: int, hidden: Sequence[int]
    ) -> None:
        super().__init__()
        self.inputs = FeatureInputs(schema, tables)
        dim = self.inputs.equal_dim("MaskNet")
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in self.inputs.field_dims)
        self.masks = ParallelMaskNet(
            self.inputs.output_dim,
            num_blocks=num_blocks,
            block_dim=64,
            hidden_units=list(hidden),
            hidden_activations="relu",
        )
        self.head = LogitHead(hidden[-1])
        xavier_(self)

    def forward(self, batch: hb.Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        flat = self.inputs(batch)
        fields = self.inputs.fields(flat).unbind(1)
        parts = [norm(field) for norm, field in zip(self.norms, fields, strict=True)]
        parts.append(flat[:, self.inputs.embedding_dim :])
        logits: Tensor = self.head(self.masks(flat, torch.cat(parts, dim=1)))
        return logits


class FinalMLP(nn.Module):
    """Two perceptrons behind gates that are the same for all samples, and their products."""

    def __init__(self, schema: hb.Schema, tables: Tables, *, hidden: Sequence[int]) -> None:
        super().__init__()
        self.inputs = FeatureInputs(schema, tables)
        width = self.inputs.output_dim
        self.gates = FeatureSelection(None, width, 16, fs_hidden_units=[64])
        self.streams = nn.ModuleList(MLP_Block(width, list(hidden)) for _ in range(2))
        self.products = InteractionAggregation(hidden[-1], hidden[-1])
        self.head = LogitHead(hidden[-1])
        self.products.w_x = self.head.linear  # whose bias `set_base_rate` finds
        xavier_(self)

    def forward(self, batch: hb.Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        features = self.gates(None, self.inputs(batch))
        outputs = [stream(x) for stream, x in zip(self.streams, features, strict=True)]
        logits: Tensor = self.products(*outputs).squeeze(1)
        return logits


class QNN(nn.Module):
    """Quadratic layers; with one head, which permutes nothing."""

    def __init__(self, schema: hb.Schema, tables: Tables, *, num_layers: int) -> None:
        super().__init__()
        self.inputs = FeatureInputs(schema, tables)
        width = self.inputs.output_dim
        self.quadratic = QuadraticNeuralNetworks(
            input_dim=width,
            num_fields=1,
            num_layers=num_layers,
            num_row=2,
            num_heads=1,
            net_dropout=0,
        )
        self.quadratic.fc = nn.Identity()
        self.head = LogitHead(width)
        xavier_(self)

    def forward(self, batch: hb.Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        logits: Tensor = self.head(self.quadratic(self.inputs(batch)))
        return logits


class DIN(nn.Module):
    """A perceptron over the features and the history that attention weighs."""

    def __init__(
        self,
        schema: hb.Schema,
        tables: Tables,
        *,
        histories: Mapping[str, str],
        hidden: Sequence[int],
    ) -> None:
        super().__init__()
        self.inputs = HistoryInputs(schema, tables, histories)
        [dim] = self.inputs.dims
        self.attention = DIN_Attention(dim, [80, 40], hidden_activations="sigmoid")
        self.mlp = MLP_Block(self.inputs.output_dim + dim, list(hidden))
        self.head = LogitHead(hidden[-1])
        xavier_(self)

    def forward(self, batch: hb.Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        flat, [history] = self.inputs(batch)
        pooled = self.attention(history.target, history.rows, history.mask)
        logits: Tensor = self.head(self.mlp(torch.cat([flat, pooled], dim=1)))
        return logits


class Experts(nn.Module):
    """MMoE or PLE of one level: four experts of 128, and for each label a perceptron of 64."""

    def __init__(
        self, schema: hb.Schema, tables: Tables, *, kind: str, tasks: Sequence[str]
    ) -> None:
        super().__init__()
        self.tasks = tasks
        self.inputs = FeatureInputs(schema, tables)
        width = self.inputs.output_dim
        self.is_ple = kind == "PLE"
        settings = ([128], [], "relu", 0, False)  # no layers in the gates, no dropout, no norm
        if self.is_ple:
            self.experts = CGC_Layer(2, 2, len(tasks), width, *settings)
        else:
            self.experts = MMoE_Layer(4, len(tasks), width, *settings)
        self.towers = nn.ModuleDict({task: MLP_Block(128, [64]) for task in tasks})
        self.heads = nn.ModuleDict({task: LogitHead(64) for task in tasks})
        xavier_(self)

    def forward(self, batch: hb.Batch) -> dict[str, Tensor]:
        """A batch of n samples -> logits [n] by task."""
        flat = self.inputs(batch)
        inputs = [flat] * (len(self.tasks) + 1) if self.is_ple else flat
        mixed = dict(zip(self.tasks, self.experts(inputs), strict=False))  # PLE: and the shared one
        return {task: self.heads[task](self.towers[task](x)) for task, x in mixed.items()}
