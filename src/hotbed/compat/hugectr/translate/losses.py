# SPDX-License-Identifier: Apache-2.0
"""The loss layers of HugeCTR: logits by label, and a value of `hb.losses`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hotbed.compat.hugectr.clauses import DenseLayer
from hotbed.compat.hugectr.enums import Layer_t, Regularizer_t
from hotbed.compat.hugectr.translate.network import Network
from hotbed.config import did_you_mean
from hotbed.errors import ConfigError
from hotbed.models.graph.kinds import NUM_ROWS, shape_text
from hotbed.models.losses import BCE, Loss, MultiTask

_LOG = logging.getLogger("hotbed.compat.hugectr")
LOSSES = (Layer_t.BinaryCrossEntropyLoss, Layer_t.CrossEntropyLoss, Layer_t.MultiCrossEntropyLoss)


class Losses:
    """The losses of a graph.

    Args:
        network: that makes the logits; layers that cut them are added to it.
        weights: of the losses, by the name of the label in HugeCTR's graph; 1 where missing.

    Attributes:
        outputs: name of the tensor of the description by label of the schema.
        l1: factor of the L1 regularizers, times the batch size.
        l2: factor of the L2 regularizers, times the batch size.
    """

    def __init__(self, network: Network, weights: dict[str, float]) -> None:
        self.outputs: dict[str, str] = {}
        self.l1 = 0.0
        self.l2 = 0.0
        self._network = network
        self._label_weights = weights
        self._losses: dict[str, Loss] = {}
        self._weights: dict[str, float] = {}

    @property
    def loss(self) -> Loss | MultiTask:
        """The value of `hb.losses`: of one label alone, or of several."""
        if len(self._losses) == 1 and not self._weights:
            return next(iter(self._losses.values()))
        return MultiTask(self._losses, self._weights)

    def add(self, layer: DenseLayer) -> None:
        """Add a loss layer."""
        if len(layer.bottom_names) != 2:
            raise ConfigError(
                f"{layer.top_names[0]}.bottom_names: expected the prediction and the label, got "
                f"{list(layer.bottom_names)}. Name two tensors."
            )
        prediction, label = layer.bottom_names
        if label not in self._network.labels:
            advice = did_you_mean(label, self._network.labels)
            raise ConfigError(
                f"{layer.top_names[0]}.bottom_names: the second is not a label, got {label!r}. "
                f"{advice}"
            )
        weight = self._label_weights.get(label, 1.0)
        columns = self._network.labels[label]
        if layer.layer_type is Layer_t.MultiCrossEntropyLoss:
            self._add_multi(layer, columns)
        elif layer.layer_type is Layer_t.CrossEntropyLoss:
            # from v23.08 on, HugeCTR wants as many label columns as logits, and reads the first
            self._output(columns[0], self._difference(prediction, label), BCE(), weight)
        elif len(columns) == 1:
            self._output(columns[0], prediction, BCE(), weight)
        else:
            raise ConfigError(
                f"{layer.top_names[0]}: BinaryCrossEntropyLoss takes one label, got "
                f"{label!r} of {len(columns)} dimensions. Use MultiCrossEntropyLoss."
            )
        self._regularize(layer)

    def add_ends(self, labels: Sequence[str]) -> None:
        """Take the tensors that no layer takes as the logits of the labels.

        There is one for each label, or one for all of them.
        """
        inputs = {name for layer in self._network.layers for name in layer["inputs"]}
        outputs = [name for layer in self._network.layers for name in layer["outputs"]]
        ends = [name for name in outputs if name not in inputs]
        groups = [self._network.labels[label] for label in labels]
        if len(ends) == 1:
            groups = [tuple(column for group in groups for column in group)]
        if len(ends) != len(groups):
            raise ConfigError(
                f"graph: expected one loss for each of {list(labels)}, or one last tensor for "
                f"each, got the last tensors {ends}. Add the loss layers."
            )
        for end, columns in zip(ends, groups, strict=True):
            for column, logit in zip(columns, self._parts(end, columns), strict=True):
                self._output(column, logit, BCE(), 1.0)

    def _add_multi(self, layer: DenseLayer, columns: Sequence[str]) -> None:
        """Add a logit for each label; the loss is the mean of their weighted losses."""
        targets = layer.target_weight_vec
        if len(targets) != len(columns):
            raise ConfigError(
                f"{layer.top_names[0]}.target_weight_vec: expected one for each of {len(columns)} "
                f"labels, got {list(targets)}. Give as many."
            )
        logits = self._parts(layer.bottom_names[0], columns)
        for label, logit, target in zip(columns, logits, targets, strict=True):
            self._output(label, logit, BCE(missing_below=-0.5), target / len(columns))

    def _parts(self, prediction: str, columns: Sequence[str]) -> list[str]:
        """Return the tensor of each label, cut out of a prediction of several."""
        if len(columns) == 1:
            return [prediction]
        ranges = [[place, place + 1] for place in range(len(columns))]
        tops = [f"{prediction}.{label}" for label in columns]
        self._network.add("slice", [prediction], tops, {"ranges": ranges})
        return tops

    def _difference(self, prediction: str, label: str) -> str:
        """Return the logit of label 1 of two logits, of which HugeCTR takes the softmax."""
        logits = [f"{prediction}.1", f"{prediction}.0"]
        self._network.add("slice", [prediction], logits, {"ranges": [[1, 2], [0, 1]]})
        top = f"{prediction}.{label}"
        self._network.add("sub", logits, [top])
        return top

    def _output(self, label: str, prediction: str, loss: Loss, weight: float) -> None:
        if label in self.outputs:
            raise ConfigError(
                f"label {label!r}: two losses take it, got {prediction!r} as the second "
                "prediction. Keep one of them."
            )
        self.outputs[label] = self._one_logit(self._network.tensor(prediction, label), label)
        self._losses[label] = loss
        if weight != 1.0:
            self._weights[label] = weight

    def _one_logit(self, prediction: str, label: str) -> str:
        """Return a prediction, or the mean of its rows if a sample has several.

        HugeCTR reads labels behind those of the batch for such a prediction, whose embedding is
        reshaped to one row for each slot.
        """
        shape = self._network.shapes[prediction]
        if shape[1:] not in ((), (1,)):
            raise ConfigError(
                f"{label}: a loss takes one number for each sample, got {prediction!r} "
                f"{shape_text(shape)}. Let an InnerProduct of num_output 1 make it."
            )
        num_rows = shape[0] // NUM_ROWS
        if num_rows == 1:
            return prediction
        _LOG.warning(
            "hugectr: %r has %d rows for each sample, and %r one; their mean is the logit",
            prediction,
            num_rows,
            label,
        )
        rows = f"{prediction}.rows"
        mean = f"{prediction}.mean"
        self._network.add("reshape", [prediction], [rows], {"leading_dim": num_rows})
        self._network.add("reduce_mean", [rows], [mean], {"axis": 1, "keepdim": True})
        return mean

    def _regularize(self, layer: DenseLayer) -> None:
        if not layer.use_regularizer:
            return
        if layer.regularizer_type is Regularizer_t.L1:
            self.l1 += layer.lambda_
        else:
            self.l2 += layer.lambda_
