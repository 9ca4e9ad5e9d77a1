# SPDX-License-Identifier: Apache-2.0
"""TorchRec's fused collections: they become plain ones whose weights learn in the backward pass.

Such a collection keeps its weights and its optimizer in a kernel of FBGEMM, which no lookup in a
table can take the place of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hotbed.errors import ConfigError

from .configs import name_of

_PLAIN = {
    "FusedEmbeddingBagCollection": "EmbeddingBagCollection",
    "FusedEmbeddingCollection": "EmbeddingCollection",
}
_COLLECTIONS = "torchrec.modules.embedding_modules"
_MARK = "_hotbed_was_fused"
"""The attribute of a weight that was that of a fused collection."""
_KNOWN = ("lr", "learning_rate", "eps", "beta1", "beta2", "stochastic_rounding")
"""Settings of FBGEMM's kernels that rules have, or that change nothing in float32."""
_SLOTS: Mapping[str, tuple[str, ...]] = {
    "SGD": (),
    "Adagrad": ("sum",),
    "RowWiseAdagrad": ("sum",),
    "Adam": ("exp_avg", "exp_avg_sq"),
}


@contextmanager
def unfused(model: nn.Module) -> Iterator[None]:
    """Turn the fused collections of `model` into plain ones; back, if this block raises.

    Raises:
        ConfigError: a collection has a setting that no rule has.
    """
    before: list[tuple[nn.Module, type, dict[str, Any]]] = []
    try:
        for path, module in list(model.named_modules()):
            name = _PLAIN.get(name_of(module))
            if name is not None:
                plain = _plain(path, module, getattr(sys.modules[_COLLECTIONS], name))
                before.append((module, type(module), module.__dict__))
                hooks = {key: value for key, value in module.__dict__.items() if "_hooks" in key}
                module.__class__ = type(plain)
                module.__dict__ = {**plain.__dict__, **hooks}
        yield
    except BaseException:
        for module, kind, attributes in before:
            module.__class__ = kind
            module.__dict__ = attributes
        raise


def is_fused(weight: nn.Parameter) -> bool:
    """Return whether a weight was that of a fused collection."""
    return getattr(weight, _MARK, False)


def is_fused_optimizer(optimizer: Any) -> bool:
    """Return whether an optimizer stands for the kernel of a fused collection."""
    return any(kind.__name__ == "FusedOptimizer" for kind in type(optimizer).__mro__)


def _plain(path: str, fused: Any, kind: Callable[..., Any]) -> nn.Module:
    """Return a plain collection with the weights of a fused one, and with optimizers on them."""
    device = torch.device("meta")  # its weights come from the fused one
    has_bags = hasattr(fused, "embedding_bags")
    if has_bags:
        configs = fused.embedding_bag_configs()
        plain: nn.Module = kind(tables=configs, is_weighted=fused.is_weighted(), device=device)
    else:
        configs = fused.embedding_configs()
        plain = kind(tables=configs, need_indices=fused.need_indices(), device=device)
    attribute = "embedding_bags" if has_bags else "embeddings"
    make = _optimizer_maker(path, fused)
    states = _states(fused)
    for config in configs:
        weight = getattr(fused, attribute)[config.name].weight
        getattr(plain, attribute)[config.name].weight = weight
        optimizer = make(weight)
        optimizer.state[weight] = states.get(config.name, {})
        weight._in_backward_optimizers = [optimizer]
        setattr(weight, _MARK, True)
    plain.train(fused.training)
    return plain


def _optimizer_maker(path: str, fused: Any) -> Callable[[nn.Parameter], torch.optim.Optimizer]:
    """Return what makes the optimizer of a weight, which has the settings of the kernel."""
    settings = {"learning_rate": 0.01, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999}  # FBGEMM's own
    for setting, value in fused.optimizer_kwargs().items():
        if setting not in _KNOWN and value:
            raise ConfigError(
                f"hb.auto: the rules of tables have {', '.join(_KNOWN)} of FBGEMM's kernels, got "
                f"{setting}={value!r} of the fused collection at {path or 'the model'!r}. Leave "
                "it out, or use the collection without Fused and apply_optimizer_in_backward."
            )
        settings[setting] = value
    kind = fused.optimizer_type()
    options: dict[str, Any] = {"lr": settings.get("lr", settings["learning_rate"])}
    if kind.__name__ != "SGD":
        options["eps"] = settings["eps"]
    if kind.__name__ == "Adam":
        options["betas"] = (settings["beta1"], settings["beta2"])
    return lambda weight: kind([weight], **options)


def _states(fused: Any) -> dict[str, dict[str, Any]]:
    """Return the optimizer state of each table, by its name; none before the first step."""
    slots = _SLOTS[fused.optimizer_type().__name__]
    states: dict[str, dict[str, Any]] = {}
    for lookups in fused._emb_modules:
        kernel = lookups._emb_module
        step = int(kernel.iter) if not kernel.iter.is_meta else 0
        for config, parts in zip(
            lookups._embedding_tables, kernel.split_optimizer_states(), strict=False
        ):
            states[config.name] = {**dict(zip(slots, parts, strict=False)), "step": step}
    return states
