# SPDX-License-Identifier: Apache-2.0
"""What is in a checkpoint: network, tables, optimizers and their description, in the container of `format`.

folder, digest = save(path, State(network=network, tables=tables, optimizers={"dense": optimizer}))
restore(open_checkpoint(path), State(network=network, tables=tables, optimizers={"dense": optimizer}))
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from hotbed.config import describe
from hotbed.embedding.table import Table
from hotbed.errors import FormatError, PersistError
from hotbed.persist.format import Reader, Writer, open_checkpoint, partition_ranges, table_folder

__all__ = ["State", "open_checkpoint", "restore", "save"]

DENSE = "dense.safetensors"


@dataclass(frozen=True)
class State:
    """Everything a checkpoint holds.

    `tables` by name; `optimizers` by name, None = there is none; `rows` = parameters of `network` that are rows of
    tables, which are saved with the tables instead. The rest is plain JSON, see docs/format.md.
    """

    network: nn.Module | None = None
    tables: Mapping[str, Table] = field(default_factory=dict)
    optimizers: Mapping[str, torch.optim.Optimizer | None] = field(default_factory=dict)
    rows: Iterable[nn.Parameter] = ()
    model: Mapping[str, Any] | None = None
    schema: Any = None
    positions: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    version: int = 0
    parent: str | None = None


def save(path: Path, state: State, keep: int = 1) -> tuple[Path, str]:
    """Write `state` as the current checkpoint under `path`; its folder and digest. `keep` = checkpoints that stay.

    Raises PersistError when the disk refuses or when optimizer state is neither a tensor nor JSON; what was current
    before then stays current.
    """
    with Writer(path) as writer:
        tensors = {} if state.network is None else _network_tensors(state.network, state.rows)
        optimizers: dict[str, Any] = {}
        for name, optimizer in state.optimizers.items():
            if optimizer is not None:
                found, optimizers[name] = flatten(optimizer, name)
                tensors |= found
        if tensors:
            writer.write(DENSE, safetensors.torch.save(tensors))
        tables = [_save_table(writer, i, name, state.tables[name]) for i, name in enumerate(sorted(state.tables))]
        dense = None if state.network is None else {"file": DENSE if tensors else None, "optimizers": optimizers}
        members = {
            "package_version": _package_version(),
            "kind": "full",
            "version": state.version,
            "parent": state.parent,
            "model": state.model,
            "schema": state.schema,
            "positions": dict(state.positions),
            "counters": dict(state.counters),
            "dense": dense,
            "tables": tables,
        }
        return writer.commit(members, keep)


def restore(reader: Reader, state: State) -> None:
    """Load a checkpoint into the network, tables and optimizers of `state`, which were built alike.

    Every file is checked before anything changes. Raises FormatError naming a bad file, PersistError naming the
    parameter, table or optimizer that the checkpoint does not fit.
    """
    reader.verify()
    saved = {entry["name"]: entry for entry in reader.manifest["tables"]}
    if set(saved) != set(state.tables):
        raise PersistError(f"{reader.folder}: it has tables {sorted(saved)} — received a network with "
                           f"{sorted(state.tables)} — build the network as it was when it was saved")  # fmt: skip
    dense = reader.manifest["dense"] or {"file": None, "optimizers": {}}
    loaded = safetensors.torch.load(bytes(reader.read(dense["file"]))) if dense["file"] else {}
    # clones lie where torch's allocator aligns them: kernels may give other last bits for other alignments
    tensors = {name: tensor.clone() for name, tensor in loaded.items()}
    if state.network is not None:
        _load_network(reader.folder, state.network, state.rows, tensors)
    for name, entry in saved.items():
        _load_table(reader, state.tables[name], entry)
    for name, optimizer in state.optimizers.items():
        if optimizer is not None and name in dense["optimizers"]:
            unflatten(optimizer, name, tensors, dense["optimizers"][name])


# --- network --------------------------------------------------------------------------------------------------------


def _network_tensors(network: nn.Module, rows: Iterable[nn.Parameter]) -> dict[str, Tensor]:
    skipped = _names_of(network, rows)
    return {
        f"network/{name}": tensor.detach().cpu().clone().contiguous()  # a clone: safetensors refuses shared memory
        for name, tensor in network.state_dict().items()
        if name not in skipped and torch.is_tensor(tensor)
    }


def _load_network(
    folder: Path, network: nn.Module, rows: Iterable[nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    skipped = _names_of(network, rows)
    own = {name: one for name, one in network.state_dict().items() if name not in skipped and torch.is_tensor(one)}
    saved = {name.removeprefix("network/"): tensor for name, tensor in tensors.items() if name.startswith("network/")}
    for name in sorted({*own, *saved}):
        if name not in own or name not in saved or own[name].shape != saved[name].shape:
            here, there = (list(side[name].shape) if name in side else "nothing" for side in (own, saved))
            raise PersistError(f"{folder}: parameter {name!r} differs — received {there} for {here} — "
                               "build the network as it was when it was saved")  # fmt: skip
    network.load_state_dict(saved, strict=False)


def _names_of(network: nn.Module, parameters: Iterable[nn.Parameter]) -> set[str]:
    wanted = {id(parameter) for parameter in parameters}
    return {name for name, one in network.named_parameters(remove_duplicate=False) if id(one) in wanted}


# --- tables ---------------------------------------------------------------------------------------------------------


def _save_table(writer: Writer, number: int, name: str, table: Table) -> dict[str, Any]:
    folder = table_folder(number, name)
    parts = []
    for span in partition_ranges(len(table)):
        file = f"{folder}/rows-{span.start:03d}-{span.stop - 1:03d}.arrow"
        rows = writer.write_batches(file, table.export(partitions=span))
        if rows:
            parts.append({"file": file, "first": span.start, "last": span.stop - 1, "rows": rows})
    file = f"{folder}/candidates.arrow"
    waiting = writer.write_batches(file, table.candidates())
    return {
        "name": name,
        "config": describe(table.config),
        "rows": sum(part["rows"] for part in parts),
        "scalars": table.scalars(),
        "parts": parts,
        "candidates": {"file": file, "rows": waiting} if waiting else None,
    }


def _load_table(reader: Reader, table: Table, entry: Mapping[str, Any]) -> None:
    if len(table) or table.step:
        table.clear()
    for part in entry["parts"]:
        table.load(reader.batches(part["file"]))
    table.load_scalars(entry["scalars"])
    if entry["candidates"] is not None:
        table.load_candidates(reader.batches(entry["candidates"]["file"]))
    if len(table) != entry["rows"]:
        raise FormatError(f"{reader.folder}: table {entry['name']!r} has {len(table)} rows after loading — "
                          f"received {entry['rows']} in the manifest — do not use it; restore a copy")  # fmt: skip


# --- optimizers -----------------------------------------------------------------------------------------------------


def flatten(optimizer: torch.optim.Optimizer, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of an optimizer as tensors by `optimizer/<name>/<parameter number>/<key>` and a JSON description."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for number, entries in state["state"].items():
        for key, value in entries.items():
            if torch.is_tensor(value):
                tensors[f"optimizer/{name}/{number}/{key}"] = value.detach().cpu().clone().contiguous()
            else:
                scalars.setdefault(str(number), {})[key] = _plain(value, f"optimizer {name}: state {key!r}")
    groups = [{key: _plain(value, f"optimizer {name}: group {key!r}") for key, value in group.items()}
              for group in state["param_groups"]]  # fmt: skip
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "scalars": scalars}


def unflatten(
    optimizer: torch.optim.Optimizer, name: str, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]
) -> None:
    """Load what `flatten` gave into an optimizer of the same class over the same parameters, else PersistError."""
    if plain["class"] != type(optimizer).__name__:
        raise PersistError(f"optimizer {name}: the checkpoint has the state of {plain['class']} — received "
                           f"{type(optimizer).__name__} — use the same class, or a new model")  # fmt: skip
    state: dict[int, dict[str, Any]] = {int(number): dict(entries) for number, entries in plain["scalars"].items()}
    for path, tensor in tensors.items():
        if path.startswith(f"optimizer/{name}/"):
            number, key = path.removeprefix(f"optimizer/{name}/").split("/", 1)
            state.setdefault(int(number), {})[key] = tensor
    groups = [{key: _revived(key, value) for key, value in group.items()} for group in plain["groups"]]
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (ValueError, KeyError) as error:
        raise PersistError(f"optimizer {name}: the checkpoint does not fit — {error} — build it over the same "
                           "parameters, in the same groups") from error  # fmt: skip


def _plain(value: Any, what: str) -> Any:
    if torch.is_tensor(value) and value.dim() == 0:  # a learning rate may be one
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise PersistError(f"{what} cannot be saved — received {type(value).__name__} — keep tensors, numbers, text, "
                           "lists or None there") from None  # fmt: skip
    return value


def _revived(key: str, value: Any) -> Any:
    """The inverse of `_plain`; lists were tuples, but for those that torch or the tables' optimizer keep as lists."""
    if isinstance(value, dict) and set(value) == {"tensor", "dtype"}:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    return tuple(value) if isinstance(value, list) and key not in ("params", "tables") else value


def _package_version() -> str:
    try:
        return metadata.version("hotbed")
    except metadata.PackageNotFoundError:
        return "0"
