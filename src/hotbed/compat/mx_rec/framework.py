# SPDX-License-Identifier: Apache-2.0
"""Framework: what the calls from `init` to `terminate_config_initializer` have described.

It imports none of the modules that call `current`. They register what they create, and it knows
these objects by the interfaces beside their earliest user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hotbed.compat.mx_rec.constants.constants import ASCEND_GLOBAL_HASHTABLE_COLLECTION
from hotbed.compat.mx_rec.errors import CallError, StateError
from hotbed.parallel import WHOLE, Shard
from hotbed.training.run import WallClock

if TYPE_CHECKING:
    from torch import nn

    from hotbed.compat.mx_rec.automatic import Automatic
    from hotbed.compat.mx_rec.columns import InsertFunction
    from hotbed.compat.mx_rec.description import TableDescription
    from hotbed.compat.mx_rec.options import Options
    from hotbed.compat.mx_rec.pipeline import Pipeline
    from hotbed.compat.mx_rec.progress import BarrierHook, EvictionHook, SavingHook
    from hotbed.compat.mx_rec.ranks import ProgramRanks
    from hotbed.compat.mx_rec.updates import RowOptimizer


@dataclass(frozen=True)
class TracedLookup:
    """One `sparse_lookup` in the forward pass of a model that step 8 traces.

    Attributes:
        table: the description of its table.
        options: keywords of the call.
    """

    table: TableDescription
    options: Mapping[str, Any]


@dataclass
class Framework:
    """The state of a program between `init` and `terminate_config_initializer`.

    Attributes:
        options: the keywords of `init`.
        optimizers: sparse optimizers, in order of creation.
        inserts: insert functions, likewise.
        tables: sparse tables by name, likewise.
        hashtable_collection: the key of `get_collection` that has the tables.
        hooks: eviction hooks, likewise.
        savers: savers, likewise.
        saver_hooks: hooks that save, likewise.
        models: those whose dense parameters were asked for, likewise.
        pipeline: what step 8 builds; None before.
        automatic: the lookups of the model in automatic mode; None in FeatureSpec mode.
        clock: the clock of this machine, with the journal of its decisions.
        last_save: what `Saver.save` returned last, or the path and step that were restored.
        traced: the lookups of a model that step 8 traces; None outside of a trace.
        times: returns the seconds of a batch; None = the collection of timestamps is empty.
        ranks: the processes of the program; None = there is one.
    """

    options: Options
    optimizers: list[RowOptimizer] = field(default_factory=list)
    inserts: list[InsertFunction] = field(default_factory=list)
    tables: dict[str, TableDescription] = field(default_factory=dict)
    hashtable_collection: str = ASCEND_GLOBAL_HASHTABLE_COLLECTION
    hooks: list[EvictionHook] = field(default_factory=list)
    savers: list[SavingHook] = field(default_factory=list)
    saver_hooks: list[BarrierHook] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)
    pipeline: Pipeline | None = None
    automatic: Automatic | None = None
    clock: WallClock = field(default_factory=WallClock)
    last_save: str | None = None
    traced: list[TracedLookup] | None = None
    times: Callable[[Any], Any] | None = None
    ranks: ProgramRanks | None = None

    @property
    def shard(self) -> Shard:
        """The rows that this process owns."""
        return WHOLE if self.ranks is None else self.ranks.shard

    def started(self, caller: str) -> Pipeline:
        """Return the pipeline.

        Raises:
            CallError: step 8 has not run.
            StateError: the framework was terminated.
        """
        if not any(framework is self for framework in _frameworks):
            raise StateError(
                f"{caller}: its framework is terminated, got a call after "
                "terminate_config_initializer(). Make it anew after init, or terminate later."
            )
        if self.pipeline is None:
            raise CallError(
                f"{caller}: rows exist from step 8 on, got a call before it. Call "
                "start_asc_pipeline() or modify_graph_and_start_emb_cache(model, ...) first."
            )
        return self.pipeline

    def close(self) -> None:
        """Wait for what is being saved, and release tables and files."""
        try:
            for saver in self.savers:
                saver.wait()
        finally:
            if self.clock.journal is not None:
                self.clock.journal.close()
            if self.pipeline is not None:
                self.pipeline.close()
            if self.automatic is not None:
                self.automatic.close()

    def check_not_started(self, caller: str) -> None:
        """Raise StateError if step 8 has run."""
        if self.pipeline is not None:
            raise StateError(
                f"{caller}: the pipeline runs already, got a call after step 8. Call it before "
                "start_asc_pipeline() or modify_graph_and_start_emb_cache(model, ...)."
            )


_frameworks: list[Framework] = []


def begin(options: Options, ranks: Callable[[], ProgramRanks] | None = None) -> Framework:
    """Make the framework of this process; raise StateError if there is one.

    Args:
        options: the keywords of `init`.
        ranks: connects the processes of the program; None = there is one.
    """
    if _frameworks:
        raise StateError(
            "init: the framework is initialized already, got a second call. Call "
            "terminate_config_initializer() first."
        )
    owner = Framework(options, ranks=None if ranks is None else ranks())
    owner.clock.shard = owner.shard
    _frameworks.append(owner)
    return owner


def current() -> Framework:
    """Return the framework; raise StateError before `init`."""
    if not _frameworks:
        raise StateError(
            "mx_rec: the framework is not initialized, got a call before init. Call "
            "mx_rec.init(...) first."
        )
    return _frameworks[0]


def ranks_of_program() -> ProgramRanks | None:
    """Return the processes of the program; None before `init`, or where there is one."""
    return _frameworks[0].ranks if _frameworks else None


def end() -> Framework | None:
    """Forget the framework and return it; None before `init`."""
    return _frameworks.pop() if _frameworks else None
