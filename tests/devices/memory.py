# SPDX-License-Identifier: Apache-2.0
"""The memory of the fake device, and pinned memory of the host.

All of it is one file that is mapped twice: torch's addresses are those of a mapping without access,
so an access by the host is a SIGSEGV, and operations use the other mapping. Memory is filled with
NaN bits when it is freed: then its stream may give it to something else, as the caching allocator
of CUDA does.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .queues import Queue
from .streams import NAME, Stream, current_queue, queues

_NUM_BYTES = 4 << 30  # of addresses: memory is used when something is written there
_ALIGNMENT = 64
_MAX_BLOCKS = 1 << 16
_libc = ctypes.CDLL(None)
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
# torch may drop a tensor on any of its threads, where Python cannot be called safely: so the
# deleter is a function of C that overwrites the address, see `Memory.free_dropped`
_DELETER = ctypes.cast(_libc.time, ctypes.c_void_p)


class Block:
    """The memory of one storage.

    Attributes:
        begin: its first byte in the memory of the device.
        size: bytes.
        users: queues that `record_stream` named.
    """

    def __init__(self, begin: int, size: int) -> None:
        self.begin = begin
        self.size = size
        self.queue = current_queue()
        self.users: set[Queue] = set()


class Memory:
    """The memory of the device.

    Attributes:
        address: of its first byte, as torch knows it.
        blocks: those that torch holds, by address.
    """

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(_NUM_BYTES)
            self._map = mmap.mmap(file.fileno(), _NUM_BYTES)
            self._locked = mmap.mmap(file.fileno(), _NUM_BYTES, prot=0)
        self.address = np.frombuffer(self._locked, np.uint8).ctypes.data
        self.blocks: dict[int, Block] = {}
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._views = {torch.uint8: self._bytes}
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # begins by size
        # what torch was given, and the address that it finds there until it drops the tensor
        self._managed = (_DLManaged * _MAX_BLOCKS)()
        words = np.frombuffer(self._managed, np.int64)
        self._now = words.reshape(_MAX_BLOCKS, -1)[:, 0]
        self._given = np.zeros(_MAX_BLOCKS, np.int64)
        self._num_used = 0
        self._unused: list[int] = []

    def view(self, dtype: torch.dtype, *view: Any) -> Tensor:
        """Return a part as operations use it.

        `view`: size, stride and offset, as in `torch.as_strided`.
        """
        if dtype not in self._views:
            self._views[dtype] = self._bytes.view(dtype)
        return self._views[dtype].as_strided(*view)

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of the device in memory of its own."""
        last = -1
        if all(size):
            last = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        with queues.lock:
            self.free_dropped()
            block = self._block((last + 1) * dtype.itemsize)
            address = self.address + block.begin
            self.blocks[address] = block
            number = self._unused.pop() if self._unused else self._num_used
            self._num_used = max(self._num_used, number + 1)
            managed = self._managed[number]
            managed.tensor = _dl_tensor(address, size, stride, dtype)
            managed.deleter = _DELETER
            self._given[number] = address
        capsule = _new_capsule(ctypes.addressof(managed), b"dltensor", None)
        tensor: Tensor = torch._C._from_dlpack(capsule)
        return tensor

    def free_dropped(self) -> None:
        """Free the blocks whose tensors torch has dropped.

        The queue of the allocation may use them again, once the queues of users have come there.
        """
        used = slice(self._num_used)
        for number in np.flatnonzero(self._now[used] != self._given[used]).tolist():
            block = self.blocks.pop(int(self._given[number]))
            self._now[number] = self._given[number] = 0
            self._unused.append(number)
            for queue in block.users:
                queues.push_wait(block.queue, queues.record(queue))
            queues.push(block.queue, functools.partial(self._poison, block))

    def _block(self, num_bytes: int) -> Block:
        """Return memory that is not used."""
        size = max(1 << (num_bytes - 1).bit_length(), _ALIGNMENT)
        if self._free[size]:
            return Block(self._free[size].pop(), size)
        block = Block(self._end, size)
        self._end += size
        self._bytes[block.begin : self._end].fill_(0xFF)
        return block

    def _poison(self, block: Block) -> None:
        self._bytes[block.begin : block.begin + block.size].fill_(0xFF)
        self._free[block.size].append(block.begin)


def _dl_tensor(
    address: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> _DLTensor:
    dims = len(size)
    code = _CODES.get(dtype, 2 if dtype.is_floating_point else int(not dtype.is_signed))
    lengths = (ctypes.c_int64 * dims)(*size)
    steps = (ctypes.c_int64 * dims)(*stride)
    bits = 8 * dtype.itemsize
    return _DLTensor(address, _OF_TORCH_BACKEND, 0, dims, code, bits, 1, lengths, steps, 0)


@functools.cache
def memory() -> Memory:
    """Return the memory of this process: a fork would share it, so it is made when it is used."""
    return Memory()


def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of the device in memory of its own."""
    return memory().allocate(size, stride, dtype)


def is_fake(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


class Place:
    """What a queued operation knows of a tensor; it does not keep the memory from being freed.

    `layout`: its shape, stride and dtype.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.layout = (tensor.size(), tensor.stride(), tensor.dtype)
        address = tensor.data_ptr()  # 0 if it has no values
        self._offset = (address - memory().address) // tensor.itemsize if address else 0

    def host(self) -> Tensor:
        """Return the tensor as operations use it."""
        size, stride, dtype = self.layout
        return memory().view(dtype, size, stride, self._offset)


_pinned: dict[int, Tensor] = {}  # by address; they live on, so that no other memory gets it


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
    memory().blocks[tensor.untyped_storage().data_ptr()].users.add(stream.queue)
