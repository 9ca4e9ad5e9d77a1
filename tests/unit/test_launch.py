# SPDX-License-Identifier: Apache-2.0
"""Of the errors that end several ranks, the one that brought about the others is reported."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch absent")

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hotbed.cli import processes
from hotbed.errors import ConfigError, DataError, RankLost
from hotbed.parallel.launch import ERROR_FILE, RankFailure, first_failure, launch, record

LOST = RankLost("ranks: rank 0 in step 3, exchange: the connection to another rank was lost")
WRONG = ConfigError("job.fit: wrong")


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
    ends: list[tuple[int, Exception | None]],
    expected: RankFailure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = {}
    for rank, (exit_code, error) in enumerate(ends):
        file = tmp_path / f"{rank}.json"
        monkeypatch.setenv(ERROR_FILE, str(file))
        if error is not None:
            record(error, 1 if error is LOST else 2)
        failures[rank] = ProcessFailure(rank, 1000 + rank, exit_code, str(file))
    assert first_failure(failures) == expected


def test_of_ranks_that_a_signal_ended_the_first_that_the_launcher_found_is_named() -> None:
    failures = {rank: ProcessFailure(rank, 1000 + rank, -signal.SIGTERM, "") for rank in (1, 0, 2)}
    expected = RankFailure(1, "the process was ended by SIGTERM", 143)
    assert first_failure(failures) == expected


def test_an_unexpected_error_of_a_rank_has_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    try:
        _ = {}["absent"]
    except KeyError as error:
        record(error, 1)
    failure = first_failure({1: ProcessFailure(1, 1000, 1, str(tmp_path / "error.json"))})
    assert failure.message.startswith("Traceback")
    assert failure.message.endswith("KeyError: 'absent'")


def test_a_rank_without_torchs_launcher_prints_its_error(
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
