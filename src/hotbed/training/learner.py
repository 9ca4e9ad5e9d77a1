# SPDX-License-Identifier: Apache-2.0
"""The moves of one training step: what the loop calls, one after another.

`prepare` turns what a dataset yields into an `Example`; `Learner` holds the network, its criterion
and its two optimizers (dense parameters, rows of tables) and guarantees that a batch whose
gradients are not finite leaves all of them, their state and the network's buffers as they were.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch
from hotbed.errors import ConfigError, DataError, NonFiniteGradient
from hotbed.models.losses import BCE, Focal, Loss, MultiTask, get_loss
from hotbed.optim.precision import Boost, Precision

CPU = torch.device("cpu")
BCE_FUNCTION = nn.functional.binary_cross_entropy_with_logits
Outputs = Tensor | dict[str, Tensor]
CHECKED_BATCHES = 10
"""Batches whose labels a loss looks at; those of a Dataset are looked at row by row when they are
read.
"""


@dataclass(frozen=True)
class Example:
    """One batch as the network sees it: `network(*arguments)`; tensors on the network's device, ids
    on the host.
    """

    arguments: tuple[Any, ...]
    labels: Any  # Tensor [n], dict of label name -> Tensor [n], or None
    weight: Tensor | None
    num_samples: int
    batch: Batch | None  # the Batch this came from; None for tuple data
    device: torch.device = CPU

    @property
    def everything(self) -> tuple[Any, ...]:
        """Every item of the dataset, labels too: what an evaluation network is called with."""
        return (
            self.arguments
            if self.batch is not None or self.labels is None
            else (*self.arguments, self.labels)
        )


def prepare(item: Any, device: torch.device, labelled: bool) -> Example:
    """An `Example` from a `Batch`, a tuple of arrays or tensors, or one array.

    `labelled` (a loss function is given) reads a tuple as (data, label); otherwise all items are
    arguments.
    """
    if isinstance(item, Batch):
        batch = _to_torch(item, device)
        labels: Any = dict(batch.labels)
        labels = next(iter(labels.values())) if len(labels) == 1 else labels or None
        weight: Any = batch.weight
        return Example((batch,), labels, weight, item.num_samples, batch, device)
    items = tuple(
        _to_tensor(part, device) for part in (item if isinstance(item, (tuple, list)) else (item,))
    )
    if not labelled:
        return Example(items, None, None, _length(items), None, device)
    if len(items) > 2:
        raise DataError(
            "a dataset used with a loss function must yield (data, label) — received "
            f"{len(items)} items — "
            "yield two, or leave loss_fn out and compute the loss in the network"
        )
    return Example(
        items[:1], items[1] if len(items) == 2 else None, None, _length(items), None, device
    )


def _to_torch(batch: Batch, device: torch.device) -> Batch:
    converted = batch.map_arrays(_from_array)
    if device == CPU:
        return converted
    moved: dict[str, Any] = {
        "dense": {
            name: value.to(device, non_blocking=True) for name, value in converted.dense.items()
        },
        "labels": {
            name: value.to(device, non_blocking=True) for name, value in converted.labels.items()
        },
    }
    if converted.weight is not None:
        moved["weight"] = converted.weight.to(device, non_blocking=True)
    return replace(converted, **moved)


def _from_array(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        # read-only arrays (Arrow's) would make torch warn; nothing in the loop writes into a batch
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    return array


def _to_tensor(part: Any, device: torch.device) -> Any:
    if isinstance(part, Mapping):
        return {name: _to_tensor(value, device) for name, value in part.items()}
    if isinstance(part, (np.ndarray, float, int, list)):
        part = _from_array(np.asarray(part))
    return part.to(device) if torch.is_tensor(part) else part


def _length(part: Any) -> int:
    if isinstance(part, (tuple, Mapping)):
        parts = part.values() if isinstance(part, Mapping) else part
        return max((_length(item) for item in parts), default=0)
    return len(part) if hasattr(part, "__len__") and getattr(part, "ndim", 1) != 0 else 0


class Criterion:
    """A loss function in one face: `criterion(outputs, labels, weight) -> scalar`.

    `loss_fn` is a name or value of `hb.losses`, any callable of (prediction, label) or (prediction,
    label, weight), or a mapping of label names to such for a network with several labels; one loss
    serves every label. The losses of labels are added. Weights multiply the loss of each sample.
    """

    def __init__(self, loss_fn: Any) -> None:
        if isinstance(loss_fn, (Mapping, nn.ModuleDict)):
            self.loss_fn: Any = {
                name: get_loss(one) if isinstance(one, str) else one
                for name, one in loss_fn.items()
            }
        else:
            self.loss_fn = get_loss(loss_fn) if isinstance(loss_fn, str) else loss_fn
        self._weighted: dict[int, Callable[[Any, Any, Tensor], Tensor]] = {}
        self._unchecked = CHECKED_BATCHES

    def __call__(self, outputs: Outputs, labels: Any, weight: Tensor | None) -> Tensor:
        if labels is None:
            raise DataError(
                "the loss needs labels — received a batch without — add a Label column or drop "
                "loss_fn"
            )
        if self._unchecked:
            self._unchecked -= 1
            self._check_labels(outputs, labels)
        if not isinstance(outputs, dict) or isinstance(self.loss_fn, MultiTask):
            return self._one(self.loss_fn, outputs, labels, weight)
        labels = labels if isinstance(labels, dict) else dict.fromkeys(outputs, labels)
        missing = [name for name in outputs if name not in labels or self._of(name) is None]
        if missing:
            raise ConfigError(
                f"output {missing[0]!r} has no label or no loss — labels are {sorted(labels)} — "
                "name the network's outputs after the Label columns and give each a loss"
            )
        return torch.stack(
            [self._one(self._of(name), outputs[name], labels[name], weight) for name in outputs]
        ).sum()

    def shape(self, outputs: Any, labels: Any) -> Any:
        """Outputs as float32; [n, 1] becomes [n] where the label is [n], which would else broadcast
        to [n, n].
        """
        if isinstance(outputs, Mapping):
            return {
                name: self.shape(value, labels.get(name) if isinstance(labels, dict) else labels)
                for name, value in outputs.items()
            }
        if not torch.is_tensor(outputs):
            raise ConfigError(
                f"the network returned {type(outputs).__name__} — a loss_fn needs a tensor or a "
                "dict of "
                "label name to tensor — return that, or leave loss_fn out"
            )
        if (
            outputs.dim() == 2
            and outputs.shape[1] == 1
            and (labels is None or getattr(labels, "ndim", 0) == 1)
        ):
            outputs = outputs.squeeze(1)
        return outputs.float()

    def activate(self, outputs: Any, label: str | None = None) -> Any:
        """What a user calls the prediction: a probability where the loss is a cross-entropy of
        logits.
        """
        if isinstance(outputs, dict):
            return {name: self.activate(value, name) for name, value in outputs.items()}
        loss = self.loss_fn if label is None else self._of(label)
        return torch.sigmoid(outputs) if _takes_logits(loss) else outputs

    def _check_labels(self, outputs: Outputs, labels: Any) -> None:
        """Raise where labels do not fit the outputs or the loss: data need not come from a Dataset,
        which looks at rows.
        """
        several = isinstance(labels, dict)
        if (
            several
            and not isinstance(outputs, dict)
            and isinstance(self.loss_fn, (Loss, nn.modules.loss._Loss))
        ):
            raise ConfigError(
                "loss_fn: the data have several labels and the network returns one output, got "
                f"labels {sorted(labels)}. "
                "Return a dict of label name to tensor, as hb.models.MMoE does, or keep one label."
            )
        if isinstance(self.loss_fn, Mapping) and not isinstance(outputs, dict):
            raise ConfigError(
                f"loss_fn: the network returns one output, got losses of {sorted(self.loss_fn)}. "
                "Return a dict of label name to tensor, or give one loss."
            )
        for name, values in (labels if several else {"": labels}).items():
            loss = self._of(name) if several else self.loss_fn
            if _takes_logits(loss) and values.numel() and bool(((values < 0) | (values > 1)).any()):
                of_name = f" {name!r}" if name else ""
                raise DataError(
                    f"label{of_name}: the loss is a cross-entropy and needs labels from 0 to 1, "
                    f"got {values.min():g} to "
                    f"{values.max():g}. Give labels from 0 to 1, or train with loss 'mse'."
                )

    def unit_labels(self, labels: Iterable[str]) -> list[str]:
        """Those of the labels whose loss is a cross-entropy of logits, so that they must lie in [0,
        1].
        """
        several = isinstance(self.loss_fn, (Mapping, MultiTask))
        return [
            label for label in labels if _takes_logits(self._of(label) if several else self.loss_fn)
        ]

    def _of(self, label: str) -> Any:
        losses = self.loss_fn.losses if isinstance(self.loss_fn, MultiTask) else self.loss_fn
        return losses.get(label) if isinstance(losses, Mapping) else losses

    def _one(self, loss: Any, outputs: Any, labels: Any, weight: Tensor | None) -> Tensor:
        if weight is None:
            return loss(outputs, labels)  # type: ignore[no-any-return]
        if id(loss) not in self._weighted:
            self._weighted[id(loss)] = _with_weight(loss)
        return self._weighted[id(loss)](outputs, labels, weight)


def _takes_logits(loss: Any) -> bool:
    """Whether a loss is a cross-entropy of logits and labels from 0 to 1."""
    return isinstance(loss, (BCE, Focal, nn.BCEWithLogitsLoss)) or loss is BCE_FUNCTION


def _with_weight(loss: Any) -> Callable[[Any, Any, Tensor], Tensor]:
    if isinstance(loss, nn.modules.loss._Loss):
        each = copy.copy(loss)
        each.reduction = "none"
        return lambda outputs, labels, weight: (each(outputs, labels) * weight).mean()
    function = (
        loss
        if inspect.isfunction(loss)
        else loss.forward
        if isinstance(loss, nn.Module)
        else loss.__call__
    )
    if "weight" in inspect.signature(function).parameters:
        return lambda outputs, labels, weight: loss(outputs, labels, weight=weight)
    raise ConfigError(
        f"{getattr(loss, '__name__', type(loss).__name__)} takes no weight — the data have a "
        "Weight column — "
        "use a loss of hb.losses or torch.nn, or give the function a third parameter named weight"
    )


class Update(Protocol):
    """What the loop asks of whatever learns from a batch."""

    def forward(self, example: Example) -> Tensor:
        """Map ids to rows, run the network, compute the loss: a scalar tensor."""

    def backward(self, loss: Tensor) -> None:
        """Gradients of dense parameters and rows."""

    def gradients_are_finite(self) -> bool:
        """True = go on; False = skip this batch. Raises `NonFiniteGradient` where a skip would hide
        a fault.
        """

    def dense_step(self) -> None:
        """Update dense parameters."""

    def sparse_step(self) -> None:
        """Update rows of tables, then forget all gradients."""


class Learner:
    """Learns with a dense torch optimizer and, where the network holds tables, a `SparseOptimizer`."""

    def __init__(
        self,
        network: nn.Module,
        criterion: Criterion | None,
        dense: torch.optim.Optimizer | None,
        sparse: Any,
        *,
        precision: Precision | None = None,
        boost: Boost | None = None,
    ) -> None:
        self.network = network
        self.criterion = criterion
        self.dense = dense
        self.sparse = sparse
        self.precision = precision or Precision()
        self.device = device_of(network)
        self.skipped = 0
        self.outputs: Outputs | None = None
        self._network = network if boost is None else boost.compile(network)
        self._dense_parameters = parameters_of(dense)
        self._row_parameters = parameters_of(sparse)
        self._buffers = [buffer for buffer in network.buffers() if buffer.numel()]
        self._kept = [buffer.clone() for buffer in self._buffers]
        self._scaler = (
            torch.amp.GradScaler(self.device.type)
            if self.precision.scaled and dense is not None
            else None
        )

    def parameters(self) -> list[nn.Parameter]:
        """Dense parameters and the row parameters of the tables: everything that has a gradient
        after `backward`.
        """
        return [*self._dense_parameters, *self._row_parameters]

    def forward(self, example: Example) -> Tensor:
        if self._buffers:
            torch._foreach_copy_(self._kept, self._buffers)
        with self.precision.autocast(self.device):
            outputs = self._network(*example.arguments)
        if self.criterion is None:
            return _own_loss(outputs)
        outputs = self.criterion.shape(outputs, example.labels)
        self.outputs = outputs
        return self.criterion(outputs, example.labels, example.weight)

    def backward(self, loss: Tensor) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

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
        self._scaler.update(self._scaler.get_scale() * self._scaler.get_backoff_factor())
        self.skipped += 1
        return False

    def dense_step(self) -> None:
        if self.dense is not None:
            self.dense.step()
            self.dense.zero_grad(set_to_none=True)
        if self._scaler is not None:
            self._scaler.update()

    def sparse_step(self) -> None:
        if self.sparse is not None:
            self.sparse.step()
            self.sparse.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """What is neither in the network nor in an optimizer: the scale of losses, and how many
        batches it cost.
        """
        return {
            "skipped": self.skipped,
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.skipped = state["skipped"]
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(dict(state["scaler"]))

    def forget(self) -> None:
        """Drop every gradient."""
        for optimizer in (self.dense, self.sparse):
            if optimizer is not None:
                optimizer.zero_grad(set_to_none=True)

    def _unscale(self, scaler: torch.amp.GradScaler) -> None:
        assert self.dense is not None
        scaler.unscale_(self.dense)
        for parameter in self._row_parameters:  # on the host, whatever the device of the network
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / scaler.get_scale())

    def _fault(self) -> NonFiniteGradient | None:
        if self.sparse is not None:
            try:
                self.sparse.check_finite()
            except NonFiniteGradient as fault:
                return fault
        gradients = [
            parameter.grad for parameter in self._dense_parameters if parameter.grad is not None
        ]
        if not gradients or _all_finite(gradients):
            return None
        names = {id(parameter): name for name, parameter in self.network.named_parameters()}
        bad = next(
            p for p in self._dense_parameters if p.grad is not None and not _all_finite([p.grad])
        )
        return NonFiniteGradient(
            f"the gradient of dense parameter {names.get(id(bad), '?')!r} is not finite — "
            "received NaN or inf — "
            "nothing was updated; look for NaN in the batch's dense columns or labels, or lower "
            "the learning rate"
        )


class SelfUpdating:
    """A network that runs backward and updates itself (`optimizer=None`): forward is all that the
    loop does.
    """

    def __init__(self, network: nn.Module, criterion: Criterion | None) -> None:
        self.network = network
        self.criterion = criterion
        self.device = device_of(network)
        self.dense = self.sparse = None
        self.skipped = 0

    def parameters(self) -> list[nn.Parameter]:
        return []

    def forward(self, example: Example) -> Tensor:
        outputs = self.network(*example.arguments)
        if self.criterion is None:
            return _own_loss(outputs)
        return self.criterion(
            self.criterion.shape(outputs, example.labels), example.labels, example.weight
        )

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def backward(self, loss: Tensor) -> None: ...

    def gradients_are_finite(self) -> bool:
        return True

    def dense_step(self) -> None: ...

    def sparse_step(self) -> None: ...


def parameters_of(optimizer: torch.optim.Optimizer | None) -> list[nn.Parameter]:
    """Every parameter that an optimizer holds."""
    if optimizer is None:
        return []
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def device_of(network: nn.Module) -> torch.device:
    """Where the dense part of a network lives: the first device that is not the CPU, else the CPU."""
    tensors = [*network.parameters(), *network.buffers()]
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), CPU)


def _all_finite(gradients: list[Tensor]) -> bool:
    # the largest absolute value: unlike a sum of squares it cannot overflow, and NaN wins
    norms = torch._foreach_norm([g for g in gradients if g.numel()], float("inf"))
    return not norms or bool(torch.isfinite(torch.stack([norm.float() for norm in norms])).all())


def _own_loss(outputs: Any) -> Tensor:
    if torch.is_tensor(outputs) and outputs.numel() == 1:
        return outputs.reshape(())
    raise ConfigError(
        "a network without loss_fn must return its loss, one number — received "
        f"{type(outputs).__name__}"
        f"{list(outputs.shape) if torch.is_tensor(outputs) else ''} — return the loss, or give "
        "RecModel a loss_fn"
    )
