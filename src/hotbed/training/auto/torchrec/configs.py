# SPDX-License-Identifier: Apache-2.0
"""The tables that TorchRec's collections of a model declare, and its modules that are refused.

TorchRec is not imported here: its classes are known by the modules that define them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from hotbed.embedding.init import Init, Uniform
from hotbed.errors import ConfigError

_COLLECTIONS = {"EmbeddingBagCollection": "embedding_bags", "EmbeddingCollection": "embeddings"}
"""The attribute of each collection that holds its embeddings by the names of tables."""

_GUIDE = "docs/migrate/torchrec.md"
_REFUSED = {
    "DistributedModelParallel": f"Leave it out, and spread rows with hb.shard: see {_GUIDE}",
    "ShardedEmbeddingBagCollection": f"Convert the model before it is sharded: see {_GUIDE}",
    "ShardedEmbeddingCollection": f"Convert the model before it is sharded: see {_GUIDE}",
}
"""Of modules that cannot be converted, what to do instead."""


@dataclass(frozen=True)
class TableConfig:
    """What a collection declares of one table.

    Attributes:
        name: of the table; its path in the model if another collection has a table of this name.
        features: keys of the features that look up in it.
        init: of new rows: uniform up to the larger bound of the config, with both signs.
    """

    name: str
    features: tuple[str, ...]
    init: Init


def configs_of(model: nn.Module) -> dict[nn.Module, TableConfig]:
    """Return what TorchRec's collections in `model` declare, by the embedding of each table.

    It is the same before and after the conversion.
    """
    declared: dict[nn.Module, tuple[str, str, Any]] = {}
    for path, module in model.named_modules():
        attribute = _COLLECTIONS.get(name_of(module))
        if attribute is None:
            continue
        bags = attribute == "embedding_bags"
        configs = module.embedding_bag_configs() if bags else module.embedding_configs()
        embeddings = getattr(module, attribute)
        for config in configs:
            name = f"{path}.{attribute}.{config.name}".removeprefix(".")
            declared[embeddings[config.name]] = (config.name, name, config)
    counts = Counter(name for name, _, _ in declared.values())
    tables = {}
    for embedding, (name, path, config) in declared.items():
        bounds = (config.get_weight_init_min(), config.get_weight_init_max())
        init = Uniform(max(math.fabs(bound) for bound in bounds))
        tables[embedding] = TableConfig(
            name if counts[name] == 1 else path, tuple(config.feature_names), init
        )
    return tables


def keys_of(model: nn.Module) -> list[str]:
    """Return the keys that TorchRec's collections in `model` look up, each once."""
    keys: dict[str, None] = {}
    for config in configs_of(model).values():
        keys.update(dict.fromkeys(config.features))
    return list(keys)


def name_of(module: nn.Module) -> str:
    """Return the name of TorchRec's class that a module has or is derived from; "" for none."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torchrec."):
            return kind.__name__
    return ""


def check_convertible(model: nn.Module) -> None:
    """Raise ConfigError if a module of TorchRec in `model` cannot be converted."""
    for path, module in model.named_modules():
        name = name_of(module)
        if name in _REFUSED:
            where = path or "the model"
            raise ConfigError(
                f"hb.auto: {name} cannot be converted, got one at {where!r}. {_REFUSED[name]}."
            )
