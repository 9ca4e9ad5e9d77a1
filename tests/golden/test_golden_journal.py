# SPDX-License-Identifier: Apache-2.0
"""A journal of 0.1.0, written once and kept: later builds resume a stream from it to the same rows.

`journal_1` holds a followed directory in which b.csv came before a.csv, the journal and the dead
letters of a run that read it, and the batches of that run with their positions. The second and the
last batch were cut early, because no row came for `flush_seconds`; one row of a.csv is bad.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hotbed as hb
from hotbed.connectors import DeadLetters, Journal, Live

HERE = Path(__file__).parent / "journal_1"
RUN: dict[str, Any] = json.loads((HERE / "batches.json").read_text())
SCHEMA = hb.Schema([hb.Label("label"), hb.Id("row")])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HERE, tmp_path / "run"))


def rows_after(folder: Path, position: Any) -> Iterator[list[int]]:
    """Yield the rows of each batch until the stream has nothing new."""
    live = Live(Journal(folder / "journal"), DeadLetters(folder / "dead_letters.jsonl"))
    live = replace(live, tick_seconds=0.01)
    source = hb.sources.Follow(folder / "incoming")
    dataset = hb.Dataset(source, SCHEMA, 4, prefetch=0, flush_seconds=1000, on_error="skip")
    dataset.live = live
    if position is not None:
        dataset.resume(position)
    for batch in dataset.stream():
        if batch is None:
            break
        yield batch.ids["row"].values.tolist()
    live.journal.close()


@pytest.mark.parametrize("number", range(len(RUN["batches"]) + 1))
def test_a_stream_resumes_from_the_journal_of_0_1_0(folder: Path, number: int) -> None:
    position = RUN["positions"][number - 1] if number else None
    assert list(rows_after(folder, position)) == RUN["batches"][number:]


def test_reading_a_journal_of_0_1_0_changes_nothing(folder: Path) -> None:
    list(rows_after(folder, None))
    for name in ("journal", "dead_letters.jsonl"):
        assert (folder / name).read_bytes() == (HERE / name).read_bytes()


def test_a_journal_of_0_1_0_is_written_on_in_its_own_format(folder: Path) -> None:
    lines = (HERE / "journal").read_bytes().splitlines(keepends=True)
    journal = Journal(folder / "journal")
    assert journal.get("evict", 3) == {"now": 1_700_000_007_000_000}
    assert (journal.last("block"), journal.last("cut")) == (2, 16)
    journal.forget({"block": 2, "cut": 17, "evict": 4})
    assert (folder / "journal").read_bytes() == lines[4]
    journal.append("cut", 17, {})
    journal.close()
    assert (folder / "journal").read_bytes() == lines[4] + b'33469c93 ["cut",17,{}]\n'
