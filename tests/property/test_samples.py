# SPDX-License-Identifier: Apache-2.0
"""Norm and Raw files of any layout against bytes that `struct` packs, one value after the other."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotbed.connectors import Memory, Norm, Raw, Source

pytestmark = pytest.mark.core

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
KEYS = {32: st.integers(0, 2**32 - 1), 64: st.integers(-(2**63), 2**63 - 1)}
CODES = {32: "I", 64: "q"}
Row = dict[str, Any]


def rows(source: Source, batch_rows: int, position: Any = None) -> list[Row]:
    batches = source.read(position, batch_rows)
    return [row for batch, _ in batches for row in batch.to_pylist()]


def framed(content: bytes, checksum: bool) -> bytes:
    if not checksum:
        return content
    return struct.pack("<i", len(content)) + content + bytes([sum(content) % 256])


def values_of(row: Row) -> list[list[Any]]:
    return [value if isinstance(value, list) else [value] for value in row.values()]


@st.composite
def norm_files(draw: st.DrawFn) -> tuple[Norm, list[Row], bytes]:
    checksum, key_bits = draw(st.booleans()), draw(st.sampled_from([32, 64]))
    labels = [f"l{i}" for i in range(draw(st.integers(0, 2)))]
    num_dense = draw(st.integers(0 if labels else 1, 3))
    slots = [f"s{i}" for i in range(draw(st.integers(1, 3)))]
    made = []
    content = framed(b"", False)
    for _ in range(draw(st.integers(1, 6))):
        row: Row = {name: draw(FLOATS) for name in labels}
        if num_dense:
            row["dense"] = draw(st.lists(FLOATS, min_size=num_dense, max_size=num_dense))
        body = b"".join(struct.pack("<f", v) for part in values_of(row) for v in part)
        for name in slots:
            row[name] = draw(st.lists(KEYS[key_bits], max_size=4))
            body += struct.pack(f"<i{len(row[name])}{CODES[key_bits]}", len(row[name]), *row[name])
        made.append(row)
        content += framed(body, checksum)
    dims = (int(checksum), len(made), len(labels), num_dense, len(slots), 0, 0, 0)
    header = framed(struct.pack("<8q", *dims), checksum)
    return Norm("", labels, slots, key_bits=key_bits, checksum=checksum), made, header + content


@st.composite
def raw_files(draw: st.DrawFn) -> tuple[Raw, list[Row], bytes]:
    key_bits = draw(st.sampled_from([32, 64]))
    kinds = [draw(st.sampled_from(["int32", "float32"])) for _ in range(2)]
    widths = {"l0": 1, "dense": draw(st.integers(0, 3))}
    slots = {f"s{i}": draw(st.integers(1, 3)) for i in range(draw(st.integers(0, 3)))}
    numbers = {"int32": st.integers(-(2**31), 2**31 - 1), "float32": FLOATS}
    columns = [("l0", 1, numbers[kinds[0]], kinds[0][0])]
    if widths["dense"]:
        columns.append(("dense", widths["dense"], numbers[kinds[1]], kinds[1][0]))
    columns += [(name, count, KEYS[key_bits], CODES[key_bits]) for name, count in slots.items()]
    made, content = [], b""
    for _ in range(draw(st.integers(1, 6))):
        row: Row = {}
        for name, width, strategy, code in columns:
            values = draw(st.lists(strategy, min_size=width, max_size=width))
            content += struct.pack(f"<{width}{code}", *values)
            row[name] = values if width > 1 or name == "dense" else values[0]
        made.append(row)
    return Raw("", ["l0"], widths["dense"], slots, *kinds, key_bits), made, content


@pytest.mark.parametrize("files", [norm_files(), raw_files()], ids=["norm", "raw"])
def test_files_hold_what_struct_packs(tmp_path: Path, files: Any) -> None:
    path = str(tmp_path / "a")

    @settings(suppress_health_check=list(HealthCheck))
    @given(files, st.integers(1, 7))
    def check(drawn: tuple[Norm | Raw, list[Row], bytes], batch_rows: int) -> None:
        layout, made, content = drawn
        source = type(layout)(**{**vars(layout), "path": path})
        Path(path).write_bytes(content)
        assert rows(source, batch_rows) == made
        for number, (_, position) in enumerate(source.read(batch_rows=1), start=1):
            assert rows(source, batch_rows, position) == made[number:]
        source.write(Memory({name: [row[name] for row in made] for name in made[0]}))
        assert Path(path).read_bytes() == content

    check()
