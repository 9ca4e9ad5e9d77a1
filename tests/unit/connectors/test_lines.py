# SPDX-License-Identifier: Apache-2.0
"""JSON lines and libsvm: every value as written, every bad line named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotbed import config
from hotbed.connectors import Json, Jsonl, Libsvm, ReadPlan, Skips, Source
from hotbed.connectors.messages import decode_messages
from hotbed.connectors.read_plan import BadRow
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
    monkeypatch.setattr("hotbed.connectors.text.lines.BLOCK_BYTES", 64)
    lines = [f"{i % 2} " + " ".join(f"{k}:1" for k in range(i)) for i in range(60)]
    assert [
        len(row["indices"]) for row in rows(Libsvm(write(tmp_path, "\r\n".join(lines))))
    ] == list(range(60))


def test_an_absent_file_cut_gzip_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00torn")
    with pytest.raises(DecodeError, match=r"a\.jsonl\.gz"):
        rows(Jsonl(tmp_path / "a.jsonl.gz"))


DEPTHS = {"lists": ("[", "]"), "objects": ('{"a":', "}"), "both": ('[{"a":', "}]")}


@pytest.mark.parametrize(
    ("kind", "depth", "place"),
    [
        ("lists", 101, 700),
        ("lists", 20_000, 0),
        ("lists", 1_000_000, 700),
        ("objects", 20_000, 700),
        ("both", 100, 0),
        ("both", 1_000_000, 0),
    ],
)
def test_a_row_that_is_nested_too_deeply_is_bad(
    tmp_path: Path, kind: str, depth: int, place: int
) -> None:
    """In a field that nobody reads, in the block that decides the types and in later ones."""
    opening, closing = DEPTHS[kind]
    deep = '{"a":7,"z":' + opening * depth + "1" + closing * depth + "}"
    lines = [f'{{"a":{number}}}' for number in range(1000)]
    lines.insert(place, deep)
    file = write(tmp_path, "\n".join(lines))
    plan = ReadPlan(columns=("a",))
    with pytest.raises(DecodeError, match=f"line {place + 1}: .*nested deeper than 100 levels"):
        list(Jsonl(file).read(plan=plan))
    plan = ReadPlan(columns=("a",), skips=Skips())
    batches = [batch for batch, _ in Jsonl(file).read(plan=plan)]
    assert [row["a"] for batch in batches for row in batch.to_pylist()] == list(range(1000))
    values = [line.encode() for line in lines]
    schema = Json().infer(values)
    parts, counts, errors = decode_messages(Json(), values, schema)
    assert sum(part.num_rows for part in parts) == 1000
    assert counts.count(0) == 1
    assert list(errors) == [place]


def test_rows_of_many_brackets_that_are_not_deep_are_read(tmp_path: Path) -> None:
    """Brackets in texts, and beside each other, do not count; 100 levels are read."""
    texts = ["[" * 300, "]" * 300 + "{" * 300, '\\"[' * 300, "\\\\" + "[" * 300]
    lines = [json.dumps({"t": text, "z": [[1]] * 200}) for text in texts]
    lines.append('{"t":"x","z":' + "[" * 99 + "]" * 99 + "}")
    file = write(tmp_path, "\n".join(lines))
    batches = [batch for batch, _ in Jsonl(file).read(plan=ReadPlan(columns=("t",)))]
    values = [row["t"] for batch in batches for row in batch.to_pylist()]
    assert values == [*texts, "x"]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_lines_of_comment_only_are_no_rows_and_are_counted(tmp_path: Path, line_end: str) -> None:
    lines = ["# a tool", "1 0:0.5 3:1 # 7:1", " #", "", "0 1:2", "#1 1:1", "x 1:1", "1 2:1"]
    file = write(tmp_path, line_end.join(lines))
    with pytest.raises(DecodeError, match=r"a\.txt, line 7: "):
        rows(Libsvm(file))
    aside: list[BadRow] = []
    plan = ReadPlan(skips=Skips(), aside=aside.extend)
    batches = [batch for batch, _ in Libsvm(file).read(plan=plan)]
    indices = [row["indices"] for batch in batches for row in batch.to_pylist()]
    assert indices == [[0, 3], [1], [2]]
    assert aside == [BadRow(3, b"x 1:1", 7)]
    positions = [
        position for _, position in Libsvm(write(tmp_path, line_end.join(lines[:6]))).read()
    ]
    assert str(Libsvm(file).locate(positions[-1], 1)) == f"{file}, line 5"


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a":1}\n')
    (tmp_path / "a.svm").write_bytes(b"\xef\xbb\xbf1 2:3\n")
    assert rows(Jsonl(tmp_path / "a.jsonl")) == [{"a": 1}]
    assert rows(Libsvm(tmp_path / "a.svm"))[0]["label"] == 1.0
