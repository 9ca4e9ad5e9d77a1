# SPDX-License-Identifier: Apache-2.0
"""Graph: a network from a JSON description, and back.

    {
      "inputs": [
        {"input": "flat", "name": "x", "columns": ["user", "item"]}
      ],
      "layers": [
        {"layer": "cross_net", "name": "crosses", "inputs": ["x"], "num_layers": 2},
        {"layer": "mlp", "name": "deep", "inputs": ["x"], "hidden": [64, 32]},
        {"layer": "logit_head", "name": "logit", "inputs": ["crosses", "deep"]}
      ],
      "outputs": {"clicked": "logit"}
    }

docs/graphs.md describes the format.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hotbed.config import did_you_mean
from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.models.graph.description import Node, read_description
from hotbed.models.graph.inputs import GraphInputs
from hotbed.models.graph.kinds import NUM_ROWS, inferred, made, shape_text
from hotbed.models.layers import PositionTerm
from hotbed.pictures.boxes import Box, draw, text_lines

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


class Graph(nn.Module):
    """A network of the layers that a JSON description names.

    `graph.layers` holds the layers by name.

    Args:
        schema: the columns of the data.
        tables: tables by name.
        description: the JSON object, its text, or the path of its file; see docs/graphs.md.

    Raises:
        ConfigError: the description is wrong; the message starts with the place in it.

    Example: `hb.models.Graph(schema, tables, "net.json")`.
    """

    looks_up_once = True
    ignores_mode = True

    def __init__(
        self,
        schema: Schema,
        tables: Mapping[str, Table],
        description: Mapping[str, Any] | str | Path,
    ) -> None:
        super().__init__()
        network = read_description(description)
        # as @described keeps the arguments, but with the text of a file instead of its path
        self._described = {"schema": schema, "tables": tables, "description": network.plain}
        self._network = network
        self.inputs = GraphInputs(schema, tables, network.inputs)
        shapes = self.inputs.shapes()
        self.layers = nn.ModuleDict()
        for node in network.layers:
            _check_layer_name(node)
            shapes |= inferred(node, shapes)
            layer = made(node, shapes)
            self.layers[node.name] = layer
        place = network.place.key("outputs")
        labels = [label.name for label in schema.labels]
        for label, name in network.outputs.items():
            if label not in labels:
                advice = did_you_mean(label, labels)
                raise place.key(label).error("not a label of the schema", label, advice)
            if shapes[name] not in ((NUM_ROWS,), (NUM_ROWS, 1)):
                advice = "Compute one number a row, for example with a logit_head."
                got = f"{name} {shape_text(shapes[name])}"
                raise place.key(label).error("not [n] or [n, 1]", got, advice)
        self._single = len(labels) == 1
        self.position = PositionTerm(schema, list(network.outputs))
        self.shapes = {name: shape_text(shape) for name, shape in shapes.items()}

    def forward(self, batch: Batch) -> Tensor | dict[str, Tensor]:
        """A batch of n samples -> logits [n] by label; those alone if the schema has one label."""
        tensors = self.inputs(batch)
        for node in self._network.layers:
            outputs = self.layers[node.name](*[tensors[name] for name in node.inputs])
            if isinstance(outputs, Tensor):
                outputs = (outputs,)
            tensors.update(zip(node.outputs, outputs, strict=True))
        logits = {label: tensors[name].flatten() for label, name in self._network.outputs.items()}
        placed: dict[str, Tensor] = self.position(logits, batch)
        return next(iter(placed.values())) if self._single else placed

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that the network was built from."""
        return copy.deepcopy(self._network.plain)

    def picture(self) -> str:
        """Return the network as an SVG: inputs above, layers with their shapes, labels below."""
        makers = {}
        boxes = []
        for node in (*self._network.inputs, *self._network.layers):
            makers.update(dict.fromkeys(node.outputs, node.name))
            boxes.append(self._box(node, [makers[name] for name in node.inputs]))
        for label, name in self._network.outputs.items():
            lines = [("name", label), ("text", "label")]
            boxes.append(Box(f"label {label}", "output", lines, [makers[name]]))
        return draw(boxes, "layers of the network")

    @property
    def tensors(self) -> dict[str, str]:
        """The module that returns each tensor, by its name, as `hb.models.recorded` reads it."""
        paths: dict[str, str] = {}
        for node in self._network.inputs:
            paths.update({name: f"inputs[{name}]" for name in node.outputs})
        for node in self._network.layers:
            path = f"layers.{node.name}"
            if len(node.outputs) == 1:
                paths[node.outputs[0]] = path
            else:
                paths.update({name: f"{path}[{i}]" for i, name in enumerate(node.outputs)})
        return paths

    def rows(self) -> list[tuple[str, str, str, int]]:
        """Return name, kind, shapes of outputs and number of weights of each input and layer."""
        rows = []
        for node in (*self._network.inputs, *self._network.layers):
            shapes = " ".join(self.shapes[name] for name in node.outputs)
            rows.append((node.name, node.kind, shapes, self._num_weights(node)))
        return rows

    def _num_weights(self, node: Node) -> int:
        if node.name not in self.layers:
            return 0
        return sum(parameter.numel() for parameter in self.layers[node.name].parameters())

    def _box(self, node: Node, sources: Sequence[str]) -> Box:
        """Return what the picture shows of an input or a layer."""
        lines = [("name", node.name), ("kind", node.kind)]
        lines += text_lines("text", _keys_text(node.parameters))
        color = "input"
        if node.inputs:
            num_weights = self._num_weights(node)
            color = "layer" if num_weights else "plain"
            if num_weights:
                lines.append(("text", f"{num_weights:,} weights"))
        for name in node.outputs:
            prefix = "" if node.outputs == (node.name,) else f"{name} "
            lines.append(("shape", prefix + self.shapes[name]))
        title = f"{node.kind} {node.name}: {_keys_text(node.parameters)}"
        return Box(node.name, color, lines, sources, title)


def _keys_text(keys: Mapping[str, Any]) -> str:
    """Return parameters as text.

    >>> _keys_text({"hidden": [64, 32], "columns": ["user"]})
    'hidden 64, 32; columns user'
    """
    texts = []
    for key, value in keys.items():
        if isinstance(value, list):
            value = ", ".join(str(item) for item in value)
        texts.append(f"{key} {value}")
    return "; ".join(texts)


def _check_layer_name(node: Node) -> None:
    """Raise ConfigError if torch cannot hold a layer of this name."""
    if hasattr(nn.ModuleDict(), node.name):
        advice = "Choose another name."
        raise node.place.key("name").error("a name that torch's modules use", node.name, advice)
