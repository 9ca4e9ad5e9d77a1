# SPDX-License-Identifier: Apache-2.0
"""Read the description of a network: JSON becomes nodes that are connected and in order.

Kinds of layers and their parameters are checked later. docs/graphs.md describes the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotbed.config import build, did_you_mean
from hotbed.errors import ConfigError

_KEYS = ("inputs", "layers", "outputs")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class KeyPlace:
    """Where in a description something stands, for messages: `net.json: layers[3].inputs[1]`."""

    text: str
    before_key: str = "."

    def key(self, name: str) -> KeyPlace:
        """Return the place of a key of the object here."""
        return KeyPlace(f"{self.text}{self.before_key}{name}")

    def item(self, number: int) -> KeyPlace:
        """Return the place of an item of the list here."""
        return KeyPlace(f"{self.text}[{number}]")

    def error(self, problem: str, value: object, advice: str) -> ConfigError:
        """Return the error that something is wrong here; `value`: what was received."""
        return ConfigError(f"{self.text}: {problem}, got {short(value)}. {advice}")


@dataclass(frozen=True)
class Node:
    """An input or a layer of a network.

    Attributes:
        kind: of input or layer.
        name: unique among inputs and layers.
        inputs: names of tensors; empty for an input of the network.
        outputs: names of tensors.
        parameters: the other keys.
        place: in the description.
    """

    kind: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: Mapping[str, Any]
    place: KeyPlace

    def values(self, hints: Mapping[str, Any], required: Iterable[str]) -> dict[str, Any]:
        """Return the parameters as their type hints ask for.

        Raises:
            ConfigError: a key is unknown or missing, or a value has a wrong type.
        """
        values: dict[str, Any] = {}
        for key, value in self.parameters.items():
            place = self.place.key(key)
            if key not in hints:
                advice = did_you_mean(key, hints)
                raise place.error(f"unknown key of {self.kind}", key, advice)
            values[key] = _typed(value, hints[key], place)
        for key in required:
            if key not in values:
                problem = f"missing key of {self.kind}"
                raise self.place.key(key).error(problem, list(self.parameters), "Add it.")
        return values


@dataclass(frozen=True)
class Description:
    """A network as nodes.

    Attributes:
        plain: the JSON value, as it was read.
        inputs: in the order of the description.
        layers: each one after those whose outputs it takes.
        outputs: name of a tensor by label.
        place: of the whole description.
    """

    plain: dict[str, Any]
    inputs: tuple[Node, ...]
    layers: tuple[Node, ...]
    outputs: dict[str, str]
    place: KeyPlace


def read_description(description: Mapping[str, Any] | str | Path) -> Description:
    """Return the network that a JSON object, its text or its file describes.

    Raises:
        ConfigError: it is not JSON, a key is unknown or missing, or the layers are not connected;
            the message starts with the place in the description.
    """
    plain, place = _read(description)
    _check_keys(plain, place)
    inputs = _nodes(plain, "inputs", place)
    layers = _nodes(plain, "layers", place)
    outputs = _outputs(plain["outputs"], place.key("outputs"))
    makers = _makers([*inputs, *layers])
    for layer in layers:
        for number, name in enumerate(layer.inputs):
            _check_tensor(name, makers, layer.place.key("inputs").item(number))
    for label, name in outputs.items():
        _check_tensor(name, makers, place.key("outputs").key(label))
    layers = _in_order(layers, makers)
    _check_used([*inputs, *layers], outputs)
    return Description(plain, tuple(inputs), tuple(layers), outputs, place)


def short(value: object) -> str:
    """Return a value of a description as JSON, cut to one short line."""
    text = value if isinstance(value, Words) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


class Words(str):
    """Words for a message, which are not a value of the description."""

    __slots__ = ()


# --- JSON -----------------------------------------------------------------------------------------


def _read(description: Mapping[str, Any] | str | Path) -> tuple[dict[str, Any], KeyPlace]:
    """Return the JSON object and its place."""
    place = KeyPlace("description")
    if isinstance(description, Mapping):
        try:
            text = json.dumps(description, allow_nan=False)
        except (TypeError, ValueError) as error:
            got = Words(str(error))
            raise place.error("not JSON values", got, "Use lists, numbers and strings.") from error
    elif isinstance(description, str) and description.lstrip()[:1] in ("{", "["):
        text = description
    else:
        place = KeyPlace(str(description), ": ")
        try:
            text = Path(description).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            got = Words(str(error))
            raise place.error("cannot be read", got, "Give the path of a JSON file.") from error
    return _parsed(text, place), place


def _parsed(text: str, place: KeyPlace) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise place.error("a key appears twice in one object", name, "Remove one.")
        return dict(pairs)

    def refuse(constant: str) -> Any:
        raise place.error("not a number of JSON", constant, "Give a finite number.")

    try:
        plain = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except json.JSONDecodeError as error:
        problem = f"not JSON at line {error.lineno} column {error.colno}"
        raise place.error(problem, Words(repr(error.msg)), "Correct the text there.") from error
    except RecursionError as error:
        raise place.error("nested too deeply", text[:20], "Write a flat list of layers.") from error
    if not isinstance(plain, dict):
        raise place.error("not an object", plain, f"Write one with the keys {', '.join(_KEYS)}.")
    return plain


# --- nodes ----------------------------------------------------------------------------------------


def _check_keys(plain: Mapping[str, Any], place: KeyPlace) -> None:
    for key in plain:
        if key not in _KEYS:
            raise place.key(key).error("unknown key", key, did_you_mean(key, _KEYS))
    for key in _KEYS:
        if key not in plain:
            raise place.key(key).error("missing key", list(plain), "Add it.")


def _nodes(plain: Mapping[str, Any], key: str, place: KeyPlace) -> list[Node]:
    """Return the nodes in the list `inputs` or `layers`."""
    place = place.key(key)
    entries = plain[key]
    if not isinstance(entries, list) or not entries:
        raise place.error("not a list with entries", entries, "Write a list of objects.")
    return [_node(entry, key, place.item(number)) for number, entry in enumerate(entries)]


def _node(entry: Any, key: str, place: KeyPlace) -> Node:
    kind_key = key.removesuffix("s")
    if not isinstance(entry, dict):
        raise place.error("not an object", entry, f"Write one with the key {kind_key!r}.")
    parameters = dict(entry)
    kind = _text(parameters, kind_key, place)
    name = _text(parameters, "name", place)
    if not _NAME.fullmatch(name):
        advice = "Use letters, digits, '_' and '-'."
        raise place.key("name").error("not a name", name, advice)
    inputs: tuple[str, ...] = ()
    if key == "layers":
        if "inputs" not in parameters:
            raise place.key("inputs").error("missing key", list(entry), "Name the tensors.")
        inputs = _names(parameters.pop("inputs"), place.key("inputs"))
    outputs: tuple[str, ...] = (name,)
    if "outputs" in parameters:
        outputs = _names(parameters.pop("outputs"), place.key("outputs"))
    return Node(kind, name, inputs, outputs, parameters, place)


def _text(entry: dict[str, Any], key: str, place: KeyPlace) -> str:
    """Take a key out of an entry, a text that is not empty."""
    if key not in entry:
        raise place.key(key).error("missing key", list(entry), "Add it.")
    value = entry.pop(key)
    if not isinstance(value, str) or not value:
        raise place.key(key).error("not a text", value, "Write a text that is not empty.")
    return value


def _names(names: Any, place: KeyPlace) -> tuple[str, ...]:
    """Return a list of names of tensors."""
    if not isinstance(names, list) or not names:
        raise place.error("not a list of names", names, 'Write a list such as ["x"].')
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise place.item(number).error("not a name", name, "Write a text that is not empty.")
    return tuple(names)


def _outputs(outputs: Any, place: KeyPlace) -> dict[str, str]:
    """Return the name of a tensor by label."""
    if not isinstance(outputs, dict) or not outputs:
        advice = 'Write an object of label and tensor, such as {"clicked": "logit"}.'
        raise place.error("not an object with entries", outputs, advice)
    for label, name in outputs.items():
        if not isinstance(name, str) or not name:
            raise place.key(label).error("not a name", name, "Write the name of a tensor.")
    return outputs


def _typed(value: Any, hint: Any, place: KeyPlace) -> Any:
    """Return a value as its type hint asks for."""
    try:
        return build(value, hint, "")
    except ConfigError as error:
        path, _, message = str(error).partition(": ")
        raise ConfigError(f"{place.text}{_in_brackets(path)}: {message}") from error


def _in_brackets(path: str) -> str:
    """Return a dotted path with the numbers of items in brackets.

    >>> _in_brackets(".2.width")
    '[2].width'
    """
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", path)


# --- connections ----------------------------------------------------------------------------------


def _makers(nodes: Iterable[Node]) -> dict[str, Node]:
    """Return the node that makes each tensor; names of nodes and of tensors are unique."""
    named: dict[str, Node] = {}
    makers: dict[str, Node] = {}
    for node in nodes:
        if node.name in named:
            raise _twice(node.place.key("name"), node.name, named[node.name])
        named[node.name] = node
        for number, name in enumerate(node.outputs):
            if name in makers:
                raise _twice(node.place.key("outputs").item(number), name, makers[name])
            makers[name] = node
    return makers


def _twice(place: KeyPlace, name: str, first: Node) -> ConfigError:
    path = first.place.text.rpartition(": ")[2]
    return place.error(f"a name that {path} has already", name, "Choose another name.")


def _check_tensor(name: str, makers: Mapping[str, Node], place: KeyPlace) -> None:
    if name not in makers:
        raise place.error("unknown tensor", name, did_you_mean(name, makers))


def _in_order(layers: Sequence[Node], makers: Mapping[str, Node]) -> list[Node]:
    """Return the layers in an order in which they can run, which is otherwise the given one."""
    waiting = {layer.name: layer for layer in layers}
    order: list[Node] = []
    while waiting:
        ready = None
        for layer in waiting.values():
            if not any(makers[name].name in waiting for name in layer.inputs):
                ready = layer
                break
        if ready is None:
            raise _cycle(waiting, makers)
        order.append(waiting.pop(ready.name))
    return order


def _cycle(waiting: Mapping[str, Node], makers: Mapping[str, Node]) -> ConfigError:
    """Return the error about layers that wait for each other."""
    layer = next(iter(waiting.values()))
    path: list[str] = []
    while layer.name not in path:  # from a layer to the one that it waits for
        path.append(layer.name)
        sources = [makers[name] for name in layer.inputs]
        layer = next(source for source in sources if source.name in waiting)
    cycle = [*path[path.index(layer.name) :], layer.name]
    got = Words(" -> ".join(reversed(cycle)))
    advice = "Let one of these layers take another input."
    return layer.place.error("the layer needs its own output", got, advice)


def _check_used(nodes: Sequence[Node], outputs: Mapping[str, str]) -> None:
    """Raise ConfigError for a node of which no output is used."""
    used = {*outputs.values()}
    for node in nodes:
        used.update(node.inputs)
    for node in nodes:
        if not used.intersection(node.outputs):
            advice = "Let a layer or the outputs take it, or remove it."
            raise node.place.error("nothing takes its output", list(node.outputs), advice)
