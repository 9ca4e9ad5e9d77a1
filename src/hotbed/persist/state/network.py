# SPDX-License-Identifier: Apache-2.0
"""The dense part of a state: parameters, state of the optimizers, and random generators."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from hotbed.embedding.modules.state import dense_state
from hotbed.errors import PersistError
from hotbed.optim.sparse import SparseOptimizer
from hotbed.persist.container.format import Reader

log = logging.getLogger("hotbed.persist")
_NOT_LOADED = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_LISTS = ("params", "tables")  # members of groups that torch or the tables' optimizer keep as lists


def network_tensors(network: nn.Module, rows: Iterable[nn.Parameter]) -> dict[str, Tensor]:
    """Return copies of the network's parameters and buffers by `network/<name>`, without `rows`."""
    tensors = {}
    for name, tensor in _dense_tensors(network, rows).items():
        tensors[f"network/{name}"] = _copy(tensor)
    return tensors


def load_network(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load what `network_tensors` returned into a network that `network_misfit` accepts."""
    network.load_state_dict(_saved_tensors(tensors), strict=False)


def network_misfit(
    network: nn.Module, rows: Iterable[nn.Parameter], tensors: Mapping[str, Tensor]
) -> str:
    """Return which parameter is missing or has another shape, as text; "" for none."""
    dense_tensors = _dense_tensors(network, rows)
    saved = _saved_tensors(tensors)
    for name in sorted({*dense_tensors, *saved}):
        here = _shape(dense_tensors, name)
        there = _shape(saved, name)
        if here != there:
            return f"parameter {name!r} is {there} there, and {here} here"
    return ""


def read_tensors(reader: Reader) -> dict[str, Tensor]:
    """Return the tensors of the dense part, by name."""
    data = reader.dense()
    if not data:
        return {}
    # clones lie where torch's allocator aligns them: with other alignments kernels may give other
    # last bits
    tensors = safetensors.torch.load(data)
    return {name: tensor.clone() for name, tensor in tensors.items()}


def warm_start_network(network: nn.Module, checkpoint: Reader, names: Mapping[str, str]) -> None:
    """Load parameters and buffers of another job's network into a network of this one.

    Args:
        network: the network of this job.
        checkpoint: the state of the other job.
        names: names of parameters here to names there.

    Raises:
        PersistError: a name is unknown, or a shape differs; nothing has changed.
        FormatError: the file is bad; nothing has changed.
    """
    targets = dict(network.named_parameters()) | dict(network.named_buffers())
    saved = _saved_tensors(read_tensors(checkpoint))
    sources = {here: saved.get(there) for here, there in names.items()}
    for here, there in names.items():
        source = sources[here]
        if here not in targets or source is None or source.shape != targets[here].shape:
            raise PersistError(
                f"warm start: parameter {here!r} takes one of its shape, "
                f"{_shape(targets, here)}, got {there!r} of {_shape(saved, there)}. Leave it out."
            )
    with torch.no_grad():
        for here, source in sources.items():
            assert source is not None
            targets[here].copy_(source)


def _saved_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    saved = {}
    for name, tensor in tensors.items():
        if name.startswith("network/"):
            saved[name.removeprefix("network/")] = tensor
    return saved


def _dense_tensors(network: nn.Module, rows: Iterable[nn.Parameter]) -> dict[str, Tensor]:
    """Return parameters and buffers by name, without the parameters that are rows of tables."""
    ids = {id(parameter) for parameter in rows}
    parameters = network.named_parameters(remove_duplicate=False)
    names = {name for name, parameter in parameters if id(parameter) in ids}
    return {name: tensor for name, tensor in dense_state(network).items() if name not in names}


def _shape(tensors: Mapping[str, Tensor], name: str) -> list[int] | str:
    return list(tensors[name].shape) if name in tensors else "nothing"


def _copy(tensor: Tensor) -> Tensor:
    # a clone: safetensors refuses tensors that share memory
    return tensor.detach().cpu().clone().contiguous()


# --- optimizers ---------------------------------------------------------------------------------


def flatten(
    optimizer: torch.optim.Optimizer, name: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of an optimizer as tensors and a JSON description.

    The tensors are named `optimizer/<name>/<parameter number>/<key>`.

    Raises:
        PersistError: a value is neither a tensor nor JSON; the message names it.
    """
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for number, entries in state["state"].items():
        for key, value in entries.items():
            if torch.is_tensor(value):
                tensors[f"optimizer/{name}/{number}/{key}"] = _copy(value)
            else:
                plain = _plain(value, f"optimizer {name}: state {key!r}")
                scalars.setdefault(str(number), {})[key] = plain
    groups = []
    for group in state["param_groups"]:
        plain_group = {}
        for key, value in group.items():
            plain_group[key] = _plain(value, f"optimizer {name}: group {key!r}")
        groups.append(plain_group)
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "scalars": scalars}


def unflatten(
    optimizer: torch.optim.Optimizer,
    name: str,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
) -> None:
    """Load what `flatten` returned into an optimizer of the same class over the same parameters.

    Raises:
        PersistError: the optimizer is another one.
    """
    own_class = type(optimizer).__name__
    if plain["class"] != own_class:
        raise PersistError(
            f"optimizer {name}: the checkpoint has the state of {plain['class']}, got "
            f"{own_class}. Use the same class, or a new model."
        )
    prefix = f"optimizer/{name}/"
    state: dict[int, dict[str, Any]] = {}
    try:
        for number, entries in plain["scalars"].items():
            state[int(number)] = dict(entries)
        for path, tensor in tensors.items():
            if path.startswith(prefix):
                number, key = path.removeprefix(prefix).split("/", 1)
                state.setdefault(int(number), {})[key] = tensor
        groups = []
        for group in plain["groups"]:
            groups.append({key: _revived(key, value) for key, value in group.items()})
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except _NOT_LOADED as error:
        raise PersistError(
            f"optimizer {name}: the checkpoint does not fit, got: {error}. "
            "Build it over the same parameters, in the same groups."
        ) from error


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    name: str,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
    accepted: set[str],
) -> None:
    """Load the state of an optimizer; learning rates in `accepted` stay as they were built."""
    rates = [group["lr"] for group in optimizer.param_groups]
    if isinstance(optimizer, SparseOptimizer):
        _load_table_groups(optimizer, plain)
    else:
        unflatten(optimizer, name, tensors, plain)
    for number, (group, rate) in enumerate(zip(optimizer.param_groups, rates, strict=True)):
        fields = [f"tables.{table}.rule.lr" for table in group.get("tables", ())]
        if accepted.intersection(fields or ["optimizer.lr", f"optimizers.{name}.lr"]):
            _set_rate(group, rate)
        elif not fields and len(rates) > 1 and group["lr"] != rate:
            # the description of a model has the rate of a single group only
            log.info(
                "optimizer %s: lr of group %d stays %s, received %s",
                name,
                number,
                group["lr"],
                rate,
            )


def _load_table_groups(optimizer: SparseOptimizer, plain: Mapping[str, Any]) -> None:
    """Load learning rates, and what schedulers keep with them, by table.

    The groups of the checkpoint may be others: tables with one learning rate share a group.
    """
    saved = {table: group for group in plain["groups"] for table in group.get("tables", ())}
    for group in optimizer.param_groups:
        table = group["tables"][0]
        if table not in saved:
            raise PersistError(
                f"optimizer sparse: the checkpoint has no learning rate of table {table!r}, "
                f"got {sorted(saved)}. Restore the checkpoint from a copy."
            )
        for key, value in saved[table].items():
            if key not in _LISTS:
                group[key] = _revived(key, value)


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    """Give a group the learning rate that it was built with, which was changed since the save."""
    group["lr"] = rate
    if "initial_lr" in group:
        group["initial_lr"] = rate


def _plain(value: Any, where: str) -> Any:
    if torch.is_tensor(value) and value.dim() == 0:  # a learning rate may be one
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise PersistError(
            f"{where} cannot be saved, got {type(value).__name__}. "
            "Keep tensors, numbers, text, lists or None there."
        ) from None
    return value


def _revived(key: str, value: Any) -> Any:
    """Return the value that `_plain` made plain; most lists were tuples."""
    if isinstance(value, dict) and set(value) == {"tensor", "dtype"}:
        return _revived_tensor(key, value)
    if isinstance(value, list) and key not in _LISTS:
        return tuple(value)
    return value


def _revived_tensor(key: str, value: Mapping[str, Any]) -> Tensor:
    dtype = getattr(torch, str(value["dtype"]), None)
    is_number = isinstance(value["tensor"], (bool, int, float))
    if not isinstance(dtype, torch.dtype) or not is_number:
        raise PersistError(
            f"optimizer: {key!r} is not a number of a type of torch, got {value!r:.80}. "
            "Restore the checkpoint from a copy."
        )
    return torch.tensor(value["tensor"], dtype=dtype)


# --- random generators --------------------------------------------------------------------------


def random_state() -> dict[str, torch.Tensor]:
    """Return the states of torch's generators by device, for `State.random`."""
    states = {"cpu": torch.default_generator.get_state()}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        device_module = torch.get_device_module(accelerator)
        if getattr(device_module, "is_initialized", bool)():
            for number in range(device_module.device_count()):
                states[f"{accelerator.type}:{number}"] = device_module.get_rng_state(number)
    return states


def set_random_state(states: Mapping[str, Any]) -> None:
    """Set torch's generators to what `random_state` returned, or to `Reader.random`.

    Generators of devices that are absent here are left out, and logged.

    Example: `hb.checkpoints.set_random_state(reader.random)`
    """
    for name, plain in states.items():
        state = torch.as_tensor(plain)
        kind, _, number = name.partition(":")
        if kind == "cpu":
            torch.default_generator.set_state(state)
            continue
        device_module = getattr(torch, kind, None)
        if device_module is None or int(number) >= device_module.device_count():
            log.warning(
                "the state holds the random generator of %s, which is absent here: dropout there "
                "draws other numbers from now on",
                name,
            )
        else:
            device_module.set_rng_state(state, int(number))
