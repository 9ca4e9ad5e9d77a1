# SPDX-License-Identifier: Apache-2.0
"""Where the results of lookups enter a dense graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.errors import ConfigError

from .model import ServedLookup


@dataclass(frozen=True)
class LookupPlace:
    """Where the results of a lookup enter the dense graph.

    Attributes:
        lookup: the lookup.
        number: of the lookup in the forward pass.
        group: the lookups that a server performs at once; also the input that takes their pooled
            bags side by side.
        feature: name of the lookup in its group.
        start: the first of its columns in that input.
    """

    lookup: ServedLookup
    number: int
    group: str
    feature: str
    start: int

    @property
    def spec(self) -> tuple[str, str, str]:
        """Feature, table and pooling, as a server looks them up."""
        pooling = self.lookup.pooling if self.lookup.is_pooled else "none"
        return self.feature, self.lookup.table, pooling

    @property
    def input(self) -> str:
        """The input that takes its rows, unless they are pooled."""
        return f"{self.group}/{self.feature}"

    @property
    def described(self) -> dict[str, Any]:
        """Which outputs of the id graph the lookup takes, and how."""
        lookup = self.lookup
        described: dict[str, Any] = {"feature": self.feature, "ids": f"ids/{self.number}"}
        if not lookup.is_pooled:
            return described
        if lookup.offsets is not None:
            described["offsets"] = f"offsets/{self.number}"
            described["ends"] = lookup.ends
        if lookup.weights is not None:
            described["weights"] = f"weights/{self.number}"
        if lookup.padding is not None:
            described["padding"] = lookup.padding
        return described


@contextmanager
def answered(places: Sequence[LookupPlace], inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Let lookups return inputs of the dense graph, in the order of the forward pass."""
    rest = iter(places)
    modules = {id(place.lookup.module): place.lookup.module for place in places}
    try:
        for module in modules.values():
            # an attribute of the object hides the method of its class
            module.__dict__["forward"] = partial(_answer, module, rest, inputs)
        yield
    finally:
        for module in modules.values():
            module.__dict__.pop("forward", None)


def _answer(
    module: nn.Module,
    rest: Iterator[LookupPlace],
    inputs: Mapping[str, Tensor],
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    place = next(rest, None)
    if place is None or place.lookup.module is not module:
        raise ConfigError(
            "export: the model looks up in another order than its trace, got a lookup of "
            f"{getattr(module, 'path', type(module).__name__)!r}. Look up the same for every "
            "batch."
        )
    lookup = place.lookup
    if lookup.is_pooled:
        return inputs[place.group][:, place.start : place.start + lookup.dim]
    rows = inputs[place.input]
    if per_sample_weights is None:
        return rows
    weights = per_sample_weights
    if lookup.padding is not None:
        weights = torch.where(input == lookup.padding, 0, weights)
    rows = rows * weights.unsqueeze(-1)
    if offsets is None:
        return rows.sum(1)
    starts = offsets[:-1] if lookup.ends else offsets
    # the bag of a row: as many bags begin at it or before, less one
    bags = torch.searchsorted(starts, torch.arange(input.shape[0]), right=True) - 1
    sums = rows.new_zeros(starts.shape[0], lookup.dim)
    return sums.scatter_add(0, bags.unsqueeze(1).expand(-1, lookup.dim), rows)
