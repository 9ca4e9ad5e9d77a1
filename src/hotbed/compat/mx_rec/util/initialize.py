# SPDX-License-Identifier: Apache-2.0
"""`init`, its end, and the iterators of automatic graph modification."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import hotbed
from hotbed import checks
from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.checks import MOST_INT, boolean
from hotbed.compat.mx_rec.errors import CallError
from hotbed.compat.mx_rec.no_effect import ARGUMENTS, REASONS
from hotbed.compat.mx_rec.options import Options
from hotbed.compat.mx_rec.ranks import ProgramRanks
from hotbed.compat.mx_rec.util.communication.hccl_ops import get_rank_id, get_rank_size
from hotbed.compat.mx_rec.util.ops import import_host_pipeline_ops
from hotbed.config import did_you_mean
from hotbed.errors import ConfigError
from hotbed.parallel import Ranks, at
from hotbed.parallel.world import trains_together

__all__ = [
    "ConfigInitializer",
    "clear_channel",
    "get_host_pipeline_ops",
    "get_initializer",
    "get_rank_id",
    "get_rank_size",
    "get_use_dynamic_expansion",
    "init",
    "set_if_load",
    "terminate_config_initializer",
    "version",
]

log = logging.getLogger("hotbed.compat.mx_rec")

NOT_NEEDED = [name.removeprefix("init.") for name in REASONS if name.startswith("init.")]
"""Keywords of `init` that have no effect here."""

_BOOLEANS = ("use_dynamic", "use_dynamic_expansion", "if_load", "is_incremental_checkpoint")
_STEPS = ("max_steps", "train_steps", "eval_steps", "save_steps")
_SECONDS = ("save_checkpoint_due_time", "save_delta_checkpoints_secs")


@at("init")
def init(**options: Any) -> None:
    """Initialize the framework: step 1. Where several ranks train, they connect here.

    Args:
        options: the fields of `hotbed.compat.mx_rec.options.Options`. Boolean ones may be the
            texts "True" and "False". Keywords that have no effect here are logged once.

    Raises:
        StateError: it is called twice, without `terminate_config_initializer` between.
        ConfigError: a keyword is unknown, or a value is wrong.

    Example: `mx.init(train_steps=200, use_dynamic=True, use_dynamic_expansion=True)`
    """
    if trains_together():
        Ranks.of_job()  # so that the others hear of an error of this one
    names = [field.name for field in fields(Options)]
    for name in options:
        if name not in names and name not in NOT_NEEDED:
            advice = did_you_mean(name, [*names, *NOT_NEEDED])
            raise ConfigError(f"init: unknown keyword, got {name!r}. {advice}")
    values = {name: _checked(name, options[name]) for name in names if name in options}
    _check_together(Options(**values))
    framework.begin(Options(**values), ProgramRanks if trains_together() else None)
    for name in options:
        ARGUMENTS.log_no_effect(f"init.{name}", when=name in NOT_NEEDED)


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
    owner = framework.current()
    owner.started("get_initializer")
    if owner.automatic is None:
        raise CallError(
            "get_initializer: the data are those of modify_graph_and_start_emb_cache, got a "
            "pipeline that start_asc_pipeline started. Iterate over dataset.map(insert)."
        )
    return owner.automatic.initializer(is_training)


def get_use_dynamic_expansion() -> bool:
    """Return what `init` got for `use_dynamic_expansion`."""
    return framework.current().options.use_dynamic_expansion


def set_if_load(if_load: bool | str) -> None:
    """Say whether a saved state is loaded, as `init(if_load=...)` does.

    Raises:
        StateError: step 8 has run.
    """
    owner = framework.current()
    owner.check_not_started("set_if_load")
    owner.options = replace(owner.options, if_load=boolean("set_if_load: if_load", if_load))


def clear_channel(is_train_channel: bool = False) -> None:
    """Have no effect: each loop over data begins anew."""
    ARGUMENTS.log_no_effect("clear_channel.channel")


def version() -> str:
    """Return the version of Hotbed."""
    return hotbed.__version__


get_host_pipeline_ops = import_host_pipeline_ops
"""The older name of `import_host_pipeline_ops`."""


class TrainParams:
    """What `ConfigInitializer.get_instance().train_params_config` offers to programs."""

    @property
    def ascend_global_hashtable_collection(self) -> str:
        """The key under which `get_collection` has the sparse tables."""
        return framework.current().hashtable_collection

    @ascend_global_hashtable_collection.setter
    def ascend_global_hashtable_collection(self, name: str) -> None:
        framework.current().hashtable_collection = name

    def get_target_batch(self, is_training: bool) -> Any:
        """Return the newest batch that the iterator of training or of evaluation has yielded.

        Raises:
            CallError: it has yielded none, or the program is not in automatic mode.
        """
        is_training = boolean("get_target_batch: is_training", is_training)
        automatic = framework.current().automatic
        if automatic is None or is_training not in automatic.newest:
            raise CallError(
                "get_target_batch: the batch is one that get_initializer yields, got a call before "
                "the first one. Iterate over get_initializer first."
            )
        return automatic.newest[is_training]

    def get_initializer(self, is_training: bool) -> Callable[[], Iterator[Any]]:
        """Return what `get_initializer` returns."""
        return get_initializer(is_training)

    def get_training_mode_channel_id(self, is_training: bool) -> int:
        """Return the channel that `clear_channel` takes: 0 of training, 1 of evaluation."""
        return 0 if is_training else 1


class ConfigInitializer:
    """What a program reads of its settings: `ConfigInitializer.get_instance()`.

    Attributes:
        train_params_config: the iterators of automatic mode, and the name of a collection.
    """

    def __init__(self) -> None:
        self.train_params_config = TrainParams()

    @staticmethod
    def get_instance() -> ConfigInitializer:
        """Return the settings; raise StateError before `init`."""
        framework.current()
        return ConfigInitializer()

    @property
    def use_dynamic_expansion(self) -> bool:
        """What `init` got."""
        return get_use_dynamic_expansion()

    @property
    def if_load(self) -> bool:
        """Whether a saved state is loaded; it may be set before step 8."""
        return framework.current().options.if_load

    @if_load.setter
    def if_load(self, if_load: bool | str) -> None:
        set_if_load(if_load)
