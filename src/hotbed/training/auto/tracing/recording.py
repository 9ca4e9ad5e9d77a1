# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the lookups of a model that is traced: they record ids and look nothing up."""

from __future__ import annotations

import builtins
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from hotbed.data.batch import Batch
from hotbed.embedding.modules import TableModule
from hotbed.training.auto.lookups import ASKED, name_of

_FOREIGN = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))

# Properties of a weight that are not its numbers.
_ASKED = {*ASKED, "grad", "is_leaf"}


@dataclass(frozen=True)
class TracedLookup:
    """The arguments of a lookup, as the module's forward function takes them."""

    path: str
    ids: Any
    offsets: Any = None
    weights: Any = None

    def parts(self) -> list[Any]:
        """Return the arguments that were given: ids, offsets, weights."""
        return [part for part in (self.ids, self.offsets, self.weights) if part is not None]


class Recorder:
    """Records the lookups of a forward pass, and where weights are read outside of them.

    Args:
        modules: by path, nn.Embedding and nn.EmbeddingBag, what took their place, or modules of
            another kind, see `inspect`.

    Attributes:
        lookups: in the order of the forward pass.
        reads: of each path whose weight was read, by which function and in which line.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        self.lookups: list[TracedLookup] = []
        self.reads: dict[str, str] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Let stand-ins take the place of the lookups of this thread's next forward pass."""
        weights = {}
        before = {}
        for path, module in self.modules.items():
            weights[id(module._parameters.get("weight"))] = path
            before[path] = module.__dict__.get("forward")
            module.__dict__["forward"] = self._stand_in(path, module)
        weights.pop(id(None), None)
        try:
            with _Reads(weights, self.reads):
                yield
        finally:
            for path, module in self.modules.items():
                if before[path] is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = before[path]

    def _stand_in(self, path: str, module: nn.Module) -> Callable[..., Tensor]:
        is_bag = takes_bags(module)
        includes_last = bool(getattr(module, "include_last_offset", False))
        dim = dim_of(module)
        dtype = dtype_of(module)

        def look_up(
            input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
        ) -> Tensor:
            # copies: the code may change its tensors afterwards
            parts: list[Tensor | None] = []
            for part in (input, offsets, per_sample_weights):
                parts.append(None if part is None else part.clone())
            self.lookups.append(TracedLookup(path, *parts))
            shape = [*input.shape, dim]
            if is_bag:
                num_bags = input.shape[0]
                if offsets is not None:
                    num_bags = offsets.shape[0] - int(includes_last)
                shape = [num_bags, dim]
            rows: Tensor = stand_in(input, shape, dtype, f"the rows of {path!r}")
            return rows

        return look_up


def takes_bags(module: nn.Module) -> bool:
    """Return True for nn.EmbeddingBag, and for what took its place."""
    if isinstance(module, TableModule):
        return all(module.pooled)
    return isinstance(module, nn.EmbeddingBag)


def dim_of(module: nn.Module) -> int:
    """Return the width of the rows of a lookup."""
    if isinstance(module, TableModule):
        return module.dims[0]
    dim: Any = module.embedding_dim
    return int(dim)


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the type of the rows of a lookup."""
    weight = module._parameters.get("weight")
    if isinstance(module, TableModule) or weight is None:
        return torch.float32
    return weight.dtype


@torch.library.custom_op("hotbed::stand_in", mutates_args=())
def stand_in(source: Tensor, shape: Sequence[int], dtype: torch.dtype, what: str) -> Tensor:
    """Stand for a tensor whose values a trace does not need, on the device of `source`.

    `what`: it is, for messages.
    """
    raise NotImplementedError  # a trace computes shapes only


@stand_in.register_fake
def _(source: Tensor, shape: Sequence[int], dtype: torch.dtype, what: str) -> Tensor:
    return source.new_empty(shape, dtype=dtype)


class _Reads(TorchFunctionMode):
    """Notes each function that reads a weight, and stands in for one that fixes sizes."""

    def __init__(self, weights: Mapping[int, str], reads: dict[str, str]) -> None:
        super().__init__()
        self.weights = weights
        self.reads = reads

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name == "_pad_packed_sequence":
            return _padded(*args, **kwargs)
        if name not in _ASKED:
            for value in _flat([*args, *kwargs.values()]):
                path = self.weights.get(id(value))
                if path is not None:
                    self.reads.setdefault(path, f"by {name}() {site()}".strip())
        return func(*args, **kwargs)


def _padded(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, length: int
) -> tuple[Tensor, Tensor]:
    """Return what pad_packed_sequence returns, in shape."""
    num_samples: Any = batch_sizes[0].long().item()  # torch.export takes it for a float
    axes = (num_samples, length) if batch_first else (length, num_samples)
    what = "a packed sequence"
    shape = [*axes, *data.shape[1:]]
    padded = stand_in(data, shape, data.dtype, what)
    lengths = stand_in(batch_sizes, [num_samples], torch.int64, what)
    return padded, lengths


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


_PLAIN = frozenset([list, tuple, dict, set, str])

_TRACE = threading.RLock()
"""Held while `len` is replaced, so that the second of two traces cannot restore the first one's."""


@contextmanager
def symbolic_len() -> Iterator[None]:
    """Let `len(tensor)` be a symbol: it asks for a plain integer, which would fix the size.

    The code of a model, and all that it calls, finds `len` among the builtins of the process, so it
    is replaced there. Only the thread that traces gets the symbol; every other thread gets what the
    builtin returns or raises. No thread but one that traces, too, waits for the lock.
    """
    tracing_thread = threading.get_ident()
    with _TRACE:
        plain = builtins.len

        def symbolic(value: Any, /) -> Any:
            # first: torch itself asks for the lengths of these thousands of times a trace
            if type(value) in _PLAIN or threading.get_ident() != tracing_thread:
                return plain(value)
            if isinstance(value, fx.Proxy):
                return value.tracer.create_proxy("call_function", length, (value,), {})
            if isinstance(value, Tensor) and value.dim():
                return value.shape[0]
            if isinstance(value, Batch):
                return value.num_samples
            return plain(value)

        builtins.len = symbolic
        try:
            yield
        finally:
            builtins.len = plain


def length(value: Any) -> Any:
    """Return the length of a tensor or a list, in the graph of a trace."""
    return value.shape[0] if isinstance(value, Tensor) else len(value)


def site() -> str:
    """Return the line of the user's code that runs now, such as "at model.py:12", or ""."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not file.startswith(_FOREIGN) and not file.startswith("<"):
            return f"at {Path(file).name}:{line}"
    return ""


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules of `model`, and random states, at the end.

    The code of a model may count its calls or keep its last input; a trace leaves nothing behind.
    Gradients are away meanwhile: torch.export would look at them, and those of tables have shapes
    of their own.
    """
    contents: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        tensors = (module._parameters, module._buffers, module._modules)
        for attributes in (module.__dict__, *tensors):
            if isinstance(attributes, dict):  # a scripted module keeps its own elsewhere
                contents.append((attributes, dict(attributes)))
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    states = (random.getstate(), np.random.get_state())
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for attributes, before in contents:
            attributes.clear()
            attributes.update(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
