# SPDX-License-Identifier: Apache-2.0
"""Preparations under stress: a file of five times the memory, and kills at random moments."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pytest

import hotbed as hb
from hotbed.errors import DataError

pytestmark = pytest.mark.soak

MEMORY = 1000 * 10**6
BLOCK_ROWS = 200_000


def events(block: int, rows: int) -> pa.Table:
    """Clicks of many users; some words and numbers are missing."""
    draw = np.random.default_rng([3, block])
    numbers = np.round(draw.lognormal(1.0, 1.5, rows), 3)
    columns: dict[str, Any] = {
        "clicked": (draw.random(rows) < 0.2).astype(np.int8),
        "time": 1_600_000_000 + block * BLOCK_ROWS + np.arange(rows),
        "user": draw.integers(0, 200_000, rows),
        "item": np.floor(np.exp(draw.random(rows) * 13)).astype(np.int64),
        "price": pa.array(numbers, mask=draw.random(rows) < 0.1),
    }
    for number in range(6):
        ranks = np.floor(np.exp(draw.random(rows) * (4 + 1.5 * number))).astype(np.int64)
        words = pa.array(ranks * 7_919 + number).cast(pa.string())
        columns[f"word{number}"] = pa.compute.binary_join_element_wise(words, "-word", "")
    return pa.table(columns)


def write_csv(path: Path, rows: int, num_bytes: int | None = None) -> None:
    """Write a file of about `num_bytes`, or of `rows` rows."""
    block = 0
    with path.open("wb") as file:
        while file.tell() < (num_bytes or 1):
            options = pacsv.WriteOptions(include_header=block == 0)
            pacsv.write_csv(events(block, rows), file, options)
            block += 1


def job(path: str, output: Path, memory: int) -> dict[str, Any]:
    """Return a preparation that uses every kind of stage."""
    encode = {"kind": "target_encode", "label": "clicked"}
    group = {"kind": "join_groupby", "column": "price"}
    fill = {"kind": "fill_missing", "value": 0.0}
    columns: list[dict[str, Any]] = [
        {"kind": "label", "name": "clicked"},
        {"kind": "time", "name": "time", "unit": "s"},
        {"kind": "id", "name": "user", "transforms": [{"kind": "map"}]},
        {"kind": "id", "name": "item", "transforms": [{"kind": "map", "min_count": 2}]},
        {
            "kind": "dense",
            "name": "price",
            "transforms": [fill, {"kind": "log"}, {"kind": "normalize"}],
        },
        {"kind": "dense", "name": "user_rate", "column": "user", "transforms": [encode]},
        {
            "kind": "dense",
            "name": "item_rate",
            "column": "item",
            "transforms": [encode | {"ordered_by": "time"}],
        },
        {"kind": "dense", "name": "item_price", "column": "item", "transforms": [group, fill]},
        {"kind": "dense", "name": "since_last", "transforms": [fill]},
        {"kind": "id", "name": "history", "transforms": [{"kind": "map"}], "pooling": "mean"},
    ]
    for number in range(6):
        words = [{"kind": "map", "min_count": 2}]
        columns.append({"kind": "id", "name": f"word{number}", "transforms": words})
    by_user = {"by": "user", "time": "time"}
    return {
        "source": {"kind": "csv", "path": path},
        "schema": {"columns": columns},
        "derive": [
            {"kind": "time_difference", "name": "since_last", **by_user},
            {"kind": "previous", "name": "history", "column": "item", "length": 5, **by_user},
        ],
        "split": {"kind": "by_time", "valid": 0.1},
        "memory": memory,
        "output": str(output),
    }


def start(spec: dict[str, Any], *options: str) -> subprocess.Popen[bytes]:
    path = Path(spec["output"]).with_suffix(".json")
    path.write_text(json.dumps(spec))
    command = [sys.executable, "-m", "hotbed.cli", "prepare", str(path), "--workers", "2"]
    return subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, start_new_session=True)


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder; of the workflow, without the output's name."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes().replace(str(folder).encode(), b"OUTPUT")
            if path.name == "workflow.json":  # its seal covers the output's name
                values = json.loads(data)
                del values["digest"]
                data = json.dumps(values).encode()
            found[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return found


def test_preparation_stays_within_a_fifth_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    write_csv(path, BLOCK_ROWS, 5 * MEMORY)
    process = start(job(str(path), tmp_path / "prepared", MEMORY))
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    peak = usage.ru_maxrss * 1024
    print(f"{path.stat().st_size / 1e9:.2f} GB prepared in {peak / 1e9:.2f} GB")
    assert peak <= MEMORY


def test_killed_preparation_is_not_accepted_and_a_rerun_gives_the_same_files(
    tmp_path: Path,
) -> None:
    for number in range(3):
        write_csv(tmp_path / f"events{number}.csv", 20_000)
    spec = job(str(tmp_path / "events*.csv"), tmp_path / "whole", MEMORY)
    begin = time.monotonic()
    assert start(spec).wait() == 0
    seconds = time.monotonic() - begin
    expected = digests(tmp_path / "whole")
    output = tmp_path / "prepared"
    spec["output"] = str(output)
    choose = random.Random(11)
    killed = 0
    for _ in range(25):
        process = start(spec)
        time.sleep(choose.uniform(0.2, 1.0) * seconds)
        process.send_signal(signal.SIGKILL)
        if process.wait() == -signal.SIGKILL and not output.exists():
            killed += 1
            for folder in (output, output.with_name("prepared.partial")):
                with pytest.raises(DataError):
                    hb.sources.Prepared(folder).schema()
            continue
        assert digests(output) == expected
        output.rename(output.with_name(f"prepared{time.time_ns()}"))
    assert killed >= 10
    assert start(spec).wait() == 0
    assert digests(output) == expected
