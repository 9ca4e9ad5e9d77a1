# SPDX-License-Identifier: Apache-2.0
"""The operations of one training step, which the loop calls one after another.

`StepLearner` holds the network, its criterion and its two optimizers (dense parameters, rows of
tables). A batch whose gradients are not finite changes none of them: parameters, rows, optimizer
state and the network's buffers stay as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hotbed.embedding.modules import device_of
from hotbed.errors import ConfigError, NonFiniteGradient
from hotbed.optim.held import optimizers_of, schedules_of
from hotbed.optim.precision import AmpPrecision, Compile
from hotbed.optim.sparse import SparseOptimizer
from hotbed.optim.unchanged import LeftOut, Unchanged
from hotbed.parallel import WHOLE, Counters, RankWork, Shard
from hotbed.parallel.world import check_single_rank
from hotbed.training.stages.criterion import Criterion
from hotbed.training.stages.example import CPU, Example, misfits_named
from hotbed.training.stages.mapper import Mapper, is_mapped_first, mapper_of


class Update(Protocol):
    """The part of the loop that learns from a batch.

    Attributes:
        planner: maps ids before the forward pass; None if the forward pass maps all ids.
    """

    planner: Mapper | None

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
        compiles: settings of torch.compile; None = the network is not compiled.
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
        compiles: Compile | None = None,
    ) -> None:
        self.network = network
        self.criterion = criterion
        self.dense = dense
        self.sparse = sparse
        stepped = combined or (dense, sparse)
        self._optimizers = [optimizer for optimizer in stepped if optimizer is not None]
        self.precision = precision or AmpPrecision()
        self.device = device_of(network)
        self.grains = 1
        self.shard: Shard = WHOLE
        self.skipped = 0
        self.outputs: Any = None  # of the network in the last training forward
        self.loss: Tensor | None = None  # of these outputs, where there is a criterion
        self.call: Callable[..., Any] = network  # of an example
        self.planner: Mapper | None = None
        if compiles is not None:
            self.call = compiles.compiled(network)
        elif is_mapped_first(network):
            self.planner = mapper_of(network)
        self._dense_parameters = parameters_of(dense)
        self._row_parameters = parameters_of(sparse)
        self._left_out = LeftOut(network, self._dense_parameters)
        self._buffers = [buffer for buffer in network.buffers() if buffer.numel()]
        self._kept = [buffer.clone() for buffer in self._buffers]
        self._scaler: torch.amp.GradScaler | None = None
        if self.precision.scaled and dense is not None:
            self._scaler = torch.amp.GradScaler(self.device.type)

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer | None]:
        """The optimizers by their names in a checkpoint; None: there is no such part."""
        return {"dense": self.dense, "sparse": self.sparse}

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters with gradients: dense parameters and row parameters of tables."""
        return [*self._dense_parameters, *self._row_parameters]

    def _gradient_norm(self) -> Tensor:
        """Return the norm of all gradients that wait, float32 [].

        It is torch's: the norm of the norms of all gradients, in the order of `parameters()`. The
        order of sums in a gradient of rows is that of its ids.
        """
        gradients = [parameter.grad for parameter in self.parameters()]
        return torch.nn.utils.get_total_norm(
            [gradient for gradient in gradients if gradient is not None and gradient.numel()]
        )

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before."""
        norm = self._gradient_norm()
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def begin(self) -> None:
        """Begin a training: drop gradients that wait, and log what the optimizer does not hold."""
        if self.shard is WHOLE:
            check_single_rank("RecModel")
        check_not_moved(self)
        # what an interrupted training, or a loop of the user's own, left behind
        self.forget()
        self._left_out.look()

    def end(self) -> list[RankWork]:
        """End a training, and return what each rank did in it; [] where one process trains."""
        return []

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that must be equal on all ranks before they learn or score; {} on one."""
        return {}

    def forward(self, example: Example) -> Tensor:
        if self._buffers:
            torch._foreach_copy_(self._kept, self._buffers)
        with self.precision.autocast(self.device), misfits_named(self.call, example):
            self.outputs = outputs = self.call(*example.arguments, **example.keywords)
        if self.criterion is None:
            return _own_loss(outputs)
        self.outputs = outputs = self.criterion.shape(outputs, example.labels)
        self.loss = loss = self.criterion(outputs, example.labels, example.weight)
        return loss

    def backward(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise ConfigError(
                "network: there is nothing to learn, got a loss that depends on no parameter or "
                "table that is trained. Unfreeze one, or train without detach() and no_grad()."
            )
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()
        # else the graph would hold the rows of this batch while the next one is mapped
        self.outputs = _detached(self.outputs)
        self.loss = _detached(self.loss)

    def gradients_are_finite(self) -> bool:
        if self._scaler is not None:
            self._unscale(self._scaler)
        fault = self._fault()
        if fault is None:
            return True
        self.forget()
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._kept)
        if self._scaler is None:
            raise fault
        scale = self._scaler.get_scale() * self._scaler.get_backoff_factor()
        self._scaler.update(scale)
        self.skipped += 1
        return False

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()
        self.forget()
        if self._scaler is not None:
            self._scaler.update()

    def state(self) -> dict[str, Any]:
        """Return the number of skipped batches and the state of the loss scale."""
        scaler = None if self._scaler is None else self._scaler.state_dict()
        return {"skipped": self.skipped, "scaler": scaler}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.skipped = state["skipped"]
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(dict(state["scaler"]))

    def summed(self, moments: Sequence[Counters]) -> Sequence[Counters]:
        """Return the statistics of tables at some moments, of all ranks; each rank must ask."""
        return moments

    def forget(self) -> None:
        """Drop every gradient."""
        for parameter in parameters_of(self.dense):
            parameter.grad = None
        if self.sparse is not None:
            self.sparse.zero_grad()

    def _unscale(self, scaler: torch.amp.GradScaler) -> None:
        assert self.dense is not None
        scaler.unscale_(self.dense)
        factor = 1.0 / scaler.get_scale()
        for parameter in self._row_parameters:  # on the host, also if the network is elsewhere
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _fault(self) -> NonFiniteGradient | None:
        if self.sparse is not None:
            try:
                self.sparse.check_finite()
            except NonFiniteGradient as fault:
                return fault
        gradients = []
        for parameter in self._dense_parameters:
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        if not gradients or _all_finite(gradients):
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
            if gradient is not None and not _all_finite([gradient]):
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
        self.planner: Mapper | None = None
        self.grains = 1
        self.shard: Shard = WHOLE
        self.skipped = 0
        self.outputs: Any = None
        self.loss: Tensor | None = None  # of these outputs, where there is a criterion
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
        """Settings that must be equal on all ranks before they learn or score; {} on one."""
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
            return _own_loss(outputs[0] if _is_several(outputs) else outputs)
        outputs = self.criterion.shape(outputs, example.labels)
        self.loss = loss = self.criterion(outputs, example.labels, example.weight)
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


def parameters_of(optimizer: torch.optim.Optimizer | None) -> list[nn.Parameter]:
    """Return every parameter of an optimizer; none for None."""
    if optimizer is None:
        return []
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _detached(outputs: Any) -> Any:
    if isinstance(outputs, dict):
        return {name: output.detach() for name, output in outputs.items()}
    return outputs.detach() if torch.is_tensor(outputs) else outputs


def check_not_moved(learner: StepLearner | SelfUpdating) -> None:
    """Raise ConfigError if the network is on another device than when RecModel was made.

    Precision, loss scaling and compiled code were chosen for that device.
    """
    device = device_of(learner.network)
    if device != learner.device:
        raise ConfigError(
            f"RecModel: the network was moved after the model was made of it, got a network on "
            f"{device} for a model on {learner.device}. Move it first: "
            f"RecModel(network.to({str(device)!r}), ...)."
        )


def _all_finite(gradients: Sequence[Tensor]) -> bool:
    values = []
    for grad in gradients:
        grads = grad.coalesce().values() if grad.is_sparse else grad
        if grads.numel():
            values.append(grads)
    if not values:
        return True
    if values[0].device == CPU:
        has_infinite = torch.zeros(())
        # what GradScaler calls: one pass over all gradients, which are multiplied by 1 and stay
        torch._amp_foreach_non_finite_check_and_unscale_(values, has_infinite, torch.ones(()))
        return not has_infinite.item()
    norms = torch._foreach_norm(values, math.inf)  # other devices know the former for some dtypes
    greatest = torch.stack([norm.float() for norm in norms]).max()  # NaN where one is NaN
    return math.isfinite(greatest.item())


def _is_several(outputs: Any) -> bool:
    return isinstance(outputs, (tuple, list)) and len(outputs) > 0


def _own_loss(outputs: Any) -> Tensor:
    if torch.is_tensor(outputs) and outputs.numel() == 1:
        return outputs.reshape(())
    kind = type(outputs).__name__
    if torch.is_tensor(outputs):
        kind += f"{list(outputs.shape)}"
    raise ConfigError(
        f"network: without loss_fn it must return its loss, one number, got {kind}. Return the "
        "loss, or give RecModel a loss_fn."
    )
