# SPDX-License-Identifier: Apache-2.0
"""Files of the dense parameters, of batch statistics, and of their optimizer state.

The parameters are float32, one behind the other, layer by layer in the order of the graph. A
matrix is [inputs, outputs], which is the transposed one of torch.
"""

from __future__ import annotations

import bisect
import itertools
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotbed.compat.hugectr.translate import DenseWeight, Translation
from hotbed.compat.hugectr.weights.arrays import FLOAT, check_size, read_array
from hotbed.compat.hugectr.weights.rows import check_squares, warn_of_sums
from hotbed.config import parse_json
from hotbed.embedding.rule import momentum_of, velocity
from hotbed.errors import FormatError, PersistError
from hotbed.files import new_file
from hotbed.optim.ftrl import FtrlOptimizer
from hotbed.optim.momentum import MomentumOptimizer

log = logging.getLogger("hotbed.compat.hugectr")

_MOMENTUM = "momentum_buffer"
_STATES: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.Adagrad: ("sum",),
    torch.optim.RMSprop: ("square_avg",),
    FtrlOptimizer: ("n", "z"),
    MomentumOptimizer: (_MOMENTUM,),
}
"""The states of a parameter in torch, in the order of HugeCTR's file."""
_SQUARES = ("exp_avg_sq", "sum", "square_avg", "n")
"""States that sum squares."""
_COUNTING = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop)
"""Optimizers that count the steps of a parameter."""


def save_dense(path: str | Path, network: nn.Module, translation: Translation) -> None:
    """Write the parameters of a network, and `<path>.ntp.json` if it normalizes batches."""
    state = _tensors(network)
    _write(Path(path), (_stored(weight, state) for weight in translation.dense_weights))
    if translation.statistics:
        layers = []
        for mean, variance in _pairs(translation.statistics):
            entry: dict[str, Any] = {"type": "BatchNorm"}
            entry["mean"] = _stored(mean, state).tolist()
            entry["var"] = _stored(variance, state).tolist()
            layers.append(entry)
        with new_file(_statistics_path(path)) as file:
            file.write(json.dumps({"layers": layers}, indent=2).encode())


def load_dense(
    path: str | Path, network: nn.Module, translation: Translation, statistics_path: str | Path = ""
) -> None:
    """Read what `save_dense` or HugeCTR wrote.

    Args:
        path: of the parameters.
        network: takes them.
        translation: of the graph.
        statistics_path: of the means and variances of batches; `<path>.ntp.json` if empty. Without
            the latter they stay as they are.

    Raises:
        PersistError: there is no such file.
        FormatError: a file does not have the size of the model's parameters. Nothing has changed.
    """
    values = _read(Path(path), translation.dense_weights, 1)
    if statistics_path and not Path(statistics_path).exists():
        raise PersistError(
            f"{statistics_path}: expected the means and variances of batches, got no such file. "
            "Correct the path."
        )
    beside = Path(statistics_path or _statistics_path(path))
    statistics = _read_statistics(beside, translation.statistics)
    state = _tensors(network)
    for weight, array in zip(translation.dense_weights, values, strict=True):
        _load(weight, state, array)
    for weight, array in statistics:
        _load(weight, state, array)


def save_dense_states(
    path: str | Path,
    optimizer: torch.optim.Optimizer | None,
    network: nn.Module,
    translation: Translation,
) -> None:
    """Write the optimizer state of the dense parameters: each kind of state of all of them.

    A parameter that has not been updated has zeros.
    """
    arrays = []
    for name in _state_names(optimizer):
        states = _states(optimizer, network, name, new=False)
        if name == _MOMENTUM:
            rate = _rate(optimizer)
            states = {path: velocity(state, rate) for path, state in states.items()}
        arrays += [_stored(weight, states) for weight in translation.dense_weights]
    _write(Path(path), arrays)


def load_dense_states(
    path: str | Path,
    optimizer: torch.optim.Optimizer | None,
    network: nn.Module,
    translation: Translation,
    step: int = 0,
) -> None:
    """Read the optimizer state of the dense parameters.

    Args:
        path: of the file.
        optimizer: a torch optimizer over the network's dense parameters.
        network: the network.
        translation: of the graph.
        step: how many steps the state has seen. The file does not say it, and in HugeCTR the
            correction of Adam's bias starts anew.

    Raises:
        PersistError: there is no such file.
        FormatError: it does not have the size of the model's state. Nothing has changed.
        ConfigError: the optimizer is torch's SGD with momentum, and its rate is 0.
    """
    names = _state_names(optimizer)
    weights = translation.dense_weights
    arrays = _read(Path(path), weights, len(names))
    count = len(weights)
    blocks = [arrays[place * count : (place + 1) * count] for place in range(len(names))]
    for name, block in zip(names, blocks, strict=True):
        if name in _SQUARES:
            for array in block:
                check_squares(Path(path), array)
        elif name == _MOMENTUM:
            warn_of_sums(Path(path), max(block, key=len))
    for name, block in zip(names, blocks, strict=True):
        states = _states(optimizer, network, name, new=True)
        for weight, array in zip(weights, block, strict=True):
            stored = array
            if name == _MOMENTUM:
                stored = momentum_of(array, _rate(optimizer))
            _load(weight, states, stored)
    if isinstance(optimizer, _COUNTING):
        for state in optimizer.state.values():
            state["step"] = torch.tensor(float(step))


# --- parameters by name ---------------------------------------------------------------------------


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a network; those of rows are not asked for."""
    parameters = dict(network.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(network.named_buffers(remove_duplicate=False))}


def _stored(weight: DenseWeight, tensors: Mapping[str, Tensor]) -> np.ndarray[Any, Any]:
    """Return a parameter as HugeCTR stores it."""
    part = _part(weight, tensors).detach().cpu()
    if weight.transposed:
        part = part.T
    return np.ascontiguousarray(part.numpy(), FLOAT).reshape(weight.shape)


def _load(weight: DenseWeight, tensors: Mapping[str, Tensor], array: np.ndarray[Any, Any]) -> None:
    """Copy an array of HugeCTR's shape into a parameter."""
    values = array.T if weight.transposed else array
    part = _part(weight, tensors)
    with torch.no_grad():
        part.copy_(torch.from_numpy(np.array(values)).reshape(part.shape))


def _part(weight: DenseWeight, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor of a parameter; zeros for one that only HugeCTR has."""
    if not weight.path:
        return torch.zeros(weight.shape)
    return tensors[weight.path]


# --- files ----------------------------------------------------------------------------------------


def _write(path: Path, arrays: Iterable[np.ndarray[Any, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as file:
        for array in arrays:
            file.write(array.tobytes())


def _read(
    path: Path, weights: Sequence[DenseWeight], num_blocks: int
) -> list[np.ndarray[Any, Any]]:
    """Return the arrays of a file that holds all weights, `num_blocks` times."""
    sizes = [math.prod(weight.shape) for weight in weights]
    num_floats = sum(sizes) * num_blocks
    check_size(path, num_floats * FLOAT.itemsize, f"{num_floats} numbers of the dense layers")
    flat = read_array(path, FLOAT, "numbers")
    _check_finite(path, flat, weights)
    arrays = []
    first = 0
    for weight, size in zip([*weights] * num_blocks, sizes * num_blocks, strict=True):
        arrays.append(flat[first : first + size].reshape(weight.shape))
        first += size
    return arrays


def _check_finite(path: Path, flat: np.ndarray[Any, Any], weights: Sequence[DenseWeight]) -> None:
    """Raise FormatError with the layer of a number that is NaN or infinite."""
    is_wrong = ~np.isfinite(flat)
    if not is_wrong.any():
        return
    place = int(np.argmax(is_wrong))
    ends = list(itertools.accumulate(math.prod(weight.shape) for weight in weights))
    layer = weights[bisect.bisect(ends, place % ends[-1])].layer  # states are blocks of all weights
    raise FormatError(
        f"{path}: expected finite numbers, got {flat[place]} at number {place}, of layer {layer!r}."
        " Give the file of a training that did not diverge."
    )


def _statistics_path(path: str | Path) -> Path:
    return Path(f"{path}.ntp.json")


def _pairs(statistics: Sequence[DenseWeight]) -> list[tuple[DenseWeight, DenseWeight]]:
    """Return mean and variance of each layer."""
    return list(zip(statistics[::2], statistics[1::2], strict=True))


def _read_statistics(
    path: Path, statistics: Sequence[DenseWeight]
) -> list[tuple[DenseWeight, np.ndarray[Any, Any]]]:
    """Return means and variances from the JSON file beside the dense one."""
    if not statistics:
        return []
    if not path.exists():
        log.warning(
            "%s: not found, so the means and variances of batch normalization stay as they are",
            path,
        )
        return []
    pairs = _pairs(statistics)
    try:
        layers = parse_json(path.read_text())["layers"]
        entries = [(layer["type"], layer["mean"], layer["var"]) for layer in layers]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{path}: expected layers with type, mean and var, got {type(error).__name__}: {error}."
            " Give the file that HugeCTR wrote."
        ) from error
    if len(entries) != len(pairs):
        raise FormatError(
            f"{path}: expected {len(pairs)} layers with batch statistics, got {len(entries)}. Give "
            "the file of this very model."
        )
    arrays = []
    for (kind, *values), weights in zip(entries, pairs, strict=True):
        for weight, numbers in zip(weights, values, strict=True):
            if kind != "BatchNorm" or len(numbers) != math.prod(weight.shape):
                raise FormatError(
                    f"{path}: expected {math.prod(weight.shape)} numbers of BatchNorm "
                    f"{weight.layer!r}, got {len(numbers)} of {kind}. Give the file of this very "
                    "model."
                )
            array = np.array(numbers, FLOAT)
            _check_finite(path, array, [weight])
            arrays.append((weight, array.reshape(weight.shape)))
    return arrays


# --- optimizer state ------------------------------------------------------------------------------


def _state_names(optimizer: torch.optim.Optimizer | None) -> tuple[str, ...]:
    """Return the states of a parameter."""
    if isinstance(optimizer, torch.optim.SGD):
        has_momentum = any(group["momentum"] for group in optimizer.param_groups)
        return (_MOMENTUM,) if has_momentum else ()
    if optimizer is None:
        return ()
    return _STATES[type(optimizer)]


def _rate(optimizer: torch.optim.Optimizer | None) -> float:
    """Return the learning rate that HugeCTR's momentum contains, and the optimizer's does not."""
    assert optimizer is not None
    if isinstance(optimizer, MomentumOptimizer):
        return 1.0
    return float(optimizer.param_groups[0]["lr"])


def _states(
    optimizer: torch.optim.Optimizer | None, network: nn.Module, name: str, *, new: bool
) -> dict[str, Tensor]:
    """Return a state of each parameter by its path.

    Args:
        optimizer: that has it.
        network: with the parameters.
        name: of the state.
        new: whether the optimizer keeps the first value of a state that it does not have yet.
    """
    assert optimizer is not None
    states = {}
    groups = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            groups[id(parameter)] = group
    for path, parameter in network.named_parameters():
        group = groups.get(id(parameter), {})
        state = optimizer.state[parameter] if new and group else optimizer.state.get(parameter, {})
        tensor = state.get(name)
        if tensor is None:
            first = group.get("initial_accumulator", 0.0) if name == "n" else 0.0
            tensor = torch.full_like(parameter, first, requires_grad=False)
            state[name] = tensor
        states[path] = tensor
    return states
