# SPDX-License-Identifier: Apache-2.0
"""What libraries do again each time, with the same result.

For torch that is more than half of an export, for typer most of a command that refuses its
arguments.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any


class _Unread(type):
    """The type of what stands for `Callable` in annotations that nobody reads."""

    def __getitem__(cls, arguments: Any) -> _Unread:
        return cls

    def __instancecheck__(cls, value: Any) -> bool:
        return callable(value)


def read_tables_once() -> None:
    """Let all exports of this process share these tables, once torch has imported their code."""
    registering = sys.modules.get("torch._ops")
    if registering is not None and registering.Callable is Callable:
        # each of the 11,000 calls of `py_impl` in an export evaluates the annotations of a function
        registering.Callable = _Unread("Callable", (), {})
    operators = sys.modules.get("torch._export.utils")
    if operators is not None and not hasattr(operators, "read_once"):
        operators.read_once = True
        composites = functools.cache(operators._collect_all_valid_cia_ops_for_namespace)
        operators._collect_all_valid_cia_ops_for_namespace = composites
    registration = sys.modules.get("torch.onnx._internal.exporter._registration")
    if registration is not None and not hasattr(registration, "read_once"):
        registration.read_once = functools.cache(registration.ONNXRegistry.from_torchlib)
        registration.ONNXRegistry.from_torchlib = staticmethod(_from_torchlib)


def read_commands_once() -> None:
    """Let all commands of this process share the flags that typer reads from their functions."""
    typer = sys.modules.get("typer.main")
    if typer is not None and not hasattr(typer, "read_once"):
        typer.read_once = functools.cache(typer.get_group)
        typer.get_group = typer.read_once


def _from_torchlib(*arguments: Any, **keywords: Any) -> Any:
    """Return a copy of the registry, to which an export adds functions of its own."""
    registration = sys.modules["torch.onnx._internal.exporter._registration"]
    registry = copy.copy(registration.read_once(*arguments, **keywords))
    registry.functions = {name: list(metas) for name, metas in registry.functions.items()}
    return registry
