# SPDX-License-Identifier: Apache-2.0
"""Losses: values that turn predictions and labels of a batch into one number to minimize.

A loss is called as `loss(prediction, label, weight)`: logits [n], labels [n], sample weights [n] or
None -> scalar, in float32. `CrossEntropy` takes logits [n, 2]; `MultiTask` takes predictions and
labels as mappings by label. Penalties of weights are `l1` and `l2` of the optimizers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from hotbed import checks, config
from hotbed.errors import ConfigError

__all__ = [
    "BCE",
    "MSE",
    "CrossEntropy",
    "Focal",
    "InBatchSoftmax",
    "Loss",
    "MultiTask",
    "Pairwise",
    "Softmax",
    "correct_sampling",
    "get_loss",
]


def __dir__() -> list[str]:
    return sorted(__all__)


T = TypeVar("T", Tensor, float)
_TINY = 1e-8
"""Added to a loss before its logarithm is taken: the loss of a batch without labels may be 0."""


class Loss(ABC):
    """Base of the losses of one label; use `BCE`, `MSE`, …."""

    outputs: ClassVar[tuple[int, ...]] = ()
    """Shape of the prediction of a sample."""

    also_known_as: ClassVar[tuple[str, ...]] = ()
    """Names of other frameworks, in lower case without underscores, for messages."""

    def __call__(self, prediction: Tensor, label: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the loss of a batch, a float32 scalar; 0 for an empty batch.

        Args:
            prediction: logits [n].
            label: labels [n].
            weight: sample weights [n], or None.

        Raises:
            ConfigError: the shapes differ; broadcasting [n, 1] against [n] would be n * n losses.
        """
        expected = (*label.shape, *self.outputs)
        wrong_weight = weight is not None and weight.shape != label.shape
        if prediction.shape != expected or wrong_weight:
            tensors = (prediction, label, weight)
            shapes = [None if tensor is None else list(tensor.shape) for tensor in tensors]
            advice = "Give [n] each, for example network(batch).squeeze(-1)."
            if self.outputs:
                advice = f"Give logits [n, {self.outputs[0]}], labels [n] and weights [n]."
            raise ConfigError(
                f"{type(self).__name__}: prediction, label and weight differ in shape, got "
                f"{shapes[0]}, {shapes[1]}, {shapes[2]}. {advice}"
            )
        if weight is not None:
            weight = weight.float()
        return self._mean(prediction.float(), label.float(), weight)

    @abstractmethod
    def _mean(self, prediction: Tensor, label: Tensor, weight: Tensor | None) -> Tensor:
        """Return the loss of checked float32 inputs."""


@dataclass(frozen=True)
class BCE(Loss):
    """Binary cross-entropy of logits, mean over samples.

    A sample's loss is -(p * y log s(x) + (1 - y) log(1 - s(x))) * weight.

    Args:
        pos_weight: p above, weight of positive samples.
        label_smoothing: labels 0, 1 become s / 2, 1 - s / 2.
        missing_below: labels below this number are missing, and the loss of their samples is 0; the
            mean still counts them. None: no label is missing.

    >>> BCE()(torch.zeros(2), torch.tensor([0.0, 1.0]))
    tensor(0.6931)
    """

    also_known_as: ClassVar[tuple[str, ...]] = (
        "binarycrossentropy",
        "binarycrossentropywithlogits",
        "bceloss",
        "bcewithlogits",
        "bcewithlogitsloss",
        "sigmoidcrossentropy",
        "sigmoidcrossentropywithlogits",
        "logloss",
    )
    pos_weight: float = 1.0
    label_smoothing: float = 0.0
    missing_below: float | None = None

    def __post_init__(self) -> None:
        checks.finite_number("BCE.pos_weight", self.pos_weight, least=0)
        if self.missing_below is not None:
            checks.finite_number("BCE.missing_below", self.missing_below)
        checks.finite_number("BCE.label_smoothing", self.label_smoothing, least=0, most=1)

    def _mean(self, prediction: Tensor, label: Tensor, weight: Tensor | None) -> Tensor:
        if self.missing_below is not None:
            has_label = (label >= self.missing_below).float()
            weight = has_label if weight is None else has_label * weight
        if self.label_smoothing:
            label = label * (1.0 - self.label_smoothing) + 0.5 * self.label_smoothing
        positive = None if self.pos_weight == 1.0 else prediction.new_tensor(self.pos_weight)
        total = F.binary_cross_entropy_with_logits(
            prediction, label, weight, reduction="sum", pos_weight=positive
        )
        return total / max(len(label), 1)


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Cross-entropy of two logits a sample, mean over samples: one for label 0, one for label 1.

    A sample's loss is -((1 - y) log p0 + y log p1) * weight, with p = softmax(x) of its logits
    [n, 2]. It is BCE of the difference x1 - x0; predictions are p1.

    Source: HugeCTR's CrossEntropyLoss.
    """

    outputs: ClassVar[tuple[int, ...]] = (2,)

    def difference(self, prediction: Tensor) -> Tensor:
        """Return the logits [n] of label 1 from logits [n, 2]."""
        return prediction[:, 1] - prediction[:, 0]

    def _mean(self, prediction: Tensor, label: Tensor, weight: Tensor | None) -> Tensor:
        return BCE()(self.difference(prediction), label, weight)


@dataclass(frozen=True)
class MSE(Loss):
    """Squared error, mean over samples: weight * (prediction - label)^2.

    The prediction is used as it is.
    """

    also_known_as: ClassVar[tuple[str, ...]] = ("meansquarederror", "mseloss", "l2", "l2loss")

    def _mean(self, prediction: Tensor, label: Tensor, weight: Tensor | None) -> Tensor:
        squared = (prediction - label).square()
        return _sum(squared, weight) / max(len(label), 1)


@dataclass(frozen=True)
class Focal(Loss):
    """Focal loss of logits: cross-entropy times (1 - p_t)^gamma, so that easy samples count less.

    Source: Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017.
    """

    gamma: float = 2.0

    def __post_init__(self) -> None:
        checks.finite_number("Focal.gamma", self.gamma, least=0)

    def _mean(self, prediction: Tensor, label: Tensor, weight: Tensor | None) -> Tensor:
        entropy = F.binary_cross_entropy_with_logits(prediction, label, reduction="none")
        return _sum(entropy * (1.0 - torch.exp(-entropy)).pow(self.gamma), weight) / max(
            len(label), 1
        )


@dataclass(frozen=True)
class Pairwise(Loss):
    """Pairwise logistic loss, mean over all (positive, negative) pairs of the batch.

    A pair's loss is log(1 + exp(x_neg - x_pos)); its weight is the product of its two weights.
    Labels above 0.5 are positive. The loss is 0 if one class is missing. It takes memory for
    positives x negatives floats.

    Source: Burges et al., "Learning to Rank using Gradient Descent" (RankNet), ICML 2005.
    """

    def _mean(self, prediction: Tensor, label: Tensor, weight: Tensor | None) -> Tensor:
        positive = label > 0.5
        margin = prediction[positive].unsqueeze(1) - prediction[~positive].unsqueeze(0)
        pairs = None
        if weight is not None:
            pairs = weight[positive].unsqueeze(1) * weight[~positive].unsqueeze(0)
        return _sum(F.softplus(-margin), pairs) / max(margin.numel(), 1)


@dataclass(frozen=True)
class Softmax(Loss):
    """Listwise softmax cross-entropy, the batch as one list.

    The loss is -sum_i y_i log softmax(x / temperature)_i / sum y. Weights multiply the labels. It
    is 0 if no label is positive.

    Source: Cao et al., "Learning to Rank: From Pairwise Approach to Listwise Approach", ICML 2007
        (top one).
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        checks.finite_number("Softmax.temperature", self.temperature, least=1e-6)

    def _mean(self, prediction: Tensor, label: Tensor, weight: Tensor | None) -> Tensor:
        gains = label
        if weight is not None:
            gains = label * weight
        if not len(label):
            return prediction.sum()
        log_share = F.log_softmax(prediction / self.temperature, dim=0)
        return -(gains * log_share).sum() / gains.sum().clamp_min(1e-12)


@dataclass(frozen=True)
class InBatchSoftmax(Loss):
    """Softmax of each positive over the items of its batch, mean over positives.

    The prediction is [n, n], as `hb.models.TwoTower` gives it in training: the score of user i and
    item j, -inf where item j is not a negative of sample i. The loss is the mean of
    -log softmax(x_i)_i with the weights y_i; weights of samples multiply the labels. Of
    predictions [n], which networks give in evaluation, it is `Softmax`: the batch as one list.

    Source: Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
        Recommendations", RecSys 2019.

    >>> InBatchSoftmax()(torch.zeros(4, 4), torch.ones(4))  # log 4
    tensor(1.3863)
    """

    def __call__(self, prediction: Tensor, label: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the loss of a batch, a float32 scalar; 0 for a batch without a positive.

        Args:
            prediction: scores [n, n], or [n].
            label: labels [n], above 0 for positives.
            weight: sample weights [n], or None.

        Raises:
            ConfigError: the shapes differ.
        """
        if prediction.dim() == 1:
            return super().__call__(prediction, label, weight)
        gains = label.float()
        if weight is not None:
            gains = gains * weight.float()
        if prediction.shape != 2 * gains.shape:
            shapes = [list(tensor.shape) for tensor in (prediction, gains)]
            raise ConfigError(
                f"InBatchSoftmax: expected scores [n, n] and labels [n], got {shapes[0]} and "
                f"{shapes[1]}. Use a network such as hb.models.TwoTower."
            )
        scores = prediction.float()
        losses = torch.logsumexp(scores, dim=1) - torch.diagonal(scores)
        return (gains * losses).sum() / gains.sum().clamp_min(1e-12)

    def _mean(self, prediction: Tensor, label: Tensor, weight: Tensor | None) -> Tensor:
        return Softmax()._mean(prediction, label, weight)


@dataclass(frozen=True)
class MultiTask:
    """Weighted sum of one loss for each label.

    Args:
        losses: loss by label name.
        weights: factor by label name; 1 where missing.
        order: labels of events that follow each other, the first one first, such as `("click",
            "buy")`. Where an event is predicted to be more likely than the one before it, the
            difference of the two probabilities is added to its loss, mean over samples. Their
            losses are `BCE` or `Focal`.
        order_weight: factor of these differences.
        weighting: "fixed": the losses are added. "uncertainty": the sum of (1 + log(2 L)) / 2 over
            the losses L, so that each gradient is divided by its own loss, and labels of large
            losses do not drown the others. By grains, the losses are those of a grain.

    Source: of "uncertainty", Kendall et al., "Multi-Task Learning Using Uncertainty to Weigh Losses
        for Scene Geometry and Semantics", CVPR 2018: L / s^2 + log s with the variance s^2 at its
        optimum 2 L, as in Kirchdorfer et al., "Analytical Uncertainty-Based Loss Weighting in
        Multi-Task Learning", GCPR 2024; of `order`, the calibrator of Xi et al., "Modeling the
        Sequential Dependence among Audience Multi-step Conversions with Multi-task Learning in
        Targeted Display Advertising" (AITM), KDD 2021, equation 8.

    >>> loss = MultiTask({"click": BCE(), "buy": BCE()}, {"buy": 2.0})
    >>> zeros = {"click": torch.zeros(2), "buy": torch.zeros(2)}
    >>> loss(zeros, zeros)
    tensor(2.0794)
    """

    losses: Mapping[str, Loss]
    weights: Mapping[str, float] = field(default_factory=dict)
    order: Sequence[str] = ()
    order_weight: float = 0.6
    weighting: Literal["fixed", "uncertainty"] = "fixed"

    def __post_init__(self) -> None:
        if not self.losses:
            raise ConfigError(
                "MultiTask.losses: it is empty, got {}. Give one loss for each label."
            )
        for name in self.weights:
            if name not in self.losses:
                raise ConfigError(
                    f"MultiTask.weights.{name}: no loss has this name, got weights "
                    f"{sorted(self.weights)}. {config.did_you_mean(name, self.losses)}"
                )
        for name, weight in self.weights.items():
            checks.finite_number(f"MultiTask.weights.{name}", weight, least=0)
        checks.one_of("MultiTask.weighting", self.weighting, ("fixed", "uncertainty"))
        checks.finite_number("MultiTask.order_weight", self.order_weight, least=0)
        for name in self.order:
            if not isinstance(self.losses.get(name), (BCE, Focal)):
                raise ConfigError(
                    f"MultiTask.order: events are labels with the loss bce or focal, got {name!r} "
                    f"with {self.losses.get(name)}. Give such labels, or leave it out."
                )

    def __call__(
        self,
        prediction: Mapping[str, Tensor],
        label: Mapping[str, Tensor],
        weight: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of the weighted losses, a scalar.

        `prediction`, `label`: logits and labels [n] by label name; `weight`: sample weights [n], or
        None.
        """
        return torch.stack([*self.parts(prediction, label, weight).values()]).sum()

    def parts(
        self,
        prediction: Mapping[str, Tensor],
        label: Mapping[str, Tensor],
        weight: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the summands by label name, for logs."""
        for name in self.losses:
            if name not in prediction or name not in label:
                raise ConfigError(
                    f"MultiTask.losses.{name}: no such label, got predictions "
                    f"{sorted(prediction)}, labels {sorted(label)}. "
                    "Give a loss for each output of the network that has a label."
                )
        earlier = dict(zip(self.order[1:], self.order, strict=False))
        parts: dict[str, Tensor] = {}
        for name, loss in self.losses.items():
            part = loss(prediction[name], label[name], weight)
            factor = self.weights.get(name, 1.0)
            excess = part.new_zeros(())
            if name in earlier:
                excess = _excess(prediction[name], prediction[earlier[name]], weight)
            excess = excess * self.order_weight
            if self.weighting == "uncertainty":
                parts[name] = 0.5 * (1.0 + torch.log(2.0 * (part + excess) + _TINY)) * factor
            else:
                parts[name] = part * factor + excess
        return parts


def get_loss(name: str) -> Loss:
    """Return a loss by name, with default settings: bce, cross_entropy, mse, focal, pairwise or
    softmax.
    """
    loss: Loss = config.build(name, Loss, "loss")
    return loss


def correct_sampling(logit: T, negative_rate: float) -> T:
    """Return the logits on all samples of a model trained on a share of the negatives.

    `negative_rate` is that share. Its logarithm is added to the logit, so that p becomes p / (p +
    (1 - p) / negative_rate).

    Source: He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014,
        section 6.3.
    """
    checks.finite_number("negative_rate", negative_rate, above=0, most=1)
    return logit + math.log(negative_rate)


def _excess(logits: Tensor, before: Tensor, weight: Tensor | None) -> Tensor:
    """Return by how much an event is more likely than the one before it, mean over samples."""
    difference = torch.sigmoid(logits.float()) - torch.sigmoid(before.float())
    return _sum(torch.relu(difference), weight) / max(len(difference), 1)


def _sum(values: Tensor, weight: Tensor | None) -> Tensor:
    if weight is not None:
        values = values * weight
    return values.sum()
