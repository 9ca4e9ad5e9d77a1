# SPDX-License-Identifier: Apache-2.0
"""Grains: the passes of a step whose batch goes through the network grain by grain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch
from hotbed.embedding.lookups import Plans, Sums
from hotbed.embedding.modules import Embedding, EmbeddingCollection, table_modules
from hotbed.errors import ConfigError
from hotbed.training.step.batch_weights import BatchWeights
from hotbed.training.step.division import Division
from hotbed.training.step.example import CPU, Example, misfits_named
from hotbed.training.step.network import BatchLookups, NetworkLookups, adapter_of
from hotbed.training.step.passes import NetworkPass, Passes
from hotbed.training.step.planner import Planner, asked_by_grains
from hotbed.training.step.recorded import RecordedLookups

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
        buffers: of the network, after the grain; None where it did not change one.
        weights: the gradients of weights of ids that the batch brought along, by feature.
    """

    loss: Tensor
    outputs: Any
    gradients: list[Tensor | None]
    sums: list[Sums | None]
    buffers: list[Tensor | None]
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


class Grains(Passes):
    """A forward and a backward pass for each grain of a batch.

    The ids of a batch are asked for once, in the order grain, feature, sample. An empty grain does
    not run. The results of the grains are joined by halves, as in (0 + 1) + (2 + 3); a grain
    without a value is left out. The joined results are checked once and applied once:

    * loss and gradients: the loss of a grain counts by its share of the samples. This gives the
      loss of the batch where a loss is a mean over samples. Losses that are sums are added.
    * gradients of rows: each grain sums them by id.
    * float buffers, such as the statistics of a batch norm: each grain starts from those of the
      step; the new ones are the mean over the grains that changed them. A batch norm of `hb.models`
      leaves them as they are for a grain of one sample. Integer buffers must agree.
    * random numbers: a step draws one number from torch's generator; it seeds the generator of each
      grain. So the generator is at the step, whichever grains ran.

    The bits depend on the samples of each grain and on the number of grains, not on the order in
    which grains are computed, nor on the processes that compute them.

    Args:
        network_pass: over the samples of a grain. Its network looks up the ids of a
            `Batch` as they are, once each, or any ids by `hb.Embedding`, or its adapter knows what
            it looks up.
        division: of a batch.
        agreed: returns what all processes must have alike in the step of a batch.

    Attributes:
        planner: maps the ids of later batches.

    Raises:
        ConfigError: the network cannot be computed by grains; the message says why.
    """

    def __init__(
        self,
        network_pass: NetworkPass,
        division: Division,
        agreed: Callable[[Batch], Mapping[str, Any]],
    ) -> None:
        network = network_pass.network
        check_grains(network, division.grains)
        self._pass = network_pass
        self._shard = division.shard
        self._dense = division.dense
        self._agreed = agreed
        adapter = adapter_of(network)
        if adapter is None:
            self._lookups = _lookups_of(network, self._call_with)
        else:
            self._lookups = adapter.lookups(by_grains=True)
        self.planner = Planner(self._lookups, agreed)
        self._joined: Gradients | None = None
        self._weights = BatchWeights({}, {})
        self._weight_gradients: dict[str, Tensor] = {}
        self._outputs: Any = None
        self._own_outputs: list[Any] | None = None  # of the grains here; None = `_outputs` is there
        division.place(network)

    @property
    def outputs(self) -> Any:
        """The outputs of the last training forward; they come from all ranks when they are read."""
        if self._own_outputs is not None:
            every = self._shard.gathered(self._own_outputs)
            self._outputs = _all_rows([outputs for of_rank in every for outputs in of_rank])
            self._own_outputs = None
        return self._outputs

    @outputs.setter
    def outputs(self, outputs: Any) -> None:
        self._own_outputs = None
        self._outputs = outputs

    @property
    def own_grains(self) -> range | None:
        """The grains that are computed here, where the ids of no other are looked up here.

        None = all. The ids that a network computes are those of all grains, on each rank.
        """
        return self._dense.grains if isinstance(self._lookups, BatchLookups) else None

    @property
    def _collections(self) -> Sequence[EmbeddingCollection]:
        """The collections of the network; of some networks after the first batch."""
        return self._lookups.modules

    def forward(self, example: Example) -> Tensor:
        """Run the network forward and backward, grain by grain, and return the joined loss."""
        assert example.batch is not None, "the loop divides batches"
        with _seeds(self._pass.device) as seed, self._dense.step(example.batch.grain_ends):
            plans, grains = self._planned(example)
            results = self._run(grains, seed, example.num_samples)
            loss = self._join(plans, results)
        self.outputs = self.loss = loss
        if self._pass.criterion is not None:
            self._own_outputs = [grain.outputs for grain in results if grain is not None]
        return loss

    def backward(self, loss: Tensor) -> None:
        """Let the joined gradients of the grains wait; they were computed in `forward`."""
        joined = self._joined
        assert joined is not None, "forward has run"
        self._joined = None
        for parameter, gradient in zip(self._pass.dense_parameters, joined.dense, strict=True):
            parameter.grad = gradient
        for module, sums in zip(self._collections, joined.sums, strict=True):
            if sums is not None:
                module.gradients.put(sums)
        self._weights.backward(self._weight_gradients)

    def set_aside(self) -> Gradients:
        """Return the gradients that wait, and drop them."""
        dense = [parameter.grad for parameter in self._pass.dense_parameters]
        sums = [module.gradients.take() for module in self._collections]
        self._pass.forget()
        return Gradients(dense, sums)

    def add(self, earlier: Gradients) -> None:
        """Add gradients that were set aside to those that wait."""
        for parameter, gradient in zip(self._pass.dense_parameters, earlier.dense, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad = gradient + parameter.grad
        # there may be none yet before the first batch
        for module, sums in zip(self._collections, earlier.sums, strict=False):
            if sums is not None:
                now = module.gradients.take()
                module.gradients.put(sums if now is None else module.lookup.join([sums, now]))

    @contextmanager
    def scaled(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self._collections:
                stack.enter_context(module.gradients.scaled())
            yield

    def norms(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        return [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in gradients]

    def norm(self, dense: Sequence[Tensor]) -> Tensor:
        """Return the norm of all gradients that wait, float32 [].

        It is the root of a sum in double precision. First come the squares of rows, module by
        module: those of a partition are added by table, and in a table in the order of the joined
        ids; then the partitions. The squares of the norms of dense parameters follow.
        """
        total = 0.0
        for module in self._collections:
            if module in self._pass.counting:
                continue
            sums = module.gradients.take(keeps=True)
            if sums is not None:
                for square in sums.mapped.squares(sums).tolist():
                    total += square
        for norm in dense:
            total += norm.item() ** 2
        return torch.tensor(math.sqrt(total))

    def _call_with(self, grain: Example) -> Any:
        """Return what the network returns for a grain."""
        over = self._pass
        with over.precision.autocast(over.device), misfits_named(over.call, grain):
            return over.call(*grain.arguments, **grain.keywords)

    def _planned(self, example: Example) -> tuple[Plans, list[Example | None]]:
        """Return the plans of a batch, and its grains with their shares of them.

        A batch that is not asked for is now. A module in eval mode has no plan. None is a grain
        that is not computed here.
        """
        foreseen = example.foreseen_by(self._lookups)
        assert foreseen is not None, "its ids are known"
        assert foreseen.batch is not None, "the loop divides batches"
        plans = foreseen.plans
        if plans is None:
            plans = asked_by_grains(self._lookups, foreseen, self._agreed)
        self._weights = BatchWeights.of(foreseen.batch)
        grains = foreseen.grains_of(self._dense.grains)
        if self._weights.weights:
            grains = [
                None if grain is None else self._weights.with_leaves(grain) for grain in grains
            ]
        shares = [
            None if ids is None else Plans(ids.ids, self._lookups.rows_of)
            for ids in _looked_up(foreseen, grains)
        ]
        plans.divide(shares)
        return plans, [
            None if grain is None or share is None else grain.planned(share)
            for grain, share in zip(grains, shares, strict=True)
        ]

    def _run(
        self, grains: Sequence[Example | None], seed: int, num_samples: int
    ) -> list[GrainResult | None]:
        """Return what each grain leaves; the network is then as before, but for its gradients.

        What a grain leaves on a device is read while the device computes the next one.
        """
        results: list[GrainResult | None] = [None] * len(grains)
        before: tuple[int, Callable[[], GrainResult]] | None = None
        for number, grain in enumerate(grains):
            if grain is None:
                continue
            _seed_all(seed + number, self._pass.device)
            result = self._run_one(grain, num_samples)
            if before is not None:
                results[before[0]] = before[1]()
            before = number, result
        if before is not None:
            results[before[0]] = before[1]()
        return results

    def _run_one(self, grain: Example, num_samples: int) -> Callable[[], GrainResult]:
        """Run a grain; return what waits for what it leaves."""
        network_pass = self._pass
        self._shard.enter("forward")
        with self._lookups.in_turn(grain):
            loss = network_pass.forward(grain)
        if network_pass.criterion is None or not network_pass.criterion.adds(grain.weight):
            loss = loss * (grain.num_samples / max(num_samples, 1))
        self._check_followed(grain)
        self._shard.enter("backward")
        network_pass.backward(loss)
        gradients = [parameter.grad for parameter in network_pass.dense_parameters]
        sums = [module.gradients.take_later() for module in self._collections]
        network_pass.forget()
        buffers = network_pass.leave_buffers()
        weights = self._weights.gradients_of(grain)
        outputs = network_pass.outputs
        value = loss.detach()
        return lambda: GrainResult(
            value, outputs, gradients, [of_module() for of_module in sums], buffers(), weights
        )

    def _join(self, plans: Plans, grains: Sequence[GrainResult | None]) -> Tensor:
        """Join what the grains leave, and return the loss; the gradients are for `backward`."""
        self._shard.enter("exchange")
        parameters = self._pass.dense_parameters
        floats = [n for n, buffer in enumerate(self._pass.buffers) if buffer.is_floating_point()]
        rows = plans.join(
            {module: _each(grains, "sums", n) for n, module in enumerate(self._collections)}
        )
        dense = self._dense.join(
            [
                [None if grain is None else grain.loss for grain in grains],
                *(_each(grains, "gradients", number) for number in range(len(parameters))),
                *(_each(grains, "buffers", number) for number in floats),
            ]
        )
        sums = rows()
        (loss, _), *totals = dense()
        assert loss is not None, "a grain has run"
        gradients = [total for total, _ in totals[: len(parameters)]]
        self._joined = Gradients(gradients, [sums.get(module) for module in self._collections])
        means = dict(zip(floats, totals[len(parameters) :], strict=True))
        integers = self._integers(grains)
        self._weight_gradients = self._dense.side_by_side(
            self._weights.joined([None if grain is None else grain.weights for grain in grains]),
            self._weights.ends,
        )
        for number, (total, count) in means.items():
            if total is not None:
                self._pass.buffers[number].copy_(total / count)
        for number, value in integers.items():
            self._pass.buffers[number].copy_(value, non_blocking=True)
        return loss

    def _integers(self, grains: Sequence[GrainResult | None]) -> dict[int, Tensor]:
        """Return the integer buffers that grains of any process have changed, by number.

        Raises:
            ConfigError: the grains do not agree.
        """
        every = enumerate(self._pass.buffers)
        numbers = [number for number, buffer in every if not buffer.is_floating_point()]
        if not numbers:
            return {}
        here = [
            [value for value in _each(grains, "buffers", number) if value is not None]
            for number in numbers
        ]
        changed = {}
        for number, of_processes in zip(
            numbers, zip(*self._shard.gathered(here), strict=True), strict=True
        ):
            values = [value for of_process in of_processes for value in of_process]
            if values:
                _check_agree(values)
                changed[number] = values[0]
        return changed

    def _check_followed(self, grain: Example) -> None:
        """Raise ConfigError if the network did not look up the ids of a grain as they were."""
        assert grain.plans is not None, "its ids are mapped"
        for module in self._collections:
            if module.training and not grain.plans.followed(module):
                tables = [table.name for table in module.tables]
                raise ConfigError(
                    f"grains: a step by grains maps the ids of a batch once, got a network that "
                    f"does not look up those of tables {tables} as they are, once. Leave grains "
                    "out."
                )


def _each(grains: Sequence[GrainResult | None], name: str, number: int) -> list[Any]:
    """Return one of the values of this name that each grain leaves; None without the grain."""
    return [None if grain is None else getattr(grain, name)[number] for grain in grains]


def _check_agree(values: Sequence[Tensor]) -> None:
    """Raise ConfigError if an integer buffer is not the same after all grains."""
    if not all(torch.equal(values[0], value) for value in values):
        first = values[0]
        raise ConfigError(
            "grains: the grains of a step must agree on integer buffers, got a buffer "
            f"{first.dtype} {list(first.shape)} that depends on the samples. Leave grains out."
        )


@contextmanager
def _seeds(device: torch.device) -> Iterator[int]:
    """Yield a number from torch's generator.

    Its state, and that of the generator of a device, is set back to after the draw in the end.
    """
    seed = int(torch.randint(SEEDS, ()))
    if device != CPU:
        with torch.random.fork_rng([device], device_type=device.type):
            yield seed
        return
    state = torch.default_generator.get_state()
    try:
        yield seed
    finally:
        torch.default_generator.set_state(state)


def _seed_all(seed: int, device: torch.device) -> None:
    """Seed the generators of the host and of a device."""
    if device == CPU:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def check_grains(network: nn.Module, grains: int) -> None:
    """Raise ConfigError if a network is compiled."""
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


def _all_rows(outputs: Sequence[Any]) -> Any:
    """Return the outputs of grains, as the criterion shaped them, as those of the batch."""
    if isinstance(outputs[0], dict):
        return {name: torch.cat([grain[name] for grain in outputs]) for name in outputs[0]}
    return torch.cat(list(outputs))
