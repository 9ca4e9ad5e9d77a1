# SPDX-License-Identifier: Apache-2.0
"""Two towers: users and items as vectors of one space."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed import checks
from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.data.schema import Id, Schema
from hotbed.errors import ConfigError
from hotbed.models.layers import MLP, FeatureInputs, xavier_
from hotbed.models.layers.dense import Activation
from hotbed.models.layers.dense.linear import outside_autocast
from hotbed.models.layers.in_batch import StreamCounts, equal_keys

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class TwoTower(nn.Module):
    """Two perceptrons, one over the user's features and one over the item's; each gives a vector.

    The score is the inner product of the two vectors, or their cosine, divided by the temperature.
    Train it with `hb.losses.InBatchSoftmax()`: in training the network gives the scores of each
    user and all items of the batch, [n, n]. Popular items are drawn into batches more often than
    others, and would be punished for it; so the logarithm of an item's frequency in the stream is
    subtracted from its scores. The negatives of a sample leave out other samples of its item, and
    other positive samples of its user. A step by grains takes the items of each grain.

    Elsewhere (evaluation, prediction, exports) it gives the score of each sample, [n].

    Args:
        schema: the columns of the data, with one label; a sample is positive if its label is above
            0.
        tables: tables by name; counts of items lie in a table of dim 1 of their own.
        user: names of the features of the user; the first one is its key, an Id column.
        item: names of the features of the item; the first one is its key, an Id column.
        similarity: "cosine" or "dot".
        temperature: divides the scores.
        corrected: whether the logarithm of the frequency is subtracted in training.
        hidden: widths of the hidden layers of each tower.
        dim: numbers of a vector.
        activation: of the hidden layers: relu, gelu, silu, tanh, sigmoid or leaky_relu.
        dropout: rate after each hidden layer, in [0, 1).
        batch_norm: normalize each hidden layer before its activation.

    Example: `hb.models.TwoTower(schema, tables, user=["user", "age"], item=["item", "genres"])`.
    Source: Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
    Recommendations", RecSys 2019.
    """

    looks_up_once = True

    def __init__(
        self,
        schema: Schema,
        tables: Mapping[str, Table],
        *,
        user: Sequence[str],
        item: Sequence[str],
        similarity: Literal["cosine", "dot"] = "cosine",
        temperature: float = 0.1,
        corrected: bool = True,
        hidden: Sequence[int] = (256, 128),
        dim: int = 64,
        activation: Activation = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        checks.one_of("similarity", similarity, ("cosine", "dot"))
        checks.above("temperature", temperature, 0.0)
        if schema.display_position is not None:
            raise ConfigError(
                "TwoTower: it does not learn the effect of the place of an item, got the column "
                f"{schema.display_position.name!r}. Leave the column out of the schema."
            )
        self.inputs = FeatureInputs(schema, tables)
        self.features = {"user": list(user), "item": list(item)}
        self.keys = {side: _key(schema, side, names) for side, names in self.features.items()}
        self.label = schema.labels[0].name if schema.labels else ""
        self.schema = schema
        self.tables = dict(tables)
        self.cosine = similarity == "cosine"
        self.temperature = temperature
        self.towers = nn.ModuleDict()
        for side, names in self.features.items():
            self.towers[side] = MLP(
                self.inputs.width(side, names),
                hidden,
                output_dim=dim,
                activation=activation,
                dropout=dropout,
                batch_norm=batch_norm,
            )
        self.counts = StreamCounts(tables, self.keys["item"]) if corrected else None
        xavier_(self)

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> scores [n]; in training those of all users and items, [n, n]."""
        flat = self.inputs(batch)
        users, items = (
            vectors_of(self.towers[side], self.inputs.select(flat, names), is_unit=self.cosine)
            for side, names in self.features.items()
        )
        with outside_autocast(flat.device.type):
            if not self.training:
                return (users * items).sum(1) / self.temperature
            scores = users @ items.T / self.temperature
        return self._among_the_batch(batch, scores)

    def tower(self, side: str) -> Tower:
        """Return the network of one tower alone, over its own columns: vectors [n, dim].

        It shares rows and weights with this network. `side`: "user" or "item".
        """
        checks.one_of("side", side, ("user", "item"))
        columns = [self.schema[name] for name in self.features[side]]
        schema = dataclasses.replace(self.schema, columns=tuple(columns))
        return Tower(schema, self.tables, self.towers[side], is_unit=self.cosine)

    def _among_the_batch(self, batch: Batch, scores: Tensor) -> Tensor:
        """Return scores [n, n] as the loss takes them: corrected, and -inf for no negatives."""
        same_item = equal_keys(batch.ids[self.keys["item"].name]).to(scores.device)
        if self.counts is not None:
            scores, counts = self.counts(batch, scores)
            frequency = counts + same_item.sum(1)
            scores = scores - torch.log(frequency).unsqueeze(0)
        same_user = equal_keys(batch.ids[self.keys["user"].name]).to(scores.device)
        labels = batch.labels.get(self.label)
        if labels is not None:
            same_user = same_user & (torch.as_tensor(labels) > 0).to(scores.device)
        is_own = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
        return scores.masked_fill((same_item | same_user) & ~is_own, -math.inf)


class Tower(nn.Module):
    """One tower of a `TwoTower`: the features of its side -> vectors.

    Args:
        schema: the columns of the side.
        tables: tables by name.
        layers: features [n, width] -> [n, dim].
        is_unit: whether vectors have length 1.
    """

    looks_up_once = True
    ignores_mode = True

    def __init__(
        self, schema: Schema, tables: Mapping[str, Table], layers: nn.Module, *, is_unit: bool
    ) -> None:
        super().__init__()
        self.schema = schema
        self.inputs = FeatureInputs(schema, tables)
        self.layers = layers
        self.is_unit = is_unit

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> vectors [n, dim]."""
        return vectors_of(self.layers, self.inputs(batch), is_unit=self.is_unit)


def vectors_of(layers: nn.Module, features: Tensor, *, is_unit: bool) -> Tensor:
    """Return the vectors of a tower in float32; `is_unit`: of length 1."""
    vectors: Tensor = layers(features).float()
    return F.normalize(vectors, dim=1) if is_unit else vectors


def _key(schema: Schema, side: str, names: Sequence[str]) -> Id:
    """Return the first feature of a side; raise ConfigError if it is not an Id column."""
    column = schema[names[0]] if names and names[0] in {c.name for c in schema.ids} else None
    if not isinstance(column, Id):
        raise ConfigError(
            f"{side}: the first feature is the key of the {side}, an Id column, got {list(names)}. "
            f"Begin with one of {', '.join(column.name for column in schema.ids)}."
        )
    return column
