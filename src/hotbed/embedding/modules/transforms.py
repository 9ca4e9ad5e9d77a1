# SPDX-License-Identifier: Apache-2.0
"""Transforms of torch that cannot follow a lookup, which native code performs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from hotbed.embedding.table import Table
from hotbed.errors import ConfigError

_BY_KIND = {
    "Vmap": "torch.vmap",
    "Grad": "torch.func.grad, torch.func.vjp or torch.func.jacrev",
    "Jvp": "torch.func.jvp or torch.func.jacfwd",
    "Functionalize": "torch.func.functionalize",
}


def check_transforms(tables: Sequence[Table], ids: Any) -> None:
    """Raise ConfigError if torch transforms or records the code that looks up `ids`.

    torch.compile takes lookups as operators of its own, see `compiled`.

    Args:
        tables: that are looked up, for the message.
        ids: the first ids of the lookup.
    """
    transform = _transform(ids)
    if transform:
        raise transformed(tables, transform)


def check_export(tables: Sequence[Table]) -> None:
    """Raise ConfigError if torch.export computes the shapes of a compiled lookup."""
    is_exporting = getattr(torch.compiler, "is_exporting", None)  # torch 2.6 cannot tell
    if is_exporting is not None and is_exporting():
        raise transformed(tables, "torch.export")


def transformed(tables: Sequence[Table], transform: str) -> ConfigError:
    """Return the error of a lookup inside of a transform of torch."""
    names = sorted(table.name for table in tables)
    return ConfigError(
        f"embedding {names}: {transform} cannot follow a lookup of Hotbed, which native "
        "code performs in a table that changes, got a lookup inside of it. Call the model on whole "
        "batches, train with loss.backward(), and serve with RecModel.export; for a model of "
        "hb.auto, load hotbed.training.auto.plain_state_dict(model) into the model as it was "
        "written, and give torch that."
    )


def _transform(ids: Any) -> str:
    """Return the transform of torch that runs this code; "" for none."""
    if torch.compiler.is_dynamo_compiling():
        return ""  # torch.compile, or torch.export, which meets `check_export` next
    if torch.compiler.is_compiling():
        return "torch.export"
    if isinstance(ids, fx.Proxy):
        return "torch.fx.symbolic_trace"
    if torch._C._is_tracing():
        return "torch.jit.trace"
    layer: Any = torch._C._functorch.peek_interpreter_stack()
    if layer is not None:
        kind = layer.key().name
        return _BY_KIND.get(kind, f"torch.func ({kind})")
    if get_proxy_mode() is not None:
        return "make_fx"
    return ""
