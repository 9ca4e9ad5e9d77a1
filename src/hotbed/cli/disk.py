# SPDX-License-Identifier: Apache-2.0
"""How fast a disk is for `hb.Ssd`: what `hotbed doctor --disk` measures, and prints."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rich.markup import escape
from rich.table import Table as Grid

from hotbed.cli.show import console, mebibytes, print_line
from hotbed.errors import ConfigError, NotWritten
from hotbed.files import check_scratch, file_system
from hotbed.prepare import Stage

FILE_BYTES = 1 << 30
"""Of the file that is read: more than the caches of most disks hold."""
DEPTHS = (1, 32)
"""Reads under way at once: one after the other, and as training reads ahead."""
_PIECE_BYTES = 32 << 20
_ROUNDS = 3
_SYNCS = 50


@dataclass(frozen=True)
class DiskSpeed:
    """What a disk does, by the engines that tables use.

    Attributes:
        folder: where it was measured.
        file_system: such as ext4; "" where the system does not say.
        is_direct: whether reads pass by the page cache; if not, memory is measured.
        write_bytes: written one after the other, a second.
        reads: random reads of 4 KiB a second, by engine and depth; the median of three rounds.
        sync_seconds: median and longest time until the disk has a block that was written.
    """

    folder: str
    file_system: str
    is_direct: bool
    write_bytes: float
    reads: Mapping[tuple[str, int], float]
    sync_seconds: tuple[float, float]


def measure(
    folder: str,
    report: Callable[[Stage], None],
    *,
    where: str = "--disk",
    file_bytes: int = FILE_BYTES,
    round_seconds: float = 1.0,
) -> DiskSpeed:
    """Write a file without a name, read it at random for some seconds, and let it go.

    Args:
        folder: on the disk.
        report: receives the stages.
        where: what named the folder, for messages.
        file_bytes: of the file, a multiple of 32 MiB.
        round_seconds: of each of three rounds for each engine and depth.

    Raises:
        ConfigError: no file can be made in the folder, or its disk has too little space.
        NotWritten: the disk fails.
    """
    check_scratch(folder, where)
    system = os.statvfs(folder)
    free_bytes = system.f_bavail * system.f_frsize
    if free_bytes < 2 * file_bytes:
        raise ConfigError(
            f"{where}: a file of {file_bytes:,} bytes is measured, which may take half of the free "
            f"space, got {free_bytes:,} bytes free in {folder}. Free some, or name another folder."
        )
    core: Any = import_module("hotbed._core")
    try:
        disk = core.Disk(folder)
        write_bytes = _write(disk, file_bytes, report)
        engines = ["io_uring"] if core.can_use_uring() else []
        reads = _read(disk, [*engines, "threads"], round_seconds, report)
        syncs = _sync(disk, report)
    except RuntimeError as error:
        raise NotWritten(
            f"{where}: {folder} fails, got {error}. Look at the disk, or name another folder."
        ) from error
    kind = file_system(os.path.realpath(folder))
    return DiskSpeed(folder, kind, disk.is_direct, write_bytes, reads, syncs)


def _write(disk: Any, file_bytes: int, report: Callable[[Stage], None]) -> float:
    total = file_bytes // _PIECE_BYTES
    start = time.perf_counter()
    for number in range(total):
        disk.fill(_PIECE_BYTES)
        report(Stage("write", number + 1, total))
    disk.sync()
    return file_bytes / (time.perf_counter() - start)


def _read(
    disk: Any, engines: list[str], seconds: float, report: Callable[[Stage], None]
) -> dict[tuple[str, int], float]:
    settings = [(engine, depth) for engine in engines for depth in DEPTHS]
    rounds: dict[tuple[str, int], list[float]] = {setting: [] for setting in settings}
    done = 0
    for _ in range(_ROUNDS):  # in turn: a disk differs from minute to minute
        for engine, depth in settings:
            start = time.perf_counter()
            count = disk.read(engine, depth, seconds)
            rounds[engine, depth].append(count / (time.perf_counter() - start))
            done += 1
            report(Stage("read", done, _ROUNDS * len(settings)))
    return {setting: statistics.median(rates) for setting, rates in rounds.items()}


def _sync(disk: Any, report: Callable[[Stage], None]) -> tuple[float, float]:
    seconds = []
    for number in range(_SYNCS):
        seconds.append(disk.sync())
        report(Stage("sync", number + 1, _SYNCS))
    return statistics.median(seconds), max(seconds)


def print_disk(speed: DiskSpeed) -> None:
    """Print how fast a disk is."""
    kind = f", {speed.file_system}" if speed.file_system else ""
    head = [f"random reads a second, {depth} at once" for depth in DEPTHS]
    grid = Grid("engine", *head, title=f"{escape(speed.folder)}{kind}", title_justify="left")
    for engine in dict.fromkeys(engine for engine, _ in speed.reads):
        grid.add_row(engine, *(f"{speed.reads[engine, depth]:,.0f}" for depth in DEPTHS))
    console.print(grid)
    median, longest = speed.sync_seconds
    print_line(
        f"fdatasync of a block: {median * 1e3:.2f} ms, {longest * 1e3:.2f} ms at most\n"
        f"writes one after the other: {mebibytes(speed.write_bytes)} MiB/s"
    )
    if "io_uring" not in {engine for engine, _ in speed.reads}:
        print_line("io_uring is not allowed here: threads read, at 2 to 3 times its CPU time")
    if not speed.is_direct:
        print_line("reads go through the page cache here: these are figures of memory")
