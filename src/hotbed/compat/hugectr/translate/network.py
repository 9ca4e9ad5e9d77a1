# SPDX-License-Identifier: Apache-2.0
"""The description of a network while it grows, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hotbed.compat.hugectr.translate.translation import DenseWeight
from hotbed.config import did_you_mean
from hotbed.errors import ConfigError
from hotbed.models.graph.description import KeyPlace, Node
from hotbed.models.graph.kinds import NUM_ROWS, Shape, inferred


class Network:
    """Inputs and layers of a description, and what they are called in HugeCTR's graph.

    Attributes:
        inputs: of the description.
        layers: of the description.
        tensors: names of tensors in the description by their names in HugeCTR's graph.
        shapes: of the tensors, by their names in the description, for `NUM_ROWS` samples.
        labels: the labels of the schema by the name of a label tensor, which slices may cut.
        weights: the parameters, in the order of HugeCTR's dense file.
        statistics: of batch normalization, in the order of the layers.
    """

    def __init__(self) -> None:
        self.inputs: list[dict[str, Any]] = []
        self.layers: list[dict[str, Any]] = []
        self.tensors: dict[str, str] = {}
        self.shapes: dict[str, Shape] = {}
        self.labels: dict[str, tuple[str, ...]] = {}
        self.weights: list[DenseWeight] = []
        self.statistics: list[DenseWeight] = []
        self._names: dict[str, str] = {}  # the tensor of HugeCTR by the name of a layer

    def add_input(
        self, kind: str, top: str, keys: Mapping[str, Any], shape: Shape, mask: str | None = None
    ) -> None:
        """Add an input of the network that makes the tensor `top`, and a `mask` if it has one.

        `shape` is that of a sample in `top`.
        """
        name = self._named(top)
        self.shapes[top] = (NUM_ROWS, *shape)
        tops = [top] if mask is None else [top, mask]
        self.inputs.append({"input": kind, "name": name, "outputs": tops, **keys})
        self.tensors[top] = top

    def add(
        self,
        kind: str,
        bottoms: Sequence[str],
        tops: Sequence[str],
        keys: Mapping[str, Any] | None = None,
    ) -> str:
        """Add a layer, and return its name.

        Args:
            kind: of layer.
            bottoms: names of tensors that it takes.
            tops: names of tensors that it makes.
            keys: parameters of the layer.

        Raises:
            ConfigError: a tensor or a parameter is wrong; the message starts with the first top.
        """
        inputs = [self.tensor(bottom, tops[0]) for bottom in bottoms]
        for top in tops:
            if top in self.tensors:
                raise ConfigError(
                    f"{top}: two layers make a tensor of this name, got {kind} as the second. "
                    "Rename the top of one of them."
                )
        name = self._named(tops[0])
        entry = {"layer": kind, "name": name, "inputs": inputs, "outputs": list(tops)}
        node = Node(kind, name, tuple(inputs), tuple(tops), keys or {}, KeyPlace(tops[0]))
        self.shapes |= inferred(node, self.shapes)
        self.layers.append({**entry, **node.parameters})
        self.tensors.update({top: top for top in tops})
        return name

    def tensor(self, name: str, top: str) -> str:
        """Return the name in the description of a tensor that the layer of `top` takes."""
        if name not in self.tensors:
            advice = did_you_mean(name, self.tensors)
            raise ConfigError(
                f"{top}.bottom_names: no layer above makes it, got {name!r}. {advice}"
            )
        return self.tensors[name]

    def weight(
        self, layer: str, path: str, *, transposed: bool = False, shape: tuple[int, ...] = ()
    ) -> None:
        """Note the next parameter of HugeCTR's dense file.

        Args:
            layer: name of the tensor that HugeCTR's layer makes.
            path: of the parameter in the network, `<layer>.<parameter>`; empty if only HugeCTR has
                it, as zeros.
            transposed: whether HugeCTR stores the matrix as [inputs, outputs].
            shape: in HugeCTR's file, where the parameter here does not tell it.
        """
        full = f"layers.{path}" if path else ""
        self.weights.append(DenseWeight(layer, full, transposed, shape))

    def statistic(self, layer: str, path: str) -> None:
        """Note the next mean or variance of batch normalization; see `weight`."""
        self.statistics.append(DenseWeight(layer, f"layers.{path}", False, ()))

    def _named(self, top: str) -> str:
        """Return the name of the input or layer that makes a tensor, with allowed characters."""
        name = re.sub(r"[^A-Za-z0-9_-]", "_", top)
        if name.startswith("-") or hasattr(nn.ModuleDict(), name):
            name = f"layer_{name}"
        if name in self._names:
            raise ConfigError(
                f"{top}: the same layer as {self._names[name]!r} once other characters than "
                f"letters, digits, '_' and '-' are replaced, got {name!r}. Rename one of them."
            )
        self._names[name] = top
        return name

    def taken(self, outputs: Sequence[str]) -> set[str]:
        """Return the tensors on which the given ones depend, themselves included."""
        needed = set(outputs)
        for layer in reversed(self.layers):
            if needed.intersection(layer["outputs"]):
                needed.update(layer["inputs"])
        return needed
