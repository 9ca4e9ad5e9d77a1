# SPDX-License-Identifier: Apache-2.0
"""Limits of memory are read of both versions of cgroups, and a crossing is one line in the log."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from hotbed.memory_limit import MemoryLimit, MemoryWarnings, memory_limits, warning_of_memory

MIB = 1 << 20
NO_LIMIT = {"max": "max", "limit_in_bytes": "9223372036854771712"}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def machine(lines: str) -> dict[str, str]:
    meminfo = "MemTotal:       8388608 kB\nMemAvailable:   6291456 kB\nHugePages_Total: 0\n"
    return {"proc/meminfo": meminfo, "proc/self/cgroup": lines}


def v1(folder: str, limit: str, used: int, files: int) -> dict[str, str]:
    top = f"sys/fs/cgroup/memory{folder}/memory."
    stat = f"inactive_file 7\ntotal_inactive_file {files}\n"
    return {f"{top}limit_in_bytes": limit, f"{top}usage_in_bytes": f"{used}\n", f"{top}stat": stat}


def v2(folder: str, limit: str, used: int, files: int) -> dict[str, str]:
    top = f"sys/fs/cgroup{folder}/memory."
    return {f"{top}max": limit, f"{top}current": str(used), f"{top}stat": f"inactive_file {files}"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (machine("0::/") | v2("", str(900 * MIB), 500 * MIB, 100 * MIB), (900, 400)),
        # a container of the first version sees its own cgroup as the top
        (
            machine("5:cpu,memory:/docker/ab\n1:name=systemd:/docker/ab")
            | v1("", str(900 * MIB), 500 * MIB, 100 * MIB),
            (900, 400),
        ),
        # the limit is that of a cgroup above
        (
            machine("0::/system.slice/online.service")
            | v2("/system.slice/online.service", "max", 3 * MIB, 0)
            | v2("/system.slice", str(700 * MIB), 600 * MIB, 0),
            (700, 600),
        ),
        (machine("4:memory:/a") | v1("/a", NO_LIMIT["limit_in_bytes"], MIB, 0), (8192, 2048)),
        (machine("0::/a") | v2("/a", NO_LIMIT["max"], MIB, 0), (8192, 2048)),
        (machine("0::/gone"), (8192, 2048)),
        (machine("0::/a") | v2("/a", "not a number", MIB, 0), (8192, 2048)),
    ],
)
def test_the_smallest_limit_comes_first(
    files: dict[str, str], expected: tuple[int, int], tmp_path: Path
) -> None:
    limits = memory_limits(write(tmp_path, files))
    assert (limits[0].limit_bytes // MIB, limits[0].used_bytes // MIB) == expected
    assert limits[-1] == MemoryLimit(8192 * MIB, 2048 * MIB, "this machine")
    assert len(limits) == 1 + (limits[0].of == "the container")


def test_a_system_that_says_nothing_has_no_limits(tmp_path: Path) -> None:
    assert memory_limits(tmp_path) == []
    MemoryWarnings(list).look()


def test_each_crossing_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    used = [50, 89, 90, 99, 91, 85, 92, 79, 95, 96]
    readings = iter(used)

    def read() -> list[MemoryLimit]:
        container = MemoryLimit(100 * MIB, next(readings) * MIB, "the container")
        return [container, MemoryLimit(800 * MIB, 10 * MIB, "this machine")]

    warnings = MemoryWarnings(read)
    crossings = []
    for number in used:
        warnings.look()
        if caplog.records:
            crossings.append(number)
            caplog.clear()
    assert crossings == [90, 95]


def test_the_thread_that_warns_is_one_and_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [MemoryLimit(100 * MIB, 95 * MIB, "the container")]
    with warning_of_memory(lambda: full, 0.001), warning_of_memory(lambda: full, 0.001):
        for _ in range(1000):
            if caplog.records:
                break
            time.sleep(0.01)
    (line,) = caplog.messages
    monkeypatch.setenv("LOCAL_RANK", "1")
    with warning_of_memory(lambda: full, 0.001):
        time.sleep(0.02)
    assert len(caplog.messages) == 1
    assert line.startswith("memory: 95 MiB of the 100 MiB of the container are in use")
    assert not [t for t in threading.enumerate() if t.name == "hotbed-memory"]
