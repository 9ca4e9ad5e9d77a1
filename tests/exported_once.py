# SPDX-License-Identifier: Apache-2.0
"""Graphs of networks, which torch exports once for each architecture: an export takes half a
second, and many tests publish the same small networks.

The exporter still compares each graph with the network that it is for. So a graph of another
network is an error, and never served.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from types import FunctionType
from typing import Any


def export_once() -> None:
    """Let all exports of one architecture in this process share a graph."""
    exporting = sys.modules.get("hotbed.persist.publish.export")
    if exporting is None or hasattr(exporting, "export_afresh"):
        return
    exporting.export_afresh = exporting._export
    graphs = dict[Hashable, tuple[bytes, list[str]]]()

    def export(half: Any, inputs: Mapping[str, Any]) -> tuple[bytes, list[str]]:
        # the exporter has noted what these look up
        tables = {id(module) for module in half._modules_with_tables}
        architecture = plain([half, half._activate, inputs], tables)
        if architecture not in graphs:
            graphs[architecture] = exporting.export_afresh(half, inputs)
        onnx, weights = graphs[architecture]
        return onnx, list(weights)

    exporting._export = export


def plain(value: Any, above: set[int]) -> Hashable:
    """Return what distinguishes networks of other architectures.

    Of a tensor these are its shape and type, of a table nothing, and of another object its class
    and members.

    Args:
        value: a network, or a member of it.
        above: the ids of the objects that `value` is a member of, and of those whose members do not
            matter.
    """
    from torch import Tensor
    from torch.nn import Module

    from hotbed import Table

    if id(value) in above or isinstance(value, Table):
        return type(value)
    inside = above | {id(value)}
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device
    if isinstance(value, Mapping):
        return tuple((plain(name, inside), plain(each, inside)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(plain(each, inside) for each in value)
    if isinstance(value, set | frozenset):
        return frozenset(plain(each, inside) for each in value)
    if isinstance(value, Module):
        names = sorted(value._non_persistent_buffers_set)
        constants = [repr(value._buffers[name]) for name in names]
        return type(value), plain(vars(value), inside), tuple(constants)
    if hasattr(value, "__self__"):
        return value.__name__, plain(value.__self__, inside)
    if isinstance(value, FunctionType | type) or not hasattr(value, "__dict__"):
        return type(value), value if isinstance(value, Hashable) else id(value)
    return type(value), plain(vars(value), inside)
