# SPDX-License-Identifier: Apache-2.0
"""JSON lines and libsvm: every value as written, every bad line named."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest

from hotbed import config
from hotbed.connectors import Jsonl, Libsvm, ReadPlan, Skips, Source
from hotbed.connectors.lines import ShortLines
from hotbed.errors import ConfigError, DecodeError

pytestmark = pytest.mark.core


def write(folder: Path, text: str, name: str = "a.txt") -> Path:
    (folder / name).write_text(text, newline="")
    return folder / name


def rows(source: Source, skips: Skips | None = None) -> list[dict[str, object]]:
    return [
        row for batch, _ in source.read(plan=ReadPlan(skips=skips)) for row in batch.to_pylist()
    ]


def test_json_lists_absent_keys_and_big_ids_are_kept(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        '{"id": 9223372036854775807, "tags": ["a", "b"]}\n\n{"tags": [], "x": 1.5}\r\n{"id": -1}',
    )
    assert rows(Jsonl(file)) == [
        {"id": 2**63 - 1, "tags": ["a", "b"], "x": None},
        {"id": None, "tags": [], "x": 1.5},
        {"id": -1, "tags": None, "x": None},
    ]


def test_json_ids_above_int64_keep_their_digits(tmp_path: Path) -> None:
    file = write(tmp_path, '{"id": 18446744073709551615, "x": 1}\n{"id": 1, "x": 0.5}\n')
    assert rows(Jsonl(file)) == [{"id": 2**64 - 1, "x": 1.0}, {"id": 1, "x": 0.5}]


def test_json_types_may_be_declared_and_ids_in_lists_keep_their_digits(tmp_path: Path) -> None:
    """As for messages; without a declaration the first block decides."""
    big = 2**64 - 1
    file = write(tmp_path, f'{{"ids": [{big}, 1], "x": [[{big}]]}}\n{{"ids": [], "x": null}}\n')
    assert rows(Jsonl(file)) == [{"ids": [big, 1], "x": [[big]]}, {"ids": [], "x": None}]
    later = write(tmp_path, f'{{"ids": [{big}], "a": 1}}\n', "b.txt")
    first = write(tmp_path, '{"ids": [7]}\n', "0.txt")
    with pytest.raises(DecodeError, match=r"b\.txt, line 1: .*column 'ids' must be list<.*int64>"):
        rows(Jsonl([first, later]))
    declared = Jsonl([first, later], columns={"ids": "list<uint64>", "a": "float32"})
    assert rows(declared) == [{"ids": [7], "a": None}, {"ids": [big], "a": 1.0}]
    in_job = Jsonl("a.jsonl", columns={"ids": "list<uint64>"})
    assert config.build(config.describe(in_job), Source, "train") == in_job
    with pytest.raises(ConfigError, match=r"columns\.ids: unknown type, got 'list<int>'"):
        Jsonl(first, columns={"ids": "list<int>"})


def test_json_times_stay_text_for_the_time_role(tmp_path: Path) -> None:
    file = write(tmp_path, '{"t": "2019-10-01 00:00:00"}\n{"t": "2019-10-01 00:00:01"}\n')
    assert [row["t"] for row in rows(Jsonl(file))] == ["2019-10-01 00:00:00", "2019-10-01 00:00:01"]


@pytest.mark.parametrize("bad", ["{oops", '{"a": "text"}', "[1]", '{"a": 1} {"a": 2}'])
def test_a_bad_json_line_is_named_or_skipped(tmp_path: Path, bad: str) -> None:
    lines = [f'{{"a": {i}}}' for i in range(1000)]
    lines[700:700] = ["", bad]
    file = write(tmp_path, "\n".join(lines))
    with pytest.raises(DecodeError, match=r"a\.txt, line 702: cannot be read") as caught:
        rows(Jsonl(file))
    assert caught.value.row == 702
    skips = Skips()
    assert [row["a"] for row in rows(Jsonl(file), skips)] == list(range(1000))
    assert skips.total == 1


def test_libsvm_reads_both_kinds_of_labels_and_crlf(tmp_path: Path) -> None:
    for first, second in (("1", "0"), ("+1", "-1")):
        file = write(
            tmp_path,
            f"{first} 3:1 9000000000000000000:0.5\r\n{second} # nothing\r\n{first} 0:2\r\n",
        )
        assert rows(Libsvm(file)) == [
            {"label": 1.0, "indices": [3, 9 * 10**18], "values": [1.0, 0.5]},
            {"label": 0.0, "indices": [], "values": []},
            {"label": 1.0, "indices": [0], "values": [2.0]},
        ]


def test_libsvm_reads_numbers_as_labels_where_told(tmp_path: Path) -> None:
    file = write(tmp_path, "-2.5 1:1\n3 1:1\n")
    assert [row["label"] for row in rows(Libsvm(file, binary=False))] == [-2.5, 3.0]
    with pytest.raises(DecodeError, match=r"line 1: .*label -2\.5 is not -1, 0 or 1"):
        rows(Libsvm(file))


@pytest.mark.parametrize(
    "bad", ["1 3:1 4", "1 x:1", "1 3:y", "one 3:1", "1 3:1:1 2", "1 99999999999999999999:1"]
)
def test_a_bad_libsvm_line_is_named_or_skipped(tmp_path: Path, bad: str) -> None:
    file = write(tmp_path, "\n".join(["1 1:1", "0 2:1", bad, "1 3:1", ""]))
    with pytest.raises(DecodeError, match=r"a\.txt, line 3: "):
        rows(Libsvm(file))
    skips = Skips()
    assert [row["indices"] for row in rows(Libsvm(file), skips)] == [[1], [2], [3]]
    assert skips.total == 1


def test_lines_longer_than_a_block_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotbed.connectors.lines.BLOCK_BYTES", 64)
    lines = [f"{i % 2} " + " ".join(f"{k}:1" for k in range(i)) for i in range(60)]
    assert [
        len(row["indices"]) for row in rows(Libsvm(write(tmp_path, "\r\n".join(lines))))
    ] == list(range(60))


def test_an_absent_file_cut_gzip_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00torn")
    with pytest.raises(DecodeError, match=r"a\.jsonl\.gz"):
        rows(Jsonl(tmp_path / "a.jsonl.gz"))


def test_lines_that_are_too_long_are_replaced_wherever_reads_end() -> None:
    draw = random.Random(1)
    for _ in range(2000):
        limit = draw.choice([3, 5, 8])
        data = b"".join(
            draw.choice([b"a", b"bc", b"\n", b"defgh"]) for _ in range(draw.randint(0, 40))
        )
        places: list[int] = []

        def replace(begin: int, head: bytes, places: list[int] = places) -> bytes:
            places.append(begin)
            return b"#"

        stream = ShortLines(io.BytesIO(data), limit, replace)
        output = b"".join(iter(lambda stream=stream: stream.read(draw.choice([4, 7, 13])), b""))
        lines = data.split(b"\n")
        expected = b"\n".join(b"#" if len(line) > limit else line for line in lines)
        assert output == expected + (b"\n" if len(lines[-1]) > limit else b"")
        begins = [sum(len(line) + 1 for line in lines[:number]) for number in range(len(lines))]
        assert places == [
            begin for begin, line in zip(begins, lines, strict=True) if len(line) > limit
        ]
