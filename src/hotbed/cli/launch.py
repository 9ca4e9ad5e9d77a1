# SPDX-License-Identifier: Apache-2.0
"""Run a command on several processes of this machine, and say why it failed.

The first rank starts as soon as this process has read the command: torch's launcher would import
torch in a process of its own before that.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

from hotbed.errors import ConfigError, HotbedError, MissingExtra, RankLost

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable: the file that a launcher, torchrun too, reads the error of a rank from."""
LAUNCHER = "HOTBED_LAUNCHER"
"""Environment variable: the process that started this one as a rank by `--ranks`."""
HOST = "localhost"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The launcher passes them on to the ranks; the second one ends the ranks at once."""
GRACE_SECONDS = 10.0
"""How long the others may take to end after a rank has failed."""
PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class RankFailure:
    """The error that ended all ranks: of which rank, and the exit code to leave with.

    `rank` is None where it does not matter: Hotbed raised the error, mostly on every rank; or a
    signal ended the launcher.
    """

    rank: int | None
    message: str
    exit_code: int


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    Attributes:
        exit_code: as of `subprocess`: below 0 is the signal that ended it.
        recorded: what `record` wrote; None = it ended without.
    """

    exit_code: int
    recorded: Mapping[str, Any] | None = None

    @property
    def order(self) -> int:
        """How likely it follows from the end of another rank: 0 = it has a reason of its own."""
        if self.recorded is not None:
            return 2 if self.recorded["lost"] else 0
        return 3 if self.exit_code == -signal.SIGTERM else 1  # the launcher ends the others by it


def launch(arguments: Sequence[str], ranks: int) -> RankFailure | None:
    """Run `hotbed` with `arguments` on `ranks` processes to their end; return why they failed.

    The first error ends all of them. Signals are passed on. Each process has one thread of torch
    unless OMP_NUM_THREADS says otherwise.

    Raises:
        ConfigError: this process is one of several ranks itself.
        MissingExtra: torch is not installed.
    """
    if util.find_spec("torch") is None:
        raise MissingExtra(
            f"--ranks: torch connects the processes, got --ranks {ranks} without torch. Run pip "
            "install hotbed[train]."
        )
    if ERROR_FILE in os.environ:
        raise ConfigError(
            f"--ranks: this process is one of several already, got --ranks {ranks} under torchrun. "
            "Leave --ranks out, or torchrun."
        )
    with (
        tempfile.TemporaryDirectory(prefix="hotbed-ranks-") as folder,
        _reserved_port() as port,
        _collected_signals() as signals,
        _RankProcesses() as processes,
    ):
        for rank in range(ranks):
            processes.start(arguments, _environment(rank, ranks, port, folder))
        ends = processes.wait(signals)
        failures = {
            rank: RankEnd(code, _read_error(_error_file(folder, rank)))
            for rank, code in ends.items()
            if code
        }
    if not failures:
        return None  # also after a signal: of a stream, all ranks have saved it
    if signals and min(end.order for end in failures.values()) > 0:
        first = signals[0]
        return RankFailure(None, f"{first.name}: all {ranks} ranks were ended", 128 + first)
    return first_failure(failures)


def _environment(rank: int, ranks: int, port: int, folder: str) -> dict[str, str]:
    """Return the environment of a rank, with the variables that torchrun sets."""
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        ERROR_FILE: str(_error_file(folder, rank)),
        LAUNCHER: str(os.getpid()),
    }


def _error_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"{rank}.json"


@contextmanager
def _reserved_port() -> Iterator[int]:
    """Yield a port that the first rank can listen at, and that nobody else gets meanwhile."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((HOST, 0))
        yield reserved.getsockname()[1]


@contextmanager
def _collected_signals() -> Iterator[list[signal.Signals]]:
    """Yield a list that gets the signals that would end this process, instead of their effect."""
    collected: list[signal.Signals] = []

    def collect(number: int, _: object) -> None:
        collected.append(signal.Signals(number))

    before = {
        number: signal.signal(number, collect)
        for number in SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # as below nohup
    }
    try:
        yield collected
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _RankProcesses:
    """The processes of the ranks; those that still run at the end of the `with` block are killed.

    Each is the first of a session of its own, so that Ctrl-C in a terminal reaches the launcher
    alone.
    """

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._send(signal.SIGKILL)
        for process in self._started:
            process.wait()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the next rank."""
        # -P: as in the command `hotbed`, modules are not taken from the working directory
        command = [sys.executable, "-P", "-m", "hotbed.cli", *arguments]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        self._started.append(process)

    def wait(self, signals: Sequence[signal.Signals]) -> dict[int, int]:
        """Wait until all have ended; return their exit codes by rank, in the order of their ends.

        Args:
            signals: those that came so far, to pass on.
        """
        ends: dict[int, int] = {}
        passed_on = 0
        limit = float("inf")
        while True:
            for rank, process in enumerate(self._started):
                if rank not in ends and process.poll() is not None:
                    ends[rank] = process.returncode
            if len(ends) == len(self._started):
                return ends
            if passed_on < len(signals):
                self._send(signal.SIGKILL if passed_on else signals[0])
                passed_on = len(signals)
            if limit == float("inf") and any(ends.values()):
                limit = time.monotonic() + GRACE_SECONDS
                self._send(signal.SIGTERM)
            if time.monotonic() > limit:
                self._send(signal.SIGKILL)
            time.sleep(PAUSE_SECONDS)

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to all that run, with the processes that they started."""
        for process in self._started:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)


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


def _read_error(file: Path) -> Mapping[str, Any] | None:
    """Return what `record` wrote; None where the process ended without it, or within it."""
    try:
        message: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError):
        return None
    return message


def _is_lost(error: BaseException) -> bool:
    """Return whether another rank may be gone: its error is the one to report, if it has one."""
    causes = (error, error.__cause__)
    return any(isinstance(cause, RankLost) or "gloo" in str(cause) for cause in causes)


def first_failure(failures: Mapping[int, RankEnd]) -> RankFailure:
    """Return the failure that brought about the others; `failures`: in the order of the ends."""
    # of two that signals ended, the first was not ended by the launcher
    rank = min(failures, key=lambda rank: failures[rank].order)
    failure = failures[rank]
    if failure.recorded is not None:
        whose = None if failure.recorded["deliberate"] else rank
        return RankFailure(whose, failure.recorded["message"], failure.recorded["exit_code"])
    if failure.exit_code < 0:
        ended_by = signal.Signals(-failure.exit_code).name
        message = f"the process was ended by {ended_by}{_witness(failures)}"
        return RankFailure(rank, message, 128 - failure.exit_code)
    message = f"the process ended with exit code {failure.exit_code}"
    return RankFailure(rank, message, failure.exit_code)


def _witness(failures: Mapping[int, RankEnd]) -> str:
    """Return what another rank says of one that ended without a word: was it gone, or stopped?"""
    recorded = (end.recorded for _, end in sorted(failures.items()))
    return next((f". {said['message']}" for said in recorded if said and said["lost"]), "")
