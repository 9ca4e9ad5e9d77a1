# SPDX-License-Identifier: Apache-2.0
"""PartLearner: a step whose batch goes through the network in parts, which are joined."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch
from hotbed.embedding.lookups import Plans, Sums
from hotbed.embedding.modules import EmbeddingCollection, table_modules
from hotbed.errors import ConfigError
from hotbed.optim.precision import AmpPrecision
from hotbed.optim.sparse import SparseOptimizer
from hotbed.training.stages.criterion import Criterion
from hotbed.training.stages.example import Example, prepare
from hotbed.training.stages.learner import StepLearner


@dataclass(frozen=True)
class PartResult:
    """What the forward and backward pass of a part leaves.

    Attributes:
        loss: of the part, times its share of the samples.
        outputs: of the network.
        gradients: of each dense parameter; None without one.
        sums: of each table module, the gradients by id; None without any.
        buffers: of the network, after the part.
    """

    loss: Tensor
    outputs: Any
    gradients: list[Tensor | None]
    sums: list[Sums | None]
    buffers: list[Tensor]


class PartLearner(StepLearner):
    """Learns as `StepLearner`, with a forward and a backward pass for each part of a batch.

    The ids of a batch are mapped once. Its n samples are cut into runs: part k of p has those from
    n k // p to n (k + 1) // p, so that some parts are empty where n < p; an empty part does not
    run. What the parts leave is joined by halves, as in (0 + 1) + (2 + 3), where a part that lacks
    a value is left out; then it is checked once, and applied once:

    * loss and gradients: the loss of a part counts by its share of the samples. This gives the loss
      of the batch where a loss is a mean over samples.
    * gradients of rows: each part sums them by id.
    * float buffers, such as the statistics of a batch norm: each part starts from those of the
      step; the new ones are the mean over the parts that ran. Other buffers must agree.

    Args:
        network: to train; it looks up the ids of a `Batch` as they are, once each.
        criterion: its loss; None: the network returns its loss.
        dense: the optimizer of dense parameters; None if there are none.
        sparse: the optimizer of tables; None if there are none.
        parts: their number p.
        combined: the optimizers whose parts these two are; they are stepped instead.
        precision: the number format of the network.

    Raises:
        ConfigError: a table is not of exactly one `EmbeddingCollection`.
    """

    def __init__(
        self,
        network: nn.Module,
        criterion: Criterion | None,
        dense: torch.optim.Optimizer | None,
        sparse: SparseOptimizer | None,
        parts: int,
        *,
        combined: Sequence[torch.optim.Optimizer] = (),
        precision: AmpPrecision | None = None,
    ) -> None:
        super().__init__(network, criterion, dense, sparse, combined=combined, precision=precision)
        self._num_parts = parts
        self._collections = _collections_of(network)
        self._results: list[PartResult | None] = []

    def forward(self, example: Example) -> Tensor:
        """Run the network forward and backward, part by part, and return the joined loss."""
        self._results = []
        for part in self._cut(example):
            result = None if part is None else self._run(part, example.num_samples)
            self._results.append(result)
        results = [result for result in self._results if result is not None]
        self._join_buffers([result.buffers for result in results])
        loss = joined([None if result is None else result.loss for result in self._results])
        assert loss is not None, "a part has run"
        self.outputs = loss
        if self.criterion is not None:
            self.outputs = _all_rows([result.outputs for result in results])
            self.loss = loss
        return loss

    def backward(self, loss: Tensor) -> None:
        """Join the gradients of the parts; they were computed in `forward`."""
        for number, parameter in enumerate(self._dense_parameters):
            gradients = [
                None if result is None else result.gradients[number] for result in self._results
            ]
            parameter.grad = joined(gradients)
        for number, module in enumerate(self._collections):
            sums = [None if result is None else result.sums[number] for result in self._results]
            module.gradients.add_parts(module.lookup, sums)
        self._results = []

    def gradient_norm(self) -> Tensor:
        """Return the norm of all gradients that wait, float32 [].

        It is the root of a sum in double precision. First come the squares of rows, module by
        module: those of a partition are added by table, and in a table in the order of the joined
        ids; then the partitions. The squares of the norms of dense parameters follow.
        """
        total = 0.0
        for module in self._collections:
            sums = module.gradients.take(keeps=True)
            if sums is not None:
                for square in sums.mapped.squares(sums).tolist():
                    total += square
        for parameter in self._dense_parameters:
            if parameter.grad is not None:
                total += torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).item() ** 2
        return torch.tensor(math.sqrt(total), device=self.device)

    def _run(self, part: Example, num_samples: int) -> PartResult:
        loss = super().forward(part) * (part.num_samples / num_samples)
        self._check_followed(part)
        super().backward(loss)
        gradients = [parameter.grad for parameter in self._dense_parameters]
        sums = [module.gradients.take() for module in self._collections]
        self.forget()
        buffers = [buffer.clone() for buffer in self._buffers]
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._kept)
        return PartResult(loss.detach(), _detached(self.outputs), gradients, sums, buffers)

    def _cut(self, example: Example) -> list[Example | None]:
        """Return the parts of an example, with the plans of their lookups; None is an empty one.

        A batch without samples is one part.
        """
        batch = example.batch
        if batch is None:
            raise ConfigError(
                "network: a step in parts needs batches of a Dataset, got a tuple. Give a "
                "hb.Dataset, or train in one part."
            )
        num_samples = example.num_samples
        ends = [num_samples * part // self._num_parts for part in range(self._num_parts + 1)]
        parts: list[Example | None] = []
        for first, last in itertools.pairwise(ends):
            part = None
            if first < last or num_samples == 0 == len(parts):
                # in memory of their own: the bits of some products depend on alignment
                samples = batch[first:last].map_arrays(torch.clone)
                part = prepare(samples, example.device, labelled=self.criterion is not None)
            parts.append(part)
        return self._planned(batch, parts)

    def _planned(self, batch: Batch, parts: Sequence[Example | None]) -> list[Example | None]:
        """Return the parts of a batch with their shares of its plans; what is not mapped is now."""
        plans = batch.plans or Plans(batch.ids)
        batches = [part.batch for part in parts if part is not None and part.batch is not None]
        of_parts = [Plans(samples.ids) for samples in batches]
        for module in self._collections:
            if not module.training:
                continue
            inputs = module.inputs_of(batch)
            plan = plans.take(module, inputs) or module.map(inputs, batch.time)
            divided = module.lookup.divide(
                module.layout, plan, [module.inputs_of(samples) for samples in batches]
            )
            for of_part, share in zip(of_parts, divided, strict=True):
                of_part.add(module, share)
        rest = iter(of_parts)
        return [None if part is None else part.planned(next(rest)) for part in parts]

    def _check_followed(self, part: Example) -> None:
        """Raise ConfigError if the network did not look up the ids of a part as they were."""
        assert part.batch is not None
        for module in self._collections:
            if module.training and not part.batch.plans.followed(module):
                tables = [table.name for table in module.tables]
                raise ConfigError(
                    f"network: a step in parts maps the ids of a batch once, got a network that "
                    f"does not look up those of tables {tables} as they are, once. Train in one "
                    "part."
                )

    def _join_buffers(self, parts: Sequence[list[Tensor]]) -> None:
        for number, buffer in enumerate(self._buffers):
            values = [buffers[number] for buffers in parts]
            if all(torch.equal(values[0], value) for value in values[1:]):
                buffer.copy_(values[0])
                continue
            if not buffer.is_floating_point():
                raise ConfigError(
                    "network: parts of a step must agree on integer buffers, got a buffer "
                    f"{buffer.dtype} {list(buffer.shape)} that depends on the samples. Train in "
                    "one part."
                )
            total = joined(values)
            assert total is not None, "a part has run"
            buffer.copy_(total / len(values))


def joined(values: Sequence[Tensor | None]) -> Tensor | None:
    """Return the values of parts, added by halves: (0 + 1) + (2 + 3).

    None is left out. The size of the first half is the greatest power of two below that of all.
    """
    if len(values) == 1:
        return values[0]
    middle = 1 << (len(values) - 1).bit_length() - 1
    first = joined(values[:middle])
    second = joined(values[middle:])
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _collections_of(network: nn.Module) -> list[EmbeddingCollection]:
    modules = table_modules(network)
    collections = [module for module in modules if isinstance(module, EmbeddingCollection)]
    tables = [table for module in modules for table in module.tables]
    if len(collections) < len(modules) or len(set(tables)) < len(tables):
        names = sorted({table.name for table in tables})
        raise ConfigError(
            "network: a step in parts needs each table in one EmbeddingCollection, got tables "
            f"{names}. Use such collections, or train in one part."
        )
    return collections


def _detached(outputs: Any) -> Any:
    if isinstance(outputs, dict):
        return {name: output.detach() for name, output in outputs.items()}
    return outputs.detach() if torch.is_tensor(outputs) else outputs


def _all_rows(outputs: Sequence[Any]) -> Any:
    """Return the outputs of parts, as the criterion shaped them, as those of the batch."""
    if isinstance(outputs[0], dict):
        return {name: torch.cat([part[name] for part in outputs]) for name in outputs[0]}
    return torch.cat(list(outputs))
