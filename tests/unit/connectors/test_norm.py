# SPDX-License-Identifier: Apache-2.0
"""Norm files, put together by hand: samples, checksums, damage."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest

from hotbed import Dataset, Dense, Id, Label, Schema
from hotbed.connectors import Memory, Norm, Source, read_file_list, write_file_list
from hotbed.connectors.files import Section
from hotbed.connectors.hugectr import norm
from hotbed.connectors.read_plan import READ_ALL
from hotbed.errors import ConfigError, DataError, DecodeError, SchemaError

pytestmark = pytest.mark.core

Keys = list[list[int]]


def framed(content: bytes) -> bytes:
    """Length, content, sum of the bytes."""
    return struct.pack("<i", len(content)) + content + bytes([sum(content) % 256])


def sample(floats: list[float], slots: Keys, key: str = "I") -> bytes:
    content = struct.pack(f"<{len(floats)}f", *floats)
    for keys in slots:
        content += struct.pack(f"<i{len(keys)}{key}", len(keys), *keys)
    return content


def header(checksum: bool, count: int, labels: int = 1, dense: int = 2, slots: int = 2) -> bytes:
    return struct.pack("<8q", int(checksum), count, labels, dense, slots, 0, 0, 0)


SAMPLES = [
    ([1.0, 0.5, -2.0], [[7, 8], [2**32 - 1]]),
    ([0.0, 1.5, 3.0], [[], [5, 6, 7]]),
    ([1.0, 2.5, 4.0], [[9], []]),
]
ROWS = [
    {"label": 1.0, "dense": [0.5, -2.0], "slot_0": [7, 8], "slot_1": [2**32 - 1]},
    {"label": 0.0, "dense": [1.5, 3.0], "slot_0": [], "slot_1": [5, 6, 7]},
    {"label": 1.0, "dense": [2.5, 4.0], "slot_0": [9], "slot_1": []},
]


def checked(samples: list[bytes]) -> bytes:
    return framed(header(True, len(samples))) + b"".join(framed(one) for one in samples)


def rows(source: Source) -> list[dict[str, object]]:
    return [row for batch, _ in source.read(batch_rows=2) for row in batch.to_pylist()]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_samples_with_and_without_checksums_are_read(tmp_path: Path) -> None:
    contents = [sample(*one) for one in SAMPLES]
    with_sums = write(tmp_path / "sum", checked(contents))
    without = write(tmp_path / "none", header(False, 3) + b"".join(contents))
    assert rows(Norm(with_sums)) == rows(Norm(without)) == ROWS


def test_keys_of_eight_bytes_are_signed(tmp_path: Path) -> None:
    content = sample([1.0, 0.0, 0.0], [[-(2**63)], [2**63 - 1, 3]], key="q")
    path = write(tmp_path / "wide", checked([content]))
    row = rows(Norm(path, key_bits=64))[0]
    assert (row["slot_0"], row["slot_1"]) == ([-(2**63)], [2**63 - 1, 3])


def test_names_split_labels_from_dense_values(tmp_path: Path) -> None:
    path = write(tmp_path / "a", checked([sample(*SAMPLES[0])]))
    source = Norm(path, labels=["click", "like"], slots=["user", "item"], dense="price")
    assert rows(source) == [
        {"click": 1.0, "like": 0.5, "price": [-2.0], "user": [7, 8], "item": [2**32 - 1]}
    ]


@pytest.mark.parametrize("block_bytes", [1, 7, 100])
def test_blocks_may_end_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(norm, "BLOCK_BYTES", block_bytes)
    path = write(tmp_path / "a", checked([sample(*one) for one in SAMPLES]))
    source = Norm(path)
    assert rows(source) == ROWS
    numbers = [part.tolist() for _, part in source.read_file(Section(str(path)), 1, 2, READ_ALL)]
    assert [number for part in numbers for number in part] == [2, 3]
    write(path, path.read_bytes() + b"\0")
    with pytest.raises(DecodeError, match="1 or more bytes after the last one"):
        rows(source)


def test_compressed_files_are_read(tmp_path: Path) -> None:
    content = gzip.compress(checked([sample(*one) for one in SAMPLES]))
    assert rows(Norm(write(tmp_path / "a.gz", content))) == ROWS


def test_written_files_are_those_put_together_by_hand(tmp_path: Path) -> None:
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    names = {"labels": ["label"], "slots": ["slot_0", "slot_1"]}
    contents = [sample(*one) for one in SAMPLES]
    assert Norm(tmp_path / "sum", **names).write(Memory(columns)) == 3
    assert (tmp_path / "sum").read_bytes() == checked(contents)
    Norm(tmp_path / "none", checksum=False, **names).write(Memory(columns))
    assert (tmp_path / "none").read_bytes() == header(False, 3) + b"".join(contents)


def damaged(contents: list[bytes]) -> bytes:
    """The second sample has a flipped bit, the third one key more than its slots say."""
    data = bytearray(checked(contents[:1]))
    data[:69] = framed(header(True, 4))
    wrong = bytearray(framed(contents[1]))
    wrong[6] ^= 1
    return bytes(data + wrong + framed(contents[2] + bytes(4)) + framed(contents[2]))


def test_samples_with_a_wrong_checksum_raise_or_are_skipped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a", damaged([sample(*one) for one in SAMPLES]))
    with pytest.raises(DecodeError, match=r"sample 2 of 4.*wrong checksum") as raised:
        rows(Norm(path))
    assert raised.value.row == 2
    columns = [Label("label"), Dense("dense", width=2), Id("slot_0"), Id("slot_1")]
    dataset = Dataset(Norm(path), Schema(columns), batch_size=1, on_error="skip")
    batches = list(dataset)
    assert [batch.dense["dense"].tolist() for batch in batches] == [[[0.5, -2.0]], [[2.5, 4.0]]]
    assert dataset.skips.counts == {"checksum": 1, "length": 1}
    resumed = Dataset(Norm(path), Schema(columns), batch_size=1, on_error="skip")
    resumed.resume(batches[0].position)
    assert [batch.dense["dense"].tolist() for batch in resumed] == [[[2.5, 4.0]]]


@pytest.mark.parametrize("checksum", [True, False])
def test_torn_files_and_bytes_after_the_last_sample_are_errors(
    tmp_path: Path, checksum: bool
) -> None:
    contents = [sample(*one) for one in SAMPLES]
    whole = checked(contents) if checksum else header(False, 3) + b"".join(contents)
    for size in range(len(whole)):
        with pytest.raises(DecodeError):
            rows(Norm(write(tmp_path / "torn", whole[:size])))
    with pytest.raises(DecodeError, match="got 1 or more bytes after the last one"):
        rows(Norm(write(tmp_path / "long", whole + b"\0")))


def test_an_impossible_length_ends_the_file(tmp_path: Path) -> None:
    content = checked([sample(*SAMPLES[0])])
    broken = framed(header(True, 2)) + content[69:] + struct.pack("<i", -5) + bytes(50)
    path = write(tmp_path / "a", broken)
    with pytest.raises(DecodeError, match=r"sample 2 of 2.*impossible length"):
        rows(Norm(path))


def test_files_of_other_layouts_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a", checked([sample(*SAMPLES[0])]))
    bare = write(tmp_path / "b", header(False, 1) + sample(*SAMPLES[0]))
    with pytest.raises(SchemaError, match="expected 3 slots, got 2"):
        rows(Norm(path, slots=["a", "b", "c"]))
    with pytest.raises(SchemaError, match="expected checksum=False, got a file with checksum=True"):
        rows(Norm(path, checksum=False))
    with pytest.raises(SchemaError, match="layout differs from the first file's"):
        rows(Norm([path, bare]))
    with pytest.raises(DecodeError, match="not a Norm file, got 5 bytes"):
        rows(Norm(write(tmp_path / "c", b"12345")))
    with pytest.raises(DecodeError, match="got a header with a wrong checksum"):
        rows(Norm(write(tmp_path / "d", path.read_bytes()[:68] + b"\1")))
    with pytest.raises(ConfigError, match="two columns have one name"):
        Norm(path, slots=["dense", "a"])


def test_a_file_list_stands_for_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its paths are relative to the working folder; files that moved with it lie beside it."""
    (tmp_path / "data").mkdir()
    contents = [sample(*one) for one in SAMPLES]
    write(tmp_path / "data" / "0.data", checked(contents[:1]))
    write(tmp_path / "data" / "1.data", checked(contents[1:]))
    (tmp_path / "data" / "list.txt").write_text("2\n./data/0.data\n\nmoved/1.data\n")
    monkeypatch.chdir(tmp_path)
    assert rows(Norm("data/list.txt")) == ROWS
    write_file_list(tmp_path / "same.txt", ["data/0.data", tmp_path / "data" / "1.data"])
    assert read_file_list("same.txt") == ["data/0.data", str(tmp_path / "data" / "1.data")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with the number of its paths, got ''"),
        ("a\n", "got 'a'"),
        ("3\na\nb\n", "expected 3 paths, got 2"),
    ],
)
def test_wrong_file_lists_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        read_file_list(tmp_path / "list.txt")
