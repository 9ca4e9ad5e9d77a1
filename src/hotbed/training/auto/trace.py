# SPDX-License-Identifier: Apache-2.0
"""The id graph of a model: what computes the ids of its lookups from the batch alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from hotbed.data.batch import Ids


@dataclass(frozen=True)
class Call:
    """One lookup of a forward pass.

    Attributes:
        path: the module that looks up.
        ids: number of the output of the id graph that holds its ids.
        offsets: number of the output that holds its offsets; None = it has none.
        weights: number of the output that holds its weights; None = it has none.
    """

    path: str
    ids: int
    offsets: int | None = None
    weights: int | None = None


@dataclass(frozen=True)
class IdGraph:
    """Computes the ids of every lookup from the leaves of a model's arguments.

    Attributes:
        module: the leaves, in the order of the signature -> a tuple of tensors.
        calls: the lookups whose ids it computes, in the order of the forward pass.
        obstacles: of each module path whose ids it does not compute, the reason.
    """

    module: fx.GraphModule
    calls: list[Call]
    obstacles: dict[str, str] = field(default_factory=dict)

    def __call__(self, leaves: Sequence[Tensor]) -> list[tuple[str, Ids]]:
        """Return the module path and the ids of each lookup, in the order of the forward pass."""
        outputs = self.module(*leaves)
        lookups = []
        for call in self.calls:
            offsets = None
            weights = None
            if call.offsets is not None:
                offsets = outputs[call.offsets]
            if call.weights is not None:
                weights = outputs[call.weights]
            lookups.append((call.path, Ids(outputs[call.ids], offsets, weights)))
        return lookups


@dataclass(frozen=True)
class Findings:
    """What a look at the code of a model has shown, before anything is changed.

    Attributes:
        kept: of each module path whose weight is read outside a lookup, where it is read.
        refused: of each module path that cannot be moved, the reason: it lies in a branch that
            depends on data.
        graph: the id graph, if the model could be traced.
        problem: why the model could not be traced; "" if it could.
    """

    kept: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    graph: IdGraph | None = None
    problem: str = ""


def inspect(
    model: nn.Module,
    paths: Sequence[str],
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
) -> Findings:
    """Return what the code of `model` does with the embeddings at `paths`. Change nothing.

    Args:
        model: before or after its conversion.
        paths: of its nn.Embedding and nn.EmbeddingBag modules, or of those that took their place.
        arguments: positional and keyword arguments of a call; None = there is no batch yet.
    """
    return Findings(problem="tracing is not built")
