# SPDX-License-Identifier: Apache-2.0
"""Job files: YAML and JSON as people mean them, and values set by dotted path.

override(read_mapping("job.yaml"), {"tables.rule.lr": 0.1})
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from hotbed.errors import ConfigError
from hotbed.files import local_path, resolve
from hotbed.persist.store import MANIFEST_FILE


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values: `1e-3` is a number, `no` and `2014-10-21` are strings; a key given
    twice is an error.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012 - the base class's table, emptied

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice!r} is given twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


for tag, pattern, first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf)|\.(nan|NaN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), first)


def _number(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 16) if text.startswith("0x") else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _number)


def names_a_job(what: str) -> bool:
    """Return whether `what` is the path of a job file: not a folder, a URL or a manifest."""
    place = resolve(what)
    return isinstance(place, Path) and not place.is_dir() and place.name != MANIFEST_FILE


def parse_value(text: str) -> Any:
    """The value of `text` as YAML reads it: `3`, `1e-3`, `true`, `null`, `[a, b]`, `{kind: sgd}`,
    or a string.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"not a value: {_yaml_problem(error)} — received {text!r} — quote it if it is text"
        ) from error


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; ConfigError with file and line when it does not parse."""
    path = local_path(path, "job")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read — {error} — give the path of a YAML or JSON file"
        ) from error
    try:
        # JSON is YAML, but its own parser gives the better messages and does not mind tabs
        value = json.loads(text) if path.suffix == ".json" else yaml.load(text, _Loader)
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be parsed — {_yaml_problem(error)} — correct it"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: not a job — received {type(value).__name__} — write a mapping of the keys "
            "of a job"
        )
    return value


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"line {mark.line + 1}: {error.problem}" if mark is not None else str(error)  # type: ignore[attr-defined]


def override(spec: Mapping[str, Any], assignments: Mapping[str, object]) -> dict[str, Any]:
    """A copy of `spec` with values set by dotted path; numbers index lists; a string kind becomes a
    mapping on the way.

    >>> override({"rule": "adagrad"}, {"rule.lr": 0.1})
    {'rule': {'kind': 'adagrad', 'lr': 0.1}}
    """
    # YAML anchors share nodes; a copy must not
    result: dict[str, Any] = json.loads(json.dumps(spec))
    for dotted, value in assignments.items():
        node: Any = result
        steps = dotted.split(".")
        if not all(steps):
            raise ConfigError(
                f"{dotted}: not a path — received {dotted!r} — write names joined by dots, such "
                "as a.b=c"
            )
        for depth, step in enumerate(steps):
            key = _step_key(node, step, ".".join(steps[: depth + 1]))
            if depth == len(steps) - 1:
                node[key] = value
                break
            child: Any = node[key] if isinstance(node, list) else node.get(key)
            if isinstance(child, str):
                child = {"kind": child}
            elif not isinstance(child, (dict, list)):
                child = {}
            node[key] = child
            node = child
    return result


def _step_key(node: Any, step: str, path: str) -> Any:
    if not isinstance(node, list):
        return step
    if step.isdigit() and int(step) < len(node):
        return int(step)
    named = [
        i for i, item in enumerate(node) if isinstance(item, Mapping) and item.get("name") == step
    ]
    if named:
        return named[0]
    raise ConfigError(
        f"{path}: no such item — received {step!r} — use a name in the list or a number below "
        f"{len(node)}"
    )
