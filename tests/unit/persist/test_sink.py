# SPDX-License-Identifier: Apache-2.0
"""Files that are written in pieces: every byte and its hash, whatever the file system has, and a
save that stands back.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed.persist.container import sink
from hotbed.persist.state.checkpoint import State, capture, save, write


@pytest.mark.parametrize(
    "has", ["all", "no direct writes", "direct writes of other units", "writes that are cut short"]
)
def test_a_file_holds_what_was_written_whatever_the_file_system_has(
    tmp_path: Path, monkeypatch: Any, has: str
) -> None:
    real_fcntl, real_writev, direct = fcntl.fcntl, os.writev, list[bool]()

    def control(handle: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT and has == "no direct writes":
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_fcntl(handle, command, flags)

    def write(handle: int, buffers: list[memoryview]) -> int:
        direct.append(bool(real_fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT))
        if direct[-1] and has == "direct writes of other units":
            raise OSError(errno.EINVAL, "Invalid argument")
        if has == "writes that are cut short":
            buffers = [buffers[0][: 1 + len(buffers[0]) // 3]]
        return real_writev(handle, buffers)

    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "writev", write)
    data = np.random.default_rng(0).bytes(2 * sink.PIECE_BYTES + 12_345)
    workers = sink.SaveThreads()
    raw = sink.LocalFile(tmp_path / "file")
    with sink.HashedFile(raw, workers, raw.finish) as file:
        for at in range(0, len(data), 777_777):
            file.write(data[at : at + 777_777])
    assert file.result() == (len(data), hashlib.sha256(data).hexdigest())
    assert (tmp_path / "file").read_bytes() == data
    workers.close()
    expected = {
        "all": [True, True, False],
        "no direct writes": [False] * 3,
        "direct writes of other units": [True, False, True, False, False],
    }
    if has in expected:
        assert direct == expected[has]
    else:
        assert len(direct) > 30


def test_memory_of_pieces_is_used_again_and_what_was_lost_is_told(
    tmp_path: Path, monkeypatch: Any
) -> None:
    workers, made = sink.SaveThreads(), list[int]()
    real = sink.mmap.mmap
    monkeypatch.setattr(sink.mmap, "mmap", lambda *size: made.append(1) or real(*size))
    raw = sink.LocalFile(tmp_path / "file")
    with sink.HashedFile(raw, workers, raw.finish) as file:
        for number in range(30):
            file.write(bytes([number]) * sink.PIECE_BYTES)
    assert file.result()[0] == 30 * sink.PIECE_BYTES
    assert len(made) == sink._MAX_PIECES
    written = np.fromfile(tmp_path / "file", np.uint8).reshape(30, -1)
    assert (written == np.arange(30)[:, None]).all()

    def full(handle: int, buffers: list[memoryview]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    raw = sink.LocalFile(tmp_path / "other")
    with sink.HashedFile(raw, workers, raw.finish) as file:
        file.write(b"small")
    with pytest.raises(OSError, match="No space left"):
        file.result()
    with pytest.raises(OSError, match="No space left"):
        workers.settle()
    workers.close()


def test_a_save_stands_back_while_other_threads_work_and_only_then(monkeypatch: Any) -> None:
    slept: list[float] = []
    # the save was at work while the clocks were read
    clocks = [sink.Clocks(0.0, 0.0, 0.0, 0.01)]
    monkeypatch.setattr(sink.time, "sleep", slept.append)
    monkeypatch.setattr(sink.SaveThreads, "_clocks", lambda self: clocks[-1])
    workers = sink.SaveThreads()
    clocks.append(sink.Clocks(0.02, 0.03, 0.02, 0.03))  # all that ran was the save
    workers.pace()
    assert not slept
    clocks.append(sink.Clocks(0.04, 0.07, 0.03, 0.07))  # another thread had a processor to itself
    workers.pace()
    assert slept == [pytest.approx(sink.BACKGROUND * 0.01)]  # as many times what the piece cost
    workers.close()


def test_a_save_looks_after_each_piece_whether_to_stand_back_unless_training_waits_for_it(
    tmp_path: Path, monkeypatch: Any
) -> None:
    looked: list[bool] = []
    monkeypatch.setattr(sink.SaveThreads, "pace", lambda self: looked.append(self.stands_back))
    table = hb.Table("t", 16)
    table.find_or_insert(np.arange(100_000))
    state = State(tables={"t": table})
    saved = write(tmp_path, capture(state))
    assert looked == [True] * len(looked)
    assert len(looked) >= saved.bytes // (2 * sink.PIECE_BYTES)
    looked.clear()
    save(tmp_path, state)
    assert looked == [False] * len(looked)
    assert looked


def test_a_save_that_training_waits_for_does_not_stand_back(monkeypatch: Any) -> None:
    workers = sink.SaveThreads()
    workers.stands_back = False
    monkeypatch.setattr(sink.time, "sleep", lambda seconds: pytest.fail("it paused"))
    clocks = sink.Clocks(1e9, 1e9, 0.0, 1e9)  # other threads had all processors to themselves
    monkeypatch.setattr(sink.SaveThreads, "_clocks", lambda self: clocks)
    workers.pace()
    workers.close()
