# SPDX-License-Identifier: Apache-2.0
"""Torch's device "fake", on the backend that torch keeps for devices of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import hotbed

from . import operations
from .memory import empty_maybe_pinned, is_fake, is_pinned, pinned, record_stream
from .queues import Queues
from .streams import NAME, Event, Stream, current_stream, queues, set_stream

NAMES_STREAMS = "streams.py"
"""The file of Hotbed that waits for others; a wait is known by the line that calls it."""

_libraries: list[torch.library.Library] = []
_torch_deepcopy = Tensor.__deepcopy__


class _Module:
    """What `torch.fake` is."""

    Stream = Stream
    Event = Event
    current_stream = staticmethod(current_stream)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: numbers are drawn by the generator of the CPU."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def default_stream(self, device: Any = None) -> Stream:
        return Stream(queue=queues.queues[0])

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with stream:
            yield

    def synchronize(self, device: Any = None) -> None:
        queues.finish()


def install() -> Queues:
    """Give this process the device, and return its queues; each test then resets their schedule.

    Call it before the first backward pass: torch starts a thread for each device then.
    """
    if not _libraries:
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
        _register_operations()
        _replace_functions()
        queues.watch(str(Path(hotbed.__file__).parent), (NAMES_STREAMS,))
    return queues


def _register_operations() -> None:
    every = torch.library.Library("_", "IMPL")
    every.fallback(operations.any_operation, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    own = {
        "_copy_from": operations.copy_from,
        "_local_scalar_dense": operations.item,
        "_to_copy": operations.to_copy,
        "empty.memory_format": operations.empty,
        "empty_strided": operations.empty_strided,
        "native_dropout": operations.dropout,
        "resize_": operations.resize,
    }
    own |= {name: operations.on_cpu_kernel(name) for name in operations.ON_CPU_KERNELS}
    for name, function in own.items():
        aten.impl(name, function, "PrivateUse1")
    for name in operations.LOWERED:
        aten.impl(name, operations.lowered(name), "AutocastPrivateUse1")
    _libraries.extend((every, aten))


def _replace_functions() -> None:
    """Replace functions of torch that know no pinned memory, streams or events of such a backend."""
    # `to()` keeps parameters, as on CUDA
    torch.__future__.set_swap_module_params_on_conversion(True)
    replaced: Any = torch
    replaced.empty = empty_maybe_pinned
    replaced.Stream = Stream
    replaced.Event = Event
    of_tensors: Any = Tensor
    of_tensors.is_pinned = lambda tensor, device=None: is_pinned(tensor)
    of_tensors.pin_memory = lambda tensor, device=None: _in_pinned_memory(tensor)
    of_tensors.record_stream = record_stream
    of_tensors.__deepcopy__ = _deepcopy
    accelerator: Any = torch.accelerator
    accelerator.current_stream = current_stream
    accelerator.set_stream = set_stream
    accelerator.synchronize = lambda device=None: queues.finish()


def _in_pinned_memory(tensor: Tensor) -> Tensor:
    return pinned(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Any:
    """Copy a tensor: torch would allocate its storage in C++."""
    if not is_fake(tensor) or not tensor.is_leaf:
        return _torch_deepcopy(tensor, memo)
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]
