# SPDX-License-Identifier: Apache-2.0
"""A command on several processes, called ranks: how it starts them, and how each behaves."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from hotbed.errors import MissingExtra

if TYPE_CHECKING:
    from hotbed.parallel.launch import RankFailure

LAUNCHER = "HOTBED_LAUNCHER"
"""Environment variable: the process that started this one as a rank by `--ranks`."""
_PR_SET_PDEATHSIG = 1


def run(arguments: Sequence[str], ranks: int) -> RankFailure | None:
    """Run `hotbed` with `arguments` on `ranks` processes to the end; return why they failed.

    Raises:
        MissingExtra: torch, whose launcher starts them, is not installed.
    """
    try:
        from hotbed.parallel.launch import launch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra(
            f"--ranks: torch starts the processes, got --ranks {ranks} without torch. Run pip "
            "install hotbed[train]."
        ) from error
    os.environ[LAUNCHER] = str(os.getpid())
    return launch(arguments, ranks)


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


def end() -> None:
    """Say that this rank has done its work."""
    from hotbed.parallel.launch import record_end

    record_end()


def leave(error: Exception, exit_code: int) -> NoReturn:
    """End this rank; its launcher reports the error."""
    from hotbed.parallel.launch import record

    record(error, exit_code)
    sys.exit(exit_code)
