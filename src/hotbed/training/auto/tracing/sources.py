# SPDX-License-Identifier: Apache-2.0
"""Where ids come from: the nodes that compute them in words, and the last `% bins` among them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

_LONGEST = 60  # characters of a formula; longer ones are summed up

# Operators that give the values of their first argument, or of a list of tensors, another shape.
_RESHAPING = {
    "alias",
    "broadcast_to",
    "cat",
    "clone",
    "concat",
    "concatenate",
    "contiguous",
    "cpu",
    "cuda",
    "detach",
    "expand",
    "expand_as",
    "flatten",
    "gather",
    "hstack",
    "index",
    "index_select",
    "lift_fresh_copy",
    "long",
    "masked_select",
    "movedim",
    "narrow",
    "permute",
    "repeat",
    "repeat_interleave",
    "reshape",
    "roll",
    "select",
    "slice",
    "split",
    "squeeze",
    "stack",
    "swapaxes",
    "t",
    "to",
    "to_copy",
    "transpose",
    "unbind",
    "unflatten",
    "unsafe_view",
    "unsqueeze",
    "view",
    "view_as",
    "vstack",
}
_PARTS = {"select", "slice", "index", "narrow", "getitem", "split", "unbind", "index_select"}
_JOINS = {"cat", "concat", "concatenate", "stack", "hstack", "vstack"}
_SIGNS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "floordiv": "//",
    "floor_divide": "//",
    "remainder": "%",
    "mod": "%",
    "xor": "^",
    "bitwise_xor": "^",
    "and": "&",
    "and_": "&",
    "bitwise_and": "&",
    "or": "|",
    "or_": "|",
    "bitwise_or": "|",
    "lshift": "<<",
    "bitwise_left_shift": "<<",
    "rshift": ">>",
    "bitwise_right_shift": ">>",
}


@dataclass(frozen=True)
class IdSource:
    """Where the ids of a module's lookups come from.

    Attributes:
        text: for readers, such as "'user'" or "(31 * 'user' + 'item') % 1000".
        bins: the ids end with `% bins`, which `unbounded` can drop; None = they do not.
        leaves: the names of the arguments that they are computed from.
    """

    text: str
    bins: int | None = None
    leaves: tuple[str, ...] = ()


def source_of(nodes: Sequence[fx.Node], names: Mapping[fx.Node, str]) -> IdSource:
    """Return where the values of nodes come from.

    Args:
        nodes: of the ids of each lookup of a module.
        names: of the nodes that are leaves, or buffers.
    """
    texts: dict[str, None] = {}
    origins: dict[str, None] = {}
    bins = []
    for node in nodes:
        texts.setdefault(_words(node, names))
        bins.append(last_bins(node))
        _gather(node, names, origins, {})
    leaves = [name.strip("'") for name in origins if name.startswith("'")]
    most = None
    if None not in bins:
        most = max(num_bins for num_bins in bins if num_bins is not None)
    return IdSource(" and ".join(texts), most, tuple(leaves))


def name_of(node: fx.Node) -> str:
    """Return the plain name of an operator, function or method: "add", "remainder"."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2].strip("_")
    if isinstance(target, str):
        return target.strip("_")
    return str(getattr(target, "__name__", target)).strip("_")


def is_reshaping(node: fx.Node) -> bool:
    """Return True if a node passes values on in another shape, order, choice or type."""
    if node.op not in ("call_function", "call_method"):
        return False
    if name_of(node) in _RESHAPING:
        types = [*node.args, *node.kwargs.values()]
        return all(kind is torch.int64 for kind in types if isinstance(kind, torch.dtype))
    return node.target is operator.getitem and bool(node.all_input_nodes)


def shaped_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values a reshaping node passes on."""
    first = node.args[0] if node.args else None
    if isinstance(first, (list, tuple)):
        return [item for item in first if isinstance(item, fx.Node)]
    return [first] if isinstance(first, fx.Node) else []


def own_bins(node: fx.Node) -> int | None:
    """Return the number of bins of `x % bins` and of `x & (bins - 1)`; None for other nodes."""
    if node.op not in ("call_function", "call_method") or len(node.args) != 2:
        return None
    name = name_of(node)
    values, number = node.args
    if not isinstance(values, fx.Node) or not isinstance(number, int) or number <= 0:
        return None
    if _SIGNS.get(name) == "%":
        return number
    if _SIGNS.get(name) == "&" and number & (number + 1) == 0:
        return number + 1
    return None


def last_bins(node: fx.Node) -> int | None:
    """Return the bins of the `% bins` that a node's values end with; None if they do not.

    Values that are put together from several ones must all end with it; the most bins count.
    """
    bins = own_bins(node)
    if bins is not None or not is_reshaping(node):
        return bins
    parts = [last_bins(part) for part in shaped_nodes(node)]
    if not parts or None in parts:
        return None
    return max(part for part in parts if part is not None)


# --- words ----------------------------------------------------------------------------------------


def _words(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    formula = _formula(node, names, 0)
    if len(formula) <= _LONGEST:
        return formula
    leaves: dict[str, None] = {}
    functions: dict[str, None] = {}
    _gather(node, names, leaves, functions)
    origin = ", ".join(leaves) or "constants"
    if not functions:
        return origin
    return f"{origin} through {', '.join(functions)}"


def _formula(value: Any, names: Mapping[fx.Node, str], depth: int) -> str:
    if not isinstance(value, fx.Node):
        return str(value)
    own_name = _own_name(value, names)
    if own_name:
        return own_name
    if depth > 12:
        return "…" * _LONGEST  # too long to read
    name = name_of(value)
    if name == "div" and value.kwargs.get("rounding_mode") == "floor":
        name = "floordiv"
    if is_reshaping(value):
        inner = [_formula(part, names, depth + 1) for part in shaped_nodes(value)]
        if name in _JOINS:
            return f"{name}({', '.join(dict.fromkeys(inner))})"
        return f"{_in_brackets(', '.join(inner))}{_index(value)}"
    parts = [_formula(part, names, depth + 1) for part in _arguments(value)]
    if name == "getattr":
        return f"{parts[0]}.{value.args[1]}"
    if name == "sym_size":
        return f"{parts[0]}.shape[{parts[1]}]"
    if name in _SIGNS and len(parts) == 2:
        return " ".join([_in_brackets(parts[0]), _SIGNS[name], _in_brackets(parts[1])])
    return f"{name}({', '.join(parts)})"


def _own_name(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """Return the name of a leaf, of a buffer, or of the item of an argument; "" for others."""
    if node in names:
        return names[node]
    if node.op == "get_attr":
        return str(node.target).removeprefix("model.")
    if len(node.args) == 2 and isinstance(node.args[0], fx.Node) and node.args[0] in names:
        key = node.args[1]
        if isinstance(key, str) and name_of(node) in ("getitem", "getattr") and key != "shape":
            return repr(key)
    return ""


def _index(node: fx.Node) -> str:
    """Return which values a node passes on: "[:, 2]"; "" for all."""
    name = name_of(node)
    numbers: list[Any] = list(node.args[1:])
    if name == "getitem":
        return f"[{_key(numbers[0])}]"
    if name not in _PARTS:
        return ""
    if not all(isinstance(number, (int, type(None))) for number in numbers):
        return "[…]"
    if name == "select":
        axis, index = numbers
        return f"[{':, ' * axis}{index}]"
    if name == "slice":
        axis, start, end = [*numbers, None, None, None][:3]
        ends = f"{start or ''}:{'' if end == 2**63 - 1 else end}"
        return "" if ends == ":" else f"[{':, ' * (axis or 0)}{ends}]"
    return "[…]"


def _key(key: Any) -> str:
    """Return the key of `values[key]` as it is written."""
    if isinstance(key, tuple):
        return ", ".join(_key(part) for part in key)
    if isinstance(key, slice):
        ends = ["" if end is None else _key(end) for end in (key.start, key.stop)]
        return ":".join(ends)
    return "…" if isinstance(key, fx.Node) or key is Ellipsis else str(key)


def _arguments(node: fx.Node) -> list[Any]:
    """Return the arguments that a reader wants to see: nodes and numbers."""
    wanted: list[Any] = []
    for value in node.args:
        if isinstance(value, (list, tuple)):
            wanted += [part for part in value if isinstance(part, fx.Node)]
        elif isinstance(value, (fx.Node, int, float)):
            wanted.append(value)
    return wanted


def _in_brackets(text: str) -> str:
    if " " in text and not (text.endswith(")") and text.partition("(")[0].isidentifier()):
        return f"({text})"
    return text


def _gather(
    node: fx.Node, names: Mapping[fx.Node, str], leaves: dict[str, None], functions: dict[str, None]
) -> None:
    """Collect the leaves and the functions that a node's values come from."""
    waiting = [node]
    seen = set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        own_name = _own_name(current, names)
        if own_name:
            leaves.setdefault(own_name)
            continue
        if not is_reshaping(current) and current.op in ("call_function", "call_method"):
            functions.setdefault(name_of(current))
        waiting += reversed(current.all_input_nodes)
