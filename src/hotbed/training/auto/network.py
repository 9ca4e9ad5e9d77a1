# SPDX-License-Identifier: Apache-2.0
"""The state of a converted model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .lookups import MovedLookup
from .report import Report
from .signature import Signature
from .trace import IdGraph


@dataclass
class Converted:
    """What a model carries after `hb.auto`.

    Attributes:
        lookups: by module path, the modules that took the place of embeddings.
        report: of the conversion.
        times: the name of the leaf that holds the times of the samples; None = there is none.
        unbounded: paths of the lookups whose ids come from the id graph.
        signature: of the model's arguments; None before the first batch.
    """

    lookups: dict[str, MovedLookup]
    report: Report
    times: str | None = None
    unbounded: tuple[str, ...] = ()
    signature: Signature | None = None

    def id_graph(self) -> IdGraph:
        """Return the id graph of the model, traced when it is first needed.

        Raises:
            ConfigError: there was no batch yet, or the model cannot be traced.
        """
        raise NotImplementedError


def converted(model: nn.Module) -> Converted | None:
    """Return the state of a model that `hb.auto` converted; None for other models."""
    return model.__dict__.get("_hotbed")
