# SPDX-License-Identifier: Apache-2.0
"""Whatever the files hold, and wherever they are cut: the parts of a source have each row once, in
order, and each bad row is counted by one part.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.connectors import (
    Concat,
    Csv,
    Generated,
    Jsonl,
    LateLabels,
    Libsvm,
    Memory,
    Norm,
    Parquet,
    Position,
    Prepared,
    Raw,
    ReadPlan,
    Replay,
    Skips,
    Source,
)
from hotbed.connectors.prepared import WORKFLOW_FILE, sealed
from hotbed.connectors.text import delimited
from hotbed.files import digest_of

pytestmark = pytest.mark.core

Sizes = Sequence[int]
"""The number of rows of each file."""

CSV_LINES = [
    *["{0},w"] * 9,
    '{0},"two\nlines"',
    '{0},"a ""quoted"" word\r\n"',
    '{0},"never closed',
    "{0},one,field too many",
    "word,{0}",
    "",
    '{0},"' + "long " * 60 + '"',
]
JSON_LINES = [
    *['{{"a": {0}}}'] * 4,
    '{{"a": {0}}} more',
    "  ",
    '{{"a": "word {0}"}}',
    '{{"b": []}}',
]
FIRST_LABEL = 73
"""Offset of the label of the first sample in a Norm file."""
LIBSVM_LINES = [*["1 {0}:0.5 7:1"] * 4, "0", "# {0}", "2 3:4", "1 word"]


def lines(random: Random, patterns: Sequence[str], size: int) -> list[str]:
    return [random.choice(patterns).format(row) for row in range(size)]


def write_lines(file: Path, random: Random, rows: Sequence[str]) -> None:
    line_end = random.choice(["\n", "\r\n"])
    last = random.choice(["", line_end]) if len(rows) > 1 else line_end
    file.write_text(line_end.join(rows) + last, newline="")


def csv(folder: Path, sizes: Sizes, random: Random) -> Source:
    """Quoted line ends, and rows that are bad for their fields, quotes, values or length."""
    for file, size in enumerate(sizes):
        rows = ["number,word", *lines(random, CSV_LINES, size)]
        write_lines(folder / f"{file}.csv", random, rows)
    return Csv(str(folder / "*.csv"), columns={"number": "int64", "word": "string"})


def delimited_text(folder: Path, sizes: Sizes, random: Random) -> Source:
    """No header, no quotes, a long delimiter; a file that is compressed cannot be cut."""
    for file, size in enumerate(sizes):
        num_rows = size if file else size + 1
        text = "".join(f'{row}::5" disc\n' for row in range(num_rows)).encode()
        if random.random() < 0.3:
            text = gzip.compress(text)
        (folder / f"{file}.dat").write_bytes(text)
    columns = {"number": "int64", "word": "string"}
    path = str(folder / "*.dat")
    return Csv(path, delimiter="::", header=False, columns=columns, quote=None)


def jsonl(folder: Path, sizes: Sizes, random: Random) -> Source:
    for file, size in enumerate(sizes):
        rows = ['{"a": 1}', *lines(random, JSON_LINES, size)]
        write_lines(folder / f"{file}.jsonl", random, rows)
    return Jsonl(str(folder / "*.jsonl"), columns={"a": "int64"})


def libsvm(folder: Path, sizes: Sizes, random: Random) -> Source:
    for file, size in enumerate(sizes):
        write_lines(folder / f"{file}.svm", random, lines(random, LIBSVM_LINES, size))
    return Libsvm(str(folder / "*.svm"))


def parquet(folder: Path, sizes: Sizes, random: Random) -> Source:
    for file, size in enumerate(sizes):
        numbers = pa.array(range(size), random.choice([pa.int32(), pa.int64()]))
        table = pa.table({"a": numbers, "w": [f"w{row}" for row in range(size)]})
        pq.write_table(table, folder / f"{file}.parquet", row_group_size=random.randint(1, 30))
    return Parquet(str(folder / "*.parquet"))


def prepared(folder: Path, sizes: Sizes, random: Random) -> Source:
    parquet(folder, sizes, random)
    files: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.parquet")):
        size = path.stat().st_size
        files.append({"file": path.name, "bytes": size, "sha256": digest_of(str(path))})
    workflow = {"parts": {"train": {"rows": sum(sizes), "files": files}}}
    (folder / WORKFLOW_FILE).write_text(json.dumps(sealed(workflow)))
    return Prepared(str(folder))


def norm(folder: Path, sizes: Sizes, random: Random) -> Source:
    """Samples of which some have a wrong checksum."""
    for file, size in enumerate(sizes):
        path = folder / f"{file}.norm"
        bags = [list(range(random.randint(0, 3))) for _ in range(size)]
        columns = {"label": pa.array([0.0] * size), "bag": pa.array(bags, pa.list_(pa.int64()))}
        Norm(path, ["label"], ["bag"]).write(Memory(columns))
        content = bytearray(path.read_bytes())
        if size:
            content[random.choice([FIRST_LABEL, -1])] ^= random.choice([0, 1])
        path.write_bytes(content)
    return Norm(str(folder / "*.norm"), ["label"], ["bag"])


def raw(folder: Path, sizes: Sizes, random: Random) -> Source:
    layout: dict[str, Any] = {"num_dense": 2, "slots": {"pair": 2}}
    for file, size in enumerate(sizes):
        rows = [[row, -row] for row in range(size)]
        lists = pa.array(rows, pa.list_(pa.int64(), 2))
        columns = {"label": [1] * size, "dense": lists, "pair": lists}
        Raw(folder / f"{file}.raw", **layout).write(Memory(columns))
    return Raw(str(folder / "*.raw"), **layout)


def events(folder: Path, sizes: Sizes, random: Random) -> Source:
    rows = sum(sizes)
    return Memory(
        {
            "time": pa.array(range(0, rows * 1_000_000, 1_000_000), pa.int64()),
            "user": pa.array([random.randint(0, 3) for _ in range(rows)], pa.int64()),
            "kind": pa.array([random.choice(["view", "buy"]) for _ in range(rows)], pa.string()),
        }
    )


def replay(folder: Path, sizes: Sizes, random: Random) -> Source:
    sources = [events(folder, [size], random) for size in sizes]
    late = LateLabels(["user"], "kind", "view", "buy", within_seconds=5)
    return Replay(sources, "time", late=late)


def wrapped(folder: Path, sizes: Sizes, random: Random) -> Source:
    """Sources of several kinds that are joined, sorted, cut and read one after another."""
    side = Memory({"a": [1, 2, 3], "more": ["x", "y", "z"]})
    files = parquet(folder, sizes, random)
    first = files.slice(random.randint(0, 9), random.randint(0, 60)).join(side, on="a")
    other = files.sort("w").slice(0.1, 0.9).slice(1).join(side, on="a")
    return Concat([first, other, files.join(side, on="a")])


def generated(folder: Path, sizes: Sizes, random: Random) -> Source:
    return Generated(sum(sizes), dense={"d": 2}).slice(0.1, 0.9)


MAKERS = [
    csv,
    delimited_text,
    jsonl,
    libsvm,
    parquet,
    prepared,
    norm,
    raw,
    events,
    replay,
    wrapped,
    generated,
]


def rows_of(
    source: Source, position: Position | None = None, skips: Skips | None = None
) -> list[dict[str, Any]]:
    plan = ReadPlan(skips=skips or Skips())
    return [row for batch, _ in source.read(position, 7, plan) for row in batch.to_pylist()]


@pytest.mark.parametrize("maker", MAKERS)
def test_parts_have_each_row_once_and_count_each_bad_row_once(
    maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delimited, "ROW_BYTES", 200)  # so that rows of a test are too long

    @settings(max_examples=10, deadline=None)
    @given(
        st.lists(st.sampled_from([0, 1, 2, 5, 40]), min_size=1, max_size=3),
        st.integers(1, 5),
        st.randoms(use_true_random=False),
    )
    def check(sizes: list[int], count: int, random: Random) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source = maker(Path(folder), sizes, random)
            whole_skips, part_skips = Skips(), Skips()
            whole = rows_of(source, skips=whole_skips)
            parts = source.parts(count)
            contents = [rows_of(part, skips=part_skips) for part in parts]
            assert [row for content in contents for row in content] == whole
            assert part_skips.counts == whole_skips.counts
            for part, content in zip(parts, contents, strict=True):
                assert part.schema().equals(source.schema())
                done = 0
                resumed = random.randrange(len(content) + 1)
                for batch, position in part.read(None, 7, ReadPlan(skips=Skips())):
                    done += batch.num_rows
                    if done - batch.num_rows < resumed <= done:
                        assert rows_of(part, position) == content[done:]

    check()
