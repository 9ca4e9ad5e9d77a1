# SPDX-License-Identifier: Apache-2.0
"""The memory of the fake device, and pinned memory of the host.

Pages of the device have no access outside of its operations, so an access by the host is a SIGSEGV.
They are filled with NaN bits when they are allocated, and again when they are freed: then their
stream may give them to something else, as the caching allocator of CUDA does.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .queues import Queue
from .streams import NAME, Stream, current_stream, queues

_PAGE = mmap.PAGESIZE
_NO_ACCESS = 0
_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_libc = ctypes.CDLL(None)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_torch_empty = torch.empty


class _DLTensor(ctypes.Structure):
    """A tensor as DLPack describes it."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManaged(ctypes.Structure):
    """A tensor of DLPack with what torch calls when it drops it."""

    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_OF_TORCH_BACKEND = 12  # DLPack's number of the device that a backend of one's own has
_CODES = {torch.bool: 6, torch.bfloat16: 4}
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_blocks: dict[int, Block] = {}  # by address
_held: set[Block] = set()  # by tensors of torch
_pinned: dict[int, Tensor] = {}  # by address; they live on, so that no other memory gets it


class Block:
    """The memory of one storage of the device.

    Attributes:
        host: its bytes, which only an operation may read or write, between `open` and `close`.
        users: queues that `record_stream` named.
        managed: as DLPack gives it to torch.
    """

    def __init__(self, num_bytes: int) -> None:
        self._size = max(-(-num_bytes // _PAGE), 1) * _PAGE
        self._map = mmap.mmap(-1, self._size)
        self.host = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.host.data_ptr()
        self.users: set[Queue] = set()
        self.managed = _DLManaged()
        self._queue = current_stream().queue
        self._num_open = 0
        self.host.fill_(0xFF)
        self._protect(_NO_ACCESS)

    def open(self) -> None:
        if self._num_open == 0:
            self._protect(_READ_AND_WRITE)
        self._num_open += 1

    def close(self) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._protect(_NO_ACCESS)

    def free(self) -> None:
        """Let the queue of the allocation reuse it, once the queues of its users have come there."""
        for queue in self.users:
            mark = queues.record(queue)
            queues.push_wait(self._queue, mark)
        queues.push(self._queue, self._poison)

    def _poison(self) -> None:
        self.open()
        self.host.fill_(0xFF)
        self.close()
        _blocks.pop(self.address, None)

    def _protect(self, access: int) -> None:
        _libc.mprotect(self.address, self._size, access)


def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of the device with new memory."""
    last = -1
    if all(size):
        last = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    with queues.lock:
        free_dropped()
        block = Block((last + 1) * dtype.itemsize)
        _blocks[block.address] = block
        _held.add(block)
    code = _CODES.get(dtype, 2 if dtype.is_floating_point else int(not dtype.is_signed))
    dims = len(size)
    shape = (ctypes.c_int64 * max(dims, 1))(*size)
    strides = (ctypes.c_int64 * max(dims, 1))(*stride)
    managed = block.managed
    managed.tensor = _DLTensor(
        block.address, _OF_TORCH_BACKEND, 0, dims, code, 8 * dtype.itemsize, 1, shape, strides, 0
    )
    # torch may drop a tensor on any of its threads, where Python cannot be called safely: so the
    # deleter is a function of C that overwrites the address, see `free_dropped`
    managed.deleter = ctypes.cast(_libc.time, ctypes.c_void_p)
    capsule = _new_capsule(ctypes.addressof(managed), b"dltensor", None)
    tensor: Tensor = torch._C._from_dlpack(capsule)
    return tensor


def free_dropped() -> None:
    """Free the blocks whose tensors torch has dropped."""
    for block in [block for block in _held if block.managed.tensor.data != block.address]:
        _held.remove(block)
        block.free()


def is_fake(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


class Place:
    """What a queued operation knows of a tensor; it does not keep the memory from being freed."""

    def __init__(self, tensor: Tensor) -> None:
        self.block = _blocks[tensor.untyped_storage().data_ptr()]
        self._view = (tensor.size(), tensor.stride(), tensor.storage_offset())
        self._dtype = tensor.dtype

    def host(self) -> Tensor:
        """Return the tensor in the memory of the block, which is open."""
        whole = self.block.host
        end = len(whole) // self._dtype.itemsize * self._dtype.itemsize
        return whole[:end].view(self._dtype).as_strided(*self._view)


def pinned(*size: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of the host in pinned memory."""
    tensor = _torch_empty(*size, dtype=dtype or torch.get_default_dtype(), device="cpu")
    _pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned


def empty_maybe_pinned(*size: Any, pin_memory: bool = False, **settings: Any) -> Tensor:
    """Do what `torch.empty` does."""
    if not pin_memory:
        return _torch_empty(*size, **settings)
    settings.pop("device", None)
    return pinned(*size, **settings)


def record_stream(tensor: Tensor, stream: Stream) -> None:
    """Do what `Tensor.record_stream` does."""
    _blocks[tensor.untyped_storage().data_ptr()].users.add(stream.queue)
