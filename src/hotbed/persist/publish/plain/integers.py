# SPDX-License-Identifier: Apache-2.0
"""Integer operations that ONNX Runtime computes to the bit as torch does.

Its Max, Min, Clip, Sign, ReduceSum, ReduceProd, Pow and truncating Mod go wrong beyond 32 or 53
bits. Here they become sums, products, comparisons and Where, which are exact and wrap around.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from hotbed.errors import ConfigError

from .fbgemm import decompositions

aten = torch.ops.aten
_EXACT_NUMBERS = {
    "abs",
    "add",
    "ceil",
    "clamp",
    "clamp_max",
    "clamp_min",
    "div",
    "floor",
    "mul",
    "neg",
    "relu",
    "round",
    "rsub",
    "sqrt",
    "sub",
    "trunc",
}
"""Operations on floats whose result IEEE 754 defines, so that every library gives the same bits."""
_MOVES = {
    "alias",
    "arange",
    "cat",
    "clone",
    "constant_pad_nd",
    "detach",
    "empty",
    "expand",
    "flip",
    "full",
    "full_like",
    "gather",
    "index",
    "index_select",
    "lift_fresh_copy",
    "masked_fill",
    "ones",
    "ones_like",
    "permute",
    "repeat",
    "roll",
    "scalar_tensor",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "stack",
    "t",
    "to",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
    "reshape",
    "where",
    "zeros",
    "zeros_like",
    "_to_copy",
}
"""Operations that only move values."""
_DIVISIONS = {"remainder", "floor_divide", "fmod", "div"}


def exact(program: ExportedProgram) -> ExportedProgram:
    """Return the program with its integer operations in a form that ONNX Runtime computes exactly.

    Raises:
        ConfigError: it divides integers by a tensor, where a zero in a request would end a server.
    """
    decomposed: ExportedProgram = program.run_decompositions(
        {**_DECOMPOSITIONS, **decompositions()}
    )
    for node in decomposed.graph.nodes:
        if _name(node) in _DIVISIONS and _is_integer(node.meta.get("val")):
            _check_divisor(decomposed, node)
    return decomposed


def check_exact(program: ExportedProgram, outputs: dict[int, str]) -> None:
    """Raise ConfigError if ids depend on values in a way that a server cannot repeat to the bit.

    That is the number of ids, or floats that libraries round differently.

    Args:
        program: of the id graph.
        outputs: by number of an integer output, the lookup that takes it.
    """
    (result,) = (node for node in program.graph.nodes if node.op == "output")
    for number, path in outputs.items():
        output = result.args[0][number]
        if free_unbacked_symbols(output.meta["val"]):
            raise ConfigError(
                f"export: a server knows how many ids {path!r} looks up before it sees them, got "
                "a number that depends on values. Look up an id for each sample, and choose with "
                "torch.where."
            )
        for node in _leading_to(output):
            value = node.meta.get("val")
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            if node.op != "call_function" or not is_float:
                continue
            if _name(node) not in _EXACT_NUMBERS | _MOVES:
                raise ConfigError(
                    f"export: the ids of {path!r} cannot be computed by a server to the bit, got "
                    f"{_name(node)!r} of floats on the way. Compute them with whole numbers, "
                    "torch.bucketize, or before the model."
                )


def _leading_to(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield a node and those that it depends on."""
    waiting = [node]
    nodes = set(waiting)
    while waiting:
        last = waiting.pop()
        yield last
        for before in last.all_input_nodes:
            if before not in nodes:
                nodes.add(before)
                waiting.append(before)


def _name(node: torch.fx.Node) -> str:
    """Return the name of an operator without its overload."""
    return str(getattr(node.target, "_opname", ""))


def _is_integer(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return False
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def _check_divisor(program: ExportedProgram, node: torch.fx.Node) -> None:
    divisor: Any = node.args[1]
    if isinstance(divisor, torch.fx.Node):
        names = {
            **program.graph_signature.inputs_to_buffers,
            **program.graph_signature.inputs_to_lifted_tensor_constants,
        }
        name = names.get(divisor.name, "")
        divisor = {**program.state_dict, **program.constants}.get(name)
    values = torch.as_tensor(0 if divisor is None else divisor)
    if bool(((values == 0) | (values == -1)).any()):
        raise ConfigError(
            f"export: a server divides integers by constants only, got {node.name!r}, whose "
            "divisor a request could set to zero. Divide by a number, or before the model."
        )


# --- decompositions -------------------------------------------------------------------------------


def _for_integers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decomposition that leaves floats and booleans to torch."""

    def decomposed(values: Tensor, *args: Any, **kwargs: Any) -> Any:
        others = [
            arg for arg in (values, *args, *kwargs.values()) if isinstance(arg, (Tensor, float))
        ]
        if all(_is_integer(other) for other in others):
            return function(values, *args, **kwargs)
        return NotImplemented

    return decomposed


def _maximum(values: Tensor, other: Tensor) -> Any:
    return torch.where(values > other, values, other)


def _minimum(values: Tensor, other: Tensor) -> Tensor:
    return torch.where(values < other, values, other)


def _at_least(values: Tensor, least: Any) -> Tensor:
    return values if least is None else torch.where(values < least, least, values)


def _at_most(values: Tensor, most: Any) -> Tensor:
    return values if most is None else torch.where(values > most, most, values)


def _clamp(values: Tensor, min: Any = None, max: Any = None) -> Tensor:
    return _at_most(_at_least(values, min), max)


def _sign(values: Tensor) -> Tensor:
    above = (values > 0).to(values.dtype)
    return above - (values < 0).to(values.dtype)


def _towards_zero(values: Tensor, divisor: Any) -> Any:
    floor = torch.floor_divide(values, divisor)
    rest = values - floor * divisor
    if isinstance(divisor, Tensor):
        is_negative = (values < 0) != (divisor < 0)
    else:
        is_negative = values < 0 if divisor > 0 else values > 0
    return floor + (is_negative & (rest != 0)).to(values.dtype)


def _fmod(values: Tensor, divisor: Any) -> Any:
    return values - _towards_zero(values, divisor) * divisor


def _divide(values: Tensor, divisor: Any, *, rounding_mode: str | None) -> Any:
    if rounding_mode == "floor":
        return torch.floor_divide(values, divisor)
    if rounding_mode == "trunc":
        return _towards_zero(values, divisor)
    return NotImplemented


def _sum(values: Tensor, dtype: torch.dtype | None = None) -> Any:
    return _sum_over(values, None, dtype=dtype)


def _sum_over(
    values: Tensor,
    dims: list[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return sums by running sums, which wrap around; ReduceSum adds in floats."""
    if dtype not in (None, torch.int64):
        return NotImplemented
    sums = values.to(torch.int64)
    axes = sorted(dim % values.dim() for dim in dims or range(values.dim()))
    for axis in reversed(axes):
        sums = torch.cumsum(sums, axis).narrow(axis, values.shape[axis] - 1, 1)
    if keepdim:
        return sums
    for axis in reversed(axes):
        sums = sums.squeeze(axis)
    return sums


def _product(
    values: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if dtype not in (None, torch.int64) or not isinstance(values.shape[dim], int):
        return NotImplemented
    factors = values.to(torch.int64).unbind(dim)
    product = math.prod(factors[1:], start=factors[0])
    return product.unsqueeze(dim) if keepdim else product


def _power(values: Tensor, exponent: Any) -> Any:
    if not isinstance(exponent, int) or exponent < 0:
        return NotImplemented
    power = torch.ones_like(values)
    base = values
    while exponent:
        if exponent % 2:
            power = power * base
        exponent //= 2
        if exponent:
            base = base * base
    return power


def _right_shift(values: Tensor, places: Any) -> Any:
    return _shifted(torch.bitwise_right_shift, values, places)


def _left_shift(values: Tensor, places: Any) -> Any:
    return _shifted(torch.bitwise_left_shift, values, places)


def _shifted(shift: Callable[..., Tensor], values: Tensor, places: Any) -> Any:
    """Return shifted values; ONNX Runtime shifts 64 bits only."""
    if values.dtype == torch.int64:
        return NotImplemented
    return shift(values.to(torch.int64), places).to(values.dtype)


def _is_in(
    values: Tensor, others: Tensor, *, assume_unique: bool = False, invert: bool = False
) -> Tensor:
    is_in = (values.unsqueeze(-1) == others.reshape(-1)).any(-1)
    return ~is_in if invert else is_in


def _searchsorted(
    bounds: Tensor,
    values: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Any:
    """Return the numbers of bounds below each value, which ONNX has no operation for."""
    if bounds.dim() != 1 or sorter is not None:
        return NotImplemented
    each = values.unsqueeze(-1)
    is_below = bounds <= each if right or side == "right" else bounds < each
    return is_below.sum(-1).to(torch.int32 if out_int32 else torch.int64)


_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.isin.Tensor_Tensor: _is_in,
    aten.searchsorted.Tensor: _searchsorted,
}
for _operators, _function in (
    ((aten.maximum.default,), _maximum),
    ((aten.minimum.default,), _minimum),
    ((aten.clamp.default, aten.clamp.Tensor), _clamp),
    ((aten.clamp_min.default, aten.clamp_min.Tensor), _at_least),
    ((aten.clamp_max.default, aten.clamp_max.Tensor), _at_most),
    ((aten.sign.default, aten.sgn.default), _sign),
    ((aten.fmod.Scalar, aten.fmod.Tensor), _fmod),
    ((aten.div.Tensor_mode, aten.div.Scalar_mode), _divide),
    ((aten.sum.default,), _sum),
    ((aten.sum.dim_IntList,), _sum_over),
    ((aten.prod.dim_int,), _product),
    ((aten.pow.Tensor_Scalar,), _power),
    ((aten.__rshift__.Scalar, aten.__rshift__.Tensor), torch.bitwise_right_shift),
    ((aten.__lshift__.Scalar, aten.__lshift__.Tensor), torch.bitwise_left_shift),
    ((aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar), _right_shift),
    ((aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar), _left_shift),
):
    for _operator in _operators:
        _DECOMPOSITIONS[_operator] = _for_integers(_function)
