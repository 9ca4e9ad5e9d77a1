# SPDX-License-Identifier: Apache-2.0
"""`init`, its end, and the iterators of automatic graph modification."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from hotbed import checks
from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.checks import MOST_INT, boolean
from hotbed.compat.mx_rec.framework import Options
from hotbed.compat.mx_rec.no_effect import REASONS, log_no_effect
from hotbed.config import did_you_mean
from hotbed.errors import ConfigError

__all__ = ["get_initializer", "init", "terminate_config_initializer"]

log = logging.getLogger("hotbed.compat.mx_rec")

NOT_NEEDED = [name.removeprefix("init.") for name in REASONS if name.startswith("init.")]
"""Keywords of `init` that have no effect here."""

_BOOLEANS = ("use_dynamic", "use_dynamic_expansion", "if_load", "is_incremental_checkpoint")
_STEPS = ("max_steps", "train_steps", "eval_steps", "save_steps")
_SECONDS = ("save_checkpoint_due_time", "save_delta_checkpoints_secs")


def init(**options: Any) -> None:
    """Initialize the framework: step 1.

    Args:
        options: the fields of `hotbed.compat.mx_rec.framework.Options`. Boolean ones may be the
            texts "True" and "False". Keywords that have no effect here are logged once.

    Raises:
        StateError: it is called twice, without `terminate_config_initializer` between.
        ConfigError: a keyword is unknown, or a value is wrong.

    Example: `mx.init(train_steps=200, use_dynamic=True, use_dynamic_expansion=True)`
    """
    names = [field.name for field in fields(Options)]
    for name in options:
        if name not in names and name not in NOT_NEEDED:
            advice = did_you_mean(name, [*names, *NOT_NEEDED])
            raise ConfigError(f"init: unknown keyword, got {name!r}. {advice}")
    values = {name: _checked(name, options[name]) for name in names if name in options}
    _check_together(Options(**values))
    framework.begin(Options(**values))
    log_no_effect("init", **{name: True for name in options if name in NOT_NEEDED})


def _checked(name: str, value: Any) -> Any:
    where = f"init: {name}"
    if name in _BOOLEANS:
        return boolean(where, value)
    if name in _STEPS:
        checks.whole_number(where, value, -1, MOST_INT)
    elif name in _SECONDS and value is not None:
        checks.whole_number(where, value, 1, MOST_INT)
    elif value is not None:
        checks.whole_number(where, value, 0, MOST_INT)
    return value


def _check_together(options: Options) -> None:
    """Raise ConfigError if keywords do not go together."""
    steps = (options.max_steps, options.train_steps, options.eval_steps)
    if not any(steps):
        raise ConfigError(
            "init: max_steps, train_steps and eval_steps cannot all be 0, got 0 for each. Leave "
            "them out: a loop counts its own steps."
        )
    for name in _SECONDS:
        if options.is_incremental_checkpoint and getattr(options, name) is None:
            raise ConfigError(
                f"init: is_incremental_checkpoint needs {name}, got None. Give both periods, in "
                "seconds."
            )


def terminate_config_initializer() -> None:
    """End the framework; `init` may be called again. Without a framework, log a warning."""
    ended = framework.end()
    if ended is None:
        log.warning("terminate_config_initializer: the framework is not initialized")
    else:
        ended.close()


def get_initializer(is_training: bool) -> Callable[[], Iterator[Any]]:
    """Return a function that starts to iterate over the training or the evaluation data.

    It is for automatic graph modification; `modify_graph_and_start_emb_cache` gets the data.
    """
    is_training = boolean("get_initializer: is_training", is_training)
    return framework.current().started("get_initializer").initializer(is_training)
