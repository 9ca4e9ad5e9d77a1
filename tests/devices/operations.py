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
from torch.utils._pytree import tree_flatten, tree_map

from .memory import Place, allocate, free_dropped, is_fake, is_pinned, pinned
from .streams import NAME, counts, current_stream, queues, wait_for_current

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


def launch(places: Sequence[Place], work: Callable[[], None]) -> None:
    """Queue work on the memory of some places."""

    def task() -> None:
        for place in places:
            place.block.open()
        try:
            work()
        finally:
            for place in places:
                place.block.close()

    with queues.lock:
        free_dropped()
        queues.push(current_stream().queue, task)


def any_operation(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the host's kernels, late."""
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    if any(tensor.device.type == "cpu" and tensor.dim() for tensor in tensors):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found fake:0 and cpu! ({op})"
        )
    places = {id(tensor): Place(tensor) for tensor in tensors if is_fake(tensor)}
    call = _Call(op, args, kwargs, places)
    if call.written:
        return call.in_place()
    return call.with_results()


class _Call:
    """The call of an operation.

    Attributes:
        written: the arguments that it writes.
    """

    def __init__(self, op: Any, args: Any, kwargs: Any, places: dict[int, Place]) -> None:
        self._op = op
        self._args = args
        self._kwargs = kwargs
        self._places = places
        self.written = [
            args[number] if number < len(args) else kwargs.get(argument.name)
            for number, argument in enumerate(op._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        # what is queued keeps no tensor alive: it knows places, and nothing of this object
        kept = tree_map(lambda value: places.get(id(value), value), (args, kwargs))
        self._run = functools.partial(_on_cpu, op, kept)

    def in_place(self) -> Any:
        """Queue it, and return what it writes."""
        if self._is_one_of(_RANDOM):
            return self._drawn_in_place()
        if self._op._schema.name.endswith("out") or self._op._overloadname.endswith("out"):
            self._resize_outputs()
        launch(list(self._places.values()), self._run)
        num_returns = len(self._op._schema.returns)
        if num_returns < 2:
            return self.written[0] if num_returns else None
        return tuple(self.written)

    def with_results(self) -> Any:
        """Queue it, and return its results."""
        if self._is_one_of((*_RANDOM, *_SHAPED_BY_VALUES)):
            return self._at_once()
        try:
            shapes = self._shapes()
        except RuntimeError:  # torch cannot compute shapes of this operation alone
            return self._at_once()
        results = tree_map(_allocated, shapes)
        of_results = [Place(value) for value in tree_flatten(results)[0] if is_fake(value)]
        run = self._run

        def work() -> None:
            values = [v for v in tree_flatten(run())[0] if isinstance(v, Tensor)]
            for place, value in zip(of_results, values, strict=True):
                if value.numel() or not place.host().numel():  # a CPU leaves some results empty
                    place.host().copy_(value)

        launch([*self._places.values(), *of_results], work)
        return results

    def _shapes(self) -> Any:
        args, kwargs = tree_map(_without_values, (self._args, self._kwargs))
        with torch.no_grad():
            return self._op(*args, **kwargs)

    def _is_one_of(self, words: Sequence[str]) -> bool:
        name = str(self._op)
        return any(word in name for word in words) and "backward" not in name

    def _resize_outputs(self) -> None:
        """Give the outputs the shapes that are computed."""
        for tensor, shape in zip(self.written, tree_flatten(self._shapes())[0], strict=True):
            if tensor.shape != shape.shape:
                resize(tensor, shape.shape)
                self._places[id(tensor)].__dict__.update(Place(tensor).__dict__)

    def _drawn_in_place(self) -> Tensor:
        """Draw when it is called, as the offsets of Philox are drawn, and write late."""
        target = self.written[0]
        drawn = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype)
        self._op(drawn, *self._args[1:], **self._kwargs)
        place = Place(target)
        launch([place], lambda: place.host().copy_(drawn))
        return target

    def _at_once(self) -> Any:
        """Wait, and run it: its shape depends on values, or it draws numbers."""
        if self._places:
            wait_for_current(str(self._op))
        for place in self._places.values():
            place.block.open()
        try:
            results = self._run()
        finally:
            for place in self._places.values():
                place.block.close()
        return tree_map(_on_device, results)


def _on_cpu(op: Any, kept: Any) -> Any:
    """Run an operation on the memory of places."""
    args, kwargs = tree_map(_on_host, kept)
    with torch.no_grad():
        return op(*args, **kwargs)


def _on_host(value: Any) -> Any:
    if isinstance(value, Place):
        return value.host()
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _without_values(value: Any) -> Any:
    if is_fake(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _allocated(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return allocate(value.shape, value.stride(), value.dtype)


def _on_device(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    tensor = _allocated(value)
    place = Place(tensor)
    launch([place], lambda: place.host().copy_(value))
    return tensor


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
        launch([first, second], lambda: second.host().copy_(first.host()))
    elif is_fake(target):
        _copy_up(source, target, non_blocking)
    else:
        _copy_down(source, target.detach(), non_blocking)
    return target


def _copy_up(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    counts["up, non-blocking" if non_blocking else "up, blocking"] += 1
    place = Place(target)
    # a driver takes pageable memory before it returns, and pinned memory when the copy runs
    values = source.detach() if is_pinned(source) else source.detach().clone()
    launch([place], lambda: place.host().copy_(values))
    if not non_blocking:
        queues.finish(current_stream().queue)


def _copy_down(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    is_late = non_blocking and is_pinned(target)
    counts["down, non-blocking" if is_late else "down, blocking"] += 1
    place = Place(source)
    launch([place], lambda: target.copy_(place.host()))
    if not is_late:
        queues.finish(current_stream().queue)


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
    place = Place(tensor)
    place.block.open()
    value = place.host().item()
    place.block.close()
    return value


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
