# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for recurrent layers over packed sequences, which torch.export cannot follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .recording import stand_in


@contextmanager
def packed_stand_ins(model: nn.Module) -> Iterator[None]:
    """Let the recurrent layers of `model` return tensors of the right shape for packed sequences.

    A trace of ids needs no more: these tensors depend on parameters that learn.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for layer in layers:
        layer.__dict__["forward"] = _stand_in(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


@contextmanager
def packed_layers(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list of the recurrent layers that run over packed sequences, as they are called."""
    paths: list[str] = []

    def note(path: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], PackedSequence) and path not in paths:
            paths.append(path)

    hooks = []
    for path, layer in model.named_modules():
        if isinstance(layer, nn.RNNBase):
            hooks.append(layer.register_forward_pre_hook(partial(note, path)))
    try:
        yield paths
    finally:
        for hook in hooks:
            hook.remove()


def _stand_in(layer: nn.RNNBase) -> Callable[..., Any]:
    plain: Callable[..., Any] = layer.forward

    def run(input: Tensor | PackedSequence, hx: Any = None) -> Any:
        if not isinstance(input, PackedSequence):
            return plain(input, hx)
        data = input.data
        num_directions = 1 + int(layer.bidirectional)
        num_outputs = layer.proj_size or layer.hidden_size
        num_samples: Any = input.batch_sizes[0].long().item()
        if input.unsorted_indices is not None:
            num_samples = input.unsorted_indices.shape[0]
        what = f"the outputs of {type(layer).__name__}"
        shape = [data.shape[0], num_directions * num_outputs]
        packed = PackedSequence(stand_in(data, shape, data.dtype, what), *input[1:])
        axes = (layer.num_layers * num_directions, num_samples)
        last = stand_in(data, [*axes, num_outputs], data.dtype, what)
        if layer.mode == "LSTM":
            return packed, (last, stand_in(data, [*axes, layer.hidden_size], data.dtype, what))
        return packed, last

    return run
