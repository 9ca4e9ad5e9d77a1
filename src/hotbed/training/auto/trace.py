# SPDX-License-Identifier: Apache-2.0
"""The id graph of a model: what computes the ids of its lookups from the batch alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx, nn

from hotbed.data.batch import Ids

from .signature import Signature


@dataclass(frozen=True)
class Call:
    """One lookup of a forward pass.

    Attributes:
        path: the module that looks up.
        ids: number of the output of the id graph that holds its ids.
        offsets: number of the output that holds its offsets; None = it has none.
        weights: number of the output that holds its weights; None = it has none, or they depend on
            more than the batch.
        weighted: whether the lookup takes weights.
    """

    path: str
    ids: int
    offsets: int | None = None
    weights: int | None = None
    weighted: bool = False


@dataclass(frozen=True)
class Source:
    """Where the ids of a module's lookups come from.

    Attributes:
        text: for readers, such as "'user'" or "(31 * 'user' + 'item') % 1000".
        bins: the ids end with `% bins`, which `unbounded` can drop; None = they do not.
    """

    text: str
    bins: int | None = None


@dataclass(frozen=True)
class IdGraph:
    """Computes the ids of every lookup from the leaves of a model's arguments.

    Attributes:
        module: the leaves, in the order of the signature -> a tuple of tensors. Its nodes are
            operators of ATen without side effects.
        calls: the lookups whose ids it computes, in the order of the forward pass.
        obstacles: of each module path whose ids it does not compute, the reason.
        sources: of each module path whose ids it computes, where they come from.
    """

    module: fx.GraphModule
    calls: list[Call]
    obstacles: dict[str, str] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)

    def __call__(self, leaves: Sequence[Tensor]) -> list[tuple[str, Ids]]:
        """Return the module path and the ids of each lookup, in the order of the forward pass.

        The values, offsets and weights of the ids are the tensors that the module's forward
        function takes, in their own shapes.
        """
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

    def misfit(self, leaves: Sequence[Tensor]) -> str:
        """Return why the ids of these leaves cannot be computed here; "" if they can.

        The code of a model may branch on shapes; then the graph holds for shapes on the same side.
        """
        return ""

    def unbounded(self, paths: Sequence[str]) -> IdGraph:
        """Return the graph without the last `% bins` of the ids at `paths`.

        Raises:
            ConfigError: a path is unknown, or its ids do not end with `% bins`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Findings:
    """What a look at the code of a model has shown, before anything is changed.

    Attributes:
        kept: of each module path whose weight is read outside a lookup, where it is read.
        refused: of each module path that cannot be moved, the reason: it lies in a branch that
            depends on data.
        sources: of each module path whose lookups were seen, where its ids come from.
        obstacles: of each module path whose ids depend on more than the batch, the reason.
        graph: the id graph; None without a signature, or if the model could not be traced.
        problem: why the model could not be traced; "" if it could.
    """

    kept: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, Source] = field(default_factory=dict)
    obstacles: Mapping[str, str] = field(default_factory=dict)
    graph: IdGraph | None = None
    problem: str = ""


def inspect(
    model: nn.Module,
    paths: Sequence[str],
    signature: Signature | None = None,
) -> Findings:
    """Return what the code of `model` does with the embeddings at `paths`. Change nothing.

    The model is traced in its current mode, train or eval.

    Args:
        model: before or after its conversion.
        paths: of its nn.Embedding and nn.EmbeddingBag modules, or of those that took their place.
        signature: of the model's arguments; None = there is no batch yet.
    """
    return Findings(problem="tracing is not built")
