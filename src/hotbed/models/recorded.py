# SPDX-License-Identifier: Apache-2.0
"""The current values and gradients of named tensors of a network, by forward hooks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from hotbed.config import did_you_mean
from hotbed.errors import ConfigError

Array = NDArray[Any]


@dataclass
class Recorded:
    """Tensors of a network, by the names that were asked for.

    Attributes:
        values: the output of each module in the newest forward pass, float32 (whole numbers and
            truth values keep their type). A module that did not run has no entry.
        gradients: the gradient of the loss in that output, float32, of the same shape. Empty before
            a backward pass, and without one, as in evaluation.
    """

    values: dict[str, Array] = field(default_factory=dict)
    gradients: dict[str, Array] = field(default_factory=dict)


@contextmanager
def recorded(network: nn.Module, names: Sequence[str]) -> Iterator[Recorded]:
    """Record outputs of modules, and their gradients, while the network runs within.

    They are copies in host memory, of the newest pass. Under loss scaling, gradients are multiplied
    by the scale. A step that torch.compile compiled (`RecModel(compile=)`) may leave the hooks out.

    Args:
        network: any module; of a RecModel, `model.network`.
        names: paths of `network.named_modules()`, such as "deep.0"; "" is the network itself. Of a
            module with several outputs, name one by its number or key: "cut[1]", "[clicked]". A
            `hb.models.Graph` is also asked by the names of its tensors, as is any module with an
            attribute `tensors` that maps names to such paths.

    Raises:
        ConfigError: there is no such module; while running, an output is not a tensor.

    Example:
        >>> with hb.models.recorded(model.network, ["deep.0"]) as tensors:
        ...     model.step(batch)
        >>> tensors.values["deep.0"], tensors.gradients["deep.0"]
    """
    module: Any = network
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise ConfigError(
            f"recorded: not a network, got {kind}. Give an nn.Module; of a RecModel, model.network."
        )
    if isinstance(names, str):
        raise ConfigError(f"recorded: one text for a list of names, got {names!r}. Give a list.")
    outputs = _outputs(network, names)
    record = Recorded()
    hooks = []
    for output in outputs:
        hooks.append(output.module.register_forward_hook(output.hook(record)))
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class _Output:
    """An output of a module.

    Attributes:
        name: as it was asked for.
        module: the module.
        key: the number or key of the output; None = the only one.
    """

    name: str
    module: nn.Module
    key: int | str | None

    def hook(self, record: Recorded) -> Any:
        """Return a forward hook that writes the output and its gradient to `record`."""

        def write_gradient(gradient: Tensor) -> None:
            record.gradients[self.name] = _copied(gradient)

        def write(module: nn.Module, arguments: Any, outputs: Any) -> None:
            tensor = self._picked(outputs)
            record.values[self.name] = _copied(tensor)
            record.gradients.pop(self.name, None)  # that of the pass before
            if tensor.requires_grad:
                tensor.register_hook(write_gradient)

        return write

    def _picked(self, outputs: Any) -> Tensor:
        """Return the output `key` of what the module returned."""
        picked = outputs
        choices: list[Any] = []
        if isinstance(outputs, Mapping):
            choices = list(outputs)
        elif isinstance(outputs, (tuple, list)):
            choices = list(range(len(outputs)))
        if self.key in choices:
            picked = outputs[self.key]
        elif self.key is not None or choices:
            raise ConfigError(
                f"recorded: {self.name!r} is not one output, got a module with the outputs "
                f"{choices}. Name one, such as 'name[{choices[0] if choices else 0}]'."
            )
        if not isinstance(picked, Tensor):
            raise ConfigError(
                f"recorded: {self.name!r} is not a tensor, got {type(picked).__name__}. Name a "
                "module that returns a tensor."
            )
        return picked


def _outputs(network: nn.Module, names: Sequence[str]) -> list[_Output]:
    """Return the outputs that are asked for by paths, or by names of tensors."""
    modules = dict(network.named_modules())
    tensors: dict[str, str] = {}
    for path, module in modules.items():
        inner = getattr(module, "tensors", None)
        if isinstance(inner, Mapping):
            prefix = f"{path}." if path else ""
            tensors.update({prefix + key: prefix + value for key, value in inner.items()})
    outputs = []
    for name in names:
        place = tensors.get(name, name)
        keyed = re.fullmatch(r"(.*)\[(\w+)\]", place)
        if place in modules:
            outputs.append(_Output(name, modules[place], None))
        elif keyed is not None and keyed[1] in modules:
            key: int | str = keyed[2]
            if keyed[2].isdigit():
                key = int(keyed[2])
            outputs.append(_Output(name, modules[keyed[1]], key))
        else:
            advice = did_you_mean(name, [*tensors, *filter(None, modules)])
            raise ConfigError(
                f"recorded: the network has no tensor {name!r}, got this name. {advice}"
            )
    return outputs


def _copied(tensor: Tensor) -> Array:
    """Return a copy in host memory, floats as float32."""
    tensor = tensor.detach()
    if tensor.is_floating_point():
        tensor = tensor.float()
    return np.array(tensor.cpu().numpy())
