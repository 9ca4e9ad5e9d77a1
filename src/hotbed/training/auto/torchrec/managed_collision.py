# SPDX-License-Identifier: Apache-2.0
"""TorchRec's managed collisions: raw ids pass, since a table takes all of them.

Rows of ids that such a module has met keep their ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.errors import ConfigError

from .configs import name_of

_FREE = torch.iinfo(torch.int64).max  # the raw id of a row that no id has yet


@dataclass(frozen=True, eq=False)
class RawIds:
    """The ids that rows of a weight have.

    Attributes:
        rows: int64 [m], of the weight.
        ids: int64 [m], raw.
    """

    rows: Tensor
    ids: Tensor


@contextmanager
def raw_ids_passing(model: nn.Module) -> Iterator[None]:
    """Let raw ids pass through the managed collisions of `model` in this block, for a trace."""
    collections = _collections(model)
    for collection in collections:
        _pass(collection)
    try:
        yield
    finally:
        for collection in collections:
            for method in _METHODS:
                del collection.__dict__[method]


def pass_raw_ids(model: nn.Module) -> None:
    """Let raw ids pass through the managed collisions of `model` from now on; free their maps."""
    for collection in _collections(model):
        _pass(collection)
        collection._managed_collision_modules = nn.ModuleDict()


def raw_ids_of(model: nn.Module) -> dict[nn.Module, RawIds]:
    """Return, of each embedding behind managed collisions, the raw ids of its rows.

    Raises:
        ConfigError: rows were learned, and the raw ids of these rows are not known.
    """
    every = {}
    for module in model.modules():
        if not name_of(module).startswith("ManagedCollisionEmbedding"):
            continue
        inside: Any = module._embedding_module
        embeddings = getattr(inside, "embedding_bags", None) or inside.embeddings
        collection: Any = module._managed_collision_collection
        for table, remapping in collection._managed_collision_modules.items():
            every[embeddings[table]] = _raw_ids(table, remapping)
    return every


def _raw_ids(table: str, remapping: Any) -> RawIds:
    """Return the raw ids that a module has given rows, by its buffers."""
    ids = getattr(remapping, "_mch_sorted_raw_ids", None)
    if ids is not None:
        is_met = ids != _FREE
        if getattr(remapping, "_input_hash_func", None) is None or not is_met.any():
            rows = remapping._mch_remapped_ids_mapping - remapping._output_global_offset
            return RawIds(rows[is_met].cpu(), ids[is_met].cpu())
    identities = getattr(remapping, "_hash_zch_identities", None)
    if identities is not None and bool((identities == -1).all()):
        nothing = torch.empty(0, dtype=torch.int64)
        return RawIds(nothing, nothing)
    raise ConfigError(
        f"hb.auto: the raw ids of learned rows must be known, got table {table!r} behind a "
        f"{type(remapping).__name__}, which keeps hashes of them or other maps. Convert the model "
        "before it has learned."
    )


def _collections(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if name_of(each) == "ManagedCollisionCollection"]


def _pass(collection: nn.Module) -> None:
    collection.__dict__.update(_METHODS)


def _unchanged(features: Any, mutate_miss_lengths: bool = True) -> Any:
    return features


def _nothing() -> dict[str, Any]:
    return {}


_METHODS = {"forward": _unchanged, "evict": _nothing}
