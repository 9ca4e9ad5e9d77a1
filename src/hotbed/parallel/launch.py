# SPDX-License-Identifier: Apache-2.0
"""Run a command on several processes of this machine by torch's launcher, and say why it failed."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from hotbed.errors import ConfigError, HotbedError, RankLost

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable: the file that the launcher reads the error of a process from."""
ENDED = ".ended"
"""Added to the name of this file: of a process that has done its work."""


@dataclass(frozen=True)
class RankFailure:
    """The error that ended all ranks: of which rank, and the exit code to leave with.

    `rank` is None where it does not matter: Hotbed raised the error, mostly on every rank; or a
    signal ended the launcher.
    """

    rank: int | None
    message: str
    exit_code: int


def launch(arguments: Sequence[str], ranks: int) -> RankFailure | None:
    """Run `hotbed` with `arguments` on `ranks` processes to their end; return why they failed.

    The first error ends all of them, and so do SIGINT and SIGTERM. Each process has one thread of
    torch unless OMP_NUM_THREADS says otherwise.

    Raises:
        ConfigError: this process is one of several ranks itself.
    """
    if ERROR_FILE in os.environ:
        raise ConfigError(
            f"--ranks: this process is one of several already, got --ranks {ranks} under torchrun. "
            "Leave --ranks out, or torchrun."
        )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # processes that are started again would meet in the store of the dead (pytorch#135712)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    logging.getLogger("torch.distributed.elastic").addHandler(logging.NullHandler())
    logging.getLogger("torch.distributed.elastic").propagate = False
    with tempfile.TemporaryDirectory(prefix="hotbed-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
        )
        # -P: as in the command `hotbed`, modules are not taken from the working directory
        command = ["-P", "-m", "hotbed.cli", *arguments]
        try:
            launch_agent(config, sys.executable, command)
        except ChildFailedError as error:
            return first_failure(error.failures)
        except SignalException as error:
            if len(list(Path(folder).rglob(f"*{ENDED}"))) == ranks:
                return None  # a stream: all ranks have saved it
            name = signal.Signals(error.sigval).name
            return RankFailure(None, f"{name}: all {ranks} ranks were ended", 128 + error.sigval)
    return None


def record(error: BaseException, exit_code: int) -> None:
    """Write the error that ends this process where its launcher reads it, else on stderr.

    An error of Hotbed is its message alone; others have their traceback.
    """
    details = {"timestamp": str(int(time.time()))}
    text = f"{type(error).__name__} {error}"
    if not isinstance(error, HotbedError) or os.environ.get("HOTBED_TRACEBACK"):
        text = "".join(traceback.format_exception(error)).rstrip()
    if ERROR_FILE not in os.environ:
        print(f"rank {os.environ.get('RANK')}: {text}", file=sys.stderr)
        return
    message = {
        "message": text,
        "deliberate": isinstance(error, HotbedError),
        "lost": _is_lost(error),
        "exit_code": exit_code,  # the launcher may end this process before it exits
        "extraInfo": details,
    }
    with open(os.environ[ERROR_FILE], "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)


def record_end() -> None:
    """Write that this process has done its work, where its launcher looks after a signal."""
    if ERROR_FILE in os.environ:
        Path(os.environ[ERROR_FILE] + ENDED).touch()


def _is_lost(error: BaseException) -> bool:
    """Return whether another rank may be gone: its error is the one to report, if it has one."""
    causes = (error, error.__cause__)
    return any(isinstance(cause, RankLost) or "gloo" in str(cause) for cause in causes)


def first_failure(failures: dict[int, ProcessFailure]) -> RankFailure:
    """Return the failure that brought about the others."""
    # the launcher lists them as it found them: of two that signals ended, the first was not its own
    rank = min(failures, key=lambda rank: _order(failures[rank]))
    failure = failures[rank]
    recorded = _recorded(failure)
    if recorded is not None:
        whose = None if recorded["deliberate"] else rank
        return RankFailure(whose, recorded["message"], recorded["exit_code"])
    if failure.exitcode < 0:
        ended_by = signal.Signals(-failure.exitcode).name
        message = f"the process was ended by {ended_by}{_witness(failures)}"
        return RankFailure(rank, message, 128 - failure.exitcode)
    return RankFailure(
        rank, f"the process ended with exit code {failure.exitcode}", failure.exitcode
    )


def _witness(failures: dict[int, ProcessFailure]) -> str:
    """Return what another rank says of one that ended without a word: was it gone, or stopped?"""
    every = [_recorded(failure) for _, failure in sorted(failures.items())]
    lost = [recorded for recorded in every if recorded is not None and recorded["lost"]]
    return f". {lost[0]['message']}" if lost else ""


def _recorded(failure: ProcessFailure) -> dict[str, Any] | None:
    """Return what `record` wrote; None where the process ended without it."""
    message: Any = failure.error_file_data["message"]
    return message if isinstance(message, dict) else None


def _order(failure: ProcessFailure) -> int:
    """Return how likely a failure follows from another one: 0 = it has a reason of its own."""
    recorded = _recorded(failure)
    if recorded is not None:
        return 2 if recorded["lost"] else 0
    return 3 if failure.exitcode == -signal.SIGTERM else 1  # the launcher ends the others by it
