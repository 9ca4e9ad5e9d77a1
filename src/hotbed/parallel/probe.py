# SPDX-License-Identifier: Apache-2.0
"""Measure how fast the ranks of a job reach each other."""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch

from .connections import name_problems, unreached_explained
from .ranks import Ranks

TIMEOUT = timedelta(seconds=10)
LONG = timedelta(seconds=300)
"""For ranks that wait until another one has computed."""
ROUNDS: Mapping[int, int] = {8: 100, 64 * 1024: 40, 4 * 1024 * 1024: 8}
"""Bytes that a rank sends to each other one, and how often."""

T = TypeVar("T")


@dataclass(frozen=True)
class RankConnections:
    """How the ranks of a job reach each other.

    Attributes:
        hosts: the host name of each rank.
        seconds: of a call in which each rank sends `num_bytes` to each other one, in the median
            of the least disturbed third of calls, of the slowest rank.
        problems: of the names of hosts, each once.
    """

    hosts: Sequence[str]
    seconds: Mapping[int, float]
    problems: Sequence[str]

    def bandwidth(self, num_bytes: int) -> float:
        """Return the bytes a second that each rank sends in calls of `num_bytes` to each other."""
        return (len(self.hosts) - 1) * num_bytes / self.seconds[num_bytes]


def probe() -> RankConnections:
    """Connect all ranks, and measure; each of them calls this.

    Raises:
        ConfigError: a rank does not answer within 10 seconds.
    """
    ranks = Ranks.of_job(TIMEOUT)
    with unreached_explained():
        names = ranks.gather_objects((socket.gethostname(), name_problems()))
        seconds = {num_bytes: _measure(ranks, num_bytes) for num_bytes in ROUNDS}
    every_problem = dict.fromkeys(problem for _, of_rank in names for problem in of_rank)
    return RankConnections([host for host, _ in names], seconds, list(every_problem))


def crowding(compute: Callable[[], float]) -> float:
    """Return how many times as long work takes on all ranks at once as on one after the other.

    Args:
        compute: does it, and returns the seconds that it took a processor; each rank gives it.
    """
    ranks = Ranks.of_job(LONG)
    alone = 0.0
    for rank in range(ranks.size):
        if rank == ranks.rank:
            alone = compute()
        ranks.gather_objects(None)  # the others wait
    together = compute()
    every = ranks.gather_objects((alone, together))
    return float(max(1.0, *(longer / max(shorter, 1e-9) for shorter, longer in every)))


def on_two_ranks(task: Callable[..., T], *arguments: Any) -> list[T]:
    """Call a function in two new processes of this machine that are ranks; return the results.

    Args:
        task: a function at the top of its file.
        arguments: of the task.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        calls = [(rank, port, task, arguments) for rank in range(2)]
        return pool.starmap(_as_rank, calls, chunksize=1)


def _as_rank(rank: int, port: int, task: Callable[..., T], arguments: Sequence[Any]) -> T:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return task(*arguments)


def _measure(ranks: Ranks, num_bytes: int) -> float:
    """Return the seconds of a call: the median of a rank's least disturbed third, of the slowest.

    What else runs on a machine disturbs some calls, and others not.
    """
    sizes = [num_bytes] * ranks.size
    sizes[ranks.rank] = 0
    parts = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    rounds = []
    for _ in range(ROUNDS[num_bytes]):
        began = time.perf_counter()
        ranks.exchange([parts], sizes)
        rounds.append(time.perf_counter() - began)
    third = -(-len(rounds) // 3)
    medians = [
        statistics.median(rounds[first : first + third]) for first in range(0, len(rounds), third)
    ]
    median = torch.tensor([min(medians)], dtype=torch.float64)
    return float(ranks.gather(median).max())
