# SPDX-License-Identifier: Apache-2.0
"""The result of a lookup of an exported network, made of the inputs of its graph.

A server pools features before the graph, but not those that the network gives weights of its own:
the graph takes their rows, and pools them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hotbed.data.batch import Ids
from hotbed.embedding.lookups import Pooled
from hotbed.embedding.modules import FlowModule


def pooled_inputs(
    module: FlowModule,
    lookup: str,
    specs: Sequence[tuple[str, str, str]],
    inputs: Mapping[str, Tensor],
    ids: Sequence[Ids],
) -> Pooled:
    """Return the pooled features side by side, and the rows of each sequence.

    Args:
        module: the module that looks up.
        lookup: the name of the lookup.
        specs: name, table and pooling of each feature, as the server reads them.
        inputs: of the graph, by name.
        ids: of each feature, with the weights that the network gave them.
    """
    layout = module.layout
    features = list(zip(specs, layout.features, layout.dims, ids, strict=True))
    sequences = [
        inputs[f"{lookup}/{name}"]
        for (name, _, _), feature, _, _ in features
        if feature.pooling == "none"
    ]
    num_rows = sum(pooling == "none" for _, _, pooling in specs)
    if num_rows == len(sequences):  # the network weighs no ids
        return inputs.get(lookup, torch.zeros(0, 0)), sequences
    pooled = []
    start = 0
    for (name, _, pooling), feature, dim, bags in features:
        if pooling != "none":
            pooled.append(inputs[lookup][:, start : start + dim])
            start += dim
        elif feature.pooling != "none":
            pooled.append(_weighed(inputs[f"{lookup}/{name}"], bags, feature.pooling))
    return torch.cat(pooled, dim=1), sequences


def _weighed(rows: Tensor, ids: Ids, pooling: str) -> Tensor:
    """Return rows [m, dim] times their weights, pooled by sample, as `docs/embedding.md` says."""
    weighed: Tensor = rows * ids.weights.unsqueeze(1)
    if ids.offsets is None:
        return weighed
    offsets = ids.offsets
    ends = offsets[1:]
    num_ended = ends.new_zeros(rows.shape[0] + 1).scatter_add(0, ends, torch.ones_like(ends))
    owners = num_ended.cumsum(0)[:-1].unsqueeze(1).expand_as(weighed)
    total: Tensor = rows.new_zeros(ends.shape[0], rows.shape[1]).scatter_add(0, owners, weighed)
    if pooling == "mean":
        lengths = (ends - offsets[:-1]).unsqueeze(1)
        total = total / lengths.clamp(min=1)
    return total
