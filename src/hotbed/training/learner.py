# SPDX-License-Identifier: Apache-2.0
"""The operations of one training step, which the loop calls one after another.

`prepare` turns an item of a dataset into an `Example`. `Learner` holds the network, its criterion
and its two optimizers (dense parameters, rows of tables). A batch whose gradients are not finite
changes none of them: parameters, rows, optimizer state and the network's buffers stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch, Ids
from hotbed.embedding.modules import Planner
from hotbed.errors import ConfigError, DataError, NonFiniteGradient
from hotbed.optim.precision import AmpPrecision, Boost
from hotbed.optim.sparse import SparseOptimizer
from hotbed.training.auto.network import arguments_of, converted
from hotbed.training.criterion import Criterion, Outputs

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Example:
    """One batch as the arguments of the network, `network(*arguments, **keywords)`.

    Tensors are on the network's device, ids on the host.
    """

    arguments: tuple[Any, ...]
    labels: Any  # Tensor [n], dict of label name -> Tensor [n], or None
    weight: Tensor | None
    num_samples: int
    batch: Batch | None  # the Batch that this was made from; None for tuple data
    device: torch.device = CPU
    keywords: Mapping[str, Any] = field(default_factory=dict)  # only of converted networks

    @property
    def everything(self) -> tuple[Any, ...]:
        """Every item of the dataset, labels too: the arguments of an evaluation network."""
        items = (*self.arguments, *self.keywords.values())
        if self.batch is not None or self.labels is None:
            return items
        return (*items, self.labels)


def prepare(
    item: Any,
    device: torch.device,
    *,
    labelled: bool,
    network: nn.Module | None = None,
) -> Example:
    """Return an `Example` of a `Batch`, of a tuple of arrays or tensors, or of one array.

    Args:
        item: of the dataset.
        device: where the network computes.
        labelled: there is a loss function, so a tuple is (data, label); otherwise all items of a
            tuple are arguments.
        network: takes the data. One that `hb.auto` converted takes a tuple as its positional
            arguments, and a dict by the names of its parameters.

    Raises:
        DataError: `labelled`, and the tuple has more than two items.
    """
    if isinstance(item, Batch):
        batch = _to_torch(item, device)
        return Example(
            (batch,),
            _labels_of(batch),
            batch.weight,
            item.num_samples,
            batch,
            device,
        )
    if not isinstance(item, (tuple, list)):
        item = (item,)
    items = tuple(_to_tensor(part, device) for part in item)
    arguments = items
    labels = None
    if labelled:
        if len(items) > 2:
            raise DataError(
                "data: a dataset used with a loss function must yield (data, label), got "
                f"{len(items)} items. Yield two, or leave loss_fn out and compute the loss in the "
                "network."
            )
        arguments = items[:1]
        if len(items) == 2:
            labels = items[1]
    keywords: Mapping[str, Any] = {}
    if network is not None and converted(network) is not None:
        data = arguments[0] if len(arguments) == 1 else arguments
        arguments, keywords = arguments_of(network, data)
    return Example(
        arguments,
        labels,
        None,
        _length(labels) or _length(items),
        None,
        device,
        keywords,
    )


def _labels_of(batch: Batch) -> Any:
    """Return the labels by name, a single label itself, or None without labels."""
    labels = dict(batch.labels)
    if len(labels) == 1:
        return next(iter(labels.values()))
    return labels or None


def _to_torch(batch: Batch, device: torch.device) -> Batch:
    converted = batch
    if batch.plans is None:  # else `hb.Ahead` made it of tensors, and mapped these ids
        converted = batch.map_arrays(_from_array)
    if device == CPU:
        return converted
    weight = converted.weight
    if weight is not None:
        weight = weight.to(device, non_blocking=True)
    return replace(
        converted,
        dense=_moved(converted.dense, device),
        labels=_moved(converted.labels, device),
        weight=weight,
    )


def _moved(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def _from_array(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        # torch warns of read-only arrays such as Arrow's
        if not array.flags.writeable:
            array = array.copy()
        return torch.from_numpy(array)
    return array


def _to_tensor(part: Any, device: torch.device) -> Any:
    if isinstance(part, Mapping):
        return {name: _to_tensor(value, device) for name, value in part.items()}
    if type(part) is tuple:
        return tuple(_to_tensor(value, device) for value in part)
    if _is_record(part):
        moved = {}
        for member in fields(part):
            if member.init:
                moved[member.name] = _to_tensor(getattr(part, member.name), device)
        return replace(part, **moved)
    if isinstance(part, (np.ndarray, float, int, list)):
        part = _from_array(np.asarray(part))
    if torch.is_tensor(part):
        return part.to(device)
    return part


def _is_record(part: Any) -> bool:
    """Return whether `part` is a dataclass of the user's own, whose fields hold data."""
    return is_dataclass(part) and not isinstance(part, (type, Batch, Ids))


def _length(part: Any) -> int:
    if _is_record(part):
        part = tuple(getattr(part, member.name) for member in fields(part))
    if isinstance(part, Mapping):
        part = tuple(part.values())
    if isinstance(part, tuple):
        lengths = [_length(item) for item in part]
        return max(lengths, default=0)
    if not hasattr(part, "__len__") or getattr(part, "ndim", 1) == 0:
        return 0
    return len(part)


class Update(Protocol):
    """The part of the loop that learns from a batch.

    Attributes:
        planner: maps ids before the forward pass; None if the forward pass maps all ids.
    """

    planner: Planner | None

    def map(self, example: Example) -> Example:
        """Map the ids of a batch to rows; return the example with the plans of its lookups.

        Call it after everything that must see the tables as they were. An example that was mapped
        ahead keeps its plans. `forward` maps ids that were not mapped here.
        """

    def forward(self, example: Example) -> Tensor:
        """Run the network on a mapped example and return the loss, a scalar tensor."""

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of dense parameters and rows."""

    def gradients_are_finite(self) -> bool:
        """Return True to update, False to skip this batch.

        Raises:
            NonFiniteGradient: a gradient is not finite, and a skip would hide a fault.
        """

    def step(self) -> None:
        """Update dense parameters and rows of tables, then drop all gradients."""


class Learner:
    """Learns with a dense torch optimizer, and a `SparseOptimizer` if the network has tables.

    Args:
        network: to train.
        criterion: its loss; None: the network returns its loss.
        dense: the optimizer of dense parameters; None if there are none.
        sparse: the optimizer of tables; None if there are none.
        combined: the optimizers whose parts these two are; they are stepped instead.
        precision: the number format of the network.
        boost: settings of torch.compile; None = the network is not compiled.
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
        boost: Boost | None = None,
    ) -> None:
        self.network = network
        self.criterion = criterion
        self.dense = dense
        self.sparse = sparse
        stepped = combined or (dense, sparse)
        self._optimizers = [optimizer for optimizer in stepped if optimizer is not None]
        self.precision = precision or AmpPrecision()
        self.device = device_of(network)
        self.skipped = 0
        self.outputs: Outputs | None = None
        self._network: Callable[..., Any] = network
        self.planner: Planner | None = None
        if boost is not None:
            self._network = boost.compile(network)
        elif _looks_up_every_id_once(network):
            self.planner = Planner(network)
        self._dense_parameters = parameters_of(dense)
        self._row_parameters = parameters_of(sparse)
        self._buffers = [buffer for buffer in network.buffers() if buffer.numel()]
        self._kept = [buffer.clone() for buffer in self._buffers]
        self._scaler: torch.amp.GradScaler | None = None
        if self.precision.scaled and dense is not None:
            self._scaler = torch.amp.GradScaler(self.device.type)

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters with gradients: dense parameters and row parameters of tables."""
        return [*self._dense_parameters, *self._row_parameters]

    def map(self, example: Example) -> Example:
        if self.planner is None or example.batch is None:
            return example
        batch = self.planner.map(example.batch)
        return replace(example, arguments=(batch,), batch=batch)

    def forward(self, example: Example) -> Tensor:
        if self._buffers:
            torch._foreach_copy_(self._kept, self._buffers)
        with self.precision.autocast(self.device):
            outputs = self._network(*example.arguments, **example.keywords)
        if self.criterion is None:
            return _own_loss(outputs)
        outputs = self.criterion.shape(outputs, example.labels)
        self.outputs = outputs
        return self.criterion(outputs, example.labels, example.weight)

    def backward(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise ConfigError(
                "network: there is nothing to learn, got a loss that depends on no parameter or "
                "table that is trained. Unfreeze one, or train without detach() and no_grad()."
            )
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

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
            optimizer.zero_grad(set_to_none=True)
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

    def forget(self) -> None:
        """Drop every gradient."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

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

    The loop calls its forward only.
    """

    def __init__(self, network: nn.Module, criterion: Criterion | None) -> None:
        self.network = network
        self.criterion = criterion
        self.device = device_of(network)
        self.dense = None
        self.sparse = None
        self.planner: Planner | None = None
        self.skipped = 0

    def parameters(self) -> list[nn.Parameter]:
        return []

    def map(self, example: Example) -> Example:
        return example

    def forward(self, example: Example) -> Tensor:
        outputs = self.network(*example.arguments, **example.keywords)
        if self.criterion is None:
            return _own_loss(outputs)
        outputs = self.criterion.shape(outputs, example.labels)
        return self.criterion(outputs, example.labels, example.weight)

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def backward(self, loss: Tensor) -> None: ...

    def gradients_are_finite(self) -> bool:
        return True

    def step(self) -> None: ...


def _looks_up_every_id_once(network: nn.Module) -> bool:
    """Return True for a network of `hb.models`: its lookups can be mapped before its forward pass.

    A network of the user's own may look up other ids at any step. Ids that were mapped for nothing
    would be inserted and counted, and a resumed run would not repeat that.
    """
    return type(network).__module__.startswith("hotbed.models.")


def parameters_of(optimizer: torch.optim.Optimizer | None) -> list[nn.Parameter]:
    """Return every parameter of an optimizer; none for None."""
    if optimizer is None:
        return []
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def device_of(network: nn.Module) -> torch.device:
    """Return the device of a network's dense part: the first that is not the CPU, else the CPU."""
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.device.type != "cpu":
            return tensor.device
    return CPU


def _all_finite(gradients: list[Tensor]) -> bool:
    # the largest absolute value: it cannot overflow as a sum of squares would, and keeps NaN
    filled = [gradient for gradient in gradients if gradient.numel()]
    if not filled:
        return True
    norms = torch._foreach_norm(filled, float("inf"))
    stacked = torch.stack([norm.float() for norm in norms])
    return bool(torch.isfinite(stacked).all())


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
