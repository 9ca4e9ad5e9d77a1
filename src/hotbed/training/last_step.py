# SPDX-License-Identifier: Apache-2.0
"""LastStep: the gradients of a training step that was taken, computed when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch
from hotbed.models.graph.network import Graph
from hotbed.models.recorded import Array, recorded
from hotbed.optim.modes import in_train_mode
from hotbed.training.step.example import prepare
from hotbed.training.step.learner import StepLearner

if TYPE_CHECKING:
    from hotbed.training.model import RecModel


class LastStep:
    """The last training step of a `hb.models.Graph`, which it repeats to tell its gradients.

    A step keeps what is needed to repeat it: its batch, the tensors that its lookups returned, a
    copy of the dense weights and buffers, and the state of the random numbers. This takes less time
    than to keep the gradients of all tensors at every step.

    Args:
        model: a model of a `Graph`. Its steps by `fit` and `step` are followed from now on.

    Example:
        >>> last = LastStep(model)
        >>> model.step(batch)
        >>> last.gradients(["deep"])["deep"]
    """

    def __init__(self, model: RecModel) -> None:
        graph: Any = model.network
        assert isinstance(graph, Graph)
        self._model = model
        self._graph = graph
        weights: list[Tensor] = [*graph.parameters(), *graph.buffers()]
        self._weights = [weight for weight in weights if weight.numel()]
        self._before = [weight.detach().clone() for weight in self._weights]
        self._random_state = torch.get_rng_state()
        self._batch: Batch | None = None
        self._inputs: dict[str, Tensor] = {}
        graph.register_forward_pre_hook(self._keep_state)
        graph.inputs.register_forward_hook(self._keep_inputs)

    @property
    def is_taken(self) -> bool:
        """Whether there was a step."""
        return bool(self._inputs)

    def gradients(self, names: Sequence[str]) -> dict[str, Array]:
        """Return the gradients of the last step by the names of tensors, float32.

        Nothing changes. A tensor without a gradient, such as data, is left out. Under loss scaling,
        gradients are multiplied by the scale.

        Args:
            names: as of `hb.models.recorded`.

        Raises:
            ConfigError: there is no such tensor.
        """
        learner: Any = self._model.learner
        assert isinstance(learner, StepLearner)
        example = prepare(self._batch, learner.device, labelled=True)
        outputs = learner.outputs
        with self._as_before(), recorded(self._graph, names) as record:
            learner.backward(learner.forward(example))
        learner.forget()
        learner.outputs = outputs
        return record.gradients

    def _keep_state(self, graph: nn.Module, arguments: tuple[Any, ...]) -> None:
        if not graph.training or isinstance(graph.get_submodule("inputs"), _Given):
            return
        self._inputs = {}  # before the lookups, so that they take the same memory again
        self._batch = arguments[0]
        self._random_state = torch.get_rng_state()
        _copy(self._weights, self._before)

    def _keep_inputs(self, inputs: nn.Module, arguments: Any, tensors: dict[str, Tensor]) -> None:
        if inputs.training:
            self._inputs = _leaves(tensors)

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Run the network as it was before the last step within."""
        now = [weight.detach().clone() for weight in self._weights]
        inputs = self._graph.inputs
        try:
            _copy(self._before, self._weights)
            self._graph.inputs = _Given(self._inputs)  # type: ignore[assignment]  # its stand-in
            with torch.random.fork_rng(devices=[]), in_train_mode(self._graph):
                torch.set_rng_state(self._random_state)
                yield
        finally:
            self._graph.inputs = inputs
            _copy(now, self._weights)


class _Given(nn.Module):
    """Stands for the inputs of a graph, and returns tensors that were computed before."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return _leaves(self._tensors)


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copy values; a graph may have neither weights nor buffers, and torch takes no empty list."""
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)


def _leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same values without a past."""
    return {
        name: tensor.detach().requires_grad_(tensor.requires_grad)
        for name, tensor in tensors.items()
    }
