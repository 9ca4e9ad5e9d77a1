# SPDX-License-Identifier: Apache-2.0
"""How a process behaves that is one of several, called ranks."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

from hotbed.cli.launch import LAUNCHER, record

_PR_SET_PDEATHSIG = 1


def is_rank() -> bool:
    """Return whether a launcher started this process as one of several that work together."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return several and os.environ.get("HOTBED_INDEPENDENT_RANKS") != "1"


def is_first() -> bool:
    """Return whether this process is rank 0."""
    return os.environ.get("RANK") == "0"


def behave_as_rank() -> None:
    """Let SIGINT end this process at once, without a word: the launcher says what happened.

    On Linux, the end of the launcher of `--ranks` ends this process, too, also by SIGKILL.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it ended before that
        os.kill(os.getpid(), signal.SIGKILL)


def leave(error: Exception, exit_code: int) -> NoReturn:
    """End this rank; its launcher reports the error."""
    record(error, exit_code)
    sys.exit(exit_code)
