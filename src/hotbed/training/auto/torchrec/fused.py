# SPDX-License-Identifier: Apache-2.0
"""What of TorchRec learns in a kernel of FBGEMM, as plain weights with optimizers of torch.

A fused collection keeps its weights and its optimizer in a kernel, which no lookup in a table can
take the place of. An optimizer such as torchrec.optim.Adam is only the name of such a kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_NAMES = "torchrec.optim.optimizers"
"""The module of the optimizers that are names of kernels, and take no step themselves."""
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
    """Turn the fused collections of `model` into plain ones, and names of kernels into optimizers.

    All of it is turned back if this block raises.

    Raises:
        ConfigError: a kernel has a setting that no rule has, or is none that a rule equals.
    """
    before: list[tuple[Any, type, dict[str, Any]]] = []
    try:
        for path, weight in model.named_parameters():
            names: Sequence[Any] = getattr(weight, "_in_backward_optimizers", ())
            if any(type(name).__module__ == _NAMES for name in names):
                before.append((weight, type(weight), dict(weight.__dict__)))
                _name_optimizer(path, weight, names[0])
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
        for changed, kind, attributes in before:
            changed.__class__ = kind
            changed.__dict__ = attributes
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
    make = _optimizer_maker(path, fused.optimizer_type(), fused.optimizer_kwargs())
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


def _name_optimizer(path: str, weight: nn.Parameter, name: Any) -> None:
    """Put the optimizer on a weight that has only the name of one."""
    kind = getattr(torch.optim, type(name).__name__, None)
    if kind is None or type(name).__name__ not in _SLOTS:
        raise ConfigError(
            f"hb.auto: rules of tables equal {', '.join(_SLOTS)} of FBGEMM's kernels, got "
            f"{_NAMES}.{type(name).__name__} on {path!r}. Use one of these."
        )
    optimizer = _optimizer_maker(path, kind, name._kwargs)(weight)
    weight.__dict__.update({"_in_backward_optimizers": [optimizer], _MARK: True})


def _optimizer_maker(
    path: str, kind: Any, kernel_settings: Mapping[str, Any]
) -> Callable[[nn.Parameter], torch.optim.Optimizer]:
    """Return what makes the optimizer of a weight, which has the settings of the kernel."""
    settings = {"learning_rate": 0.01, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999}  # FBGEMM's own
    for setting, value in kernel_settings.items():
        if setting not in _KNOWN and value:
            raise ConfigError(
                f"hb.auto: the rules of tables have {', '.join(_KNOWN)} of FBGEMM's kernels, got "
                f"{setting}={value!r} at {path or 'the model'!r}. Leave it out, or give "
                "apply_optimizer_in_backward an optimizer of torch.optim, over a collection that "
                "is not fused."
            )
        settings[setting] = value
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
