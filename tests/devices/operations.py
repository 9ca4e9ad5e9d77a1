# SPDX-License-Identifier: Apache-2.0
"""Torch's operations on the fake device: those of the CPU, late.

An operation is queued on the current stream with places of memory. Its result is allocated at once,
so the order of calls decides which memory is whose, and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .memory import Place, allocate, is_fake, is_pinned, memory, pinned
from .streams import NAME, counts, current_queue, queues, wait_for_current

# operations whose result shapes depend on values, or differ between devices
_SHAPED_BY_VALUES = ("embedding_bag", "nonzero", "unique", "masked_select")
_RANDOM = (
    "bernoulli",
    "uniform",
    "normal",
    "random",
    "rand",
    "dropout",
    "multinomial",
    "exponential",
)
LOWERED = ("linear", "addmm", "mm", "matmul", "bmm", "baddbmm", "addbmm")
"""Operations that autocast computes in its dtype."""
ON_CPU_KERNELS = (
    "as_strided",
    "view",
    "view.dtype",
    "_reshape_alias",
    "set_.source_Storage_storage_offset",
    "set_.source_Storage",
    "set_.source_Tensor",
    "unfold",
)
"""Operations that look at shapes and storages alone."""
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


_INTEGERS = torch.zeros(1, dtype=torch.int8)
_shapes: dict[Any, Any] = {}  # results without values, by operation and arguments


def launch(work: Callable[[], None]) -> None:
    """Queue work on the current stream."""
    with queues.lock:
        memory().free_dropped()
        queues.push(current_queue(), work)


def any_operation(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the host's kernels, late."""
    call = _Call(op, args, kwargs)
    return call.in_place() if call.written else call.with_results()


class _Kind:
    """What a call needs to know of an operation.

    Attributes:
        written: place and name of each argument that it writes.
        has_outputs: whether those are given to it, and get the shape that it computes.
        draws: whether it draws numbers.
        shaped_by_values: whether the shapes of its results depend on values.
        num_returns: number of its results.
    """

    def __init__(self, op: Any) -> None:
        self.written = [
            (number, argument.name)
            for number, argument in enumerate(op._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.has_outputs = op._schema.name.endswith("out") or op._overloadname.endswith("out")
        name = str(op)
        is_backward = "backward" in name
        self.draws = not is_backward and any(word in name for word in _RANDOM)
        self.shaped_by_values = not is_backward and any(word in name for word in _SHAPED_BY_VALUES)
        self.num_returns = len(op._schema.returns)


_kind_of = functools.cache(_Kind)


class _Call:
    """The call of an operation.

    Attributes:
        written: the arguments that it writes.
    """

    def __init__(self, op: Any, args: Any, kwargs: Any) -> None:
        self._op = op
        self._args = args
        self._kwargs = kwargs
        self._kind = _kind_of(op)
        self.written = [
            args[number] if number < len(args) else kwargs.get(name)
            for number, name in self._kind.written
        ]
        self._keep()

    def in_place(self) -> Any:
        """Queue it, and return what it writes."""
        if self._kind.draws:
            return self._drawn_in_place()
        if self._kind.has_outputs:
            self._resize_outputs()
        launch(functools.partial(_on_cpu, self._op, *self._kept))
        if self._kind.num_returns < 2:
            return self.written[0] if self._kind.num_returns else None
        return tuple(self.written)

    def with_results(self) -> Any:
        """Queue it, and return its results."""
        if self._kind.draws or self._kind.shaped_by_values:
            return self._at_once()
        shapes = self._shapes()
        if shapes is None:  # torch cannot compute shapes of this operation alone
            return self._at_once()
        results = _mapped(_allocated, shapes)
        of_results = [Place(value) for value in _tensors(results)]
        launch(functools.partial(_into, of_results, self._op, *self._kept))
        return results

    def _keep(self) -> None:
        """Note the arguments for work that is queued: places, which keep no tensor alive."""
        kwargs = {name: self._checked(value) for name, value in self._kwargs.items()}
        self._kept = ([self._checked(value) for value in self._args], kwargs)

    def _checked(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.device.type == NAME:
                return Place(value)
            if value.device.type == "cpu" and value.dim():
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found fake:0 and cpu! "
                    f"({self._op})"
                )
        if isinstance(value, list | tuple):
            return [self._checked(part) for part in value]
        return value

    def _shapes(self) -> Any:
        """Return the results without values; None = torch cannot tell."""
        args, kwargs = self._kept
        key = (self._op, _key(args), *[(name, _key(value)) for name, value in kwargs.items()])
        if key not in _shapes:
            try:
                _shapes[key] = _call(_without_values, self._op, args, kwargs)
            except RuntimeError:
                _shapes[key] = None
        return _shapes[key]

    def _resize_outputs(self) -> None:
        """Give the outputs the shapes that are computed."""
        shapes = _tensors(self._shapes())
        for tensor, shape in zip(self.written, shapes, strict=True):
            if tensor.shape != shape.shape:
                resize(tensor, shape.shape)
                self._keep()

    def _drawn_in_place(self) -> Tensor:
        """Draw when it is called, as the offsets of Philox are drawn, and write late."""
        target = self.written[0]
        drawn = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype)
        self._op(drawn, *self._args[1:], **self._kwargs)
        _write_late(target, drawn)
        return target

    def _at_once(self) -> Any:
        """Wait, and run it: its shape depends on values, or it draws numbers."""
        if any(is_fake(value) for value in tree_leaves((self._args, self._kwargs))):
            wait_for_current(str(self._op))
        return _mapped(_on_device, _on_cpu(self._op, *self._kept))


def _call(change: Callable[[Any], Any], op: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operation with other arguments."""
    others = {name: _mapped(change, value) for name, value in kwargs.items()}
    with torch.no_grad():
        return op(*[_mapped(change, value) for value in args], **others)


_on_cpu = functools.partial(_call, lambda value: _on_host(value))


def _into(places: list[Place], op: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Run an operation on the memory of places, and write its results to others."""
    for place, value in zip(places, _tensors(_on_cpu(op, args, kwargs)), strict=True):
        target = place.host()
        if value.numel() or not target.numel():  # a CPU leaves some results empty
            target.copy_(value)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a value, or the values of a list or a tuple, changed."""
    if isinstance(value, list | tuple):
        return type(value)(change(part) for part in value)
    return change(value)


def _tensors(results: Any) -> list[Tensor]:
    values = results if isinstance(results, list | tuple) else [results]
    return [value for value in values if isinstance(value, Tensor)]


def _key(value: Any) -> Any:
    """Return what the shapes of results depend on."""
    if isinstance(value, Place):
        return value.layout
    if isinstance(value, Tensor):  # a number of Python changes fewer dtypes than a tensor
        return value.dtype, torch.result_type(value, _INTEGERS)
    if isinstance(value, list):
        return tuple(map(_key, value))
    return type(value), value


def _on_host(value: Any) -> Any:
    if isinstance(value, Place):
        return value.host()
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _without_values(value: Any) -> Any:
    if isinstance(value, Place):
        size, stride, dtype = value.layout
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _allocated(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return allocate(value.shape, value.stride(), value.dtype)


def _on_device(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    tensor = _allocated(value)
    _write_late(tensor, value)
    return tensor


def _write_late(target: Tensor, values: Tensor) -> None:
    place = Place(target)
    launch(lambda: place.host().copy_(values))


def dropout(input: Tensor, p: float, train: bool) -> tuple[Tensor, Tensor]:
    """Draw when it is called, as the offsets of Philox are drawn."""
    if not train:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    drawn = torch.empty(input.shape, dtype=torch.bool).bernoulli_(1 - p)
    mask = _on_device(drawn)
    return input.mul(mask).mul_(1 / (1 - p)), mask


def empty(size: Sequence[int], *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    memory_format = memory_format or torch.contiguous_format
    shape = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format)
    return allocate(shape.shape, shape.stride(), shape.dtype)


def empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **_: Any
) -> Tensor:
    return allocate(tuple(size), tuple(stride), dtype or torch.get_default_dtype())


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy within the device, or between it and the host."""
    if is_fake(source) and is_fake(target):
        first, second = Place(source), Place(target)
        launch(lambda: second.host().copy_(first.host()))
    elif is_fake(target):
        _copy_up(source, target, non_blocking)
    else:
        _copy_down(source, target.detach(), non_blocking)
    return target


def _copy_up(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    counts["up, non-blocking" if non_blocking else "up, blocking"] += 1
    # a driver takes pageable memory before it returns, and pinned memory when the copy runs
    values = source.detach() if is_pinned(source) else source.detach().clone()
    _write_late(target, values)
    if not non_blocking:
        queues.finish(current_queue())


def _copy_down(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    is_late = non_blocking and is_pinned(target)
    counts["down, non-blocking" if is_late else "down, blocking"] += 1
    place = Place(source)
    launch(lambda: target.copy_(place.host()))
    if not is_late:
        queues.finish(current_queue())


def to_copy(
    source: Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
    **_: Any,
) -> Tensor:
    """Do what `Tensor.to` does where something changes."""
    dtype = dtype or source.dtype
    device = source.device if device is None else torch.device(device)
    shape = torch.empty_strided(source.shape, source.stride(), device="meta", dtype=source.dtype)
    shape = shape.to(dtype, memory_format=memory_format or torch.preserve_format, copy=True)
    if dtype != source.dtype and device.type == "cpu":
        source = torch.ops.aten._to_copy(source, dtype=dtype)
    if device.type == NAME:
        target = allocate(shape.shape, shape.stride(), dtype)
    elif non_blocking:  # torch pins this target, and returns before the values are there
        target = pinned(shape.shape, dtype=dtype).as_strided(shape.shape, shape.stride())
    else:
        target = torch.empty_strided(shape.shape, shape.stride(), dtype=dtype, device="cpu")
    return copy_from(source, target, non_blocking)


def item(tensor: Tensor) -> Any:
    wait_for_current("item")
    return Place(tensor).host().item()


def resize(tensor: Tensor, size: Sequence[int], memory_format: Any = None) -> Tensor:
    new = allocate(tuple(size), torch.empty(size, device="meta").stride(), tensor.dtype)
    set_to = torch.ops.aten.set_.source_Storage_storage_offset
    set_to.redispatch(_CPU, tensor, new.untyped_storage(), 0, list(size), list(new.stride()))
    return tensor


def on_cpu_kernel(name: str) -> Callable[..., Any]:
    """Return an operation of aten as the CPU performs it."""
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")
    return lambda *args, **kwargs: op.redispatch(_CPU, *args, **kwargs)


def lowered(name: str) -> Callable[..., Any]:
    """Return an operation of aten in the dtype of autocast."""
    op = getattr(torch.ops.aten, name).default
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(value: Any) -> Any:
        is_float = is_fake(value) and value.dtype is torch.float32
        return value.to(torch.get_autocast_dtype(NAME)) if is_float else value

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run
