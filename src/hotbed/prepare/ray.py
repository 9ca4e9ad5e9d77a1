# SPDX-License-Identifier: Apache-2.0
"""Ray: the tasks of a preparation on a cluster, through Ray Data. Needs the extra `hotbed[ray]`."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotbed import checks
from hotbed.errors import ConfigError, MissingExtra
from hotbed.prepare.engine import Engine, Item, Progress, Result, no_progress

_STORE_BYTES = 128 << 20  # results are small


@dataclass(frozen=True)
class Ray(Engine):
    """Tasks of Ray Data. They are the tasks of `Local`, and give the same files.

    A Ray that runs already is used as it is. Otherwise the engine connects to the cluster at
    `address`, or at the environment variable RAY_ADDRESS, or starts Ray on this machine until the
    process ends. All machines of a cluster need the same hotbed installed, and must see the source
    and the output under the same paths, such as on a network file system.

    Args:
        workers: tasks that run at a time, one processor each; None = as many as there are
            processors.
        address: of the cluster, such as "auto" or "ray://host:10001".

    Raises:
        MissingExtra: Ray is not installed; `pip install hotbed[ray]`.
    """

    workers: int | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        checks.at_least("ray.workers", self.workers, 1)
        _ray()

    @property
    def num_workers(self) -> int:
        if self.workers:
            return self.workers
        self._connect()
        return max(1, int(_ray().cluster_resources().get("CPU", 1)))

    def map(
        self,
        task: Callable[[Item], Result],
        items: Sequence[Item],
        progress: Progress = no_progress,
    ) -> Iterator[Result]:
        if not items:
            return
        self._connect()
        work = _ray().put((os.getcwd(), task, list(items)))
        data = _ray().data
        numbers = list(range(len(items)))
        # one block for each item, so that each item is a task
        rows = data.from_items(numbers, override_num_blocks=len(items))
        rows.context.execution_options.preserve_order = True
        rows.context.enable_progress_bars = False
        tasks_at_a_time = min(self.num_workers, len(items))
        outcomes = rows.map(
            _run_item, fn_args=[work], compute=data.TaskPoolStrategy(size=tasks_at_a_time)
        )
        for done, row in enumerate(outcomes.iter_rows(), 1):
            outcome: _Outcome = row["outcome"]
            if outcome.error is not None:
                raise outcome.error
            yield outcome.result
            progress(done)

    def check_folder(self, folder: Path) -> None:
        self._connect()
        ray = _ray()
        is_folder = ray.remote(os.path.isdir)
        answers: dict[str, Any] = {}
        for node in ray.nodes():
            if node["Alive"] and node["Resources"].get("CPU"):
                on_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                    node["NodeID"], soft=False
                )
                answer = is_folder.options(scheduling_strategy=on_node).remote(str(folder))
                answers[node["NodeManagerHostname"]] = answer
        for host, answer in answers.items():
            if not ray.get(answer):
                raise ConfigError(
                    f"the engine 'ray': the machine {host!r} does not see the folder {folder}. "
                    "Write to a file system that all machines of the cluster share."
                )

    def _connect(self) -> None:
        ray = _ray()
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent unless asked for
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        address = self.address or os.environ.get("RAY_ADDRESS")
        if address:
            ray.init(address, **options)
            return
        ray.init(
            num_cpus=self.workers,
            object_store_memory=_STORE_BYTES,
            include_dashboard=False,
            **options,
        )


@dataclass(frozen=True)
class _Outcome:
    """The result of a task, or its error, which Ray would wrap in its own."""

    result: Any = None
    error: Exception | None = None


def _run_item(row: dict[str, Any], work: Any) -> dict[str, Any]:
    """Return the outcome of one item; Ray takes it along as an object."""
    task, items = _work(work)
    try:
        outcome = _Outcome(result=task(items[row["item"]]))
    except Exception as error:
        outcome = _Outcome(error=error)
    return {"outcome": outcome}


@functools.lru_cache(maxsize=1)
def _work(reference: Any) -> Any:
    """Return the task and its items, which a process of Ray reads once.

    Relative paths are then those of the process that prepares.
    """
    folder, task, items = _ray().get(reference)
    if os.path.isdir(folder):
        os.chdir(folder)
    return task, items


def _ray() -> Any:
    try:
        import ray
        import ray.data
        import ray.util.scheduling_strategies
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"the engine 'ray': {error.name} is not installed. Run pip install hotbed[ray]."
        ) from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # or it logs each stage
    return ray
