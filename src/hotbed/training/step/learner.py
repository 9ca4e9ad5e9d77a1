# SPDX-License-Identifier: Apache-2.0
"""The operations of one training step, which the loop calls one after another.

`StepLearner` holds the network, its criterion and its two optimizers (dense parameters, rows of
tables). A batch whose gradients are not finite changes none of them: parameters, rows, optimizer
state and the network's buffers stay as they were. A `Division` says in how many parts it computes a
batch, and where their rows and dense parts are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch
from hotbed.embedding.modules import device_of, table_modules
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError, NonFiniteGradient
from hotbed.optim.average import WeightAverage
from hotbed.optim.held import optimizers_of, schedules_of
from hotbed.optim.precision import AmpPrecision, Compile
from hotbed.optim.sparse import SparseOptimizer
from hotbed.optim.unchanged import LeftOut, Unchanged
from hotbed.parallel import WHOLE, Counters, RankWork, Shard, sum_counters
from hotbed.parallel.world import check_single_rank
from hotbed.training.step.agreement import (
    settings_of_learning,
    settings_of_network,
    settings_of_tables,
    values_of_rates,
    values_of_step,
)
from hotbed.training.step.criterion import Criterion
from hotbed.training.step.division import Division
from hotbed.training.step.example import CPU, Example, misfits_named
from hotbed.training.step.grains import Grains, check_grains
from hotbed.training.step.network import adapter_of, looks_up_once
from hotbed.training.step.passes import NetworkPass, Passes, own_loss
from hotbed.training.step.planner import Planner
from hotbed.training.step.reading import StepReading, all_finite


class Update(Protocol):
    """The part of the loop that learns from a batch.

    Attributes:
        planner: maps ids before the forward pass; None if the forward pass maps all ids.
        loss: of the last training forward; on the host once `gradients_are_finite` has returned.
    """

    planner: Planner | None

    @property
    def loss(self) -> Tensor | None: ...

    def forward(self, example: Example) -> Tensor:
        """Run the network on an example and return the loss, a scalar tensor.

        Ids that `planner` did not map are mapped here.
        """

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of dense parameters and rows."""

    def gradients_are_finite(self) -> bool:
        """Return True to update, False to skip this batch.

        Raises:
            NonFiniteGradient: a gradient is not finite, and a skip would hide a fault.
        """

    def step(self) -> None:
        """Update dense parameters and rows of tables, then drop all gradients."""


class StepLearner:
    """Learns with a dense torch optimizer, and a `SparseOptimizer` if the network has tables.

    Args:
        network: to train.
        criterion: its loss; None: the network returns its loss.
        dense: the optimizer of dense parameters; None if there are none.
        sparse: the optimizer of tables; None if there are none.
        combined: the optimizers whose parts these two are; they are stepped instead.
        precision: the number format of the network.
        way: of a batch through the network: divided, or as a whole, and then by a network that
            torch.compile compiles or as it is written.

    Attributes:
        forward, backward: those of the passes over a batch; see `Update`.

    Raises:
        ConfigError: the network cannot be computed in this way; the message says why.
    """

    def __init__(
        self,
        network: nn.Module,
        criterion: Criterion | None,
        dense: torch.optim.Optimizer | None,
        sparse: SparseOptimizer | None,
        *,
        combined: Sequence[torch.optim.Optimizer] = (),
        precision: AmpPrecision | None = None,
        way: Division | Compile | None = None,
    ) -> None:
        self.network = network
        self.criterion = criterion
        self.dense = dense
        self.sparse = sparse
        stepped = combined or (dense, sparse)
        self._optimizers = [optimizer for optimizer in stepped if optimizer is not None]
        self.precision = precision or AmpPrecision()
        self.device = device_of(network)
        self.network_pass = NetworkPass(
            network, criterion, dense, sparse, self.precision, self.device
        )
        self._dense_parameters = self.network_pass.dense_parameters
        self._left_out = LeftOut(network, self._dense_parameters)
        self._max_norm = 0.0  # that gradients were clipped to last
        self._reading: StepReading | None = None  # of the gradients that wait
        self.skipped = 0
        division = way if isinstance(way, Division) else Division()
        self.grains = division.grains
        self.shard = division.shard
        self._dense_part = division.dense
        self.passes: Passes = self.network_pass
        self.planner: Planner | None = None
        if self.grains > 1:
            self.passes = grains = Grains(self.network_pass, division, self._agreed)
            self.planner = grains.planner
        elif isinstance(way, Compile):
            self.network_pass.call = way.compiled(network)
        elif adapter_of(network) is not None or looks_up_once(network):
            self.planner = Planner.of(network)
        self.average: WeightAverage | None = None
        self.forward = self.passes.forward
        self.backward = self.passes.backward

    def keep_average(self, decay: float) -> None:
        """Let the network have averages of its dense parameters between steps.

        Raises:
            ConfigError: the decay is not between 0 and 1, or the parameters cannot be averaged.
        """
        self.average = WeightAverage(self.dense, decay)
        self.forward = self._forward_of_weights

    def _forward_of_weights(self, example: Example) -> Tensor:
        assert self.average is not None
        self.average.begin_step()
        return self.passes.forward(example)

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer | None]:
        """The optimizers by their names in a checkpoint; None: there is no such part."""
        return {"dense": self.dense, "sparse": self.sparse}

    @property
    def outputs(self) -> Any:
        """The outputs of the last training forward."""
        return self.passes.outputs

    @outputs.setter
    def outputs(self, outputs: Any) -> None:
        self.passes.outputs = outputs

    @property
    def loss(self) -> Tensor | None:
        """The loss of these outputs; on the host once `gradients_are_finite` has returned."""
        return self.passes.loss

    @property
    def own_grains(self) -> range | None:
        """The grains whose ids and dense columns suffice here in a step; None = those of all."""
        return self.passes.own_grains if isinstance(self.passes, Grains) else None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that must be equal on all ranks before they learn or score."""
        weights = [*self._dense_parameters, *self.network_pass.buffers]
        return {
            **self._dense_part.settings,
            **settings_of_tables(self._tables),
            **settings_of_network(self.network, weights),
            **settings_of_learning(self.criterion, self.precision, [self.dense, self.sparse]),
        }

    @cached_property
    def _tables(self) -> list[Table]:
        """The tables of the network, each once."""
        tables = [table for module in table_modules(self.network) for table in module.tables]
        return list(dict.fromkeys(tables))

    def _agreed(self, batch: Batch) -> Mapping[str, Any]:
        """Return what all ranks must have alike in the step of a batch."""
        return {
            **values_of_step(batch, self._dense_parameters, self._tables),
            **values_of_rates([self.dense, self.sparse]),
            "clip_gradients.max_norm": self._max_norm,
        }

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters with gradients of the loss: dense ones and those of rows."""
        return [*self._dense_parameters, *self.network_pass.row_parameters]

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before."""
        self._max_norm = max_norm
        with self.passes.scaled():
            norm = self.passes.norm(self._dense_norms())
            if self.device == CPU:
                torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
            else:
                factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch has it
                for parameter in self.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)  # a number of the host: no copy, no wait
        return norm

    def _dense_gradients(self) -> list[Tensor]:
        return [p.grad for p in self._dense_parameters if p.grad is not None]

    def _dense_norms(self) -> Sequence[Tensor]:
        """Return the norms of the gradients of dense parameters, on the host."""
        gradients = self._dense_gradients()
        arrived = None if self._reading is None else self._reading.norms_of(gradients)
        if arrived is not None:
            return arrived
        norms = self.passes.norms(gradients)
        return list(torch.stack(norms).cpu()) if norms else []

    def begin(self) -> None:
        """Begin a training: drop gradients that wait, and log what the optimizer does not hold."""
        if self.grains > 1:
            check_grains(self.network, self.grains)  # it may have been moved or compiled meanwhile
        if self.shard is WHOLE:
            check_single_rank("RecModel")
        check_not_moved(self)
        # what an interrupted training, or a loop of the user's own, left behind
        self.forget()
        self._left_out.look()
        buffers = [b for b in self.network_pass.buffers if b.is_floating_point()]
        self._dense_part.begin([torch.zeros(()), *self._dense_parameters, *buffers])
        self.shard.check_equal(lambda: self.settings)

    def end(self) -> list[RankWork]:
        """End a training, and return what each rank did in it; [] where one process trains."""
        self.shard.enter("end")
        return self._dense_part.work(self._tables)

    def gradients_are_finite(self) -> bool:
        scaler = self.network_pass.scaler
        if scaler is not None:
            assert self.dense is not None
            scaler.unscale_(self.dense)
        gradients = self._dense_gradients()
        norms: Sequence[Tensor] = ()
        if self._max_norm and self.device != CPU:  # they were clipped before, and will be again
            norms = self.passes.norms(gradients)
        reading = StepReading.of(self.device, gradients, self.passes.loss, scaler, norms)
        self._reading = reading
        if scaler is not None:
            self._unscale_rows(1.0 / reading.scale)
        fault = self._fault(reading)
        self.passes.loss = reading.loss
        if fault is None:
            return True
        self.forget()
        self.network_pass.restore_buffers()
        if scaler is None:
            raise fault
        scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
        self.skipped += 1
        return False

    def step(self) -> None:
        self.shard.enter("update")
        for optimizer in self._optimizers:
            optimizer.step()
        if self.average is not None:
            self.average.end_step()
        self.forget()
        if self.network_pass.scaler is not None:
            self.network_pass.scaler.update()
        self._dense_part.end_step()

    def state(self) -> dict[str, Any]:
        """Return the number of skipped batches and the state of the loss scale."""
        scaler = self.network_pass.scaler
        return {"skipped": self.skipped, "scaler": None if scaler is None else scaler.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.skipped = state["skipped"]
        scaler = self.network_pass.scaler
        if scaler is not None and state["scaler"] is not None:
            scaler.load_state_dict(dict(state["scaler"]))

    def summed(self, moments: Sequence[Counters]) -> Sequence[Counters]:
        """Return the statistics of tables at some moments, of all ranks; each rank must ask."""
        if self.shard.size == 1:
            return moments
        totals = sum_counters(self.shard.gathered(moments))
        for table in self._tables if totals else ():
            table.watch_capacity(totals[-1].get(table.name, {}).get("rows", 0))
        return totals

    def forget(self) -> None:
        """Drop every gradient, and with it the step that it was of."""
        self._reading = None
        self.network_pass.forget()
        if self.average is not None:
            self.average.leave_step()

    def _unscale_rows(self, factor: float) -> None:
        for parameter in self.network_pass.row_parameters:  # on the host, also of other devices
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _fault(self, reading: StepReading) -> NonFiniteGradient | None:
        if self.sparse is not None:
            try:
                self.sparse.check_finite()
            except NonFiniteGradient as fault:
                return fault
        if reading.is_finite:
            return None
        return NonFiniteGradient(
            f"dense parameter {self._bad_parameter()!r}: its gradient is not finite, got NaN or "
            "inf. Nothing was updated: look for NaN in the batch's dense columns or labels, or "
            "lower the learning rate."
        )

    def _bad_parameter(self) -> str:
        """Return the name of the first dense parameter whose gradient is not finite."""
        names = {id(parameter): name for name, parameter in self.network.named_parameters()}
        for parameter in self._dense_parameters:
            gradient = parameter.grad
            if gradient is not None and not all_finite([gradient]):
                return names.get(id(parameter), "?")
        return "?"


class SelfUpdating:
    """A network that runs backward and updates itself (`optimizer=None`).

    The loop calls its forward only. If it returns several outputs, the first is the loss.
    Optimizers and schedules that are attributes of its modules are part of its state.
    """

    def __init__(self, network: nn.Module, criterion: Criterion | None) -> None:
        self.network = network
        self.criterion = criterion
        self.device = device_of(network)
        self.dense = None
        self.sparse = None
        self.planner: Planner | None = None
        self.grains = 1
        self.own_grains: range | None = None
        self.shard: Shard = WHOLE
        self.skipped = 0
        self.outputs: Any = None
        self.loss: Tensor | None = None  # of these outputs
        self._unchanged = Unchanged(network)

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The optimizers that the network holds, by their names in a checkpoint."""
        return optimizers_of(self.network)

    def begin(self) -> None:
        """Begin a training."""
        check_single_rank("RecModel")
        check_not_moved(self)
        self._unchanged.begin()

    def end(self) -> list[RankWork]:
        """End a training, and log if the network never changes."""
        self._unchanged.look()
        return []

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that must be equal on all ranks: there is one."""
        return {}

    def summed(self, moments: Sequence[Counters]) -> Sequence[Counters]:
        """Return the statistics as they are: there is one rank."""
        return moments

    def forget(self) -> None:
        """Do nothing: the network drops its gradients itself."""

    def parameters(self) -> list[nn.Parameter]:
        return []

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Return 0: the network keeps its gradients to itself."""
        return torch.zeros(())

    def forward(self, example: Example) -> Tensor:
        with misfits_named(self.network, example):
            outputs = self.network(*example.arguments, **example.keywords)
        self.outputs = outputs
        if self.criterion is None:
            loss = own_loss(outputs[0] if _is_several(outputs) else outputs)
        else:
            outputs = self.criterion.shape(outputs, example.labels)
            loss = self.criterion(outputs, example.labels, example.weight)
        self.loss = loss.detach()
        return loss

    def state(self) -> dict[str, Any]:
        """Return the states of the schedules that the network holds, by path."""
        schedules = schedules_of(self.network)
        return {path: schedule.state_dict() for path, schedule in schedules.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for path, schedule in schedules_of(self.network).items():
            if path in state:
                schedule.load_state_dict(dict(state[path]))

    def backward(self, loss: Tensor) -> None: ...

    def gradients_are_finite(self) -> bool:
        return True

    def step(self) -> None:
        self._unchanged.count()


def check_not_moved(learner: StepLearner | SelfUpdating) -> None:
    """Raise ConfigError if the network is on another device than when RecModel was made.

    Precision, loss scaling and compiled code were chosen for that device.
    """
    device = device_of(learner.network)
    if device != learner.device:
        raise ConfigError(
            f"RecModel: the network was moved after the model was made of it, got a network on "
            f"{device} for a model on {learner.device}. Let RecModel move it: "
            f"RecModel(network, ..., device={str(device)!r})."
        )


def _is_several(outputs: Any) -> bool:
    return isinstance(outputs, (tuple, list)) and len(outputs) > 0
