# SPDX-License-Identifier: Apache-2.0
"""Job files: YAML and JSON as people mean them, and values that are set by dotted path.

override(read_mapping("job.yaml"), {"tables.rule.lr": 0.1})
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from hotbed import plugins
from hotbed.errors import ConfigError
from hotbed.files import local_path, resolve
from hotbed.persist.container.store import MANIFEST_FILE

T = TypeVar("T")


class _Loader(yaml.SafeLoader):
    """Reads plain values as YAML 1.2 does: `1e-3` is a number, `no` and `2014-10-21` are strings.

    A key that appears twice is an error.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                problem = f"the key {key!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


# Name of a tag, the texts that have it, and the characters that these texts begin with.
_PLAIN_VALUES = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf)|\.(nan|NaN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
)
_Loader.yaml_implicit_resolvers = {}  # without those of YAML 1.1
for tag, pattern, first in _PLAIN_VALUES:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), first)


def _number(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    if text.startswith("0x"):
        return int(text, 16)
    return int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _number)


def names_a_job(what: str) -> bool:
    """Return whether `what` is the path of a job file: not a folder, a URL or a manifest."""
    place = resolve(what)
    return isinstance(place, Path) and not place.is_dir() and place.name != MANIFEST_FILE


def parse_value(text: str) -> Any:
    """Return the value of `text` as YAML reads it: `3`, `1e-3`, `true`, `[a, b]`, `{kind: sgd}`.

    Other text is a string.

    Raises:
        ConfigError: `text` cannot be parsed.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            f"--set: not a value ({_problem(error)}), got {text!r:.80}. Quote it if it is text."
        ) from error


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file.

    Raises:
        ConfigError: the file cannot be read or parsed; the message has the file and the line.
    """
    path = local_path(path, "job")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}). Give the path of a YAML or JSON file."
        ) from error
    try:
        mapping = _parsed(text, is_json=path.suffix == ".json")
    except (yaml.YAMLError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be parsed ({_problem(error)}). Correct the file."
        ) from error
    if not isinstance(mapping, dict):
        raise ConfigError(
            f"{path}: not a job, got {type(mapping).__name__}. Write a mapping with the keys of a "
            "job."
        )
    return mapping


def read_values(
    path: str | Path, assignments: Mapping[str, object], build: Callable[[dict[str, Any]], T]
) -> T:
    """Return what `build` makes of the values of a job file.

    Kinds `module:name` may name modules in the folder of the file, too.

    Args:
        path: a YAML or JSON file.
        assignments: values by dotted path, as in `override`.
        build: makes the job.

    Raises:
        ConfigError: a value is wrong; the message has its dotted path, and its line of the file.
    """
    plain = read_mapping(path)
    spec = override(plain, assignments)
    file = local_path(path, "job")
    plugins.look_beside(file, spec)
    try:
        return build(spec)
    except ConfigError as error:
        steps = str(error).partition(":")[0].split(".")[1:]
        line = _line_of(file, steps)
        if line is None or _value_at(plain, steps) != _value_at(spec, steps):
            raise
        raise ConfigError(f"{error} See line {line} of {file}.") from error


def _line_of(file: Path, steps: Sequence[str]) -> int | None:
    """Return the line of the key at a dotted path, or else of the deepest one above it."""
    line = None
    try:
        node = yaml.compose(file.read_text(encoding="utf-8"), _Loader)
    except yaml.YAMLError:  # JSON with tabs
        return None
    for step in steps:
        if isinstance(node, yaml.MappingNode):
            children = {key.value: (key, value) for key, value in node.value}
        elif isinstance(node, yaml.SequenceNode):
            children = {str(number): (item, item) for number, item in enumerate(node.value)}
        else:
            children = {}
        if step not in children:
            break
        key, node = children[step]
        line = key.start_mark.line + 1
    return line


def _value_at(spec: Any, steps: Sequence[str]) -> Any:
    """Return the value at a dotted path, or else the deepest one above it."""
    for step in steps:
        if isinstance(spec, Mapping) and step in spec:
            spec = spec[step]
        elif isinstance(spec, list) and step.isdigit() and int(step) < len(spec):
            spec = spec[int(step)]
        else:
            break
    return spec


def _parsed(text: str, *, is_json: bool) -> Any:
    # JSON is YAML, but its own parser gives better messages and accepts tabs
    if is_json:
        return json.loads(text)
    return yaml.load(text, _Loader)


def _problem(error: Exception) -> str:
    """Return what a parser complains about, with the line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error)


def override(spec: Mapping[str, Any], assignments: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of `spec` with values that are set by dotted path.

    Numbers index lists. A string on the way is a kind, and becomes a mapping.

    >>> override({"rule": "adagrad"}, {"rule.lr": 0.1})
    {'rule': {'kind': 'adagrad', 'lr': 0.1}}
    """
    # YAML anchors share nodes; a copy must not
    result: dict[str, Any] = json.loads(json.dumps(spec))
    for path, value in assignments.items():
        _set_value(result, path, value)
    return result


def _set_value(spec: dict[str, Any], path: str, value: object) -> None:
    steps = path.split(".")
    if not all(steps):
        raise ConfigError(f"--set: not a path, got {path!r}. Write names joined by dots: a.b=c.")
    node: Any = spec
    for depth, step in enumerate(steps, 1):
        key = _step_key(node, step, ".".join(steps[:depth]))
        if depth == len(steps):
            node[key] = value
            return
        child = node[key] if isinstance(node, list) else node.get(key)
        if isinstance(child, str):
            child = {"kind": child}
        elif not isinstance(child, (dict, list)):
            child = {}
        node[key] = child
        node = child


def _step_key(node: Any, step: str, path: str) -> Any:
    """Return the key or index of `step` in a mapping or list; an item of a list may be named."""
    if not isinstance(node, list):
        return step
    if step.isdigit() and int(step) < len(node):
        return int(step)
    for number, item in enumerate(node):
        if isinstance(item, Mapping) and item.get("name") == step:
            return number
    raise ConfigError(
        f"{path}: there is no such item, got {step!r}. Give the name of an item, or a number below "
        f"{len(node)}."
    )
