# SPDX-License-Identifier: Apache-2.0
"""Job files, and values that are set by dotted path.

override(read_mapping("job.yaml"), {"tables.rule.lr": 0.1})
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from hotbed import plugins
from hotbed.errors import ConfigError
from hotbed.files import local_path, resolve
from hotbed.persist.container.store import MANIFEST_FILE
from hotbed.yaml_files import Loader, read_mapping

T = TypeVar("T")


def names_a_job(what: str) -> bool:
    """Return whether `what` is the path of a job file: not a folder, a URL or a manifest."""
    place = resolve(what)
    return isinstance(place, Path) and not place.is_dir() and place.name != MANIFEST_FILE


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
        node = yaml.compose(file.read_text(encoding="utf-8"), Loader)
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
