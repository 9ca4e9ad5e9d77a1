# SPDX-License-Identifier: Apache-2.0
"""The loss function of a model, of any kind, checked against labels and outputs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.errors import ConfigError, DataError
from hotbed.models.losses import (
    BCE,
    CrossEntropy,
    Focal,
    InBatchSoftmax,
    Loss,
    MultiTask,
    Softmax,
    get_loss,
)

BCE_FUNCTION = nn.functional.binary_cross_entropy_with_logits
Outputs = Tensor | dict[str, Tensor]
WeightedLoss = Callable[[Any, Any, Tensor], Tensor]
CHECKED_BATCHES = 10
"""Batches whose labels are checked here; a Dataset checks its labels by row when it reads them."""


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
        self._weighted: dict[int, WeightedLoss] = {}
        self._unchecked = CHECKED_BATCHES
        self._unchecked_on_host = CHECKED_BATCHES

    def __call__(self, outputs: Outputs, labels: Any, weight: Tensor | None) -> Tensor:
        if labels is None:
            raise DataError(
                "data: the loss needs labels, got a batch without labels. Add a Label column, or "
                "leave loss_fn out."
            )
        if self._unchecked:
            self._unchecked -= 1
            self._check_labels(outputs, labels)
        if isinstance(outputs, dict):
            labels = _by_output(labels, outputs)
        if not isinstance(outputs, dict) or isinstance(self.loss_fn, MultiTask):
            return self._one(self.loss_fn, outputs, labels, weight)
        losses = []
        for name, output in outputs.items():
            loss = self._of(name)
            if name not in labels or loss is None:
                raise ConfigError(
                    f"network: output {name!r} has no label or no loss, got labels "
                    f"{sorted(labels)}. Name the network's outputs after the Label columns, and "
                    "give each a loss."
                )
            losses.append(self._one(loss, output, labels[name], weight))
        return torch.stack(losses).sum()

    @property
    def labels(self) -> list[str | None]:
        """The labels that have a loss of their own; [None] if one loss serves all."""
        losses = self.loss_fn
        if isinstance(losses, MultiTask):
            losses = losses.losses
        if isinstance(losses, Mapping):
            return list(losses)
        return [None]

    def shape(self, outputs: Any, labels: Any) -> Any:
        """Return outputs as float32, and as [n] instead of [n, 1] where the label is [n].

        Otherwise [n, 1] and [n] would broadcast to [n, n].
        """
        if isinstance(outputs, Mapping):
            labels = _by_output(labels, outputs)
            shaped = {}
            for name, output in outputs.items():
                shaped[name] = self.shape(output, labels.get(name))
            return shaped
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
            return {name: self.activate(output, name) for name, output in outputs.items()}
        loss = self.loss_fn
        if label is not None:
            loss = self._of(label)
        if isinstance(loss, CrossEntropy):
            outputs = loss.difference(outputs)
        if _takes_logits(loss):
            return torch.sigmoid(outputs)
        return outputs

    def adds(self, weight: Tensor | None) -> bool:
        """Return whether the loss of a batch is the sum of those of its parts, not their mean.

        So it is for losses of torch with `reduction="sum"`, where samples have no weights.

        Raises:
            ConfigError: the losses of some labels are sums, and those of others are means.
        """
        losses = [self.loss_fn if label is None else self._of(label) for label in self.labels]
        sums = {getattr(loss, "reduction", "") == "sum" and weight is None for loss in losses}
        if len(sums) > 1:
            raise ConfigError(
                'loss_fn: a step by grains needs losses of one reduction, got "sum" for some '
                "labels only. Give all losses the same."
            )
        return sums == {True}

    @property
    def gives_probabilities(self) -> bool:
        """Whether every prediction is a probability."""
        return all(self.is_probability(label) for label in self.labels)

    def is_probability(self, label: str | None) -> bool:
        """Return whether the prediction of a label is a probability; None: of the only one."""
        return _takes_logits(self.loss_fn if label is None else self._of(label))

    def check_on_host(self, labels: Any) -> None:
        """Raise DataError if labels are out of the range of the loss, before they go to a device.

        Those of the first batches are checked, as on the host.
        """
        if self._unchecked_on_host and labels is not None:
            self._unchecked_on_host -= 1
            self._check_ranges(labels)

    def _check_labels(self, outputs: Outputs, labels: Any) -> None:
        """Raise if labels do not fit the outputs or the loss.

        A Dataset checks labels by row, but data may come from elsewhere.
        """
        if not isinstance(outputs, dict):
            self._check_one_output(labels)
        self._check_ranges(labels)

    def _check_ranges(self, labels: Any) -> None:
        if not isinstance(labels, dict):
            _check_range("label", self.loss_fn, labels)
            return
        for name, values in labels.items():
            _check_range(f"label {name!r}", self._of(name), values)

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
        return [
            label
            for label in labels
            if _takes_logits(self._of(label)) and self.missing_below(label) is None
        ]

    def missing_below(self, label: str | None) -> float | None:
        """Return the number below which a label is missing; None: it never is."""
        loss = self.loss_fn if label is None else self._of(label)
        missing: float | None = getattr(loss, "missing_below", None)
        return missing

    def _of(self, label: str) -> Any:
        """Return the loss of a label; None if it has none."""
        losses = self.loss_fn
        if isinstance(losses, MultiTask):
            losses = losses.losses
        if isinstance(losses, Mapping):
            return losses.get(label)
        return losses

    def _one(self, loss: Any, outputs: Any, labels: Any, weight: Tensor | None) -> Tensor:
        if weight is None:
            return _scalar(loss, loss(outputs, labels))
        key = id(loss)
        if key not in self._weighted:
            self._weighted[key] = _with_weight(loss)
        weighted = self._weighted[key]
        return _scalar(loss, weighted(outputs, labels, weight))


def _loss_of(loss: Any) -> Any:
    if isinstance(loss, str):
        return get_loss(loss)
    if isinstance(loss, type) or not (loss is None or callable(loss)):
        name = f"{loss.__name__}, a class" if isinstance(loss, type) else f"{loss!r:.60}"
        raise ConfigError(
            f"loss_fn: must be a name, a loss or a function of (prediction, label), got {name}. "
            "Give such as 'bce', hb.losses.BCE() or torch.nn.MSELoss()."
        )
    return loss


def _scalar(loss: Any, value: Any) -> Tensor:
    """Return what a loss has returned; raise ConfigError unless it is a tensor of one number."""
    if torch.is_tensor(value) and value.numel() == 1:
        return value
    kind = type(value).__name__
    if torch.is_tensor(value):
        kind = f"a tensor of shape {list(value.shape)}"
    raise ConfigError(
        f"loss_fn: {_name_of(loss)} must return a tensor of one number, got {kind}. Return the "
        "mean over the samples."
    )


def _name_of(loss: Any) -> str:
    name: str = getattr(loss, "__name__", type(loss).__name__)
    return name


def _by_output(labels: Any, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the labels by name; a single one belongs to every output."""
    if isinstance(labels, dict):
        return labels
    return dict.fromkeys(outputs, labels)


def _check_range(place: str, loss: Any, labels: Tensor) -> None:
    """Raise DataError if a loss gets labels outside its range, such as [0, 1] of cross-entropy."""
    if labels.device.type != "cpu":
        return  # they were checked before they came there
    if isinstance(loss, (Softmax, InBatchSoftmax)) and bool((labels < 0).any()):
        raise DataError(
            f"{place}: the loss is divided by the sum of the labels and needs labels of at least "
            f"0, got {labels.min():g}. Give 0 to the negative samples."
        )
    if not _takes_logits(loss):
        return
    is_outside = (labels < 0) | (labels > 1)
    missing_below = getattr(loss, "missing_below", None)
    if missing_below is not None:
        is_outside &= labels >= missing_below
    if bool(is_outside.any()):
        raise DataError(
            f"{place}: the loss is a cross-entropy and needs labels from 0 to 1, got "
            f"{labels.min():g} to {labels.max():g}. Give labels from 0 to 1, or train with "
            "loss 'mse'."
        )


def _takes_logits(loss: Any) -> bool:
    """Return whether a loss is a cross-entropy of logits and labels from 0 to 1."""
    return (
        isinstance(loss, (BCE, CrossEntropy, Focal, nn.BCEWithLogitsLoss)) or loss is BCE_FUNCTION
    )


def _with_weight(loss: Any) -> WeightedLoss:
    """Return a loss as a function of outputs, labels and weight."""
    if isinstance(loss, nn.modules.loss._Loss):
        each = copy.copy(loss)
        each.reduction = "none"
        return lambda outputs, labels, weight: (each(outputs, labels) * weight).mean()
    parameters = inspect.signature(_function_of(loss)).parameters
    if "weight" in parameters:
        return lambda outputs, labels, weight: loss(outputs, labels, weight=weight)
    raise ConfigError(
        f"loss_fn: {_name_of(loss)} takes no weight, got data with a Weight column. Use a "
        "loss of hb.losses or torch.nn, or give the function a third parameter named weight."
    )


def _function_of(loss: Any) -> Callable[..., Any]:
    if inspect.isfunction(loss):
        return loss
    if isinstance(loss, nn.Module):
        return loss.forward
    call: Callable[..., Any] = loss.__call__
    return call
