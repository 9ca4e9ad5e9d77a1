# SPDX-License-Identifier: Apache-2.0
"""The ids of a model's lookups as the features of a batch, and their rows in the forward pass."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch, Ids
from hotbed.errors import ConfigError, HotbedError, RowShapeError
from hotbed.training.auto.binding import bind
from hotbed.training.auto.signature import VALUES, Signature
from hotbed.training.auto.trace import Findings, IdGraph
from hotbed.training.auto.trace import inspect as look_at
from hotbed.training.step.network import Arguments
from hotbed.training.step.turns import features_of, ids_of_samples

Call = Callable[[Any], Arguments]
"""Returns the positional and keyword arguments of a model for an item of its data."""


def calls_of(model: nn.Module, item: Any) -> Iterator[Arguments]:
    """Yield the ways in which a loop may call `model` with an item of its data, likely ones first.

    A `Batch` is one argument, or its columns are the arguments of their names. The keys of a dict
    are parameters, or it is one argument. The items of a tuple are the arguments in their order,
    and those behind the last one are labels. A first item that is not a tensor may hold all of the
    arguments.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter for parameter in parameters if parameter.kind in kinds]
    required = [
        parameter.name for parameter in positional if parameter.default is inspect.Parameter.empty
    ]
    if isinstance(item, Mapping):
        names = [parameter.name for parameter in positional if parameter.name in item]
        if set(required) <= set(names):
            yield (), {name: item[name] for name in names}
    if isinstance(item, (tuple, list)) and not hasattr(item, "_fields"):
        if item and not torch.is_tensor(item[0]):
            yield from calls_of(model, item[0])
        if len(required) <= len(item):
            yield tuple(item[: len(positional)]), {}
    if len(required) <= 1 <= len(positional):
        yield (item,), {}
    if isinstance(item, Batch):
        try:
            yield bind(model, item)
        except HotbedError:
            return


class IdFeatures:
    """Computes the ids of the lookups of a model from the items of its data: a feature each.

    A lookup that takes place again in one forward pass is a feature of its own: the second one of
    "user" is "user/2". `IdFeatures.trace` makes it.

    Args:
        graph: of the model.
        signature: of its arguments.
        call: returns the arguments of the model for an item of the data.

    Attributes:
        lookups: the lookup of each feature, in the order of the forward pass.
    """

    def __init__(self, graph: IdGraph, signature: Signature, call: Call) -> None:
        self.graph = graph
        self.signature = signature
        self._call = call
        self.lookups = features_of(call.path for call in graph.calls)
        self._bags = {path: self._bags_of(path) for path in self.lookups.values()}

    @staticmethod
    def trace(
        model: nn.Module, lookups: Mapping[str, nn.Module], item: Any, call: Call | None = None
    ) -> tuple[Findings, IdFeatures | None]:
        """Return what the code of a model does with its lookups, and their features.

        Without features, the findings tell the problem.

        Args:
            model: in the mode, train or eval, whose code is wanted.
            lookups: modules by name; see `hotbed.training.auto.inspect`.
            item: the first one of the data, of tensors.
            call: returns the arguments of the model for an item; None = the first way of
                `calls_of` by which the model looks something up.

        Raises:
            ConfigError: the model does not take the item.
        """
        calls = [call]
        if call is None:
            num_ways = sum(1 for _ in calls_of(model, item))
            calls = [partial(_nth_call, model, number) for number in range(num_ways)]
        first: Findings | None = None
        for call_of in calls:
            assert call_of is not None
            try:
                signature = Signature.of(model, *call_of(item))
            except ConfigError:
                if call is not None:
                    raise
                continue
            findings = look_at(model, lookups, signature)
            if findings.graph is not None and (findings.graph.calls or findings.obstacles):
                return findings, IdFeatures(findings.graph, signature, call_of)
            first = first or findings
        if first is None:
            raise ConfigError(
                f"{type(model).__name__}: how the model is called with an item of the data is "
                f"open, got {type(item).__name__}. Give a function that returns its arguments."
            )
        return first, None

    def compute(self, item: Any, time: Any = None, among: Collection[str] | None = None) -> Batch:
        """Return a batch of the ids of each lookup, with the samples of an item of the data.

        Ids of shape [n, ...] belong to the n samples, those computed from the ids of bags to the
        bags. Of others, the first of equal parts belongs to the first sample, and so on; ids that
        cannot be divided so belong to the newest sample.

        Args:
            item: of tensors.
            time: int64 microseconds of the samples, [n], or of all of them, [1]; None = no times.
            among: lookups whose ids are wanted; None = all.

        Raises:
            RowShapeError: the item differs in kind from that of the trace.
        """
        leaves = [leaf.cpu() for leaf in self.signature.leaves(*self._call(item))]
        misfit = self.graph.misfit(leaves)
        if misfit:
            raise RowShapeError(
                f"ids cannot be computed for this batch before its forward pass, got: {misfit}. "
                "Bring batches of such sizes."
            )
        num_samples = self.signature.num_samples_of(leaves)
        if time is not None:
            time = torch.as_tensor(time).reshape(-1)
            if len(time) == 1:
                time = time.expand(num_samples)
        ids = {}
        with torch.no_grad():
            for name, (lookup, lookup_ids) in zip(self.lookups, self.graph(leaves), strict=True):
                if among is None or lookup in among:
                    bags = self._as_bags(lookup, lookup_ids.values, leaves, num_samples)
                    ids[name] = bags or ids_of_samples(lookup_ids.values, num_samples, time)
        return Batch(ids, time=time, num_samples=num_samples)

    def _bags_of(self, lookup: str) -> list[tuple[int, int]]:
        """Return the numbers of the leaves of ids and of offsets that a lookup may belong to."""
        numbers = {leaf.name: number for number, leaf in enumerate(self.signature.tensors)}
        bags = []
        for number, leaf in enumerate(self.signature.tensors):
            is_source = leaf.bag in self.graph.sources[lookup].leaves
            if is_source and leaf.bag is not None and leaf.axis != VALUES:
                bags.append((numbers[leaf.bag], number))
        return bags

    def _as_bags(
        self, lookup: str, values: Tensor, leaves: Sequence[Tensor], num_samples: int
    ) -> Ids | None:
        """Return ids as those of the bags that they were computed from; None if they are none."""
        for ids, offsets in self._bags[lookup]:
            starts = leaves[offsets]
            if values.shape[:1] == leaves[ids].shape[:1] and values.dim() == 1:
                if len(starts) == num_samples:
                    starts = torch.cat([starts, starts.new_tensor([len(values)])])
                return Ids(values, starts)
        return None


def _nth_call(model: nn.Module, number: int, item: Any) -> Arguments:
    """Return the arguments of a model by one of the ways of `calls_of`."""
    arguments = next(itertools.islice(calls_of(model, item), number, None), None)
    if arguments is None:
        raise RowShapeError(
            f"{type(model).__name__}: each item of the data must have the structure of the first "
            f"one, got {type(item).__name__}. Yield items of one structure."
        )
    return arguments
