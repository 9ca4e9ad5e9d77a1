# SPDX-License-Identifier: Apache-2.0
"""Tables that torch reads again for each export, although they stay the same: half of an export."""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any


def read_tables_once() -> None:
    """Let all exports of this process share these tables, once torch has imported their code."""
    operators = sys.modules.get("torch._export.utils")
    if operators is not None and not hasattr(operators, "read_once"):
        operators.read_once = True
        composites = functools.cache(operators._collect_all_valid_cia_ops_for_namespace)
        operators._collect_all_valid_cia_ops_for_namespace = composites
    registration = sys.modules.get("torch.onnx._internal.exporter._registration")
    if registration is not None and not hasattr(registration, "read_once"):
        registration.read_once = functools.cache(registration.ONNXRegistry.from_torchlib)
        registration.ONNXRegistry.from_torchlib = staticmethod(_from_torchlib)


def _from_torchlib(*arguments: Any, **keywords: Any) -> Any:
    """Return a copy of the registry, to which an export adds functions of its own."""
    registration = sys.modules["torch.onnx._internal.exporter._registration"]
    registry = copy.copy(registration.read_once(*arguments, **keywords))
    registry.functions = {name: list(metas) for name, metas in registry.functions.items()}
    return registry
