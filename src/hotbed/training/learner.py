# SPDX-License-Identifier: Apache-2.0
"""The operations of one training step, which the loop calls one after another.

`prepare` turns an item of a dataset into an `Example`. `Learner` holds the network, its criterion
and its two optimizers (dense parameters, rows of tables). A batch whose gradients are not finite
changes none of them: parameters, rows, optimizer state and the network's buffers stay as they were.
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
"""Batches whose labels are checked here; a Dataset checks its labels by row when it reads them."""


@dataclass(frozen=True)
class Example:
    """One batch as the arguments of the network, `network(*arguments)`.

    Tensors are on the network's device, ids on the host.
    """

    arguments: tuple[Any, ...]
    labels: Any  # Tensor [n], dict of label name -> Tensor [n], or None
    weight: Tensor | None
    num_samples: int
    batch: Batch | None  # the Batch that this was made from; None for tuple data
    device: torch.device = CPU

    @property
    def everything(self) -> tuple[Any, ...]:
        """Every item of the dataset, labels too: the arguments of an evaluation network."""
        if self.batch is not None or self.labels is None:
            return self.arguments
        return (*self.arguments, self.labels)


def prepare(item: Any, device: torch.device, labelled: bool) -> Example:
    """Return an `Example` of a `Batch`, of a tuple of arrays or tensors, or of one array.

    `labelled`: there is a loss function, so a tuple is (data, label); otherwise all items of a
    tuple are arguments.

    Raises:
        DataError: `labelled`, and the tuple has more than two items.
    """
    if isinstance(item, Batch):
        batch = _to_torch(item, device)
        weight: Any = batch.weight
        return Example((batch,), _labels_of(batch), weight, item.num_samples, batch, device)
    parts = item if isinstance(item, (tuple, list)) else (item,)
    items = tuple(_to_tensor(part, device) for part in parts)
    if not labelled:
        return Example(items, None, None, _length(items), None, device)
    if len(items) > 2:
        raise DataError(
            "data: a dataset used with a loss function must yield (data, label), got "
            f"{len(items)} items. Yield two, or leave loss_fn out and compute the loss in the "
            "network."
        )
    labels = items[1] if len(items) == 2 else None
    return Example(items[:1], labels, None, _length(items), None, device)


def _labels_of(batch: Batch) -> Any:
    """Return the labels by name, the label itself if there is one, None if there is none."""
    labels = dict(batch.labels)
    if len(labels) == 1:
        return next(iter(labels.values()))
    return labels or None


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
        # torch warns of read-only arrays such as Arrow's
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    return array


def _to_tensor(part: Any, device: torch.device) -> Any:
    if isinstance(part, Mapping):
        return {name: _to_tensor(value, device) for name, value in part.items()}
    if isinstance(part, (np.ndarray, float, int, list)):
        part = _from_array(np.asarray(part))
    if torch.is_tensor(part):
        return part.to(device)
    return part


def _length(part: Any) -> int:
    if isinstance(part, Mapping):
        part = tuple(part.values())
    if isinstance(part, tuple):
        return max((_length(item) for item in part), default=0)
    if not hasattr(part, "__len__") or getattr(part, "ndim", 1) == 0:
        return 0
    return len(part)


class Criterion:
    """A loss function of any kind, called as `criterion(outputs, labels, weight) -> scalar`.

    `loss_fn` is a name or value of `hb.losses`, any callable of (prediction, label) or (prediction,
    label, weight), or a mapping of label names to such for a network with several labels. One loss
    serves every label. The losses of labels are added. Weights multiply the loss of each sample.
    """

    def __init__(self, loss_fn: Any) -> None:
        if isinstance(loss_fn, (Mapping, nn.ModuleDict)):
            self.loss_fn: Any = {name: _loss_of(loss) for name, loss in loss_fn.items()}
        else:
            self.loss_fn = _loss_of(loss_fn)
        self._weighted: dict[int, Callable[[Any, Any, Tensor], Tensor]] = {}
        self._unchecked = CHECKED_BATCHES

    def __call__(self, outputs: Outputs, labels: Any, weight: Tensor | None) -> Tensor:
        if labels is None:
            raise DataError(
                "data: the loss needs labels, got a batch without labels. Add a Label column, or "
                "leave loss_fn out."
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
                f"network: output {missing[0]!r} has no label or no loss, got labels "
                f"{sorted(labels)}. Name the network's outputs after the Label columns, and give "
                "each a loss."
            )
        losses = [
            self._one(self._of(name), outputs[name], labels[name], weight) for name in outputs
        ]
        return torch.stack(losses).sum()

    def shape(self, outputs: Any, labels: Any) -> Any:
        """Return outputs as float32, and as [n] instead of [n, 1] where the label is [n].

        Otherwise [n, 1] and [n] would broadcast to [n, n].
        """
        if isinstance(outputs, Mapping):
            by_name = labels if isinstance(labels, dict) else dict.fromkeys(outputs, labels)
            return {name: self.shape(value, by_name.get(name)) for name, value in outputs.items()}
        if not torch.is_tensor(outputs):
            raise ConfigError(
                "network: a loss_fn needs a tensor or a dict of label name to tensor, got "
                f"{type(outputs).__name__}. Return that, or leave loss_fn out."
            )
        is_column = outputs.dim() == 2 and outputs.shape[1] == 1
        if is_column and (labels is None or getattr(labels, "ndim", 0) == 1):
            outputs = outputs.squeeze(1)
        return outputs.float()

    def activate(self, outputs: Any, label: str | None = None) -> Any:
        """Return predictions: probabilities where the loss is a cross-entropy of logits."""
        if isinstance(outputs, dict):
            return {name: self.activate(value, name) for name, value in outputs.items()}
        loss = self.loss_fn if label is None else self._of(label)
        if _takes_logits(loss):
            return torch.sigmoid(outputs)
        return outputs

    def _check_labels(self, outputs: Outputs, labels: Any) -> None:
        """Raise if labels do not fit the outputs or the loss.

        A Dataset checks labels by row, but data may come from elsewhere.
        """
        several = isinstance(labels, dict)
        if not isinstance(outputs, dict):
            self._check_one_output(labels)
        for name, values in (labels if several else {"": labels}).items():
            loss = self._of(name) if several else self.loss_fn
            if _takes_logits(loss) and values.numel() and bool(((values < 0) | (values > 1)).any()):
                place = f"label {name!r}" if name else "label"
                raise DataError(
                    f"{place}: the loss is a cross-entropy and needs labels from 0 to 1, got "
                    f"{values.min():g} to {values.max():g}. Give labels from 0 to 1, or train with "
                    "loss 'mse'."
                )

    def _check_one_output(self, labels: Any) -> None:
        if isinstance(labels, dict) and isinstance(self.loss_fn, (Loss, nn.modules.loss._Loss)):
            raise ConfigError(
                "loss_fn: the data have several labels and the network returns one output, got "
                f"labels {sorted(labels)}. "
                "Return a dict of label name to tensor, as hb.models.MMoE does, or keep one label."
            )
        if isinstance(self.loss_fn, Mapping):
            raise ConfigError(
                f"loss_fn: the network returns one output, got losses of {sorted(self.loss_fn)}. "
                "Return a dict of label name to tensor, or give one loss."
            )

    def unit_labels(self, labels: Iterable[str]) -> list[str]:
        """Return those labels that must lie in [0, 1]: their loss is a cross-entropy of logits."""
        if isinstance(self.loss_fn, (Mapping, MultiTask)):
            return [label for label in labels if _takes_logits(self._of(label))]
        return list(labels) if _takes_logits(self.loss_fn) else []

    def _of(self, label: str) -> Any:
        losses = self.loss_fn.losses if isinstance(self.loss_fn, MultiTask) else self.loss_fn
        if isinstance(losses, Mapping):
            return losses.get(label)
        return losses

    def _one(self, loss: Any, outputs: Any, labels: Any, weight: Tensor | None) -> Tensor:
        if weight is None:
            return loss(outputs, labels)  # type: ignore[no-any-return]
        if id(loss) not in self._weighted:
            self._weighted[id(loss)] = _with_weight(loss)
        return self._weighted[id(loss)](outputs, labels, weight)


def _loss_of(loss: Any) -> Any:
    return get_loss(loss) if isinstance(loss, str) else loss


def _takes_logits(loss: Any) -> bool:
    """Return whether a loss is a cross-entropy of logits and labels from 0 to 1."""
    return isinstance(loss, (BCE, Focal, nn.BCEWithLogitsLoss)) or loss is BCE_FUNCTION


def _with_weight(loss: Any) -> Callable[[Any, Any, Tensor], Tensor]:
    if isinstance(loss, nn.modules.loss._Loss):
        each = copy.copy(loss)
        each.reduction = "none"
        return lambda outputs, labels, weight: (each(outputs, labels) * weight).mean()
    if "weight" in inspect.signature(_function_of(loss)).parameters:
        return lambda outputs, labels, weight: loss(outputs, labels, weight=weight)
    name = getattr(loss, "__name__", type(loss).__name__)
    raise ConfigError(
        f"loss_fn: {name} takes no weight, got data with a Weight column. Use a loss of hb.losses "
        "or torch.nn, or give the function a third parameter named weight."
    )


def _function_of(loss: Any) -> Callable[..., Any]:
    if inspect.isfunction(loss):
        return loss
    if isinstance(loss, nn.Module):
        return loss.forward
    return loss.__call__  # type: ignore[no-any-return]


class Update(Protocol):
    """The part of the loop that learns from a batch."""

    def forward(self, example: Example) -> Tensor:
        """Map ids to rows, run the network and return the loss, a scalar tensor."""

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of dense parameters and rows."""

    def gradients_are_finite(self) -> bool:
        """Return True to update, False to skip this batch.

        Raises:
            NonFiniteGradient: a gradient is not finite, and a skip would hide a fault.
        """

    def dense_step(self) -> None:
        """Update dense parameters."""

    def sparse_step(self) -> None:
        """Update rows of tables, then drop all gradients."""


class Learner:
    """Learns with a dense torch optimizer, and a `SparseOptimizer` if the network has tables."""

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
        self._scaler: torch.amp.GradScaler | None = None
        if self.precision.scaled and dense is not None:
            self._scaler = torch.amp.GradScaler(self.device.type)

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters with gradients: dense parameters and row parameters of tables."""
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
        """Return the number of skipped batches and the state of the loss scale."""
        scaler = None if self._scaler is None else self._scaler.state_dict()
        return {"skipped": self.skipped, "scaler": scaler}

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
        for parameter in self._row_parameters:  # on the host, also if the network is elsewhere
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
            f"dense parameter {names.get(id(bad), '?')!r}: its gradient is not finite, got NaN or "
            "inf. Nothing was updated: look for NaN in the batch's dense columns or labels, or "
            "lower the learning rate."
        )


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
        self.skipped = 0

    def parameters(self) -> list[nn.Parameter]:
        return []

    def forward(self, example: Example) -> Tensor:
        outputs = self.network(*example.arguments)
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

    def dense_step(self) -> None: ...

    def sparse_step(self) -> None: ...


def parameters_of(optimizer: torch.optim.Optimizer | None) -> list[nn.Parameter]:
    """Return every parameter of an optimizer; none for None."""
    if optimizer is None:
        return []
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def device_of(network: nn.Module) -> torch.device:
    """Return the device of a network's dense part: the first that is not the CPU, else the CPU."""
    tensors = [*network.parameters(), *network.buffers()]
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), CPU)


def _all_finite(gradients: list[Tensor]) -> bool:
    # the largest absolute value: it cannot overflow as a sum of squares would, and keeps NaN
    norms = torch._foreach_norm([g for g in gradients if g.numel()], float("inf"))
    return not norms or bool(torch.isfinite(torch.stack([norm.float() for norm in norms])).all())


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
