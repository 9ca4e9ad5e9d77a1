# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of job files, for completion and checks in editors.

It is made from the constructors that the keys build, so it cannot differ from them.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hotbed import config, plugins
from hotbed.job.job import Job

_LEAVES: Mapping[Any, Mapping[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    Path: {"type": "string"},
    type(None): {"type": "null"},
    Any: {},
    object: {},
}
_NAME: Mapping[str, Any] = {"type": "string", "pattern": f"^{plugins.NAME}$"}
_OWN: dict[str, Any] = {
    "description": "A class of another package, as module:name.",
    "anyOf": [_NAME, {"type": "object", "properties": {"kind": _NAME}, "required": ["kind"]}],
}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a job file; needs torch, to list the models."""
    from hotbed.metrics import Metric
    from hotbed.models.losses import Loss, MultiTask

    schemas = _Schemas()
    root = schemas.of_class(Job, "job", needs_kind=False)
    keys = schemas.definitions["job.job"]["properties"]
    keys["model"] = schemas.of_kinds(config.public_kinds("hotbed.models"))
    keys["loss"] = schemas.of_kinds(config.kinds(Loss) | {"multi_task": MultiTask})

    metric = schemas.of_kinds(config.kinds(Metric))
    metric["anyOf"].append({"type": "string", "pattern": "^(gauc|hit_rate|ndcg)@."})
    metric["anyOf"].append({"type": "string", "pattern": f"^{plugins.NAME}@."})
    metrics = _array(metric)
    keys["metrics"] = {"anyOf": [metrics, {"type": "object", "additionalProperties": metrics}]}

    callbacks = config.public_kinds("hotbed.training.callbacks")
    keys["checkpoint"] = _object(schemas.keys_of(callbacks["checkpoint"], given=("path",)))
    keys["callbacks"] = _array(schemas.of_kinds(callbacks))
    keys["stream_callbacks"] = keys["callbacks"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Hotbed job",
        **root,
        "$defs": dict(sorted(schemas.definitions.items())),
    }


class _Schemas:
    """Schemas of type hints; `definitions` holds those of classes, by folder and kind."""

    def __init__(self) -> None:
        self.definitions: dict[str, dict[str, Any]] = {}

    def of_hint(self, hint: Any) -> dict[str, Any]:
        """Return the schema of the values that fit a type hint; `{}` where any may fit."""
        if hint in _LEAVES:
            return dict(_LEAVES[hint])
        origin = typing.get_origin(hint)
        arguments = typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            return {"anyOf": [self.of_hint(member) for member in arguments]}
        if origin is Literal:
            return {"enum": list(arguments)}
        container = origin or hint
        if container in (list, tuple, Sequence, Iterable):
            item = arguments[0] if arguments else Any
            return _array(self.of_hint(item))
        if container in (dict, Mapping):
            value = arguments[1] if arguments else Any
            return {"type": "object", "additionalProperties": self.of_hint(value)}
        if not inspect.isclass(container) or not container.__module__.startswith("hotbed."):
            return {}
        kinds = self.of_kinds(config.kinds(container))
        return kinds or self.of_class(container, config.kind_of(container), needs_kind=False)

    def of_kinds(self, kinds: Mapping[str, type]) -> dict[str, Any]:
        """Return the schema of an object of one of the classes, or of the bare name of its kind."""
        references = []
        names = []
        for kind, cls in sorted(kinds.items()):
            folders = cls.__module__.split(".")
            if folders[0] == "hotbed" and folders[1] != "testing":
                references.append(self.of_class(cls, kind, needs_kind=True))
                names.append(kind)
        if not references:
            return {}
        if all(reference["$ref"].startswith("#/$defs/embedding.") for reference in references):
            return {"anyOf": [*references, {"enum": names}]}  # the core computes them
        self.definitions["own"] = _OWN
        return {"anyOf": [*references, {"enum": names}, {"$ref": "#/$defs/own"}]}

    def of_class(self, cls: type, kind: str, *, needs_kind: bool) -> dict[str, Any]:
        """Return a reference to the definition of a class, which is added if it is new."""
        folder = cls.__module__.split(".")[1]
        name = f"{folder}.{kind}"
        if name not in self.definitions:
            self.definitions[name] = {}  # breaks cycles: a source may hold a source
            self.definitions[name] = self._definition(cls, kind, needs_kind=needs_kind)
        return {"$ref": f"#/$defs/{name}"}

    def keys_of(self, cls: type, given: Sequence[str]) -> dict[str, Any]:
        """Return the schemas of a class's keys, without the keywords in `given`."""
        keys = {}
        for name, parameter in config.parameters(cls).items():
            if name not in given:
                keys[name.rstrip("_")] = self.of_hint(parameter.annotation)
        return keys

    def _definition(self, cls: type, kind: str, *, needs_kind: bool) -> dict[str, Any]:
        arguments = () if cls is Job else config.GIVEN
        required = ["kind"] if needs_kind else []
        for name, parameter in config.parameters(cls).items():
            if name not in arguments and parameter.default is parameter.empty:
                required.append(name.rstrip("_"))
        first_line = (inspect.getdoc(cls) or "").partition("\n")[0]
        return {
            "type": "object",
            "description": first_line,
            "properties": {"kind": {"const": kind}, **self.keys_of(cls, arguments)},
            "required": required,
            "additionalProperties": False,
        }


def _array(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _object(keys: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": keys, "additionalProperties": False}
