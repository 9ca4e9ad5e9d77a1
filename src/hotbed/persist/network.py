# SPDX-License-Identifier: Apache-2.0
"""The dense part of a state: the network's parameters and the optimizers' state, as tensors and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.embedding.modules.state import dense_state
from hotbed.errors import PersistError
from hotbed.optim.sparse import SparseOptimizer


def network_tensors(network: nn.Module, rows: Iterable[nn.Parameter]) -> dict[str, Tensor]:
    skipped = _names_of(network, rows)
    return {
        # a clone: safetensors refuses shared memory
        f"network/{name}": tensor.detach().cpu().clone().contiguous()
        for name, tensor in dense_state(network).items()
        if name not in skipped
    }


def load_network(
    folder: str, network: nn.Module, rows: Iterable[nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    skipped = _names_of(network, rows)
    own = {name: tensor for name, tensor in dense_state(network).items() if name not in skipped}
    saved = {
        name.removeprefix("network/"): tensor
        for name, tensor in tensors.items()
        if name.startswith("network/")
    }
    for name in sorted({*own, *saved}):
        if name not in own or name not in saved or own[name].shape != saved[name].shape:
            here, there = (
                list(side[name].shape) if name in side else "nothing" for side in (own, saved)
            )
            raise PersistError(
                f"{folder}: parameter {name!r} differs — received {there} for {here} — "
                "build the network as it was when it was saved"
            )
    network.load_state_dict(saved, strict=False)


def _names_of(network: nn.Module, parameters: Iterable[nn.Parameter]) -> set[str]:
    wanted = {id(parameter) for parameter in parameters}
    return {
        name for name, one in network.named_parameters(remove_duplicate=False) if id(one) in wanted
    }


def flatten(
    optimizer: torch.optim.Optimizer, name: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of an optimizer as tensors by `optimizer/<name>/<parameter number>/<key>` and a JSON
    description.
    """
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for number, entries in state["state"].items():
        for key, value in entries.items():
            if torch.is_tensor(value):
                tensors[f"optimizer/{name}/{number}/{key}"] = (
                    value.detach().cpu().clone().contiguous()
                )
            else:
                scalars.setdefault(str(number), {})[key] = _plain(
                    value, f"optimizer {name}: state {key!r}"
                )
    groups = [
        {key: _plain(value, f"optimizer {name}: group {key!r}") for key, value in group.items()}
        for group in state["param_groups"]
    ]
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "scalars": scalars}


def unflatten(
    optimizer: torch.optim.Optimizer,
    name: str,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
) -> None:
    """Load what `flatten` gave into an optimizer of the same class over the same parameters, else
    PersistError.
    """
    if plain["class"] != type(optimizer).__name__:
        raise PersistError(
            f"optimizer {name}: the checkpoint has the state of {plain['class']} — received "
            f"{type(optimizer).__name__} — use the same class, or a new model"
        )
    state: dict[int, dict[str, Any]] = {}
    try:
        for number, entries in plain["scalars"].items():
            state[int(number)] = dict(entries)
        for path, tensor in tensors.items():
            if path.startswith(f"optimizer/{name}/"):
                number, key = path.removeprefix(f"optimizer/{name}/").split("/", 1)
                state.setdefault(int(number), {})[key] = tensor
        groups = [
            {key: _revived(key, value) for key, value in group.items()} for group in plain["groups"]
        ]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise PersistError(
            f"optimizer {name}: the checkpoint does not fit — {error} — build it over the same "
            "parameters, in the same groups"
        ) from error


def load_table_groups(optimizer: SparseOptimizer, plain: Mapping[str, Any]) -> None:
    """Load learning rates and what schedulers keep beside them, by table: another rate may group
    tables otherwise.
    """
    saved = {table: group for group in plain["groups"] for table in group.get("tables", ())}
    for group in optimizer.param_groups:
        table = group["tables"][0]
        if table not in saved:
            raise PersistError(
                f"optimizer sparse: the checkpoint has no learning rate of table {table!r} — "
                f"received {sorted(saved)} — restore the checkpoint from a copy"
            )
        for key, value in saved[table].items():
            if key not in ("params", "tables"):
                group[key] = _revived(key, value)


def set_rate(group: dict[str, Any], rate: Any) -> None:
    """Give a group the learning rate that it was built with, where that was changed since the save."""
    group["lr"] = rate
    if "initial_lr" in group:
        group["initial_lr"] = rate


def _plain(value: Any, what: str) -> Any:
    if torch.is_tensor(value) and value.dim() == 0:  # a learning rate may be one
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise PersistError(
            f"{what} cannot be saved — received {type(value).__name__} — keep tensors, numbers, "
            "text, "
            "lists or None there"
        ) from None
    return value


def _revived(key: str, value: Any) -> Any:
    """The inverse of `_plain`; lists were tuples, but for those that torch or the tables' optimizer
    keep as lists.
    """
    if isinstance(value, dict) and set(value) == {"tensor", "dtype"}:
        dtype = getattr(torch, str(value["dtype"]), None)
        if not isinstance(dtype, torch.dtype) or not isinstance(
            value["tensor"], (bool, int, float)
        ):
            raise PersistError(
                f"optimizer: {key!r} is not a number of a type of torch — received {value!r:.80} — "
                "restore the checkpoint from a copy"
            )
        return torch.tensor(value["tensor"], dtype=dtype)
    return tuple(value) if isinstance(value, list) and key not in ("params", "tables") else value
