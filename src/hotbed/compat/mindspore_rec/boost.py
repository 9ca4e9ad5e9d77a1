# SPDX-License-Identifier: Apache-2.0
"""`boost_level` and `boost_config_dict`: what they compile here."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from hotbed import checks
from hotbed.config import did_you_mean
from hotbed.errors import ConfigError
from hotbed.optim.precision import Compile

log = logging.getLogger("hotbed.compat.mindspore_rec")
LEVELS: Mapping[str, Compile | None] = {
    "O0": None,
    "O1": Compile(),
    "O2": Compile(mode="max-autotune-no-cudagraphs"),
}
_FIELDS = tuple(field.name for field in dataclasses.fields(Compile))
_CLAUSES = (
    "boost",
    "common",
    "less_bn",
    "grad_freeze",
    "grad_accumulation",
    "adasum",
    "dim_reduce",
    "loss_scale_group",
)


class ArgumentTypeError(ConfigError, TypeError):
    """An argument has a wrong type: a TypeError, as in MindSpore, and a ValueError."""


def compiled_by(
    level: str | Compile,
    config: Mapping[str, Any] | None,
    *,
    has_optimizer: bool,
    is_evaluated: bool,
) -> Compile | None:
    """Return how the step is compiled; None if it is not.

    Args:
        level: "O0", "O1" or "O2"; or settings, which `config` does not change.
        config: the `boost_config_dict`: settings of `hb.Compile`, and MindSpore's own keys.
        has_optimizer: whether the model has one; without it, levels have no effect.
        is_evaluated: whether it has metrics or an `eval_network`; without, levels have no effect.

    Raises:
        ConfigError: an unknown level or key.
    """
    settings = _settings(config or {})
    compiled: Compile | None
    if isinstance(level, Compile):
        compiled = level
    else:
        checks.one_of("boost_level", level, LEVELS, did_you_mean(str(level), LEVELS))
        compiled = LEVELS[level]
        if compiled is not None:
            compiled = dataclasses.replace(compiled, **settings)
    if compiled is None or _is_off(config or {}):
        return None
    missing = []
    if not has_optimizer:
        missing.append("no optimizer")
    if not is_evaluated:
        missing.append("no eval_network or metrics")
    if missing:
        log.warning("boost_level=%r has no effect: %s", level, " and ".join(missing))
        return None
    return compiled


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `hb.Compile` in a `boost_config_dict`; log the other keys."""
    if not isinstance(config, Mapping):
        raise ArgumentTypeError(
            f"boost_config_dict: must be a dict, got {config!r:.60}. Give settings by name."
        )
    choices = (*_FIELDS, *_CLAUSES)
    unknown = [key for key in config if key not in choices]
    if unknown:
        raise ConfigError(
            f"boost_config_dict: unknown key, got {unknown[0]!r}. "
            f"{did_you_mean(unknown[0], choices)}"
        )
    ignored = [key for key in config if key in _CLAUSES]
    if _is_off(config):
        ignored.remove("boost")
    if ignored:
        log.info(
            "boost_config_dict: %s have no effect, because boost_level compiles the training step "
            "here; its settings are %s",
            ", ".join(ignored),
            ", ".join(_FIELDS),
        )
    return {key: value for key, value in config.items() if key in _FIELDS}


def _is_off(config: Mapping[str, Any]) -> bool:
    """Return whether a `boost_config_dict` turns boosting off."""
    clause = config.get("boost")
    return isinstance(clause, Mapping) and clause.get("mode") == "disable_all"
