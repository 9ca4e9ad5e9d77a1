# SPDX-License-Identifier: Apache-2.0
"""What `hotbed plan` reads from its options, and prints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table as Grid

from hotbed.cli.disk import DEPTHS, measure
from hotbed.cli.show import StageBars, console, print_line
from hotbed.errors import ConfigError
from hotbed.files import Where
from hotbed.job.job import Job
from hotbed.job.plan_page import (
    HEAD,
    HEAD_BESIDE,
    beside_training,
    number_text_of,
    row_of,
    size_text,
)
from hotbed.job.planning import Disk, JobPlan, folders_of

BYTES = {
    "B": 1.0,
    "kB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "TiB": 2.0**40,
}
RATES = {"kbit": 125.0, "Mbit": 125e3, "Gbit": 125e6, "kB": 1e3, "MB": 1e6, "GB": 1e9}
WIDE = 100
"""Columns of a terminal that has room between the columns of a plan."""
READS = {"M": 1e6, "k": 1e3}
DISK_BYTES = 256 << 20
"""Of the file that shows how fast a disk is."""
ROUND_SECONDS = 0.3
TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
MOST_LINES = 16


def quantity(option: str, text: str | None, units: Mapping[str, float]) -> float | None:
    """Return a number with a unit, such as 64GB, in the base of its units; None for None.

    Raises:
        ConfigError: it is not such a number.
    """
    if text is None:
        return None
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?) *([A-Za-z]+?)(?:/s|ps)?", text.strip())
    by_name = {name.lower(): factor for name, factor in units.items()}
    try:
        assert match is not None
        value = float(match[1]) * by_name[match[2].lower()]
        assert value > 0
    except (AssertionError, KeyError, ValueError):
        raise ConfigError(
            f"{option}: not a number above 0 with a unit, got {text!r}. Write such as "
            f"10{list(units)[-1]}; units are {', '.join(units)}."
        ) from None
    return value


def disks_of(job: Job, reads: float | None) -> list[Disk]:
    """Return how fast the disks of the job's tables are: as the user says, or as measured here.

    Args:
        job: what is planned.
        reads: a second, at random; None = measure.

    Raises:
        ConfigError: a folder does not exist here, or cannot be used.
    """
    folders = folders_of(job)
    if reads is not None:
        return [Disk(reads) for _ in folders]
    return [_measured(folder, engine) for folder, engine in folders.items()]


def _measured(folder: str, engine: str) -> Disk:
    with StageBars() as bars:
        speed = measure(
            folder,
            bars.update,
            where="the tier of tables, whose disk a plan measures without --disk-reads",
            file_bytes=DISK_BYTES,
            round_seconds=ROUND_SECONDS,
        )
    by_engine = {
        engine: rate for (engine, depth), rate in speed.reads.items() if depth == max(DEPTHS)
    }
    if engine not in by_engine:  # the best one is io_uring, where the kernel allows it
        engine = "io_uring" if "io_uring" in by_engine else "threads"
    return Disk(by_engine[engine], engine, speed.write_bytes)


def expected_rows(assignments: Sequence[str] | None) -> dict[str, float]:
    """Return the rows of `--rows TABLE=N`, by table."""
    rows = {}
    for assignment in assignments or []:
        name, equals, text = assignment.partition("=")
        try:
            rows[name.strip()] = float(text)
        except ValueError:
            equals = ""
        if not equals:
            raise ConfigError(
                f"--rows: not a table and a number, got {assignment!r}. Write --rows user=1e9."
            )
    return rows


def print_plan(plan: JobPlan, page: Where) -> None:
    """Print a plan: a line for each number of ranks, then what each rank has, then notes."""
    work = plan.work
    link = ""
    if len(plan.plans) > 1:
        speed = f"{size_text(work.link.bandwidth)}/s"
        link = f"; a message {1e6 * work.link.latency:,.0f} us and {speed}"
    print_line(
        f"{plan.sampled.samples:,} samples read; a process without rows "
        f"{size_text(work.process_bytes)}; "
        f"a step of one process {1e3 * plan.plans[0].seconds:.1f} ms{link}"
    )
    grid = Grid(*HEAD, padding=(0, 1 if console.width >= WIDE else 0))
    for of_ranks in plan.plans:
        grid.add_row(*row_of(plan, of_ranks))
    console.print(grid)
    beside = Grid(*HEAD_BESIDE, padding=(0, 1 if console.width >= WIDE else 0))
    for of_ranks in plan.plans:
        beside.add_row(*beside_training(plan, of_ranks))
    console.print(beside)
    if len(plan.plans) == 2:
        _print_ranks(plan)
    for note in plan.notes:
        print_line(escape(note))
    print_line(f"plan: {page}")


def _print_ranks(plan: JobPlan) -> None:
    """Print what each rank has; the largest, if there are many."""
    of_ranks = plan.plans[-1]
    largest = sorted(of_ranks.rows.argsort()[::-1][:MOST_LINES].tolist())
    grid = Grid("rank", "rows", "memory", "ids asked for a step", "sent a step")
    for rank in largest:
        grid.add_row(
            str(rank),
            number_text_of(of_ranks.rows[rank]),
            size_text(of_ranks.memory[rank]),
            number_text_of(of_ranks.asked[rank]),
            size_text(of_ranks.sent_bytes[rank]),
        )
    console.print(grid)
    if len(largest) < of_ranks.ranks:
        print_line(f"the {len(largest)} ranks with most rows, of {of_ranks.ranks}")
