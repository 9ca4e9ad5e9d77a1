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
from hotbed.models.losses import BCE, Focal, Loss, MultiTask, get_loss

BCE_FUNCTION = nn.functional.binary_cross_entropy_with_logits
Outputs = Tensor | dict[str, Tensor]
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
