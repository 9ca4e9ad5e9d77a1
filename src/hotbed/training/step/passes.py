# SPDX-License-Identifier: Apache-2.0
"""Passes: how the batch of a step goes through the network, forward and backward.

`NetworkPass` runs the network over the whole batch. `Grains`, in grains.py, runs it over each
grain of the batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.embedding.device import link_to
from hotbed.errors import ConfigError
from hotbed.models.layers.in_batch import counting_modules
from hotbed.optim.precision import AmpPrecision
from hotbed.optim.sparse import SparseOptimizer
from hotbed.training.step.criterion import Criterion
from hotbed.training.step.example import CPU, Example, misfits_named


class Passes(ABC):
    """The passes of a step over its batch.

    Attributes:
        outputs: of the network in the last training forward.
        loss: of these outputs.
    """

    outputs: Any
    loss: Tensor | None = None

    @abstractmethod
    def forward(self, example: Example) -> Tensor:
        """Run the network on an example and return the loss."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Let the gradients of the loss wait."""

    @abstractmethod
    def norms(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the norms of gradients of dense parameters, on their device."""

    @abstractmethod
    def norm(self, dense: Sequence[Tensor]) -> Tensor:
        """Return the norm of all gradients that wait, float32 [] on the host.

        `dense`: the norms of those of dense parameters, on the host.
        """

    def scaled(self) -> AbstractContextManager[None]:
        """Return a block that scales the gradients that wait."""
        return nullcontext()


class NetworkPass(Passes):
    """One pass of a network over samples, forward and backward.

    Args:
        network: to train.
        criterion: its loss; None: the network returns its loss.
        dense: the optimizer of dense parameters; None if there are none.
        sparse: the optimizer of tables; None if there are none.
        precision: the number format of the network.
        device: of the network.

    Attributes:
        call: takes the arguments of an example, and returns what the network returns.
        dense_parameters: that the optimizer holds.
        counting: modules whose gradients count samples.
        row_parameters: of tables, without those of `counting`.
        buffers: of the network, those with values.
        before: these buffers, as they were before the last forward pass.
        scaler: of the loss; None: it is not scaled.
    """

    def __init__(
        self,
        network: nn.Module,
        criterion: Criterion | None,
        dense: torch.optim.Optimizer | None,
        sparse: SparseOptimizer | None,
        precision: AmpPrecision,
        device: torch.device,
    ) -> None:
        self.network = network
        self.criterion = criterion
        self.precision = precision
        self.device = device
        self.outputs = None
        self.call: Callable[..., Any] = network
        self.dense_parameters = parameters_of(dense)
        self.counting = counting_modules(network)
        counts = {id(parameter) for module in self.counting for parameter in module.parameters()}
        self.row_parameters = [p for p in parameters_of(sparse) if id(p) not in counts]
        self.buffers = [buffer for buffer in network.buffers() if buffer.numel()]
        self.before = [buffer.clone() for buffer in self.buffers]
        self.scaler: torch.amp.GradScaler | None = None
        if precision.scaled and dense is not None:
            self.scaler = torch.amp.GradScaler(device.type)
        self._dense = dense
        self._sparse = sparse

    def forward(self, example: Example) -> Tensor:
        if self.buffers:
            torch._foreach_copy_(self.before, self.buffers)
        with self.precision.autocast(self.device), misfits_named(self.call, example):
            self.outputs = outputs = self.call(*example.arguments, **example.keywords)
        if self.criterion is None:
            self.loss = loss = own_loss(outputs)
            return loss
        self.outputs = outputs = self.criterion.shape(outputs, example.labels)
        self.loss = loss = self.criterion(outputs, example.labels, example.weight)
        return loss

    def backward(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise ConfigError(
                "network: there is nothing to learn, got a loss that depends on no parameter or "
                "table that is trained. Unfreeze one, or train without detach() and no_grad()."
            )
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()
        # else the graph would hold the rows of this batch while the next one is mapped
        self.outputs = _detached(self.outputs)
        self.loss = _detached(self.loss)

    def norms(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        with_values = [gradient for gradient in gradients if gradient.numel()]
        return list(torch._foreach_norm(with_values)) if with_values else []

    def norm(self, dense: Sequence[Tensor]) -> Tensor:
        """Return the norm of all gradients that wait, float32 [] on the host.

        It is torch's: the norm of the norms of all gradients, of dense parameters and then of rows.
        The order of sums in a gradient of rows is that of its ids.
        """
        rows = [p.grad for p in self.row_parameters if p.grad is not None]
        norms = [*dense, *self.norms(rows)]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def restore_buffers(self) -> None:
        """Let the buffers be as they were before the last forward pass."""
        if self.buffers:
            torch._foreach_copy_(self.buffers, self.before)

    def leave_buffers(self) -> Callable[[], list[Tensor | None]]:
        """Let the buffers be as they were before the last forward pass.

        Return what waits for the values that they had after it: None where it changed none. Those
        of integers are on the host.
        """
        pairs = list(zip(self.buffers, self.before, strict=True))
        if self.device == CPU or not pairs:
            here = [None if torch.equal(*pair) else pair[0].clone() for pair in pairs]
            self.restore_buffers()
            return lambda: here
        are_changed = torch.stack([(buffer != before).any() for buffer, before in pairs])
        after = [buffer.clone() for buffer in self.buffers]
        integers = [None if value.is_floating_point() else value for value in after]
        arrival = link_to(self.device).bring([are_changed, *integers])
        self.restore_buffers()

        def changes(arrived: Sequence[Tensor | None]) -> list[Tensor | None]:
            flags, *on_host = arrived
            assert flags is not None, "it was sent"
            values = [v if h is None else h.clone() for v, h in zip(after, on_host, strict=True)]
            return [v if f else None for v, f in zip(values, flags.tolist(), strict=True)]

        return lambda: arrival.read(changes)

    def forget(self) -> None:
        """Drop every gradient."""
        for parameter in parameters_of(self._dense):
            parameter.grad = None
        if self._sparse is not None:
            self._sparse.zero_grad()


def parameters_of(optimizer: torch.optim.Optimizer | None) -> list[nn.Parameter]:
    """Return every parameter of an optimizer; none for None."""
    if optimizer is None:
        return []
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def own_loss(outputs: Any) -> Tensor:
    """Return the loss that a network without a criterion returned."""
    if torch.is_tensor(outputs) and outputs.numel() == 1:
        return outputs.reshape(())
    kind = type(outputs).__name__
    if torch.is_tensor(outputs):
        kind += f"{list(outputs.shape)}"
    raise ConfigError(
        f"network: without loss_fn it must return its loss, one number, got {kind}. Return the "
        "loss, or give RecModel a loss_fn."
    )


def _detached(outputs: Any) -> Any:
    if isinstance(outputs, dict):
        return {name: output.detach() for name, output in outputs.items()}
    return outputs.detach() if torch.is_tensor(outputs) else outputs
