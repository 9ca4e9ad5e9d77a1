# SPDX-License-Identifier: Apache-2.0
"""The embeddings of a model before its conversion, and why some cannot become tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hotbed.embedding.init import Init, Normal
from hotbed.embedding.modules import TableModule
from hotbed.errors import ConfigError
from hotbed.parallel.world import check_not_wrapped

from .torchrec.configs import TableConfig, check_convertible, configs_of
from .torchrec.managed_collision import RawIds, raw_ids_of

Embedding = nn.Embedding | nn.EmbeddingBag
KINDS = (nn.Embedding, nn.EmbeddingBag)
SCRIPTED = tuple(kind.__name__ for kind in KINDS)
HARMLESS = ("_abc_impl", "_fill_padding_idx_with_zero", "extra_repr", "reset_parameters")
"""Names that a derived class may define, since no lookup calls them."""


@dataclass(frozen=True)
class Site:
    """One embedding module.

    Attributes:
        path: its first path in the model.
        others: its other paths, if it is registered at several.
        module: the module.
        config: of its table, if it lies in a collection of TorchRec.
        raw_ids: of the rows of its weight, if managed collisions gave them; None = row i is id i.
    """

    path: str
    others: tuple[str, ...]
    module: Embedding
    config: TableConfig | None = None
    raw_ids: RawIds | None = None

    @property
    def pooling(self) -> str:
        """Return the pooling of a bag; "none" for nn.Embedding."""
        if isinstance(self.module, nn.EmbeddingBag):
            return self.module.mode
        return "none"

    @property
    def is_scripted(self) -> bool:
        """Return whether the module is compiled by TorchScript, which no trace can follow."""
        return isinstance(self.module, torch.jit.ScriptModule)

    @property
    def kind(self) -> str:
        """Return "Embedding" or "EmbeddingBag", or the name of a class derived from one."""
        return str(getattr(self.module, "original_name", type(self.module).__name__))

    def kept(self) -> str:
        """Return why this module stays an embedding; "" if it can become a lookup in a table."""
        module = self.module
        if self.is_scripted:
            return "it is compiled by TorchScript"
        if parametrize.is_parametrized(module) or "weight" not in module._parameters:
            return "its weight is parametrized"
        overridden = _overridden(type(module))
        if overridden:
            return f"{type(module).__name__} has {', '.join(overridden)} of its own"
        weight = module.weight
        if weight.dtype != torch.float32:
            dtype = str(weight.dtype).removeprefix("torch.")
            return f"its weight is {dtype}, and tables learn in float32"
        if type(weight) is not nn.Parameter or weight.layout is not torch.strided:
            return f"its weight is a {type(weight).__name__} of layout {weight.layout}"
        if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
            return "its weight has hooks of its own"
        if not weight.shape[1]:
            return "its rows are empty"
        return ""

    def refused(self) -> str:
        """Return why no table can do what this module does; "" if one can."""
        module = self.module
        if module.max_norm is not None:
            return f"max_norm={module.max_norm!r} changes rows in the forward pass"
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq=True divides gradients by the ids' counts in a batch"
        return ""


@dataclass(frozen=True)
class EmbeddingWeight:
    """A weight, and the embeddings that look up its rows.

    Attributes:
        parameter: the weight.
        sites: the modules, in the order of the model.
        read: where else the model has this parameter; "" for nowhere.
    """

    parameter: nn.Parameter
    sites: tuple[Site, ...]
    read: str = ""

    @property
    def name(self) -> str:
        """Return the name of the table that holds the rows: the first module's path.

        A table of TorchRec keeps its name.
        """
        site = self.sites[0]
        if site.config is not None:
            return site.config.name
        return site.path or "embedding"

    @property
    def is_sparse(self) -> bool:
        """Return whether the gradient of the weight is sparse."""
        return all(site.module.sparse for site in self.sites)

    @property
    def paths(self) -> tuple[str, ...]:
        """Return every path of its modules."""
        return tuple(path for site in self.sites for path in (site.path, *site.others))

    @property
    def init(self) -> Init:
        """Return how new rows begin: as torch or the config of TorchRec draws them."""
        config = self.sites[0].config
        return Normal(1.0) if config is None else config.init


def is_embedding(module: nn.Module) -> bool:
    """Return whether a module is an nn.Embedding or nn.EmbeddingBag that no table replaced."""
    if isinstance(module, torch.jit.ScriptModule):
        return module.original_name in SCRIPTED
    return isinstance(module, KINDS) and not isinstance(module, TableModule)


def weights_of(model: nn.Module) -> list[EmbeddingWeight]:
    """Return the weights of all nn.Embedding and nn.EmbeddingBag modules inside `model`.

    Raises:
        ConfigError: there are none, or `model` is wrapped.
    """
    _check_plain(model)
    check_convertible(model)
    paths: dict[Embedding, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if is_embedding(module):
            paths.setdefault(module, []).append(path)
    if not paths:
        raise ConfigError(
            f"hb.auto: {type(model).__name__} has no nn.Embedding and no nn.EmbeddingBag, got "
            f"{len(list(model.modules()))} modules. Train it as it is."
        )
    configs = configs_of(model)
    raw_ids = raw_ids_of(model)
    sites: dict[int, list[Site]] = {}
    for module, paths_of_module in paths.items():
        first, *others = paths_of_module
        site = Site(first, tuple(others), module, configs.get(module), raw_ids.get(module))
        sites.setdefault(id(module.weight), []).append(site)
    weights = []
    for of_weight in sites.values():
        parameter = of_weight[0].module.weight
        place = _other_place(model, parameter)
        weights.append(EmbeddingWeight(cast(nn.Parameter, parameter), tuple(of_weight), place))
    return weights


def _other_place(model: nn.Module, parameter: Tensor) -> str:
    """Return the name of a parameter of another kind of module that is this one; "" for none."""
    for path, module in model.named_modules():
        if is_embedding(module):
            continue
        for name, candidate in module._parameters.items():
            if candidate is parameter:
                return f"{path}.{name}" if path else name
    return ""


def _overridden(kind: type[nn.Module]) -> list[str]:
    """Return what a class that is derived from an embedding defines for its lookups.

    A constructor and what it calls, such as `reset_parameters`, have done their work.
    """
    names: Sequence[str] = []
    for cls in kind.__mro__:
        if cls in KINDS:
            break
        names = [*names, *(name for name in vars(cls) if not name.startswith("__"))]
        if "__call__" in vars(cls) or "__getattr__" in vars(cls):
            names = [*names, "__call__"]
    return [name for name in dict.fromkeys(names) if name not in HARMLESS]


def _check_plain(model: nn.Module) -> None:
    check_not_wrapped(model, taker="hb.auto")
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel, torch.jit.ScriptModule)
    if isinstance(model, wrappers) or hasattr(model, "_orig_mod"):
        raise ConfigError(
            f"hb.auto: it takes a model that is not wrapped or compiled, got "
            f"{type(model).__name__}. Convert the model first, and wrap the result."
        )
