# SPDX-License-Identifier: Apache-2.0
"""How much memory the kernel allows, and a warning before it ends the process for want of it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("hotbed")

CONTAINER = "the container"
WARN_SHARE = 0.9
CALM_SHARE = 0.8
"""After a warning, the use must fall below this share before another crossing is logged."""
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True)
class MemoryLimit:
    """A limit of memory, and how much of it is in use.

    Attributes:
        limit_bytes: above it the kernel ends processes.
        used_bytes: of all processes under the limit, without file pages that can be dropped.
        of: "the container" (any cgroup, as of a systemd unit) or "this machine".
    """

    limit_bytes: int
    used_bytes: int
    of: str

    @property
    def share(self) -> float:
        """The part of the limit that is in use."""
        return self.used_bytes / self.limit_bytes


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Return the limits that hold for this process, the smallest first; empty if unknown.

    `root`: where `proc` and `sys` are.
    """
    machine = _of_machine(root / "proc/meminfo")
    limits = [] if machine is None else [machine]
    for folder, names in _cgroups(root):
        limit = _of_cgroup(folder, names)
        # a cgroup without a limit says "max", or a number that no machine has
        if limit is not None and (machine is None or limit.limit_bytes < machine.limit_bytes):
            limits.append(limit)
    return sorted(limits, key=lambda limit: limit.limit_bytes)


def _of_machine(meminfo: Path) -> MemoryLimit | None:
    try:
        lines = (line.split() for line in meminfo.read_text().splitlines())
        kibibytes = {words[0]: int(words[1]) for words in lines if len(words) > 1}
        total = kibibytes["MemTotal:"] * 1024
        return MemoryLimit(total, total - kibibytes["MemAvailable:"] * 1024, "this machine")
    except (OSError, KeyError, ValueError):  # only Linux says it
        return None


def _cgroups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the memory cgroups of this process and those above them, of both versions."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            top = mount / "memory"
            names = _V1
        elif not controllers:
            top = mount
            names = _V2
        else:
            continue
        folder = top / path.lstrip("/")
        # a container may see its own cgroup as the top, under a path that is the host's
        for level in (folder, *folder.parents):
            if level.is_relative_to(top) and level.is_dir():
                yield level, names


def _of_cgroup(folder: Path, names: tuple[str, str, str]) -> MemoryLimit | None:
    limit_name, used_name, droppable_name = names
    try:
        limit = (folder / limit_name).read_text().strip()
        used = int((folder / used_name).read_text())
        stat = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        droppable = next((int(words[1]) for words in stat if words[0] == droppable_name), 0)
        return MemoryLimit(int(limit), max(0, used - droppable), CONTAINER)
    except (OSError, ValueError, IndexError):
        return None


class MemoryWarnings:
    """Logs one line each time that the use of memory rises above `WARN_SHARE` of a limit."""

    def __init__(self, read: Callable[[], list[MemoryLimit]] = memory_limits) -> None:
        self._read = read
        self._is_above = False

    def look(self) -> None:
        """Read the limits, and warn at a crossing."""
        nearest = max(self._read(), key=lambda limit: limit.share, default=None)
        if nearest is None:
            return
        if nearest.share >= WARN_SHARE and not self._is_above:
            log.warning(
                "memory: %.0f MiB of the %.0f MiB of %s are in use; at the limit the kernel ends "
                "processes without a word. Give it more memory, or fewer rows: see docs/operate.md",
                nearest.used_bytes / 2**20,
                nearest.limit_bytes / 2**20,
                nearest.of,
            )
            self._is_above = True
        elif nearest.share < CALM_SHARE:
            self._is_above = False


_watchers = threading.Semaphore()  # one thread a process


@contextmanager
def warning_of_memory(
    read: Callable[[], list[MemoryLimit]] = memory_limits, every_seconds: float = 1.0
) -> Iterator[None]:
    """Warn within, as `MemoryWarnings` does, from a thread that looks each second.

    A process has one such thread, and of several ranks of a machine the first alone.
    """
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if not is_first or not _watchers.acquire(blocking=False):
        yield
        return
    ended = threading.Event()
    warnings = MemoryWarnings(read)

    def watch() -> None:
        while not ended.wait(every_seconds):
            warnings.look()

    thread = threading.Thread(target=watch, name="hotbed-memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _watchers.release()
