# SPDX-License-Identifier: Apache-2.0
"""RankMixer: tokens of feature groups that exchange parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hotbed import checks
from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.errors import ConfigError
from hotbed.models.layers import (
    FeatureInputs,
    LogitHead,
    PositionTerm,
    TokenFeedForward,
    TokenMixing,
    xavier_,
)

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class RankMixer(nn.Module):
    """RankMixer: groups of features are tokens, which exchange parts; each has its own perceptron.

    One linear map for each group makes its token. A block is s = LayerNorm(mix(x) + x), y =
    LayerNorm(f(s) + s): `mix` gives each token one part of every token, without parameters, and f
    is a perceptron for each token. The logit is linear in the mean of the tokens. The paper's
    sparse experts are not built.

    Args:
        schema: the columns of the data.
        tables: tables by name.
        groups: names of the features of each token; each feature in one of them. Empty: each Id
            column is a token, and all Dense columns together are one.
        part_width: numbers that each token gives to each other; a token is as wide as all its
            parts, `part_width` times the number of tokens.
        num_layers: blocks.
        expansion: width of the hidden layers of the perceptrons, divided by that of a token.

    Example: `hb.models.RankMixer(schema, tables, groups=[["user", "age"], ["item", "price"]])`.
    Source: Zhu et al., "RankMixer: Scaling Up Ranking Models in Industrial Recommenders", 2025.
    """

    looks_up_once = True
    ignores_mode = True

    def __init__(
        self,
        schema: Schema,
        tables: Mapping[str, Table],
        *,
        groups: Sequence[Sequence[str]] = (),
        part_width: int = 16,
        num_layers: int = 2,
        expansion: int = 2,
    ) -> None:
        super().__init__()
        checks.at_least("part_width", part_width, 1)
        checks.at_least("num_layers", num_layers, 1)
        checks.at_least("expansion", expansion, 1)
        self.inputs = FeatureInputs(schema, tables)
        self.groups = _groups(self.inputs, groups)
        width = part_width * len(self.groups)
        self.projections = nn.ModuleList()
        for names in self.groups:
            self.projections.append(nn.Linear(self.inputs.width("groups", names), width))
        self.mixing = TokenMixing()
        self.mixing_norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_layers))
        self.feed_forwards = nn.ModuleList()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_layers))
        for _ in range(num_layers):
            hidden = expansion * width
            self.feed_forwards.append(TokenFeedForward(len(self.groups), width, hidden=hidden))
        self.head = LogitHead(width)
        self.position = PositionTerm(schema)
        xavier_(self)

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        flat = self.inputs(batch)
        tokens = torch.stack(
            [
                projection(self.inputs.select(flat, names))
                for projection, names in zip(self.projections, self.groups, strict=True)
            ],
            dim=1,
        )
        blocks = zip(self.mixing_norms, self.feed_forwards, self.norms, strict=True)
        for mixing_norm, feed_forward, norm in blocks:
            mixed = mixing_norm(self.mixing(tokens) + tokens)
            tokens = norm(feed_forward(mixed) + mixed)
        logits: Tensor = self.position(self.head(tokens.mean(1)), batch)
        return logits


def _groups(inputs: FeatureInputs, groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the features of each token; raise ConfigError unless each feature is in one."""
    if not groups:
        dense = inputs.dense_columns
        tokens = [[name] for name in inputs.widths if name not in dense]
        return tokens + ([dense] if dense else [])
    names = [name for group in groups for name in group]
    inputs.width("groups", names)
    if sorted(names) != sorted(inputs.widths) or not all(groups):
        raise ConfigError(
            f"groups: each feature must be in one group, got {[list(group) for group in groups]}. "
            f"Share out {', '.join(inputs.widths)}."
        )
    return [list(group) for group in groups]
