# SPDX-License-Identifier: Apache-2.0
"""A job on several processes, called ranks: which can run there, and what the first does alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from hotbed.job.job import Job

T = TypeVar("T")


def num_ranks() -> int:
    """Return the number of processes that train together; this is one of them."""
    from hotbed.parallel.world import trains_together, world_size

    return world_size() if trains_together() else 1


def from_first(make: Callable[[], T]) -> T:
    """Return what `make` returns on the first rank; its error is raised on every rank.

    One process calls it.
    """
    if num_ranks() == 1:
        return make()
    from hotbed.parallel import Ranks

    return Ranks.of_job().from_first(make)


def together() -> AbstractContextManager[None]:
    """Return a block whose errors are raised on every rank; one process has it, too."""
    if num_ranks() == 1:
        return nullcontext()
    from hotbed import parallel

    return parallel.together()


def check_same(job: Job, command: str, flags: Mapping[str, object] | None = None) -> None:
    """Raise ConfigError, on every rank, if the ranks do not all do the same with one job.

    Args:
        job: the job as this process read it.
        command: of `hotbed`.
        flags: of the command, by name.
    """
    if num_ranks() == 1:
        return
    from hotbed.parallel import Ranks

    settings = {"the command": f"hotbed {command}", **(flags or {})}
    Ranks.of_job().check_equal({**settings, **_values("job", job.with_classes().to_json())})


def _values(name: str, plain: Any) -> dict[str, Any]:
    """Return the values in a tree of them, by their dotted paths."""
    if isinstance(plain, Mapping):
        parts = [_values(f"{name}.{key}", value) for key, value in plain.items()]
        return {path: value for part in parts for path, value in part.items()}
    return {name: plain}


def for_ranks(job: Job, ranks: int) -> Job:
    """Return the job as `ranks` processes train it: with its number of grains.

    Raises:
        ConfigError: there are fewer grains than processes.
    """
    return replace(job, grains=job.num_grains(ranks))
