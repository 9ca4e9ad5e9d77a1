# SPDX-License-Identifier: Apache-2.0
"""The journal: what it took stays, what a crash tore is cut off, what else is damaged is named."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from hotbed.connectors import DeadLetters, Journal
from hotbed.errors import FormatError, PersistError

pytestmark = pytest.mark.core


def entries(journal: Journal) -> dict[str, list[tuple[int, dict[str, object]]]]:
    return {topic: list(journal.after(topic, -1)) for topic in ("block", "cut")}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal file with three entries."""
    journal = Journal(tmp_path / "run" / "journal")
    journal.append("block", 0, {"take": {"0": 5}, "now": 7})
    journal.append("cut", 3, {})
    journal.append("block", 2, {"take": {"0": 9}, "now": 8})
    journal.close()
    return tmp_path / "run" / "journal"


def test_what_was_appended_is_read_again(path: Path) -> None:
    journal = Journal(path)
    assert journal.get("block", 0) == {"take": {"0": 5}, "now": 7}
    assert journal.get("block", 1) is None
    assert journal.last("block") == 2
    assert journal.last("evict") == -1
    assert [number for number, _ in journal.after("block", 0)] == [2]
    assert list(journal.after("cut", 3)) == []


def test_a_decision_on_record_stands(path: Path) -> None:
    journal = Journal(path)
    for number in (0, 1, 2):
        with pytest.raises(PersistError, match="this decision was recorded before"):
            journal.append("block", number, {})
    journal.append("block", 3, {})


def test_what_memory_keeps_is_what_a_file_would_give() -> None:
    journal, value = Journal(), {"take": {1: (2, 3)}}
    journal.append("block", 0, value)
    assert journal.get("block", 0) == {"take": {"1": [2, 3]}}


@pytest.mark.parametrize("torn", range(1, 60))
def test_a_torn_last_line_is_cut_off_at_any_byte(path: Path, torn: int) -> None:
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    if torn >= len(whole) - last:
        return
    path.write_bytes(whole[: last + torn])
    journal = Journal(path)
    assert journal.last("block") == 0
    journal.append("block", 1, {"now": 9})
    journal.close()
    assert entries(Journal(path))["block"] == [(0, {"take": {"0": 5}, "now": 7}), (1, {"now": 9})]


def test_a_last_line_of_zeros_or_wrong_bytes_is_cut_off(path: Path) -> None:
    whole = path.read_bytes()
    for tail in (b"\0" * 300, b"12345678 [1, 2]\n"):
        path.write_bytes(whole + tail)
        journal = Journal(path)
        assert journal.last("block") == 2
        journal.close()
        assert path.read_bytes() == whole


@pytest.mark.parametrize("content", ["hello", "hello\n", "12 of my notes", '{"place": 1}'])
def test_file_of_others_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    for kind in (Journal, DeadLetters):
        (tmp_path / "notes").write_text(content)
        with pytest.raises(FormatError, match=r"notes.*: not (a|dead)"):
            kind(tmp_path / "notes")
        assert (tmp_path / "notes").read_text() == content


@pytest.mark.parametrize("place", [0, 12, 30])
def test_damage_before_the_last_line_is_named(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(FormatError, match=r"journal, line 1: its digest does not match"):
        Journal(path)


def test_a_bad_line_before_a_torn_one_is_damage_not_a_crash(path: Path) -> None:
    data = path.read_bytes()
    last = data.rindex(b"\n", 0, -1) + 1
    path.write_bytes(data[:last] + b"0" + data[last + 1 :] + data[:20])
    with pytest.raises(FormatError, match="journal, line 3"):
        Journal(path)


def test_two_writers_of_one_file_are_refused_until_the_first_is_done(path: Path) -> None:
    first = Journal(path)
    with pytest.raises(PersistError, match=f"{path}: another run writes this journal"):
        Journal(path)
    first.forget({"block": 1})  # the file is another one now, the lock is not
    with pytest.raises(PersistError, match="another run"):
        Journal(path)
    first.close()
    assert Journal(path).last("block") == 2


def test_a_killed_writer_gives_the_file_back(path: Path) -> None:
    code = (
        "import os, signal, sys; from hotbed.connectors import Journal\n"
        "j = Journal(sys.argv[1]); j.append('block', 3, {}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=os.environ, check=False)
    assert done.returncode == -9
    assert Journal(path).last("block") == 3


def test_forgetting_drops_what_lies_before_and_survives(path: Path) -> None:
    journal = Journal(path)
    size = path.stat().st_size
    journal.forget({"block": 0})
    assert path.stat().st_size == size
    journal.forget({"block": 1, "evict": 100})
    journal.append("block", 5, {})
    journal.close()
    assert path.stat().st_size < size
    assert entries(Journal(path)) == {
        "block": [(2, {"take": {"0": 9}, "now": 8}), (5, {})],
        "cut": [(3, {})],
    }


def test_a_journal_in_memory_is_bounded() -> None:
    journal = Journal(most_entries=10)
    for number in range(25):
        journal.append("block", number, {})
    assert [number for number, _ in journal.after("block", -1)] == list(range(15, 25))


def test_a_full_disk_is_an_error_and_leaves_whole_lines(path: Path) -> None:
    """A limit on the size of files stands for a full disk."""
    code = (
        "import resource, signal, sys; from hotbed.connectors import Journal; from hotbed.errors "
        "import PersistError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "j = Journal(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))\n"
        "try:\n    j.append('block', 3, {'long': 'x' * 100})\n"
        "except PersistError as error:\n    print(error)\n"
        "j.append('block', 3, {})"
    )
    limit = str(path.stat().st_size + 40)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), limit], capture_output=True, text=True, check=False
    )
    assert "journal: cannot be written" in done.stdout, done.stderr
    assert Journal(path).get("block", 3) == {}


@pytest.mark.parametrize("num_free", [0, 1, 2, 3])
def test_a_journal_that_finds_no_free_file_descriptor_stays_whole(
    path: Path, num_free: int
) -> None:
    """Neither its old file nor a file of others takes what is appended later."""
    journal = Journal(path)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as opened:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, limits[1]))
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        others = []
        with contextlib.suppress(OSError):
            while True:
                others.append(opened.enter_context(open(os.devnull, "wb")))
        for other in others[len(others) - num_free :]:
            other.close()
        if num_free < 2:
            with pytest.raises(PersistError, match="Too many open files"):
                journal.forget({"block": 2})
        else:
            journal.forget({"block": 2})
    before = entries(journal)["block"]
    another = path.with_name("another file")
    with open(another, "wb"):
        journal.append("block", 3, {"take": {"0": 1}})
    journal.close()
    assert another.read_bytes() == b""
    again = Journal(path)
    assert entries(again)["block"] == [*before, (3, {"take": {"0": 1}})]
    again.close()


def test_journal_that_cannot_be_read_is_an_error_and_gives_the_lock_back(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.mkdir()
    with pytest.raises(FormatError, match=r"journal: the journal cannot be read, got .* Correct"):
        Journal(path)
    path.rmdir()
    Journal(path).close()


def test_two_threads_may_append_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    topics = ("block", "cut", "evict")
    work = [
        threading.Thread(target=lambda t=t: [journal.append(t, n, {}) for n in range(50)])
        for t in topics
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    journal.close()
    again = Journal(tmp_path / "journal")
    assert [again.last(topic) for topic in topics] == [49] * 3


def test_dead_letters_are_written_once_with_their_place_also_after_a_crash(tmp_path: Path) -> None:
    file = tmp_path / "dead.jsonl"
    letters = DeadLetters(file)
    letters.add({"topic": "t", "offset": 1}, "undecodable", b"{")
    letters.add({"topic": "t", "offset": 1}, "undecodable", b"{")
    letters.add({"topic": "t", "offset": 2}, "future", b"\xff\x00")
    file.write_bytes(file.read_bytes() + b'{"place": {"topic"')  # a crash
    again = DeadLetters(file)
    assert again.counts == {"undecodable": 1, "future": 1}
    again.add({"offset": 2, "topic": "t"}, "future", b"\xff\x00")
    again.add({"topic": "t", "offset": 3}, "future", "später")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["place"]["offset"] for line in lines] == [1, 2, 3]
    assert lines[0]["payload"] == "{"
    assert lines[1]["payload_base64"] == "/wA="
    assert again.total == 3


def test_dead_letters_beyond_their_bytes_are_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "dead.jsonl"
    letters = DeadLetters(file, max_bytes=1000)
    letters.add_all([({"offset": offset}, "undecodable", b"x" * 100) for offset in range(20)])
    letters.add({"offset": 20}, "undecodable", b"x" * 500)
    letters.add({"offset": 21}, "undecodable", b"x" * 500)
    offsets = [json.loads(line)["place"]["offset"] for line in file.read_text().splitlines()]
    assert offsets == list(range(len(offsets)))  # the first ones, without a gap
    assert 800 < letters.num_bytes <= 1000
    assert letters.total == 22
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "1000 bytes are reached, further dead letters are counted and not" in line.message
    file.rename(tmp_path / "away.jsonl")
    letters.add({"offset": 22}, "undecodable", b"x")
    assert json.loads(file.read_text())["place"]["offset"] == 22
    assert DeadLetters(file).total == 1
    assert DeadLetters(tmp_path / "away.jsonl", max_bytes=10).total == len(offsets)


def test_a_foreign_file_of_dead_letters_is_named(tmp_path: Path) -> None:
    (tmp_path / "dead.jsonl").write_text("hello\n")
    with pytest.raises(FormatError, match=r"dead.jsonl, line 1: not a dead letter"):
        DeadLetters(tmp_path / "dead.jsonl")


def test_a_decision_is_taken_once_recorded_and_then_repeated(tmp_path: Path) -> None:
    first = Journal(tmp_path / "journal")
    assert first.decide("evict", 3, lambda: None) is None
    assert first.decide("evict", 3, lambda: {"now": 1}) == {"now": 1}
    first.close()
    again = Journal(tmp_path / "journal")
    propose = Mock(return_value={"now": 2})
    assert again.decide("evict", 2, propose) is None  # nothing was decided there
    assert again.decide("evict", 3, propose) == {"now": 1}
    propose.assert_not_called()
    assert again.decide("evict", 4, propose) == {"now": 2} == again.get("evict", 4)
    again.close()
