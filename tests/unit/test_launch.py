# SPDX-License-Identifier: Apache-2.0
"""Several ranks end together, whatever ends one of them or their launcher; the error that brought
about the others is reported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

from hotbed.cli import launch as launching
from hotbed.cli import processes
from hotbed.cli.launch import ERROR_FILE, RankEnd, RankFailure, first_failure, launch, record
from hotbed.errors import ConfigError, DataError, RankLost

LOST = RankLost("ranks: rank 0 in step 3, exchange: the connection to another rank was lost")
WRONG = ConfigError("job.fit: wrong")


def ended(exit_code: int, error: Exception | None, file: Path) -> RankEnd:
    """The end of a rank that has recorded an error; None: it has not."""
    if error is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(ERROR_FILE, str(file))
            record(error, 1 if error is LOST else 2)
    return RankEnd(exit_code, launching._read_error(file))


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([(2, WRONG), (2, WRONG)], RankFailure(None, "ConfigError job.fit: wrong", 2)),
        ([(2, WRONG), (2, DataError("a row"))], RankFailure(None, "ConfigError job.fit: wrong", 2)),
        ([(1, LOST), (-signal.SIGTERM, WRONG)], RankFailure(None, "ConfigError job.fit: wrong", 2)),
        (
            [(-signal.SIGTERM, None), (2, WRONG), (1, LOST)],
            RankFailure(None, "ConfigError job.fit: wrong", 2),
        ),
        (
            [(1, LOST), (-signal.SIGTERM, None), (-signal.SIGKILL, None)],
            RankFailure(2, f"the process was ended by SIGKILL. RankLost {LOST}", 137),
        ),
        ([(1, LOST), (3, None)], RankFailure(1, "the process ended with exit code 3", 3)),
        ([(-signal.SIGTERM, None), (1, LOST)], RankFailure(None, f"RankLost {LOST}", 1)),
    ],
)
def test_first_failure_is_the_one_that_has_a_reason_of_its_own(
    ends: list[tuple[int, Exception | None]], expected: RankFailure, tmp_path: Path
) -> None:
    failures = {
        rank: ended(exit_code, error, tmp_path / f"{rank}.json")
        for rank, (exit_code, error) in enumerate(ends)
    }
    assert first_failure(failures) == expected


def test_of_ranks_that_a_signal_ended_the_first_that_the_launcher_found_is_named() -> None:
    failures = {rank: RankEnd(-signal.SIGTERM) for rank in (1, 0, 2)}
    expected = RankFailure(1, "the process was ended by SIGTERM", 143)
    assert first_failure(failures) == expected


def test_an_unexpected_error_of_a_rank_has_its_traceback(tmp_path: Path) -> None:
    try:
        _ = {}["absent"]
    except KeyError as error:
        end = ended(1, error, tmp_path / "error.json")
    failure = first_failure({1: end})
    assert failure.message.startswith("Traceback")
    assert failure.message.endswith("KeyError: 'absent'")


def test_a_rank_without_a_launcher_prints_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(ERROR_FILE, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert processes.is_rank()
    with pytest.raises(SystemExit, match="2"):
        processes.leave(WRONG, 2)
    assert capsys.readouterr().err == "rank 1: ConfigError job.fit: wrong\n"
    monkeypatch.setenv("HOTBED_INDEPENDENT_RANKS", "1")
    assert not processes.is_rank()


def test_ranks_start_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_FILE, "error.json")
    with pytest.raises(ConfigError, match="got --ranks 2 under torchrun"):
        launch(["train", "job.yaml"], 2)


# --- processes that are scripts of the shell ------------------------------------------------------

WAIT = "while :; do sleep 0.02; done"
"""Until a signal comes."""


@pytest.fixture
def rank_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that lets a script of the shell be the program of each rank, in a new folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launching, "GRACE_SECONDS", 0.2)

    def use(script: str) -> Path:
        program = tmp_path / "program"
        program.write_text(f"#!/bin/sh\necho $$ >pid.$RANK\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return tmp_path

    return use


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def launch_and_send(folder: Path, *signals: signal.Signals) -> RankFailure | None:
    """Launch two ranks; send these signals to this process once both have written `ready`."""

    def send() -> None:
        for number, each in enumerate(signals):
            while len(list(folder.glob(f"ready{number}.*"))) < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), each)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        return launch([], 2)
    finally:
        thread.join()
        pids = [int(file.read_text()) for file in folder.glob("pid.*")]
        assert len(pids) == 2
        assert not any(map(is_alive, pids))


def test_ranks_get_the_command_and_what_torchrun_says(rank_program: Any) -> None:
    folder = rank_program(
        'echo "$* $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR" >$RANK.said\n'
        "echo $MASTER_PORT >$RANK.port"
    )
    assert launch(["train", "a job.yaml"], 3) is None
    for rank in range(3):
        said = (folder / f"{rank}.said").read_text()
        assert said == f"-P -m hotbed.cli train a job.yaml {rank} {rank} 3 3 localhost\n"
    assert len({(folder / f"{rank}.port").read_text() for rank in range(3)}) == 1


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("exit 3", "the process ended with exit code 3"),
        ("kill -9 $$", "the process was ended by SIGKILL"),
    ],
)
@pytest.mark.parametrize("other", [WAIT, f"trap '' TERM\n{WAIT}"])
def test_the_end_of_a_rank_ends_the_others(
    script: str, expected: str, other: str, rank_program: Any
) -> None:
    folder = rank_program(f"if [ $RANK = 1 ]; then {script}; fi\n{other}")
    failure = launch([], 2)
    assert failure is not None
    assert (failure.rank, failure.message) == (1, expected)
    assert not is_alive(int((folder / "pid.0").read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_ranks_with_its_exit_code(
    number: signal.Signals, rank_program: Any
) -> None:
    name = number.name.removeprefix("SIG")
    folder = rank_program(f"trap 'trap - {name}; kill -{name} $$' {name}\n>ready0.$RANK\n{WAIT}")
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)
    try:
        failure = launch_and_send(folder, number)
        assert signal.getsignal(number) == usual
    finally:
        signal.signal(number, before)
    assert failure == RankFailure(None, f"{number.name}: all 2 ranks were ended", 128 + number)


def test_ctrl_c_ends_ranks_where_a_shell_has_let_it_be_ignored(rank_program: Any) -> None:
    """As it does for a command with `&` in a script."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        failure = launch_and_send(rank_program(f">ready0.$RANK\n{WAIT}"), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert failure == RankFailure(None, "SIGINT: all 2 ranks were ended", 130)


def test_ranks_that_end_well_after_a_signal_have_done_their_work(rank_program: Any) -> None:
    """As those of a stream do, which may need longer than the grace of other ranks."""
    folder = rank_program(f"trap 'sleep 0.4; exit 0' TERM\n>ready0.$RANK\n{WAIT}")
    assert launch_and_send(folder, signal.SIGTERM) is None


def test_a_second_signal_ends_ranks_at_once(rank_program: Any) -> None:
    folder = rank_program(f"trap '>ready1.$RANK' TERM\n>ready0.$RANK\n{WAIT}")
    failure = launch_and_send(folder, signal.SIGTERM, signal.SIGINT)
    assert failure == RankFailure(None, "SIGTERM: all 2 ranks were ended", 143)


def test_an_error_after_a_signal_is_reported(rank_program: Any) -> None:
    error = (
        '{"message": {"message": "a full disk", "deliberate": true, "lost": false, "exit_code": 2}}'
    )
    end = f"echo '{error}' >$TORCHELASTIC_ERROR_FILE; exit 2"
    folder = rank_program(f"end() {{\n{end}\n}}\ntrap end TERM\n>ready0.$RANK\n{WAIT}")
    assert launch_and_send(folder, signal.SIGTERM) == RankFailure(None, "a full disk", 2)


def test_a_launcher_imports_little() -> None:
    """A rank starts after what its launcher has imported."""
    code = """
import sys
from hotbed.cli import commands
commands.launch = lambda arguments, ranks: print(arguments, ranks)
sys.argv = ["hotbed", "train", "job.yaml", "--ranks", "2", "--set", "fit.epochs=2"]
try:
    commands.main()
finally:
    print([name for name in ("torch", "polars", "pyarrow", "numpy") if name in sys.modules])
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout == "['train', 'job.yaml', '--set=fit.epochs=2'] 2\n[]\n", printed.stderr


def test_sigint_ends_a_rank_whatever_its_imports_have_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import of Polars takes SIGINT, below Python."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    code = """
import os, signal
from hotbed.cli import commands
commands.app = lambda: os.kill(os.getpid(), signal.SIGINT)
commands.main()
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGINT
