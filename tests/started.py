# SPDX-License-Identifier: Apache-2.0
"""Processes that a test starts and that end with it, also where it fails.

A process that is left takes the CPU of the tests after it. A pipe that is left open raises a
ResourceWarning in whichever test is running when Python collects it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

END_SECONDS = 40
"""After which a process is killed: torchrun waits 30 seconds for a rank that stands still."""

_STARTED: list[subprocess.Popen[str]] = []


def start_process(command: Sequence[Any], **options: Any) -> subprocess.Popen[str]:
    """Start a process whose pipes carry text; `options`: of `subprocess.Popen`."""
    process = subprocess.Popen(command, text=True, **options)
    _STARTED.append(process)
    return process


def end_all() -> None:
    """End the processes that still run, and close the pipes of all."""
    while _STARTED:
        process = _STARTED.pop()
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
