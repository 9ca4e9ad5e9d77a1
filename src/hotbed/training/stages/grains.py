# SPDX-License-Identifier: Apache-2.0
"""GrainLearner: a step whose batch goes through the network grain by grain, and is joined."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch, times_of
from hotbed.embedding.lookups import Plan, Plans, Sums
from hotbed.embedding.modules import Embedding, EmbeddingCollection, device_of, table_modules
from hotbed.errors import ConfigError
from hotbed.optim.precision import AmpPrecision
from hotbed.optim.sparse import SparseOptimizer
from hotbed.parallel import joined
from hotbed.training.stages.batch_weights import BatchWeights
from hotbed.training.stages.criterion import Criterion
from hotbed.training.stages.example import CPU, Example, misfits_named
from hotbed.training.stages.learner import StepLearner
from hotbed.training.stages.network import BatchLookups, NetworkLookups, adapter_of
from hotbed.training.stages.planner import Planner
from hotbed.training.stages.recorded import RecordedLookups

SEEDS = 2**62
"""Seeds are drawn below it; a grain adds its number."""


@dataclass(frozen=True)
class GrainResult:
    """What the forward and backward pass of a grain leaves.

    Attributes:
        loss: of the grain, times its share of the batch.
        outputs: of the network.
        gradients: of each dense parameter; None without one.
        sums: of each table module, the gradients by id; None without any.
        buffers: of the network, after the grain.
        weights: the gradients of weights of ids that the batch brought along, by feature.
    """

    loss: Tensor
    outputs: Any
    gradients: list[Tensor | None]
    sums: list[Sums | None]
    buffers: list[Tensor]
    weights: dict[str, Tensor | None]


@dataclass(frozen=True)
class Gradients:
    """Gradients of one or more steps.

    Attributes:
        dense: of each dense parameter; None without one.
        sums: of each table module, by id; None without any.
    """

    dense: list[Tensor | None]
    sums: list[Sums | None]


@dataclass(frozen=True)
class Joined:
    """The results of the grains of a step, added by halves.

    Attributes:
        loss: of the step.
        outputs: of the grains, in order.
        gradients: of each dense parameter; None without one.
        sums: of each table module, the gradients by id; None without any.
        buffers: of each buffer, its new value; None where no grain changed it.
        weights: the gradients of weights of ids that the batch brought along, by feature.
    """

    loss: Tensor
    outputs: list[Any]
    gradients: list[Tensor | None]
    sums: list[Sums | None]
    buffers: list[Tensor | None]
    weights: dict[str, Tensor]


class GrainLearner(StepLearner):
    """Learns as `StepLearner`, with a forward and a backward pass for each grain of a batch.

    The ids of a batch are mapped once, in the order grain, feature, sample. An empty grain does not
    run. The results of the grains are joined by halves, as in (0 + 1) + (2 + 3); a grain without a
    value is left out. The joined results are checked once and applied once:

    * loss and gradients: the loss of a grain counts by its share of the samples. This gives the
      loss of the batch where a loss is a mean over samples. Losses that are sums are added.
    * gradients of rows: each grain sums them by id.
    * float buffers, such as the statistics of a batch norm: each grain starts from those of the
      step; the new ones are the mean over the grains that changed them. A batch norm of `hb.models`
      leaves them as they are for a grain of one sample. Integer buffers must agree.
    * random numbers: a step draws one number from torch's generator; it seeds the generator of each
      grain. So the generator is at the step, whichever grains ran.

    The bits depend on the samples of each grain and on the number of grains, not on the order in
    which grains are computed.

    Args:
        network: to train, on the CPU; it looks up the ids of a `Batch` as they are, once each, or
            any ids by `hb.Embedding`, or its adapter knows what it looks up.
        criterion: its loss; None: the network returns its loss.
        dense: the optimizer of dense parameters; None if there are none.
        sparse: the optimizer of tables; None if there are none.
        grains: their number, a power of two.
        combined: the optimizers whose parts these two are; they are stepped instead.
        precision: the number format of the network.

    Raises:
        ConfigError: the network cannot be computed by grains; the message says why.
    """

    def __init__(
        self,
        network: nn.Module,
        criterion: Criterion | None,
        dense: torch.optim.Optimizer | None,
        sparse: SparseOptimizer | None,
        grains: int,
        *,
        combined: Sequence[torch.optim.Optimizer] = (),
        precision: AmpPrecision | None = None,
    ) -> None:
        _check_network(network, grains)
        super().__init__(network, criterion, dense, sparse, combined=combined, precision=precision)
        self.grains = grains
        adapter = adapter_of(network)
        if adapter is None:
            self._lookups = _lookups_of(network, self._call_with)
        else:
            self._lookups = adapter.lookups()
            self.planner = Planner(self._lookups)
        self._joined: Joined | None = None
        self._plans: list[Plan | None] = []
        self._weights = BatchWeights({}, {})
        self._connect()

    @property
    def _collections(self) -> Sequence[EmbeddingCollection]:
        """The collections of the network; of some networks after the first batch."""
        return self._lookups.collections

    def begin(self) -> None:
        _check_network(self.network, self.grains)  # it may have been moved or compiled meanwhile
        super().begin()

    def forward(self, example: Example) -> Tensor:
        """Run the network forward and backward, grain by grain, and return the joined loss."""
        with _seeds() as seed:
            results = self._run(self._planned(example), seed, example.num_samples)
        self._joined = self._join(results)
        for buffer, value in zip(self._buffers, self._joined.buffers, strict=True):
            if value is not None:
                buffer.copy_(value)
        self.outputs = loss = self._joined.loss
        if self.criterion is not None:
            self._keep_outputs(self._joined.outputs)
            self.loss = loss
        return loss

    def _call_with(self, grain: Example) -> Any:
        """Return what the network returns for a grain."""
        with self.precision.autocast(self.device), misfits_named(self.call, grain):
            return self.call(*grain.arguments, **grain.keywords)

    def backward(self, loss: Tensor) -> None:
        """Let the joined gradients of the grains wait; they were computed in `forward`."""
        assert self._joined is not None, "forward has run"
        for parameter, gradient in zip(self._dense_parameters, self._joined.gradients, strict=True):
            parameter.grad = gradient
        for module, sums in zip(self._collections, self._joined.sums, strict=True):
            if sums is not None:
                module.gradients.put(sums)
        self._weights.backward(self._joined.weights)
        self._joined = None
        self._plans = []

    def set_aside(self) -> Gradients:
        """Return the gradients that wait, and drop them."""
        dense = [parameter.grad for parameter in self._dense_parameters]
        sums = [module.gradients.take() for module in self._collections]
        self.forget()
        return Gradients(dense, sums)

    def add(self, earlier: Gradients) -> None:
        """Add gradients that were set aside to those that wait."""
        for parameter, gradient in zip(self._dense_parameters, earlier.dense, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad = gradient + parameter.grad
        # there may be none yet before the first batch
        for module, sums in zip(self._collections, earlier.sums, strict=False):
            if sums is not None:
                now = module.gradients.take()
                module.gradients.put(sums if now is None else module.lookup.join([sums, now]))

    def clip_gradients(self, max_norm: float) -> Tensor:
        with ExitStack() as stack:
            for module in self._collections:
                stack.enter_context(module.gradients.scaled())
            return super().clip_gradients(max_norm)

    def _gradient_norm(self) -> Tensor:
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

    def _run(
        self, grains: Sequence[Example | None], seed: int, num_samples: int
    ) -> list[GrainResult | None]:
        """Return what each grain leaves; the network is then as before, but for its gradients."""
        results: list[GrainResult | None] = []
        for number, grain in enumerate(grains):
            result = None
            if grain is not None:
                torch.default_generator.manual_seed(seed + number)
                result = self._run_one(grain, num_samples)
            results.append(result)
        return results

    def _connect(self) -> None:
        """Find the processes that share the grains; here is only this one."""

    def _grains(self, example: Example) -> list[Example | None]:
        """Return the grains that this process computes; None in the place of others."""
        return example.grains

    def _run_one(self, grain: Example, num_samples: int) -> GrainResult:
        self.shard.enter("forward")
        with self._lookups.in_turn(grain):
            loss = super().forward(grain)
        if self.criterion is None or not self.criterion.adds(grain.weight):
            loss = loss * (grain.num_samples / max(num_samples, 1))
        self._check_followed(grain)
        self.shard.enter("backward")
        super().backward(loss)
        gradients = [parameter.grad for parameter in self._dense_parameters]
        sums = [module.gradients.take() for module in self._collections]
        self.forget()
        buffers = [buffer.clone() for buffer in self._buffers]
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._kept)
        weights = self._weights.gradients_of(grain)
        return GrainResult(loss.detach(), self.outputs, gradients, sums, buffers, weights)

    def _planned(self, example: Example) -> list[Example | None]:
        """Return the grains with their shares of the batch's plans; what is not mapped is now."""
        example = example.foreseen_by(self._lookups)
        assert example.batch is not None, "the loop divides batches"
        self._weights = BatchWeights.of(example.batch)
        grains = self._grains(example)
        if self._weights.weights:
            grains = [
                None if grain is None else self._weights.with_leaves(grain) for grain in grains
            ]
        batches = _looked_up(example, grains)
        rows_of = self._lookups.rows_of
        of_grains = [None if ids is None else Plans(ids.ids, rows_of) for ids in batches]
        for module, shares in zip(self._collections, self._shares(example, batches), strict=True):
            for of_grain, share in zip(of_grains, shares, strict=True):
                if of_grain is not None and share is not None:
                    of_grain.add(module, share)
        return [
            None if grain is None else grain.planned(of_grain)
            for grain, of_grain in zip(grains, of_grains, strict=True)
        ]

    def _shares(self, example: Example, grains: Sequence[Batch | None]) -> list[list[Plan | None]]:
        """Return the shares of the grains in the plan of a batch, [module][grain].

        A batch that is not mapped is now. A module in eval mode has no plan.

        Args:
            example: of the batch.
            grains: the ids that each looks up.
        """
        batch = example.looked_up
        plans = batch.plans or Plans(batch.ids)
        self._plans = []
        shares = []
        for module in self._collections:
            plan = None
            divided: list[Plan | None] = [None] * len(grains)
            if module.training:
                inputs = module.inputs_of(batch)
                plan = plans.take(module, inputs)
                if plan is None:
                    plan = module.map(inputs, times_of(batch), grain_ends=batch.grain_ends)
                of_grains = [None if grain is None else module.inputs_of(grain) for grain in grains]
                divided = module.lookup.divide(module.layout, plan, of_grains)
            self._plans.append(plan)
            shares.append(divided)
        return shares

    def _check_followed(self, grain: Example) -> None:
        """Raise ConfigError if the network did not look up the ids of a grain as they were."""
        assert grain.batch is not None
        for module in self._collections:
            if module.training and not grain.batch.plans.followed(module):
                tables = [table.name for table in module.tables]
                raise ConfigError(
                    f"grains: a step by grains maps the ids of a batch once, got a network that "
                    f"does not look up those of tables {tables} as they are, once. Leave grains "
                    "out."
                )

    def _join(self, grains: Sequence[GrainResult | None]) -> Joined:
        loss = joined([None if grain is None else grain.loss for grain in grains])
        assert loss is not None, "a grain has run"
        gradients = [
            joined([None if grain is None else grain.gradients[number] for grain in grains])
            for number in range(len(self._dense_parameters))
        ]
        sums: list[Sums | None] = []
        for number, (module, plan) in enumerate(zip(self._collections, self._plans, strict=True)):
            of_module = None
            if plan is not None:
                parts = [None if grain is None else grain.sums[number] for grain in grains]
                of_module = module.lookup.join_grains(module.layout, plan.mapped, parts)
            sums.append(of_module)
        outputs = [grain.outputs for grain in grains if grain is not None]
        buffers = self._joined_buffers(grains)
        return Joined(loss, outputs, gradients, sums, buffers, self._weight_gradients(grains))

    def _weight_gradients(self, grains: Sequence[GrainResult | None]) -> dict[str, Tensor]:
        """Return the gradients of the weights of ids that the batch brought along."""
        return self._weights.joined([None if grain is None else grain.weights for grain in grains])

    def _keep_outputs(self, grains: Sequence[Any]) -> None:
        """Keep the outputs of the grains as those of the batch."""
        self.outputs = all_rows(grains)

    def _joined_buffers(self, grains: Sequence[GrainResult | None]) -> list[Tensor | None]:
        buffers: list[Tensor | None] = []
        for number in range(len(self._buffers)):
            values = self._changed(grains, number)
            changed = [value for value in values if value is not None]
            new = None
            if changed and changed[0].is_floating_point():
                total = joined(values)
                assert total is not None
                new = total / len(changed)
            elif changed:
                new = changed[0]
                check_agree(changed)
            buffers.append(new)
        return buffers

    def _changed(self, grains: Sequence[GrainResult | None], number: int) -> list[Tensor | None]:
        """Return a buffer as each grain left it; None where it was not changed."""
        values = [None if grain is None else grain.buffers[number] for grain in grains]
        before = self._kept[number]
        return [None if value is None or torch.equal(value, before) else value for value in values]


def check_agree(values: Sequence[Tensor]) -> None:
    """Raise ConfigError if an integer buffer is not the same after all grains."""
    if not all(torch.equal(values[0], value) for value in values):
        first = values[0]
        raise ConfigError(
            "grains: the grains of a step must agree on integer buffers, got a buffer "
            f"{first.dtype} {list(first.shape)} that depends on the samples. Leave grains out."
        )


@contextmanager
def _seeds() -> Iterator[int]:
    """Yield a number from torch's generator, which is set back to after the draw in the end."""
    seed = int(torch.randint(SEEDS, ()))
    state = torch.default_generator.get_state()
    try:
        yield seed
    finally:
        torch.default_generator.set_state(state)


def _check_network(network: nn.Module, grains: int) -> None:
    device = device_of(network)
    if device != CPU:
        raise ConfigError(
            f"grains: networks are computed by grains on the CPU, got {grains} grains and a "
            f"network on {device}. Leave grains out, or move the network to the CPU."
        )
    if any(_is_compiled(module) for module in network.modules()):
        raise ConfigError(
            f"grains: a step by grains runs the network as it is written, got {grains} grains and "
            "one that torch.compile compiled. Leave grains out, or give the network before it is "
            "compiled."
        )


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile made a module, or compiled it in place."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or hasattr(module, "_orig_mod")


def _lookups_of(network: nn.Module, call: Callable[[Example], Any]) -> NetworkLookups:
    """Return the lookups of a network that is called with batches or tuples as they are."""
    modules = table_modules(network)
    if modules and all(isinstance(module, Embedding) for module in modules):
        return RecordedLookups(network, call)
    collections = [module for module in modules if isinstance(module, EmbeddingCollection)]
    tables = [table for module in modules for table in module.tables]
    if len(collections) < len(modules) or len(set(tables)) < len(tables):
        names = sorted({table.name for table in tables})
        raise ConfigError(
            "grains: a step by grains needs each table in one EmbeddingCollection, or lookups of "
            f"hb.Embedding alone, got others of tables {names}. Use one of the two, or leave "
            "grains out."
        )
    return BatchLookups(collections)


def _looked_up(example: Example, grains: Sequence[Example | None]) -> list[Batch | None]:
    """Return the ids that each grain looks up; None for a grain that is not computed here."""
    if example.computed is None:
        return [None if grain is None else grain.batch for grain in grains]
    ends = (0, *example.computed.grain_ends)
    runs = zip(itertools.pairwise(ends), grains, strict=True)
    return [
        None if grain is None else example.computed[first:last] for (first, last), grain in runs
    ]


def all_rows(outputs: Sequence[Any]) -> Any:
    """Return the outputs of grains, as the criterion shaped them, as those of the batch."""
    if isinstance(outputs[0], dict):
        return {name: torch.cat([grain[name] for grain in outputs]) for name in outputs[0]}
    return torch.cat(list(outputs))
