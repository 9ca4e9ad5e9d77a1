# SPDX-License-Identifier: Apache-2.0
"""Log lines of commands have a time and a level, as text or as JSON."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import warnings

import pytest

from hotbed.errors import ConfigError
from hotbed.logs import FIELDS, LineQueue, LogLines, log_lines

TEXT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR) (.+)")
PROGRAM = """
import logging, sys, warnings
from hotbed.logs import log_lines
log_lines(sys.argv[1])
logging.getLogger("hotbed").info("resuming at step %d", 7)
logging.getLogger("other").info("not shown")
warnings.warn("slow")
"""


@pytest.mark.parametrize(
    ("default", "chosen", "form"),
    [
        ("text", "", "text"),
        ("text", "json", "json"),
        ("json", "", "json"),
        ("json", "text", "text"),
    ],
)
def test_one_variable_chooses_the_form_of_every_line(default: str, chosen: str, form: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, default],
        env={**os.environ, "HOTBED_LOG": chosen},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, *_ = done.stderr.splitlines()
    if form == "json":
        lines = [json.loads(line) for line in (first, second)]
        assert [line["level"] for line in lines] == ["INFO", "WARNING"]
        assert lines[0]["message"] == "resuming at step 7"
        assert lines[0]["time"] > 1.7e9
    else:
        parts = [TEXT.fullmatch(line) for line in (first, second)]
        assert parts[0] is not None
        assert parts[1] is not None
        assert parts[0].groups() == ("INFO", "resuming at step 7")
        assert parts[1][1] == "WARNING"
    assert "slow" in second
    assert "not shown" not in done.stderr


def test_an_unknown_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTBED_LOG", "yaml")
    with pytest.raises(ConfigError, match="HOTBED_LOG: unknown form of log lines, got 'yaml'"):
        log_lines("text")


def test_a_program_with_handlers_of_its_own_keeps_them() -> None:
    show = warnings.showwarning
    before = list(logging.getLogger().handlers)  # those of the test's runner
    log_lines("text")
    assert logging.getLogger().handlers == before
    assert warnings.showwarning is show


def test_a_trace_stands_below_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise OSError("gone")
    except OSError as error:
        record = logging.LogRecord("hotbed", 40, "", 1, "lost", (), (OSError, error, None))
    LogLines(as_json=False, worker=3).handle(record)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("ERROR worker 3: lost")
    assert lines[-1] == "OSError: gone"
    LogLines(as_json=True, worker=3).handle(record)
    line = json.loads(capsys.readouterr().err)
    assert (line["worker"], line["trace"].splitlines()[-1]) == (3, "OSError: gone")


def test_fields_of_a_record_are_members_and_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("hotbed.access", 20, "", 1, "POST /", (), None)
    setattr(record, FIELDS, {"request_id": "a b=\n", "status": 200})
    LogLines(as_json=True).handle(record)
    line = json.loads(capsys.readouterr().err)
    assert (line["message"], line["request_id"], line["status"]) == ("POST /", "a b=\n", 200)
    LogLines(as_json=False).handle(record)
    assert capsys.readouterr().err.endswith(r'INFO POST / request_id="a b=\n" status=200' + "\n")


def test_lines_without_room_are_dropped_and_counted_and_the_rest_stays_in_order() -> None:
    reading, writing = os.pipe()
    queue = LineQueue(writing, lambda num_lines: f"{num_lines} dropped")
    text = "x" * 1000
    for number in range(1000):  # 1 MB, of which the pipe holds 64 KiB
        queue.put(f"{number} {text}", 200_000)
    queue.put("of another kind", 400_000)
    queue.flush()  # gives up: nobody reads
    numbers = list[int]()
    num_dropped = 0
    with os.fdopen(reading) as lines:
        while len(numbers) + num_dropped <= 1000:
            first, _, rest = lines.readline().rstrip().partition(" ")
            if rest == "dropped":
                num_dropped += int(first)
            else:
                numbers.append(1000 if first == "of" else int(first))
        queue.flush()
    os.close(writing)
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 1000  # it found room
    assert 0 < num_dropped < 1000
