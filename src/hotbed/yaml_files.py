# SPDX-License-Identifier: Apache-2.0
"""YAML and JSON as people mean them: in job files, and in the rules of a server."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from hotbed.errors import ConfigError
from hotbed.files import local_path


class Loader(yaml.SafeLoader):
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

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError) as error:
            kind = node.tag.rpartition(":")[2]
            problem = f"not a value of the type {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


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
Loader.yaml_implicit_resolvers = {}  # without those of YAML 1.1
for tag, pattern, first in _PLAIN_VALUES:
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), first)


def _number(loader: Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    if text.startswith("0x"):
        return int(text, 16)
    return int(text)


Loader.add_constructor("tag:yaml.org,2002:int", _number)


def parse_value(text: str) -> Any:
    """Return the value of `text` as YAML reads it: `3`, `1e-3`, `true`, `[a, b]`, `{kind: sgd}`.

    Other text is a string.

    Raises:
        ConfigError: `text` cannot be parsed.
    """
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            f"--set: not a value ({_problem_of(error)}), got {text!r:.80}. Quote it if it is text."
        ) from error


def read_mapping(path: str | Path, what: str = "job") -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file.

    Args:
        path: the file.
        what: what the file describes, for messages.

    Raises:
        ConfigError: the file cannot be read or parsed; the message has the file and the line.
    """
    path = local_path(path, what)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}). Give the path of a YAML or JSON file."
        ) from error
    try:
        mapping = _parsed(text, is_json=path.suffix == ".json")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be parsed ({_problem_of(error)}). Correct the file."
        ) from error
    if not isinstance(mapping, dict):
        raise ConfigError(
            f"{path}: not a {what}, got {type(mapping).__name__}. Write a mapping with the keys of "
            f"a {what}."
        )
    return mapping


def _parsed(text: str, *, is_json: bool) -> Any:
    # JSON is YAML, but its own parser gives better messages and accepts tabs
    if is_json:
        return json.loads(text)
    return yaml.load(text, Loader)


def _problem_of(error: Exception) -> str:
    """Return what a parser complains about, with the line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error)
