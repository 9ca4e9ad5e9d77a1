# SPDX-License-Identifier: Apache-2.0
"""Entire space multi-task model: events that follow each other, learned from all samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.errors import ConfigError
from hotbed.models.layers import MLP, FeatureInputs, JointLogit, LogitHead, PositionTerm, xavier_
from hotbed.models.layers.dense import Activation
from hotbed.models.tasks import events_of

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class ESMM(nn.Module):
    """ESMM: p(click and conversion) = p(click) p(conversion | click), over all impressions.

    A model of conversions that learns from clicked samples alone is wrong on all others, which
    were not clicked for a reason. ESMM has a tower for each event, and the tower of a conversion
    gives its probability after a click. Its prediction for the label of the conversion is the
    product, so that an ordinary cross-entropy of that label over all samples trains it. The label
    of an event is 1 where it and all events before it took place, and 0 elsewhere. The probability
    of a conversion after a click is the quotient of the two predictions.

    Args:
        schema: the columns of the data.
        tables: tables by name, which all towers share.
        tasks: names of Label columns in the order of events, two or more; empty = all labels of
            the schema in its order.
        hidden: widths of a tower's hidden layers.
        activation: of the hidden layers: relu, gelu, silu, tanh, sigmoid or leaky_relu.
        dropout: rate after each hidden layer, in [0, 1).
        batch_norm: normalize each hidden layer before its activation.

    Example: `hb.models.ESMM(schema, tables, tasks=("click", "buy"))`. Source: Ma et al., "Entire
    Space Multi-Task Model: An Effective Approach for Estimating Post-Click Conversion Rate",
    SIGIR 2018.
    """

    looks_up_once = True
    ignores_mode = True

    def __init__(
        self,
        schema: Schema,
        tables: Mapping[str, Table],
        *,
        tasks: Sequence[str] = (),
        hidden: Sequence[int] = (256, 128),
        activation: Activation = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.tasks = events_of(schema, tasks)
        self.inputs = FeatureInputs(schema, tables)
        width = self.inputs.output_dim
        self.towers = nn.ModuleDict(
            {
                task: MLP(
                    width, hidden, activation=activation, dropout=dropout, batch_norm=batch_norm
                )
                for task in self.tasks
            }
        )
        top = [width, *hidden][-1]
        self.heads = nn.ModuleDict({task: LogitHead(top) for task in self.tasks})
        self.joint = JointLogit()
        self.position = PositionTerm(schema, self.tasks)
        xavier_(self)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """A batch of n samples -> logits [n] by task."""
        flat = self.inputs(batch)
        first = self.tasks[0]
        before = self.heads[first](self.towers[first](flat))
        logits = {first: before}
        for task in self.tasks[1:]:
            conditional = self.heads[task](self.towers[task](flat))
            before = logits[task] = self.joint(before, conditional)
        placed: dict[str, Tensor] = self.position(logits, batch)
        return placed

    def head_rates(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Return the shares of positives that the heads predict, from those of the labels.

        The head of an event predicts its share among the samples of the event before it.

        Raises:
            ConfigError: a share is not below that of the event before it, or that one is missing.
        """
        shares = dict(rates)
        for place, task in enumerate(self.tasks):
            if task not in rates:
                continue
            before = 1.0 if place == 0 else rates.get(self.tasks[place - 1])
            if before is None or rates[task] >= before:
                raise ConfigError(
                    f"base_rate.{task}: must be below the share of the event before it, got "
                    f"{rates[task]} after {before}. Give the means of both labels."
                )
            shares[task] = rates[task] / before
        return shares
