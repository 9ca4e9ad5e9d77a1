# SPDX-License-Identifier: Apache-2.0
"""Tensors by the names of HugeCTR's graph: values of an evaluation, gradients of a step."""

from __future__ import annotations

from typing import Any

from hotbed.compat.hugectr.translate import Translation
from hotbed.config import did_you_mean
from hotbed.data.batch import Batch
from hotbed.errors import ConfigError
from hotbed.models.graph.network import Graph as Network
from hotbed.models.recorded import recorded
from hotbed.training.last_step import LastStep
from hotbed.training.model import RecModel


class Tensors:
    """The tensors of a network, by the names of HugeCTR's graph.

    Args:
        learner: runs the network.
        translation: has the names.
    """

    def __init__(self, learner: RecModel, translation: Translation) -> None:
        self._learner = learner
        network = learner.network
        assert isinstance(network, Network)
        tensors = network.tensors  # without inputs that no layer takes
        self._names = {}
        for name, tensor in translation.tensors.items():
            if tensor in tensors:
                self._names[name] = tensor
        self._last_step = LastStep(learner)

    def gradient(self, name: str) -> Any:
        """Return the gradient of the loss in a tensor, of the last training step."""
        place = self._place(name)
        gradients = {}
        if self._last_step.is_taken:
            gradients = self._last_step.gradients([place])
        if place not in gradients:
            raise ConfigError(
                f"check_out_tensor: tensor {name!r} has no gradient, got Tensor_t.Train. Train "
                "first; data have values only, which Tensor_t.Evaluate returns."
            )
        return gradients[place]

    def value(self, name: str, batch: Batch | None) -> Any:
        """Return a tensor of the network for a batch, in evaluation."""
        place = self._place(name)
        if batch is None:
            raise ConfigError(
                f"check_out_tensor: nothing was evaluated yet, got {name!r} with "
                "Tensor_t.Evaluate. Evaluate first."
            )
        with recorded(self._learner.network, [place]) as record:
            self._learner.predict(batch)
        return record.values[place]

    def _place(self, name: str) -> str:
        if name not in self._names:
            raise ConfigError(
                f"check_out_tensor: the graph has no such tensor, got {name!r}. "
                f"{did_you_mean(name, self._names)}"
            )
        return self._names[name]
