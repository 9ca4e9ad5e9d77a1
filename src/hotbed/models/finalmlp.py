# SPDX-License-Identifier: Apache-2.0
"""FinalMLP: two perceptrons and their products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.models.layers import (
    MLP,
    BilinearProduct,
    FeatureGate,
    FeatureInputs,
    LogitHead,
    PositionTerm,
    xavier_,
)
from hotbed.models.layers.dense import Activation

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class FinalMLP(nn.Module):
    """FinalMLP: two perceptrons, each over features that a gate weighs, joined by products.

    The logit is b + u . o_1 + v . o_2 + sum over heads h of o_{1,h}^T W_h o_{2,h}, with o_1 and o_2
    the outputs of the perceptrons.

    Args:
        schema: the columns of the data.
        tables: tables by name.
        hidden: widths of the hidden layers of the first perceptron.
        second_hidden: of the second one; None takes those of the first.
        num_heads: parts of the outputs that are multiplied; they divide the last widths.
        context: features that the gate of the first perceptron depends on, for example those of the
            user; empty: one learned gate for all samples.
        second_context: of the second perceptron, for example the features of the item.
        gate_hidden: widths of the hidden layers of the gates; None leaves the gates out.
        activation: of the hidden layers: relu, gelu, silu, tanh, sigmoid or leaky_relu.
        dropout: rate after each hidden layer of the perceptrons, in [0, 1).
        batch_norm: normalize each hidden layer of the perceptrons before its activation.

    Example: `hb.models.FinalMLP(schema, tables, context=["user"], second_context=["item"])`.
    Source: Mao et al., "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction", AAAI 2023.
    """

    looks_up_once = True
    ignores_mode = True

    def __init__(
        self,
        schema: Schema,
        tables: Mapping[str, Table],
        *,
        hidden: Sequence[int] = (400, 400, 400),
        second_hidden: Sequence[int] | None = None,
        num_heads: int = 1,
        context: Sequence[str] = (),
        second_context: Sequence[str] = (),
        gate_hidden: Sequence[int] | None = (64,),
        activation: Activation = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.inputs = FeatureInputs(schema, tables)
        width = self.inputs.output_dim
        self.contexts = [list(context), list(second_context)]
        self.gates = nn.ModuleList()
        for where, names in zip(("context", "second_context"), self.contexts, strict=True):
            size = self.inputs.width(where, names)
            if gate_hidden is not None:
                self.gates.append(FeatureGate(width, size, gate_hidden))
        self.streams = nn.ModuleList()
        sizes = []
        for widths in (hidden, hidden if second_hidden is None else second_hidden):
            stream = MLP(
                width, widths, activation=activation, dropout=dropout, batch_norm=batch_norm
            )
            self.streams.append(stream)
            sizes.append(stream.output_dim)
        self.product = BilinearProduct(sizes, num_heads=num_heads)
        self.head = LogitHead(sizes)
        self.position = PositionTerm(schema)
        xavier_(self)

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        flat = self.inputs(batch)
        outputs = []
        for number, (stream, names) in enumerate(zip(self.streams, self.contexts, strict=True)):
            features = flat
            if len(self.gates):
                context = self.inputs.select(flat, names) if names else None
                features = self.gates[number](flat, context)
            outputs.append(stream(features))
        logits: Tensor = self.position(self.head(*outputs) + self.product(*outputs), batch)
        return logits
